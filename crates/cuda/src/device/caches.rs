//! Calls on keys and values beside attention: rotation, placing, gathering, comparing.

use std::ops::Range;
use std::sync::Arc;

use refrain_kernels::{CacheHeads, Distance, Dtype, Floats, KvBuffer, KvRows, Rotary, Slice};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::{assert_one_type, assert_rows, for_dtype, for_size, narrow, size};
use super::layers::rows_of;
use super::tensors::{floats, kv_block, table_stride};
use crate::driver::{Arg, Driver};

/// Tables of a rotation in the GPU's memory.
pub(super) struct Tables<D: Driver> {
    table: Arc<Block<D>>,
    /// Bytes from cosines to sines.
    stride: usize,
    /// Pairs that are rotated.
    pub(super) half: usize,
}

impl<D: Driver> Tables<D> {
    pub(super) fn cos(&self) -> Arg<'_, D::Memory> {
        self.table.read_arg(0)
    }

    pub(super) fn sin(&self) -> Arg<'_, D::Memory> {
        self.table.read_arg(self.stride.min(self.table.bytes()))
    }
}

pub(super) fn assert_slots(slots: &[u32], capacity: usize) {
    assert!(slots.iter().all(|slot| (*slot as usize) < capacity), "slots are below {capacity}");
}

/// Rows of keys or of values, and the cache that they go to; none where they are not placed.
type Side<'a, M> = Option<(Arg<'a, M>, Arg<'a, M>)>;

/// The slots of a cache that tokens go to: an array of them, or those from `first` on.
struct Slots<'a, M> {
    array: Arg<'a, M>,
    first: u32,
    tokens: usize,
    /// Slots of a head.
    capacity: usize,
}

impl<D: Driver> CudaDevice<D> {
    pub(super) fn tables(&self, rotary: Rotary<'_>, tokens: usize, head_dim: usize) -> Tables<D> {
        let half = rotary.dim(tokens) / 2;
        assert!(2 * half <= head_dim, "at most a head is rotated");
        assert!(
            rotary.cos.len() == tokens * half && rotary.sin.len() == tokens * half,
            "one entry for each token"
        );
        Tables { table: self.table_of(rotary), stride: table_stride(rotary.cos.len()), half }
    }

    pub(super) fn rope_rows(&self, x: &Floats, heads: usize, head_dim: usize, rotary: Rotary<'_>) {
        let tokens = x.len() / (heads * head_dim);
        let no_slots = Slots { array: Arg::Null, first: 0, tokens, capacity: 0 };
        let kv = (CacheHeads { kv_heads: 0, head_dim }, [None; 2]);
        let tables = self.tables(rotary, tokens, head_dim);
        self.launch_placing(Dtype::F32, Some((x, heads)), kv, &tables, no_slots);
    }

    /// Rotates queries, where there are any with their number of heads, in place, and puts keys, rotated, and values into their slots.
    pub(super) fn place_rows(
        &self,
        queries: Option<(&Floats, usize)>,
        heads: CacheHeads,
        sides: [Option<(KvRows<'_>, &KvBuffer)>; 2],
        rotary: Rotary<'_>,
        slots: &[u32],
    ) {
        let (width, tokens) = (heads.width(), slots.len());
        if let Some((q, q_heads)) = queries {
            assert_eq!(q.len(), tokens * q_heads * heads.head_dim, "there are queries of each token");
        }
        let Some((_, first_cache)) = sides.iter().flatten().next() else { return };
        let (dtype, len) = (first_cache.dtype(), first_cache.len());
        if tokens * width == 0 {
            return;
        }
        let capacity = len / width;
        assert_slots(slots, capacity);
        let from_host: Vec<&[u8]> = sides
            .iter()
            .filter_map(|side| match side {
                Some((KvRows::Host(rows), _)) => Some(rows.as_bytes()),
                _ => None,
            })
            .collect();
        let (uploads, stride) = self.block_of_parts(&from_host);
        let mut uploaded = 0;
        let args = sides.map(|side| {
            let (rows, cache) = side?;
            assert_one_type(cache.dtype(), dtype);
            assert_eq!(cache.len(), len, "there are as many values as keys");
            let rows = match rows {
                KvRows::Host(rows) => {
                    assert_one_type(rows.dtype(), dtype);
                    assert_eq!(rows.len(), tokens * width, "rows are tokens × heads × head_dim");
                    uploaded += stride;
                    uploads.arg(uploaded - stride)
                }
                KvRows::Device(rows, first) => {
                    assert_one_type(rows.dtype(), dtype);
                    assert!((first + tokens) * width <= rows.len(), "rows lie inside of the tensor");
                    kv_block::<D>(rows).read_arg(first * width * dtype.size())
                }
            };
            Some((rows, kv_block::<D>(cache).arg(0)))
        });
        let is_run = slots.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]));
        let scattered = (!is_run).then(|| self.kept_block_of(slots));
        let array = scattered.as_ref().map_or(Arg::Null, |slots| slots.arg(0));
        let tables = self.tables(rotary, tokens, heads.head_dim);
        let slots = Slots { array, first: slots[0], tokens, capacity };
        self.launch_placing(dtype, queries, (heads, args), &tables, slots);
    }

    /// Keys and values, rows and cache of each, are of `dtype`.
    fn launch_placing(
        &self,
        dtype: Dtype,
        queries: Option<(&Floats, usize)>,
        (heads, [k, v]): (CacheHeads, [Side<'_, D::Memory>; 2]),
        tables: &Tables<D>,
        slots: Slots<'_, D::Memory>,
    ) {
        let (CacheHeads { kv_heads, head_dim: d }, half, tokens) = (heads, tables.half, slots.tokens);
        let (q, q_heads) = queries.map_or((Arg::Null, 0), |(q, heads)| (floats::<D>(q).arg(0), heads));
        // Elements of 16 bytes, where heads and what is rotated of them are whole multiples.
        let wide = 16 / dtype.size();
        let is_wide = d.is_multiple_of(wide) && half.is_multiple_of(wide);
        let (each, each_query) = if is_wide { (wide, 4) } else { (1, 1) };
        let threads = tokens * q_heads * (half / each_query)
            + if k.is_some() { tokens * kv_heads * ((d - half) / each) } else { 0 }
            + if v.is_some() { tokens * kv_heads * (d / each) } else { 0 };
        let kernel = match is_wide {
            true => for_dtype!(dtype, "wide_rope_and_place"),
            false => for_dtype!(dtype, "rope_and_place"),
        };
        let [(k, k_cache), (v, v_cache)] = [k, v].map(|side| side.unwrap_or((Arg::Null, Arg::Null)));
        let args = [
            q,
            k,
            v,
            tables.cos(),
            tables.sin(),
            slots.array,
            k_cache,
            v_cache,
            size(tokens),
            size(q_heads),
            size(kv_heads),
            size(d),
            size(half),
            Arg::U32(slots.first),
            size(slots.capacity),
        ];
        // Kernels count threads in 32 bits.
        self.launch_each(kernel, narrow(threads) as usize, &args);
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
        let kept = self.kept_block_of(kept);
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
        let (tables, slots) = (self.tables(rotary, count, d), self.kept_block_of(slots));
        let args = [
            kv_block::<D>(cache).arg(0),
            tables.cos(),
            tables.sin(),
            slots.arg(0),
            kv_block::<D>(&rotated).arg(0),
            size(count),
            size(kv_heads),
            size(d),
            size(tables.half),
            size(capacity),
        ];
        self.launch_each(
            for_dtype!(cache.dtype(), "rotate_slots"),
            count * kv_heads * (d - tables.half),
            &args,
        );
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
