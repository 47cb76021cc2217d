//! What rows give to slots, where attention has already told the logarithms of the sums that softmax divides by.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use half::{bf16, f16};

use super::columns::Softmax;
use super::flash::hide;
use super::queries::{Block, Shape, cut};
use super::{Attention, WORK, keys};
use crate::scratch::{self, Lent, Words};
use crate::shared::Shared;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, Tile, strip_width};
use crate::{Cpu, Slice};
#[cfg(target_arch = "x86_64")]
use crate::{Isa, Precision};

#[cfg(target_arch = "x86_64")]
use super::{TILE_ROWS, given_tiles};

/// Query rows of a task of [`Cpu::weights_of`], about.
const QUERIES: usize = 192;

thread_local! {
    /// Keys of a call, as its tasks want them.
    static PREPARED: std::cell::Cell<Words> = const { std::cell::Cell::new(Words::new()) };
}

impl Cpu {
    /// sums (kv_heads × slots.len()): sums\[g, t\] = Σ_r Σ_h exp(score\[r, h, t\] − lse\[r, h\]) over the heads h of KV head g
    /// and the rows r that see the slot: what the rows give to each slot.
    ///
    /// With another precision than [`Precision::F32`](crate::Precision) queries and keys may be rounded to `bf16`.
    ///
    /// lse: rows × heads, as [`Report::lse`](super::Report::lse) tells it. It may count slots that `a.visible` leaves out, and
    /// rows may see nothing; then their logarithm does not matter. Values are not read. The number of threads
    /// does not change the sums.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn received(&self, a: &Attention, lse: &[f32], slots: Range<usize>, sums: &mut [f32]) {
        a.check_lengths();
        assert_eq!(lse.len(), a.visible.len() * a.heads, "lse is rows × heads");
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(sums.len(), a.kv_heads * slots.len(), "one sum for each KV head and slot");
        match a.k {
            Slice::F32(k) => self.receive::<f32>(a, k, lse, slots, sums),
            Slice::F16(k) => self.receive::<f16>(a, k, lse, slots, sums),
            Slice::Bf16(k) => self.receive::<bf16>(a, k, lse, slots, sums),
        }
    }

    /// out (slots.len() × rows): out\[s, r\] = Σ_h exp(score\[r, h, slots\[s\]\] − lse\[r, h\]) over all query heads h, 0 where the
    /// row does not see the slot: the weights that each row gives to a few slots, which ascend.
    ///
    /// lse and rows that see nothing: as for [`Cpu::received`].
    ///
    /// # Panics
    /// If lengths do not fit, or slots do not ascend.
    pub fn weights_of(&self, a: &Attention, lse: &[f32], slots: &[u32], out: &mut [f32]) {
        a.check_lengths();
        assert_eq!(lse.len(), a.visible.len() * a.heads, "lse is rows × heads");
        assert!(slots.is_sorted_by(|a, b| a < b), "slots ascend");
        assert!(slots.last().is_none_or(|s| (*s as usize) < a.capacity), "slots are below the capacity");
        assert_eq!(out.len(), slots.len() * a.visible.len(), "one weight for each slot and row");
        match a.k {
            Slice::F32(k) => self.weigh_slots::<f32>(a, k, lse, slots, out),
            Slice::F16(k) => self.weigh_slots::<f16>(a, k, lse, slots, out),
            Slice::Bf16(k) => self.weigh_slots::<bf16>(a, k, lse, slots, out),
        }
    }

    /// Whether tiles multiply.
    #[cfg(target_arch = "x86_64")]
    fn has_tiles(&self, a: &Attention) -> bool {
        self.isa() == Isa::Amx && a.precision != Precision::F32 && a.visible.len() >= TILE_ROWS
    }

    fn receive<E: Elem>(&self, a: &Attention, k: &[E], lse: &[f32], slots: Range<usize>, sums: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.has_tiles(a) {
            return self.receive_tiles(a, k, lse, slots, sums);
        }
        self.columns(a, k, slots, Softmax::Given(lse), sums);
    }

    #[cfg(target_arch = "x86_64")]
    fn receive_tiles<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        lse: &[f32],
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        let shape = a.shape();
        // Tiles begin at the first slot; what lies behind the last is summed, but nobody asks for it.
        let (tiles, words) = (slots.len().div_ceil(KEYS), given_tiles::tile_words(&shape));
        let prepared = self.prepare(shape.kv_heads * tiles, words, &|t, out| {
            let (g, first) = (t / tiles, slots.start + t % tiles * KEYS);
            let slots = given_tiles::Slots::All(first..(first + KEYS).min(slots.end));
            self.isa().run(given_tiles::Prepare { shape, k: shape.head(k, g), slots, out });
        });
        let (rows, each) = (a.visible.len(), given_tiles::block_rows(&shape));
        self.sum_blocks(shape, rows, each, tiles * KEYS, sums, &|block, sums| {
            let prepared = &prepared.words.words()[block.g * tiles * words..(block.g + 1) * tiles * words];
            given_tiles::Receive { a, lse, prepared, first: slots.start, block, sums }.run();
        });
    }

    fn weigh_slots<E: Elem>(&self, a: &Attention, k: &[E], lse: &[f32], slots: &[u32], out: &mut [f32]) {
        let (shape, out) = (a.shape(), &Shared::new(out));
        #[cfg(target_arch = "x86_64")]
        if self.has_tiles(a) {
            return self.weigh_tiles(a, k, lse, slots, out);
        }
        let (tiles, words) = (slots.len().div_ceil(KEYS), shape.head_dim * KEYS);
        let prepared = self.prepare(shape.kv_heads * tiles, words, &|t, out| {
            let (k, slots) = (shape.head(k, t / tiles), nth_tile(slots, t % tiles));
            self.isa().run(Gather { shape, k, slots, factor: a.scale * LOG2_E, out });
        });
        let keys = bytemuck::cast_slice(&prepared.words.words()[..shape.kv_heads * tiles * words]);
        self.split_rows(a, slots.len(), &|rows| {
            self.isa().run(Weigh { a, lse, keys, slots, rows, out });
        });
    }

    #[cfg(target_arch = "x86_64")]
    fn weigh_tiles<E: Elem>(&self, a: &Attention, k: &[E], lse: &[f32], slots: &[u32], out: &Shared<f32>) {
        let shape = a.shape();
        let (tiles, words) = (slots.len().div_ceil(KEYS), given_tiles::tile_words(&shape));
        let prepared = self.prepare(shape.kv_heads * tiles, words, &|t, out| {
            let slots = given_tiles::Slots::Some(nth_tile(slots, t % tiles));
            self.isa().run(given_tiles::Prepare { shape, k: shape.head(k, t / tiles), slots, out });
        });
        let prepared = &prepared.words.words()[..shape.kv_heads * tiles * words];
        self.split_rows(a, slots.len(), &|rows| {
            given_tiles::Weigh { a, lse, prepared, slots, rows, out }.run();
        });
    }

    /// `n` times `words` words, each written by a task.
    fn prepare(&self, n: usize, words: usize, task: &(dyn Fn(usize, &mut [u32]) + Sync)) -> Lent {
        let mut prepared = scratch::lend(&PREPARED, n * words);
        let shared = Shared::new(prepared.words.words_mut());
        self.parallel_if(n * words > 1 << 14, n, &|t| {
            // SAFETY: these words belong to task `t`.
            task(t, unsafe { shared.part(t * words..(t + 1) * words) });
        });
        prepared
    }

    /// Runs a task for each block of rows that are to be multiplied with `slots` keys.
    fn split_rows(&self, a: &Attention, slots: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
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
struct Gather<'a, E> {
    shape: Shape,
    /// The head's keys, capacity × head_dim.
    k: &'a [E],
    slots: &'a [u32],
    factor: f32,
    out: &'a mut [u32],
}

