//! Which kernel computes an attention, and how its blocks are shared out among the threads.

use half::{bf16, f16};

use super::decode_part;
use super::flash::{FlashBlock, FlashSegment, Stored};
#[cfg(target_arch = "x86_64")]
use super::flash_pairs;
use super::gumbel::GumbelNoise;
use super::input::Attention;
#[cfg(target_arch = "x86_64")]
use super::pair_segments::Division;
use super::partial_output::MergeSegments;
use super::query_blocks::{QueryBlock, SEGMENT};
#[cfg(target_arch = "x86_64")]
use super::workspace::PACKED_KEYS;
use super::workspace::ROUNDS;
use crate::buffer::Slice;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::linear::Precision;
use crate::scratch;
use crate::simd::Elem;
#[cfg(target_arch = "x86_64")]
use crate::simd::{KEYS, pair_tiles::PairTiles};

/// Blocks of each KV head that are computed before their attention mass is added up.
#[cfg(target_arch = "x86_64")]
const MASS_BLOCKS: usize = 16;
/// Threads that there are blocks enough for where attention mass is summed.
#[cfg(target_arch = "x86_64")]
const MASS_THREADS: usize = 4;

/// Optional outputs of an attention beside its values.
#[derive(Debug, Default)]
pub struct AttentionOutputs<'a> {
    /// ln Σ_t exp(score) of each row and head over the slots that it sees; rows × heads.
    pub lse: Option<&'a mut [f32]>,
    /// Sums to which the attention mass of each of the first slots is added, beyond which no row sees: kv_heads × slots. Sums\[g, t\] gets
    /// Σ_r Σ_h softmax_t(score\[r, h, t\]) over the heads h of KV head g. Needs `lse`.
    pub mass: Option<&'a mut [f32]>,
    /// Noise of the scores whose weights `mass` sums, as in [`Cpu::noisy_attention_mass`]; values and `lse` have none.
    pub noise: Option<&'a GumbelNoise<'a>>,
}

/// Outputs of [`Cpu::attend`] beside its values.
#[derive(Default)]
struct Beside<'a> {
    lse: Option<&'a DisjointMut<'a, f32>>,
    /// Sums of [`AttentionOutputs::mass`] and their noise, where [`Cpu::sums_beside`].
    mass: Option<(&'a mut [f32], Option<&'a GumbelNoise<'a>>)>,
    /// Weights of [`Cpu::decode_with_weights`], for a single row that [`Cpu::decode`] computes.
    weights: Option<&'a mut [f32]>,
}

impl Cpu {
    /// out (rows × heads × head_dim) = softmax(scale · q · kᵀ) · v.
    ///
    /// # Panics
    /// If lengths do not fit, or keys and values have different types.
    pub fn attention(&self, a: &Attention, out: &mut [f32]) {
        self.attention_with_outputs(a, out, AttentionOutputs::default());
    }

