//! Attention mass beside attention over tiles of integers: the weights of a block are kept as `bf16`, relative to each row's maximum in their tile, and scaled
//! and summed by key once maxima and sums of all keys are known, so that neither products nor exponentials are computed again. Integers would not do:
//! noise makes weights large that they round to zero.
//!
//! Shape: 12 queries × 64 keys of one strip and tile. Bound: reading the kept weights, two bytes each, some 1.5 MiB for a block over 4,096 keys.

use std::arch::x86_64::*;

use half::bf16;

use super::flash_i16::{self, ENTRY, IntegerBuffers, KeptWeights, PAIRS, PackedTiles, WEIGHTS};
use super::gumbel::{self, GumbelNoise};
use super::input::Attention;
use super::partial_output::PartialOutput;
use super::query_blocks::{QueryBlock, SEGMENT};
use super::shape::STATS;
use super::workspace::{BUFFERS, PACKED_KEYS, split_off_front};
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::features::Avx2;
use crate::simd::i16_tiles::WEIGHT_BITS;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd};

/// Slots of a word's two vectors.
const UNIT: usize = 2 * Avx2::LANES;
/// Rows from which on weights are kept. Fewer make too few blocks for many threads.
const LEAST_ROWS: usize = 64;
/// Threads that there are blocks enough for. Their own number must not change a sum.
const THREADS: usize = 16;

impl Cpu {
    /// Whether the weights of the attention are summed by key beside it over tiles of integers.
    pub(super) fn sums_integers(&self, a: &Attention, noise: Option<&GumbelNoise>) -> bool {
        let integers = self.avx2().is_some_and(|simd| flash_i16::token(simd, a).is_some());
        integers && a.visible.len() >= LEAST_ROWS && noise.is_none_or(GumbelNoise::multiplies)
    }

    /// Attention with its mass, kv_heads × slots, to which the weights are added.
    pub(super) fn attend_integers_with_mass<E: Elem>(
        &self,
        a: &Attention,
        (k, v): (&[E], &[E]),
        out: &DisjointMut<f32>,
        lse: Option<&DisjointMut<f32>>,
        (mass, noise): (&mut [f32], Option<&GumbelNoise>),
    ) {
        let (shape, rows, slots) = (a.shape(), a.visible.len(), mass.len() / a.kv_heads);
        let mut tiles = scratch::borrow(&PACKED_KEYS, 0);
        let tiles = self.pack_integers(a, (k, v), true, &mut tiles).expect("tiles are of integers");
        let mut more = vec![0.0; mass.len()];
        let each = shape.block_rows(rows, THREADS);
        self.sum_blocks(shape, rows, each, slots.next_multiple_of(KEYS), &mut more, &|block, sums| {
            self.run(FlashBlockWithMass { a, k, v, tiles, block, out, lse, noise, sums });
        });
        mass.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
}

/// Computes a block over all its keys, and adds its weights to `sums`, one for each slot.
struct FlashBlockWithMass<'a, E> {
    a: &'a Attention<'a>,
    k: &'a [E],
    v: &'a [E],
    tiles: PackedTiles<'a>,
    block: QueryBlock,
    out: &'a DisjointMut<'a, f32>,
    lse: Option<&'a DisjointMut<'a, f32>>,
    noise: Option<&'a GumbelNoise<'a>>,
    sums: &'a mut [f32],
}

impl<E: Elem> Kernel for FlashBlockWithMass<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let FlashBlockWithMass { a, k, v, tiles, block, out, lse, noise, sums } = self;
        let Some(simd) = simd.avx2() else { return };
        let size = block.shape.part_len(block.queries());
        let (span, strips) = (block.span(a.visible, 0..block.queries()), block.strips());
        let (first, last) = (span.start / KEYS, span.end.div_ceil(KEYS));
        let kept_words = (last - first) * strips * ENTRY;
        let mut scratch = scratch::borrow(&BUFFERS, IntegerBuffers::len(&block) + 2 * size + kept_words);
        let mut floats = scratch.as_f32_mut();
        let mut work = IntegerBuffers::new(simd, a, &block, &mut floats);
        let mut total = PartialOutput::new(&block, split_off_front(&mut floats, size));
        let mut part = PartialOutput::new(&block, split_off_front(&mut floats, size));
        let entries = bytemuck::cast_slice_mut(split_off_front(&mut floats, kept_words));
        let mut kept = KeptWeights::new(entries, strips, first);
        total.clear();
        for segment in span.start / SEGMENT..span.end.div_ceil(SEGMENT) {
            part.clear();
            let (stored, to) = ((k, v, Some(tiles)), (&mut part, Some(&mut kept)));
            work.attend_segment(simd, a, stored, &block, segment, to);
            total.merge(simd, part.o, part.m, part.l, block.shape.padded);
        }
        total.finish(simd, &block, out, lse);
        for s in 0..strips {
            let seen = block.span(a.visible, block.strip(s));
            let slots = (seen.start / KEYS..seen.end.div_ceil(KEYS)).map(|tile| tile * KEYS);
            let strip = Strip::new(simd, &block, s, &total, noise);
            let divisors = match &strip.noise {
                None => strip.total,
                Some(_) => strip.noisy_totals(slots.clone(), &mut kept),
            };
            for slot in slots {
                strip.add(slot, &divisors, kept.entry(s, slot), sums);
            }
        }
    }
}

