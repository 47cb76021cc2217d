//! y (+)= x · Wᵀ + b over packed panels.
//!
//! Rows are packed in strips of 12 and taken in blocks that fit the second-level cache, the sum in blocks
//! whose panel fits the first-level one; tasks are (block of rows, run of panels).

use std::cell::Cell;
use std::ops::Range;

use super::pack::PackStrip;
use super::{Linear, Precision};
use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::simd::{Kernel, PANEL, STRIP, Simd, Tile, load_part, store_part, strip_width};
use crate::{Cpu, Isa};

/// Rows of one task: with one block of the sum some 440 KB of activations.
const ROW_BLOCK: usize = 32 * STRIP;
/// Steps of one block of the sum: a panel of 36 KiB (half where a step's activations take two words).
const STEP_BLOCK: usize = 288;
/// Words of packed activations at a time.
const PACKED: usize = 2 << 20;
/// Panels that share a block of activations while it is in the second-level cache.
const CHUNK: usize = 4;
/// Panels of one vector product, several chains of sums at once.
const VECTOR_PANELS: usize = 2;
/// Results of one panel for one strip.
const CELL: usize = STRIP * PANEL;

thread_local! {
    /// Packed activations.
    static X: Cell<Words> = const { Cell::new(Words::new()) };
    /// Results of a task.
    static CELLS: Cell<Words> = const { Cell::new(Words::new()) };
}

impl Cpu {
    /// y (m × outputs) = x (m × inputs) · Wᵀ + b, m = x.len() / inputs.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn linear(&self, w: &Linear, x: &[f32], y: &mut [f32]) {
        self.product(w, x, y, false);
    }

    /// The same, added to y (residual connection).
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn linear_add(&self, w: &Linear, x: &[f32], y: &mut [f32]) {
        self.product(w, x, y, true);
    }

    fn product(&self, w: &Linear, x: &[f32], y: &mut [f32], add: bool) {
        let m = x.len() / w.inputs;
        assert_eq!(x.len(), m * w.inputs, "x is m × inputs");
        assert_eq!(y.len(), m * w.outputs, "y is m × outputs");
        if y.is_empty() {
            return;
        }
        let words = row_words(w, self.isa());
        let rows = (PACKED / words).max(ROW_BLOCK) / ROW_BLOCK * ROW_BLOCK;
        let mut scratch = scratch::lend(&X, words * m.min(rows).next_multiple_of(STRIP));
        for (x, y) in x.chunks(rows * w.inputs).zip(y.chunks_mut(rows * w.outputs)) {
            self.pack_rows(w, x, words, scratch.words.words_mut());
            self.multiply(w, x.len() / w.inputs, scratch.words.words(), y, add);
        }
    }

    /// Packs `x` strip after strip; all but the last are 12 rows wide.
    fn pack_rows(&self, w: &Linear, x: &[f32], words: usize, packed: &mut [u32]) {
        let strips = (x.len() / w.inputs).div_ceil(STRIP);
        let packed = Shared::new(packed);
        self.parallel_if(x.len() > 1 << 15, strips, &|s| {
            let x = &x[s * STRIP * w.inputs..];
            let x = &x[..x.len().min(STRIP * w.inputs)];
            let width = strip_width(x.len() / w.inputs);
            // SAFETY: strip `s` belongs to task `s`.
            let dst = unsafe { packed.part(s * STRIP * words..(s * STRIP + width) * words) };
            self.isa().run(PackStrip { precision: w.precision, inputs: w.inputs, x, width, dst });
        });
    }

    fn multiply(&self, w: &Linear, m: usize, packed: &[u32], y: &mut [f32], add: bool) {
        let panels = w.outputs.div_ceil(PANEL);
        let blocks = m.div_ceil(ROW_BLOCK);
        let limit = if m <= STRIP { 4 * CHUNK } else { CHUNK };
        let chunk = (panels * blocks / (3 * self.threads())).clamp(1, limit);
        let chunks = panels.div_ceil(chunk);
        let y = Shared::new(y);
        // Some ten microseconds of arithmetic or of reading weights.
        let worth = m * w.outputs * w.inputs > 1 << 21 || w.outputs * w.inputs > 1 << 17;
        self.parallel_if(worth, blocks * chunks, &|t| {
            let (block, c) = (t / chunks, t % chunks);
            self.isa().run(Task {
                w,
                packed,
                y: &y,
                add,
                rows: block * ROW_BLOCK..((block + 1) * ROW_BLOCK).min(m),
                panels: c * chunk..((c + 1) * chunk).min(panels),
            });
        });
    }
}