    /// [`Cpu::attention`] with further outputs.
    ///
    /// # Panics
    /// If the lengths of the arguments or of an output do not fit, or mass is asked for without `lse`.
    pub fn attention_with_outputs(&self, a: &Attention, out: &mut [f32], outputs: AttentionOutputs) {
        a.check();
        assert_eq!(out.len(), a.q.len(), "out is rows × heads × head_dim");
        let AttentionOutputs { mut lse, mut mass, noise } = outputs;
        assert!(lse.as_ref().is_none_or(|lse| lse.len() == a.visible.len() * a.heads), "lse is rows × heads");
        assert!(mass.is_none() || lse.is_some(), "mass is asked for with lse");
        if let Some(mass) = &mass {
            let slots = mass.len() / a.kv_heads;
            let last = a.visible.iter().map(|seen| seen.1 as usize).max().unwrap_or(0);
            assert!(mass.len() == slots * a.kv_heads && last <= slots, "mass is kv_heads × slots");
        }
        noise.iter().for_each(|noise| noise.check(a));
        let fused = self.sums_beside(a, noise);
        let shared = lse.as_deref_mut().map(DisjointMut::new);
        let mass_beside = mass.as_deref_mut().filter(|_| fused).map(|mass| (mass, noise));
        let beside = Beside { lse: shared.as_ref(), mass: mass_beside, weights: None };
        match (a.k, a.v) {
            (Slice::F32(k), Slice::F32(v)) => self.attend::<f32>(a, k, v, out, beside),
            (Slice::F16(k), Slice::F16(v)) => self.attend::<f16>(a, k, v, out, beside),
            (Slice::Bf16(k), Slice::Bf16(v)) => self.attend::<bf16>(a, k, v, out, beside),
            (k, v) => panic!("keys are {}, values {}", k.dtype(), v.dtype()),
        }
        if let (Some(lse), Some(mass), false) = (lse, mass, fused) {
            let (slots, mut more) = (0..mass.len() / a.kv_heads, vec![0.0; mass.len()]);
            match noise {
                Some(noise) => self.noisy_attention_mass(a, slots, noise, &mut more),
                None => self.attention_mass_from_lse(a, lse, slots, &mut more),
            }
            mass.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }

    /// Attention of a single row, and the weights that it gives to each slot, summed over the heads of a group;
    /// weights: kv_heads × `visible[0].1`. Weights are those of scores in `f32`, as those of [`Cpu::row_weights`] are. Where the kernels of
    /// decoding compute the row, keys are read from memory only once.
    ///
    /// # Panics
    /// As [`Cpu::attention`], and if there is another number of rows than one.
    pub fn decode_with_weights(&self, a: &Attention, out: &mut [f32], weights: &mut [f32]) {
        a.check();
        assert_eq!(a.visible.len(), 1, "there is one row");
        let end = a.visible[0].1 as usize;
        assert_eq!(weights.len(), a.kv_heads * end, "one weight for each KV head and slot");
        if a.precision == Precision::F32 || a.heads / a.kv_heads > decode_part::QUERIES {
            self.attention(a, out);
            return self.row_weights(a, 0..end, weights);
        }
        assert_eq!(out.len(), a.q.len(), "out is rows × heads × head_dim");
        let beside = Beside { weights: Some(weights), ..Beside::default() };
        match (a.k, a.v) {
            (Slice::F32(k), Slice::F32(v)) => self.attend::<f32>(a, k, v, out, beside),
            (Slice::F16(k), Slice::F16(v)) => self.attend::<f16>(a, k, v, out, beside),
            (Slice::Bf16(k), Slice::Bf16(v)) => self.attend::<bf16>(a, k, v, out, beside),
            (k, v) => panic!("keys are {}, values {}", k.dtype(), v.dtype()),
        }
    }

    /// Whether the attention is computed over tiles of pairs.
    #[cfg(target_arch = "x86_64")]
    fn computes_pairs(&self, a: &Attention) -> bool {
        let pairs = self.amx().is_some() || self.fast_pairs().is_some();
        pairs && a.is_worth_tiles() && a.shape().group <= flash_pairs::MOST_HEADS
    }

    /// Whether the weights of the attention are summed by key beside it, with noise if there is some.
    #[cfg(target_arch = "x86_64")]
    fn sums_pairs(&self, a: &Attention, noise: Option<&GumbelNoise>) -> bool {
        self.computes_pairs(a) && noise.is_none_or(GumbelNoise::multiplies)
    }

    /// Whether weights are summed by key beside the attention that they are of.
    #[cfg(target_arch = "x86_64")]
    fn sums_beside(&self, a: &Attention, noise: Option<&GumbelNoise>) -> bool {
        self.sums_pairs(a, noise) || self.sums_integers(a, noise)
    }

    /// Tiles of pairs need AMX or AVX-512, those of integers AVX2.
    #[cfg(not(target_arch = "x86_64"))]
    fn sums_beside(&self, _: &Attention, _: Option<&GumbelNoise>) -> bool {
        false
    }

    fn attend<E: Elem>(&self, a: &Attention, k: &[E], v: &[E], out: &mut [f32], beside: Beside) {
        let (shape, rows) = (a.shape(), a.visible.len());
        #[cfg(target_arch = "x86_64")]
        if self.computes_pairs(a) {
            if let Some(amx) = self.amx() {
                return self.attend_pairs(amx, a, k, v, Some(out), beside);
            }
            if let Some(bf16) = self.fast_pairs() {
                return self.attend_pairs(bf16, a, k, v, Some(out), beside);
            }
        }
        let Beside { lse, mass, weights } = beside;
        let out = &DisjointMut::new(out);
        #[cfg(target_arch = "x86_64")]
        if let Some(mass) = mass {
            return self.attend_integers_with_mass(a, (k, v), out, lse, mass);
        }
        #[cfg(not(target_arch = "x86_64"))]
        assert!(mass.is_none(), "mass is summed beside tiles of pairs or integers");
        if self.is_decode(a) {
            return self.decode(a, (k, v), out, lse, weights);
        }
        assert!(weights.is_none(), "a single row's weights are those of decoding");
        let each = shape.block_rows(rows, self.threads());
        let blocks = rows.div_ceil(each);
        let tasks = shape.kv_heads * blocks;
        let last = a.visible.iter().map(|v| v.1 as usize).max().unwrap_or(0);
        let worth = rows * last * shape.heads * shape.head_dim > 1 << 18;
        #[cfg(target_arch = "x86_64")]
        let mut tiles = scratch::borrow(&PACKED_KEYS, 0);
        let stored = &Stored {
            k,
            v,
            #[cfg(target_arch = "x86_64")]
            packed: self.pack_integers(a, (k, v), blocks > 1, &mut tiles),
        };
        // Rows ascend, so the last blocks have most to do: they go first.
        let block = |t: usize| {
            let b = blocks - 1 - t / shape.kv_heads;
            QueryBlock { shape, g: t % shape.kv_heads, rows: b * each..((b + 1) * each).min(rows) }
        };
        let segments = last.div_ceil(SEGMENT);
        if !worth || tasks >= 2 * self.threads() || segments == 1 {
            self.parallel_if(worth, tasks, &|t| {
                self.run(FlashBlock { a, stored, block: block(t), out, lse })
            });
            return;
        }
        // There are too few blocks for the threads: one task computes a segment of the keys, then the segments of a block
        // are merged.
        let size = shape.part_len(each * shape.group);
        let pieces = tasks * segments;
        let mut scratch = scratch::borrow(&ROUNDS, pieces * size);
        let parts = &mut scratch.as_f32_mut()[..pieces * size];
        let shared = DisjointMut::new(parts);
        self.parallel_if(worth, pieces, &|i| {
            // SAFETY: part `i` belongs to task `i`.
            let part = unsafe { shared.part(i * size..(i + 1) * size) };
            let (block, segment) = (block(i / segments), i % segments);
            self.run(FlashSegment { a, stored, block, segment, part });
        });
        self.parallel_if(rows * segments * shape.heads * shape.head_dim > 1 << 18, tasks, &|t| {
            let parts = &parts[t * segments * size..(t + 1) * segments * size];
            self.run(MergeSegments { parts, size, block: block(t), out, lse });
        });
    }

    /// s (kv_heads × slots) = the attention mass of the first slots, beyond which no row sees, without values. Returns whether it is computed
    /// over tiles of pairs; if not, `s` is left alone.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn mass_without_values<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        noise: Option<&GumbelNoise>,
        s: &mut [f32],
    ) -> bool {
        let slots = s.len() / a.kv_heads;
        if !self.sums_pairs(a, noise) || a.visible.iter().any(|seen| seen.1 as usize > slots) {
            return false;
        }
        s.fill(0.0);
        let beside = Beside { mass: Some((s, noise)), ..Beside::default() };
        if let Some(amx) = self.amx() {
            self.attend_pairs(amx, a, k, k, None, beside);
        } else if let Some(bf16) = self.fast_pairs() {
            self.attend_pairs(bf16, a, k, k, None, beside);
        }
        true
    }

