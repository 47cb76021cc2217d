//! Weights and their sums, normalised by log-sum-exps that an attention has computed before.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use half::{bf16, f16};

use super::attention_mass::{Normalizer, write_transposed};
use super::flash::mask;
#[cfg(target_arch = "x86_64")]
use super::from_lse_pairs;
use super::input::Attention;
use super::key_tiles;
use super::query_blocks::QueryBlock;
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, PACKED_KEYS, split_off_front};
use crate::buffer::Slice;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch::{self, ScratchGuard};
#[cfg(target_arch = "x86_64")]
use crate::simd::pair_tiles::PairTiles;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, Tile, strip_width};

/// Query rows of a task of [`Cpu::column_weights_from_lse`], about.
const QUERIES: usize = 192;

impl Cpu {
    /// Attention mass of each slot from given log-sum-exps.
    ///
    /// sums (kv_heads × slots.len()): sums\[g, t\] = Σ_r Σ_h exp(score\[r, h, t\] − lse\[r, h\]) over the heads h of KV head g
    /// and the rows r that see the slot.
    ///
    /// With another precision than [`Precision::F32`](crate::Precision) queries and keys may be rounded to `bf16`.
    ///
    /// lse: rows × heads, as in [`AttentionOutputs::lse`](crate::AttentionOutputs::lse). It may count slots that
    /// `a.visible` leaves out. Rows may see no slot; their lse is not used. Values are not read. The number of threads
    /// does not change the sums.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn attention_mass_from_lse(&self, a: &Attention, lse: &[f32], slots: Range<usize>, sums: &mut [f32]) {
        a.check_lengths();
        assert_eq!(lse.len(), a.visible.len() * a.heads, "lse is rows × heads");
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(sums.len(), a.kv_heads * slots.len(), "one sum for each KV head and slot");
        match a.k {
            Slice::F32(k) => self.mass_from_lse::<f32>(a, k, lse, slots, sums),
            Slice::F16(k) => self.mass_from_lse::<f16>(a, k, lse, slots, sums),
            Slice::Bf16(k) => self.mass_from_lse::<bf16>(a, k, lse, slots, sums),
        }
    }

    /// Weights that each row gives to some slots, from given log-sum-exps.
    ///
    /// out (slots.len() × rows): out\[s, r\] = Σ_h exp(score\[r, h, slots\[s\]\] − lse\[r, h\]) over all query heads h, 0 where the
    /// row does not see the slot. Slots ascend.
    ///
    /// lse, and rows that see no slot: see [`Cpu::attention_mass_from_lse`].
    ///
    /// # Panics
    /// If lengths do not fit, or slots do not ascend.
    pub fn column_weights_from_lse(&self, a: &Attention, lse: &[f32], slots: &[u32], out: &mut [f32]) {
        a.check_lengths();
        assert_eq!(lse.len(), a.visible.len() * a.heads, "lse is rows × heads");
        assert!(slots.is_sorted_by(|a, b| a < b), "slots ascend");
        assert!(slots.last().is_none_or(|s| (*s as usize) < a.capacity), "slots are below the capacity");
        assert_eq!(out.len(), slots.len() * a.visible.len(), "one weight for each slot and row");
        match a.k {
            Slice::F32(k) => self.column_weights::<f32>(a, k, lse, slots, out),
            Slice::F16(k) => self.column_weights::<f16>(a, k, lse, slots, out),
            Slice::Bf16(k) => self.column_weights::<bf16>(a, k, lse, slots, out),
        }
    }

    fn mass_from_lse<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        lse: &[f32],
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        #[cfg(target_arch = "x86_64")]
        if a.is_worth_tiles() {
            if let Some(amx) = self.amx() {
                return self.mass_of_pairs(amx, a, k, lse, slots, sums);
            }
            if let Some(bf16) = self.fast_pairs() {
                return self.mass_of_pairs(bf16, a, k, lse, slots, sums);
            }
        }
        self.mass(a, k, slots, Normalizer::Lse(lse), sums);
    }

    #[cfg(target_arch = "x86_64")]
    fn mass_of_pairs<E: Elem, T: PairTiles>(
        &self,
        token: T,
        a: &Attention,
        k: &[E],
        lse: &[f32],
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        let shape = a.shape();
        // Tiles begin at the first slot. Columns past the last slot are summed and left out of the result.
        let (tiles, words) = (slots.len().div_ceil(KEYS), from_lse_pairs::tile_words(&shape));
        let packed = self.pack_keys(shape.kv_heads * tiles, words, &|t, out| {
            let (g, first) = (t / tiles, slots.start + t % tiles * KEYS);
            let slots = from_lse_pairs::SlotSet::Range(first..(first + KEYS).min(slots.end));
            token.run(from_lse_pairs::PackKeys { token, shape, k: shape.head(k, g), slots, out });
        });
        let (rows, each) = (a.visible.len(), from_lse_pairs::block_rows(&shape));
        self.sum_blocks(shape, rows, each, tiles * KEYS, sums, &|block, sums| {
            let packed = &packed.as_u32()[block.g * tiles * words..(block.g + 1) * tiles * words];
            from_lse_pairs::AttentionMassPairs { token, a, lse, packed, first: slots.start, block, sums }
                .run();
        });
    }

    fn column_weights<E: Elem>(&self, a: &Attention, k: &[E], lse: &[f32], slots: &[u32], out: &mut [f32]) {
        let (shape, out) = (a.shape(), &DisjointMut::new(out));
        #[cfg(target_arch = "x86_64")]
        if a.is_worth_tiles() {
            if let Some(amx) = self.amx() {
                return self.column_weights_of_pairs(amx, a, k, lse, slots, out);
            }
            if let Some(bf16) = self.fast_pairs() {
                return self.column_weights_of_pairs(bf16, a, k, lse, slots, out);
            }
        }
        let (tiles, words) = (slots.len().div_ceil(KEYS), shape.head_dim * KEYS);
        let packed = self.pack_keys(shape.kv_heads * tiles, words, &|t, out| {
            let (k, slots) = (shape.head(k, t / tiles), nth_tile(slots, t % tiles));
            self.run(GatherKeys { shape, k, slots, factor: a.scale * LOG2_E, out });
        });
        let keys = bytemuck::cast_slice(&packed.as_u32()[..shape.kv_heads * tiles * words]);
        self.for_row_blocks(a, slots.len(), &|rows| {
            self.run(ColumnWeights { a, lse, keys, slots, rows, out });
        });
    }

    #[cfg(target_arch = "x86_64")]
    fn column_weights_of_pairs<E: Elem, T: PairTiles>(
        &self,
        token: T,
        a: &Attention,
        k: &[E],
        lse: &[f32],
        slots: &[u32],
        out: &DisjointMut<f32>,
    ) {
        let shape = a.shape();
        let (tiles, words) = (slots.len().div_ceil(KEYS), from_lse_pairs::tile_words(&shape));
        let packed = self.pack_keys(shape.kv_heads * tiles, words, &|t, out| {
            let slots = from_lse_pairs::SlotSet::List(nth_tile(slots, t % tiles));
            token.run(from_lse_pairs::PackKeys { token, shape, k: shape.head(k, t / tiles), slots, out });
        });
        let packed = &packed.as_u32()[..shape.kv_heads * tiles * words];
        self.for_row_blocks(a, slots.len(), &|rows| {
            from_lse_pairs::ColumnWeightsPairs { token, a, lse, packed, slots, rows, out }.run();
        });
    }

    /// `n` times `words` words; each task writes the words of one index.
    fn pack_keys(&self, n: usize, words: usize, task: &(dyn Fn(usize, &mut [u32]) + Sync)) -> ScratchGuard {
        let mut packed = scratch::borrow(&PACKED_KEYS, n * words);
        let shared = DisjointMut::new(packed.as_u32_mut());
        self.parallel_if(n * words > 1 << 14, n, &|t| {
            // SAFETY: these words belong to task `t`.
            task(t, unsafe { shared.part(t * words..(t + 1) * words) });
        });
        packed
    }

    /// Runs a task for each block of rows, which are multiplied with `slots` keys.
    fn for_row_blocks(&self, a: &Attention, slots: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
        let rows = a.visible.len();
        let each = (QUERIES * a.kv_heads / a.heads).max(1);
        self.parallel_if(a.q.len() * slots > 1 << 18, rows.div_ceil(each), &|b| {
            task(b * each..((b + 1) * each).min(rows));
        });
    }
}

