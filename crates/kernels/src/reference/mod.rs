//! A device of plain loops in `f32`, against which other devices are tested.
//!
//! It shares no kernel with the CPU and no memory layout: every tensor lies back to front, activations that are resized turn
//! into NaN, and keys and values are kept as `f32` rounded to their type. Weights are `f32` whatever the precision. It is slow.

mod layer;
mod problem;
mod row_changes;
mod tensors;

use std::ops::Range;
use std::sync::Arc;

use crate::attention::GumbelNoise;
use crate::buffer::{Buffer, Dtype, HostElements, Slice};
use crate::device::{
    CacheHeads, CachedAttention, Device, Distance, FillRow, Floats, HeadKeys, KvBuffer, KvRows, LayerTail,
    Mlp, Norm, PackedLinear, QkNorms, Rotary, RowUnavailable, WeightMatrix,
};
use layer::{Weights, add_normed, dot, gated_mlp, mixture, normed, pack, product, projected, rotate};
use problem::{Problem, softmax};
use tensors::{Back, floats_of, kv_values, new_kv, set, set_kv, values};

/// The device of plain loops.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceDevice;

impl Device for ReferenceDevice {
    fn name(&self) -> String {
        "reference".to_owned()
    }

    fn threads(&self) -> usize {
        1
    }

    fn parallel(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(f);
    }

    fn batch_invariant(&self) -> Arc<dyn Device> {
        Arc::new(*self)
    }

    fn rows_together(&self, _width: usize) -> usize {
        5
    }

    fn beside(&self) -> Arc<dyn Device> {
        Arc::new(*self)
    }

    fn floats(&self, len: usize) -> Floats {
        Floats::new(Back(vec![f32::NAN; len]), len)
    }

    fn resize(&self, x: &mut Floats, len: usize) {
        if x.len() != len {
            *x = self.floats(len);
        }
    }

    fn upload_rows(&self, rows: usize, width: usize, row: &FillRow<'_>, x: &mut Floats) {
        let mut values = vec![0.0; rows * width];
        values.chunks_exact_mut(width).enumerate().for_each(|(i, values)| row(i, values));
        set(x, &values);
    }

    fn download(&self, x: &Floats, from: usize, out: &mut [f32]) {
        out.copy_from_slice(&values(x)[from..from + out.len()]);
    }

    fn copy(&self, x: &Floats, from: Range<usize>, to: &mut Floats, at: usize) {
        let mut all = values(to);
        all[at..at + from.len()].copy_from_slice(&values(x)[from]);
        set(to, &all);
    }

    fn gather_rows(&self, x: &Floats, width: usize, rows: &[u32], out: &mut Floats) {
        let x = values(x);
        let gathered: Vec<f32> =
            rows.iter().flat_map(|row| &x[*row as usize * width..][..width]).copied().collect();
        set(out, &gathered);
    }

    fn kv(&self, dtype: Dtype, len: usize) -> KvBuffer {
        new_kv(dtype, &vec![0.0; len])
    }

    fn resize_kv(&self, kv: &mut KvBuffer, len: usize) {
        let mut values = kv_values(kv);
        values.resize(len, 0.0);
        set_kv(kv, &values);
    }

