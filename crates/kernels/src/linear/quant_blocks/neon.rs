//! Blocks of quantised weights with NEON.
//!
//! Shape of a product: eight outputs at a time, whose weights of a block stay in registers (sixteen of them) while all rows pass, two at once. `sdot` adds
//! four products of signed bytes to 32 bits, and takes the word of activations out of a register that holds four. Bound: 22 (8 bits) or 24 (4 bits)
//! operations for the 256 products of a block, a row and eight outputs, sixteen of them `sdot`. A single row keeps the sums of a panel in registers.
//! Processors without `sdot` multiply to 16 bits, where two products of 127 · 127 fit, and so do eight where weights have 4 bits.
//! Run under emulation alone, so that no share of the bound is known; by LLVM's model of a Neoverse N2 the loop of two rows takes 24 cycles for its
//! 48 operations on two units.
//!
//! Sums of bytes are exact and the others take the order of AVX2, so that a product has the bits that it has there.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::format::{BLOCK, BlockFormat, HALVES, QUADS, X_SCALE, X_START, X_SUM, X_WORDS};
use crate::prefetch;
use crate::simd::{Neon, PANEL};

/// Outputs of a register.
const LANES: usize = 4;
/// Outputs whose weights of a block are held at a time.
const OUTPUTS: usize = 8;
/// Words from the block in use to the block that is prefetched.
const AHEAD: usize = 768;

/// Weights of [`OUTPUTS`] outputs and a block, a quad of inputs after the other.
type Weights = [[int8x16_t; OUTPUTS / LANES]; QUADS];

/// Rounds a row of activations to signed bytes, [`X_WORDS`] words for each block.
#[inline(always)]
pub(super) fn quantize(_: Neon, x: &[f32], out: &mut [u32]) {
    for (x, out) in x.chunks(BLOCK).zip(out.chunks_exact_mut(X_WORDS)) {
        let mut values = [0.0f32; BLOCK];
        values[..x.len()].copy_from_slice(x);
        // SAFETY: NEON is there, and vectors lie within the block and its words.
        unsafe {
            let values: [float32x4_t; 8] = from_fn(|i| vld1q_f32(values.as_ptr().add(4 * i)));
            // By their bits, among which those of a NaN are the largest.
            let magnitude = values.map(|x| vreinterpretq_u32_f32(vabsq_f32(x)));
            let pair: [uint32x4_t; 4] = from_fn(|i| vmaxq_u32(magnitude[i], magnitude[4 + i]));
            let largest = vmaxq_u32(vmaxq_u32(pair[0], pair[1]), vmaxq_u32(pair[2], pair[3]));
            let scale = f32::from_bits(vmaxvq_u32(largest)) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            // To the nearest, ties to even; a NaN becomes 0.
            let q = values.map(|x| vcvtnq_s32_f32(vmulq_n_f32(x, inverse)));
            let halves: [int16x8_t; 4] =
                from_fn(|i| vcombine_s16(vqmovn_s32(q[2 * i]), vqmovn_s32(q[2 * i + 1])));
            let mut sum = 0;
            for (i, pair) in halves.as_chunks::<2>().0.iter().enumerate() {
                let bytes = vcombine_s8(vqmovn_s16(pair[0]), vqmovn_s16(pair[1]));
                vst1q_s8(out.as_mut_ptr().add(4 * i).cast(), bytes);
                sum += vaddlvq_s16(vpaddlq_s8(bytes));
            }
            out[X_SCALE] = scale.to_bits();
            out[X_START] = sum.wrapping_mul(-128) as u32;
            out[X_SUM] = (sum as f32 * scale).to_bits();
        }
    }
}

