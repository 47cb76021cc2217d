//! Tasks of a product with tiles of AMX. Activations are packed as 16 × 32 tiles of `bf16`; a panel of weights, pair of
//! inputs after pair, is a column of tiles as it is stored.

use std::ops::Range;
use std::ptr::{null, null_mut};

use super::activations::{PackedRows, TaskOutput};
use super::blocking::Blocking;
use super::gated_amx::{GatedRows, activate};
use super::pack_amx::{STEPS, STRIP, packed, parts};
use super::panel_task::{Epilogue, PanelTask, UNPACKED};
use super::quant_blocks::{BlockFormat, BlockProduct, PASSING, Pairs};
use super::weights::{Activation, Precision};
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::amx::Tiles;
use crate::simd::features::Amx;
use crate::simd::pair_tiles::{PairUnit as _, SIDE, Square, TILE};
use crate::simd::{PANEL, Simd};

impl PanelTask<'_> {
    /// Cells of `strips` strips: one for each panel of all of them if a sum has several parts. Otherwise a strip's cells are free again once its
    /// sums are made, and those of gated rows that are packed once the next pair's are, so that two pairs in turn are enough.
    pub(super) fn tile_cells(&self, strips: usize) -> usize {
        match (self.blocking.steps < self.blocking.words, self.y) {
            (true, _) => strips * self.panels.len(),
            (false, TaskOutput::Packed { .. }) => 4,
            (false, TaskOutput::Rows(_)) => self.panels.len(),
        }
    }

    /// The cell of panel `i` of the task for strip `s`.
    fn tile_cell(&self, s: usize, i: usize) -> usize {
        match (self.blocking.steps < self.blocking.words, self.y) {
            (true, _) => s * self.panels.len() + i,
            (false, TaskOutput::Packed { .. }) => (s * self.panels.len() + i) % 4,
            (false, TaskOutput::Rows(_)) => i,
        }
    }

    /// Multiplies strip after strip with the panels, whose weights stay in the second-level cache, one part of the sum
    /// after the other. `cells` are [`PanelTask::tile_cells`].
    #[inline(always)]
    pub(super) fn tiles<S: Simd>(&self, simd: S, amx: Amx, strips: usize, cells: &mut [f32]) {
        let tiles = Tiles::configure(amx);
        let (steps, part, size) = (self.blocking.words, self.blocking.steps, self.blocking.cell());
        let blocks = self.w.precision == Precision::Q8;
        // Panels are kept for the strips after the first.
        let keep = strips > 1;
        let room = if keep { self.panels.len() * part * PANEL } else { PASSING };
        let mut unpacked = scratch::borrow(&UNPACKED, if blocks { room } else { 0 });
        let unpacked = unpacked.as_u32_mut();
        let cells = DisjointMut::new(cells);
        let mut gated = match (self.y, self.epilogue) {
            (&TaskOutput::Packed { ref words, to, first }, Epilogue::Gated(activation)) => {
                Some((PackedStrips { words, to, first }, GatedRows::new(activation)))
            }
            _ => None,
        };
        for range in parts(steps, part) {
            let start = range.start;
            let length = range.len() * PANEL;
            for s in 0..strips {
                let (rows, direct) = (self.strip(s), range.end == steps && self.direct(s));
                let width = self.blocking.width(rows.len());
                let x = &self.packed[packed(&range, self.packed_rows, rows.start, width)];
                for (i, p) in self.panels.clone().enumerate() {
                    let at = self.tile_cell(s, i) * size;
                    // SAFETY: cells are used one at a time, but for those that rows are read from.
                    let cell = unsafe { cells.part(at..at + size) };
                    let weights = if !blocks {
                        Weights::Pairs(&self.w.panel(p)[start * PANEL..][..length])
                    } else if s > 0 {
                        Weights::Pairs(&unpacked[i * length..][..length])
                    } else {
                        let pairs = match keep {
                            true => Pairs::Kept(&mut unpacked[i * length..][..length]),
                            false => Pairs::Passing(unpacked),
                        };
                        Weights::Blocks(self.w.format, self.blocks(p, &range), pairs)
                    };
                    let sum = PartialSum { x, weights, steps: range.len() };
                    let cell_rows = (cells.as_mut_ptr(at..at + size), PANEL * size_of::<f32>());
                    let (from, from_stride) = match start {
                        0 => self.initial(s, p, cell),
                        _ => (cell_rows.0.cast_const(), cell_rows.1),
                    };
                    // SAFETY: these rows of this panel belong to this task.
                    unsafe {
                        let (c, stride) = match direct {
                            true => self.y.rows().as_mut_ptr(rows.clone(), self.columns(p)),
                            false => cell_rows,
                        };
                        // In a cell's place comes the one of the next panel.
                        let next = if direct { c } else { c.wrapping_add(STRIP * PANEL) };
                        let to = Square { c, stride, from, from_stride, next };
                        sum.product(&tiles, rows.len(), to, gated.as_mut().map(|(_, gated)| gated));
                    }
                    // A gate's panel comes before its up's.
                    if let Some((strips, gated)) = &mut gated
                        && range.end == steps
                        && i % 2 == 1
                    {
                        let columns = self.gated_columns(i / 2);
                        // SAFETY: these rows and panels belong to this task; the cells are written again after the rows of those behind them.
                        unsafe {
                            let to = strips.tiles(rows.clone(), columns.start / 2);
                            gated.begin(&tiles, cells.as_mut_ptr(at - size..at + size), to, rows.len());
                        }
                    }
                }
                if range.end == steps && !direct && gated.is_none() {
                    let first = self.tile_cell(s, 0) * size;
                    // SAFETY: the strip's sums are made.
                    let cells = unsafe { cells.part(first..first + self.panels.len() * size) };
                    match self.epilogue {
                        Epilogue::Gated(activation) => self.gated_rows(&tiles, activation, s, cells),
                        _ => self.finish(simd, s, cells),
                    }
                }
            }
        }
        if let Some((_, mut gated)) = gated {
            gated.finish(&tiles);
        }
    }

    /// Writes activation(gate) · up as rows of `f32`, which are packed rows once they are rounded.
    #[inline(always)]
    fn gated_rows(&self, tiles: &Tiles, activation: Activation, s: usize, cells: &[f32]) {
        let size = self.blocking.cell();
        for (i, cells) in cells.chunks_exact(2 * size).enumerate() {
            let columns = self.gated_columns(i);
            for (r, row) in self.strip(s).enumerate() {
                let [gate, up] =
                    [0, size].map(|cell| cells[cell + r * PANEL..].first_chunk().expect("a row"));
                let active = activate(tiles, activation, gate, up);
                // SAFETY: these rows and panels belong to this task.
                let y = unsafe { self.y.rows().part(row, columns.clone()) };
                y.copy_from_slice(&active[..y.len()]);
            }
        }
    }

    /// The address of the initial values of strip `s` and panel `p`, null for zeros, and the bytes from row to row. Tiles load them
    /// where they lie; if y has not all of the 32 rows and columns, they are written to the cell first.
    #[inline(always)]
    fn initial(&self, s: usize, p: usize, cell: &mut [f32]) -> (*const f32, usize) {
        let (rows, columns) = (self.strip(s), self.columns(p));
        if !self.begins() {
            return (null(), 0);
        }
        if rows.len() == STRIP && columns.len() == PANEL {
            return match &self.w.bias {
                // Stride 0 reads the bias for every row.
                Some(bias) => (bias[columns].as_ptr(), 0),
                None => {
                    let (y, stride) = self.y.rows().as_mut_ptr(rows, columns);
                    (y.cast_const(), stride)
                }
            };
        }
        for (row, cell) in rows.zip(cell.chunks_exact_mut(PANEL)) {
            cell[columns.len()..].fill(0.0);
            cell[..columns.len()].copy_from_slice(match &self.w.bias {
                Some(bias) => &bias[columns.clone()],
                // SAFETY: these rows and panels belong to this task.
                None => unsafe { self.y.rows().part(row, columns.clone()) },
            });
        }
        (cell.as_ptr(), PANEL * size_of::<f32>())
    }

    /// Whether the last part of the sums of strip `s` writes to y itself, without an epilogue. Earlier parts do not: rows of y lie so far
    /// apart that few of them fit into the first-level cache at a time.
    #[inline(always)]
    fn direct(&self, s: usize) -> bool {
        let simple = match self.epilogue {
            Epilogue::Store => true,
            Epilogue::Add => self.w.bias.is_none(),
            Epilogue::Gated(_) => false,
        };
        simple && self.strip(s).len() == STRIP && self.panels.end * PANEL <= self.w.outputs
    }
}

