//! What a chunk is, and the name that follows from it.

use std::fmt;
use std::str::FromStr;

use refrain_kernels::Dtype;
use serde::{Serialize, Serializer};

use crate::{Result, StoreError};

/// Version of keys and of the chunk file.
pub(crate) const VERSION: u32 = 1;
/// Domain of the keyed hash. A new format version takes a new context, so that names never meet.
const KEY_CONTEXT: &str = "refrain chunk key, format version 1";
/// Most layers of a chunk: tensor names have three digits.
const MAX_LAYERS: usize = 1000;

/// What was done about the token that begins every text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BosPolicy {
    /// The model has none.
    None,
    /// It stood before the chunk while it was prefilled, and its own keys and values were dropped.
    Dropped,
    /// It is the chunk's first token (a system part at the beginning of prompts).
    Kept,
}

impl BosPolicy {
    /// The name that [`FromStr`] reads: `none`, `dropped` or `kept`.
    pub fn name(self) -> &'static str {
        match self {
            BosPolicy::None => "none",
            BosPolicy::Dropped => "dropped",
            BosPolicy::Kept => "kept",
        }
    }

    fn tag(self) -> u8 {
        match self {
            BosPolicy::None => 0,
            BosPolicy::Dropped => 1,
            BosPolicy::Kept => 2,
        }
    }
}

impl fmt::Display for BosPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of `none`, `dropped` and `kept`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown BOS policy {0:?}: use none, dropped or kept")]
#[non_exhaustive]
pub struct UnknownBosPolicy(pub String);

impl FromStr for BosPolicy {
    type Err = UnknownBosPolicy;

    fn from_str(s: &str) -> Result<BosPolicy, UnknownBosPolicy> {
        match s {
            "none" => Ok(BosPolicy::None),
            "dropped" => Ok(BosPolicy::Dropped),
            "kept" => Ok(BosPolicy::Kept),
            _ => Err(UnknownBosPolicy(s.to_owned())),
        }
    }
}

/// What a chunk is. Every field enters its key: chunks that differ in any have nothing to do with each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChunkId {
    /// Fingerprint of the model's weights and config.
    pub model: [u8; 32],
    /// Type of the stored elements.
    pub dtype: Dtype,
    /// Layers of the model, 1 to 1000.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// What was done about the token that begins every text.
    pub bos: BosPolicy,
    /// Chunks of one namespace are invisible to another.
    pub namespace: String,
    /// Token ids, at least one.
    pub tokens: Vec<u32>,
}

/// Sizes of a chunk in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of the keys of a token in a layer, and of its values.
    pub(crate) row: usize,
    /// Bytes of the keys of a layer, and of its values.
    pub(crate) tensor: usize,
    /// Bytes of all layers.
    pub(crate) total: usize,
}

impl ChunkId {
    /// The name of the chunk: a keyed hash over all fields and the format version.
    ///
    /// Every field has a fixed width or is preceded by its length, so that no two identities are encoded alike.
    pub fn key(&self) -> ChunkKey {
        let mut hasher = blake3::Hasher::new_derive_key(KEY_CONTEXT);
        hasher.update(&VERSION.to_le_bytes());
        hasher.update(&self.model);
        hasher.update(&[dtype_tag(self.dtype), self.bos.tag()]);
        for size in [self.layers, self.kv_heads, self.head_dim, self.namespace.len()] {
            hasher.update(&(size as u64).to_le_bytes());
        }
        hasher.update(self.namespace.as_bytes());
        hasher.update(&(self.tokens.len() as u64).to_le_bytes());
        for token in &self.tokens {
            hasher.update(&token.to_le_bytes());
        }
        ChunkKey(*hasher.finalize().as_bytes())
    }

    /// Elements of the keys of a layer: tokens × KV heads × head size.
    pub(crate) fn elements(&self) -> Result<usize> {
        Ok(self.layout()?.tensor / self.dtype.size())
    }

    pub(crate) fn layout(&self) -> Result<Layout> {
        let sizes = || {
            if self.layers > MAX_LAYERS {
                return None;
            }
            let row = self.kv_heads.checked_mul(self.head_dim)?.checked_mul(self.dtype.size())?;
            let tensor = self.tokens.len().checked_mul(row)?;
            let total = tensor.checked_mul(2)?.checked_mul(self.layers)?;
            // Room for the rounding of an allocation.
            (1..=isize::MAX as usize - 64).contains(&total).then_some(Layout { row, tensor, total })
        };
        sizes().ok_or(StoreError::Shape {
            layers: self.layers,
            tokens: self.tokens.len(),
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        })
    }

    /// The first field in which two identities differ.
    pub(crate) fn difference(&self, other: &ChunkId) -> Option<&'static str> {
        let fields = [
            (self.model == other.model, "model"),
            (self.dtype == other.dtype, "element type"),
            (self.layers == other.layers, "number of layers"),
            (self.kv_heads == other.kv_heads, "number of KV heads"),
            (self.head_dim == other.head_dim, "head size"),
            (self.bos == other.bos, "BOS policy"),
            (self.namespace == other.namespace, "namespace"),
            (self.tokens == other.tokens, "text (token ids)"),
        ];
        fields.iter().find(|(same, _)| !same).map(|(_, name)| *name)
    }
}

fn dtype_tag(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    }
}

/// The name of a chunk. Shown and read as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey(pub [u8; 32]);

impl ChunkKey {
    /// The first digits, enough to tell chunks apart in a list.
    pub fn short(&self) -> ShortKey {
        ShortKey(*self)
    }
}

impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex(&self.0))
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkKey({self})")
    }
}

impl FromStr for ChunkKey {
    type Err = StoreError;

    fn from_str(s: &str) -> Result<ChunkKey> {
        let bad = || StoreError::BadKey { text: s.to_owned(), expected: "64" };
        parse_hex(s).and_then(|bytes| bytes.try_into().ok()).map(ChunkKey).ok_or_else(bad)
    }
}

impl Serialize for ChunkKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Shows the first 12 hexadecimal digits of a [`ChunkKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortKey(ChunkKey);

impl fmt::Display for ShortKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&hex(&self.0.0[..6]))
    }
}

const DIGITS: [u8; 16] = *b"0123456789abcdef";

/// What each character is worth as a hexadecimal digit; 255 is none.
const VALUES: [u8; 256] = {
    let (mut values, mut value) = ([255; 256], 0);
    while value < 16 {
        values[DIGITS[value] as usize] = value as u8;
        values[DIGITS[value].to_ascii_uppercase() as usize] = value as u8;
        value += 1;
    }
    values
};

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(DIGITS[usize::from(value)]);
    bytes.iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect()
}

/// The bytes of hexadecimal digits of either case.
pub(crate) fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let mut seen = 0;
    let byte = |pair: &[u8]| {
        let [high, low] = [pair[0], pair[1]].map(|digit| VALUES[usize::from(digit)]);
        seen |= high | low;
        high << 4 | low
    };
    let bytes = text.as_bytes().chunks_exact(2).map(byte).collect();
    (text.len().is_multiple_of(2) && seen < 16).then_some(bytes)
}
