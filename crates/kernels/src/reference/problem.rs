//! Attention of the reference device.

use std::ops::Range;

use super::layer::dot;
use super::tensors::{kv_values, values};
use crate::attention::GumbelNoise;
use crate::device::CachedAttention;

/// An attention in the host's order.
pub(super) struct Problem<'a> {
    a: CachedAttention<'a>,
    q: Vec<f32>,
    k: Vec<f32>,
}

impl<'a> Problem<'a> {
    pub(super) fn new(a: &CachedAttention<'a>) -> Problem<'a> {
        assert_eq!(a.k.len(), a.kv_heads * a.capacity * a.head_dim, "k is kv_heads × capacity × head_dim");
        assert!(a.visible.iter().all(|(from, to)| from <= to && *to as usize <= a.capacity));
        Problem { a: *a, q: values(a.q), k: kv_values(a.k) }
    }

    pub(super) fn group(&self) -> usize {
        self.a.heads / self.a.kv_heads
    }

    /// Slots that row `i` sees.
    pub(super) fn seen(&self, i: usize) -> Range<usize> {
        self.a.visible[i].0 as usize..self.a.visible[i].1 as usize
    }

    pub(super) fn logit(&self, i: usize, head: usize, slot: usize) -> f32 {
        let d = self.a.head_dim;
        let q = &self.q[((self.a.first_row + i) * self.a.heads + head) * d..][..d];
        let k = &self.k[(head / self.group() * self.a.capacity + slot) * d..][..d];
        self.a.scale * dot(q, k)
    }

    /// Weights of row `i` and a head on the slots of `seen`, and the logarithm of the sum that they were divided by.
    pub(super) fn weights(
        &self,
        i: usize,
        head: usize,
        seen: Range<usize>,
        noise: Option<&GumbelNoise<'_>>,
    ) -> (Vec<f32>, f32) {
        let logit = |slot: usize| {
            let logit = self.logit(i, head, slot);
            let Some(noise) = noise else { return logit };
            let at = (head / self.group(), slot);
            let gumbel = noise.weight(head, i, at, self.a.capacity).map_or(0.0, f32::ln);
            (logit + gumbel) / noise.temperature
        };
        softmax(seen.map(logit).collect())
    }

    /// Adds up, over rows and the heads of each KV head, the weights of the slots `slots`: kv_heads × slots.
    pub(super) fn mass(&self, slots: Range<usize>, noise: Option<&GumbelNoise<'_>>, sums: &mut [f32]) {
        sums.fill(0.0);
        for i in 0..self.a.visible.len() {
            for head in 0..self.a.heads {
                let seen = self.seen(i);
                let seen = seen.start.max(slots.start)..seen.end.max(slots.start);
                let (weights, _) = self.weights(i, head, seen.clone(), noise);
                for (slot, weight) in seen.zip(weights).filter(|(slot, _)| slots.contains(slot)) {
                    sums[head / self.group() * slots.len() + slot - slots.start] += weight;
                }
            }
        }
    }

    /// The weight of a head of row `i` on a slot, from the log-sum-exps of all rows.
    pub(super) fn weight_from(&self, lse: &[f32], i: usize, head: usize, slot: usize) -> f32 {
        (self.logit(i, head, slot) - lse[(self.a.first_row + i) * self.a.heads + head]).exp()
    }
}

pub(super) fn softmax(mut logits: Vec<f32>) -> (Vec<f32>, f32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter_mut().for_each(|logit| *logit = (*logit - max).exp());
    let total: f32 = logits.iter().sum();
    logits.iter_mut().for_each(|weight| *weight /= total);
    (logits, max + total.ln())
}