/// The packed rows of an output.
struct PackedStrips<'a> {
    words: &'a DisjointMut<'a, u32>,
    to: PackedRows,
    /// Index of the task's row 0 among all packed rows.
    first: usize,
}

impl PackedStrips<'_> {
    /// The tiles of 16 steps from `step` on, of the first 16 of up to 32 rows and of the others. What they hold beyond these rows is 0.
    ///
    /// # Safety
    /// The tiles may not be in use.
    unsafe fn tiles(&self, rows: Range<usize>, step: usize) -> [*mut u32; 2] {
        let Blocking { words, steps, .. } = self.to.blocking;
        let start = step / steps * steps;
        let part = start..(start + steps).min(words);
        let mut tiles = [null_mut(); 2];
        for (first, to) in rows.clone().step_by(SIDE).zip(&mut tiles) {
            let column = packed(&part, self.to.blocking.width(self.to.rows), self.first + first, SIDE).start;
            let at = column + (step - start) * SIDE;
            // SAFETY: the caller's.
            let tile = unsafe { self.words.part(at..at + TILE) };
            tile[(rows.end - first).min(SIDE) * SIDE..].fill(0);
            *to = tile.as_mut_ptr();
        }
        tiles
    }
}

/// Steps of a sum over one panel and one strip.
struct PartialSum<'a> {
    /// The strip's tiles of these steps.
    x: &'a [u32],
    /// The panel's weights of these steps.
    weights: Weights<'a>,
    steps: usize,
}

