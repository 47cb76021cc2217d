//! Weights in the GPU's memory, and products with them.

use std::sync::{Mutex, PoisonError};

use refrain_kernels::{Activation, Device, Floats, PackedLinear, RowUnavailable, WeightMatrix};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::{BARRIERS, size};
use super::weights::{DEPTH, Layout, PANEL};
use crate::driver::{Arg, Driver};

/// Rows of weights that a thread of the host prepares at a time: whole panels.
const STRIPE: usize = 64;
/// Rows of a product that kernels for few rows take, and columns of their tiles.
const FEW_ROWS: usize = 16;
const FEW_COLUMNS: usize = 32;
/// Steps of a stage of such a product on a Hopper, `FEW_TOGETHER` of `hopper_product.cu`, and bytes of its stages on a multiprocessor.
const FEW_TOGETHER: usize = 8;
const FEW_BULK_BYTES: usize = 210 << 10;
/// Columns of a product of few rows on an H200 that take the time of one more row or column of a tile of many rows.
const FEW_COLUMNS_IN_TIME: usize = 64;
/// Rows and columns of a tile of a product of many rows.
const TILE: usize = 128;
/// Columns of the widest tile of a product of many rows on a Hopper, by which its kernels number tiles.
const WIDEST: usize = 256;
/// Columns of such tiles, the widest first, and bytes of the stages in which they are loaded.
const HOPPER_COLUMNS: [usize; 4] = [WIDEST, 128, 64, 32];
const HOPPER_STAGES: usize = 192 << 10;
/// Rows of a product from which on weights of blocks are unpacked into memory before it, so that warpgroups multiply them.
const UNPACKED_ROWS: usize = 256;
/// Rows and columns of a tile of a product in `f32`, and its inputs.
const TILE_F32: usize = 64;
const DEPTH_F32: usize = 16;
/// Rows of a tile of a product of few rows in `f32`.
const FEW_ROWS_F32: usize = 8;

/// W (rows × inputs) and its bias. Of gate and up projections a row of the gate is followed by the row of the up projection.
pub(super) struct Linear<D: Driver> {
    weights: Block<D>,
    bias: Block<D>,
    layout: Layout,
    rows: usize,
    inputs: usize,
    pub(super) is_gated: bool,
}

/// Rows that a product takes: of `f32`, or panels of `bf16`, which `panels.h` describes.
pub(super) struct Input<'a, M> {
    pub(super) rows: usize,
    pub(super) at: Arg<'a, M>,
}

/// The last step of a product: where its result goes.
#[derive(Clone, Copy)]
pub(super) enum Epilogue {
    /// The product is stored.
    Store,
    /// The product is added to what is there.
    Add,
    /// Gates are applied.
    Gate(Activation),
}

impl<D: Driver> Linear<D> {
    /// Width of a result.
    pub(super) fn outputs(&self) -> usize {
        if self.is_gated { self.rows / 2 } else { self.rows }
    }

    /// Width of rows that are multiplied.
    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Whether rows are multiplied in `f32`, and not in `bf16`.
    pub(super) fn is_f32(&self) -> bool {
        self.layout == Layout::F32
    }

    /// Elements from one row of an input to the next.
    pub(super) fn input_stride(&self) -> usize {
        self.layout.padded(self.inputs)
    }

    /// Elements from one row of a result to the next: of one that is gated, as the next product takes it.
    pub(super) fn output_stride(&self) -> usize {
        if self.is_gated { self.layout.padded(self.outputs()) } else { self.outputs() }
    }

    /// Bytes of `rows` rows of `stride` elements, as a product takes them.
    pub(super) fn input_bytes(&self, rows: usize, stride: usize) -> usize {
        if self.is_f32() { 4 * rows * stride } else { 2 * rows.next_multiple_of(PANEL) * stride }
    }
}

/// Bytes of packed weights and their bias.
pub(super) fn packed_bytes(matrix: &WeightMatrix<'_>) -> usize {
    Layout::of(matrix).bytes(matrix.outputs, matrix.inputs)
        + matrix.bias.as_ref().map_or(0, |bias| 4 * bias.len())
}

