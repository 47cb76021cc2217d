//! Packed weights.

use std::fmt;
use std::str::FromStr;

use super::quant_blocks::{BLOCK, BlockFormat};
use crate::weight_arena::WeightWords;

/// The precision in which packed weights are stored and multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// `f32` weights by `f32` activations.
    F32,
    /// `bf16` weights by `bf16` activations, summed in `f32`. With AVX2 products of 24 rows and more round both to integers of 16 bits with a scale for up to
    /// 256 inputs, nearer than `bf16`.
    Bf16,
    /// Weights in blocks of 32 with a scale: 8 bits, or 4 bits with a minimum if the source has such blocks. Products round activations to
    /// 8 bits in blocks of 32; with AMX, without vectors, and of 8 bits with AVX-512 without VNNI, products of more than four rows multiply the
    /// weights as `bf16`, and of 8 bits with AVX2 without VNNI, products of 24 rows and more as integers of 16 bits.
    Q8,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Q8 => "q8",
        })
    }
}

/// The activation of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x / (1 + e^−x), also called swish; the MLP is SwiGLU then.
    Silu,
    /// The tanh approximation of GELU, x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³))); the MLP is GeGLU then.
    ///
    /// Hendrycks and Gimpel, <https://arxiv.org/abs/1606.08415>.
    GeluTanh,
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_tanh",
        })
    }
}

/// A name that is none of `f32`, `bf16` and `q8`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnknownPrecision(pub String);

impl fmt::Display for UnknownPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown precision {:?}: use bf16, q8 or f32", self.0)
    }
}

impl std::error::Error for UnknownPrecision {}

impl FromStr for Precision {
    type Err = UnknownPrecision;

    fn from_str(s: &str) -> Result<Precision, UnknownPrecision> {
        match s {
            "f32" => Ok(Precision::F32),
            "bf16" => Ok(Precision::Bf16),
            "q8" => Ok(Precision::Q8),
            _ => Err(UnknownPrecision(s.to_owned())),
        }
    }
}

/// Name of the layout of packed weights in files. A change of the packing must change it: files of an older one are made again then.
pub(crate) const PACKED_LAYOUT: &str =
    if cfg!(target_endian = "little") { "panels-2" } else { "panels-2-big-endian" };

/// Prepacked weights of `y = x · Wᵀ + b`.
///
/// Weights are packed in panels of 32 outputs, independent of the instruction set. A panel holds, input after input, the
/// 32 weights of that input (`f32`), or, pair of inputs after pair, 32 words of two `bf16` each, the lower
/// input in the lower half. Outputs past the last are zero, and so are inputs past the last, of which there are pairs
/// enough for a multiple of 32 inputs. Blocks of 8 or 4 bits: see `quant_blocks`.
#[derive(Clone, Debug)]
pub struct Linear {
    pub(super) precision: Precision,
    /// Packed rows, those that fill the last panel of gate and up projections among them.
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) bias: Option<Vec<f32>>,
    /// Width of the result of gate and up projections, whose panels are interleaved.
    pub(super) gate_up: Option<usize>,
    /// Format of the blocks, with [`Precision::Q8`].
    pub(super) format: BlockFormat,
    /// Panel after panel.
    pub(super) words: WeightWords,
}

impl Linear {
    /// Width of y.
    pub fn outputs(&self) -> usize {
        self.gate_up.unwrap_or(self.outputs)
    }

    /// Width of x.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Precision of the weights.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> usize {
        self.words.bytes() + self.bias.as_ref().map_or(0, |b| b.len() * 4)
    }

    /// Steps of a sum: inputs, or pairs of them.
    pub(super) fn steps(&self) -> usize {
        match self.precision {
            Precision::F32 => self.inputs,
            Precision::Bf16 => self.inputs.div_ceil(2),
            Precision::Q8 => self.padded_steps(),
        }
    }

    /// Steps that a panel has room for: for pairs, steps of whole tiles; the steps past the last are zero.
    pub(super) fn padded_steps(&self) -> usize {
        match self.precision {
            Precision::F32 => self.inputs,
            Precision::Bf16 | Precision::Q8 => self.inputs.div_ceil(2).next_multiple_of(16),
        }
    }

    /// Words of a panel.
    pub(super) fn panel_words(&self) -> usize {
        match self.precision {
            Precision::F32 | Precision::Bf16 => self.padded_steps() * crate::simd::PANEL,
            Precision::Q8 => self.inputs.div_ceil(BLOCK) * self.format.words(),
        }
    }

    /// Panel `p`.
    pub(super) fn panel(&self, p: usize) -> &[u32] {
        let words = self.panel_words();
        &self.words.as_u32()[p * words..(p + 1) * words]
    }
}
