//! Attention mass: the weights that rows give to slots, summed over rows.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use half::{bf16, f16};

use super::flash::{largest, mask};
use super::gumbel::GumbelNoise;
use super::input::Attention;
use super::key_tiles;
use super::query_blocks::QueryBlock;
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, ROUNDS, split_off_front};
use crate::buffer::Slice;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, strip_width};

/// Most sums that are kept apart. It does not depend on the number of threads, so that the order of sums never changes.
const SUMS: usize = 32;
/// Most scores of a block that are kept until their divisors are known, about: 4 MiB a thread.
const KEPT: usize = 1 << 20;

/// At most `each` rows, fewer where there are many slots, so that a block's scores stay in the caches.
fn kept_rows(shape: &AttentionShape, each: usize, slots: usize) -> usize {
    each.min((KEPT / (shape.group * slots.max(1))).max(STRIP.div_ceil(shape.group)))
}

impl Cpu {
    /// Attention mass of each slot.
    ///
    /// s (kv_heads × slots.len()): s\[g, t\] = Σ_r Σ_h softmax_t(scale · q\[r, h\] · k\[g, t\]) over the heads h of KV head
    /// g. The softmax of a row is taken over the slots that it sees from `slots.start` on. Values are not read.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn attention_mass(&self, a: &Attention, slots: Range<usize>, s: &mut [f32]) {
        self.mass_by_type(a, slots, None, s);
    }

    /// Attention mass of each slot, as in [`Cpu::attention_mass`], of softmax((scale · q · k + g) / τ) with Gumbel noise
    /// `g`.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn noisy_attention_mass(
        &self,
        a: &Attention,
        slots: Range<usize>,
        noise: &GumbelNoise<'_>,
        s: &mut [f32],
    ) {
        noise.check(a);
        self.mass_by_type(a, slots, Some(noise), s);
    }

    fn mass_by_type(&self, a: &Attention, slots: Range<usize>, noise: Option<&GumbelNoise>, s: &mut [f32]) {
        a.check();
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(s.len(), a.kv_heads * slots.len(), "one sum for each KV head and slot");
        match a.k {
            Slice::F32(k) => self.softmax_mass::<f32>(a, k, slots, noise, s),
            Slice::F16(k) => self.softmax_mass::<f16>(a, k, slots, noise, s),
            Slice::Bf16(k) => self.softmax_mass::<bf16>(a, k, slots, noise, s),
        }
    }

    fn softmax_mass<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        slots: Range<usize>,
        noise: Option<&GumbelNoise>,
        s: &mut [f32],
    ) {
        if slots.start > 0 || !self.mass_without_values(a, k, noise, s) {
            self.mass(a, k, slots, Normalizer::Softmax(noise), s);
        }
    }

    /// Weights that each row gives to each slot.
    ///
    /// w (kv_heads × rows × slots.len()): w\[g, r, t\] = Σ_h softmax_t(scale · q\[r, h\] · k\[g, t\]) over the heads h of
    /// KV head g. The softmax is taken over the slots that the row sees from `slots.start` on.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn row_weights(&self, a: &Attention, slots: Range<usize>, w: &mut [f32]) {
        a.check();
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(w.len(), a.kv_heads * a.visible.len() * slots.len(), "one for each KV head, row and slot");
        match a.k {
            Slice::F32(k) => self.weights::<f32>(a, k, slots, w),
            Slice::F16(k) => self.weights::<f16>(a, k, slots, w),
            Slice::Bf16(k) => self.weights::<bf16>(a, k, slots, w),
        }
    }

    fn weights<E: Elem>(&self, a: &Attention, k: &[E], slots: Range<usize>, w: &mut [f32]) {
        let (shape, rows, n) = (a.shape(), a.visible.len(), slots.len());
        let each = kept_rows(&shape, shape.block_rows(rows, self.threads()), n);
        let blocks = rows.div_ceil(each);
        w.fill(0.0);
        let shared = DisjointMut::new(w);
        let worth = rows * n * shape.heads * shape.head_dim > 1 << 18;
        self.parallel_if(worth, shape.kv_heads * blocks, &|t| {
            let (g, b) = (t / blocks, t % blocks);
            let block = QueryBlock { shape, g, rows: b * each..((b + 1) * each).min(rows) };
            let range = (g * rows + block.rows.start) * n..(g * rows + block.rows.end) * n;
            // SAFETY: the rows of a block belong to one task.
            let sums = unsafe { shared.part(range) };
            self.run(AddMass {
                a,
                k,
                block,
                slots: slots.clone(),
                normalizer: Normalizer::Softmax(None),
                apart: true,
                sums,
            });
        });
    }

    /// s (kv_heads × slots.len()) = the attention mass of each slot.
    pub(super) fn mass<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        slots: Range<usize>,
        normalizer: Normalizer,
        s: &mut [f32],
    ) {
        let (shape, rows) = (a.shape(), a.visible.len());
        // Not chosen by the number of threads, which must not change a sum.
        let each = shape.block_rows(rows, SUMS / 2);
        let each = match normalizer {
            Normalizer::Softmax(_) => kept_rows(&shape, each, slots.len()),
            Normalizer::Lse(_) => each,
        };
        self.sum_blocks(shape, rows, each, slots.len(), s, &|block, sums| {
            let slots = slots.clone();
            self.run(AddMass { a, k, block, slots, normalizer, apart: false, sums });
        });
    }

    /// s (kv_heads × n) = sums over blocks of `each` rows of a KV head. `task` adds a block's terms to the `width` >= n
    /// floats that it is given, which hold the sums of other blocks. The order of the sums is always the same.
    pub(super) fn sum_blocks(
        &self,
        shape: AttentionShape,
        rows: usize,
        each: usize,
        width: usize,
        s: &mut [f32],
        task: &(dyn Fn(QueryBlock, &mut [f32]) + Sync),
    ) {
        let n = s.len() / shape.kv_heads;
        let tasks = shape.kv_heads * rows.div_ceil(each);
        // Whole rounds of KV heads, so that kept sums are of one of them.
        let kept = tasks.min((SUMS / shape.kv_heads).max(1) * shape.kv_heads);
        let mut scratch = scratch::borrow(&ROUNDS, kept * width);
        let sums = &mut scratch.as_f32_mut()[..kept * width];
        sums.fill(0.0);
        let shared = DisjointMut::new(sums);
        self.parallel_if(rows * n * shape.heads * shape.head_dim > 1 << 18, kept, &|i| {
            // SAFETY: sums `i` belong to task `i`.
            let sums = unsafe { shared.part(i * width..(i + 1) * width) };
            for t in (i..tasks).step_by(kept) {
                let b = t / shape.kv_heads;
                let rows = b * each..((b + 1) * each).min(rows);
                task(QueryBlock { shape, g: t % shape.kv_heads, rows }, sums);
            }
        });
        s.fill(0.0);
        for (i, sums) in sums.chunks_exact(width.max(1)).enumerate() {
            let s = &mut s[i % shape.kv_heads * n..][..n];
            s.iter_mut().zip(sums).for_each(|(s, sum)| *s += sum);
        }
    }
}

