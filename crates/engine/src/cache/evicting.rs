//! A KV cache whose tokens an eviction policy chooses: its decisions, carried out on real slots.
//!
//! Each layer's cache is allocated once, at the policy's capacity. The prompt is computed in another one, a layer at a time,
//! of which only what the policy keeps goes over; while decoding, slots are overwritten.

mod decode;
mod prompt;

use std::sync::Arc;

use refrain_eviction::{AttentionNeeds, Budget, Eviction, PromptSpans, TokenScorer};
use refrain_kernels::{Device, Dtype, Floats, KvBuffer, KvRows, Rotary};
use refrain_kv::{LayerCache, MemoryMeter, RopeTables, Ropes, Shape};
use refrain_model::{Config, LayerSpec};

use super::decode_cache::{DecodeCache, DecodeToken, PromptLayer, PromptReport};

/// The caches of one request's layers.
#[derive(Debug)]
pub(crate) struct EvictingCache {
    device: Arc<dyn Device>,
    eviction: Eviction,
    /// Reports that the policy needs from attention; asked once.
    needs: AttentionNeeds,
    prompt: PromptSpans,
    /// Heads are those of the cache: KV heads, or query heads.
    shape: Shape,
    dtype: Dtype,
    /// Query heads of each.
    group: usize,
    /// Heads of the cache for each KV head.
    copies: usize,
    ropes: Ropes,
    /// Tokens of prompt and answer at most.
    room: usize,
    /// Tokens of the prompt that a method kept nothing of. Indices of kept tokens lie so far below their positions.
    left_out: u32,
    plans: Vec<Plan>,
    layers: Vec<Layer>,
    /// Positions of a prompt's slots, in every head.
    identity: Vec<u32>,
    scratch: Scratch,
}

/// The eviction to be done at a layer.
#[derive(Clone, Copy, Debug)]
struct Plan {
    budget: Budget,
    /// Slots of a head.
    capacity: usize,
    /// Whether the layer's own window bounds it, and not the policy.
    window: bool,
    /// Factor of the layer's attention logits.
    scale: f32,
}

/// One layer's cache.
#[derive(Debug)]
struct Layer {
    cache: LayerCache,
    /// Position of the token in each slot, `heads × capacity`.
    positions: Vec<u32>,
    len: usize,
    statistics: Box<dyn TokenScorer>,
    /// Keys of the first tokens as they were rotated at first, once they are turned: `sinks × heads × d`.
    sinks: Option<KvBuffer>,
    /// Positions of the prompt's places, where only a part of it is kept and the layer's own window bounds it.
    origins: Vec<u32>,
}

impl Layer {
    /// Moves a head's token from one slot to another, with all that is known of it.
    fn relocate(
        &mut self,
        device: &dyn Device,
        (d, capacity): (usize, usize),
        head: usize,
        from: usize,
        to: usize,
    ) {
        if from == to {
            return;
        }
        let position = self.positions[head * capacity + from];
        self.cache.move_slot(device, (d, capacity), head, from, to);
        self.statistics.moved(head, from, to, position);
        self.positions[head * capacity + to] = position;
    }
}

/// One token of a decoding step.
#[derive(Debug)]
pub(crate) struct KeptToken<'a> {
    /// Its index among the tokens that are kept of prompt and answer.
    pub(crate) position: u32,
    /// Cosines and sines of its position.
    pub(crate) rotary: Rotary<'a>,
    /// Queries before RoPE, `H·d`; they are rotated in place.
    pub(crate) q: &'a mut Floats,
    /// Key before RoPE and value, `Hkv·d` each.
    pub(crate) kv: (KvRows<'a>, KvRows<'a>),
}

#[derive(Clone, Debug)]
struct Scratch {
    scores: Vec<f32>,
    weights: Vec<f32>,
}

impl EvictingCache {
    /// Budget of a policy for a request of `room` tokens; none where it never evicts any of them: a cache that can never be pruned is full
    /// attention, to the bit.
    fn policy_budget(
        eviction: &Eviction,
        prompt: &PromptSpans,
        room: usize,
    ) -> crate::Result<Option<Budget>> {
        let budget = eviction.policy.budget(prompt)?;
        Ok(budget.filter(|budget| !budget.decoding || budget.most.saturating_add(1) < room))
    }

