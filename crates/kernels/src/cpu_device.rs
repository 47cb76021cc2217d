//! The CPU as a device: kernels on slices of its storage.

use std::ops::Range;
use std::sync::Arc;

use crate::attention::{self, Attention, GumbelNoise};
use crate::buffer::{Buffer, Dtype, HostElements, Slice};
use crate::cpu::Cpu;
use crate::cpu_layer::BLOCK_ROWS;
use crate::cpu_tensors::{
    attend, buffer, buffer_mut, floats, floats_mut, kv_buffer, linear, resized, rows_of, slices,
};
use crate::device::{
    CacheHeads, CachedAttention, Device, Distance, FillRow, Floats, HeadKeys, KvBuffer, KvRows, LayerTail,
    Norm, PackedLinear, QkNorms, Rotary, RowUnavailable, WeightMatrix,
};
use crate::floats::CpuFloats;
use crate::isa::Isa;
use crate::linear::{Input, Linear, Output, PACKED_LAYOUT, PackedPanels, Precision};
use crate::ops::softmax;
use crate::row_ops::mean;

/// Rows whose concatenated logits are held at once: they bound the memory of [`Device::concat_attention_mass`].
const LOGIT_ROWS: usize = 64;
/// Bytes of queries of rows that go through a layer together. Keys and values are packed again for the attention of each part, so that parts as
/// small as all threads allow would cost 2 % of a small model's prefill.
const PART_BYTES: usize = 6 << 20;

impl Device for Cpu {
    fn name(&self) -> String {
        self.isa().to_string()
    }

    fn threads(&self) -> usize {
        Cpu::threads(self)
    }

    fn parallel(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        Cpu::parallel(self, tasks, f);
    }

    fn batch_invariant(&self) -> Arc<dyn Device> {
        Arc::new(self.to_batch_invariant())
    }

    fn rows_together(&self, width: usize) -> usize {
        // Parts of a prompt are nearly equal. With 1,025 rows at most, or more, each has above 512: with fewer, some attention would go segment after
        // segment, and round otherwise than with more threads.
        (PART_BYTES / (4 * width.max(1))).max(BLOCK_ROWS * Cpu::threads(self).max(2) + 1)
    }

    fn beside(&self) -> Arc<dyn Device> {
        Arc::new(self.single_threaded())
    }

    fn floats(&self, len: usize) -> Floats {
        let mut x = Floats::new(CpuFloats::new(), 0);
        resized(&mut x, len);
        x
    }

    fn resize(&self, x: &mut Floats, len: usize) {
        resized(x, len);
    }

    fn upload_rows(&self, rows: usize, width: usize, row: &FillRow<'_>, x: &mut Floats) {
        self.fill_rows(width, row, resized(x, rows * width));
    }

    fn download(&self, x: &Floats, from: usize, out: &mut [f32]) {
        out.copy_from_slice(&floats(x)[from..from + out.len()]);
    }

    fn copy(&self, x: &Floats, from: Range<usize>, to: &mut Floats, at: usize) {
        let from = &floats(x)[from];
        floats_mut(to)[at..at + from.len()].copy_from_slice(from);
    }

    fn gather_rows(&self, x: &Floats, width: usize, rows: &[u32], out: &mut Floats) {
        Cpu::gather_rows(self, floats(x), width, rows, resized(out, rows.len() * width));
    }

    fn weights_precision(&self, attention: Precision) -> Precision {
        // Tiles compute weights of a prompt's last rows some ten times as fast as vectors of `f32` do.
        if self.isa() == Isa::Amx { attention } else { Precision::F32 }
    }

    fn kv(&self, dtype: Dtype, len: usize) -> KvBuffer {
        kv_buffer(Buffer::zeros(dtype, len))
    }

    fn resize_kv(&self, kv: &mut KvBuffer, len: usize) {
        buffer_mut(kv).resize(len);
        let capacity = buffer(kv).capacity();
        kv.set_len(len, capacity);
    }

