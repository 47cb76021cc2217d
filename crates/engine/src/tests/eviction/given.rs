//! Given queries, keys and values, and the cache of a policy after a prompt of them.

use std::sync::Arc;

use refrain_eviction::{Eviction, PromptSpans};
use refrain_kernels::{Buffer, CachedAttention, Device, Dtype, GumbelNoise, Precision, upload};
use refrain_kv::{LayerCache, MemoryMeter, Rope, Ropes, Span};
use refrain_model::{Config, LayerSpec, ModelFiles};

use crate::cache::{DecodeCache, EvictingCache, PromptLayer, PromptReport};
use crate::tests::tiny;

/// Queries, keys and values, the same at every layer; nothing is rotated.
pub(super) struct Given {
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Tokens of the prompt.
    pub(super) n: usize,
    /// Tokens of its system part and of its question.
    pub(super) system: usize,
    pub(super) question: usize,
    /// Rows of the prompt that are computed, ascending.
    pub(super) computed: Vec<u32>,
    /// Whether the policy observes the prompt after its attention, which reports what the policy wants.
    pub(super) attends_first: bool,
    pub(super) dtype: Dtype,
    /// `tokens × H × d`
    pub(super) q: Vec<f32>,
    /// `Hkv × n × d`
    pub(super) k: Vec<f32>,
    /// `Hkv × n × d`
    pub(super) v: Vec<f32>,
}

impl Given {
    fn config(&self) -> Config {
        let Given { heads, kv_heads, head_dim, .. } = *self;
        let tiny = ModelFiles::open(tiny("llama")).unwrap().config().clone();
        let attention_scale = (head_dim as f32).sqrt().recip();
        let layers = vec![LayerSpec { window: None, attention_scale, ..tiny.layers[0].clone() }; self.layers];
        Config { layers, heads, kv_heads, head_dim, ..tiny }
    }

    /// The cache after the prompt, with room for `room` tokens.
    pub(super) fn prefilled(
        &self,
        device: &Arc<dyn Device>,
        eviction: &Eviction,
        room: usize,
    ) -> crate::Result<EvictingCache> {
        let Given { heads, kv_heads, head_dim, n, dtype, .. } = *self;
        let config = self.config();
        let prompt =
            PromptSpans { system: Span::new(0, self.system), question: Span::new(n - self.question, n) };
        let ropes = Ropes::shared(Rope::new(vec![0.0; head_dim / 2], 1.0), self.layers);
        let mut bounded =
            EvictingCache::new(device, &config, ropes, eviction, prompt, (dtype, room), None)?.unwrap();
        let stored = |values: &[f32]| {
            let mut buffer = Buffer::zeros(dtype, values.len());
            buffer.write_f32(0, values);
            device.upload_kv(buffer.as_slice())
        };
        let cache = LayerCache { k: stored(&self.k), v: stored(&self.v) };
        let visible: Vec<(u32, u32)> = self.computed.iter().map(|row| (0, row + 1)).collect();
        let width = heads * head_dim;
        let queries = self.computed.iter().flat_map(|row| &self.q[*row as usize * width..][..width]);
        let q = upload(&**device, &queries.copied().collect::<Vec<f32>>());
        let attention = CachedAttention {
            q: &q,
            first_row: 0,
            k: &cache.k,
            v: &cache.v,
            heads,
            kv_heads,
            head_dim,
            capacity: n,
            visible: &visible,
            scale: config.layers[0].attention_scale,
            precision: Precision::F32,
        };
        for layer in 0..self.layers {
            let (mut lse, mut mass) = (device.floats(0), vec![0.0; kv_heads * n]);
            let beside = match bounded.wanted_report(layer) {
                PromptReport::Mass { seed } if self.attends_first => {
                    let query_positions = &self.computed;
                    let noise = GumbelNoise { seed, temperature: 1.0, query_positions, key_positions: None };
                    let (noise, mut out) = (seed.map(|_| &noise), device.floats(q.len()));
                    device.attention_with_mass(&attention, &mut out, &mut lse, noise, &mut mass);
                    true
                }
                _ => false,
            };
            let prompt = PromptLayer {
                whole: &cache,
                q: &q,
                first_row: 0,
                rows: &self.computed,
                visible: &visible,
                origins: None,
                precision: Precision::F32,
                lse: beside.then_some(&lse),
                mass: beside.then_some(&mass),
            };
            bounded.observe_prompt(layer, &prompt, &MemoryMeter::default());
        }
        Ok(bounded)
    }
}