enum Weights<'a> {
    Pairs(&'a [u32]),
    /// Blocks, which are unpacked to pairs.
    Blocks(BlockFormat, &'a [u32], Pairs<'a>),
}

impl PartialSum<'_> {
    /// C (16 or 32 × 32) = initial values + the sums, with rows of other cells beside them.
    ///
    /// # Safety
    /// C and its initial values must be valid for as many rows as tiles have for `rows`, and no other thread may use them.
    #[inline(always)]
    unsafe fn product(self, tiles: &Tiles, rows: usize, to: Square, beside: Option<&mut GatedRows>) {
        let blocks = self.steps / STEPS;
        let column = |i: usize| self.x[i * self.steps * SIDE..][..self.steps * SIDE].as_ptr();
        let a = [column(0), if rows > SIDE { column(1) } else { null() }];
        // SAFETY: the slices hold the tiles of these steps, or their blocks, and the caller's.
        unsafe {
            match self.weights {
                Weights::Pairs(pairs) if rows > SIDE => match beside {
                    Some(gated) => gated.product_32(tiles, a, pairs.as_ptr(), blocks, to),
                    None => tiles.product_32(a, pairs.as_ptr(), blocks, to),
                },
                Weights::Pairs(pairs) => tiles.product_16(a[0], pairs.as_ptr(), blocks, to),
                Weights::Blocks(format, panel, pairs) => {
                    BlockProduct { a, format, panel, pairs, to }.run(tiles, rows);
                }
            }
        }
    }
}
