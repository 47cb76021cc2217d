//! Tasks of a product with tiles of AMX. Activations are packed as 16 × 32 tiles of `bf16`; a panel of weights, pair of
//! inputs after pair, is a column of tiles as it is stored.

use std::ptr::null;

use super::activations::{PackedRows, TaskOutput};
use super::blocking::Blocking;
use super::pack_amx::{STEPS, STRIP, packed, parts};
use super::panel_task::{Epilogue, PanelTask, UNPACKED};
use super::quant_blocks::{BlockFormat, BlockProduct, PASSING, Pairs};
use super::weights::{Activation, Precision};
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::amx::Tiles;
use crate::simd::features::Amx;
use crate::simd::pair_tiles::{PairTiles as _, PairUnit as _, SIDE, Square, TILE};
use crate::simd::{PANEL, Simd};

impl PanelTask<'_> {
    /// Multiplies strip after strip with the panels, whose weights stay in the second-level cache, one part of the sum
    /// after the other. `cells` has room for every panel of one strip, or of all of them if there are several parts.
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
        for range in parts(steps, part) {
            let start = range.start;
            let length = range.len() * PANEL;
            for s in 0..strips {
                // The cells of a strip are free again once its whole sum is made.
                let first = if part < steps { s } else { 0 } * self.panels.len() * size;
                let cells = &mut cells[first..][..self.panels.len() * size];
                let (rows, direct) = (self.strip(s), self.direct(s));
                let width = self.blocking.width(rows.len());
                let x = &self.packed[packed(&range, self.packed_rows, rows.start, width)];
                for (i, (p, cell)) in self.panels.clone().zip(cells.chunks_exact_mut(size)).enumerate() {
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
                    let part = PartialSum { x, weights, steps: range.len() };
                    let initial = if start > 0 { Initial::Cell } else { self.initial(s, p, cell) };
                    // SAFETY: these rows of this panel belong to this task.
                    unsafe {
                        if direct {
                            let y = self.y.rows().as_mut_ptr(rows.clone(), self.columns(p));
                            part.product(&tiles, rows.len(), initial.square(y, y.0));
                        } else {
                            // The cell of the next panel.
                            let next = cell.as_ptr().wrapping_add(STRIP * PANEL);
                            let c = (cell.as_mut_ptr(), PANEL * size_of::<f32>());
                            part.product(&tiles, rows.len(), initial.square(c, next));
                        }
                    }
                }
                if range.end == steps && !direct {
                    match (self.y, self.epilogue) {
                        (&TaskOutput::Packed { ref words, to, first }, Epilogue::Gated(activation)) => {
                            let at = PackedStrip { words, to, first: first + rows.start };
                            self.gated_tiles((simd, amx), activation, s, cells, at);
                        }
                        _ => self.finish(simd, s, cells),
                    }
                }
            }
        }
    }

    /// Writes activation(gate) · up as tiles that the next product takes: each pair of panels gives one tile for 16 rows.
    #[inline(always)]
    fn gated_tiles<S: Simd>(
        &self,
        (simd, amx): (S, Amx),
        activation: Activation,
        s: usize,
        cells: &[f32],
        at: PackedStrip<'_>,
    ) {
        let rows = self.strip(s).len();
        for (i, cells) in cells.chunks_exact(2 * self.blocking.cell()).enumerate() {
            let columns = self.gated_columns(i);
            for first in (0..rows).step_by(SIDE) {
                // SAFETY: these rows and panels belong to this task.
                let tile = unsafe { at.tile(first, columns.start / 2) };
                let rows = (rows - first).min(SIDE);
                for r in 0..rows {
                    let mut row = [0.0; PANEL];
                    let y = &mut row[..columns.len()];
                    self.gated_row(simd, activation, columns.start, cells, first + r, y);
                    amx.round_row(&row, 1.0, tile, r);
                }
                tile[rows * SIDE..].fill(0);
            }
        }
    }

    /// Initial values of the sums of strip `s` and panel `p`. Tiles load them where they lie; if y has not all of the 32 rows and columns, they are written to
    /// the cell first.
    #[inline(always)]
    fn initial(&self, s: usize, p: usize, cell: &mut [f32]) -> Initial {
        let (rows, columns) = (self.strip(s), self.columns(p));
        if !self.begins() {
            return Initial::Zeros;
        }
        if rows.len() == STRIP && columns.len() == PANEL {
            return match &self.w.bias {
                // Stride 0 reads the bias for every row.
                Some(bias) => Initial::At(bias[columns].as_ptr(), 0),
                None => {
                    let (y, stride) = self.y.rows().as_mut_ptr(rows, columns);
                    Initial::At(y, stride)
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
        Initial::Cell
    }

    /// Whether the sums of strip `s` are computed in y itself, without an epilogue. Sums of several parts are not: rows of y lie so far
    /// apart that few of them fit into the first-level cache at a time.
    #[inline(always)]
    fn direct(&self, s: usize) -> bool {
        let one_part = self.blocking.steps >= self.blocking.words;
        let simple = match self.epilogue {
            Epilogue::Store => true,
            Epilogue::Add => self.w.bias.is_none(),
            Epilogue::Gated(_) => false,
        };
        one_part && simple && self.strip(s).len() == STRIP && self.panels.end * PANEL <= self.w.outputs
    }
}

/// Initial values of 32 × 32 sums.
enum Initial {
    Zeros,
    /// They lie where the sums go.
    Cell,
    /// They lie from this address on, so many bytes from row to row.
    At(*const f32, usize),
}

impl Initial {
    /// Sums that go where `c` tells, with the bytes from row to row.
    fn square(self, (c, stride): (*mut f32, usize), next: *const f32) -> Square {
        let (from, from_stride) = match self {
            Initial::Zeros => (null(), 0),
            Initial::Cell => (c.cast_const(), stride),
            Initial::At(from, stride) => (from, stride),
        };
        Square { c, stride, from, from_stride, next }
    }
}

/// A strip's place among the packed rows of an output.
struct PackedStrip<'a> {
    words: &'a DisjointMut<'a, u32>,
    to: PackedRows,
    /// Index of the strip's first row among all packed rows.
    first: usize,
}

impl PackedStrip<'_> {
    /// The tile of the strip's rows from `row` on and of 16 steps from `step` on.
    ///
    /// # Safety
    /// A tile may not be borrowed twice at a time.
    #[allow(clippy::mut_from_ref)]
    unsafe fn tile(&self, row: usize, step: usize) -> &mut [u32] {
        let Blocking { words, steps, .. } = self.to.blocking;
        let start = step / steps * steps;
        let part = start..(start + steps).min(words);
        let column = packed(&part, self.to.blocking.width(self.to.rows), self.first + row, SIDE).start;
        let at = column + (step - start) * SIDE;
        // SAFETY: the caller's.
        unsafe { self.words.part(at..at + TILE) }
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
    /// C (16 or 32 × 32) = initial values + the sums.
    ///
    /// # Safety
    /// C and its initial values must be valid for as many rows as tiles have for `rows`, and no other thread may use them.
    #[inline(always)]
    unsafe fn product(self, tiles: &Tiles, rows: usize, to: Square) {
        let blocks = self.steps / STEPS;
        let column = |i: usize| self.x[i * self.steps * SIDE..][..self.steps * SIDE].as_ptr();
        let a = [column(0), if rows > SIDE { column(1) } else { null() }];
        // SAFETY: the slices hold the tiles of these steps, or their blocks, and the caller's.
        unsafe {
            match self.weights {
                Weights::Pairs(pairs) if rows > SIDE => tiles.product_32(a, pairs.as_ptr(), blocks, to),
                Weights::Pairs(pairs) => tiles.product_16(a[0], pairs.as_ptr(), blocks, to),
                Weights::Blocks(format, panel, pairs) => {
                    BlockProduct { a, format, panel, pairs, to }.run(tiles, rows);
                }
            }
        }
    }
}
