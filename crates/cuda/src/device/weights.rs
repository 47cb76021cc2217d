//! How weights lie in the GPU's memory, as `weights.h` reads them.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use refrain_kernels::{Cpu, Precision, Q4Block, Q8Block, RowUnavailable, WeightMatrix, WeightRows};

/// Inputs of a tile, to whose multiple rows of all layouts but `f32` are filled with zeros.
pub(super) const DEPTH: usize = 64;
/// Inputs of a block.
const BLOCK: usize = 32;
/// Rows of a panel.
pub(super) const PANEL: usize = 32;

/// The layout of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Rows of `f32`.
    F32,
    /// Panels of 32 outputs of `bf16`.
    Bf16,
    /// Panels of 32 outputs of blocks of 8 bits and a scale.
    Q8,
    /// Panels of 32 outputs of blocks of 4 bits, a scale and a minimum.
    Q4,
}

impl Layout {
    /// The layout that a matrix gets.
    pub(super) fn of(matrix: &WeightMatrix<'_>) -> Layout {
        match (matrix.precision, matrix.rows) {
            (Precision::F32, _) => Layout::F32,
            (Precision::Bf16, _) => Layout::Bf16,
            (Precision::Q8, WeightRows::Q4(_)) => Layout::Q4,
            (Precision::Q8, _) => Layout::Q8,
        }
    }

    /// Inputs of a row with what it is filled up with.
    pub(super) fn padded(self, inputs: usize) -> usize {
        if self == Layout::F32 { inputs } else { inputs.next_multiple_of(DEPTH) }
    }

    /// Bytes of a row, or a row's share of a panel.
    pub(super) fn row_bytes(self, inputs: usize) -> usize {
        let inputs = self.padded(inputs);
        match self {
            Layout::F32 => 4 * inputs,
            Layout::Bf16 => 2 * inputs,
            Layout::Q8 => inputs + inputs / BLOCK * 2,
            Layout::Q4 => inputs / 2 + inputs / BLOCK * 4,
        }
    }

    /// Bytes of a matrix.
    pub(super) fn bytes(self, rows: usize, inputs: usize) -> usize {
        self.filled(rows) * self.row_bytes(inputs)
    }

    /// Rows with those that fill the last panel.
    fn filled(self, rows: usize) -> usize {
        match self {
            Layout::F32 => rows,
            Layout::Bf16 | Layout::Q8 | Layout::Q4 => rows.next_multiple_of(PANEL),
        }
    }

    /// Stages of a product of few rows on tensor cores: `FEW_STAGES` of `weights.h`.
    pub(super) fn few_stages(self) -> usize {
        match self {
            Layout::F32 => 1,
            Layout::Bf16 => 6,
            Layout::Q8 => 10,
            Layout::Q4 => 12,
        }
    }

    /// The words of rows of a matrix, of whole panels, given the index of each.
    pub(super) fn words(
        self,
        cpu: &Cpu,
        matrix: &WeightMatrix<'_>,
        rows: impl ExactSizeIterator<Item = usize>,
    ) -> Result<Vec<u32>, RowUnavailable> {
        let WeightMatrix { inputs, rows: source, .. } = matrix;
        let row_words = self.row_bytes(*inputs) / 4;
        let mut words = vec![0; self.filled(rows.len()) * row_words];
        let mut values = vec![0.0; *inputs];
        for (index, row) in rows.enumerate() {
            let own = index * row_words..(index + 1) * row_words;
            let panel = index / PANEL * PANEL * row_words;
            match (self, source) {
                (Layout::F32, _) => source.write_f32(row, bytemuck::cast_slice_mut(&mut words[own]))?,
                (Layout::Bf16, _) => {
                    source.write_f32(row, &mut values)?;
                    let panel: &mut [u16] = bytemuck::cast_slice_mut(&mut words[panel..]);
                    put_row(panel.reinterpret_cast_mut(), index % PANEL, &values);
                }
                (Layout::Q4, WeightRows::Q4(write)) => {
                    let mut blocks = vec![Q4Block::default(); inputs.div_ceil(BLOCK)];
                    write(row, &mut blocks)?;
                    let blocks = blocks
                        .iter()
                        .map(|block| ([block.scale, block.min].map(f16::from_f32), block.q.map(|q| q & 15)));
                    put(&mut words[panel..], index % PANEL, blocks);
                }
                (Layout::Q4 | Layout::Q8, _) => {
                    source.write_f32(row, &mut values)?;
                    let mut blocks = vec![Q8Block::default(); inputs.div_ceil(BLOCK)];
                    cpu.quantize_weights(&values, &mut blocks);
                    let blocks = blocks.iter().map(|block| ([block.scale], block.q.map(|q| q as u8 ^ 0x80)));
                    put(&mut words[panel..], index % PANEL, blocks);
                }
            }
        }
        Ok(words)
    }
}

/// Puts a row into a panel, whose other columns stay zeros: 16 bytes at a time, swizzled as `panels.h` says.
fn put_row(panel: &mut [bf16], row: usize, values: &[f32]) {
    for (step, values) in panel.chunks_exact_mut(PANEL * DEPTH).zip(values.chunks(DEPTH)) {
        let line = &mut step[row * DEPTH..(row + 1) * DEPTH];
        for (piece, values) in values.chunks(8).enumerate() {
            let at = (piece ^ (row % 8)) * 8;
            line[at..at + values.len()].convert_from_f32_slice(values);
        }
    }
}

/// Puts blocks into a panel as those of output `output`: of 8 bits with a scale, or of 4 bits with a scale and a minimum.
fn put<const HALVES: usize>(
    panel: &mut [u32],
    output: usize,
    blocks: impl Iterator<Item = ([f16; HALVES], [u8; BLOCK])>,
) {
    let (bits, head) = (8 / HALVES, HALVES * BLOCK / 2);
    let (words, weights) = (bits / 4, 32 / bits);
    for ((halves, q), block) in blocks.zip(panel.chunks_exact_mut(head + BLOCK * bits)) {
        let (heads, lanes) = block.split_at_mut(head);
        let heads: &mut [u16] = bytemuck::cast_slice_mut(heads);
        for (half, row) in halves.iter().zip(heads.chunks_exact_mut(BLOCK)) {
            row[output] = half.to_bits();
        }
        for word in 0..words {
            let first = (output / 8 * words + word) * 32 + output % 8 * 4;
            for (lane, packed) in lanes[first..first + 4].iter_mut().enumerate() {
                let weight = |at: usize| u32::from(q[at / 2 * 8 + lane * 2 + at % 2]);
                *packed = (0..weights).map(|i| weight(word * weights + i) << (i * bits)).sum();
            }
        }
    }
}
