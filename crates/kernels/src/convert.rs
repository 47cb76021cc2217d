//! Conversions between `f32` and the two half types, nearest even.

use half::{bf16, f16};

use crate::isa;
use crate::simd::{Elem, Kernel, Simd, load_part, store_part};

struct Convert<'a, A, B>(&'a [A], &'a mut [B]);

impl<A: Elem, B: Elem> Kernel for Convert<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let n = self.0.len().min(self.1.len());
        let (src, dst) = (self.0.as_ptr(), self.1.as_mut_ptr());
        for i in (0..n).step_by(S::LANES) {
            // SAFETY: `i` and the count stay below both lengths.
            unsafe { store_part(simd, dst.add(i), load_part(simd, src.add(i), n - i), n - i) };
        }
    }
}

pub(crate) fn bf16_to_f32(src: &[bf16], dst: &mut [f32]) {
    isa::process_level().run(Convert(src, dst));
}

pub(crate) fn f16_to_f32(src: &[f16], dst: &mut [f32]) {
    isa::process_level().run(Convert(src, dst));
}

pub(crate) fn f32_to_bf16(src: &[f32], dst: &mut [bf16]) {
    isa::process_level().run(Convert(src, dst));
}

pub(crate) fn f32_to_f16(src: &[f32], dst: &mut [f16]) {
    isa::process_level().run(Convert(src, dst));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_rounds_as_half_does() {
        let x: Vec<f32> =
            (0..1003).map(|i| (i as f32 - 500.0) * 1.37e-3).chain([6e-8, 65519.0, 1e-40]).collect();
        for level in isa::Isa::ALL.into_iter().filter_map(isa::Isa::level) {
            let (mut f, mut b) = (vec![f16::ZERO; x.len()], vec![bf16::ZERO; x.len()]);
            level.run(Convert(&x, &mut f));
            level.run(Convert(&x, &mut b));
            let mut back = vec![0.0f32; x.len()];
            level.run(Convert(&f, &mut back));
            for (i, x) in x.iter().enumerate() {
                assert_eq!((f[i], b[i]), (f16::from_f32(*x), bf16::from_f32(*x)), "{level:?}");
                assert_eq!(back[i], f[i].to_f32(), "{level:?}");
            }
        }
    }
}
