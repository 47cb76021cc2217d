//! The identity of a chunk, and the name that follows from it.

use std::fmt;
use std::str::FromStr;

use refrain_kernels::Dtype;

use crate::error::{Result, StoreError};
use crate::key::ChunkKey;
use crate::kv_quant::KvQuantization;
use crate::kv_quant::Layout;

/// Versions of keys and of the chunk file, and the domain of the keyed hash of each, so that names never meet: what is
/// as computed has the first, what is encoded the second, what was prefilled behind a prefix the third, and what belongs to its
/// numerics the fourth. Earlier programs leave later versions alone.
pub(crate) const VERSIONS: [u32; 4] = [1, 2, 3, 4];
const KEY_CONTEXTS: [&str; 4] = [
    "refrain chunk key, format version 1",
    "refrain chunk key, format version 2",
    "refrain chunk key, format version 3",
    "refrain chunk key, format version 4",
];
/// Which of them names its numerics.
pub(crate) const WITH_NUMERICS: usize = 3;
/// Most layers of a chunk: tensor names have three digits.
const MAX_LAYERS: usize = 1000;

/// The treatment of the token that begins every text.
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

/// The identity of a chunk. Every field enters its key: chunks that differ in any have nothing to do with each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChunkId {
    /// Fingerprint of the model's weights and config.
    pub model: [u8; 32],
    /// Type of the elements as computed.
    pub dtype: Dtype,
    /// How they lie at rest.
    pub quantization: KvQuantization,
    /// Layers of the model, 1 to 1000.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The treatment of the token that begins every text.
    pub bos: BosPolicy,
    /// Digest of the tokens that stood before the chunk while it was prefilled ([`ChunkId::digest`]), where they were others than
    /// BOS; their own keys and values were dropped.
    pub prefix: Option<[u8; 32]>,
    /// The numerics of the engine that computes it, such as `bf16-avx512`, where chunks of others are to be told apart: keys and values
    /// of one text differ in bits between kernels.
    pub numerics: Option<String>,
    /// Chunks of one namespace are invisible to another.
    pub namespace: String,
    /// Token ids, at least one.
    pub tokens: Vec<u32>,
}

impl ChunkId {
    /// Bytes of the chunk's keys and values at rest; 0 if no chunk can have this identity.
    pub fn bytes(&self) -> u64 {
        self.layout().map_or(0, |layout| (layout.layer * self.layers) as u64)
    }

    /// The digest of tokens that stand before a chunk.
    pub fn digest(tokens: &[u32]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("refrain prefix tokens, version 1");
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// The name of the chunk: a keyed hash over all fields and the format version.
    ///
    /// Every field has a fixed width or is preceded by its length, so that no two identities are encoded alike.
    pub fn key(&self) -> ChunkKey {
        let format = self.format();
        let mut hasher = blake3::Hasher::new_derive_key(KEY_CONTEXTS[format]);
        hasher.update(&VERSIONS[format].to_le_bytes());
        hasher.update(&self.model);
        hasher.update(&[dtype_tag(self.dtype), self.bos.tag()]);
        if format > 0 {
            hasher.update(&[self.quantization.tag()]);
        }
        if format == WITH_NUMERICS {
            hasher.update(&[u8::from(self.prefix.is_some())]);
        }
        if let Some(prefix) = &self.prefix {
            hasher.update(prefix);
        }
        if let Some(numerics) = &self.numerics {
            hasher.update(&(numerics.len() as u64).to_le_bytes());
            hasher.update(numerics.as_bytes());
        }
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

    /// Which of the [`VERSIONS`] it has.
    pub(crate) fn format(&self) -> usize {
        match (&self.numerics, self.prefix) {
            (Some(_), _) => WITH_NUMERICS,
            (None, Some(_)) => 2,
            (None, None) => usize::from(self.quantization != KvQuantization::Exact),
        }
    }

    /// The format of a layer.
    pub(crate) fn layout(&self) -> Result<Layout> {
        let sizes = || {
            let sizes = [self.kv_heads, self.head_dim, self.tokens.len(), self.layers];
            if self.layers > MAX_LAYERS || sizes.contains(&0) {
                return None;
            }
            let heads = (self.kv_heads, self.head_dim);
            let layout = Layout::new(self.quantization, self.dtype, heads, self.tokens.len())?;
            // Room for the rounding of an allocation.
            let total = layout.layer.checked_mul(self.layers)?;
            (total <= isize::MAX as usize - 64).then_some(layout)
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
            (self.quantization == other.quantization, "encoding"),
            (self.layers == other.layers, "number of layers"),
            (self.kv_heads == other.kv_heads, "number of KV heads"),
            (self.head_dim == other.head_dim, "head size"),
            (self.bos == other.bos, "BOS policy"),
            (self.prefix == other.prefix, "prefix"),
            (self.numerics == other.numerics, "numerics"),
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
