//! Changes of a cache's rows: those that fresh rows show, and those that are added to many slots.

use std::ops::Range;

use refrain_kernels::{CacheHeads, KvBuffer, Rotary};

use super::caches::assert_slots;
use super::context::CudaDevice;
use super::launch::{assert_one_type, assert_rows, for_dtype, narrow, size};
use super::tensors::kv_block;
use crate::driver::Driver;

impl<D: Driver> CudaDevice<D> {
    pub(super) fn summed_changes(
        &self,
        (fresh, tokens): (&KvBuffer, usize),
        cache: &KvBuffer,
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32> {
        assert_one_type(fresh.dtype(), cache.dtype());
        let (CacheHeads { kv_heads, head_dim: d }, width) = (heads, heads.width().max(1));
        let capacity = cache.len() / width;
        let (rows, slots): (Vec<u32>, Vec<u32>) =
            groups.iter().flatten().map(|(row, slot)| (narrow(*row), *slot)).unzip();
        assert_slots(&slots, capacity);
        assert!(tokens * width <= fresh.len(), "rows lie inside of the tensor");
        assert_rows(&rows, width, tokens * width);
        let pairs: Vec<[u32; 2]> = rows.into_iter().zip(slots).map(<[u32; 2]>::from).collect();
        let mut bounds = vec![0];
        groups.iter().for_each(|group| bounds.push(bounds[bounds.len() - 1] + narrow(group.len())));
        let tables = self.tables(rotary, tokens, d);
        let (pairs, bounds) = (self.block_of(&pairs), self.block_of(&bounds));
        let sums = self.block(4 * groups.len() * width);
        let args = [
            kv_block::<D>(fresh).arg(0),
            kv_block::<D>(cache).arg(0),
            tables.cos(),
            tables.sin(),
            pairs.arg(0),
            bounds.arg(0),
            sums.arg(0),
            size(kv_heads),
            size(d),
            size(tables.half),
            size(capacity),
        ];
        let grid = [(kv_heads * (d - tables.half)).div_ceil(32), groups.len(), 1];
        self.launch(for_dtype!(cache.dtype(), "sum_changes"), grid, 256, 2 * 4 * 256, &args);
        self.read_floats(&sums)
    }

    pub(super) fn add_rows_to_spans(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut KvBuffer,
    ) {
        let (CacheHeads { kv_heads, head_dim: d }, width) = (heads, heads.width());
        let (capacity, end) = (cache.len() / width.max(1), spans.last().map_or(0, |span| span.end));
        assert!(
            rows.len() == spans.len() * width && spans.is_sorted_by(|a, b| a.end <= b.start),
            "one row for each span, and spans ascend"
        );
        assert!(end <= capacity, "slots are below {capacity}");
        let tables = self.tables(rotary, end, d);
        let longest = spans.iter().map(Range::len).max().unwrap_or(0);
        let spans: Vec<[u32; 2]> = spans.iter().map(|span| [narrow(span.start), narrow(span.end)]).collect();
        let (rows, ranges) = (self.block_of(rows), self.block_of(&spans));
        let args = [
            rows.arg(0),
            tables.cos(),
            tables.sin(),
            kv_block::<D>(cache).arg(0),
            ranges.arg(0),
            size(kv_heads),
            size(d),
            size(tables.half),
            size(capacity),
        ];
        let grid = [(longest * kv_heads * (d - tables.half)).div_ceil(256), spans.len(), 1];
        self.launch(for_dtype!(cache.dtype(), "add_rows"), grid, 256, 0, &args);
    }
}