    /// Budget of the cache of a request of `room` tokens; none where the policy has none, heads keep no caches of their own, and the cache
    /// is not `sparse`: of a prompt of which a part is kept.
    pub(crate) fn budget(
        eviction: &Eviction,
        prompt: &PromptSpans,
        room: usize,
        sparse: bool,
    ) -> crate::Result<Option<Budget>> {
        let of_policy = EvictingCache::policy_budget(eviction, prompt, room)?;
        Ok(EvictingCache::bounded(of_policy, eviction, room, sparse))
    }

    /// The policy's budget, or where it has none and the cache needs one, a budget that holds all tokens.
    fn bounded(of_policy: Option<Budget>, eviction: &Eviction, room: usize, sparse: bool) -> Option<Budget> {
        let is_needed = eviction.per_query_head || sparse;
        of_policy.or(is_needed.then_some(Budget::once(room)))
    }

    /// The heads for which tokens are chosen, and the query heads of each.
    pub(crate) fn heads(config: &Config, eviction: &Eviction) -> (usize, usize) {
        match eviction.per_query_head {
            true => (config.heads, 1),
            false => (config.kv_heads, config.heads / config.kv_heads),
        }
    }

    /// A cache for a request of `room` tokens; none where it has no [budget](EvictingCache::budget). `prompt` and `room` count
    /// kept tokens where `left_out` tokens of the prompt are not kept.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        config: &Config,
        ropes: Ropes,
        eviction: &Eviction,
        prompt: PromptSpans,
        (dtype, room): (Dtype, usize),
        left_out: Option<usize>,
    ) -> crate::Result<Option<EvictingCache>> {
        let sparse = left_out.is_some();
        let of_policy = EvictingCache::policy_budget(eviction, &prompt, room)?;
        let evicts = of_policy.is_some();
        let Some(budget) = EvictingCache::bounded(of_policy, eviction, room, sparse) else { return Ok(None) };
        let (heads, group) = EvictingCache::heads(config, eviction);
        let shape = Shape { layers: config.num_layers(), kv_heads: heads, head_dim: config.head_dim };
        let n = prompt.len();
        let slots = if budget.decoding { budget.most + 1 } else { budget.keep.min(n) + room - n };
        let plan = |layer: &LayerSpec| match layer.window {
            // A window that the slots could hold is a bound of its own, and an exact one. One that reaches beyond them is kept by positions
            // where no policy decides what is seen.
            Some(window) if window <= slots || (sparse && !evicts) => {
                let capacity = window.min(room).min(slots);
                Plan {
                    budget: Budget::constant(window - 1),
                    capacity,
                    window: true,
                    scale: layer.attention_scale,
                }
            }
            _ => Plan { budget, capacity: slots.min(room), window: false, scale: layer.attention_scale },
        };
        let plans: Vec<Plan> = config.layers.iter().map(plan).collect();
        let most = plans.iter().map(|plan| plan.capacity).max().unwrap_or(0);
        let needs = eviction.policy.needs(&prompt, room - n);
        let reports = match needs {
            AttentionNeeds::Nothing | AttentionNeeds::PromptSums { .. } | AttentionNeeds::Queries { .. } => 0,
            AttentionNeeds::Sums | AttentionNeeds::NoisySums { .. } | AttentionNeeds::RowWeights { .. } => {
                heads * most
            }
        };
        let scratch = Scratch {
            scores: vec![0.0; if plans.iter().any(|plan| plan.budget.decoding) { most } else { 0 }],
            weights: vec![0.0; reports],
        };
        Ok(Some(EvictingCache {
            device: device.clone(),
            eviction: eviction.clone(),
            needs,
            prompt,
            shape,
            dtype,
            group,
            copies: heads / config.kv_heads,
            ropes,
            room,
            left_out: left_out.unwrap_or(0) as u32,
            plans,
            layers: Vec::new(),
            identity: (0..heads).flat_map(|_| 0..n as u32).collect(),
            scratch,
        }))
    }
}

