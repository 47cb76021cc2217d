//! Tests of the store. What they share is here.

mod archive;
mod aux_file;
mod chunk_file;
mod crash;
#[cfg(feature = "remote")]
mod delete;
#[cfg(feature = "remote")]
mod fetch_or_compute;
mod full_disk;
#[cfg(feature = "remote")]
#[path = "../../../../tests/common/held_objects.rs"]
mod held_objects;
mod id;
mod kv_quant;
#[cfg(feature = "remote")]
pub(crate) mod library;
mod limits;
#[cfg(feature = "remote")]
mod objects;
#[cfg(feature = "remote")]
mod sharing;
mod store;
mod tokens;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use refrain_kernels::{Buffer, Dtype};
use serde_json::Value;

use crate::{BosPolicy, Chunk, ChunkId, KvQuantization, Layer};

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
        quantization: KvQuantization::Exact,
        layers: 2,
        kv_heads: 2,
        head_dim: 4,
        bos: BosPolicy::Dropped,
        prefix: None,
        numerics: None,
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
    let layers = (0..id.layers).map(|_| Layer::exact(buffer().as_slice(), buffer().as_slice())).collect();
    Chunk::new(id, "a \"label\" – with ünïcode\n", layers).unwrap()
}

fn chunk() -> Chunk {
    chunk_of(id(Dtype::F16), 1)
}

/// A chunk with `tokens` tokens beginning with `first`.
pub(crate) fn numbered(first: u32, tokens: usize) -> Chunk {
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

/// Splits a file into its header's JSON and its data.
fn parts(bytes: &[u8]) -> (Value, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

fn assemble(json: &Value, data: &[u8]) -> Vec<u8> {
    let json = serde_json::to_vec(json).unwrap();
    [&(json.len() as u64).to_le_bytes(), json.as_slice(), data].concat()
}

/// A file with a changed header whose checksum is right again: what an accident does not make, but an adversary.
fn forged(bytes: &[u8], change: impl Fn(&mut Value)) -> Vec<u8> {
    let (mut json, data) = parts(bytes);
    change(&mut json);
    let mut entries: BTreeMap<String, String> = serde_json::from_value(json["__metadata__"].clone()).unwrap();
    entries.remove("header.blake3");
    json["__metadata__"]["header.blake3"] = crate::header::checksum(entries.iter()).into();
    assemble(&json, &data)
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let len = random.below(40).min(bytes.len() - at);
    match random.below(6) {
        0 if at < bytes.len() => bytes[at] = random.next() as u8,
        1 => bytes.truncate(at),
        2 => _ = bytes.drain(at..at + len),
        3 => _ = bytes.splice(at..at, (0..len).map(|_| random.next() as u8)),
        4 => {
            let from = random.below(other.len());
            bytes.splice(at..at + len, other[from..(from + len).min(other.len())].iter().copied());
        }
        _ => {
            // A digit for a digit keeps the JSON whole, so that what it says is tried.
            let digit = bytes.iter().skip(at).position(u8::is_ascii_digit);
            if let Some(digit) = digit {
                bytes[at + digit] = b'0' + random.below(10) as u8;
            }
        }
    }
}
