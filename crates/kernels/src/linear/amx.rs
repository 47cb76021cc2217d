//! Products with tiles: activations are packed as 16 × 32 tiles of `bf16`, and a panel of weights, pair of inputs
//! after pair, is a column of tiles as it lies.

use std::ops::Range;
use std::ptr::null;

use super::Precision;
use super::product::{End, Task, UNPACKED};
use crate::scratch;
use crate::simd::amx::{SIDE, Square, TILE, Tiles, round_row};
use crate::simd::{PANEL, Simd};

/// Most steps of one part of a sum.
const MOST_STEPS: usize = 48 * STEPS;

/// Words of weights that stay in the second-level cache beside what goes by.
const KEPT: usize = 3 << 16;

/// Rows of a strip: two tiles.
pub(super) const STRIP: usize = 2 * SIDE;

/// Steps (pairs of inputs) of a tile.
pub(super) const STEPS: usize = SIDE;

/// Packs up to 32 rows of `inputs` as one column of tiles or two; zeros fill them up.
pub(super) fn pack(inputs: usize, x: &[f32], dst: &mut [u32]) {
    let column = inputs.div_ceil(2 * SIDE) * TILE;
    for (x, dst) in x.chunks(SIDE * inputs).zip(dst.chunks_exact_mut(column)) {
        let rows = x.chunks_exact(inputs);
        let n = rows.len();
        for (r, x) in rows.enumerate() {
            // SAFETY: `Isa::Amx` is kept only where it is available; a column holds every row's tiles.
            unsafe { round_row(x.as_ptr(), inputs, 1.0, dst.as_mut_ptr(), r) };
        }
        if n < SIDE {
            dst.chunks_exact_mut(TILE).for_each(|tile| tile[n * SIDE..].fill(0));
        }
    }
}

/// Steps of one part of a sum of `steps`: at most 96 KiB of a panel, parts of about equal length.
pub(super) fn part(steps: usize) -> usize {
    steps.div_ceil(steps.div_ceil(MOST_STEPS)).next_multiple_of(STEPS)
}

/// Panels of a task, whose weights stay in the second-level cache for all strips.
pub(super) fn chunk(steps: usize) -> usize {
    (KEPT / (steps * PANEL)).max(2)
}