/// The divisor of the exponentials of a row.
#[derive(Clone, Copy)]
pub(super) enum Normalizer<'a> {
    /// Their sum over the slots that the row sees from the first requested slot on; the scores may be noisy.
    Softmax(Option<&'a GumbelNoise<'a>>),
    /// Given: its natural logarithms, rows × heads.
    Lse(&'a [f32]),
}

impl<'a> Normalizer<'a> {
    /// Initialises maxima and sums of a block. Returns whether they are final, and the noise of the scores.
    fn start(
        self,
        block: &QueryBlock,
        max: &mut [f32],
        total: &mut [f32],
    ) -> (bool, Option<&'a GumbelNoise<'a>>) {
        match self {
            Normalizer::Softmax(noise) => {
                max.fill(-1e30);
                total.fill(0.0);
                (false, noise)
            }
            Normalizer::Lse(lse) => {
                for (i, max) in max.iter_mut().enumerate().take(block.queries()) {
                    *max = lse[block.index(i)] * LOG2_E;
                }
                total.fill(1.0);
                (true, None)
            }
        }
    }
}

/// Adds a block's probabilities to the sums of the slots.
pub(super) struct AddMass<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) block: QueryBlock,
    pub(super) slots: Range<usize>,
    pub(super) normalizer: Normalizer<'a>,
    /// Whether each of the block's rows has its own sums.
    pub(super) apart: bool,
    pub(super) sums: &'a mut [f32],
}

