//! Decoding in an evicting cache: room is made, a token is appended, and the policy observes its attention.

use refrain_eviction::{AttentionNeeds, AttentionReport, CachedKeys, LayerView};
use refrain_kernels::{
    CacheHeads, CachedAttention, Floats, GumbelNoise, KvBuffer, KvRows, Precision, Rotary, download,
};
use refrain_kv::survivors;

use super::{EvictingCache, KeptToken, Layer, Plan, of_layer};

impl EvictingCache {
    /// Makes room, rotates the token's queries and places its key and value, attends into `out`, which has the length of the queries, and lets
    /// the policy observe.
    pub(crate) fn attend(
        &mut self,
        precision: Precision,
        layer: usize,
        token: KeptToken<'_>,
        out: &mut Floats,
    ) {
        let KeptToken { position, rotary, q, kv } = token;
        let (plan, heads, d) = (self.plans[layer], self.shape.kv_heads, self.shape.head_dim);
        self.leave_window(layer, position);
        if plan.budget.decoding && self.layers[layer].len > plan.budget.most {
            self.prune(layer, position);
        }
        let slot = self.layers[layer].len;
        self.place(layer, (&mut *q, kv), rotary);
        let held = &mut self.layers[layer];
        held.positions.iter_mut().skip(slot).step_by(plan.capacity).for_each(|p| *p = position);
        held.len = slot + 1;
        self.turn_sinks(layer, position);
        let (watches, Layer { cache, len, .. }) = (self.watches(layer), &self.layers[layer]);
        let visible = [(0, *len as u32)];
        let device = &*self.device;
        let attention = CachedAttention {
            q,
            first_row: 0,
            k: &cache.k,
            v: &cache.v,
            heads: heads * self.group,
            kv_heads: heads,
            head_dim: d,
            capacity: plan.capacity,
            visible: &visible,
            scale: plan.scale,
            precision,
        };
        match watches {
            AttentionNeeds::Sums | AttentionNeeds::RowWeights { .. } => {
                let weights = &mut self.scratch.weights[..heads * len];
                device.attention_with_weights(&attention, out, weights);
            }
            _ => device.attention(&attention, out, None),
        }
        if let AttentionNeeds::NoisySums { seed, tau } = watches {
            let step = position as usize + 1 - self.prompt.len();
            let (seed, tau) = (of_layer(seed, layer), tau.at(step));
            let noise = GumbelNoise {
                seed,
                temperature: tau,
                query_positions: &[position],
                key_positions: Some(&self.layers[layer].positions),
            };
            let weights = &mut self.scratch.weights[..heads * len];
            device.noisy_attention_mass(&attention, 0..*len, &noise, weights);
        }
        if watches != AttentionNeeds::Nothing {
            self.observe(layer, position, q);
        }
    }

    /// Drops what the layer's own window does not reach from the token at place `next`, where places are not positions: of a
    /// prompt of which only a part is kept.
    fn leave_window(&mut self, layer: usize, next: u32) {
        let (Plan { budget, capacity, window, .. }, d) = (self.plans[layer], self.shape.head_dim);
        let held = &mut self.layers[layer];
        if !window || held.origins.is_empty() {
            return;
        }
        let n = held.origins.len() as u32;
        let left_out = held.origins[held.origins.len() - 1] + 1 - n;
        let position = |place: u32| held.origins.get(place as usize).copied().unwrap_or(place + left_out);
        let reach = budget.keep as u32;
        // Every head holds the same tokens here, in the same slots.
        let gone: Vec<usize> = (0..held.len)
            .rev()
            .filter(|slot| position(held.positions[*slot]) + reach < next + left_out)
            .collect();
        for slot in gone {
            held.len -= 1;
            for head in 0..self.shape.kv_heads {
                held.relocate(&*self.device, (d, capacity), head, held.len, slot);
            }
        }
    }

    /// Attention's report on a step at a layer.
    pub(super) fn watches(&self, layer: usize) -> AttentionNeeds {
        match self.needs {
            _ if self.plans[layer].window => AttentionNeeds::Nothing,
            AttentionNeeds::PromptSums { .. } => AttentionNeeds::Nothing,
            observation => observation,
        }
    }

    /// Tells the policy of the step at `position`: weights are those in the scratch.
    fn observe(&mut self, layer: usize, position: u32, q: &Floats) {
        let heads = self.shape.kv_heads;
        let queries = match self.needs {
            AttentionNeeds::Queries { .. } => download(&*self.device, q),
            _ => Vec::new(),
        };
        let Layer { cache, positions, len, statistics, .. } = &mut self.layers[layer];
        let view = LayerView {
            heads,
            group: self.group,
            head_dim: self.shape.head_dim,
            scale: self.plans[layer].scale,
            capacity: self.plans[layer].capacity,
            len: *len,
            positions,
            keys: CachedKeys::new(&*self.device, &cache.k),
            next: position + 1,
        };
        let weights = self.scratch.weights.get(..heads * *len).unwrap_or_default();
        statistics.observe(
            &AttentionReport { rows: &[position], seen: &[*len as u32], weights, queries: &queries },
            &view,
        );
    }

