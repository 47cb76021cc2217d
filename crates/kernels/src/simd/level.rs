//! Kernels that are generic over vectors, and entering them with an instruction set enabled.

#[cfg(target_arch = "aarch64")]
use super::arm_features::Neon;
use super::portable::Portable;
use super::vector::Simd;
#[cfg(target_arch = "x86_64")]
use super::{
    avx512::Avx512,
    features::{Amx, Avx2, Features},
};

/// A computation that is written once for all instruction sets. `run` must be `#[inline(always)]`.
///
/// The other methods enter it with a set enabled. They belong to the trait, so that the compiler puts them into the object of each kernel's
/// own module: functions of one module are compiled one after the other, those of several at the same time, and anew only where they changed.
pub(crate) trait Kernel: Sized {
    /// Whether the kernel rounds to pairs of `bf16` or multiplies them. AVX-512 with BF16 differs from AVX-512 in nothing else, so that the
    /// other kernels are compiled once for both.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "pairs take no instructions of their own on other CPUs")
    )]
    const PAIRS: bool = false;
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;

    /// # Safety
    /// The machine must have the features; the token proves them.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run_avx2(self, simd: Avx2) -> Self::Output {
        self.run(simd)
    }

    /// # Safety
    /// The machine must have the features; the token proves them.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn run_avx512(self, simd: Avx512<false>) -> Self::Output {
        self.run(simd)
    }

    /// # Safety
    /// The machine must have the features; the token proves them.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn run_avx512_dots(self, simd: Avx512<true>) -> Self::Output {
        self.run(simd)
    }
}

/// An instruction set that this machine has: each variant holds the token that proves it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    /// Plain Rust.
    Portable(Portable),
    /// NEON, which is part of the target.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512; `bf16` pairs are widened and multiplied by `f32` FMA.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    /// AVX-512 with BF16; `bf16` pairs are multiplied by `vdpbf16ps`.
    #[cfg(target_arch = "x86_64")]
    Avx512Dots(Avx512<true>),
}

#[cfg(test)]
thread_local! {
    /// The set that this thread has run a kernel with last: results of most kernels do not tell.
    pub(crate) static LAST_RUN: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

impl Level {
    /// Runs a kernel in a function that has the instruction set enabled.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(test)]
        LAST_RUN.set(Some(self));
        match self {
            Level::Portable(simd) => kernel.run(simd),
            #[cfg(target_arch = "aarch64")]
            Level::Neon(simd) => kernel.run(simd),
            // SAFETY: the token proves the features that the method enables.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(simd) => unsafe { kernel.run_avx2(simd) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) => unsafe { kernel.run_avx512(simd) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Dots(simd) if K::PAIRS => unsafe { kernel.run_avx512_dots(simd) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Dots(simd) => unsafe { kernel.run_avx512(Avx512::widening(simd.features())) },
        }
    }

    /// The AVX-512 extensions of the set.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn avx512(self) -> Option<Features> {
        match self {
            Level::Avx512(simd) => Some(simd.features()),
            Level::Avx512Dots(simd) => Some(simd.features()),
            Level::Portable(_) | Level::Avx2(_) => None,
        }
    }

    /// The tile registers, if the set includes AMX.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn amx(self) -> Option<Amx> {
        self.avx512()?.amx()
    }
}
