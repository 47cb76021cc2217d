//! How the rows and the steps of a product are taken in blocks.

#[cfg(target_arch = "x86_64")]
use super::pack_amx;
#[cfg(target_arch = "x86_64")]
use super::pack_i16;
use super::quant_blocks::{BLOCK, BlockFormat, X_WORDS};
use super::weights::{Linear, Precision};
use crate::cpu::Cpu;
#[cfg(target_arch = "x86_64")]
use crate::simd::features::{Amx, Avx2};
use crate::simd::{Kernel, PANEL, STRIP, Simd, strip_width};

/// Steps of one block of the sum: a panel of 36 KiB (half where a step's activations take two words).
const STEP_BLOCK: usize = 288;
/// Panels that share a block of activations while it is in the second-level cache.
const CHUNK: usize = 8;
/// Most rows that are multiplied with quantised blocks as they are stored, where the CPU has no products of bytes that are faster than
/// those of `bf16`.
const Q8_ROWS: usize = 4;
/// Most rows of a task with quantised blocks as they are stored: a block stays in registers while they pass.
const Q8_TASK_ROWS: usize = 64;

/// The kernels of a product.
#[derive(Clone, Copy)]
pub(super) enum MatmulPath {
    /// Tiles of 16 × 32 `bf16`.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// Integers of 16 bits, for many rows.
    #[cfg(target_arch = "x86_64")]
    Integers(Avx2),
    /// Quantised blocks as they are stored, by activations of 8 bits. A row's bits do not depend on the other rows.
    Q8Rows,
    /// Strips of rows, weights of 16 or 32 outputs a vector.
    Vector,
}

/// How rows are packed and taken in blocks.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    pub(super) path: MatmulPath,
    /// Rows of a strip.
    pub(super) strip: usize,
    /// Words of one packed row of activations.
    pub(super) words: usize,
    /// Rows of one task: with one block of the sum some 300 to 440 KB of activations.
    pub(super) rows: usize,
    /// Steps of one block of the sum.
    pub(super) steps: usize,
}

impl Blocking {
    pub(super) fn of(w: &Linear, cpu: &Cpu, m: usize) -> Blocking {
        #[cfg(target_arch = "x86_64")]
        if let Some(token) = integers(w, cpu)
            && m >= pack_i16::LEAST_ROWS
            && !cpu.is_batch_invariant()
        {
            let words = pack_i16::words(w.padded_steps());
            let (rows, steps) = (pack_i16::ROWS, pack_i16::part(w.padded_steps()));
            return Blocking { path: MatmulPath::Integers(token), strip: STRIP, words, rows, steps };
        }
        let fast = cpu.has_fast_byte_products(w.format == BlockFormat::Q4);
        let bytes = m <= Q8_ROWS || cpu.is_batch_invariant() || fast;
        if w.precision == Precision::Q8 && bytes {
            let words = w.inputs.div_ceil(BLOCK) * X_WORDS;
            let rows = m.clamp(Q8_ROWS, Q8_TASK_ROWS);
            return Blocking { path: MatmulPath::Q8Rows, strip: rows, words, rows, steps: w.steps() };
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(token) = cpu.amx().filter(|_| w.precision != Precision::F32) {
            let words = w.padded_steps();
            let steps = pack_amx::part(words);
            return Blocking {
                path: MatmulPath::Amx(token),
                strip: pack_amx::STRIP,
                words,
                rows: pack_amx::ROWS,
                steps,
            };
        }
        // Blocks are unpacked once for all rows of a task.
        let more = if w.precision == Precision::Q8 { 4 } else { 1 };
        let step_words = step_words(w.precision, cpu);
        let (words, steps) = (w.steps() * step_words, STEP_BLOCK / step_words);
        Blocking { path: MatmulPath::Vector, strip: STRIP, words, rows: 32 * STRIP * more, steps }
    }

    /// Most panels of one task on `m` rows.
    pub(super) fn chunk(self, m: usize) -> usize {
        match self.path {
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Amx(_) => pack_amx::chunk(self.steps, self.words),
            _ if m <= self.strip => 4 * CHUNK,
            _ => CHUNK,
        }
    }

    /// Rows that a strip of `rows` rows is packed with.
    #[inline(always)]
    pub(super) fn width(self, rows: usize) -> usize {
        match self.path {
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Amx(_) => rows.next_multiple_of(16),
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Integers(_) => STRIP,
            MatmulPath::Q8Rows => rows,
            MatmulPath::Vector => strip_width(rows),
        }
    }

    /// Floats of the results of one panel for one strip.
    #[inline(always)]
    pub(super) fn cell(self) -> usize {
        self.strip * PANEL
    }
}

/// AVX2, if products of integers of 16 bits are its fastest for many rows: bytes are faster where weights are blocks of four bits, and those of VNNI where they
/// are blocks.
#[cfg(target_arch = "x86_64")]
fn integers(w: &Linear, cpu: &Cpu) -> Option<Avx2> {
    cpu.avx2().filter(|avx2| match w.precision {
        Precision::F32 => false,
        Precision::Bf16 => true,
        Precision::Q8 => w.format == BlockFormat::Q8 && avx2.vnni().is_none(),
    })
}

/// Words of a row's activations in one step.
fn step_words(precision: Precision, cpu: &Cpu) -> usize {
    struct PairWords;
    impl Kernel for PairWords {
        const PAIRS: bool = true;
        type Output = usize;

        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            S::PAIR_WORDS
        }
    }
    match precision {
        Precision::F32 => 1,
        Precision::Bf16 | Precision::Q8 => cpu.run(PairWords),
    }
}