    /// Tiles of pairs need AMX or AVX-512.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn mass_without_values<E: Elem>(
        &self,
        _: &Attention,
        _: &[E],
        _: Option<&GumbelNoise>,
        _: &mut [f32],
    ) -> bool {
        false
    }

    /// [`Cpu::attend`] in `bf16`: keys and values are packed as tiles of pairs once, then the blocks of rows go over them.
    #[cfg(target_arch = "x86_64")]
    fn attend_pairs<E: Elem, T: PairTiles>(
        &self,
        token: T,
        a: &Attention,
        k: &[E],
        v: &[E],
        out: Option<&mut [f32]>,
        Beside { lse, mass, .. }: Beside,
    ) {
        let (shape, rows) = (a.shape(), a.visible.len());
        let start = a.visible.iter().map(|v| v.0 as usize).min().unwrap_or(0) / KEYS * KEYS;
        let end = a.visible.iter().map(|v| v.1 as usize).max().unwrap_or(0);
        let out = out.map(DisjointMut::new);
        let out = out.as_ref();
        let (mass, noise) = mass.unzip();
        let noise = noise.flatten();
        let wanted = [out.is_some(), mass.is_some()];
        if let Some(division) = Division::of_few_rows(a, (start, end), wanted, noise) {
            return self.attend_pair_segments(token, division, (k, v), (start, end), out, (lse, mass));
        }
        let (tiles, words) = ((end - start).div_ceil(KEYS), shape.tile_words());
        let mut scratch = scratch::borrow(&ROUNDS, shape.kv_heads * tiles * words);
        let packed = &mut scratch.as_u32_mut()[..shape.kv_heads * tiles * words];
        let shared = DisjointMut::new(packed);
        self.parallel(shape.kv_heads * tiles, &|t| {
            let (g, first) = (t / tiles, start + t % tiles * KEYS);
            // SAFETY: tile `t` belongs to task `t`.
            let out = unsafe { shared.part(t * words..(t + 1) * words) };
            let slots = first..(first + KEYS).min(end);
            token.run(flash_pairs::PackKeysValues {
                token,
                shape,
                k: shape.head(k, g),
                v: shape.head(v, g),
                slots,
                out,
            });
        });
        // Each block sums its rows' weights, so that blocks for sums are the same for any number of threads.
        let threads = if mass.is_some() { MASS_THREADS } else { self.threads() };
        let each = flash_pairs::block_rows(&shape, rows, threads);
        let blocks = rows.div_ceil(each);
        // A head's blocks follow one another, while its keys are in the cache; the last have most to do.
        let compute = |g: usize, b: usize, mass: Option<&mut [f32]>| {
            let block = QueryBlock { shape, g, rows: b * each..((b + 1) * each).min(rows) };
            let packed = &packed[g * tiles * words..(g + 1) * tiles * words];
            let [values, keep] = wanted;
            let slots = start..start + tiles * KEYS;
            let sweep = flash_pairs::Sweep { token, a, packed, slots, block, values, keep, noise };
            token.run(flash_pairs::FlashBlockPairs { sweep, out, lse, mass });
        };
        let Some(mass) = mass else {
            return self.parallel(shape.kv_heads * blocks, &|t| {
                compute(t / blocks, blocks - 1 - t % blocks, None);
            });
        };
        // Some blocks at a time have sums of their own, which are added up in an order that no number of threads changes.
        let slots = mass.len() / shape.kv_heads;
        let mut scratch = scratch::borrow(&PACKED_KEYS, shape.kv_heads * MASS_BLOCKS * tiles * KEYS);
        let partial = &mut scratch.as_f32_mut()[..shape.kv_heads * MASS_BLOCKS * tiles * KEYS];
        for last in (1..=blocks).rev().step_by(MASS_BLOCKS) {
            let (count, shared) = (last.min(MASS_BLOCKS), DisjointMut::new(partial));
            self.parallel(shape.kv_heads * count, &|t| {
                // SAFETY: part `t` belongs to task `t`.
                let mass = unsafe { shared.part(t * tiles * KEYS..(t + 1) * tiles * KEYS) };
                compute(t / count, last - 1 - t % count, Some(mass));
            });
            for (t, partial) in partial.chunks_exact(tiles * KEYS).take(shape.kv_heads * count).enumerate() {
                let sums = &mut mass[t / count * slots..][start..end];
                sums.iter_mut().zip(partial).for_each(|(sum, more)| *sum += more);
            }
        }
    }
}
