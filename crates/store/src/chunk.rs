//! A chunk in memory.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use refrain_kernels::{Buffer, Dtype, Slice};

use crate::id::Layout;
use crate::{ChunkId, ChunkKey, Problem, Result, StoreError, file};

/// Keys before RoPE and values of a run of tokens that was prefilled alone. Immutable; clones share the memory.
#[derive(Clone, Debug)]
pub struct Chunk(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: ChunkId,
    key: ChunkKey,
    label: String,
    created: u64,
    layout: Layout,
    data: Data,
}

/// Bytes at a multiple of 8, so that every element type can be read where it lies.
pub(crate) struct Data {
    words: Vec<u64>,
    len: usize,
}

impl Data {
    pub(crate) fn zeros(len: usize) -> Data {
        Data { words: vec![0; len.div_ceil(8)], len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

impl Chunk {
    /// A chunk of the given keys (before RoPE) and values of each layer, each tokens × KV heads × head size elements
    /// of the identity's type. `label` says to people where the text comes from.
    ///
    /// # Errors
    /// If the identity is empty or too large, or the layers are not what it says.
    pub fn new(id: ChunkId, label: impl Into<String>, layers: Vec<(Buffer, Buffer)>) -> Result<Chunk> {
        let mut builder = ChunkBuilder::new(id, label)?;
        for (k, v) in &layers {
            builder.push(k.as_slice(), v.as_slice())?;
        }
        builder.finish()
    }

    /// `data` has as many bytes as the identity's layout says.
    pub(crate) fn from_parts(id: ChunkId, label: String, created: u64, data: Data) -> Result<Chunk> {
        let layout = id.layout()?;
        debug_assert_eq!(layout.total, data.len);
        Ok(Chunk(Arc::new(Inner { key: id.key(), id, label, created, layout, data })))
    }

    /// Reads a whole chunk file, as [`Chunk::to_bytes`] makes it, and verifies everything about it.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Chunk, Problem> {
        let mut reader = bytes;
        let header = file::Header::read(&mut reader, bytes.len() as u64)?;
        file::read_layers(header, &mut reader)
    }

    /// The bytes of the chunk's file: always the same for the same content, label and time of creation.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = file::Header::of(self).encode();
        out.extend_from_slice(self.data());
        out
    }

    /// What the chunk is.
    pub fn id(&self) -> &ChunkId {
        &self.0.id
    }

    /// The chunk's name.
    pub fn key(&self) -> ChunkKey {
        self.0.key
    }

    /// Where the text comes from, for people.
    pub fn label(&self) -> &str {
        &self.0.label
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
        self.0.created
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> usize {
        self.0.layout.total
    }

    /// Keys of a layer before RoPE: tokens × KV heads × head size.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn k(&self, layer: usize) -> Slice<'_> {
        self.tensor(layer, 0)
    }

    /// Values of a layer: tokens × KV heads × head size.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn v(&self, layer: usize) -> Slice<'_> {
        self.tensor(layer, 1)
    }

    fn tensor(&self, layer: usize, part: usize) -> Slice<'_> {
        assert!(layer < self.layers(), "layer {layer} of a chunk with {} layers", self.layers());
        let size = self.0.layout.tensor;
        let start = (2 * layer + part) * size;
        // Starts are multiples of the element's size from a base that is a multiple of 8.
        Slice::from_bytes(self.dtype(), &self.data()[start..start + size]).expect("aligned, whole elements")
    }

    /// Keys, then values, layer after layer.
    pub(crate) fn data(&self) -> &[u8] {
        self.0.data.bytes()
    }

    /// Bytes that the chunk takes in memory, nearly.
    pub(crate) fn weight(&self) -> u64 {
        let Inner { id, label, layout, .. } = &*self.0;
        (layout.total + 4 * id.tokens.len() + id.namespace.len() + label.len() + 512) as u64
    }
}

/// Builds a chunk layer by layer.
#[derive(Debug)]
pub struct ChunkBuilder {
    id: ChunkId,
    label: String,
    layout: Layout,
    elements: usize,
    data: Data,
    layers: usize,
}

impl ChunkBuilder {
    /// Reserves the memory of a chunk. `label` says to people where the text comes from.
    ///
    /// # Errors
    /// If the identity is empty or too large.
    pub fn new(id: ChunkId, label: impl Into<String>) -> Result<ChunkBuilder> {
        let (layout, elements) = (id.layout()?, id.elements()?);
        Ok(ChunkBuilder {
            id,
            label: label.into(),
            layout,
            elements,
            data: Data::zeros(layout.total),
            layers: 0,
        })
    }

    /// Copies the next layer's keys (before RoPE) and values, each tokens × KV heads × head size elements.
    ///
    /// # Errors
    /// If they have another length or type than the identity says, or the chunk has all its layers.
    pub fn push(&mut self, k: Slice<'_>, v: Slice<'_>) -> Result<()> {
        if self.layers == self.id.layers {
            return Err(StoreError::Layers { found: self.layers + 1, expected: self.id.layers });
        }
        for (part, name, slice) in [(0, "keys", k), (1, "values", v)] {
            if slice.len() != self.elements || slice.dtype() != self.id.dtype {
                return Err(StoreError::Layer {
                    layer: self.layers,
                    part: name,
                    found: slice.len(),
                    found_dtype: slice.dtype(),
                    expected: self.elements,
                    dtype: self.id.dtype,
                });
            }
            let size = self.layout.tensor;
            let start = (2 * self.layers + part) * size;
            self.data.bytes_mut()[start..start + size].copy_from_slice(slice.as_bytes());
        }
        self.layers += 1;
        Ok(())
    }

    /// The chunk, created now.
    ///
    /// # Errors
    /// If a layer is missing.
    pub fn finish(self) -> Result<Chunk> {
        if self.layers != self.id.layers {
            return Err(StoreError::Layers { found: self.layers, expected: self.id.layers });
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Chunk::from_parts(self.id, self.label, created, self.data)
    }
}