    fn download_kv<'a>(&self, kv: &'a KvBuffer, range: Range<usize>) -> HostElements<'a> {
        let mut buffer = Buffer::zeros(kv.dtype(), range.len());
        buffer.write_f32(0, &kv_values(kv)[range]);
        HostElements::Copied(buffer)
    }

    fn copy_kv(&self, kv: &KvBuffer, from: Range<usize>, to: &mut KvBuffer, at: usize) {
        assert_eq!(kv.dtype(), to.dtype(), "one type");
        let mut all = kv_values(to);
        all[at..at + from.len()].copy_from_slice(&kv_values(kv)[from]);
        set_kv(to, &all);
    }

    fn copy_kv_within(&self, kv: &mut KvBuffer, from: Range<usize>, to: usize) {
        let mut all = kv_values(kv);
        all.copy_within(from, to);
        set_kv(kv, &all);
    }

    fn pack(&self, matrix: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
        pack(&matrix)
    }

    fn pack_gate_up(&self, matrix: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
        pack(&matrix)
    }

    fn project_qkv(
        &self,
        x: &Floats,
        rows: Range<usize>,
        norm: Option<Norm<'_>>,
        w: &PackedLinear,
        qk_norms: Option<QkNorms<'_>>,
        kv_width: usize,
        q: &mut Floats,
        k: &mut KvBuffer,
        v: &mut KvBuffer,
    ) {
        let inputs = w.storage::<Weights>().inputs;
        let x = normed(&values(x)[rows.start * inputs..rows.end * inputs], norm);
        let [new_q, new_k, new_v] = projected(w, &x, qk_norms, kv_width);
        set(q, &new_q);
        for (kv, new) in [(k, new_k), (v, new_v)] {
            let mut all = kv_values(kv);
            all.resize(all.len().max(new.len()), 0.0);
            all[..new.len()].copy_from_slice(&new);
            set_kv(kv, &all);
        }
    }

    fn attn_output_and_mlp(
        &self,
        attn_out: (&Floats, usize),
        tail: &LayerTail<'_>,
        range: Range<usize>,
        x: &mut Floats,
    ) {
        let (mut all, (attn_out, first)) = (values(x), (values(attn_out.0), attn_out.1));
        let output = tail.output.storage::<Weights>();
        let (hidden, width) = (output.b.len(), output.inputs);
        let range_of = |width: usize| range.start * width..range.end * width;
        let mut rows = all[range_of(hidden)].to_vec();
        let branch = product(tail.output, &attn_out[first * width..(first + range.len()) * width]);
        add_normed(&branch, tail.attention_post_norm, &mut rows);
        let input = normed(&rows, tail.mlp_norm);
        let branch = match tail.mlp {
            Mlp::Dense(mlp) => gated_mlp(mlp, tail.activation, &input),
            Mlp::Experts(experts) => mixture(experts, tail.activation, &input, hidden),
        };
        add_normed(&branch, tail.mlp_post_norm, &mut rows);
        all[range_of(hidden)].copy_from_slice(&rows);
        set(x, &all);
    }

    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &PackedLinear, out: &mut Vec<f32>) {
        *out = product(w, &normed(&values(x), Some(norm)));
    }

    fn rope(&self, x: &mut Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>) {
        let mut rows = values(x);
        let half = rotary.dim(rows.len() / (heads * head_dim)) / 2;
        for (token, row) in rows.chunks_exact_mut(heads * head_dim).enumerate() {
            rotate(row, head_dim, rotary, half, token);
        }
        set(x, &rows);
    }

    fn place(
        &self,
        rows: KvRows<'_>,
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        cache: &mut KvBuffer,
    ) {
        let (rows, dtype, first) = match rows {
            KvRows::Host(rows) => {
                assert_eq!(rows.len(), slots.len() * heads.width(), "rows are tokens × heads × head_dim");
                (floats_of(rows), rows.dtype(), 0)
            }
            KvRows::Device(rows, first) => (kv_values(rows), rows.dtype(), first),
        };
        assert_eq!(dtype, cache.dtype(), "one type");
        let (CacheHeads { kv_heads, head_dim: d }, half) = (heads, rotary.dim(slots.len()) / 2);
        let capacity = cache.len() / heads.width().max(1);
        let mut all = kv_values(cache);
        for (token, slot) in slots.iter().enumerate() {
            let mut row = rows[(first + token) * heads.width()..][..heads.width()].to_vec();
            rotate(&mut row, d, rotary, half, token);
            for head in 0..kv_heads {
                let at = (head * capacity + *slot as usize) * d;
                all[at..at + d].copy_from_slice(&row[head * d..][..d]);
            }
        }
        set_kv(cache, &all);
    }

    fn gather_kv_rows(&self, kv: &KvBuffer, width: usize, rows: &[u32]) -> KvBuffer {
        let all = kv_values(kv);
        let gathered: Vec<f32> =
            rows.iter().flat_map(|row| &all[*row as usize * width..][..width]).copied().collect();
        new_kv(kv.dtype(), &gathered)
    }

    fn gather_slots(
        &self,
        cache: &KvBuffer,
        head_dim: usize,
        from: usize,
        kept: &[u32],
        copies: usize,
        to: usize,
    ) -> KvBuffer {
        let all = kv_values(cache);
        let heads = all.len() / (from * head_dim).max(1) * copies;
        let mut gathered = vec![0.0; heads * to * head_dim];
        for head in 0..heads {
            for (i, slot) in kept[head * kept.len() / heads..][..kept.len() / heads].iter().enumerate() {
                let source = &all[(head / copies * from + *slot as usize) * head_dim..][..head_dim];
                gathered[(head * to + i) * head_dim..][..head_dim].copy_from_slice(source);
            }
        }
        new_kv(cache.dtype(), &gathered)
    }

    fn rotate_slots(
        &self,
        cache: &KvBuffer,
        heads: CacheHeads,
        capacity: usize,
        slots: &[u32],
        rotary: Rotary<'_>,
    ) -> KvBuffer {
        let (all, d, half) = (kv_values(cache), heads.head_dim, rotary.dim(slots.len()) / 2);
        let mut rotated = Vec::new();
        for head in 0..heads.kv_heads {
            for (i, slot) in slots.iter().enumerate() {
                let mut key = all[(head * capacity + *slot as usize) * d..][..d].to_vec();
                rotate(&mut key, d, rotary, half, i);
                rotated.extend(key);
            }
        }
        new_kv(cache.dtype(), &rotated)
    }

    fn sum_changes(
        &self,
        (fresh, rows): (&KvBuffer, usize),
        cache: &KvBuffer,
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32> {
        let fresh = &kv_values(fresh)[..rows * heads.width()];
        row_changes::sum_changes(fresh, &kv_values(cache), heads, groups, rotary)
    }

    fn add_rows(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut KvBuffer,
    ) {
        let mut all = kv_values(cache);
        row_changes::add_rows(rows, heads, rotary, spans, &mut all);
        set_kv(cache, &all);
    }

    fn attention(&self, a: &CachedAttention<'_>, out: &mut Floats, lse: Option<&mut Floats>) {
        assert_eq!(out.len(), a.q.len(), "out has the rows of q");
        let (problem, v, d) = (Problem::new(a), kv_values(a.v), a.head_dim);
        let mut all = values(out);
        let all_rows = a.q.len() / d;
        let known = lse.as_ref().map(|lse| values(lse)).filter(|sums| sums.len() == all_rows);
        let mut sums = known.unwrap_or_else(|| vec![f32::NAN; all_rows]);
        for i in 0..a.visible.len() {
            for head in 0..a.heads {
                let seen = problem.seen(i);
                assert!(!seen.is_empty(), "each row sees at least one slot");
                let (weights, sum) = problem.weights(i, head, seen.clone(), None);
                let at = (a.first_row + i) * a.heads + head;
                sums[at] = sum;
                let out = &mut all[at * d..][..d];
                out.fill(0.0);
                for (slot, weight) in seen.zip(weights) {
                    let value = &v[(head / problem.group() * a.capacity + slot) * d..][..d];
                    out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v);
                }
            }
        }
        set(out, &all);
        if let Some(lse) = lse {
            set(lse, &sums);
        }
    }

    fn attention_with_weights(&self, a: &CachedAttention<'_>, out: &mut Floats, weights: &mut [f32]) {
        assert_eq!(a.visible.len(), 1, "there is one row");
        self.attention(a, out, None);
        self.row_weights(a, 0..a.visible[0].1 as usize, weights);
    }

    fn merge_attention(
        &self,
        first: usize,
        out: &mut Floats,
        lse: &mut Floats,
        other: &Floats,
        other_lse: &Floats,
    ) {
        let (mut all, mut sums) = (values(out), values(lse));
        let d = all.len() / sums.len();
        for (i, (other, other_sum)) in values(other).chunks_exact(d).zip(values(other_lse)).enumerate() {
            let at = first + i;
            let sum = ((sums[at].exp()) + other_sum.exp()).ln();
            let (own, share) = ((sums[at] - sum).exp(), (other_sum - sum).exp());
            let row = &mut all[at * d..][..d];
            row.iter_mut().zip(other).for_each(|(a, b)| *a = own * *a + share * b);
            sums[at] = sum;
        }
        set(out, &all);
        set(lse, &sums);
    }

    fn mean_row(&self, x: &Floats, width: usize, rows: Range<usize>) -> Vec<f32> {
        let (x, count) = (values(x), rows.len().max(1) as f64);
        let column = |e: usize| rows.clone().map(|row| f64::from(x[row * width + e])).sum::<f64>() / count;
        (0..width).map(|e| column(e) as f32).collect()
    }

    fn row_distances(
        &self,
        fresh: &KvBuffer,
        cached: Slice<'_>,
        width: usize,
        pairs: &[(usize, usize)],
        distance: Distance,
    ) -> Vec<f32> {
        row_changes::row_distances(&kv_values(fresh), &floats_of(cached), width, pairs, distance)
    }

    fn attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        Problem::new(a).mass(slots, None, sums);
    }

    fn noisy_attention_mass(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        noise: &GumbelNoise<'_>,
        sums: &mut [f32],
    ) {
        Problem::new(a).mass(slots, Some(noise), sums);
    }

    fn concat_attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        let problem = Problem::new(a);
        sums.fill(0.0);
        for i in 0..a.visible.len() {
            let seen = problem.seen(i);
            let logit = |slot: usize| (0..a.heads).map(|head| problem.logit(i, head, slot)).sum();
            let (weights, _) = softmax(seen.clone().map(logit).collect());
            seen.zip(weights).for_each(|(slot, weight)| sums[slot - slots.start] += weight);
        }
    }

    fn row_weights(&self, a: &CachedAttention<'_>, slots: Range<usize>, weights: &mut [f32]) {
        let (problem, rows) = (Problem::new(a), a.visible.len());
        weights.fill(0.0);
        for i in 0..rows {
            for head in 0..a.heads {
                let seen = problem.seen(i);
                let seen = seen.start.max(slots.start)..seen.end.max(slots.start);
                let row = (head / problem.group() * rows + i) * slots.len();
                let (found, _) = problem.weights(i, head, seen.clone(), None);
                for (slot, weight) in seen.zip(found).filter(|(slot, _)| slots.contains(slot)) {
                    weights[row + slot - slots.start] += weight;
                }
            }
        }
    }

    fn attention_mass_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        let (problem, lse) = (Problem::new(a), values(lse));
        sums.fill(0.0);
        for i in 0..a.visible.len() {
            for head in 0..a.heads {
                for slot in problem.seen(i).filter(|slot| slots.contains(slot)) {
                    sums[head / problem.group() * slots.len() + slot - slots.start] +=
                        problem.weight_from(&lse, i, head, slot);
                }
            }
        }
    }

    fn column_weights_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: &[u32],
        weights: &mut [f32],
    ) {
        let (problem, lse, rows) = (Problem::new(a), values(lse), a.visible.len());
        for (s, slot) in slots.iter().enumerate() {
            for i in 0..rows {
                let weight = |head| problem.weight_from(&lse, i, head, *slot as usize);
                let sees = problem.seen(i).contains(&(*slot as usize));
                weights[s * rows + i] = if sees { (0..a.heads).map(weight).sum() } else { 0.0 };
            }
        }
    }

    fn concat_logits(&self, q: &[f32], keys: HeadKeys<'_>, scale: f32, z: &mut [f32]) {
        let HeadKeys { k, head, head_dim: d, capacity, queries } = keys;
        let (k, rows) = (kv_values(k), q.len() / (queries * d));
        let slots = z.len() / rows.max(1);
        for (row, q) in q.chunks_exact(queries * d).enumerate() {
            for slot in 0..slots {
                let key = &k[(head * capacity + slot) * d..][..d];
                z[row * slots + slot] = scale * q.chunks_exact(d).map(|q| dot(q, key)).sum::<f32>();
            }
        }
    }
}
