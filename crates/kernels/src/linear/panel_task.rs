//! Tasks of a product: the kernels of a block of its rows and steps.

use std::cell::Cell;
use std::ops::Range;

use super::activations::TaskOutput;
use super::blocking::{Blocking, MatmulPath};
use super::quant_blocks::{MultiplyRows, Unpack, blocks_of};
use super::weights::{Activation, Linear, Precision};
use crate::prefetch;
use crate::scratch::{self, AlignedVec};
use crate::simd::{Kernel, PANEL, Simd, Tile, load_part, store_part};

/// Most words of packed activations that are asked for as a whole before they are written or read: lines that come from another core one
/// by one would take longer than the arithmetic.
pub(super) const FEW_WORDS: usize = 4 << 10;
/// Strips of a task from which on pairs are widened to `f32` once for all of them ([`Simd::WIDENS_PAIRS`]).
const WIDENED_STRIPS: usize = 3;
/// Panels of one vector product, several chains of sums at once.
const VECTOR_PANELS: usize = 2;

thread_local! {
    /// Parts of panels of blocks, as pairs.
    pub(super) static UNPACKED: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// Parts of panels of pairs, as `f32`.
    static WIDENED: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// Results of a task.
    static CELLS: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

/// Writes both inputs of each step of pairs (steps × 32) as `f32`, the even one first.
#[inline(always)]
fn widen(pairs: &[u32], out: &mut [u32]) {
    for (step, out) in pairs.chunks_exact(PANEL).zip(out.chunks_exact_mut(2 * PANEL)) {
        let (even, odd) = out.split_at_mut(PANEL);
        for i in 0..PANEL {
            (even[i], odd[i]) = (step[i] << 16, step[i] & 0xffff_0000);
        }
    }
}

/// The outputs of `panels` for `rows`.
pub(super) struct PanelTask<'a> {
    pub(super) w: &'a Linear,
    pub(super) blocking: Blocking,
    pub(super) packed: &'a [u32],
    /// Rows that are packed, as they lie there.
    #[cfg(target_arch = "x86_64")]
    pub(super) packed_rows: usize,
    pub(super) y: &'a TaskOutput<'a>,
    pub(super) epilogue: Epilogue,
    pub(super) rows: Range<usize>,
    pub(super) panels: Range<usize>,
}

/// The last step of a product with its sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Epilogue {
    /// y = sums + bias
    Store,
    /// y += sums + bias
    Add,
    /// y = activation(gate) · up
    Gated(Activation),
}

impl Kernel for PanelTask<'_> {
    const PAIRS: bool = true;
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let strips = self.rows.len().div_ceil(self.blocking.strip);
        let size = self.blocking.cell();
        let cells = match self.blocking.path {
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Amx(_) => self.tile_cells(strips),
            _ => strips * self.panels.len(),
        };
        let mut scratch = scratch::borrow(&CELLS, cells * size);
        let cells = scratch.as_f32_mut();
        match self.blocking.path {
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Amx(token) => return self.tiles(simd, token, strips, cells),
            #[cfg(target_arch = "x86_64")]
            MatmulPath::Integers(token) => self.integers(token, strips, cells),
            MatmulPath::Q8Rows => self.rows(simd, cells),
            MatmulPath::Vector => self.strips(simd, strips, cells),
        }
        for (s, cells) in cells.chunks_exact(self.panels.len() * size).enumerate().take(strips) {
            self.finish(simd, s, cells);
        }
    }
}

