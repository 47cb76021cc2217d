//! Tests of the store. What they share is here.

mod file;
mod id;
mod store;

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use refrain_kernels::{Buffer, Dtype};

use crate::{BosPolicy, Chunk, ChunkId};

/// A file on a disk with `room` bytes left.
pub(crate) struct SmallDisk<'a> {
    pub(crate) file: &'a mut File,
    pub(crate) room: &'a AtomicU64,
}

impl Write for SmallDisk<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.room.load(Relaxed);
        if room == 0 {
            return Err(ErrorKind::StorageFull.into());
        }
        let written =
            self.file.write(&bytes[..bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX))])?;
        self.room.fetch_sub(written as u64, Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Xorshift: enough randomness for tests, always the same.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Three tokens, two layers, two heads of four elements.
fn id(dtype: Dtype) -> ChunkId {
    ChunkId {
        model: [0xa5; 32],
        dtype,
        layers: 2,
        kv_heads: 2,
        head_dim: 4,
        bos: BosPolicy::Dropped,
        namespace: "shared".into(),
        tokens: vec![5, 70_000, u32::MAX],
    }
}

/// Random keys and values that follow from `seed`.
fn chunk_of(id: ChunkId, seed: u64) -> Chunk {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let elements = id.tokens.len() * id.kv_heads * id.head_dim;
    let mut buffer = || {
        let values: Vec<f32> = (0..elements).map(|_| random.next() as i16 as f32 / 1024.0).collect();
        let mut buffer = Buffer::zeros(id.dtype, elements);
        buffer.write_f32(0, &values);
        buffer
    };
    let layers = (0..id.layers).map(|_| (buffer(), buffer())).collect();
    Chunk::new(id, "a \"label\" – with ünïcode\n", layers).unwrap()
}

fn chunk() -> Chunk {
    chunk_of(id(Dtype::F16), 1)
}

/// A chunk with `tokens` tokens beginning with `first`.
fn numbered(first: u32, tokens: usize) -> Chunk {
    let tokens = (0..tokens as u32).map(|t| first.wrapping_mul(1_000_003).wrapping_add(t)).collect();
    chunk_of(ChunkId { tokens, ..id(Dtype::F16) }, u64::from(first))
}

/// All that a chunk says, keys and values as bytes.
fn content(chunk: &Chunk) -> (ChunkId, String, u64, Vec<u8>) {
    (chunk.id().clone(), chunk.label().to_owned(), chunk.created(), raw(chunk))
}

/// Keys and values of all layers as they lie in a file.
fn raw(chunk: &Chunk) -> Vec<u8> {
    chunk.data().iter().flat_map(|layer| layer.as_bytes()).copied().collect()
}
