//! NEON, which every 64-bit Arm processor has: eight lanes in two registers.
//!
//! Lanes are those of AVX2 and sums take its order, so that both give the same bits, but for attention over integers, which AVX2 alone has.

use std::arch::aarch64::*;
use std::array::from_fn;

use half::{bf16, f16};

use super::arm_features::Neon;
use super::elem::{load_part, store_part};
use super::microkernel::{Paired, Single, Step, tiles};
use super::tile::Tile;
use super::vector::Simd;

const LANES: usize = 8;

/// Four lanes and the four after them.
type F = [float32x4_t; 2];

/// An intrinsic, in a method of [`Neon`] or where a value of it is at hand.
macro_rules! neon {
    ($e:expr) => {
        // SAFETY: the token proves that the instructions are there; pointers are valid for the lanes that are read or
        // written by the contract of the method.
        unsafe { $e }
    };
}

/// Each half of two vectors by an intrinsic.
macro_rules! halves {
    ($f:path, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        neon!([$f(a[0], b[0]), $f(a[1], b[1])])
    }};
}

/// The bits of `v` with the lower halves rounded away, to nearest even.
#[inline(always)]
fn rounded(_: Neon, v: float32x4_t) -> uint32x4_t {
    neon!({
        let bits = vreinterpretq_u32_f32(v);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vandq_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), vdupq_n_u32(0xffff_0000))
    })
}

/// Products of one strip: a tile's accumulators take 24 of the 32 registers.
///
/// # Safety
/// As for `tiles`.
unsafe fn strip<K: Step<Neon>, const RS: usize>(simd: Neon, rows: usize, t: &Tile) {
    // SAFETY: the caller's.
    unsafe {
        match rows {
            1 => tiles::<Neon, K, 1, 4, RS>(simd, t, rows),
            2 => tiles::<Neon, K, 2, 4, RS>(simd, t, rows),
            4 | 8 => tiles::<Neon, K, 4, 2, RS>(simd, t, rows),
            _ => tiles::<Neon, K, 6, 2, RS>(simd, t, rows),
        }
    }
}

/// Four vectors of four, transposed.
#[inline(always)]
fn transposed(_: Neon, r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    neon!({
        let [a, b, c, d] = r;
        let (ac, ac_high) = (vzip1q_f32(a, c), vzip2q_f32(a, c));
        let (bd, bd_high) = (vzip1q_f32(b, d), vzip2q_f32(b, d));
        [vzip1q_f32(ac, bd), vzip2q_f32(ac, bd), vzip1q_f32(ac_high, bd_high), vzip2q_f32(ac_high, bd_high)]
    })
}

// SAFETY: NEON is part of the target; a token of dot products is made by a check alone; 8 lanes divide 16.
unsafe impl Simd for Neon {
    type F = F;
    type Pair = (F, F);
    const LANES: usize = LANES;
    const PAIR_WORDS: usize = 2;

