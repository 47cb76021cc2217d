//! What rows give to slots, key by key: the sums of probabilities over rows.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::flash::{hide, largest};
use super::queries::{Block, Shape, cut};
use super::scores::multiply;
use super::{Attention, Noise, ROUNDS, WORK, keys};
use crate::shared::Shared;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, strip_width};
use crate::{Cpu, scratch};

/// At most so many sums are kept apart, however many threads there are: their order is then always the same.
const SUMS: usize = 32;

impl Cpu {
    /// s (kv_heads × slots.len()) = what the rows give to each slot.
    pub(super) fn columns<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        slots: Range<usize>,
        softmax: Softmax,
        s: &mut [f32],
    ) {
        let (shape, rows) = (a.shape(), a.visible.len());
        // Not chosen by the number of threads, which must not change a sum.
        let each = shape.block_rows(rows, SUMS / 2);
        self.sum_blocks(shape, rows, each, slots.len(), s, &|block, sums| {
            let slots = slots.clone();
            self.isa().run(Columns { a, k, block, slots, softmax, apart: false, sums });
        });
    }

    /// s (kv_heads × n) = the sums of what `task` adds for each block of `each` rows of a KV head to the `width` >= n floats
    /// that it is given, which others have added to before. The order of the sums is always the same.
    pub(super) fn sum_blocks(
        &self,
        shape: Shape,
        rows: usize,
        each: usize,
        width: usize,
        s: &mut [f32],
        task: &(dyn Fn(Block, &mut [f32]) + Sync),
    ) {
        let n = s.len() / shape.kv_heads;
        let tasks = shape.kv_heads * rows.div_ceil(each);
        // Whole rounds of KV heads, so that kept sums are of one of them.
        let kept = tasks.min((SUMS / shape.kv_heads).max(1) * shape.kv_heads);
        let mut scratch = scratch::lend(&ROUNDS, kept * width);
        let sums = &mut scratch.words.floats_mut()[..kept * width];
        sums.fill(0.0);
        let shared = Shared::new(sums);
        self.parallel_if(rows * n * shape.heads * shape.head_dim > 1 << 18, kept, &|i| {
            // SAFETY: sums `i` belong to task `i`.
            let sums = unsafe { shared.part(i * width..(i + 1) * width) };
            for t in (i..tasks).step_by(kept) {
                let b = t / shape.kv_heads;
                let rows = b * each..((b + 1) * each).min(rows);
                task(Block { shape, g: t % shape.kv_heads, rows }, sums);
            }
        });
        s.fill(0.0);
        for (i, sums) in sums.chunks_exact(width.max(1)).enumerate() {
            let s = &mut s[i % shape.kv_heads * n..][..n];
            s.iter_mut().zip(sums).for_each(|(s, sum)| *s += sum);
        }
    }
}

/// What scores are divided by after exponentials.
#[derive(Clone, Copy)]
pub(super) enum Softmax<'a> {
    /// The sum over the slots that a row sees from the first on that is asked for; the scores may be noisy.
    Own(Option<&'a Noise<'a>>),
    /// Natural logarithms of it, rows × heads.
    Given(&'a [f32]),
}

impl<'a> Softmax<'a> {
    /// What maxima and sums of a block start from; whether they are given, and the noise if not.
    fn start(self, block: &Block, max: &mut [f32], total: &mut [f32]) -> (bool, Option<&'a Noise<'a>>) {
        match self {
            Softmax::Own(noise) => {
                max.fill(-1e30);
                total.fill(0.0);
                (false, noise)
            }
            Softmax::Given(lse) => {
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
pub(super) struct Columns<'a, E> {
    pub(super) a: &'a Attention<'a>,
    pub(super) k: &'a [E],
    pub(super) block: Block,
    pub(super) slots: Range<usize>,
    pub(super) softmax: Softmax<'a>,
    /// Whether each of the block's rows has sums of its own.
    pub(super) apart: bool,
    pub(super) sums: &'a mut [f32],
}

/// Buffers of a block.
struct Work<'a> {
    /// Scores, 12 × 64.
    p: &'a mut [f32],
    /// What the softmax subtracts and divides by, in base-2 scores' scale.
    max: &'a mut [f32],
    total: &'a mut [f32],
    /// Sums of a tile of slots.
    tile: &'a mut [f32],
}

impl<E: Elem> Kernel for Columns<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self) {
        let Columns { a, k, ref block, ref slots, softmax, apart, .. } = self;
        let (block, slots) = (block.clone(), slots.clone());
        let (d, padded, n) = (block.shape.head_dim, block.shape.padded, block.strips() * STRIP);
        let mut scratch = scratch::lend(&WORK, n * (d + 2) + KEYS * (STRIP + padded + d + 1));
        let mut floats = scratch.words.floats_mut();
        let p = cut(&mut floats, STRIP * KEYS);
        let rows = cut(&mut floats, KEYS * padded);
        let keys = cut(&mut floats, KEYS * d);
        let tile = cut(&mut floats, KEYS);
        let mut work = Work { p, max: cut(&mut floats, n), total: cut(&mut floats, n), tile };
        let q = cut(&mut floats, n * d);
        block.pack(a, a.scale * LOG2_E, q);
        let (given, noise) = softmax.start(&block, work.max, work.total);
        let span = block.span(a.visible, 0..block.queries());
        let start = span.start.max(slots.start);
        // First what the softmax divides by, if it is not given, then, where they are asked for, the probabilities.
        for (last, end) in [(false, if given { 0 } else { span.end }), (true, span.end.min(slots.end))] {
            for first in (start / KEYS * KEYS..end).step_by(KEYS) {
                let tile = first.max(start)..(first + KEYS).min(span.end);
                keys::rows::<S, E>(block.shape.head(k, block.g), d, first, tile, padded, rows);
                keys::transpose::<S>(rows, padded, d, keys);
                work.tile.fill(0.0);
                for (s, q) in q.chunks_exact(STRIP * d).enumerate() {
                    let queries = block.strip(s);
                    let any = block.span(a.visible, queries.clone());
                    if any.start < first + KEYS && first < any.end {
                        multiply::<S>(d, keys, q, strip_width(queries.len()), work.p);
                        self.take_in::<S>(queries, first, last, noise, &mut work);
                    }
                }
                if last && !apart {
                    add_tile(work.tile, first, &slots, self.sums);
                }
            }
        }
    }
}

