//! Dequantisation of small integers: `low + code · step`, rounded to a buffer's type.

use crate::buffer::Buffer;
use crate::isa;
use crate::simd::{Elem, Kernel, Simd, store_part};

/// Rows of `step.len()` codes; column `c` of every row has `low[c]` and `step[c]`.
struct Columns<'a, E> {
    codes: &'a [i8],
    low: &'a [f32],
    step: &'a [f32],
    out: &'a mut [E],
}

/// Rows of `row` codes in runs of `run`; the last run of a row may be shorter. Each run has one element of `step`, and one
/// of `low` unless `low` is empty.
struct Runs<'a, E> {
    codes: &'a [i8],
    row: usize,
    run: usize,
    low: &'a [f32],
    step: &'a [f32],
    out: &'a mut [E],
}

impl<E: Elem> Kernel for Columns<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let columns = self.step.len();
        for (codes, out) in self.codes.chunks_exact(columns).zip(self.out.chunks_exact_mut(columns)) {
            for i in (0..columns).step_by(S::LANES) {
                let n = columns - i;
                // SAFETY: all four have `columns` elements, and `n` of them follow `i`.
                unsafe {
                    let low = crate::simd::load_part(simd, self.low.as_ptr().add(i), n);
                    let step = crate::simd::load_part(simd, self.step.as_ptr().add(i), n);
                    let x = simd.add(low, simd.mul(load(simd, codes.as_ptr().add(i), n), step));
                    store_part(simd, out.as_mut_ptr().add(i), x, n);
                }
            }
        }
    }
}

impl<E: Elem> Kernel for Runs<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut next = 0;
        for (codes, out) in self.codes.chunks_exact(self.row).zip(self.out.chunks_exact_mut(self.row)) {
            for (codes, out) in codes.chunks(self.run).zip(out.chunks_mut(self.run)) {
                let step = simd.splat(self.step[next]);
                let low = simd.splat(self.low.get(next).copied().unwrap_or(0.0));
                next += 1;
                for i in (0..codes.len()).step_by(S::LANES) {
                    let n = codes.len() - i;
                    // SAFETY: `n` elements of both follow `i`.
                    unsafe {
                        let x = simd.add(low, simd.mul(load(simd, codes.as_ptr().add(i), n), step));
                        store_part(simd, out.as_mut_ptr().add(i), x, n);
                    }
                }
            }
        }
    }
}

/// The first min(n, LANES) codes; the other lanes are zero.
///
/// # Safety
/// `p` must be valid for reading that many.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, p: *const i8, n: usize) -> S::F {
    // SAFETY: reads what the caller vouches for, or a whole local array.
    unsafe {
        if n >= S::LANES {
            return simd.load_i8(p);
        }
        let mut part = [0; 16];
        std::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), n);
        simd.load_i8(part.as_ptr())
    }
}

/// Calls a kernel with the elements `at .. at + len` of a buffer.
macro_rules! into {
    ($buffer:expr, $at:expr, $len:expr, |$out:ident| $kernel:expr) => {
        match $buffer {
            Buffer::F32(v) => isa::process_level().run({
                let $out = &mut v[$at..$at + $len];
                $kernel
            }),
            Buffer::F16(v) => isa::process_level().run({
                let $out = &mut v[$at..$at + $len];
                $kernel
            }),
            Buffer::Bf16(v) => isa::process_level().run({
                let $out = &mut v[$at..$at + $len];
                $kernel
            }),
        }
    };
}

impl Buffer {
    /// Overwrites `self[at ..]` with dequantised rows of `low.len()` codes: the code of column `c` becomes
    /// `low[c] + code · step[c]`, rounded to the buffer's type, ties to even. Uses the instruction set of the process
    /// ([`Isa::selected`](crate::Isa::selected)).
    ///
    /// # Panics
    /// If `step` and `low` differ in length, codes are not whole rows, or the buffer ends before the last of them.
    pub fn dequantize_columns(&mut self, at: usize, codes: &[i8], low: &[f32], step: &[f32]) {
        assert_eq!(low.len(), step.len(), "as many steps as columns");
        assert!(codes.len().is_multiple_of(step.len().max(1)), "whole rows");
        if !step.is_empty() {
            into!(self, at, codes.len(), |out| Columns { codes, low, step, out });
        }
    }

