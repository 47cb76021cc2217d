//! y (+)= x · Wᵀ + b over packed panels.
//!
//! Rows are packed in strips of 12 and taken in blocks that fit the second-level cache, the sum in blocks
//! whose panel fits the first-level one; tasks are (block of rows, run of panels).

use std::cell::Cell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::blocks;
use super::pack::PackStrip;
use super::{Activation, Linear, Precision};
use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::simd::{Kernel, PANEL, STRIP, Simd, Tile, load_part, store_part, strip_width};
use crate::{Cpu, Isa};

/// Steps of one block of the sum: a panel of 36 KiB (half where a step's activations take two words).
const STEP_BLOCK: usize = 288;
/// Words of packed activations at a time.
const PACKED: usize = 2 << 20;
/// Panels that share a block of activations while it is in the second-level cache.
const CHUNK: usize = 8;
/// Rows that are multiplied one by one with blocks of bytes as they lie.
const BYTE_ROWS: usize = 4;
/// Most rows of a task where each is multiplied as if it were alone: a panel is read once for all of them.
const EACH_ROWS: usize = 64;
/// Panels of one vector product, several chains of sums at once.
const VECTOR_PANELS: usize = 2;

thread_local! {
    /// Packed activations.
    static X: Cell<Words> = const { Cell::new(Words::new()) };
    /// Parts of panels of blocks, as pairs.
    pub(super) static UNPACKED: Cell<Words> = const { Cell::new(Words::new()) };
    /// Results of a task.
    static CELLS: Cell<Words> = const { Cell::new(Words::new()) };
}

impl Cpu {
    /// y (m × outputs) = x (m × inputs) · Wᵀ + b, m = x.len() / inputs.
    ///
    /// # Panics
    /// If the lengths do not fit, or the weights are gated.
    pub fn linear(&self, w: &Linear, x: &[f32], y: &mut [f32]) {
        assert!(w.gated.is_none(), "gated weights are for `linear_gated`");
        self.product(w, x, y, End::Store);
    }

    /// The same, added to y (residual connection).
    ///
    /// # Panics
    /// As [`Cpu::linear`].
    pub fn linear_add(&self, w: &Linear, x: &[f32], y: &mut [f32]) {
        assert!(w.gated.is_none(), "gated weights are for `linear_gated`");
        self.product(w, x, y, End::Add);
    }

    /// y (m × width) = activation(x · Gᵀ + b) · (x · Uᵀ + c), weights packed by [`Linear::pack_gated`].
    ///
    /// # Panics
    /// If the lengths do not fit, or the weights are not gated.
    pub fn linear_gated(&self, w: &Linear, activation: Activation, x: &[f32], y: &mut [f32]) {
        assert!(w.gated.is_some(), "the weights hold gates and what they open");
        self.product(w, x, y, End::Gated(activation));
    }

    fn product(&self, w: &Linear, x: &[f32], y: &mut [f32], end: End) {
        let (m, width) = (x.len() / w.inputs, w.outputs());
        assert_eq!(x.len(), m * w.inputs, "x is m × inputs");
        assert_eq!(y.len(), m * width, "y is m × {width}");
        if y.is_empty() {
            return;
        }
        let blocking = Blocking::of(w, self, m);
        let rows = (PACKED / blocking.words).max(blocking.rows) / blocking.rows * blocking.rows;
        let mut scratch = scratch::lend(&X, blocking.words * m.min(rows).next_multiple_of(blocking.strip));
        for (x, y) in x.chunks(rows * w.inputs).zip(y.chunks_mut(rows * width)) {
            self.pack_rows(w, x, blocking, scratch.words.words_mut());
            self.multiply(w, x.len() / w.inputs, blocking, scratch.words.words(), y, end);
        }
    }

    /// Packs `x` strip after strip.
    fn pack_rows(&self, w: &Linear, x: &[f32], blocking: Blocking, packed: &mut [u32]) {
        let Blocking { strip, words, .. } = blocking;
        let strips = (x.len() / w.inputs).div_ceil(strip);
        let packed = Shared::new(packed);
        self.parallel_if(x.len() > 1 << 15, strips, &|s| {
            let x = &x[s * strip * w.inputs..];
            let x = &x[..x.len().min(strip * w.inputs)];
            let width = blocking.width(x.len() / w.inputs);
            // SAFETY: strip `s` belongs to task `s`.
            let dst = unsafe { packed.part(s * strip * words..(s * strip + width) * words) };
            match blocking.way {
                #[cfg(target_arch = "x86_64")]
                Way::Tiles => amx::pack(w.inputs, x, dst),
                Way::Bytes => {
                    for (x, dst) in x.chunks_exact(w.inputs).zip(dst.chunks_exact_mut(words)) {
                        self.isa().run(blocks::Quantize { x, out: dst });
                    }
                }
                Way::Vectors => {
                    let pack = PackStrip { precision: w.precision, inputs: w.inputs, x, width, dst };
                    self.isa().run(pack);
                }
            }
        });
    }

