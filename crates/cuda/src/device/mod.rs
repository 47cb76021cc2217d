//! The CUDA device: what each call of the interface launches.

mod alloc;
mod attention;
mod block;
mod caches;
mod changes;
mod concat;
mod context;
mod experts;
mod launch;
mod layers;
mod linear;
mod peak;
mod statistics;
mod tensors;
mod uploads;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use refrain_kernels::{
    CacheHeads, CachedAttention, Device, DeviceFailure, DeviceMemory, Distance, Dtype, FillRow, Floats,
    GumbelNoise, HeadKeys, HostBytes, HostElements, HostSlice, KvBuffer, KvRows, LayerTail, MAX_BLOCK_ROWS,
    Norm, PackedLinear, Precision, QkNorms, Rotary, RowUnavailable, Slice, WeightAggregation, WeightMatrix,
};

use crate::driver::Driver;
use launch::assert_rows;
use linear::rows_of_weights;
use tensors::{floats, kv_block};

pub use context::CudaDevice;
pub use peak::{PeakWork, Peaks};

impl<D: Driver> Device for CudaDevice<D> {
    fn name(&self) -> String {
        self.driver.name()
    }

    fn threads(&self) -> usize {
        self.cpu.threads()
    }

    fn parallel(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        self.cpu.parallel(tasks, f);
    }

    fn batch_invariant(&self) -> Arc<dyn Device> {
        Arc::new(self.clone())
    }

    fn rows_together(&self, _width: usize) -> usize {
        MAX_BLOCK_ROWS
    }

    fn most_head_dim(&self) -> usize {
        attention::most_head_dim(self.driver.most_shared())
    }

    fn weights_precision(&self, attention: Precision) -> Precision {
        attention
    }

    fn beside(&self) -> Arc<dyn Device> {
        Arc::new(self.to_beside())
    }

    fn wait(&self) {
        self.driver.wait().unwrap_or_else(|error| self.broken("waiting", &error).unwind());
    }

    fn memory(&self) -> Option<DeviceMemory> {
        let (total, free) = self.driver.memory();
        let kept = self.uploaded_bytes() as u64;
        Some(DeviceMemory { total, free: free + kept })
    }

    fn failure(&self) -> Option<DeviceFailure> {
        self.driver.failure().map(|error| self.broken("computing", &error))
    }

    fn floats(&self, len: usize) -> Floats {
        self.new_floats(len)
    }

    fn resize(&self, x: &mut Floats, len: usize) {
        self.resized(x, len);
    }

    fn upload_rows(&self, rows: usize, width: usize, row: &FillRow<'_>, x: &mut Floats) {
        self.write_rows(rows, width, row, x);
    }

    fn download(&self, x: &Floats, from: usize, out: &mut [f32]) {
        assert!(from + out.len() <= x.len(), "elements lie inside of the tensor");
        self.read(floats(x), 4 * from, out);
    }

    fn copy(&self, x: &Floats, from: Range<usize>, to: &mut Floats, at: usize) {
        self.copy_floats(x, from, to, at);
    }

    fn gather_rows(&self, x: &Floats, width: usize, rows: &[u32], out: &mut Floats) {
        assert_rows(rows, width, x.len());
        let (indices, out) = (self.kept_block_of(rows), self.resized(out, rows.len() * width));
        self.gather([floats::<D>(x).arg(0), indices.arg(0), out.arg(0)], rows.len(), width, 4);
    }

    fn kv(&self, dtype: Dtype, len: usize) -> KvBuffer {
        self.zeroed_kv(dtype, len)
    }

    fn upload_kv(&self, values: Slice<'_>) -> KvBuffer {
        KvBuffer::new(self.block_of(values.as_bytes()), values.dtype(), values.len(), values.len())
    }

    fn pin(&self, bytes: &HostBytes) {
        self.driver.pin(bytes);
    }

