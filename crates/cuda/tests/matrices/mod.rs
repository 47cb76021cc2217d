//! Weights in every way in which they are kept, and what must hold of products with them on any device.

use half::{bf16, f16};
use refrain_kernels::conformance::random;
use refrain_kernels::{
    Activation, Device, GatedMlp, LayerTail, Mlp, Norm, PackedLinear, Precision, Q4Block, RowUnavailable,
    WeightMatrix, WeightRows, download, upload,
};

/// Inputs of a block.
pub(crate) const BLOCK: usize = 32;

/// The ways in which weights are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kept {
    F32,
    Bf16,
    Q8,
    Q4,
}

/// Weights as files have them, and a bias.
pub(crate) struct Matrix {
    kept: Kept,
    inputs: usize,
    floats: Vec<f32>,
    /// In place of `floats`, with [`Kept::Q4`].
    blocks: Vec<Q4Block>,
    bias: Vec<f32>,
}

impl Matrix {
    pub(crate) fn new(kept: Kept, outputs: usize, inputs: usize, seed: u32) -> Matrix {
        let factor = 1.0 / (inputs as f32).sqrt();
        let floats = random(outputs * inputs, seed).iter().map(|w| w * factor).collect();
        let numbers = random(if kept == Kept::Q4 { outputs * inputs.div_ceil(BLOCK) * 34 } else { 0 }, seed);
        let block = |numbers: &[f32]| Q4Block {
            scale: numbers[32] * factor / 24.0,
            min: numbers[33] * factor / 2.0,
            q: std::array::from_fn(|i| (numbers[i] * 8.0 + 8.0) as u8),
        };
        let blocks = numbers.chunks_exact(34).map(block).collect();
        Matrix { kept, inputs, floats, blocks, bias: random(outputs, seed + 1) }
    }

    pub(crate) fn packed(&self, device: &dyn Device, gated: bool) -> PackedLinear {
        let Matrix { kept, inputs, ref bias, .. } = *self;
        let floats = |row: usize, out: &mut [f32]| {
            out.copy_from_slice(&self.floats[row * inputs..(row + 1) * inputs]);
            Ok(())
        };
        let blocks = |row: usize, out: &mut [Q4Block]| {
            out.copy_from_slice(&self.blocks[row * out.len()..(row + 1) * out.len()]);
            Ok(())
        };
        let precision = match kept {
            Kept::F32 => Precision::F32,
            Kept::Bf16 => Precision::Bf16,
            Kept::Q8 | Kept::Q4 => Precision::Q8,
        };
        let rows = if kept == Kept::Q4 { WeightRows::Q4(&blocks) } else { WeightRows::F32(&floats) };
        let (outputs, bias) = (bias.len(), Some(bias.clone()));
        let matrix = WeightMatrix { precision, outputs, inputs, bias, rows };
        let packed = if gated { device.pack_gate_up(matrix) } else { device.pack(matrix) };
        packed.unwrap_or_else(|RowUnavailable| unreachable!("every row is there"))
    }

    /// The weights that are multiplied: of blocks each value, rounded to `bf16` once.
    pub(crate) fn multiplied(&self) -> Vec<f32> {
        let bf16 = |x: f32| bf16::from_f32(x).to_f32();
        let f16 = |x: f32| f16::from_f32(x).to_f32();
        let rows = self.floats.chunks_exact(self.inputs);
        match self.kept {
            Kept::F32 => self.floats.clone(),
            Kept::Bf16 => self.floats.iter().map(|w| bf16(*w)).collect(),
            Kept::Q8 => {
                let blocks = rows.flat_map(|row| row.chunks(BLOCK));
                let values = blocks.flat_map(|block| {
                    let scale = f16(block.iter().fold(0f32, |most, w| most.max(w.abs())) / 127.0);
                    let q = move |w: &f32| (w * (1.0 / scale)).round_ties_even().clamp(-127.0, 127.0);
                    block.iter().map(move |w| bf16(scale * q(w)))
                });
                values.collect()
            }
            Kept::Q4 => {
                let rows = self.blocks.chunks_exact(self.inputs.div_ceil(BLOCK));
                let values = rows.flat_map(|row| {
                    let weight =
                        |block: &Q4Block, q: u8| bf16(f16(block.scale) * f32::from(q) + f16(block.min));
                    row.iter().flat_map(move |block| block.q.map(|q| weight(block, q))).take(self.inputs)
                });
                values.collect()
            }
        }
    }

    /// The weights that are multiplied, kept in `bf16`.
    pub(crate) fn unpacked(&self) -> Matrix {
        let bias = self.bias.clone();
        Matrix { kept: Kept::Bf16, inputs: self.inputs, floats: self.multiplied(), blocks: Vec::new(), bias }
    }
}