    #[inline(always)]
    fn neon(self) -> Option<Neon> {
        Some(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        neon!([vdupq_n_f32(x); 2])
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        neon!([vld1q_f32(p), vld1q_f32(p.add(4))])
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        neon!({
            vst1q_f32(p, v[0]);
            vst1q_f32(p.add(4), v[1]);
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> F {
        neon!({
            let v = vreinterpretq_f16_u16(vld1q_u16(p.cast()));
            [vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)]
        })
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16, v: F) {
        neon!(vst1q_u16(p.cast(), vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v[0]), v[1]))))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> F {
        neon!({
            let v = vld1q_u16(p.cast());
            let [low, high] = [vshll_n_u16::<16>(vget_low_u16(v)), vshll_high_n_u16::<16>(v)];
            [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)]
        })
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> F {
        neon!({
            let v = vmovl_s8(vld1_s8(p));
            [vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))), vcvtq_f32_s32(vmovl_high_s16(v))]
        })
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: F) {
        neon!({
            let low = vshrn_n_u32::<16>(rounded(self, v[0]));
            vst1q_u16(p.cast(), vshrn_high_n_u32::<16>(low, rounded(self, v[1])))
        })
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        halves!(vaddq_f32, a, b)
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        halves!(vsubq_f32, a, b)
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        halves!(vmulq_f32, a, b)
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        halves!(vdivq_f32, a, b)
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        neon!([vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])])
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        neon!(from_fn(|i| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i])))
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        neon!(from_fn(|i| vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i])))
    }

    #[inline(always)]
    fn round(self, a: F) -> F {
        neon!([vrndnq_f32(a[0]), vrndnq_f32(a[1])])
    }

    #[inline(always)]
    fn lowest_bits_as_exponent(self, a: F) -> F {
        neon!(a.map(|a| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vreinterpretq_s32_f32(a)))))
    }

    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        neon!({
            let four = vaddq_f32(a[0], a[1]);
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        })
    }

    #[inline(always)]
    fn sums(self, all: [F; 4]) -> [f32; 4] {
        neon!({
            // Each half's first and third lanes, and its second and fourth, then both halves.
            let half = |i: usize| {
                let [a, b, c, d] = transposed(self, [all[0][i], all[1][i], all[2][i], all[3][i]]);
                vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d))
            };
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vaddq_f32(half(0), half(1)));
            sums
        })
    }

    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        neon!(vmaxnmvq_f32(vmaxnmq_f32(a[0], a[1])))
    }

    #[inline(always)]
    fn keep(self, a: F, lo: usize, hi: usize) -> F {
        const INDICES: [u32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7];
        neon!(from_fn(|i| {
            let lane = vld1q_u32(INDICES.as_ptr().add(4 * i));
            let below = vcltq_u32(lane, vdupq_n_u32(hi.min(LANES) as u32));
            let within = vandq_u32(vcgeq_u32(lane, vdupq_n_u32(lo.min(LANES) as u32)), below);
            vbslq_f32(within, a[i], vdupq_n_f32(f32::NEG_INFINITY))
        }))
    }

    #[inline(always)]
    unsafe fn round_words(self, src: *const f32, n: usize, dst: *mut u32) {
        neon!({
            for i in (0..n).step_by(LANES) {
                let v = load_part(self, src.add(i), n - i);
                let v = [0, 1].map(|half| vreinterpretq_f32_u32(rounded(self, v[half])));
                // A last odd input gets a zero for a partner.
                store_part(self, dst.add(i).cast::<f32>(), v, (n - i).next_multiple_of(2));
            }
        })
    }

    #[inline(always)]
    unsafe fn load_pair(self, p: *const u32) -> (F, F) {
        neon!({
            let w = [vld1q_u32(p), vld1q_u32(p.add(4))];
            let even = w.map(|w| vreinterpretq_f32_u32(vshlq_n_u32::<16>(w)));
            (even, w.map(|w| vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff_0000)))))
        })
    }

    #[inline(always)]
    unsafe fn fma_pair(self, acc: F, w: (F, F), x: *const u32, ks: usize) -> F {
        neon!({
            let x = x.cast::<f32>();
            let acc = self.fma(self.splat(*x), w.0, acc);
            self.fma(self.splat(*x.add(ks)), w.1, acc)
        })
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, from: usize, out: *mut f32, to: usize, n: usize) {
        neon!({
            for (i, first) in [(0, 0), (0, 4), (1, 0), (1, 4)] {
                // Columns `first` to `first` + 3 of four rows.
                let rows = from_fn(|r| vld1q_f32(src.add((4 * i + r) * from + first)));
                for (c, v) in transposed(self, rows).into_iter().enumerate() {
                    if first + c < n {
                        vst1q_f32(out.add((first + c) * to + 4 * i), v);
                    }
                }
            }
        })
    }

    #[inline(always)]
    unsafe fn strip<const RS: usize>(self, rows: usize, t: &Tile) {
        neon!(strip::<Single, RS>(self, rows, t))
    }

    #[inline(always)]
    unsafe fn strip_pairs(self, rows: usize, t: &Tile) {
        neon!(strip::<Paired, 1>(self, rows, t))
    }
}