/// Buffers of a block.
struct Buffers<'a> {
    /// Scores, 12 × 64.
    p: &'a mut [f32],
    /// Maximum that the softmax subtracts, in the scale of base-2 scores, and divisor of each query row.
    max: &'a mut [f32],
    total: &'a mut [f32],
    /// Sums of a tile of slots.
    tile: &'a mut [f32],
    /// Scores of each query row, masked and noisy: the probabilities need the divisors, which are known once all scores are. Empty where
    /// divisors are given.
    kept: &'a mut [f32],
    /// Scores that are kept of a query row, whole tiles.
    kept_len: usize,
    /// Slot of the first of them.
    origin: usize,
}

impl<E: Elem> Kernel for AddMass<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let AddMass { a, k, ref block, ref slots, normalizer, apart, .. } = self;
        let (block, slots) = (block.clone(), slots.clone());
        let (d, padded, n) = (block.shape.head_dim, block.shape.padded, block.strips() * STRIP);
        let span = block.span(a.visible, 0..block.queries());
        let start = span.start.max(slots.start);
        if start >= span.end {
            return;
        }
        let origin = start / KEYS * KEYS;
        let kept_len = match normalizer {
            Normalizer::Softmax(_) => span.end.min(slots.end).saturating_sub(origin).next_multiple_of(KEYS),
            Normalizer::Lse(_) => 0,
        };
        let len = n * (d + 2 + kept_len) + KEYS * (STRIP + padded + d + 1);
        let mut scratch = scratch::borrow(&BUFFERS, len);
        let mut floats = scratch.as_f32_mut();
        let p = split_off_front(&mut floats, STRIP * KEYS);
        let rows = split_off_front(&mut floats, KEYS * padded);
        let keys = split_off_front(&mut floats, KEYS * d);
        let tile = split_off_front(&mut floats, KEYS);
        let (max, total) = (split_off_front(&mut floats, n), split_off_front(&mut floats, n));
        let q = split_off_front(&mut floats, n * d);
        let kept = split_off_front(&mut floats, n * kept_len);
        let mut work = Buffers { p, max, total, tile, kept, kept_len, origin };
        block.pack(a, a.scale * LOG2_E, q);
        let (given, noise) = normalizer.start(&block, work.max, work.total);
        // The first pass computes scores and divisors, unless these are given; the second adds the probabilities.
        for (last, end) in [(false, if given { 0 } else { span.end }), (true, span.end.min(slots.end))] {
            let scored = given || !last;
            for first in (origin..end).step_by(KEYS) {
                if scored {
                    let tile = first.max(start)..(first + KEYS).min(span.end);
                    key_tiles::rows(simd, block.shape.head(k, block.g), d, first, tile, padded, rows);
                    key_tiles::transpose(simd, rows, padded, d, keys);
                }
                work.tile.fill(0.0);
                for (s, q) in q.chunks_exact(STRIP * d).enumerate() {
                    let queries = block.strip(s);
                    let any = block.span(a.visible, queries.clone());
                    if any.start < first + KEYS && first < any.end {
                        if scored {
                            key_tiles::scores(simd, d, keys, q, strip_width(queries.len()), work.p);
                        }
                        self.add_strip(simd, queries, first, last, noise, &mut work);
                    }
                }
                if last && !apart {
                    add_tile(work.tile, first, &slots, self.sums);
                }
            }
        }
    }
}

