//! Plain Rust, for every machine: eight lanes that the compiler may vectorise.

use half::{bf16, f16};

use super::microkernel::{Paired, Single, tiles};
use super::tile::Tile;
use super::vector::Simd;

const LANES: usize = 8;

/// The token of no instruction set in particular. It has no condition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

type F = [f32; LANES];

/// An array of each lane's element, written out: as a loop it would be kept in memory, lane by lane.
#[inline(always)]
fn lanes<T>(f: impl Fn(usize) -> T) -> [T; LANES] {
    [f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)]
}

#[inline(always)]
fn zip(a: F, b: F, f: impl Fn(f32, f32) -> f32) -> F {
    lanes(|i| f(a[i], b[i]))
}

#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    // Without the instruction `mul_add` is a slow library call.
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
}

// SAFETY: no method needs more than the target's base instructions.
unsafe impl Simd for Portable {
    type F = F;
    type Pair = (F, F);
    const LANES: usize = LANES;
    const PAIR_WORDS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: the caller's.
        unsafe { p.cast::<F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: the caller's.
        unsafe { p.cast::<F>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> F {
        // SAFETY: the caller's.
        unsafe { lanes(|i| (*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16, v: F) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(lanes(|i| f16::from_f32(v[i]))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> F {
        // SAFETY: the caller's.
        unsafe { lanes(|i| (*p.add(i)).to_f32()) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> F {
        // SAFETY: the caller's.
        unsafe { lanes(|i| f32::from(*p.add(i))) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut bf16, v: F) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[bf16; LANES]>().write_unaligned(lanes(|i| bf16::from_f32(v[i]))) }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        lanes(|i| multiply_add(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn round(self, a: F) -> F {
        // Adding 1.5·2²³ leaves no room for a fraction; right for |a| < 2²².
        lanes(|i| (a[i] + 12_582_912.0) - 12_582_912.0)
    }

    #[inline(always)]
    fn lowest_bits_as_exponent(self, a: F) -> F {
        lanes(|i| f32::from_bits(a[i].to_bits() << 23))
    }

    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }

    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn keep(self, a: F, lo: usize, hi: usize) -> F {
        lanes(|i| if lo <= i && i < hi { a[i] } else { f32::NEG_INFINITY })
    }

    #[inline(always)]
    unsafe fn round_words(self, src: *const f32, n: usize, dst: *mut u32) {
        // SAFETY: the caller's.
        unsafe {
            for i in 0..n {
                *dst.add(i).cast::<f32>() = bf16::from_f32(*src.add(i)).to_f32();
            }
            if n % 2 == 1 {
                *dst.add(n) = 0;
            }
        }
    }

    #[inline(always)]
    unsafe fn load_pair(self, p: *const u32) -> (F, F) {
        // SAFETY: the caller's.
        let w: [u32; LANES] = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        (lanes(|i| f32::from_bits(w[i] << 16)), lanes(|i| f32::from_bits(w[i] & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn fma_pair(self, acc: F, w: (F, F), x: *const u32, ks: usize) -> F {
        // SAFETY: the caller's.
        let (x0, x1) = unsafe { (*x.cast::<f32>(), *x.add(ks).cast::<f32>()) };
        self.fma(w.1, [x1; LANES], self.fma(w.0, [x0; LANES], acc))
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, from: usize, out: *mut f32, to: usize, n: usize) {
        for i in 0..LANES {
            for j in 0..n.min(LANES) {
                // SAFETY: the caller's.
                unsafe { *out.add(j * to + i) = *src.add(i * from + j) };
            }
        }
    }

    unsafe fn strip<const RS: usize>(self, rows: usize, t: &Tile) {
        // SAFETY: the caller's.
        unsafe {
            match rows {
                1 => tiles::<Self, Single, 1, 2, RS>(self, t, rows),
                2 | 6 => tiles::<Self, Single, 2, 1, RS>(self, t, rows),
                _ => tiles::<Self, Single, 4, 1, RS>(self, t, rows),
            }
        }
    }

    unsafe fn strip_pairs(self, rows: usize, t: &Tile) {
        // SAFETY: the caller's.
        unsafe {
            match rows {
                1 => tiles::<Self, Paired, 1, 2, 1>(self, t, rows),
                2 | 6 => tiles::<Self, Paired, 2, 1, 1>(self, t, rows),
                _ => tiles::<Self, Paired, 4, 1, 1>(self, t, rows),
            }
        }
    }
}