/// y (rows × 32) = rows of `words` activations times a panel.
#[inline(always)]
pub(super) fn rows(neon: Neon, format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    match (neon.dot_products(), y.len() / PANEL) {
        // SAFETY: the token proves that the instructions are there.
        (Some(_), 1) => unsafe { one_row(format, panel, x, y) },
        // SAFETY: as above.
        (Some(_), _) => unsafe { multiply_rows(format, panel, x, words, y) },
        (None, _) => multiply_rows_without_dots(format, panel, x, words, y),
    }
}

/// acc + Σ four products of the bytes of each word of `w` and of word `T` of `x`.
///
/// # Safety
/// The process may use `sdot`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sdot<const T: usize>(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // The standard library's intrinsic is not stable.
    macro_rules! sdot {
        ($t:literal) => {
            // SAFETY: the instruction works on registers alone.
            unsafe {
                asm!(concat!("sdot {acc:v}.4s, {w:v}.16b, {x:v}.4b[", $t, "]"), acc = inout(vreg) acc,
                     w = in(vreg) w, x = in(vreg) x, options(pure, nomem, nostack, preserves_flags))
            }
        };
    }
    const { assert!(T < 4) };
    match T {
        0 => sdot!(0),
        1 => sdot!(1),
        2 => sdot!(2),
        _ => sdot!(3),
    }
    acc
}

/// Calls a macro with each index of a quad, and the half of 32 bytes and the word in it where its activations lie.
macro_rules! each_quad {
    ($quad:ident) => {
        $quad!(0, 0, 0);
        $quad!(1, 0, 1);
        $quad!(2, 0, 2);
        $quad!(3, 0, 3);
        $quad!(4, 1, 0);
        $quad!(5, 1, 1);
        $quad!(6, 1, 2);
        $quad!(7, 1, 3);
    };
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn multiply_rows(format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    let (blocks, rows) = (panel.len() / format.words(), y.len() / PANEL);
    assert!(words >= blocks * X_WORDS && x.len() >= rows * words);
    y.fill(0.0);
    for (index, block) in panel.chunks_exact(format.words()).enumerate() {
        prefetch::to_read(block.as_ptr().wrapping_add(AHEAD).cast(), size_of_val(block));
        for first in (0..PANEL).step_by(OUTPUTS) {
            // SAFETY: every row has as many blocks as the panel, and y 32 floats of it.
            unsafe {
                let weights = weights(format, block, first);
                let head = Head::of(format, block, first);
                let x = x.as_ptr().add(index * X_WORDS);
                let y = y.as_mut_ptr().add(first);
                for r in (0..rows - rows % 2).step_by(2) {
                    dots_of_rows::<2>(&weights, &head, (x.add(r * words), words), y.add(r * PANEL));
                }
                if rows % 2 == 1 {
                    let r = rows - 1;
                    dots_of_rows::<1>(&weights, &head, (x.add(r * words), words), y.add(r * PANEL));
                }
            }
        }
    }
}

/// Adds the products of a block, `R` rows and eight outputs to `y`.
///
/// # Safety
/// `x` must be valid for a block of each row, `words` apart, and `y` for eight floats of each row, 32 apart.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn dots_of_rows<const R: usize>(
    weights: &Weights,
    head: &Head,
    (x, words): (*const u32, usize),
    y: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let inputs: [[int8x16_t; 2]; R] = from_fn(|r| from_fn(|i| vld1q_s8(x.add(r * words + 4 * i).cast())));
        let mut dots = [[vdupq_n_s32(0); OUTPUTS / LANES]; R];
        macro_rules! quad {
            ($t:literal, $half:literal, $word:literal) => {
                for r in 0..R {
                    dots[r][0] = sdot::<$word>(dots[r][0], weights[$t][0], inputs[r][$half]);
                    dots[r][1] = sdot::<$word>(dots[r][1], weights[$t][1], inputs[r][$half]);
                }
            };
        }
        each_quad!(quad);
        for (r, dots) in dots.into_iter().enumerate() {
            head.add(dots, x.add(r * words), y.add(r * PANEL));
        }
    }
}

