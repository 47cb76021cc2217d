//! Conversions between `f32` and the two half types, nearest even.

use half::{bf16, f16};

use crate::Isa;
use crate::simd::{Elem, Kernel, Simd, load_part, store_part};

struct Convert<'a, A, B>(&'a [A], &'a mut [B]);

impl<A: Elem, B: Elem> Kernel for Convert<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let n = self.0.len().min(self.1.len());
        let (src, dst) = (self.0.as_ptr(), self.1.as_mut_ptr());
        for i in (0..n).step_by(S::LANES) {
            // SAFETY: `i` and the count stay below both lengths.
            unsafe { store_part::<S, B>(dst.add(i), load_part::<S, A>(src.add(i), n - i), n - i) };
        }
    }
}

pub(crate) fn bf16_to_f32(src: &[bf16], dst: &mut [f32]) {
    Isa::best().run(Convert(src, dst));
}

pub(crate) fn f16_to_f32(src: &[f16], dst: &mut [f32]) {
    Isa::best().run(Convert(src, dst));
}

pub(crate) fn f32_to_bf16(src: &[f32], dst: &mut [bf16]) {
    Isa::best().run(Convert(src, dst));
}

pub(crate) fn f32_to_f16(src: &[f32], dst: &mut [f16]) {
    Isa::best().run(Convert(src, dst));
}