/// Words of one packed row of activations.
fn row_words(w: &Linear, isa: Isa) -> usize {
    struct PairWords;
    impl Kernel for PairWords {
        type Output = usize;

        #[inline(always)]
        fn run<S: Simd>(self) -> usize {
            S::PAIR_WORDS
        }
    }
    match w.precision {
        Precision::F32 => w.inputs,
        Precision::Bf16 => w.steps() * isa.run(PairWords),
    }
}

/// The outputs of `panels` for `rows`.
struct Task<'a> {
    w: &'a Linear,
    packed: &'a [u32],
    y: &'a Shared<'a, f32>,
    add: bool,
    rows: Range<usize>,
    panels: Range<usize>,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let strips = self.rows.len().div_ceil(STRIP);
        // With one strip a panel is not used again, so that its size does not matter.
        let steps = self.w.steps();
        let blocks = if strips == 1 { 1 } else { steps.div_ceil(STEP_BLOCK / self.step_words::<S>()) };
        let block = steps.div_ceil(blocks);
        let group = if strips == 1 && self.rows.len() <= 4 { VECTOR_PANELS } else { 1 };
        let cells = if blocks == 1 { group } else { strips * self.panels.len() };
        let mut scratch = scratch::lend(&CELLS, cells * CELL);
        let cells = scratch.words.floats_mut();
        for b in 0..blocks {
            let range = b * block..((b + 1) * block).min(steps);
            for first in self.panels.clone().step_by(group) {
                let panels = first..(first + group).min(self.panels.end);
                for s in 0..strips {
                    let at = if blocks == 1 { 0 } else { (first - self.panels.start) * strips + s };
                    let cell = &mut cells[at * CELL..][..panels.len() * CELL];
                    self.cell::<S>(range.clone(), panels.clone(), s, cell);
                    if b + 1 == blocks {
                        self.finish::<S>(panels.clone(), s, cell);
                    }
                }
            }
        }
    }
}

impl Task<'_> {
    /// Rows of strip `s` of this task.
    #[inline(always)]
    fn strip(&self, s: usize) -> Range<usize> {
        let first = self.rows.start + s * STRIP;
        first..(first + STRIP).min(self.rows.end)
    }

    /// Words of a row's activations in one step.
    #[inline(always)]
    fn step_words<S: Simd>(&self) -> usize {
        if self.w.precision == Precision::F32 { 1 } else { S::PAIR_WORDS }
    }

    /// Adds the steps of one block of the sum to the cells (panels × 12 × 32) of one strip.
    #[inline(always)]
    fn cell<S: Simd>(&self, steps: Range<usize>, panels: Range<usize>, s: usize, cell: &mut [f32]) {
        let rows = self.strip(s);
        let width = strip_width(rows.len());
        let (all, words) = (self.w.steps(), self.step_words::<S>());
        let weights = &self.w.words.words()[panels.start * all * PANEL..panels.end * all * PANEL];
        let x = &self.packed[rows.start * all * words..][..width * all * words];
        let tile = Tile {
            k: steps.len(),
            w: weights[steps.start * PANEL..].as_ptr(),
            ws: PANEL,
            ps: all * PANEL,
            x: x[steps.start * words * width..].as_ptr(),
            ks: width,
            c: cell.as_mut_ptr(),
            cs: PANEL,
            cps: CELL,
            cols: panels.len() * PANEL,
            add: steps.start > 0,
        };
        // SAFETY: the slices above hold every panel's and the strip's steps; `cell` has a cell for each panel.
        unsafe {
            match self.w.precision {
                Precision::F32 => S::strip::<1>(width, &tile),
                Precision::Bf16 => S::strip_pairs(width, &tile),
            }
        }
    }

    /// Writes finished cells to y.
    #[inline(always)]
    fn finish<S: Simd>(&self, panels: Range<usize>, s: usize, cell: &[f32]) {
        let outputs = self.w.outputs;
        for (p, cell) in panels.zip(cell.chunks_exact(CELL)) {
            let n = PANEL.min(outputs - p * PANEL);
            for (row, cell) in self.strip(s).zip(cell.chunks_exact(PANEL)) {
                let at = row * outputs + p * PANEL;
                // SAFETY: these rows and panels belong to this task.
                let y = unsafe { self.y.part(at..at + n) };
                for i in (0..n).step_by(S::LANES) {
                    // SAFETY: `i` and the count stay below `n`, the length of `y` and at most a cell's row.
                    unsafe {
                        let mut v = S::load(cell.as_ptr().add(i));
                        if let Some(bias) = &self.w.bias {
                            v = S::add(v, load_part::<S, f32>(bias[p * PANEL..].as_ptr().add(i), n - i));
                        }
                        if self.add {
                            v = S::add(v, load_part::<S, f32>(y.as_ptr().add(i), n - i));
                        }
                        store_part::<S, f32>(y.as_mut_ptr().add(i), v, n - i);
                    }
                }
            }
        }
    }
}