    fn multiply(&self, w: &Linear, m: usize, blocking: Blocking, packed: &[u32], y: &mut [f32], end: End) {
        let panels = w.outputs.div_ceil(PANEL);
        let blocks = m.div_ceil(blocking.rows);
        let limit = blocking.chunk(m);
        // Enough tasks that threads end at about the same time.
        let chunk = (panels * blocks / (8 * self.sharing())).clamp(1, limit);
        // A gate's panel and what it opens stay together.
        let chunk = if matches!(end, End::Gated(_)) { chunk.next_multiple_of(2) } else { chunk };
        let chunks = panels.div_ceil(chunk);
        let y = Shared::new(y);
        // Some ten microseconds of arithmetic or of reading weights.
        let worth = m * w.outputs * w.inputs > 1 << 21 || w.outputs * w.inputs > 1 << 17;
        self.parallel_if(worth, blocks * chunks, &|t| {
            let (block, c) = (t / chunks, t % chunks);
            self.isa().run(Task {
                w,
                blocking,
                packed,
                y: &y,
                end,
                rows: block * blocking.rows..((block + 1) * blocking.rows).min(m),
                panels: c * chunk..((c + 1) * chunk).min(panels),
            });
        });
    }
}

/// What multiplies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Tiles of 16 × 32 `bf16`.
    #[cfg(target_arch = "x86_64")]
    Tiles,
    /// Blocks of bytes, row by row.
    Bytes,
    /// Strips of rows, weights of 16 or 32 outputs a vector.
    Vectors,
}

/// How rows are packed and taken in blocks.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    pub(super) way: Way,
    /// Rows of a strip.
    pub(super) strip: usize,
    /// Words of one packed row of activations.
    pub(super) words: usize,
    /// Rows of one task: with one block of the sum some 300 to 440 KB of activations.
    rows: usize,
    /// Steps of one block of the sum.
    pub(super) steps: usize,
}

impl Blocking {
    fn of(w: &Linear, cpu: &Cpu, m: usize) -> Blocking {
        let isa = cpu.isa();
        if w.precision == Precision::Q8 && (m <= BYTE_ROWS || cpu.each) {
            let words = w.inputs.div_ceil(blocks::BLOCK) * blocks::X_WORDS;
            let rows = m.clamp(BYTE_ROWS, EACH_ROWS);
            return Blocking { way: Way::Bytes, strip: rows, words, rows, steps: w.steps() };
        }
        // Blocks are unpacked once for all rows of a task.
        let more = if w.precision == Precision::Q8 { 4 } else { 1 };
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx && w.precision != Precision::F32 {
            let words = w.padded_steps();
            let steps = amx::part(words);
            return Blocking { way: Way::Tiles, strip: amx::STRIP, words, rows: 256 * more, steps };
        }
        let step_words = step_words(w.precision, isa);
        let (words, steps) = (w.steps() * step_words, STEP_BLOCK / step_words);
        Blocking { way: Way::Vectors, strip: STRIP, words, rows: 32 * STRIP * more, steps }
    }

    /// Most panels of one task on `m` rows.
    fn chunk(self, m: usize) -> usize {
        match self.way {
            #[cfg(target_arch = "x86_64")]
            Way::Tiles => amx::chunk(self.steps),
            _ if m <= self.strip => 4 * CHUNK,
            _ => CHUNK,
        }
    }

    /// Rows that a strip of `rows` rows is packed with.
    #[inline(always)]
    pub(super) fn width(self, rows: usize) -> usize {
        match self.way {
            #[cfg(target_arch = "x86_64")]
            Way::Tiles => rows.next_multiple_of(16),
            Way::Bytes => rows,
            Way::Vectors => strip_width(rows),
        }
    }

    /// Floats of the results of one panel for one strip.
    #[inline(always)]
    pub(super) fn cell(self) -> usize {
        self.strip * PANEL
    }
}