impl PanelTask<'_> {
    /// Multiplies the panels by rows, each as if it were alone.
    #[inline(always)]
    fn rows<S: Simd>(&self, simd: S, cells: &mut [f32]) {
        let words = self.blocking.words;
        let x = &self.packed[self.rows.start * words..self.rows.end * words];
        if x.len() <= FEW_WORDS {
            prefetch::to_read(x.as_ptr().cast(), size_of_val(x));
        }
        for (p, cell) in self.panels.clone().zip(cells.chunks_exact_mut(self.blocking.cell())) {
            let y = &mut cell[..self.rows.len() * PANEL];
            MultiplyRows { format: self.w.format, panel: self.w.panel(p), x, words, y }.run(simd);
        }
    }

    /// Multiplies the panels strip by strip, one block of the sum after the other.
    #[inline(always)]
    fn strips<S: Simd>(&self, simd: S, strips: usize, cells: &mut [f32]) {
        let blocks = self.w.precision == Precision::Q8;
        // With one strip a panel is not used again, so that its size does not matter.
        let (steps, whole) = (self.w.steps(), strips == 1 && !blocks);
        let parts = if whole { 1 } else { steps.div_ceil(self.blocking.steps) };
        // Whole blocks of pairs.
        let unit = if self.w.precision == Precision::F32 || steps % 16 > 0 { 1 } else { 16 };
        let part = steps.div_ceil(parts).next_multiple_of(unit);
        let few = strips == 1 && self.rows.len() <= 4 && !blocks;
        let group = if few { VECTOR_PANELS } else { 1 };
        let size = self.blocking.cell();
        let pairs = self.w.precision != Precision::F32;
        let widened = pairs && S::WIDENS_PAIRS && strips >= WIDENED_STRIPS;
        let mut unpacked = scratch::borrow(&UNPACKED, if blocks { part * PANEL } else { 0 });
        let mut wide = scratch::borrow(&WIDENED, if widened { 2 * part * PANEL } else { 0 });
        for start in (0..steps).step_by(part) {
            let range = start..(start + part).min(steps);
            for first in self.panels.clone().step_by(group) {
                let panels = first..(first + group).min(self.panels.end);
                let weights = if blocks {
                    let out = &mut unpacked.as_u32_mut()[..range.len() * PANEL];
                    Unpack { format: self.w.format, panel: self.blocks(first, &range), out }.run(simd);
                    unpacked.as_u32()
                } else {
                    let words = self.w.panel_words();
                    &self.w.words.as_u32()[first * words..panels.end * words][range.start * PANEL..]
                };
                let weights = if widened {
                    widen(&weights[..range.len() * PANEL], wide.as_u32_mut());
                    wide.as_u32()
                } else {
                    weights
                };
                for s in 0..strips {
                    let at = s * self.panels.len() + first - self.panels.start;
                    let cell = &mut cells[at * size..][..panels.len() * size];
                    self.cell(simd, range.clone(), (weights, widened), s, cell);
                }
            }
        }
    }
}