/// The slots of tile `t`.
fn nth_tile(slots: &[u32], t: usize) -> &[u32] {
    &slots[t * KEYS..slots.len().min((t + 1) * KEYS)]
}

/// Gathers at most 64 slots' keys of a KV head, times `factor`: head_dim × 64.
struct GatherKeys<'a, E> {
    shape: AttentionShape,
    /// The head's keys, capacity × head_dim.
    k: &'a [E],
    slots: &'a [u32],
    factor: f32,
    out: &'a mut [u32],
}

impl<E: Elem> Kernel for GatherKeys<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let GatherKeys { shape: AttentionShape { head_dim: d, padded, .. }, k, slots, factor, out } = self;
        let mut scratch = scratch::borrow(&BUFFERS, KEYS * padded);
        let rows = &mut scratch.as_f32_mut()[..KEYS * padded];
        key_tiles::gather(simd, k, d, slots, padded, rows);
        for i in (0..rows.len()).step_by(S::LANES) {
            // SAFETY: the length is a multiple of the lanes.
            unsafe {
                let at = rows.as_mut_ptr().add(i);
                simd.store(at, simd.mul(simd.load(at), simd.splat(factor)));
            }
        }
        key_tiles::transpose(simd, rows, padded, d, bytemuck::cast_slice_mut(out));
    }
}