/// A strip of queries whose maxima and sums are known.
struct Strip {
    simd: Avx2,
    s: usize,
    rows: usize,
    max: [f32; STATS],
    total: [f32; STATS],
    /// Hashes of the rows' noise.
    noise: Option<[u32; STRIP]>,
}

/// Sixteen weights, of eight slots and the next eight, times their noise if there is some.
#[inline(always)]
fn weights(simd: Avx2, pairs: &[u32], noise: Option<&[bf16]>) -> [__m256; 2] {
    let pairs = &pairs[..Avx2::LANES];
    // SAFETY: there are eight words, and sixteen factors.
    unsafe {
        let (low, high) = simd.load_pair(pairs.as_ptr());
        let Some(noise) = noise else { return [low, high] };
        let noise = noise[..2 * Avx2::LANES].as_ptr();
        [simd.mul(low, simd.load_bf16(noise)), simd.mul(high, simd.load_bf16(noise.add(Avx2::LANES)))]
    }
}

impl Strip {
    #[inline(always)]
    fn new(
        simd: Avx2,
        block: &QueryBlock,
        s: usize,
        total: &PartialOutput,
        noise: Option<&GumbelNoise>,
    ) -> Strip {
        let queries = block.strip(s);
        let of = |x: &[f32]| std::array::from_fn(|r| x[s * STATS + r]);
        let (rows, noise) = (queries.len(), noise.and_then(|noise| noise.keys(block, queries)));
        Strip { simd, s, rows, max: of(total.m), total: of(total.l), noise }
    }

    /// 2^(a tile's maximum − 13 − the maximum) of each row.
    #[inline(always)]
    fn factors(&self, entry: &[u32]) -> [f32; STATS] {
        let (simd, maxima) = (self.simd, bytemuck::cast_slice::<u32, f32>(&entry[PAIRS..PAIRS + STATS]));
        let mut factors = [0.0; STATS];
        for i in (0..STATS).step_by(Avx2::LANES) {
            // SAFETY: all have STATS floats.
            unsafe {
                let below = simd.add(simd.load(self.max.as_ptr().add(i)), simd.splat(WEIGHT_BITS));
                let factor = simd.exp2(simd.sub(simd.load(maxima.as_ptr().add(i)), below));
                simd.store(factors.as_mut_ptr().add(i), factor);
            }
        }
        factors
    }

    /// The noise of row `r` and the slots of a tile.
    #[inline(always)]
    fn noise_of(&self, r: usize, slot: usize) -> Option<&'static [bf16]> {
        Some(gumbel::tile(gumbel::entry(self.noise?[r], slot as u32)))
    }

    /// Sums of the rows' noisy weights.
    #[inline(always)]
    fn noisy_totals(&self, slots: impl Iterator<Item = usize>, kept: &mut KeptWeights) -> [f32; STATS] {
        let (simd, mut totals) = (self.simd, [0.0; STATS]);
        for slot in slots {
            let entry = kept.entry(self.s, slot);
            let factors = self.factors(entry);
            for r in 0..self.rows {
                let (noise, mut sums) = (self.noise_of(r, slot), [simd.splat(0.0); 2]);
                for j in (0..KEYS).step_by(UNIT) {
                    let noise = noise.map(|noise| &noise[j..]);
                    let [low, high] = weights(simd, &entry[r * WEIGHTS + j / 2..], noise);
                    sums = [simd.add(sums[0], low), simd.add(sums[1], high)];
                }
                totals[r] += factors[r] * simd.sum(simd.add(sums[0], sums[1]));
            }
        }
        totals
    }

    /// Adds the weights of a tile, each over its row's divisor, to the sums of the tile's slots. A row that sees nothing adds nothing.
    #[inline(always)]
    fn add(&self, slot: usize, divisors: &[f32; STATS], entry: &[u32], sums: &mut [f32]) {
        let (simd, mut factors, sums) = (self.simd, self.factors(entry), &mut sums[slot..slot + KEYS]);
        for (factor, divisor) in factors.iter_mut().zip(divisors) {
            *factor = if *divisor == 0.0 { 0.0 } else { *factor / divisor };
        }
        for (j, sums) in (0..KEYS).step_by(UNIT).zip(sums.chunks_exact_mut(UNIT)) {
            let [low, high] = [0, Avx2::LANES].map(|at| sums[at..at + Avx2::LANES].as_mut_ptr());
            // SAFETY: there are eight sums each.
            unsafe {
                let mut totals = [simd.load(low), simd.load(high)];
                for r in 0..self.rows {
                    let noise = self.noise_of(r, slot).map(|noise| &noise[j..]);
                    let of_row = weights(simd, &entry[r * WEIGHTS + j / 2..], noise);
                    let factor = simd.splat(factors[r]);
                    totals = [simd.fma(of_row[0], factor, totals[0]), simd.fma(of_row[1], factor, totals[1])];
                }
                simd.store(low, totals[0]);
                simd.store(high, totals[1]);
            }
        }
    }
}
