//! Stored element types as vectors of `f32`.

use half::{bf16, f16};

use super::vector::Simd;

/// A stored element: `f32`, `f16` or `bf16`.
pub(crate) trait Elem: Copy + Send + Sync + 'static {
    const ZERO: Self;
    unsafe fn load<S: Simd>(simd: S, p: *const Self) -> S::F;
    /// Rounds to nearest even.
    unsafe fn store<S: Simd>(simd: S, p: *mut Self, v: S::F);
}

macro_rules! elem {
    ($type:ty, $zero:expr, $load:ident, $store:ident) => {
        impl Elem for $type {
            const ZERO: Self = $zero;

            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, p: *const Self) -> S::F {
                // SAFETY: the caller's.
                unsafe { simd.$load(p) }
            }

            #[inline(always)]
            unsafe fn store<S: Simd>(simd: S, p: *mut Self, v: S::F) {
                // SAFETY: the caller's.
                unsafe { simd.$store(p, v) }
            }
        }
    };
}

elem!(f32, 0.0, load, store);
elem!(f16, f16::ZERO, load_f16, store_f16);
elem!(bf16, bf16::ZERO, load_bf16, store_bf16);

/// The first `n` elements at `p` (all lanes if there are as many), zeros after them.
///
/// # Safety
/// `p` must be valid for reading min(n, LANES) elements.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Simd, E: Elem>(simd: S, p: *const E, n: usize) -> S::F {
    // SAFETY: reads what the caller vouches for, or a whole local array.
    unsafe {
        if n >= S::LANES {
            return E::load(simd, p);
        }
        let mut part = [E::ZERO; 16];
        std::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), n);
        E::load(simd, part.as_ptr())
    }
}

/// Writes the first min(n, LANES) lanes.
///
/// # Safety
/// `p` must be valid for writing that many elements.
#[inline(always)]
pub(crate) unsafe fn store_part<S: Simd, E: Elem>(simd: S, p: *mut E, v: S::F, n: usize) {
    // SAFETY: writes what the caller vouches for, or a whole local array.
    unsafe {
        if n >= S::LANES {
            return E::store(simd, p, v);
        }
        let mut part = [E::ZERO; 16];
        E::store(simd, part.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(part.as_ptr(), p, n);
    }
}
