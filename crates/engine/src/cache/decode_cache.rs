//! Interface between a prefill, a decoding step and the KV cache that an answer is decoded in.

use std::fmt::Debug;

use refrain_kernels::{Device, Dtype, Floats, KvRows, Precision, Rotary};
use refrain_kv::{KvBufferPool, KvCache, LayerCache, MemoryMeter, RopeTables};
use refrain_model::Decoder;

/// A KV cache that takes a prompt layer by layer, and then one token at a time.
pub(crate) trait DecodeCache: Debug + Send {
    /// Slots of a head in the cache that each layer of the prompt is computed in.
    fn prompt_capacity(&self) -> usize;

    /// The report that the attention of the prompt's rows makes at a layer. The cache looks at a layer with a report after its attention, if
    /// all rows attend.
    fn wanted_report(&self, _layer: usize) -> PromptReport {
        PromptReport::Nothing
    }

    /// Looks at the prompt's keys and values of a layer, all of them in place. Layers come in ascending order.
    fn observe_prompt(&mut self, _layer: usize, _prompt: &PromptLayer<'_>, _meter: &MemoryMeter) {}

    /// Takes over the prompt's keys and values of a layer after its attention. Memory that is not kept comes back.
    fn store_prompt(&mut self, layer: usize, whole: LayerCache) -> Option<LayerCache>;

    /// Makes `tables` the cosines and sines of `position`.
    fn rotary(&self, position: u32, tables: &mut RopeTables);

    /// Appends one token's key and value at a layer and computes its attention over all that the cache holds then.
    fn append_and_attend(&mut self, layer: usize, token: DecodeToken<'_>);

    /// Type of keys and values.
    fn dtype(&self) -> Dtype;

    /// Tokens that each head's cache holds, of the layer that holds most.
    fn retained(&self) -> usize;

    /// Bytes allocated for keys and values.
    fn kv_bytes(&self) -> usize;

    /// Bytes that the tokens held take.
    fn kv_bytes_held(&self) -> usize;

    /// Bytes allocated beside keys and values.
    fn side_bytes(&self) -> usize {
        0
    }

    /// Keys and values of all tokens, slot = position; none where the cache holds a part of them, or more beside them.
    fn whole(&self) -> Option<&KvCache> {
        None
    }

    /// Whether the last tokens can be taken back. A cache that has evicted others for them cannot.
    fn takes_back(&self) -> bool {
        false
    }

    /// Goes back to the first `len` tokens.
    fn take_back(&mut self, _len: usize) {}

    /// A copy that goes on from the same tokens.
    fn fork(&self) -> Box<dyn DecodeCache>;

    /// Leaves memory to the next request.
    fn release(&mut self, _pool: &KvBufferPool) {}

    /// The implementation, for tests that look into it.
    #[cfg(test)]
    fn as_any(&self) -> &dyn std::any::Any;
}

/// One layer of a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromptLayer<'a> {
    /// Keys and values of the prompt's tokens that are kept, slot = index among them.
    pub(crate) whole: &'a LayerCache,
    /// Rotated queries, of which those from `first_row` on are of computed tokens, `rows × H × d`.
    pub(crate) q: &'a Floats,
    pub(crate) first_row: usize,
    /// Indices of these among the tokens that are kept of the prompt, ascending.
    pub(crate) rows: &'a [u32],
    /// Half-open range of slots that each of them sees.
    pub(crate) visible: &'a [(u32, u32)],
    /// Positions of the kept tokens, where these are a part of the prompt.
    pub(crate) origins: Option<&'a [u32]>,
    /// Precision of the layer's attention.
    pub(crate) precision: Precision,
    /// Log-sum-exps of all rows of `q`, `rows × H`, where the layer's attention has been computed.
    pub(crate) lse: Option<&'a Floats>,
    /// Attention mass that all rows have given to each slot of the prompt, `Hkv × slots`, where it was summed beside attention; with
    /// the noise of [`PromptReport::Mass`].
    pub(crate) mass: Option<&'a [f32]>,
}

/// A report that attention makes beside the values of a prompt's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PromptReport {
    Nothing,
    /// [`PromptLayer::lse`].
    LogSumExps,
    /// [`PromptLayer::mass`], of scores with noise of this seed if there is one.
    Mass {
        seed: Option<u64>,
    },
}

/// One projected token of a decoding step.
#[derive(Debug)]
pub(crate) struct DecodeToken<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) position: u32,
    /// Cosines and sines of its position at the layer.
    pub(crate) rotary: Rotary<'a>,
    /// Its queries before RoPE, `H·d`; they are rotated in place.
    pub(crate) q: &'a mut Floats,
    /// Its key before RoPE and its value, `Hkv·d` each.
    pub(crate) kv: (KvRows<'a>, KvRows<'a>),
    /// Its attention output, of the length of `q`.
    pub(crate) out: &'a mut Floats,
}

impl DecodeToken<'_> {
    pub(crate) fn device(&self) -> &dyn Device {
        &**self.decoder.device()
    }
}