    fn download_kv<'a>(&self, kv: &'a KvBuffer, range: Range<usize>) -> HostElements<'a> {
        HostElements::Lent(buffer(kv).as_slice().range(range))
    }

    fn copy_kv(&self, kv: &KvBuffer, from: Range<usize>, to: &mut KvBuffer, at: usize) {
        buffer_mut(to).write(at, buffer(kv).as_slice().range(from));
    }

    fn copy_kv_within(&self, kv: &mut KvBuffer, from: Range<usize>, to: usize) {
        buffer_mut(kv).copy_within(from, to);
    }

    fn pack(&self, m: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
        let packed = Linear::pack(self, m.precision, m.outputs, m.inputs, m.bias, m.rows)?;
        let bytes = packed.bytes();
        Ok(PackedLinear::new(packed, bytes))
    }

    fn pack_gate_up(&self, m: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
        let packed = Linear::pack_gate_up(self, m.precision, m.outputs / 2, m.inputs, m.bias, m.rows)?;
        let bytes = packed.bytes();
        Ok(PackedLinear::new(packed, bytes))
    }

    fn packed_layout(&self) -> Option<&'static str> {
        Some(PACKED_LAYOUT)
    }

    fn packed_panels<'a>(&self, weights: &'a PackedLinear) -> Option<PackedPanels<'a>> {
        Some(linear(weights).panels())
    }

    fn expect_product(&self, weights: &PackedLinear) {
        self.expect(weights.storage());
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
        let (x, w) = (floats(x), linear(w));
        let width = w.outputs();
        assert!(x.len().is_multiple_of(w.inputs()), "x is rows of the weights' inputs");
        let x = &x[rows.start * w.inputs()..rows.end * w.inputs()];
        let (rows, q_width) = (rows.len(), width - 2 * kv_width);
        let q = resized(q, rows * q_width);
        for buffer in [&mut *k, &mut *v] {
            if buffer.len() < rows * kv_width {
                *buffer = self.kv(buffer.dtype(), rows * kv_width);
            }
        }
        match (buffer_mut(k), buffer_mut(v)) {
            (Buffer::F32(k), Buffer::F32(v)) => self.project_qkv_to(x, norm, w, qk_norms, q, k, v),
            (Buffer::F16(k), Buffer::F16(v)) => self.project_qkv_to(x, norm, w, qk_norms, q, k, v),
            (Buffer::Bf16(k), Buffer::Bf16(v)) => self.project_qkv_to(x, norm, w, qk_norms, q, k, v),
            (k, v) => panic!("keys are {} and values {}", k.dtype(), v.dtype()),
        }
    }

    fn attn_output_and_mlp(
        &self,
        attn_out: (&Floats, usize),
        tail: &LayerTail<'_>,
        rows: Range<usize>,
        x: &mut Floats,
    ) {
        self.finish_layer((floats(attn_out.0), attn_out.1), tail, rows, floats_mut(x));
    }

    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &PackedLinear, out: &mut Vec<f32>) {
        let (x, w) = (floats(x), linear(w));
        out.resize(x.len() / norm.weight.len() * w.outputs(), 0.0);
        self.project(w, Input::Rows(x, Some(norm)), Output::Rows(out));
    }

    fn rope(&self, x: &mut Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>) {
        let rotary_dim = rotary.dim(x.len() / (heads * head_dim));
        Cpu::rope(self, floats_mut(x), heads, head_dim, rotary.cos, rotary.sin, rotary_dim);
    }

    fn place(
        &self,
        rows: KvRows<'_>,
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        cache: &mut KvBuffer,
    ) {
        let (width, tokens) = (heads.width(), slots.len());
        let rows = match rows {
            KvRows::Host(rows) => rows,
            KvRows::Device(rows, first) => {
                buffer(rows).as_slice().range(first * width..(first + tokens) * width)
            }
        };
        let (CacheHeads { kv_heads, head_dim }, Rotary { cos, sin, .. }) = (heads, rotary);
        self.place_keys(rows, kv_heads, head_dim, cos, sin, rotary.dim(tokens), slots, buffer_mut(cache));
    }

    fn gather_kv_rows(&self, kv: &KvBuffer, width: usize, rows: &[u32]) -> KvBuffer {
        let from = buffer(kv).as_slice();
        let mut gathered = Buffer::zeros(kv.dtype(), rows.len() * width);
        for (i, row) in rows.iter().enumerate() {
            gathered.write(i * width, from.range(*row as usize * width..(*row as usize + 1) * width));
        }
        kv_buffer(gathered)
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
        let cache = buffer(cache).as_slice();
        let heads = cache.len() / (from * head_dim).max(1) * copies;
        let mut gathered = Buffer::zeros(cache.dtype(), heads * to * head_dim);
        let each = kept.len() / heads.max(1);
        for (head, kept) in kept.chunks_exact(each.max(1)).enumerate() {
            let mut at = head * to * head_dim;
            // Neighbours go together.
            for run in kept.chunk_by(|a, b| a + 1 == *b) {
                let (first, elements) = (run[0] as usize, run.len() * head_dim);
                let start = (head / copies * from + first) * head_dim;
                gathered.write(at, cache.range(start..start + elements));
                at += elements;
            }
        }
        kv_buffer(gathered)
    }

    fn rotate_slots(
        &self,
        cache: &KvBuffer,
        heads: CacheHeads,
        capacity: usize,
        slots: &[u32],
        rotary: Rotary<'_>,
    ) -> KvBuffer {
        let CacheHeads { kv_heads, head_dim: d } = heads;
        let (keys, half) = (buffer(cache).as_slice(), rotary.dim(slots.len()) / 2);
        let mut rotated = Buffer::zeros(keys.dtype(), kv_heads * slots.len() * d);
        let mut one = Buffer::zeros(keys.dtype(), slots.len() * d);
        for head in 0..kv_heads {
            let mut at = 0;
            for run in slots.chunk_by(|a, b| a + 1 == *b) {
                let to: Vec<u32> = (at as u32..(at + run.len()) as u32).collect();
                let table = at * half..(at + run.len()) * half;
                let from = (head * capacity + run[0] as usize) * d;
                let keys = keys.range(from..from + run.len() * d);
                let (cos, sin) = (&rotary.cos[table.clone()], &rotary.sin[table]);
                self.place_keys(keys, 1, d, cos, sin, 2 * half, &to, &mut one);
                at += run.len();
            }
            rotated.write(head * slots.len() * d, one.as_slice());
        }
        kv_buffer(rotated)
    }

    fn sum_changes(
        &self,
        (fresh, rows): (&KvBuffer, usize),
        cache: &KvBuffer,
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32> {
        let fresh = buffer(fresh).as_slice().range(0..rows * heads.width());
        Cpu::sum_changes(self, (fresh, buffer(cache).as_slice()), heads, groups, rotary)
    }

    fn add_rows(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut KvBuffer,
    ) {
        Cpu::add_rows(self, rows, heads, rotary, spans, buffer_mut(cache));
    }

    fn attention(&self, a: &CachedAttention<'_>, out: &mut Floats, lse: Option<&mut Floats>) {
        attend(self, a, out, lse, (None, None));
    }

    fn attention_with_mass(
        &self,
        a: &CachedAttention<'_>,
        out: &mut Floats,
        lse: &mut Floats,
        noise: Option<&GumbelNoise<'_>>,
        sums: &mut [f32],
    ) {
        attend(self, a, out, Some(lse), (Some(sums), noise));
    }

    fn attention_with_weights(&self, a: &CachedAttention<'_>, out: &mut Floats, weights: &mut [f32]) {
        assert_eq!(out.len(), a.q.len(), "out has the rows of q");
        let out = &mut floats_mut(out)[a.first_row * a.width()..][..a.width()];
        self.decode_with_weights(&slices(a), out, weights);
    }

    fn merge_attention(
        &self,
        first: usize,
        out: &mut Floats,
        lse: &mut Floats,
        other: &Floats,
        other_lse: &Floats,
    ) {
        let d = out.len() / lse.len().max(1);
        let (out, lse) = (&mut floats_mut(out)[first * d..], &mut floats_mut(lse)[first..]);
        attention::merge(out, lse, floats(other), floats(other_lse));
    }

    fn mean_row(&self, x: &Floats, width: usize, rows: Range<usize>) -> Vec<f32> {
        mean(&floats(x)[rows.start * width..rows.end * width], width)
    }

    fn row_distances(
        &self,
        fresh: &KvBuffer,
        cached: Slice<'_>,
        width: usize,
        pairs: &[(usize, usize)],
        distance: Distance,
    ) -> Vec<f32> {
        let (fresh, mut a, mut b) = (buffer(fresh).as_slice(), vec![0.0; width], vec![0.0; width]);
        let between = |(new, old): &(usize, usize)| {
            fresh.range(new * width..(new + 1) * width).to_f32(&mut a);
            cached.range(old * width..(old + 1) * width).to_f32(&mut b);
            let differences = a.iter().zip(&b).map(|(a, b)| a - b);
            match distance {
                Distance::L2 => differences.map(|x| x * x).sum(),
                Distance::L1 => differences.map(f32::abs).sum(),
            }
        };
        pairs.iter().map(between).collect()
    }

    fn attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        Cpu::attention_mass(self, &slices(a), slots, sums);
    }

    fn noisy_attention_mass(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        noise: &GumbelNoise<'_>,
        sums: &mut [f32],
    ) {
        Cpu::noisy_attention_mass(self, &slices(a), slots, noise, sums);
    }

    fn concat_attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        assert_eq!(sums.len(), slots.len(), "one sum for each slot");
        let Attention { q, k, heads, kv_heads, head_dim, capacity, visible, scale, .. } = slices(a);
        sums.fill(0.0);
        let mut logits = vec![0.0; LOGIT_ROWS.min(visible.len()) * slots.len()];
        for (q, visible) in q.chunks(LOGIT_ROWS * a.width()).zip(visible.chunks(LOGIT_ROWS)) {
            let logits = &mut logits[..visible.len() * slots.len()];
            Cpu::concat_logits(self, q, heads, kv_heads, head_dim, k, capacity, slots.clone(), scale, logits);
            for (logits, (from, to)) in logits.chunks_exact_mut(slots.len()).zip(visible) {
                let seen = *from as usize - slots.start..*to as usize - slots.start;
                softmax(&mut logits[seen.clone()]);
                sums[seen.clone()].iter_mut().zip(&logits[seen]).for_each(|(sum, weight)| *sum += weight);
            }
        }
    }

    fn row_weights(&self, a: &CachedAttention<'_>, slots: Range<usize>, weights: &mut [f32]) {
        Cpu::row_weights(self, &slices(a), slots, weights);
    }

    fn attention_mass_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        Cpu::attention_mass_from_lse(self, &slices(a), rows_of(a, lse), slots, sums);
    }

    fn column_weights_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: &[u32],
        weights: &mut [f32],
    ) {
        Cpu::column_weights_from_lse(self, &slices(a), rows_of(a, lse), slots, weights);
    }

    fn concat_logits(&self, q: &[f32], keys: HeadKeys<'_>, scale: f32, z: &mut [f32]) {
        let HeadKeys { k, head, head_dim: d, capacity, queries } = keys;
        let slots = z.len() / (q.len() / (queries * d)).max(1);
        let k = buffer(k).as_slice().range(head * capacity * d..(head + 1) * capacity * d);
        Cpu::concat_logits(self, q, queries, 1, d, k, capacity, 0..slots, scale, z);
    }
}