impl<E> AddMass<'_, E> {
    /// Adds a strip's scores of the tile of slots from `first` on to the divisors or, in the `last` pass, the probabilities
    /// to the sums.
    #[inline(always)]
    fn add_strip<S: Simd>(
        &mut self,
        simd: S,
        queries: Range<usize>,
        first: usize,
        last: bool,
        noise: Option<&GumbelNoise>,
        work: &mut Buffers,
    ) {
        let (block, slots) = (&self.block, &self.slots);
        for (i, p) in queries.zip(work.p.chunks_exact_mut(KEYS)) {
            let (from, to) = self.a.visible[block.row(i)];
            let from = (from as usize).max(slots.start).saturating_sub(first);
            let seen = from..(to as usize).saturating_sub(first);
            if seen.start >= seen.end.min(KEYS) {
                continue;
            }
            // Slots past those that are asked for count in the divisors alone.
            let is_kept = first - work.origin < work.kept_len;
            let kept = is_kept.then(|| &mut work.kept[i * work.kept_len + first - work.origin..][..KEYS]);
            if !last {
                if let Some(noise) = noise {
                    noise.add(block, i, first, p);
                }
                let largest = largest(simd, p, seen);
                (work.max[i], work.total[i]) = sum_tile(simd, p, work.max[i], work.total[i], largest);
                if let Some(kept) = kept {
                    kept.copy_from_slice(p);
                }
                continue;
            }
            let scores = match kept {
                Some(kept) => kept,
                None => {
                    mask(simd, p, seen);
                    p
                }
            };
            add_probabilities(simd, scores, work.max[i], work.total[i], work.tile);
            if self.apart {
                let sums = &mut self.sums[(block.row(i) - block.rows.start) * slots.len()..][..slots.len()];
                add_tile(work.tile, first, slots, sums);
                work.tile.fill(0.0);
            }
        }
    }
}

/// sums += the part of a tile of slots from `first` on that lies in `slots`.
#[inline(always)]
fn add_tile(tile: &[f32], first: usize, slots: &Range<usize>, sums: &mut [f32]) {
    let from = first.max(slots.start);
    let tile = &tile[from - first..(slots.end - first).min(KEYS)];
    for (sum, more) in sums[from - slots.start..].iter_mut().zip(tile) {
        *sum += more;
    }
}

/// The maximum and Σ 2^(score − maximum) after one more tile.
#[inline(always)]
fn sum_tile<S: Simd>(simd: S, scores: &[f32], max: f32, total: f32, largest: f32) -> (f32, f32) {
    let new = max.max(largest);
    let mut sum = simd.splat(0.0);
    for j in (0..KEYS).step_by(S::LANES) {
        // SAFETY: there are KEYS scores, a multiple of the lanes.
        let v = unsafe { simd.load(scores.as_ptr().add(j)) };
        sum = simd.add(sum, simd.exp2(simd.sub(v, simd.splat(new))));
    }
    // The lanes are equal: the largest of them is any of them.
    let change = simd.largest(simd.exp2(simd.splat(max - new)));
    (new, total * change + simd.sum(sum))
}

/// sums += 2^(score − max) / total; a row that sees nothing adds nothing.
#[inline(always)]
fn add_probabilities<S: Simd>(simd: S, scores: &[f32], max: f32, total: f32, sums: &mut [f32]) {
    if total == 0.0 {
        return;
    }
    let scale = simd.splat(1.0 / total);
    for j in (0..KEYS).step_by(S::LANES) {
        // SAFETY: there are KEYS scores and sums, a multiple of the lanes.
        unsafe {
            let v = simd.exp2(simd.sub(simd.load(scores.as_ptr().add(j)), simd.splat(max)));
            let to = sums.as_mut_ptr().add(j);
            simd.store(to, simd.fma(v, scale, simd.load(to)));
        }
    }
}

/// Writes sums (rows × at least `slots`, `n` floats apart) as slots × `all` rows.
pub(super) fn write_transposed(
    sums: &[f32],
    n: usize,
    slots: usize,
    rows: Range<usize>,
    all: usize,
    out: &DisjointMut<f32>,
) {
    for s in 0..slots {
        // SAFETY: these rows belong to one task.
        let out = unsafe { out.part(s * all + rows.start..s * all + rows.end) };
        out.iter_mut().zip(sums.chunks_exact(n)).for_each(|(out, sums)| *out = sums[s]);
    }
}
