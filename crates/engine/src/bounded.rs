//! A KV cache of bounded size: what an eviction policy decides, done to real slots.
//!
//! Each layer's cache is allocated once, at the policy's capacity. The prompt is computed in another one, a layer at a time,
//! of which only what the policy keeps goes over; while decoding, slots are overwritten.

mod prompt;

use refrain_eviction::{
    AttentionNeeds, AttentionReport, Budget, Eviction, LayerView, PromptSpans, TokenScorer,
};
use refrain_kernels::{Attention, Buffer, Cpu, Dtype, GumbelNoise, Precision};
use refrain_kv::{LayerCache, RopeTables, Ropes, Shape, survivors};
use refrain_model::{Config, LayerSpec, Workspace};

pub(crate) use prompt::PromptRows;

/// The caches of one request's layers, bounded by a policy.
#[derive(Debug)]
pub(crate) struct Bounded {
    eviction: Eviction,
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
    plans: Vec<Plan>,
    layers: Vec<Layer>,
    /// Positions of a prompt's slots, in every head.
    identity: Vec<u32>,
    scratch: Scratch,
}

/// What is to be done at a layer.
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
    sinks: Option<Buffer>,
    /// Positions of the prompt's places, where only a part of it is kept and the layer's own window bounds it.
    origins: Vec<u32>,
}

impl Layer {
    /// Moves a head's token from one slot to another, with all that is known of it.
    fn relocate(&mut self, (d, capacity): (usize, usize), head: usize, from: usize, to: usize) {
        if from == to {
            return;
        }
        let position = self.positions[head * capacity + from];
        self.cache.move_slot(d, capacity, head, from, to);
        self.statistics.moved(head, from, to, position);
        self.positions[head * capacity + to] = position;
    }
}

#[derive(Clone, Debug)]
struct Scratch {
    scores: Vec<f32>,
    weights: Vec<f32>,
    /// A token's key and value, once for each head of the cache.
    k: Buffer,
    v: Buffer,
}

impl Bounded {
    /// Another one that goes on from the same slots.
    pub(crate) fn fork(&self) -> Bounded {
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
        Bounded {
            eviction: self.eviction.clone(),
            prompt: self.prompt,
            shape: self.shape,
            dtype: self.dtype,
            group: self.group,
            copies: self.copies,
            ropes: self.ropes.clone(),
            room: self.room,
            plans: self.plans.clone(),
            layers: self.layers.iter().zip(&self.plans).map(layer).collect(),
            identity: self.identity.clone(),
            scratch: self.scratch.clone(),
        }
    }

