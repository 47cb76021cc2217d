//! Entering a kernel with an instruction set enabled.

use super::portable::Portable;
use super::vector::Kernel;
#[cfg(target_arch = "x86_64")]
use super::{
    avx512::Avx512,
    features::{Amx, Avx2, Features},
};

/// An instruction set that this machine has: each variant holds the token that proves it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Level {
    /// Plain Rust.
    Portable(Portable),
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
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(simd) => {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn enter<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
                    kernel.run(simd)
                }
                // SAFETY: the token proves the features that `enter` enables.
                unsafe { enter(simd, kernel) }
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) => {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                fn enter<K: Kernel>(simd: Avx512<false>, kernel: K) -> K::Output {
                    kernel.run(simd)
                }
                // SAFETY: the token proves the features that `enter` enables.
                unsafe { enter(simd, kernel) }
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Dots(simd) => {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
                fn enter<K: Kernel>(simd: Avx512<true>, kernel: K) -> K::Output {
                    kernel.run(simd)
                }
                // SAFETY: the token proves the features that `enter` enables.
                unsafe { enter(simd, kernel) }
            }
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
