//! Compression of the prompt: the tokens of each layer that go over to the evicting cache.

use refrain_eviction::{
    AttentionNeeds, AttentionReport, CachedKeys, LayerView, RecencyScorer, Sizes, TokenScorer,
};
use refrain_kernels::{CachedAttention, GumbelNoise};
use refrain_kv::{LayerCache, MemoryMeter, Shape, survivors};

use super::{EvictingCache, Layer, Plan, PromptLayer, of_layer};

/// Rows of weights that are held at once while a prompt is observed.
const ROWS: usize = 32;

impl EvictingCache {
    /// Copies the tokens of the prompt that stay at `layer`. `meter` counts the copies.
    pub(super) fn take_prompt(&mut self, layer: usize, prompt: &PromptLayer<'_>, meter: &MemoryMeter) {
        assert_eq!(layer, self.layers.len(), "layers of a prompt come in order");
        let (device, cache) = (&*self.device, prompt.whole);
        let Plan { budget, capacity, window, scale } = self.plans[layer];
        let (n, heads, d) = (self.prompt.len(), self.shape.kv_heads, self.shape.head_dim);
        let expanded =
            self.eviction.per_query_head.then(|| cache.gather(device, d, n, &self.identity, self.copies, n));
        let _expanded = meter.hold(expanded.as_ref().map_or(0, LayerCache::bytes));
        let whole = expanded.as_ref().unwrap_or(cache);
        let view = LayerView {
            heads,
            group: self.group,
            head_dim: d,
            scale,
            capacity: n,
            len: n,
            positions: &self.identity,
            keys: CachedKeys::new(device, &whole.k),
            next: n as u32,
        };
        let mut statistics = self.statistics(window, n);
        let prunes = n > budget.most;
        if !window && (prunes || self.watches(layer) != AttentionNeeds::Nothing) {
            self.observe_prompt(layer, (&view, whole), prompt, statistics.as_mut());
        }
        let mut kept = Vec::new();
        if prunes {
            let mut scores = vec![0.0; n];
            for head in 0..heads {
                statistics.score(&view, head, &mut scores);
                kept.extend(survivors(&scores, view.head(head), budget.keep));
            }
        } else {
            kept.extend_from_slice(&self.identity);
        }
        let len = kept.len() / heads;
        let mut positions = vec![0; heads * capacity];
        for (positions, kept) in positions.chunks_exact_mut(capacity).zip(kept.chunks_exact(len.max(1))) {
            positions[..len].copy_from_slice(kept);
        }
        let cache = whole.gather(device, d, n, &kept, 1, capacity);
        meter.add(cache.bytes());
        let statistics = statistics.gather(&kept, capacity);
        let origins = prompt.origins.filter(|_| window).map(<[u32]>::to_vec).unwrap_or_default();
        self.layers.push(Layer { cache, positions, len, statistics, sinks: None, origins });
        if self.layers.len() == self.plans.len() {
            self.identity = Vec::new();
        }
    }

    fn statistics(&self, window: bool, capacity: usize) -> Box<dyn TokenScorer> {
        if window {
            return Box::new(RecencyScorer::default());
        }
        let Shape { kv_heads: heads, head_dim, .. } = self.shape;
        let sizes = Sizes { heads, group: self.group, head_dim, capacity, rows: self.room };
        self.eviction.policy.scorer(&self.prompt, sizes)
    }

    /// Gives a policy what it asks of the prompt's computed rows.
    fn observe_prompt(
        &self,
        layer: usize,
        (view, whole): (&LayerView<'_>, &LayerCache),
        prompt: &PromptLayer<'_>,
        statistics: &mut dyn TokenScorer,
    ) {
        let n = self.prompt.len();
        let PromptLayer { rows: positions, visible, q, first_row, .. } = *prompt;
        let device = &*self.device;
        let observation = self.needs;
        let sums_all = matches!(observation, AttentionNeeds::Sums | AttentionNeeds::NoisySums { .. });
        let rows = match observation {
            AttentionNeeds::Nothing => return,
            AttentionNeeds::Sums | AttentionNeeds::NoisySums { .. } => n,
            AttentionNeeds::PromptSums { rows }
            | AttentionNeeds::RowWeights { rows }
            | AttentionNeeds::Queries { rows } => rows,
        };
        // Those of the prompt's end that were computed.
        let first = positions.partition_point(|p| (*p as usize) + rows < n);
        let each = match observation {
            AttentionNeeds::RowWeights { .. } => ROWS,
            _ => positions.len().max(1),
        };
        let width = view.heads * view.group * view.head_dim;
        let (mut weights, mut queries) = (Vec::new(), Vec::new());
        for from in (first..positions.len()).step_by(each) {
            let to = (from + each).min(positions.len());
            // Values are not read. Sums over all rows have the precision of attention.
            let attention = CachedAttention {
                q,
                first_row: first_row + from,
                k: &whole.k,
                v: &whole.k,
                heads: view.heads * view.group,
                kv_heads: view.heads,
                head_dim: view.head_dim,
                capacity: view.capacity,
                visible: &visible[from..to],
                scale: view.scale,
                precision: if sums_all {
                    prompt.precision
                } else {
                    device.weights_precision(prompt.precision)
                },
            };
            let rows = &positions[from..to];
            match observation {
                AttentionNeeds::RowWeights { .. } => {
                    weights.resize(view.heads * rows.len() * n, 0.0);
                    device.row_weights(&attention, 0..n, &mut weights);
                }
                AttentionNeeds::NoisySums { seed, tau } if prompt.lse.is_none() => {
                    weights.resize(view.heads * n, 0.0);
                    let noise = GumbelNoise {
                        seed: of_layer(seed, layer),
                        temperature: tau.at(0),
                        query_positions: rows,
                        key_positions: None,
                    };
                    device.noisy_attention_mass(&attention, 0..n, &noise, &mut weights);
                }
                AttentionNeeds::Queries { .. } => {
                    queries.resize(rows.len() * width, 0.0);
                    device.download(q, (first_row + from) * width, &mut queries);
                }
                _ => {
                    weights.resize(view.heads * n, 0.0);
                    match (prompt.mass, prompt.lse) {
                        (Some(mass), _) => weights.copy_from_slice(mass),
                        (None, Some(lse)) => {
                            device.attention_mass_from_lse(&attention, lse, 0..n, &mut weights);
                        }
                        (None, None) => device.attention_mass(&attention, 0..n, &mut weights),
                    }
                }
            }
            let seen: Vec<u32> = visible[from..to].iter().map(|(from, to)| to - from).collect();
            statistics
                .observe(&AttentionReport { rows, seen: &seen, weights: &weights, queries: &queries }, view);
        }
    }
}