/// Logits of rows that a norm of ones leaves almost as they are.
pub(crate) fn logits(device: &dyn Device, w: &PackedLinear, x: &[f32], inputs: usize) -> Vec<f32> {
    let (ones, mut out) = (vec![1.0; inputs], Vec::new());
    device.logits(&upload(device, x), Norm { weight: &ones, eps: 0.0 }, w, &mut out);
    out
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Asserts that products of rows × outputs × inputs are those of plain loops in `f64`. Rows are rounded to `bf16`, as all weights but those of `f32` ask for.
pub(crate) fn assert_right(device: &dyn Device, kept: Kept, (rows, outputs, inputs): (usize, usize, usize)) {
    let (x, matrix) = (random(rows * inputs, 7), Matrix::new(kept, outputs, inputs, 8));
    let got = logits(device, &matrix.packed(device, false), &x, inputs);
    let w = matrix.multiplied();
    for (row, x) in x.chunks_exact(inputs).enumerate() {
        let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        let scale = (inputs as f64 / squares).sqrt();
        // Rounding of the normed row may fall on either side.
        let x: Vec<f64> =
            x.iter().map(|x| bf16::from_f64(f64::from((f64::from(*x) * scale) as f32)).to_f64()).collect();
        for (output, w) in w.chunks_exact(inputs).enumerate() {
            let products = x.iter().zip(w).map(|(x, w)| x * f64::from(*w));
            let expected = products.sum::<f64>() + f64::from(matrix.bias[output]);
            let got = f64::from(got[row * outputs + output]);
            let close = (got - expected).abs() < 2e-3;
            assert!(close, "{kept:?}, {rows} × {outputs} × {inputs}: {got} and not {expected}");
        }
    }
}

/// Asserts that a row of a product has the same bits in any company.
pub(crate) fn assert_invariant(
    device: &dyn Device,
    kept: Kept,
    (rows, outputs, inputs): (usize, usize, usize),
) {
    let packed = Matrix::new(kept, outputs, inputs, 3).packed(device, false);
    let x = random(rows * inputs, 4);
    let all = bits(&logits(device, &packed, &x, inputs));
    for range in [0..1, rows - 1..rows, 5..21, 60..77, 100..rows] {
        let own = bits(&logits(device, &packed, &x[range.start * inputs..range.end * inputs], inputs));
        assert_eq!(own, all[range.start * outputs..range.end * outputs], "{kept:?}, rows {range:?}");
    }
}

/// Asserts that rows of `bf16` are looked up as they are multiplied.
pub(crate) fn assert_looked_up(device: &dyn Device, outputs: usize, inputs: usize) {
    let matrix = Matrix::new(Kept::Bf16, outputs, inputs, 1);
    let (packed, rows) = (matrix.packed(device, false), matrix.multiplied());
    let ids = [outputs as u32 - 1, 0, 2, 2];
    let mut x = device.floats(1);
    assert!(device.embed(&packed, &ids, 1.5, &mut x));
    let expected: Vec<f32> =
        ids.iter().flat_map(|id| rows[*id as usize * inputs..][..inputs].iter().map(|x| x * 1.5)).collect();
    assert_eq!(bits(&download(device, &x)), bits(&expected), "{outputs} × {inputs}");
}

const HIDDEN: usize = 72;
const WIDE: usize = 96;
const INTERMEDIATE: usize = 200;

/// The output projection, gate and up projections, and the down projection of a layer.
pub(crate) fn layer_of(kept: Kept) -> [Matrix; 3] {
    let sizes = [(HIDDEN, WIDE, 20), (2 * INTERMEDIATE, HIDDEN, 22), (HIDDEN, INTERMEDIATE, 24)];
    sizes.map(|(outputs, inputs, seed)| Matrix::new(kept, outputs, inputs, seed))
}

/// The output of a layer with these weights for some rows.
pub(crate) fn finished(
    device: &dyn Device,
    rows: usize,
    activation: Activation,
    [output, gate_up, down]: &[Matrix; 3],
) -> Vec<f32> {
    let output = output.packed(device, false);
    let mlp = GatedMlp { gate_up: gate_up.packed(device, true), down: down.packed(device, false) };
    let weight = random(HIDDEN, 26);
    let tail = LayerTail {
        output: &output,
        attention_post_norm: None,
        mlp_norm: Some(Norm { weight: &weight, eps: 1e-6 }),
        mlp: Mlp::Dense(&mlp),
        activation,
        mlp_post_norm: None,
        next: &output,
    };
    let mut x = upload(device, &random(rows * HIDDEN, 27));
    let attended = upload(device, &random(rows * WIDE, 28));
    device.attn_output_and_mlp((&attended, 0), &tail, 0..rows, &mut x);
    download(device, &x)
}

/// Asserts that a layer of blocks is to the bit that of their values in `bf16`.
pub(crate) fn assert_unpacked_alike(device: &dyn Device, kept: Kept, rows: usize, activation: Activation) {
    let layer = layer_of(kept);
    let values = layer.each_ref().map(Matrix::unpacked);
    let [got, expected] = [&layer, &values].map(|layer| bits(&finished(device, rows, activation, layer)));
    assert_eq!(got, expected, "{kept:?}, {rows} rows, {activation}");
}