impl Task<'_> {
    /// Multiplies strip after strip with the panels, whose weights stay in the second-level cache, one part of the sum
    /// after the other. `cells` has room for every panel of one strip, or of all of them if there are several parts.
    #[inline(always)]
    pub(super) fn tiles<S: Simd>(&self, strips: usize, cells: &mut [f32]) {
        // SAFETY: `Isa::Amx`, which tiles stand for, is kept only where it is available.
        let tiles = unsafe { Tiles::configure() };
        let (steps, part, size) = (self.blocking.words, self.blocking.steps, self.blocking.cell());
        let blocks = self.w.precision == Precision::Q8;
        let mut unpacked =
            scratch::lend(&UNPACKED, if blocks { self.panels.len() * part * PANEL } else { 0 });
        for start in (0..steps).step_by(part) {
            let range = start..(start + part).min(steps);
            let length = range.len() * PANEL;
            if blocks {
                for (p, out) in self.panels.clone().zip(unpacked.words.words_mut().chunks_exact_mut(length)) {
                    self.unpack::<S>(p, &range, out);
                }
            }
            let unpacked = unpacked.words.words();
            for s in 0..strips {
                // The cells of a strip are free again once its whole sum is made.
                let first = if part < steps { s } else { 0 } * self.panels.len() * size;
                let cells = &mut cells[first..][..self.panels.len() * size];
                let (rows, direct) = (self.strip(s), self.direct(s));
                if start == 0 && !direct && self.begins() {
                    self.begin(s, cells);
                }
                let x = &self.packed[rows.start * steps..][..self.blocking.width(rows.len()) * steps];
                for (i, (p, cell)) in self.panels.clone().zip(cells.chunks_exact_mut(size)).enumerate() {
                    let weights =
                        if blocks { &unpacked[i * length..] } else { &self.w.panel(p)[start * PANEL..] };
                    let part = Part { x, weights: &weights[..length], steps: range.clone(), all: steps };
                    if direct {
                        self.add(&tiles, part, rows.start, p)
                    } else {
                        part.cell(&tiles, rows.len(), start > 0 || self.begins(), cell)
                    }
                }
                if range.end == steps && !direct {
                    self.finish::<S>(s, cells);
                }
            }
        }
    }

    /// Fills the cells of a strip with what its sums begin with.
    fn begin(&self, s: usize, cells: &mut [f32]) {
        let width = self.w.outputs;
        for (p, cell) in self.panels.clone().zip(cells.chunks_exact_mut(self.blocking.cell())) {
            let columns = p * PANEL..((p + 1) * PANEL).min(width);
            for (row, cell) in self.strip(s).zip(cell.chunks_exact_mut(PANEL)) {
                cell[columns.len()..].fill(0.0);
                cell[..columns.len()].copy_from_slice(match &self.w.bias {
                    Some(bias) => &bias[columns.clone()],
                    // SAFETY: these rows and panels belong to this task.
                    None => unsafe { self.y.part(row * width + columns.start..row * width + columns.end) },
                });
            }
        }
    }

    /// Whether the sums of strip `s` are made where they belong, in y, with nothing to be done in the end.
    #[inline(always)]
    fn direct(&self, s: usize) -> bool {
        let simple = match self.end {
            End::Store => true,
            End::Add => self.w.bias.is_none(),
            End::Gated(_) => false,
        };
        simple && self.strip(s).len() == STRIP && self.panels.end * PANEL <= self.w.outputs
    }

    /// Makes a part of the sums of panel `p` in y, from row `row` on.
    #[inline(always)]
    fn add(&self, tiles: &Tiles, part: Part, row: usize, p: usize) {
        let (width, column) = (self.w.outputs, p * PANEL);
        let at = |row: usize| row * width + column;
        let y = self.y.within(at(row)..at(row + STRIP - 1) + PANEL);
        let (from, from_stride) = match &self.w.bias {
            _ if self.end == End::Add || part.steps.start > 0 => (y.cast_const(), 4 * width),
            // Every row is the same.
            Some(bias) => (bias[column..][..PANEL].as_ptr(), 0),
            None => (null(), 0),
        };
        let to = Square { c: y, stride: 4 * width, from, from_stride };
        // SAFETY: the part's slices hold the tiles; these rows of this panel lie within y and belong to this task.
        unsafe {
            tiles.product_32([part.column(0), part.column(1)], part.weights.as_ptr(), part.blocks(), to)
        };
    }
}

/// Steps of a sum over one panel and one strip.
struct Part<'a> {
    /// The strip's tiles, `all` steps for each 16 rows.
    x: &'a [u32],
    /// The panel's weights of these steps.
    weights: &'a [u32],
    steps: Range<usize>,
    all: usize,
}

impl Part<'_> {
    /// Makes, or adds them to, a cell (32 × 32) of a strip of `rows` rows.
    #[inline(always)]
    fn cell(&self, tiles: &Tiles, rows: usize, add: bool, cell: &mut [f32]) {
        let stride = PANEL * 4;
        let c = cell[..rows.next_multiple_of(SIDE) * PANEL].as_mut_ptr();
        let from = if add { c.cast_const() } else { null() };
        // SAFETY: the slices hold the tiles of these steps and the cell's rows.
        unsafe {
            if rows > SIDE {
                let to = Square { c, stride, from, from_stride: stride };
                tiles.product_32([self.column(0), self.column(1)], self.weights.as_ptr(), self.blocks(), to);
            } else {
                tiles.product_16(self.column(0), self.weights.as_ptr(), self.blocks(), c, stride, add);
            }
        }
    }

    /// Tiles in a row.
    fn blocks(&self) -> usize {
        self.steps.len() / STEPS
    }

    /// The tiles of the strip's first 16 rows, or of the others.
    fn column(&self, i: usize) -> *const u32 {
        self.x[i * self.all * SIDE..][self.steps.start * SIDE..self.steps.end * SIDE].as_ptr()
    }
}
