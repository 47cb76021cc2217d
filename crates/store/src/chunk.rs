//! A chunk in memory.

use std::sync::Arc;

use refrain_kernels::Dtype;

use crate::clock::now;
use crate::error::{Result, StoreError};
use crate::id::ChunkId;
use crate::key::ChunkKey;
use crate::kv_quant::Layout;
use crate::layer::Layer;

/// Keys before RoPE and values of a run of tokens that was prefilled alone. Immutable; clones share the memory.
#[derive(Clone, Debug)]
pub struct Chunk(Arc<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    id: ChunkId,
    key: ChunkKey,
    provenance: Provenance,
    layout: Layout,
    /// The layers as they lie at rest.
    data: Vec<Layer>,
}

/// What is known of a chunk beside what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Provenance {
    /// Where its text comes from, for people.
    pub(crate) label: String,
    /// The numerics of the engine that computed it. Files of earlier builds do not say.
    pub(crate) numerics: Option<String>,
    /// Seconds since 1970.
    pub(crate) created: u64,
}

impl Chunk {
    /// A chunk of the given layers, created now, of which each holds tokens × KV heads × head size keys (before RoPE), as many values, of
    /// the identity's type. Where its keys and values are to lie exactly at rest they stay where they are. `label` says to people where
    /// the text comes from.
    ///
    /// # Errors
    /// If the identity is empty or too large, or the layers are not what it says.
    pub fn new(id: ChunkId, label: impl Into<String>, layers: Vec<Layer>) -> Result<Chunk> {
        let layout = id.layout()?;
        if layers.len() != id.layers {
            return Err(StoreError::Layers { found: layers.len(), expected: id.layers });
        }
        let expected = id.tokens.len() * id.kv_heads * id.head_dim;
        for (at, layer) in layers.iter().enumerate() {
            let (found, found_dtype) = (layer.k().len(), layer.dtype());
            if (found, found_dtype) != (expected, id.dtype) {
                return Err(StoreError::Layer { layer: at, found, found_dtype, expected, dtype: id.dtype });
            }
        }
        let data = match layout.is_exact() {
            true => layers,
            false => layers.iter().map(|layer| Layer::encoded(&layout, layer.k(), layer.v())).collect(),
        };
        let provenance = Provenance { label: label.into(), numerics: id.numerics.clone(), created: now() };
        Chunk::from_parts(id, provenance, data)
    }

    /// `data` has as many layers of as many bytes as the identity's layout says.
    pub(crate) fn from_parts(id: ChunkId, provenance: Provenance, data: Vec<Layer>) -> Result<Chunk> {
        let layout = id.layout()?;
        debug_assert_eq!(layout.layer * id.layers, data.iter().map(|layer| layer.bytes()).sum::<usize>());
        Ok(Chunk(Arc::new(Inner { key: id.key(), id, provenance, layout, data })))
    }

    /// The same keys and values in another namespace.
    pub(crate) fn moved(&self, namespace: &str) -> Chunk {
        let id = ChunkId { namespace: namespace.to_owned(), ..self.id().clone() };
        Chunk(Arc::new(Inner { key: id.key(), id, ..(*self.0).clone() }))
    }

    /// The same keys and values, computed by an engine of these numerics. An identity that names its numerics has said so before.
    pub fn with_numerics(self, numerics: &str) -> Chunk {
        let numerics = Some(self.id().numerics.as_deref().unwrap_or(numerics).to_owned());
        let inner = Arc::unwrap_or_clone(self.0);
        Chunk(Arc::new(Inner { provenance: Provenance { numerics, ..inner.provenance }, ..inner }))
    }

    /// Identity of the chunk.
    pub fn id(&self) -> &ChunkId {
        &self.0.id
    }

    /// The chunk's name.
    pub fn key(&self) -> ChunkKey {
        self.0.key
    }

    /// Where the text comes from, for people.
    pub fn label(&self) -> &str {
        &self.0.provenance.label
    }

    /// The numerics of the engine that computed it, if it is known.
    pub fn numerics(&self) -> Option<&str> {
        self.0.provenance.numerics.as_deref()
    }

    pub(crate) fn provenance(&self) -> &Provenance {
        &self.0.provenance
    }

    /// Token ids.
    pub fn tokens(&self) -> &[u32] {
        &self.0.id.tokens
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.0.id.layers
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.0.id.dtype
    }

    /// When the chunk was computed, in seconds since 1970.
    pub fn created(&self) -> u64 {
        self.0.provenance.created
    }

    /// Bytes of all keys and values at rest.
    pub fn bytes(&self) -> usize {
        self.0.layout.layer * self.0.id.layers
    }

    /// Keys before RoPE and values of a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> Layer {
        self.0.data[layer].decode(&self.0.layout)
    }

    /// The layers in order, at rest.
    pub(crate) fn data(&self) -> &[Layer] {
        &self.0.data
    }

    /// Segments of its layers.
    pub(crate) fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Bytes that the chunk takes in memory, nearly.
    pub(crate) fn weight(&self) -> u64 {
        weight(&self.0.id, self.label(), self.bytes())
    }
}

/// Bytes that a chunk takes in memory, nearly.
pub(crate) fn weight(id: &ChunkId, label: &str, bytes: usize) -> u64 {
    (bytes + 64 * id.layers + 4 * id.tokens.len() + id.namespace.len() + label.len() + 512) as u64
}
