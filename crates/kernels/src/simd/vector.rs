//! The vector trait.

use half::{bf16, f16};

use super::tile::Tile;

/// A token of an instruction set, and with it the set's vectors of `LANES` numbers.
///
/// # Safety
/// A value may exist only where the process may use the instructions of the set: implementations are constructed by a
/// check at run time. Methods therefore need no further condition for their instructions. Functions generic over
/// `Simd` are `#[inline(always)]` down from [`Kernel::run`](super::Kernel::run), or they would be compiled without the instruction set,
/// correct but slow. For the same reason closures are avoided in them.
///
/// `unsafe` methods take pointers, which must be valid for the lanes (or the stated count) that they read or write; no
/// alignment is needed.
pub(crate) unsafe trait Simd: Copy + Send + Sync + 'static {
    /// `LANES` × `f32`.
    type F: Copy;
    /// Weights of `LANES` columns for two consecutive inputs.
    type Pair: Copy;
    /// At most 16, divides 16.
    const LANES: usize;
    /// 32-bit words that hold one pair of rounded activations: 1 (two `bf16`) or 2 (two `f32`).
    const PAIR_WORDS: usize;
    /// Whether pairs of weights are widened to `f32` before many rows are multiplied by them. A register tile that widens them itself does so for each
    /// strip of rows. Where there are sixteen registers its sums need them all: on a Zen 1 such products take 18 % longer.
    const WIDENS_PAIRS: bool = Self::PAIR_WORDS == 2 && Self::LANES == 8;

    /// The features of AVX-512, if the set includes it.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn avx512(self) -> Option<super::features::Features> {
        None
    }

    /// AVX2, if the set includes it.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn avx2(self) -> Option<super::features::Avx2> {
        None
    }

    /// NEON, if the set includes it.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn neon(self) -> Option<super::arm_features::Neon> {
        None
    }

    fn splat(self, x: f32) -> Self::F;
    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn store(self, p: *mut f32, v: Self::F);
    unsafe fn load_f16(self, p: *const f16) -> Self::F;
    unsafe fn store_f16(self, p: *mut f16, v: Self::F);
    unsafe fn load_bf16(self, p: *const bf16) -> Self::F;
    unsafe fn load_i8(self, p: *const i8) -> Self::F;
    /// Rounds to nearest even; keeps NaN and subnormals, as `half` does.
    unsafe fn store_bf16(self, p: *mut bf16, v: Self::F);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger lanes; `b` where one of them is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller lanes; `b` where one of them is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integer.
    fn round(self, a: Self::F) -> Self::F;
    /// The numbers whose bits are those of `a`, 23 places further up: whose exponents are its lowest eight bits.
    fn lowest_bits_as_exponent(self, a: Self::F) -> Self::F;
    /// The sum of all lanes.
    fn sum(self, a: Self::F) -> f32;
    /// The sums of four vectors.
    #[inline(always)]
    fn sums(self, [a, b, c, d]: [Self::F; 4]) -> [f32; 4] {
        [self.sum(a), self.sum(b), self.sum(c), self.sum(d)]
    }
    /// The largest lane.
    fn largest(self, a: Self::F) -> f32;
    /// Lanes `lo..hi` of `a`, −∞ elsewhere.
    fn keep(self, a: Self::F, lo: usize, hi: usize) -> Self::F;

    /// Rounds `n` activations to `bf16` and writes them as ⌈n/2⌉ · `PAIR_WORDS` words.
    unsafe fn round_words(self, src: *const f32, n: usize, dst: *mut u32);
    unsafe fn load_pair(self, p: *const u32) -> Self::Pair;
    /// acc + w₀·x₀ + w₁·x₁, the activations at word `x` (and, with two words a pair, at `x + ks`).
    unsafe fn fma_pair(self, acc: Self::F, w: Self::Pair, x: *const u32, ks: usize) -> Self::F;

    /// Transposes `LANES` × `LANES` floats, rows `from` apart, and writes the first `n` rows of the result `to` apart.
    unsafe fn transpose(self, src: *const f32, from: usize, out: *mut f32, to: usize, n: usize);

    /// C (+)= X · W in `f32`; x lies `RS` words apart from row to row (1 or [`KEYS`](super::KEYS)).
    ///
    /// # Safety
    /// `t`'s pointers must be valid for `rows` rows and all columns of the tile.
    unsafe fn strip<const RS: usize>(self, rows: usize, t: &Tile);
    /// C (+)= X · W, weights and activations in `bf16` pairs, summed in `f32`.
    ///
    /// # Safety
    /// `t`'s pointers must be valid for `rows` rows and all columns of the tile.
    unsafe fn strip_pairs(self, rows: usize, t: &Tile);

    /// A nearest integer n of each x in −127 ..= 127.49, and 2^n, where 2^−127 is 0.
    #[inline(always)]
    fn nearest_power(self, x: Self::F) -> (Self::F, Self::F) {
        // A number as great as 1.5·2²³ has no room for a fraction, and its lowest bits are an exponent's, n + 127.
        let great = self.splat(12_582_912.0 + 127.0);
        let sum = self.add(x, great);
        (self.sub(sum, great), self.lowest_bits_as_exponent(sum))
    }

    /// 2^x, relative error about 1e-7; exactly 0 below −126.5 and exactly 1 at 0.
    #[inline(always)]
    fn exp2(self, x: Self::F) -> Self::F {
        let x = self.min(self.splat(127.49), self.max(self.splat(-127.0), x));
        let (n, power) = self.nearest_power(x);
        self.mul(exp2_fraction(self, self.sub(x, n)), power)
    }

    /// e^x, relative error about 1e-7; exactly 0 below −87.7.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        let x = self.min(self.splat(88.3), self.max(self.splat(-88.0), x));
        let (n, power) = self.nearest_power(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        // x·log₂e − n, with the part of log₂e that an f32 cannot hold.
        let f = self.fma(x, self.splat(std::f32::consts::LOG2_E), self.sub(self.splat(0.0), n));
        let f = self.fma(x, self.splat(1.925_963e-8), f);
        self.mul(exp2_fraction(self, f), power)
    }

    /// x / (1 + e^−x)
    #[inline(always)]
    fn silu(self, x: Self::F) -> Self::F {
        let e = self.exp(self.sub(self.splat(0.0), x));
        self.div(x, self.add(self.splat(1.0), e))
    }

    /// x/2 · (1 + tanh(u)) with u = √(2/π) · (x + 0.044715·x³), in the form x / (1 + e^−2u).
    #[inline(always)]
    fn gelu_tanh(self, x: Self::F) -> Self::F {
        const LINEAR: f32 = -1.595_769_2; // −2·√(2/π)
        const CUBIC: f32 = -0.071_354_814; // LINEAR · 0.044715
        let square = self.mul(x, x);
        let u = self.mul(x, self.fma(square, self.splat(CUBIC), self.splat(LINEAR)));
        self.div(x, self.add(self.splat(1.0), self.exp(u)))
    }
}

/// 2^f for |f| <= 1/2 (Cephes' `exp2f` coefficients).
#[inline(always)]
fn exp2_fraction<S: Simd>(simd: S, f: S::F) -> S::F {
    let mut p = simd.splat(1.535_336_2e-4);
    for c in [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
        p = simd.fma(p, f, simd.splat(c));
    }
    p
}