    fn upload_pinned_kv(&self, parts: &[HostSlice<'_>]) -> Option<KvBuffer> {
        self.pinned_kv(parts)
    }

    fn resize_kv(&self, kv: &mut KvBuffer, len: usize) {
        self.set_kv_len(kv, len);
    }

    fn download_kv<'a>(&self, kv: &'a KvBuffer, range: Range<usize>) -> HostElements<'a> {
        HostElements::Copied(self.read_kv(kv, range))
    }

    fn copy_kv(&self, kv: &KvBuffer, from: Range<usize>, to: &mut KvBuffer, at: usize) {
        self.copy_kv_elements(kv, from, to, at);
    }

    fn copy_kv_within(&self, kv: &mut KvBuffer, from: Range<usize>, to: usize) {
        self.move_kv_elements(kv, from, to);
    }

    fn pack(&self, matrix: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
        rows_of_weights(self, &matrix, false)
    }

    fn pack_gate_up(&self, matrix: WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
        rows_of_weights(self, &matrix, true)
    }

    fn packed_bytes(&self, matrix: &WeightMatrix<'_>) -> usize {
        linear::packed_bytes(matrix)
    }

    fn embed(&self, table: &PackedLinear, ids: &[u32], scale: f32, x: &mut Floats) -> bool {
        self.embed_rows(table.storage(), ids, scale, x)
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
        self.project((x, rows), norm, w.storage(), qk_norms, kv_width, q, [k, v]);
    }

    fn attn_output_and_mlp(
        &self,
        attn_out: (&Floats, usize),
        tail: &LayerTail<'_>,
        rows: Range<usize>,
        x: &mut Floats,
    ) {
        self.finish_layer(attn_out, tail, rows, x);
    }

    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &PackedLinear, out: &mut Vec<f32>) {
        self.read_logits(x, norm, w.storage(), out);
    }

    fn rope(&self, x: &mut Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>) {
        self.rope_rows(x, heads, head_dim, rotary);
    }

    fn place(
        &self,
        rows: KvRows<'_>,
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        cache: &mut KvBuffer,
    ) {
        self.place_rows(None, heads, [Some((rows, cache)), None], rotary, slots);
    }

    fn rope_and_place(
        &self,
        queries: Option<(&mut Floats, usize)>,
        (k, v): (KvRows<'_>, KvRows<'_>),
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        (k_cache, v_cache): (&mut KvBuffer, &mut KvBuffer),
    ) {
        let queries = queries.map(|(q, heads)| (&*q, heads));
        self.place_rows(queries, heads, [Some((k, k_cache)), Some((v, v_cache))], rotary, slots);
    }

    fn gather_kv_rows(&self, kv: &KvBuffer, width: usize, rows: &[u32]) -> KvBuffer {
        assert_rows(rows, width, kv.len());
        let (indices, out) = (self.kept_block_of(rows), self.open_kv(kv.dtype(), rows.len() * width));
        let (from, to) = (kv_block::<D>(kv).arg(0), kv_block::<D>(&out).arg(0));
        self.gather([from, indices.arg(0), to], rows.len(), width, kv.dtype().size());
        out
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
        self.gather_cache_slots(cache, head_dim, from, kept, copies, to)
    }

    fn rotate_slots(
        &self,
        cache: &KvBuffer,
        heads: CacheHeads,
        capacity: usize,
        slots: &[u32],
        rotary: Rotary<'_>,
    ) -> KvBuffer {
        self.rotated_slots(cache, heads, capacity, slots, rotary)
    }

    fn sum_changes(
        &self,
        (fresh, rows): (&KvBuffer, usize),
        cache: &KvBuffer,
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32> {
        self.summed_changes((fresh, rows), cache, heads, groups, rotary)
    }

    fn add_rows(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut KvBuffer,
    ) {
        self.add_rows_to_spans(rows, heads, rotary, spans, cache);
    }

    fn attention(&self, a: &CachedAttention<'_>, out: &mut Floats, lse: Option<&mut Floats>) {
        self.attend(a, out, lse);
    }

    fn attention_with_weights(&self, a: &CachedAttention<'_>, out: &mut Floats, weights: &mut [f32]) {
        assert_eq!(a.visible.len(), 1, "there is one row");
        let mut lse = self.new_floats(0);
        self.attend(a, out, Some(&mut lse));
        self.read_row_weights(a, Some(&lse), 0..a.visible[0].1 as usize, weights);
    }

    fn merge_attention(
        &self,
        first: usize,
        out: &mut Floats,
        lse: &mut Floats,
        other: &Floats,
        other_lse: &Floats,
    ) {
        self.merge(first, out, lse, other, other_lse);
    }

    fn mean_row(&self, x: &Floats, width: usize, rows: Range<usize>) -> Vec<f32> {
        self.read_mean_row(x, width, rows)
    }

    fn row_distances(
        &self,
        fresh: &KvBuffer,
        cached: Slice<'_>,
        width: usize,
        pairs: &[(usize, usize)],
        distance: Distance,
    ) -> Vec<f32> {
        self.read_row_distances(fresh, cached, width, pairs, distance)
    }

    fn attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        self.read_mass(a, None, None, slots, sums);
    }

    fn noisy_attention_mass(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        noise: &GumbelNoise<'_>,
        sums: &mut [f32],
    ) {
        self.read_mass(a, None, Some(noise), slots, sums);
    }

    fn concat_attention_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        self.read_concat_mass(a, slots, sums);
    }

    fn row_weights(&self, a: &CachedAttention<'_>, slots: Range<usize>, weights: &mut [f32]) {
        self.read_row_weights(a, None, slots, weights);
    }

    fn aggregated_weights(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        aggregation: WeightAggregation,
        scores: &mut [f32],
    ) {
        self.read_aggregated_weights(a, slots, aggregation, statistics::HELD, scores);
    }

    fn attention_mass_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        self.read_mass(a, Some(lse), None, slots, sums);
    }

    fn column_weights_from_lse(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: &[u32],
        weights: &mut [f32],
    ) {
        self.read_column_weights(a, lse, slots, weights);
    }

    fn concat_logits(&self, q: &[f32], keys: HeadKeys<'_>, scale: f32, z: &mut [f32]) {
        self.read_concat_logits(q, keys, scale, z);
    }
}