/// Words of a row's activations in one step.
fn step_words(precision: Precision, isa: Isa) -> usize {
    struct PairWords;
    impl Kernel for PairWords {
        type Output = usize;

        #[inline(always)]
        fn run<S: Simd>(self) -> usize {
            S::PAIR_WORDS
        }
    }
    match precision {
        Precision::F32 => 1,
        Precision::Bf16 | Precision::Q8 => isa.run(PairWords),
    }
}

/// The outputs of `panels` for `rows`.
pub(super) struct Task<'a> {
    pub(super) w: &'a Linear,
    pub(super) blocking: Blocking,
    pub(super) packed: &'a [u32],
    pub(super) y: &'a Shared<'a, f32>,
    pub(super) end: End,
    pub(super) rows: Range<usize>,
    pub(super) panels: Range<usize>,
}

/// What becomes of the sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Store,
    Add,
    Gated(Activation),
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let strips = self.rows.len().div_ceil(self.blocking.strip);
        let size = self.blocking.cell();
        // With tiles a strip's cells are free again once its sums are whole.
        #[cfg(target_arch = "x86_64")]
        let at_once = self.blocking.way == Way::Tiles && self.blocking.steps >= self.blocking.words;
        #[cfg(not(target_arch = "x86_64"))]
        let at_once = false;
        let kept = if at_once { 1 } else { strips };
        let mut scratch = scratch::lend(&CELLS, kept * self.panels.len() * size);
        let cells = scratch.words.floats_mut();
        match self.blocking.way {
            #[cfg(target_arch = "x86_64")]
            Way::Tiles => return self.tiles::<S>(strips, cells),
            Way::Bytes => self.rows::<S>(cells),
            Way::Vectors => self.strips::<S>(strips, cells),
        }
        for (s, cells) in cells.chunks_exact(self.panels.len() * size).enumerate().take(strips) {
            self.finish::<S>(s, cells);
        }
    }
}

impl Task<'_> {
    /// Multiplies the panels by rows, each as if it were alone.
    #[inline(always)]
    fn rows<S: Simd>(&self, cells: &mut [f32]) {
        let words = self.blocking.words;
        for (p, cell) in self.panels.clone().zip(cells.chunks_exact_mut(self.blocking.cell())) {
            let x = &self.packed[self.rows.start * words..self.rows.end * words];
            let y = &mut cell[..self.rows.len() * PANEL];
            blocks::PanelRows { form: self.w.form, panel: self.w.panel(p), x, words, y }.run::<S>();
        }
    }

    /// Multiplies the panels strip by strip, one block of the sum after the other.
    #[inline(always)]
    fn strips<S: Simd>(&self, strips: usize, cells: &mut [f32]) {
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
        let mut unpacked = scratch::lend(&UNPACKED, if blocks { part * PANEL } else { 0 });
        for start in (0..steps).step_by(part) {
            let range = start..(start + part).min(steps);
            for first in self.panels.clone().step_by(group) {
                let panels = first..(first + group).min(self.panels.end);
                let weights = if blocks {
                    self.unpack::<S>(first, &range, &mut unpacked.words.words_mut()[..range.len() * PANEL]);
                    unpacked.words.words()
                } else {
                    let words = self.w.panel_words();
                    &self.w.words.words()[first * words..panels.end * words][range.start * PANEL..]
                };
                for s in 0..strips {
                    let at = s * self.panels.len() + first - self.panels.start;
                    let cell = &mut cells[at * size..][..panels.len() * size];
                    self.cell::<S>(range.clone(), weights, s, cell);
                }
            }
        }
    }
}