/// One row: its sums stay in registers while the weights pass.
#[target_feature(enable = "neon,dotprod")]
unsafe fn one_row(format: BlockFormat, panel: &[u32], x: &[u32], y: &mut [f32]) {
    const GROUPS: usize = PANEL / LANES;
    assert!(x.len() >= panel.len() / format.words() * X_WORDS && y.len() >= PANEL);
    // SAFETY: NEON is there; the row has as many blocks as the panel, and y 32 floats.
    unsafe {
        let mut sums = [vdupq_n_f32(0.0); GROUPS];
        for (block, x) in panel.chunks_exact(format.words()).zip(x.chunks_exact(X_WORDS)) {
            prefetch::to_read(block.as_ptr().wrapping_add(AHEAD).cast(), size_of_val(block));
            let inputs: [int8x16_t; 2] = from_fn(|i| vld1q_s8(x.as_ptr().add(4 * i).cast()));
            let mut dots = [vdupq_n_s32(0); GROUPS];
            let word = |t: usize, g: usize| {
                vld1q_u8(block.as_ptr().add(format.head() + t * PANEL + g * LANES).cast())
            };
            match format {
                BlockFormat::Q8 => {
                    macro_rules! quad {
                        ($t:literal, $half:literal, $word:literal) => {
                            for g in 0..GROUPS {
                                dots[g] = sdot::<$word>(dots[g], signed(word($t, g)), inputs[$half]);
                            }
                        };
                    }
                    each_quad!(quad);
                }
                BlockFormat::Q4 => {
                    macro_rules! quad {
                        ($t:literal) => {
                            for g in 0..GROUPS {
                                let [low, high] = nibbles(word($t, g));
                                dots[g] = sdot::<$t>(dots[g], low, inputs[0]);
                                dots[g] = sdot::<$t>(dots[g], high, inputs[1]);
                            }
                        };
                    }
                    quad!(0);
                    quad!(1);
                    quad!(2);
                    quad!(3);
                }
            }
            let float = |at: usize| f32::from_bits(x[at]);
            for (g, sum) in sums.iter_mut().enumerate() {
                let scale = vmulq_n_f32(halves(block, 0, g * LANES), float(X_SCALE));
                *sum = vfmaq_f32(*sum, vcvtq_f32_s32(dots[g]), scale);
                if format == BlockFormat::Q4 {
                    *sum = vfmaq_n_f32(*sum, halves(block, 1, g * LANES), float(X_SUM));
                }
            }
        }
        for (g, sum) in sums.into_iter().enumerate() {
            vst1q_f32(y.as_mut_ptr().add(g * LANES), sum);
        }
    }
}

fn multiply_rows_without_dots(format: BlockFormat, panel: &[u32], x: &[u32], words: usize, y: &mut [f32]) {
    let (blocks, rows) = (panel.len() / format.words(), y.len() / PANEL);
    assert!(words >= blocks * X_WORDS && x.len() >= rows * words);
    y.fill(0.0);
    for (index, block) in panel.chunks_exact(format.words()).enumerate() {
        for first in (0..PANEL).step_by(OUTPUTS) {
            // SAFETY: NEON is there; every row has as many blocks as the panel, and y 32 floats of it.
            unsafe {
                let weights = weights(format, block, first);
                let head = Head::of(format, block, first);
                for r in 0..rows {
                    let x = x.as_ptr().add(r * words + index * X_WORDS);
                    let inputs: [int8x16_t; QUADS] =
                        from_fn(|t| vreinterpretq_s8_u32(vdupq_n_u32(*x.add(t))));
                    let dots = [0, 1].map(|g| match format {
                        BlockFormat::Q8 => dots::<2>(&weights, g, &inputs),
                        BlockFormat::Q4 => dots::<QUADS>(&weights, g, &inputs),
                    });
                    head.add(dots, x, y.as_mut_ptr().add(r * PANEL + first));
                }
            }
        }
    }
}

