//! Number formats of weights: ggml's types that can be read, and the names of those that cannot.

use std::fmt;

/// The types that a tensor may have, for error messages.
pub(crate) const SUPPORTED: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, \
     IQ4_XS, MXFP4";

/// A number format that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Blocks of 32: f16 scale, 32 × i8.
    Q8_0,
    /// Blocks of 32: f16 scale, 32 × 4 bits, offset −8.
    Q4_0,
    /// Blocks of 32: f16 scale, f16 minimum, 32 × 4 bits.
    Q4_1,
    /// Blocks of 32: f16 scale, 32 fifth bits, 32 × 4 bits, offset −16.
    Q5_0,
    /// Blocks of 32: f16 scale, f16 minimum, 32 fifth bits, 32 × 4 bits.
    Q5_1,
    /// Super-blocks of 256: 16 × (4-bit scale, 4-bit minimum), 256 × 2 bits, f16 scale and minimum.
    Q2K,
    /// Super-blocks of 256: 256 third bits, 256 × 2 bits, 16 × 6-bit scales, f16 scale.
    Q3K,
    /// Super-blocks of 256: f16 scale and minimum, 8 × (6-bit scale, 6-bit minimum), 256 × 4 bits.
    Q4K,
    /// Super-blocks of 256: as `Q4K`, plus 256 fifth bits.
    Q5K,
    /// Super-blocks of 256: 256 × 6 bits, 16 × i8 scales, f16 scale.
    Q6K,
    /// Blocks of 32: f16 scale, 32 × 4 bits that stand for values of a table.
    Iq4Nl,
    /// Super-blocks of 256: f16 scale, 8 × 6-bit scales, 256 × 4 bits that stand for values of the same table.
    Iq4Xs,
    /// Blocks of 32: a power of two, 32 × 4 bits of sign, exponent and mantissa (OCP Microscaling).
    Mxfp4,
}

impl DType {
    /// The format with ggml's number `id`, if it can be read.
    #[must_use]
    pub fn from_ggml(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            20 => Self::Iq4Nl,
            23 => Self::Iq4Xs,
            30 => Self::BF16,
            39 => Self::Mxfp4,
            _ => return None,
        })
    }

    /// Values in one block; a row is a whole number of blocks.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Nl => 18,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
        }
    }

    /// Bytes of `values` values; `None` if they are not whole blocks or the product overflows.
    #[must_use]
    pub fn bytes_for(self, values: usize) -> Option<usize> {
        if !values.is_multiple_of(self.block_len()) {
            return None;
        }
        (values / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
        })
    }
}

/// The name of ggml's type number `id`, also of those that cannot be read.
pub(crate) fn ggml_type_name(id: u32) -> String {
    if let Some(dtype) = DType::from_ggml(id) {
        return dtype.to_string();
    }
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        _ => return format!("number {id}"),
    };
    format!("{name} (number {id})")
}