impl PanelTask<'_> {
    /// The blocks that hold the steps `range` of a panel.
    pub(super) fn blocks(&self, panel: usize, range: &Range<usize>) -> &[u32] {
        let (of, words) = (blocks_of(range), self.w.format.words());
        &self.w.panel(panel)[of.start * words..of.end * words]
    }

    /// Rows of strip `s` of this task.
    #[inline(always)]
    pub(super) fn strip(&self, s: usize) -> Range<usize> {
        let first = self.rows.start + s * self.blocking.strip;
        first..(first + self.blocking.strip).min(self.rows.end)
    }

    /// Adds the steps of one block of the sum, whose `weights` begin with the first of them, to the cells
    /// (panels × strip × 32) of one strip. Weights of pairs may be `widened`.
    #[inline(always)]
    fn cell<S: Simd>(
        &self,
        simd: S,
        steps: Range<usize>,
        (weights, widened): (&[u32], bool),
        s: usize,
        cell: &mut [f32],
    ) {
        let rows = self.strip(s);
        let width = self.blocking.width(rows.len());
        let x = &self.packed[rows.start * self.blocking.words..][..width * self.blocking.words];
        let words = self.blocking.words / self.w.steps();
        let panels = cell.len() / self.blocking.cell();
        let tile = Tile {
            k: if widened { 2 * steps.len() } else { steps.len() },
            w: weights.as_ptr(),
            ws: PANEL,
            ps: self.w.panel_words(),
            x: x[steps.start * words * width..].as_ptr(),
            ks: width,
            c: cell.as_mut_ptr(),
            cs: PANEL,
            cps: self.blocking.cell(),
            cols: panels * PANEL,
            add: steps.start > 0,
        };
        // SAFETY: the slices above hold every panel's and the strip's steps; `cell` has a cell for each panel.
        unsafe {
            match self.w.precision {
                Precision::Bf16 | Precision::Q8 if !widened => simd.strip_pairs(width, &tile),
                _ => simd.strip::<1>(width, &tile),
            }
        }
    }

    /// Whether sums start from the bias or from y and need no epilogue. With tiles they do, so that sums that are computed
    /// in y itself have the same bits as sums that are computed in a cell.
    pub(super) fn begins(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if let MatmulPath::Amx(_) = self.blocking.path {
            return match self.epilogue {
                Epilogue::Store | Epilogue::Gated(_) => self.w.bias.is_some(),
                Epilogue::Add => self.w.bias.is_none(),
            };
        }
        false
    }

    /// Writes the finished cells of a strip to y, row after row.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&self, simd: S, s: usize, cells: &[f32]) {
        match self.epilogue {
            Epilogue::Store | Epilogue::Add => self.store(simd, s, cells),
            Epilogue::Gated(activation) => self.gated(simd, activation, s, cells),
        }
    }

    #[inline(always)]
    fn store<S: Simd>(&self, simd: S, s: usize, cells: &[f32]) {
        let whole = self.begins();
        for (r, row) in self.strip(s).enumerate() {
            for (p, cell) in self.panels.clone().zip(cells.chunks_exact(self.blocking.cell())) {
                let columns = self.columns(p);
                // SAFETY: these rows and panels belong to this task.
                let y = unsafe { self.y.rows().part(row, columns.clone()) };
                for (c, y) in (0..).step_by(S::LANES).zip(y.chunks_mut(S::LANES)) {
                    let cell = &cell[r * PANEL + c..][..S::LANES];
                    let n = y.len();
                    // SAFETY: `cell` has LANES floats, `y` has `n`, and so has the bias from here on.
                    unsafe {
                        let mut v = simd.load(cell.as_ptr());
                        if let Some(bias) = self.w.bias.as_ref().filter(|_| !whole) {
                            v = simd.add(v, load_part(simd, bias[columns.start + c..].as_ptr(), n));
                        }
                        if self.epilogue == Epilogue::Add && !whole {
                            v = simd.add(v, load_part(simd, y.as_ptr(), n));
                        }
                        store_part(simd, y.as_mut_ptr(), v, n);
                    }
                }
            }
        }
    }

    /// The outputs of panel `p`.
    pub(super) fn columns(&self, p: usize) -> Range<usize> {
        p * PANEL..((p + 1) * PANEL).min(self.w.outputs)
    }

    /// y = activation(gate) · up, from interleaved panels.
    #[inline(always)]
    fn gated<S: Simd>(&self, simd: S, activation: Activation, s: usize, cells: &[f32]) {
        for (r, row) in self.strip(s).enumerate() {
            for (i, cells) in cells.chunks_exact(2 * self.blocking.cell()).enumerate() {
                let columns = self.gated_columns(i);
                // SAFETY: these rows and panels belong to this task.
                let y = unsafe { self.y.rows().part(row, columns.clone()) };
                let (gate, up) = cells.split_at(self.blocking.cell());
                let (gate, up) = (&gate[r * PANEL..][..PANEL], &up[r * PANEL..][..PANEL]);
                for (c, y) in (0..).step_by(S::LANES).zip(y.chunks_mut(S::LANES)) {
                    let (gate, up) = (&gate[c..][..S::LANES], &up[c..][..S::LANES]);
                    // SAFETY: both have LANES floats, `y` as many as it is long.
                    unsafe {
                        let (mut gate, mut up) = (simd.load(gate.as_ptr()), simd.load(up.as_ptr()));
                        if let Some(bias) = &self.w.bias {
                            let bias = &bias[2 * columns.start + c..];
                            gate = simd.add(gate, simd.load(bias[..S::LANES].as_ptr()));
                            up = simd.add(up, simd.load(bias[PANEL..][..S::LANES].as_ptr()));
                        }
                        let active = match activation {
                            Activation::Silu => simd.silu(gate),
                            Activation::GeluTanh => simd.gelu_tanh(gate),
                        };
                        store_part(simd, y.as_mut_ptr(), simd.mul(active, up), y.len());
                    }
                }
            }
        }
    }

    /// The columns of y that the task's gate panel `i` and up panel `i` give.
    pub(super) fn gated_columns(&self, i: usize) -> Range<usize> {
        let first = (self.panels.start / 2 + i) * PANEL;
        first..(first + PANEL).min(self.w.outputs())
    }
}