impl Task<'_> {
    /// Unpacks the steps `range` of a panel of blocks to pairs.
    #[inline(always)]
    pub(super) fn unpack<S: Simd>(&self, panel: usize, range: &Range<usize>, out: &mut [u32]) {
        let (of, words) = (blocks::blocks_of(range), self.w.form.words());
        let panel = &self.w.panel(panel)[of.start * words..of.end * words];
        blocks::Unpack { form: self.w.form, panel, out }.run::<S>();
    }

    /// Rows of strip `s` of this task.
    #[inline(always)]
    pub(super) fn strip(&self, s: usize) -> Range<usize> {
        let first = self.rows.start + s * self.blocking.strip;
        first..(first + self.blocking.strip).min(self.rows.end)
    }

    /// Adds the steps of one block of the sum, whose `weights` begin with the first of them, to the cells
    /// (panels × strip × 32) of one strip.
    #[inline(always)]
    fn cell<S: Simd>(&self, steps: Range<usize>, weights: &[u32], s: usize, cell: &mut [f32]) {
        let rows = self.strip(s);
        let width = self.blocking.width(rows.len());
        let x = &self.packed[rows.start * self.blocking.words..][..width * self.blocking.words];
        let words = self.blocking.words / self.w.steps();
        let panels = cell.len() / self.blocking.cell();
        let tile = Tile {
            k: steps.len(),
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
                Precision::F32 => S::strip::<1>(width, &tile),
                Precision::Bf16 | Precision::Q8 => S::strip_pairs(width, &tile),
            }
        }
    }

    /// Whether sums begin with the bias, or with what y holds, and are whole then: with tiles, so that it does not
    /// matter which of them are made in y.
    pub(super) fn begins(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.blocking.way == Way::Tiles {
            return match self.end {
                End::Store => self.w.bias.is_some(),
                End::Add => self.w.bias.is_none(),
                End::Gated(_) => false,
            };
        }
        false
    }

    /// Writes the finished cells of a strip to y, row after row.
    #[inline(always)]
    pub(super) fn finish<S: Simd>(&self, s: usize, cells: &[f32]) {
        match self.end {
            End::Store | End::Add => self.store::<S>(s, cells),
            End::Gated(activation) => self.gated::<S>(activation, s, cells),
        }
    }

    #[inline(always)]
    fn store<S: Simd>(&self, s: usize, cells: &[f32]) {
        let (outputs, whole) = (self.w.outputs, self.begins());
        let columns = self.panels.start * PANEL..(self.panels.end * PANEL).min(outputs);
        for (r, row) in self.strip(s).enumerate() {
            // SAFETY: these rows and panels belong to this task.
            let y = unsafe { self.y.part(row * outputs + columns.start..row * outputs + columns.end) };
            for (c, y) in (0..).step_by(S::LANES).zip(y.chunks_mut(S::LANES)) {
                let cell = &cells[c / PANEL * self.blocking.cell() + r * PANEL + c % PANEL..][..S::LANES];
                let n = y.len();
                // SAFETY: `cell` has LANES floats, `y` has `n`, and so has the bias from here on.
                unsafe {
                    let mut v = S::load(cell.as_ptr());
                    if let Some(bias) = self.w.bias.as_ref().filter(|_| !whole) {
                        v = S::add(v, load_part::<S, f32>(bias[columns.start + c..].as_ptr(), n));
                    }
                    if self.end == End::Add && !whole {
                        v = S::add(v, load_part::<S, f32>(y.as_ptr(), n));
                    }
                    store_part::<S, f32>(y.as_mut_ptr(), v, n);
                }
            }
        }
    }

    /// Panels of gates and of what they open take turns.
    #[inline(always)]
    fn gated<S: Simd>(&self, activation: Activation, s: usize, cells: &[f32]) {
        let width = self.w.outputs();
        let columns = self.panels.start / 2 * PANEL..(self.panels.end / 2 * PANEL).min(width);
        for (r, row) in self.strip(s).enumerate() {
            // SAFETY: these rows and panels belong to this task.
            let y = unsafe { self.y.part(row * width + columns.start..row * width + columns.end) };
            for (c, y) in (0..).step_by(S::LANES).zip(y.chunks_mut(S::LANES)) {
                let at = c / PANEL * 2 * self.blocking.cell() + r * PANEL + c % PANEL;
                let (gate, up) = (&cells[at..][..S::LANES], &cells[at + self.blocking.cell()..][..S::LANES]);
                // SAFETY: both have LANES floats, `y` as many as it is long.
                unsafe {
                    let (mut gate, mut up) = (S::load(gate.as_ptr()), S::load(up.as_ptr()));
                    if let Some(bias) = &self.w.bias {
                        let bias = &bias[(self.panels.start + c / PANEL * 2) * PANEL + c % PANEL..];
                        gate = S::add(gate, S::load(bias[..S::LANES].as_ptr()));
                        up = S::add(up, S::load(bias[PANEL..][..S::LANES].as_ptr()));
                    }
                    let active = match activation {
                        Activation::Silu => S::silu(gate),
                        Activation::GeluTanh => S::gelu_tanh(gate),
                    };
                    store_part::<S, f32>(y.as_mut_ptr(), S::mul(active, up), y.len());
                }
            }
        }
    }
}
