//! One vector type per instruction set behind one trait, so that every kernel is written once.
//!
//! A kernel implements [`Kernel`]; [`Isa::run`] enters it inside a function that has the instruction set
//! enabled. Everything on the way down is `#[inline(always)]`, or it would be compiled without the set.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod elem;
mod portable;
mod tile;

use std::sync::OnceLock;

use half::{bf16, f16};

pub(crate) use elem::{Elem, load_part, store_part};
pub(crate) use portable::Portable;
pub(crate) use tile::{STRIP, Tile, strip_width};

use crate::Isa;

/// Slots and columns that one panel holds.
pub(crate) const PANEL: usize = 32;

/// Row stride of a tile of attention probabilities: the slots of one tile of keys.
pub(crate) const KEYS: usize = 64;

/// A vector of `LANES` numbers and what the kernels do with it.
///
/// Methods may run only under [`Isa::run`] for the matching set. Pointers must be valid for the lanes
/// (or the stated count) they read or write; no alignment is needed.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// `LANES` × `f32`.
    type F: Copy;
    /// Weights of `LANES` columns for two consecutive inputs.
    type Pair: Copy;
    /// At most 16, divides 16.
    const LANES: usize;
    /// 32-bit words that hold one pair of rounded activations: 1 (two `bf16`) or 2 (two `f32`).
    const PAIR_WORDS: usize;

    fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    unsafe fn load_f16(p: *const f16) -> Self::F;
    unsafe fn store_f16(p: *mut f16, v: Self::F);
    unsafe fn load_bf16(p: *const bf16) -> Self::F;
    unsafe fn load_i8(p: *const i8) -> Self::F;
    /// Rounds to nearest even; keeps NaN and subnormals, as `half` does.
    unsafe fn store_bf16(p: *mut bf16, v: Self::F);

    fn add(a: Self::F, b: Self::F) -> Self::F;
    fn sub(a: Self::F, b: Self::F) -> Self::F;
    fn mul(a: Self::F, b: Self::F) -> Self::F;
    fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c
    fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger lanes; `b` where one of them is NaN.
    fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The smaller lanes; `b` where one of them is NaN.
    fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integer.
    fn round(a: Self::F) -> Self::F;
    /// 2^n for integral n in −127 ..= 127, where 2^−127 is 0.
    fn exp2i(n: Self::F) -> Self::F;
    fn sum(a: Self::F) -> f32;
    /// Brings the cache line at `p`, which may be any address, nearer.
    #[inline(always)]
    fn fetch<T>(_p: *const T) {}
    /// The sums of four vectors.
    #[inline(always)]
    fn sums([a, b, c, d]: [Self::F; 4]) -> [f32; 4] {
        [Self::sum(a), Self::sum(b), Self::sum(c), Self::sum(d)]
    }
    fn largest(a: Self::F) -> f32;
    /// Lanes `lo..hi` of `a`, −∞ elsewhere.
    fn keep(a: Self::F, lo: usize, hi: usize) -> Self::F;

    /// Rounds `n` activations to `bf16` and writes them as ⌈n/2⌉ · `PAIR_WORDS` words.
    unsafe fn round_words(src: *const f32, n: usize, dst: *mut u32);
    unsafe fn load_pair(p: *const u32) -> Self::Pair;
    /// acc + w₀·x₀ + w₁·x₁, the activations at word `x` (and, with two words a pair, at `x + ks`).
    unsafe fn fma_pair(acc: Self::F, w: Self::Pair, x: *const u32, ks: usize) -> Self::F;

    /// Transposes `LANES` × `LANES` floats, rows `from` apart, and writes the first `n` rows of the result `to` apart.
    unsafe fn transpose(src: *const f32, from: usize, out: *mut f32, to: usize, n: usize);

    /// C (+)= X · W in `f32`; x lies `RS` words apart from row to row (1 or [`KEYS`]).
    unsafe fn strip<const RS: usize>(rows: usize, t: &Tile);
    /// The same with weights and activations in `bf16` pairs.
    unsafe fn strip_pairs(rows: usize, t: &Tile);

    /// 2^x, relative error about 1e-7; exactly 0 below −126.5 and exactly 1 at 0.
    #[inline(always)]
    fn exp2(x: Self::F) -> Self::F {
        let x = Self::min(Self::splat(127.49), Self::max(Self::splat(-127.0), x));
        let n = Self::round(x);
        Self::mul(exp2_fraction::<Self>(Self::sub(x, n)), Self::exp2i(n))
    }

    /// e^x, relative error about 1e-7; exactly 0 below −87.7.
    #[inline(always)]
    fn exp(x: Self::F) -> Self::F {
        let x = Self::min(Self::splat(88.3), Self::max(Self::splat(-88.0), x));
        let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
        // x·log₂e − n, with the part of log₂e that an f32 cannot hold.
        let f = Self::fma(x, Self::splat(std::f32::consts::LOG2_E), Self::sub(Self::splat(0.0), n));
        let f = Self::fma(x, Self::splat(1.925_963e-8), f);
        Self::mul(exp2_fraction::<Self>(f), Self::exp2i(n))
    }

    /// x / (1 + e^−x)
    #[inline(always)]
    fn silu(x: Self::F) -> Self::F {
        let e = Self::exp(Self::sub(Self::splat(0.0), x));
        Self::div(x, Self::add(Self::splat(1.0), e))
    }

    /// x/2 · (1 + tanh(u)) with u = √(2/π) · (x + 0.044715·x³), in the form x / (1 + e^−2u).
    #[inline(always)]
    fn gelu_tanh(x: Self::F) -> Self::F {
        const LINEAR: f32 = -1.595_769_2; // −2·√(2/π)
        const CUBIC: f32 = -0.071_354_814; // LINEAR · 0.044715
        let square = Self::mul(x, x);
        let u = Self::mul(x, Self::fma(square, Self::splat(CUBIC), Self::splat(LINEAR)));
        Self::div(x, Self::add(Self::splat(1.0), Self::exp(u)))
    }
}

/// 2^f for |f| <= 1/2 (Cephes' `exp2f` coefficients).
#[inline(always)]
fn exp2_fraction<S: Simd>(f: S::F) -> S::F {
    let mut p = S::splat(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        p = S::fma(p, f, S::splat(c));
    }
    p
}

/// A computation that is written once for all instruction sets. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self) -> Self::Output;
}

impl Isa {
    /// The best set of this machine.
    pub(crate) fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let dots = if slow_dots() { Isa::Avx512 } else { Isa::Avx512Bf16 };
            [Isa::Amx, dots, Isa::Avx512, Isa::Avx2]
                .into_iter()
                .find(|isa| isa.available())
                .unwrap_or(Isa::Portable)
        })
    }

    /// Whether this machine has the set.
    pub fn available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512.available() && amx::available(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Runs a kernel with this set, which must be available.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            // SAFETY: an `Isa` other than `Portable` is kept only after `available` said yes.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => unsafe { avx512::enter_dots(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => unsafe { avx512::enter(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::enter(kernel) },
            _ => kernel.run::<Portable>(),
        }
    }
}

/// Whether `vdpbf16ps` is slower than widening and two FMAs: so on Intel's cores (measured on Sapphire Rapids:
/// one in two cycles, beside two FMAs a cycle).
fn slow_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}