    /// Overwrites `self[at ..]` with dequantised rows of `row` codes in runs of `run`; the last run of a row may be shorter.
    /// The codes of run `r` become `low[r] + code · step[r]`, rounded to the buffer's type, ties to even; an empty `low`
    /// stands for zeros. Uses the instruction set of the process ([`Isa::selected`](crate::Isa::selected)).
    ///
    /// # Panics
    /// If `step` (or `low`, unless it is empty) has not one element for each run, codes are not whole rows, or the buffer
    /// ends before the last of them.
    pub fn dequantize_runs(
        &mut self,
        at: usize,
        codes: &[i8],
        (row, run): (usize, usize),
        low: &[f32],
        step: &[f32],
    ) {
        assert!(row > 0 && run > 0 && codes.len().is_multiple_of(row), "whole rows of runs");
        assert_eq!(step.len(), codes.len() / row * row.div_ceil(run), "a step for each run");
        assert!(low.is_empty() || low.len() == step.len(), "as many lows as steps");
        into!(self, at, codes.len(), |out| Runs { codes, row, run, low, step, out });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Slice};

    fn codes(n: usize) -> Vec<i8> {
        (0..n).map(|i| (i * 89 % 256) as u8 as i8).collect()
    }

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 7.0 - 5.0).collect()
    }

    fn check(dtype: Dtype, found: &Buffer, at: usize, expected: &[f32]) {
        let mut rounded = Buffer::zeros(dtype, at + expected.len() + 3);
        rounded.write_f32(at, expected);
        let bytes = |slice: Slice<'_>| slice.as_bytes().to_vec();
        assert_eq!(bytes(found.as_slice()), bytes(rounded.as_slice()));
    }

    /// Multiplications and additions are not fused, so that stored chunks give the same bits on every machine.
    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let (codes, low, step) = (codes(3 * 45), numbers(45, 5), numbers(45, 6));
        let results = isa::Isa::ALL.into_iter().filter_map(isa::Isa::level).map(|level| {
            let (mut columns, mut runs) = (vec![half::f16::ZERO; 3 * 45], vec![0.0f32; 3 * 45]);
            level.run(Columns { codes: &codes, low: &low, step: &step, out: &mut columns });
            level.run(Runs { codes: &codes, row: 45, run: 3, low: &[], step: &step, out: &mut runs });
            (
                columns.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                runs.iter().map(|x| x.to_bits()).collect(),
            )
        });
        let results: Vec<(Vec<u16>, Vec<u32>)> = results.collect();
        assert!(results.iter().all(|result| *result == results[0]));
    }

    /// Every element by its definition, sizes that no vector divides among them; nothing beside them is touched.
    #[test]
    fn codes_become_the_numbers_they_stand_for() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for (rows, row, run) in
                [(1, 1, 1), (3, 64, 64), (2, 48, 32), (5, 33, 32), (4, 7, 3), (2, 200, 16)]
            {
                let (codes, runs) = (codes(rows * row), row.div_ceil(run));
                let (low, step) = (numbers(rows * runs, 1), numbers(rows * runs, 2));
                for low in [&low[..], &[]] {
                    let of = |i: usize| i / row * runs + i % row / run;
                    let expected: Vec<f32> = (0..rows * row)
                        .map(|i| low.get(of(i)).unwrap_or(&0.0) + f32::from(codes[i]) * step[of(i)])
                        .collect();
                    let mut found = Buffer::zeros(dtype, codes.len() + 8);
                    found.dequantize_runs(5, &codes, (row, run), low, &step);
                    check(dtype, &found, 5, &expected);
                }
                let (low, step) = (numbers(row, 3), numbers(row, 4));
                let expected: Vec<f32> =
                    (0..rows * row).map(|i| low[i % row] + f32::from(codes[i]) * step[i % row]).collect();
                let mut found = Buffer::zeros(dtype, codes.len() + 8);
                found.dequantize_columns(5, &codes, &low, &step);
                check(dtype, &found, 5, &expected);
            }
        }
    }
}
