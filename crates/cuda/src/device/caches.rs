//! Calls on keys and values beside attention: rotation, placing, gathering, comparing.

use std::ops::Range;

use refrain_kernels::{CacheHeads, Distance, Floats, KvBuffer, KvRows, Rotary, Slice};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::{assert_one_type, assert_rows, for_dtype, for_size, narrow, size};
use super::layers::rows_of;
use super::tensors::{floats, kv_block};
use crate::driver::Driver;

/// Tables of a rotation in the GPU's memory.
pub(super) struct Tables<D: Driver> {
    pub(super) cos: Block<D>,
    pub(super) sin: Block<D>,
    /// Pairs that are rotated.
    pub(super) half: usize,
}

pub(super) fn assert_slots(slots: &[u32], capacity: usize) {
    assert!(slots.iter().all(|slot| (*slot as usize) < capacity), "slots are below {capacity}");
}

impl<D: Driver> CudaDevice<D> {
    pub(super) fn tables(&self, rotary: Rotary<'_>, tokens: usize, head_dim: usize) -> Tables<D> {
        let half = rotary.dim(tokens) / 2;
        assert!(2 * half <= head_dim, "at most a head is rotated");
        assert!(
            rotary.cos.len() == tokens * half && rotary.sin.len() == tokens * half,
            "one entry for each token"
        );
        Tables { cos: self.block_of(rotary.cos), sin: self.block_of(rotary.sin), half }
    }

    pub(super) fn rotate_rows(&self, x: &mut Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>) {
        let tokens = x.len() / (heads * head_dim);
        let Tables { cos, sin, half } = self.tables(rotary, tokens, head_dim);
        let (x, cos, sin) = (floats::<D>(x).arg(0), cos.arg(0), sin.arg(0));
        let args = [x, cos, sin, size(tokens), size(heads), size(head_dim), size(half)];
        self.launch_each("rope", tokens * heads * half, &args);
    }

    pub(super) fn place_rows(
        &self,
        rows: KvRows<'_>,
        heads: CacheHeads,
        rotary: Rotary<'_>,
        slots: &[u32],
        cache: &mut KvBuffer,
    ) {
        let (CacheHeads { kv_heads, head_dim: d }, width, tokens) = (heads, heads.width(), slots.len());
        if tokens * width == 0 {
            return;
        }
        let capacity = cache.len() / width;
        assert_slots(slots, capacity);
        let uploaded;
        let rows = match rows {
            KvRows::Host(rows) => {
                assert_one_type(rows.dtype(), cache.dtype());
                assert_eq!(rows.len(), tokens * width, "rows are tokens × heads × head_dim");
                uploaded = self.block_of_slice(rows);
                uploaded.arg(0)
            }
            KvRows::Device(rows, first) => {
                assert_one_type(rows.dtype(), cache.dtype());
                assert!((first + tokens) * width <= rows.len(), "rows lie inside of the tensor");
                kv_block::<D>(rows).arg(first * width * rows.dtype().size())
            }
        };
        let (Tables { cos, sin, half }, slots) = (self.tables(rotary, tokens, d), self.block_of(slots));
        let args = [
            rows,
            cos.arg(0),
            sin.arg(0),
            slots.arg(0),
            kv_block::<D>(cache).arg(0),
            size(tokens),
            size(kv_heads),
            size(d),
            size(half),
            size(capacity),
        ];
        self.launch_each(for_dtype!(cache.dtype(), "place"), tokens * kv_heads * (d - half), &args);
    }

    pub(super) fn gather_cache_slots(
        &self,
        cache: &KvBuffer,
        d: usize,
        from: usize,
        kept: &[u32],
        copies: usize,
        to: usize,
    ) -> KvBuffer {
        let heads = cache.len() / (from * d).max(1) * copies;
        let each = kept.len() / heads.max(1);
        assert!(each <= to && kept.len() == heads * each, "each head keeps as many slots, at most {to}");
        assert_slots(kept, from);
        let gathered = self.zeroed_kv(cache.dtype(), heads * to * d);
        let kept = self.block_of(kept);
        let args = [
            kv_block::<D>(cache).arg(0),
            kept.arg(0),
            kv_block::<D>(&gathered).arg(0),
            size(heads),
            size(each),
            size(d),
            size(from),
            size(copies),
            size(to),
        ];
        self.launch_each(for_size!(cache.dtype(), "gather_slots"), heads * each * d, &args);
        gathered
    }

    pub(super) fn rotated_slots(
        &self,
        cache: &KvBuffer,
        heads: CacheHeads,
        capacity: usize,
        slots: &[u32],
        rotary: Rotary<'_>,
    ) -> KvBuffer {
        let (CacheHeads { kv_heads, head_dim: d }, count) = (heads, slots.len());
        assert_slots(slots, capacity);
        assert!(cache.len() >= heads.width() * capacity, "a cache is heads × capacity × head_dim");
        let rotated = self.open_kv(cache.dtype(), kv_heads * count * d);
        let (Tables { cos, sin, half }, slots) = (self.tables(rotary, count, d), self.block_of(slots));
        let args = [
            kv_block::<D>(cache).arg(0),
            cos.arg(0),
            sin.arg(0),
            slots.arg(0),
            kv_block::<D>(&rotated).arg(0),
            size(count),
            size(kv_heads),
            size(d),
            size(half),
            size(capacity),
        ];
        self.launch_each(for_dtype!(cache.dtype(), "rotate_slots"), count * kv_heads * (d - half), &args);
        rotated
    }

    pub(super) fn read_mean_row(&self, x: &Floats, width: usize, rows: Range<usize>) -> Vec<f32> {
        let mean = self.block(4 * width);
        let args = [rows_of::<D>(x, width, rows.clone()).at, mean.arg(0), size(rows.len()), size(width)];
        self.launch_each("mean_row", width, &args);
        self.read_floats(&mean)
    }

    pub(super) fn read_row_distances(
        &self,
        fresh: &KvBuffer,
        cached: Slice<'_>,
        width: usize,
        pairs: &[(usize, usize)],
        distance: Distance,
    ) -> Vec<f32> {
        assert_one_type(fresh.dtype(), cached.dtype());
        let rows: Vec<u32> = pairs.iter().map(|(row, _)| narrow(*row)).collect();
        assert_rows(&rows, width, fresh.len());
        let row = |(_, row): &(usize, usize)| cached.range(row * width..(row + 1) * width).as_bytes();
        let cached = pairs.iter().map(row).collect::<Vec<&[u8]>>().concat();
        let (rows, cached, distances) =
            (self.block_of(&rows), self.block_of(&cached), self.block(4 * pairs.len()));
        let args = [
            kv_block::<D>(fresh).arg(0),
            rows.arg(0),
            cached.arg(0),
            distances.arg(0),
            size(width),
            size(usize::from(distance == Distance::L1)),
        ];
        self.launch(for_dtype!(fresh.dtype(), "row_distances"), [pairs.len(), 1, 1], 32, 0, &args);
        self.read_floats(&distances)
    }
}