impl DecodeCache for EvictingCache {
    fn prompt_capacity(&self) -> usize {
        self.prompt.len()
    }

    fn wanted_report(&self, layer: usize) -> PromptReport {
        match self.watches(layer).sums_beside_attention() {
            None => PromptReport::Nothing,
            Some(seed) if !self.eviction.per_query_head => PromptReport::Mass { seed: of_layer(seed, layer) },
            Some(None) => PromptReport::LogSumExps,
            Some(Some(_)) => PromptReport::Nothing,
        }
    }

    fn observe_prompt(&mut self, layer: usize, prompt: &PromptLayer<'_>, meter: &MemoryMeter) {
        self.take_prompt(layer, prompt, meter);
    }

    fn store_prompt(&mut self, _layer: usize, whole: LayerCache) -> Option<LayerCache> {
        Some(whole)
    }

    fn rotary(&self, position: u32, tables: &mut RopeTables) {
        // A table of all positions would end with the prompt: an answer may be long.
        self.ropes.fill([position], tables);
    }

    fn append_and_attend(&mut self, layer: usize, token: DecodeToken<'_>) {
        let DecodeToken { decoder, position, rotary, q, kv, out } = token;
        let token = KeptToken { position: position - self.left_out, rotary, q, kv };
        self.attend(decoder.precision(), layer, token, out);
    }

    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn retained(&self) -> usize {
        self.layers.iter().map(|layer| layer.len).max().unwrap_or(0)
    }

    fn kv_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.cache.bytes()).sum()
    }

    fn kv_bytes_held(&self) -> usize {
        let token = 2 * self.shape.width() * self.dtype.size();
        self.layers.iter().map(|layer| layer.len * token).sum()
    }

    fn side_bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            let sinks = layer.sinks.as_ref().map_or(0, KvBuffer::bytes);
            layer.statistics.bytes() + size_of_val(layer.positions.as_slice()) + sinks
        };
        let Scratch { scores, weights } = &self.scratch;
        let scratch = size_of_val(scores.as_slice()) + size_of_val(weights.as_slice());
        self.layers.iter().map(layer).sum::<usize>() + scratch
    }

    fn fork(&self) -> Box<dyn DecodeCache> {
        let layer = |(layer, plan): (&Layer, &Plan)| {
            let slots: Vec<u32> = (0..layer.len as u32).collect();
            Layer {
                cache: layer.cache.clone(),
                positions: layer.positions.clone(),
                len: layer.len,
                statistics: layer.statistics.gather(&slots.repeat(self.shape.kv_heads), plan.capacity),
                sinks: layer.sinks.clone(),
                origins: layer.origins.clone(),
            }
        };
        Box::new(EvictingCache {
            device: self.device.clone(),
            eviction: self.eviction.clone(),
            needs: self.needs,
            prompt: self.prompt,
            shape: self.shape,
            dtype: self.dtype,
            group: self.group,
            copies: self.copies,
            ropes: self.ropes.clone(),
            room: self.room,
            left_out: self.left_out,
            plans: self.plans.clone(),
            layers: self.layers.iter().zip(&self.plans).map(layer).collect(),
            identity: self.identity.clone(),
            scratch: self.scratch.clone(),
        })
    }

    #[cfg(test)]
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[cfg(test)]
impl EvictingCache {
    /// Positions of a head's tokens at a layer.
    pub(crate) fn positions(&self, layer: usize, head: usize) -> &[u32] {
        &self.layers[layer].positions[head * self.plans[layer].capacity..][..self.layers[layer].len]
    }

    /// A head's keys at a layer, `len × d`.
    pub(crate) fn keys(&self, layer: usize, head: usize) -> Vec<f32> {
        let (d, at) = (self.shape.head_dim, head * self.plans[layer].capacity * self.shape.head_dim);
        let Layer { cache, len, .. } = &self.layers[layer];
        self.device.download_kv(&cache.k, at..at + len * d).as_slice().floats()
    }
}

/// Noise of one layer is not that of another.
fn of_layer(seed: Option<u64>, layer: usize) -> Option<u64> {
    seed.map(|seed| seed ^ (layer as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
