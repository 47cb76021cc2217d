//! Weights in the GPU's memory, and products with them.

use std::sync::{Mutex, PoisonError};

use half::slice::HalfFloatSliceExt;
use half::{bf16, vec::HalfFloatVecExt};
use refrain_kernels::{Activation, PackedLinear, Precision, RowUnavailable, WeightMatrix};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::size;
use crate::driver::{Arg, Driver};

/// Rows of weights that a thread of the host prepares at a time.
const STRIPE: usize = 64;
/// Inputs of a tile of `bf16` weights, to whose multiple rows are filled with zeros.
const DEPTH: usize = 64;
/// Rows of a product that kernels for few rows take.
const FEW_ROWS: usize = 16;
/// Rows and columns of a tile of a product of many rows.
const TILE: usize = 128;
/// Rows and columns of a tile of a product in `f32`, and its inputs.
const TILE_F32: usize = 64;
const DEPTH_F32: usize = 16;
/// Rows of a tile of a product of few rows in `f32`.
const FEW_ROWS_F32: usize = 8;

/// W (rows × inputs) and its bias. Of gate and up projections a row of the gate is followed by the row of the up projection.
pub(super) struct Linear<D: Driver> {
    weights: Block<D>,
    bias: Block<D>,
    rows: usize,
    inputs: usize,
    pub(super) is_gated: bool,
    pub(super) is_f32: bool,
}

/// Rows that a product takes: f32 × inputs, or `bf16` × inputs padded to a whole number of tiles.
pub(super) struct Input<'a, M> {
    pub(super) rows: usize,
    pub(super) at: Arg<'a, M>,
}

/// The last step of a product: where its result goes.
#[derive(Clone, Copy)]
pub(super) enum Epilogue {
    /// It is stored.
    Store,
    /// It is added to what is there.
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

    /// Elements from one row of an input to the next.
    pub(super) fn input_stride(&self) -> usize {
        if self.is_f32 { self.inputs } else { padded(self.inputs) }
    }

    /// Elements from one row of a result to the next: of one that is gated, as the next product takes it.
    pub(super) fn output_stride(&self) -> usize {
        if self.is_gated && !self.is_f32 { padded(self.outputs()) } else { self.outputs() }
    }

    /// Bytes of an element of an input, and of a gated result.
    pub(super) fn element(&self) -> usize {
        if self.is_f32 { 4 } else { 2 }
    }
}

fn padded(inputs: usize) -> usize {
    inputs.next_multiple_of(DEPTH)
}

/// Packs weights; gated ones come with all gates first.
pub(super) fn rows_of_weights<D: Driver>(
    device: &CudaDevice<D>,
    matrix: &WeightMatrix<'_>,
    is_gated: bool,
) -> Result<PackedLinear, RowUnavailable> {
    let WeightMatrix { precision, outputs: rows, inputs, bias, rows: source } = matrix;
    assert!(!is_gated || rows.is_multiple_of(2), "there are as many gates as outputs");
    let source_row = |row: usize| if is_gated { row % 2 * (rows / 2) + row / 2 } else { row };
    let bias = bias.as_ref().map(|bias| {
        assert_eq!(bias.len(), *rows, "there is one addend for each row");
        (0..*rows).map(|row| bias[source_row(row)]).collect::<Vec<f32>>()
    });
    let mut linear = Linear {
        weights: device.block(0),
        bias: device.block_of(&bias.unwrap_or_default()),
        rows: *rows,
        inputs: *inputs,
        is_gated,
        is_f32: *precision == Precision::F32,
    };
    let row_bytes = linear.input_stride() * linear.element();
    linear.weights = device.block(rows * row_bytes);
    let failed = Mutex::new(None);
    device.cpu.parallel(rows.div_ceil(STRIPE), &|stripe| {
        let first = stripe * STRIPE;
        let range = first..(first + STRIPE).min(*rows);
        let mut values = vec![0.0; range.len() * linear.input_stride()];
        for (row, values) in range.zip(values.chunks_exact_mut(linear.input_stride())) {
            if let Err(unavailable) = source.write_f32(source_row(row), &mut values[..*inputs]) {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(unavailable);
                return;
            }
        }
        if linear.is_f32 {
            device.write(&linear.weights, first * row_bytes, bytemuck::cast_slice(&values));
        } else {
            let rounded = Vec::<bf16>::from_f32_slice(&values);
            device.write(
                &linear.weights,
                first * row_bytes,
                bytemuck::cast_slice(rounded.reinterpret_cast()),
            );
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(unavailable) => Err(unavailable),
        None => {
            let bytes = linear.weights.bytes() + linear.bias.bytes();
            Ok(PackedLinear::new(linear, bytes))
        }
    }
}

impl<D: Driver> CudaDevice<D> {
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
        let bias = w.bias.arg(0);
        let args = [
            input.at,
            w.weights.arg(0),
            bias,
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
        if w.is_f32 {
            let few = rows <= FEW_ROWS;
            let (tile, threads) = if few { (FEW_ROWS_F32, 32) } else { (TILE_F32, 256) };
            let kernel = if few { kernel!("product_f32_few_") } else { kernel!("product_f32_") };
            let shared = DEPTH_F32 * (TILE_F32 + 4 + tile + 4) * 4;
            self.launch(kernel, [w.rows.div_ceil(TILE_F32), rows.div_ceil(tile), 1], threads, shared, &args);
        } else if rows <= FEW_ROWS {
            let (columns, stages) = (32, 6);
            let shared = stages * (FEW_ROWS + columns) * DEPTH * 2;
            self.launch(kernel!("product_bf16_few_"), [w.rows.div_ceil(columns), 1, 1], 128, shared, &args);
        } else {
            let stages = 3;
            let blocks = rows.div_ceil(TILE) * w.rows.div_ceil(TILE);
            self.launch(kernel!("product_bf16_"), [blocks, 1, 1], 256, stages * 2 * TILE * DEPTH * 2, &args);
        }
    }
}