/// Computes the weights of some rows for the gathered slots.
struct ColumnWeights<'a> {
    a: &'a Attention<'a>,
    lse: &'a [f32],
    /// The output of [`GatherKeys`] for each KV head and 64 slots.
    keys: &'a [f32],
    slots: &'a [u32],
    rows: Range<usize>,
    out: &'a DisjointMut<'a, f32>,
}

impl Kernel for ColumnWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ColumnWeights { a, lse, keys, slots, rows, out } = self;
        let (shape, n) = (a.shape(), slots.len().next_multiple_of(KEYS));
        let (d, deep) = (shape.head_dim, shape.head_dim.div_ceil(KEYS));
        let mut scratch = scratch::borrow(&BUFFERS, (deep + 1) * STRIP * KEYS + rows.len() * n);
        let mut floats = scratch.as_f32_mut();
        let p = split_off_front(&mut floats, STRIP * KEYS);
        let q = split_off_front(&mut floats, deep * STRIP * KEYS);
        let sums = split_off_front(&mut floats, rows.len() * n);
        sums.fill(0.0);
        for (g, keys) in keys.chunks_exact((n * d).max(1)).enumerate() {
            let block = QueryBlock { shape, g, rows: rows.clone() };
            for queries in (0..block.strips()).map(|s| block.strip(s)) {
                pack(a, &block, queries.clone(), q);
                for (t, keys) in keys.chunks_exact(KEYS * d).enumerate() {
                    let slots = nth_tile(slots, t);
                    let seen = block.span(a.visible, queries.clone());
                    if count_below(slots, seen.start) == count_below(slots, seen.end) {
                        continue;
                    }
                    scores(simd, d, keys, q, strip_width(queries.len()), slots.len(), p);
                    for (i, p) in queries.clone().zip(p.chunks_exact_mut(KEYS)) {
                        let (from, to) = a.visible[block.row(i)];
                        let seen = count_below(slots, from as usize)..count_below(slots, to as usize);
                        if !seen.is_empty() {
                            let sums = &mut sums[(block.row(i) - rows.start) * n + t * KEYS..][..KEYS];
                            add_weights(simd, p, seen, lse[block.index(i)] * LOG2_E, slots.len(), sums);
                        }
                    }
                }
            }
        }
        write_transposed(sums, n, slots.len(), rows, a.visible.len(), out);
    }
}

/// How many of ascending slots are below `end`.
fn count_below(slots: &[u32], end: usize) -> usize {
    slots.partition_point(|slot| (*slot as usize) < end)
}

/// Copies a strip's queries: elements 64 · b .. of the one at place `r` from b · 12 · 64 + r · 64 on.
fn pack(a: &Attention, block: &QueryBlock, queries: Range<usize>, q: &mut [f32]) {
    for (r, i) in queries.enumerate() {
        let query = &a.q[block.at(i)..][..block.shape.head_dim];
        for (part, q) in query.chunks(KEYS).zip(q.chunks_exact_mut(STRIP * KEYS)) {
            q[r * KEYS..][..part.len()].copy_from_slice(part);
        }
    }
}

/// p (12 × 64, the first `n` columns) = packed queries times keys (d × 64).
#[inline(always)]
fn scores<S: Simd>(simd: S, d: usize, keys: &[f32], q: &[f32], width: usize, n: usize, p: &mut [f32]) {
    for (b, q) in q.chunks_exact(STRIP * KEYS).enumerate() {
        let k = KEYS.min(d - b * KEYS);
        let tile = Tile {
            k,
            w: keys[b * KEYS * KEYS..][..k * KEYS].as_ptr().cast(),
            ws: KEYS,
            ps: 32,
            x: q.as_ptr().cast(),
            ks: 1,
            c: p[..width * KEYS].as_mut_ptr(),
            cs: KEYS,
            cps: 32,
            cols: n.next_multiple_of(16),
            add: b > 0,
        };
        // SAFETY: the slices above have the lengths the tile needs.
        unsafe { simd.strip::<KEYS>(width, &tile) };
    }
}

/// sums += 2^(score − lse) for those of the first `n` slots that are `seen`.
#[inline(always)]
fn add_weights<S: Simd>(
    simd: S,
    scores: &mut [f32],
    seen: Range<usize>,
    lse: f32,
    n: usize,
    sums: &mut [f32],
) {
    mask(simd, scores, seen);
    let (scores, sums) = (scores[..KEYS].as_ptr(), sums[..KEYS].as_mut_ptr());
    for j in (0..n).step_by(S::LANES) {
        // SAFETY: there are KEYS scores and sums, a multiple of the lanes and no fewer than `n`.
        unsafe {
            let v = simd.exp2(simd.sub(simd.load(scores.add(j)), simd.splat(lse)));
            simd.store(sums.add(j), simd.add(v, simd.load(sums.add(j))));
        }
    }
}