/// The sums of a block's products for four outputs, `N` of which are added in 16 bits.
#[inline(always)]
fn dots<const N: usize>(weights: &Weights, g: usize, inputs: &[int8x16_t; QUADS]) -> int32x4_t {
    // SAFETY: NEON is there.
    unsafe {
        let mut sums = [vdupq_n_s32(0); 2];
        for t in (0..QUADS).step_by(N) {
            let mut products = [vdupq_n_s16(0); 2];
            for t in t..t + N {
                let (w, x) = (weights[t][g], inputs[t]);
                products[0] = vmlal_s8(products[0], vget_low_s8(w), vget_low_s8(x));
                products[1] = vmlal_high_s8(products[1], w, x);
            }
            sums = [0, 1].map(|i| vpadalq_s16(sums[i], products[i]));
        }
        vpaddq_s32(sums[0], sums[1])
    }
}

/// Scales and minima of eight outputs of a block.
struct Head {
    scale: [float32x4_t; OUTPUTS / LANES],
    /// Minima of weights of 4 bits.
    min: Option<[float32x4_t; OUTPUTS / LANES]>,
}

impl Head {
    #[inline(always)]
    fn of(format: BlockFormat, block: &[u32], first: usize) -> Head {
        let row = |row: usize| [0, 1].map(|g| halves(block, row, first + g * LANES));
        Head { scale: row(0), min: (format == BlockFormat::Q4).then(|| row(1)) }
    }

    /// Adds the products of eight outputs, whose sums of bytes are `dots`, to `y`.
    ///
    /// # Safety
    /// `x` must be valid for a block of activations, and `y` for eight floats.
    #[inline(always)]
    unsafe fn add(&self, dots: [int32x4_t; OUTPUTS / LANES], x: *const u32, y: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            let float = |at: usize| f32::from_bits(*x.add(at));
            for (g, dots) in dots.into_iter().enumerate() {
                let y = y.add(g * LANES);
                let scale = vmulq_n_f32(self.scale[g], float(X_SCALE));
                let mut sum = vfmaq_f32(vld1q_f32(y), vcvtq_f32_s32(dots), scale);
                if let Some(min) = self.min {
                    sum = vfmaq_n_f32(sum, min[g], float(X_SUM));
                }
                vst1q_f32(y, sum);
            }
        }
    }
}

/// Four `f16` of row `row` of a block.
#[inline(always)]
fn halves(block: &[u32], row: usize, first: usize) -> float32x4_t {
    let from = &block[row * HALVES + first / 2..][..LANES / 2];
    // SAFETY: 8 bytes.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from.as_ptr().cast()))) }
}

/// Weights of eight outputs and a block, each in a signed byte.
#[inline(always)]
fn weights(format: BlockFormat, block: &[u32], first: usize) -> Weights {
    let word = |t: usize, g: usize| {
        let from = &block[format.head() + t * PANEL + first + g * LANES..][..LANES];
        // SAFETY: 16 bytes.
        unsafe { vld1q_u8(from.as_ptr().cast()) }
    };
    match format {
        BlockFormat::Q8 => from_fn(|t| from_fn(|g| signed(word(t, g)))),
        BlockFormat::Q4 => {
            from_fn(|t| from_fn(|g| nibbles(word(t % (QUADS / 2), g))[usize::from(t >= QUADS / 2)]))
        }
    }
}

/// Weights of eight bits: from q + 128 to q, between −127 and 127.
#[inline(always)]
fn signed(bytes: uint8x16_t) -> int8x16_t {
    // SAFETY: NEON is there.
    unsafe { vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(0x80))) }
}

/// The lower and the upper halves of bytes.
#[inline(always)]
fn nibbles(bytes: uint8x16_t) -> [int8x16_t; 2] {
    // SAFETY: NEON is there.
    unsafe {
        [vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(0x0f))), vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes))]
    }
}