impl<E: Elem> Kernel for Gather<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Gather { shape: Shape { head_dim: d, padded, .. }, k, slots, factor, out } = self;
        let mut scratch = scratch::lend(&WORK, KEYS * padded);
        let rows = &mut scratch.words.floats_mut()[..KEYS * padded];
        keys::gather::<S, E>(k, d, slots, padded, rows);
        for i in (0..rows.len()).step_by(S::LANES) {
            // SAFETY: the length is a multiple of the lanes.
            unsafe {
                let at = rows.as_mut_ptr().add(i);
                S::store(at, S::mul(S::load(at), S::splat(factor)));
            }
        }
        keys::transpose::<S>(rows, padded, d, bytemuck::cast_slice_mut(out));
    }
}

/// Weights of some rows for the gathered slots.
struct Weigh<'a> {
    a: &'a Attention<'a>,
    lse: &'a [f32],
    /// What [`Gather`] wrote for each KV head and 64 slots.
    keys: &'a [f32],
    slots: &'a [u32],
    rows: Range<usize>,
    out: &'a Shared<'a, f32>,
}

impl Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Weigh { a, lse, keys, slots, rows, out } = self;
        let (shape, n) = (a.shape(), slots.len().next_multiple_of(KEYS));
        let (d, deep) = (shape.head_dim, shape.head_dim.div_ceil(KEYS));
        let mut scratch = scratch::lend(&WORK, (deep + 1) * STRIP * KEYS + rows.len() * n);
        let mut floats = scratch.words.floats_mut();
        let p = cut(&mut floats, STRIP * KEYS);
        let q = cut(&mut floats, deep * STRIP * KEYS);
        let sums = cut(&mut floats, rows.len() * n);
        sums.fill(0.0);
        for (g, keys) in keys.chunks_exact((n * d).max(1)).enumerate() {
            let block = Block { shape, g, rows: rows.clone() };
            for queries in (0..block.strips()).map(|s| block.strip(s)) {
                pack(a, &block, queries.clone(), q);
                for (t, keys) in keys.chunks_exact(KEYS * d).enumerate() {
                    let slots = nth_tile(slots, t);
                    let seen = block.span(a.visible, queries.clone());
                    if count_below(slots, seen.start) == count_below(slots, seen.end) {
                        continue;
                    }
                    multiply::<S>(d, keys, q, strip_width(queries.len()), slots.len(), p);
                    for (i, p) in queries.clone().zip(p.chunks_exact_mut(KEYS)) {
                        let (from, to) = a.visible[block.row(i)];
                        let seen = count_below(slots, from as usize)..count_below(slots, to as usize);
                        if !seen.is_empty() {
                            let sums = &mut sums[(block.row(i) - rows.start) * n + t * KEYS..][..KEYS];
                            add_weights::<S>(p, seen, lse[block.index(i)] * LOG2_E, slots.len(), sums);
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

/// Writes sums (rows × at least `slots`, `n` floats apart) as slots × `all` rows.
pub(super) fn write_transposed(
    sums: &[f32],
    n: usize,
    slots: usize,
    rows: Range<usize>,
    all: usize,
    out: &Shared<f32>,
) {
    for s in 0..slots {
        // SAFETY: these rows belong to one task.
        let out = unsafe { out.part(s * all + rows.start..s * all + rows.end) };
        out.iter_mut().zip(sums.chunks_exact(n)).for_each(|(out, sums)| *out = sums[s]);
    }
}

/// Copies a strip's queries: elements 64 · b .. of the one at place `r` from b · 12 · 64 + r · 64 on.
fn pack(a: &Attention, block: &Block, queries: Range<usize>, q: &mut [f32]) {
    for (r, i) in queries.enumerate() {
        let query = &a.q[block.at(i)..][..block.shape.head_dim];
        for (part, q) in query.chunks(KEYS).zip(q.chunks_exact_mut(STRIP * KEYS)) {
            q[r * KEYS..][..part.len()].copy_from_slice(part);
        }
    }
}

/// p (12 × 64, the first `n` columns) = packed queries times keys (d × 64).
#[inline(always)]
fn multiply<S: Simd>(d: usize, keys: &[f32], q: &[f32], width: usize, n: usize, p: &mut [f32]) {
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
        unsafe { S::strip::<KEYS>(width, &tile) };
    }
}

/// sums += 2^(score − lse) for the first `n` slots, those not `seen` left as they are.
#[inline(always)]
fn add_weights<S: Simd>(scores: &mut [f32], seen: Range<usize>, lse: f32, n: usize, sums: &mut [f32]) {
    hide::<S>(scores, seen);
    let (scores, sums) = (scores[..KEYS].as_ptr(), sums[..KEYS].as_mut_ptr());
    for j in (0..n).step_by(S::LANES) {
        // SAFETY: there are KEYS scores and sums, a multiple of the lanes and no fewer than `n`.
        unsafe {
            let v = S::exp2(S::sub(S::load(scores.add(j)), S::splat(lse)));
            S::store(sums.add(j), S::add(v, S::load(sums.add(j))));
        }
    }
}