    /// Leaves what the policy keeps before the token at `next` comes. What stays moves into the slots of what goes.
    fn prune(&mut self, layer: usize, next: u32) {
        let (Plan { budget, capacity, .. }, d) = (self.plans[layer], self.shape.head_dim);
        let (device, held, keep) = (&*self.device, &mut self.layers[layer], budget.keep);
        for head in 0..self.shape.kv_heads {
            let scores = &mut self.scratch.scores[..held.len];
            let view = LayerView {
                heads: self.shape.kv_heads,
                group: self.group,
                head_dim: d,
                scale: self.plans[layer].scale,
                capacity,
                len: held.len,
                positions: &held.positions,
                keys: CachedKeys::new(device, &held.cache.k),
                next,
            };
            if held.len == keep + 1 {
                let hole = held.statistics.weakest(&view, head, scores).unwrap_or(keep);
                held.relocate(device, (d, capacity), head, keep, hole);
                continue;
            }
            held.statistics.score(&view, head, scores);
            let kept = survivors(scores, view.head(head), keep);
            let stay = kept.partition_point(|slot| (*slot as usize) < keep);
            let (stay, movers) = kept.split_at(stay);
            let holes = (0..keep as u32).filter(|slot| stay.binary_search(slot).is_err());
            for (hole, mover) in holes.zip(movers) {
                held.relocate(device, (d, capacity), head, *mover as usize, hole as usize);
            }
        }
        held.len = keep;
    }

    /// Rotates a token's queries, and places its key, rotated, and its value behind the others.
    fn place(
        &mut self,
        layer: usize,
        (q, (k, v)): (&mut Floats, (KvRows<'_>, KvRows<'_>)),
        rotary: Rotary<'_>,
    ) {
        let Layer { cache, len, .. } = &mut self.layers[layer];
        let (device, slots) = (&*self.device, [*len as u32]);
        let queries = (q, self.shape.kv_heads * self.group);
        if self.copies == 1 {
            return cache.place_with_queries(device, self.shape, queries, (k, v), rotary, &slots);
        }
        let [k, v] = [k, v].map(|rows| self.for_each_head(rows));
        let kv = (KvRows::Device(&k, 0), KvRows::Device(&v, 0));
        let cache = &mut self.layers[layer].cache;
        cache.place_with_queries(device, self.shape, queries, kv, rotary, &slots);
    }

    /// A token's key or value of each KV head, as many times as there are heads of the cache for it.
    fn for_each_head(&self, rows: KvRows<'_>) -> KvBuffer {
        let CacheHeads { kv_heads: heads, head_dim } = self.shape.heads();
        let own =
            |first: usize| (0..heads).map(|head| (first + head / self.copies) as u32).collect::<Vec<_>>();
        match rows {
            KvRows::Host(rows) => self.device.gather_kv_rows(&self.device.upload_kv(rows), head_dim, &own(0)),
            KvRows::Device(rows, token) => {
                self.device.gather_kv_rows(rows, head_dim, &own(token * heads / self.copies))
            }
        }
    }

    /// Where keys are rotated by their places in the cache, turns those of the first tokens towards the others, as far as
    /// the token at `position` is further on than its place. Attention sees differences of positions only, and among
    /// the recent tokens these are what they were.
    fn turn_sinks(&mut self, layer: usize, position: u32) {
        let Some(sinks) = self.eviction.policy.sinks().filter(|_| !self.plans[layer].window) else { return };
        let capacity = self.plans[layer].capacity;
        let Layer { cache, len, sinks: kept, .. } = &mut self.layers[layer];
        let by = position + 1 - *len as u32;
        let sinks = sinks.min(*len);
        if by == 0 || sinks == 0 {
            return;
        }
        let (heads, d) = (self.shape.kv_heads, self.shape.head_dim);
        let kept = kept.get_or_insert_with(|| {
            let mut kept = self.device.kv(self.dtype, sinks * heads * d);
            for (i, at) in (0..sinks).flat_map(|sink| (0..heads).map(move |head| (sink, head))).enumerate() {
                let from = (at.1 * capacity + at.0) * d;
                self.device.copy_kv(&cache.k, from..from + d, &mut kept, i * d);
            }
            kept
        });
        let turn = self.ropes.layer(layer).turn(by, sinks);
        let slots: Vec<u32> = (0..sinks as u32).collect();
        self.device.place(KvRows::Device(kept, 0), self.shape.heads(), turn.all(), &slots, &mut cache.k);
    }
}