impl<E> Columns<'_, E> {
    /// Takes in a strip's scores of the tile of slots from `first` on: in what the softmax divides by, at `last` in the sums.
    #[inline(always)]
    fn take_in<S: Simd>(
        &mut self,
        queries: Range<usize>,
        first: usize,
        last: bool,
        noise: Option<&Noise>,
        work: &mut Work,
    ) {
        let (block, slots) = (&self.block, &self.slots);
        for (i, p) in queries.zip(work.p.chunks_exact_mut(KEYS)) {
            let (from, to) = self.a.visible[block.row(i)];
            let from = (from as usize).max(slots.start).saturating_sub(first);
            let seen = from..(to as usize).saturating_sub(first);
            if seen.start >= seen.end.min(KEYS) {
                continue;
            }
            if let Some(noise) = noise {
                noise.add(block, i, first, p);
            }
            if !last {
                let largest = largest::<S>(p, seen);
                (work.max[i], work.total[i]) = sum_tile::<S>(p, work.max[i], work.total[i], largest);
                continue;
            }
            hide::<S>(p, seen);
            add_probabilities::<S>(p, work.max[i], work.total[i], work.tile);
            if self.apart {
                let sums = &mut self.sums[(block.row(i) - block.rows.start) * slots.len()..][..slots.len()];
                add_tile(work.tile, first, slots, sums);
                work.tile.fill(0.0);
            }
        }
    }
}

/// sums += what a tile of slots from `first` on has for `slots`.
#[inline(always)]
fn add_tile(tile: &[f32], first: usize, slots: &Range<usize>, sums: &mut [f32]) {
    let from = first.max(slots.start);
    let tile = &tile[from - first..(slots.end - first).min(KEYS)];
    for (sum, more) in sums[from - slots.start..].iter_mut().zip(tile) {
        *sum += more;
    }
}

/// The maximum and Σ 2^(score − maximum) with one more tile.
#[inline(always)]
fn sum_tile<S: Simd>(scores: &[f32], max: f32, total: f32, largest: f32) -> (f32, f32) {
    let new = max.max(largest);
    let mut sum = S::splat(0.0);
    for j in (0..KEYS).step_by(S::LANES) {
        // SAFETY: there are KEYS scores, a multiple of the lanes.
        let v = unsafe { S::load(scores.as_ptr().add(j)) };
        sum = S::add(sum, S::exp2(S::sub(v, S::splat(new))));
    }
    // The lanes are equal: the largest of them is any of them.
    let change = S::largest(S::exp2(S::splat(max - new)));
    (new, total * change + S::sum(sum))
}

/// sums += 2^(score − max) / total; a row that sees nothing adds nothing.
#[inline(always)]
fn add_probabilities<S: Simd>(scores: &[f32], max: f32, total: f32, sums: &mut [f32]) {
    if total == 0.0 {
        return;
    }
    let scale = S::splat(1.0 / total);
    for j in (0..KEYS).step_by(S::LANES) {
        // SAFETY: there are KEYS scores and sums, a multiple of the lanes.
        unsafe {
            let v = S::exp2(S::sub(S::load(scores.as_ptr().add(j)), S::splat(max)));
            let to = sums.as_mut_ptr().add(j);
            S::store(to, S::fma(v, scale, S::load(to)));
        }
    }
}