    /// Nothing where the policy never evicts anything of a request of `room` tokens and heads keep no caches of their own,
    /// unless it is to be made in any case (`sparse`): of a prompt of which only a part is kept. `prompt` and `room` count
    /// what is kept, then.
    pub(crate) fn new(
        config: &Config,
        ropes: Ropes,
        eviction: &Eviction,
        prompt: PromptSpans,
        dtype: Dtype,
        room: usize,
        sparse: bool,
    ) -> crate::Result<Option<Bounded>> {
        let budget = eviction.policy.budget(&prompt)?;
        // What can never be pruned is full attention, to the bit.
        let budget = budget.filter(|budget| !budget.decoding || budget.most.saturating_add(1) < room);
        if budget.is_none() && !eviction.per_query_head && !sparse {
            return Ok(None);
        }
        let budget = budget.unwrap_or(Budget::once(room));
        let (heads, group) = match eviction.per_query_head {
            true => (config.heads, 1),
            false => (config.kv_heads, config.heads / config.kv_heads),
        };
        let shape = Shape { layers: config.num_layers(), kv_heads: heads, head_dim: config.head_dim };
        let n = prompt.len();
        let slots = if budget.decoding { budget.most + 1 } else { budget.keep.min(n) + room - n };
        let plan = |layer: &LayerSpec| match layer.window {
            // A window that the slots could hold is a bound of its own, and an exact one.
            Some(window) if window <= slots || (sparse && eviction.is_full()) => {
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
        let reports = match eviction.policy.needs(&prompt) {
            AttentionNeeds::Nothing | AttentionNeeds::PromptSums { .. } | AttentionNeeds::Queries { .. } => 0,
            AttentionNeeds::Sums | AttentionNeeds::NoisySums { .. } | AttentionNeeds::RowWeights { .. } => {
                heads * most
            }
        };
        let scratch = Scratch {
            scores: vec![0.0; if plans.iter().any(|plan| plan.budget.decoding) { most } else { 0 }],
            weights: vec![0.0; reports],
            k: Buffer::zeros(dtype, shape.width()),
            v: Buffer::zeros(dtype, shape.width()),
        };
        Ok(Some(Bounded {
            eviction: eviction.clone(),
            prompt,
            shape,
            dtype,
            group,
            copies: heads / config.kv_heads,
            ropes,
            room,
            plans,
            layers: Vec::new(),
            identity: (0..heads).flat_map(|_| 0..n as u32).collect(),
            scratch,
        }))
    }

    /// Makes `tables` those of one token's position.
    pub(crate) fn rotary(&self, position: u32, tables: &mut RopeTables) {
        self.ropes.fill([position], tables);
    }

    /// Layers that the prompt has been taken in of.
    pub(crate) fn layers_held(&self) -> usize {
        self.layers.len()
    }

    /// Tokens in each head: of the layer that has most.
    pub(crate) fn retained(&self) -> usize {
        self.layers.iter().map(|layer| layer.len).max().unwrap_or(0)
    }

    /// Bytes allocated for keys and values.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.cache.bytes()).sum()
    }

    /// Bytes that the tokens held take.
    pub(crate) fn bytes_held(&self) -> usize {
        let token = 2 * self.shape.width() * self.dtype.size();
        self.layers.iter().map(|layer| layer.len * token).sum()
    }

    /// Bytes allocated beside them: statistics, positions, scratch.
    pub(crate) fn side_bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            let sinks = layer.sinks.as_ref().map_or(0, Buffer::bytes);
            layer.statistics.bytes() + size_of_val(layer.positions.as_slice()) + sinks
        };
        let Scratch { scores, weights, k, v } = &self.scratch;
        let scratch =
            size_of_val(scores.as_slice()) + size_of_val(weights.as_slice()) + k.bytes() + v.bytes();
        self.layers.iter().map(layer).sum::<usize>() + scratch
    }

    /// One token at a layer: makes room, places its key and value, attends, and lets the policy observe. `work` holds its
    /// rotated queries, its unrotated key and its value; `rotary` turns it to `position`.
    pub(crate) fn attend(
        &mut self,
        cpu: &Cpu,
        precision: Precision,
        layer: usize,
        position: u32,
        rotary: (&[f32], &[f32]),
        work: &mut Workspace,
    ) {
        let (plan, heads, d) = (self.plans[layer], self.shape.kv_heads, self.shape.head_dim);
        self.leave_window(layer, position);
        if plan.budget.decoding && self.layers[layer].len > plan.budget.most {
            self.prune(cpu, layer, position);
        }
        let slot = self.layers[layer].len;
        self.place(cpu, layer, rotary, work);
        let held = &mut self.layers[layer];
        held.positions.iter_mut().skip(slot).step_by(plan.capacity).for_each(|p| *p = position);
        held.len = slot + 1;
        self.turn_sinks(cpu, layer, position);
        let (watches, Layer { cache, len, .. }) = (self.watches(layer), &self.layers[layer]);
        let visible = [(0, *len as u32)];
        let attention = Attention {
            q: &work.q,
            k: cache.k.as_slice(),
            v: cache.v.as_slice(),
            heads: heads * self.group,
            kv_heads: heads,
            head_dim: d,
            capacity: plan.capacity,
            visible: &visible,
            scale: plan.scale,
            precision,
        };
        work.attended.resize(work.q.len());
        match watches {
            AttentionNeeds::Sums | AttentionNeeds::RowWeights { .. } => {
                let weights = &mut self.scratch.weights[..heads * len];
                cpu.decode_with_weights(&attention, &mut work.attended, weights);
            }
            _ => cpu.attention(&attention, &mut work.attended),
        }
        if let AttentionNeeds::NoisySums { seed, tau } = watches {
            let step = position as usize + 1 - self.prompt.len();
            let (seed, tau) = (of_layer(seed, layer), tau.at(step));
            let noise = GumbelNoise {
                seed,
                temperature: tau,
                query_positions: &[position],
                key_positions: &self.layers[layer].positions,
            };
            let weights = &mut self.scratch.weights[..heads * len];
            cpu.noisy_attention_mass(&attention, 0..*len, &noise, weights);
        }
        if watches != AttentionNeeds::Nothing {
            self.observe(cpu, layer, position, &work.q);
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
                held.relocate((d, capacity), head, held.len, slot);
            }
        }
    }

    /// What attention reports of a step at a layer.
    fn watches(&self, layer: usize) -> AttentionNeeds {
        match self.eviction.policy.needs(&self.prompt) {
            _ if self.plans[layer].window => AttentionNeeds::Nothing,
            AttentionNeeds::PromptSums { .. } => AttentionNeeds::Nothing,
            observation => observation,
        }
    }

    /// Tells the policy of the step at `position`: weights are those in the scratch.
    fn observe(&mut self, cpu: &Cpu, layer: usize, position: u32, queries: &[f32]) {
        let heads = self.shape.kv_heads;
        let Layer { cache, positions, len, statistics, .. } = &mut self.layers[layer];
        let view = LayerView {
            cpu,
            heads,
            group: self.group,
            head_dim: self.shape.head_dim,
            scale: self.plans[layer].scale,
            capacity: self.plans[layer].capacity,
            len: *len,
            positions,
            keys: cache.k.as_slice(),
            next: position + 1,
        };
        let weights = self.scratch.weights.get(..heads * *len).unwrap_or_default();
        statistics
            .observe(&AttentionReport { rows: &[position], seen: &[*len as u32], weights, queries }, &view);
    }

    /// Leaves what the policy keeps before the token at `next` comes. What stays moves into the slots of what goes.
    fn prune(&mut self, cpu: &Cpu, layer: usize, next: u32) {
        let (Plan { budget, capacity, .. }, d) = (self.plans[layer], self.shape.head_dim);
        let (held, keep) = (&mut self.layers[layer], budget.keep);
        for head in 0..self.shape.kv_heads {
            let scores = &mut self.scratch.scores[..held.len];
            let view = LayerView {
                cpu,
                heads: self.shape.kv_heads,
                group: self.group,
                head_dim: d,
                scale: self.plans[layer].scale,
                capacity,
                len: held.len,
                positions: &held.positions,
                keys: held.cache.k.as_slice(),
                next,
            };
            if held.len == keep + 1 {
                let hole = held.statistics.weakest(&view, head, scores).unwrap_or(keep);
                held.relocate((d, capacity), head, keep, hole);
                continue;
            }
            held.statistics.score(&view, head, scores);
            let kept = survivors(scores, view.head(head), keep);
            let stay = kept.partition_point(|slot| (*slot as usize) < keep);
            let (stay, movers) = kept.split_at(stay);
            let holes = (0..keep as u32).filter(|slot| stay.binary_search(slot).is_err());
            for (hole, mover) in holes.zip(movers) {
                held.relocate((d, capacity), head, *mover as usize, hole as usize);
            }
        }
        held.len = keep;
    }

    /// Rotates and places a token's key and value behind the others.
    fn place(&mut self, cpu: &Cpu, layer: usize, rotary: (&[f32], &[f32]), work: &Workspace) {
        let Layer { cache, len, .. } = &mut self.layers[layer];
        let slots = [*len as u32];
        let kv_width = self.shape.width() / self.copies;
        let (k, v) = (work.k.as_slice().range(0..kv_width), work.v.as_slice().range(0..kv_width));
        if !self.eviction.per_query_head {
            return cache.place(cpu, self.shape, (k, v), rotary, &slots);
        }
        let d = self.shape.head_dim;
        for head in 0..self.shape.kv_heads {
            let of = head / self.copies * d;
            self.scratch.k.write(head * d, k.range(of..of + d));
            self.scratch.v.write(head * d, v.range(of..of + d));
        }
        let (k, v) = (self.scratch.k.as_slice(), self.scratch.v.as_slice());
        cache.place(cpu, self.shape, (k, v), rotary, &slots);
    }

    /// Where keys are rotated by their places in the cache, turns those of the first tokens towards the others, as far as
    /// the token at `position` is further on than its place. Attention sees differences of positions only, and among
    /// the recent tokens these are what they were.
    fn turn_sinks(&mut self, cpu: &Cpu, layer: usize, position: u32) {
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
            let mut kept = Buffer::zeros(self.dtype, sinks * heads * d);
            for (i, at) in (0..sinks).flat_map(|sink| (0..heads).map(move |head| (sink, head))).enumerate() {
                let from = (at.1 * capacity + at.0) * d;
                kept.write(i * d, cache.k.as_slice().range(from..from + d));
            }
            kept
        });
        let turn = self.ropes.layer(layer).turn(by, sinks);
        let (cos, sin) = turn.slice(0, sinks);
        let slots: Vec<u32> = (0..sinks as u32).collect();
        let rotary_dim = 2 * cos.len() / sinks;
        cpu.place_keys(kept.as_slice(), heads, d, cos, sin, rotary_dim, &slots, &mut cache.k);
    }
}

#[cfg(test)]
impl Bounded {
    /// Positions of a head's tokens at a layer.
    pub(crate) fn positions(&self, layer: usize, head: usize) -> &[u32] {
        &self.layers[layer].positions[head * self.plans[layer].capacity..][..self.layers[layer].len]
    }

    /// A head's keys at a layer, `len × d`.
    pub(crate) fn keys(&self, layer: usize, head: usize) -> Vec<f32> {
        let (d, at) = (self.shape.head_dim, head * self.plans[layer].capacity * self.shape.head_dim);
        let keys = self.layers[layer].cache.k.as_slice();
        (at..at + self.layers[layer].len * d).map(|i| keys.get(i)).collect()
    }
}

/// Noise of one layer is not that of another.
fn of_layer(seed: Option<u64>, layer: usize) -> Option<u64> {
    seed.map(|seed| seed ^ (layer as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