/// Packs weights; gated ones come with all gates first.
pub(super) fn rows_of_weights<D: Driver>(
    device: &CudaDevice<D>,
    matrix: &WeightMatrix<'_>,
    is_gated: bool,
) -> Result<PackedLinear, RowUnavailable> {
    let WeightMatrix { outputs: rows, inputs, bias, .. } = matrix;
    assert!(!is_gated || rows.is_multiple_of(2), "there are as many gates as outputs");
    let source_row = |row: usize| if is_gated { row % 2 * (rows / 2) + row / 2 } else { row };
    let bias = bias.as_ref().map(|bias| {
        assert_eq!(bias.len(), *rows, "there is one addend for each row");
        (0..*rows).map(|row| bias[source_row(row)]).collect::<Vec<f32>>()
    });
    let layout = Layout::of(matrix);
    let row_bytes = layout.row_bytes(*inputs);
    let weights = device.block(layout.bytes(*rows, *inputs));
    let failed = Mutex::new(None);
    device.cpu.parallel(rows.div_ceil(STRIPE), &|stripe| {
        let first = stripe * STRIPE;
        let stripe = (first..(first + STRIPE).min(*rows)).map(source_row);
        match layout.words(&device.cpu, matrix, stripe) {
            Ok(words) => device.write(&weights, first * row_bytes, bytemuck::cast_slice(&words)),
            Err(unavailable) => *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(unavailable),
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(unavailable) => Err(unavailable),
        None => {
            let bias = device.block_of(&bias.unwrap_or_default());
            // Kernels may read weights before those in front of them are done, and with them copies that kernels make.
            device.wait();
            let linear = Linear { weights, bias, layout, rows: *rows, inputs: *inputs, is_gated };
            Ok(PackedLinear::new(linear, packed_bytes(matrix)))
        }
    }
}

impl<D: Driver> CudaDevice<D> {
    /// Rows `ids` of W, times `scale`; false where W is not of `bf16`.
    pub(super) fn embed_rows(&self, w: &Linear<D>, ids: &[u32], scale: f32, x: &mut Floats) -> bool {
        if w.layout != Layout::Bf16 {
            return false;
        }
        assert!(ids.iter().all(|id| (*id as usize) < w.rows), "a row of {} is asked for", w.rows);
        let (count, width) = (ids.len(), w.inputs);
        let (ids, out) = (self.kept_block_of(ids), self.resized(x, count * width));
        let args = [
            w.weights.constant_arg(),
            ids.arg(0),
            out.arg(0),
            size(count),
            size(width),
            size(w.input_stride()),
            Arg::F32(scale),
        ];
        self.launch_each("embed_rows", count * width.div_ceil(8), &args);
        true
    }

    /// out = input · Wᵀ + b with an epilogue; `out` begins at its first row. Rows of `out` are of [`Linear::output_stride`].
    pub(super) fn product(
        &self,
        w: &Linear<D>,
        input: &Input<'_, D::Memory>,
        epilogue: Epilogue,
        out: Arg<'_, D::Memory>,
    ) {
        assert_eq!(matches!(epilogue, Epilogue::Gate(_)), w.is_gated, "gates are applied to gated weights");
        let rows = input.rows;
        if rows == 0 {
            return;
        }
        if let Some(whole) = self.rows_before_few(w, rows) {
            let element = if w.is_gated { 2 } else { 4 };
            let (from, to) = (2 * whole * w.input_stride(), element * whole * w.output_stride());
            self.product(w, &Input { rows: whole, at: input.at }, epilogue, out);
            let few = Input { rows: rows - whole, at: input.at.further(from) };
            return self.product(w, &few, epilogue, out.further(to));
        }
        let unpacked = self.unpacked(w, rows);
        let (weights, layout) = match &unpacked {
            Some(memory) => (Arg::Memory(memory, 0), Layout::Bf16),
            None => (w.weights.constant_arg(), w.layout),
        };
        let args = [
            input.at,
            weights,
            w.bias.constant_arg(),
            out,
            size(rows),
            size(w.rows),
            size(w.input_stride()),
            size(w.output_stride()),
        ];
        macro_rules! kernel {
            ($prefix:literal) => {
                match epilogue {
                    Epilogue::Store => concat!($prefix, "store"),
                    Epilogue::Add => concat!($prefix, "add"),
                    Epilogue::Gate(Activation::Silu) => concat!($prefix, "silu"),
                    Epilogue::Gate(Activation::GeluTanh) => concat!($prefix, "gelu"),
                }
            };
        }
        let (is_few, is_hopper) = (rows <= FEW_ROWS, self.driver.is_hopper());
        // A stage has a step's inputs of the rows and of the columns of a tile.
        let stage = |rows: usize, columns: usize| rows * DEPTH * 2 + columns * layout.row_bytes(DEPTH);
        if layout == Layout::Bf16 && !is_few && is_hopper {
            let (_, tiles) = hopper_tiles(rows, w.rows, self.driver.multiprocessors());
            for HopperTiles { columns, first, count } in tiles {
                let kernel = match columns {
                    256 => kernel!("product_bf16_256_"),
                    128 => kernel!("product_bf16_128_"),
                    64 => kernel!("product_bf16_64_"),
                    _ => kernel!("product_bf16_32_"),
                };
                let stages = HOPPER_STAGES / stage(TILE, columns) * stage(TILE, columns);
                let args = [&args[..], &[size(first)]].concat();
                self.launch(kernel, [count * WIDEST / columns, 1, 1], 384, stages + BARRIERS, &args);
            }
            return;
        }
        let kernel = match (layout, is_few, is_hopper) {
            (Layout::F32, true, _) => kernel!("product_f32_few_"),
            (Layout::F32, false, _) => kernel!("product_f32_"),
            (Layout::Bf16, true, true) => kernel!("product_bf16_few_bulk_"),
            (Layout::Bf16, true, false) => kernel!("product_bf16_few_"),
            (Layout::Bf16, false, _) => kernel!("product_bf16_"),
            (Layout::Q8, true, true) => kernel!("product_q8_few_bulk_"),
            (Layout::Q8, true, false) => kernel!("product_q8_few_"),
            (Layout::Q8, false, _) => kernel!("product_q8_"),
            (Layout::Q4, true, true) => kernel!("product_q4_few_bulk_"),
            (Layout::Q4, true, false) => kernel!("product_q4_few_"),
            (Layout::Q4, false, _) => kernel!("product_q4_"),
        };
        if w.is_f32() {
            let (tile, threads) = if is_few { (FEW_ROWS_F32, 32) } else { (TILE_F32, 256) };
            let shared = DEPTH_F32 * (TILE_F32 + 4 + tile + 4) * 4;
            self.launch(kernel, [w.rows.div_ceil(TILE_F32), rows.div_ceil(tile), 1], threads, shared, &args);
        } else if is_few {
            let (panels, step) = (w.rows.div_ceil(FEW_COLUMNS), stage(FEW_ROWS, FEW_COLUMNS));
            if is_hopper {
                // Two blocks on a multiprocessor hide the other's waits, where there are panels for both; one alone has stages for two.
                let each = if panels > self.driver.multiprocessors() { 2 } else { 1 };
                let blocks = panels.min(each * self.driver.multiprocessors());
                let stages = FEW_BULK_BYTES / each / (FEW_TOGETHER * step);
                let args = [&args[..], &[size(stages)]].concat();
                self.launch(kernel, [blocks, 1, 1], 192, stages * FEW_TOGETHER * step + BARRIERS, &args);
            } else {
                self.launch(kernel, [panels, 1, 1], 128, layout.few_stages() * step, &args);
            }
        } else {
            let blocks = rows.div_ceil(TILE) * w.rows.div_ceil(TILE);
            self.launch(kernel, [blocks, 1, 1], 256, 3 * stage(TILE, TILE), &args);
        }
    }
}

impl<D: Driver> CudaDevice<D> {
    /// The rows that are whole tiles on a Hopper, if it is faster that the few behind them are a product of their own.
    fn rows_before_few(&self, w: &Linear<D>, rows: usize) -> Option<usize> {
        let (few, multiprocessors) = (rows % TILE, self.driver.multiprocessors());
        if w.is_f32() || rows < TILE || !(1..=FEW_ROWS).contains(&few) || !self.driver.is_hopper() {
            return None;
        }
        let (all, _) = hopper_tiles(rows, w.rows, multiprocessors);
        let (whole, _) = hopper_tiles(rows - few, w.rows, multiprocessors);
        (whole + w.rows / FEW_COLUMNS_IN_TIME < all).then_some(rows - few)
    }

    /// Weights of blocks as panels of `bf16`, for a product of so many rows that it is worth it. None where memory is short.
    fn unpacked(&self, w: &Linear<D>, rows: usize) -> Option<D::Memory> {
        let kernel = match w.layout {
            Layout::Q8 => "unpack_q8",
            Layout::Q4 => "unpack_q4",
            Layout::F32 | Layout::Bf16 => return None,
        };
        if rows < UNPACKED_ROWS || !self.driver.is_hopper() {
            return None;
        }
        let memory = self.driver.try_alloc(Layout::Bf16.bytes(w.rows, w.inputs))?;
        let steps = w.rows.div_ceil(PANEL) * (w.input_stride() / DEPTH);
        let shared = PANEL * Layout::Bf16.row_bytes(DEPTH);
        self.launch(kernel, [steps, 1, 1], 128, shared, &[w.weights.constant_arg(), Arg::Memory(&memory, 0)]);
        Some(memory)
    }
}

/// Tiles of a product on a Hopper: those into which `count` tiles of [`WIDEST`] columns fall, from tile `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HopperTiles {
    columns: usize,
    first: usize,
    count: usize,
}

/// The time for a step of inputs, in rows and columns that come to shared memory one after the other, and the tiles with which a product of many rows
/// takes least of it on a Hopper. Each multiprocessor has a tile at a time, which takes as long as its rows and columns take to come. Where the widest tiles leave
/// most multiprocessors idle at the end, narrower ones share the last of them.
fn hopper_tiles(
    rows: usize,
    columns: usize,
    multiprocessors: usize,
) -> (usize, impl Iterator<Item = HopperTiles>) {
    let high = rows.div_ceil(TILE);
    let time = |width: usize, tiles: usize| tiles.div_ceil(multiprocessors) * (rows.min(TILE) + width);
    let best = |tiles: &dyn Fn(usize) -> usize| {
        let times = HOPPER_COLUMNS.map(|width| (time(width, tiles(width)), width));
        times.into_iter().min_by_key(|(time, _)| *time).unwrap_or_default()
    };
    let all = high * columns.div_ceil(WIDEST);
    // Narrow tiles that lie outside of the columns take no time.
    let (alone_time, alone) = best(&|width| high * columns.div_ceil(width));
    let first = all / multiprocessors * multiprocessors;
    let (rest_time, rest) = best(&|width| (all - first) * WIDEST / width);
    let shared_time = time(WIDEST, first) + rest_time;
    let is_shared = shared_time < alone_time;
    let (whole, narrow) = if is_shared { (first, rest) } else { (0, alone) };
    let tiles = [(WIDEST, 0..whole), (narrow, whole..all)];
    let tiles = tiles.map(|(columns, of)| HopperTiles { columns, first: of.start, count: of.len() });
    (shared_time.min(alone_time), tiles.into_iter().filter(|tiles| tiles.count > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_on_a_hopper_are_as_wide_as_keeps_all_multiprocessors_busy() {
        let tiles = |rows, columns| hopper_tiles(rows, columns, 132).1.collect::<Vec<_>>();
        let alone = |columns, count| vec![HopperTiles { columns, first: 0, count }];
        assert_eq!(tiles(6144, 28672), alone(256, 5376));
        assert_eq!(tiles(921, 4096), alone(256, 128));
        assert_eq!(tiles(512, 4096), alone(128, 64));
        assert_eq!(tiles(64, 4096), alone(32, 16));
        // Three tiles of 576 columns are of 256, and the last has 64.
        assert_eq!(tiles(4096, 576), alone(256, 96));
    }

    #[test]
    fn the_last_tiles_on_a_hopper_are_shared_by_all_multiprocessors() {
        let tiles = hopper_tiles(1026, 4096, 132).1.collect::<Vec<_>>();
        let [whole, rest] = [(256, 0, 132), (32, 132, 12)].map(|(columns, first, count)| HopperTiles {
            columns,
            first,
            count,
        });
        assert_eq!(tiles, [whole, rest]);
    }
}
