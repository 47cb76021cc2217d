//! Helpers of the tests of several modules: small GGUF files made in memory, folders that vanish, models on
//! disk.

#[path = "../../../tests/common/needs.rs"]
mod needs;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) use needs::real_model;

/// Writes GGUF files.
#[derive(Debug, Clone)]
pub(crate) struct GgufBuilder {
    pub(crate) version: u32,
    pub(crate) alignment: usize,
    keys: Vec<u8>,
    key_count: u64,
    directory: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl GgufBuilder {
    pub(crate) fn new() -> Self {
        let (keys, directory, data) = (Vec::new(), Vec::new(), Vec::new());
        Self { version: 3, alignment: 32, keys, key_count: 0, directory, tensor_count: 0, data }
    }

    /// A key with a value of type `type_id`, already encoded.
    pub(crate) fn raw(mut self, key: &str, type_id: u32, value: &[u8]) -> Self {
        string(&mut self.keys, key);
        self.keys.extend(type_id.to_le_bytes());
        self.keys.extend(value);
        self.key_count += 1;
        self
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub(crate) fn str(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        string(&mut bytes, value);
        self.raw(key, 8, &bytes)
    }

    pub(crate) fn strings(self, key: &str, values: &[&str]) -> Self {
        let mut bytes = array(8, values.len());
        values.iter().for_each(|v| string(&mut bytes, v));
        self.raw(key, 9, &bytes)
    }

    pub(crate) fn i32s(self, key: &str, values: &[i32]) -> Self {
        let mut bytes = array(5, values.len());
        values.iter().for_each(|v| bytes.extend(v.to_le_bytes()));
        self.raw(key, 9, &bytes)
    }

    /// A tensor of `shape` (outermost first), ggml type `type_id` and these bytes.
    pub(crate) fn tensor(mut self, name: &str, shape: &[u64], type_id: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend(bytes);
        self.entry(name, shape, type_id, offset)
    }

    /// A directory entry without data.
    pub(crate) fn entry(mut self, name: &str, shape: &[u64], type_id: u32, offset: u64) -> Self {
        string(&mut self.directory, name);
        self.directory.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|d| self.directory.extend(d.to_le_bytes()));
        self.directory.extend(type_id.to_le_bytes());
        self.directory.extend(offset.to_le_bytes());
        self.tensor_count += 1;
        self
    }

    /// An F32 tensor with the values 0, 1, 2 …
    pub(crate) fn counting(self, name: &str, shape: &[u64]) -> Self {
        let values: u64 = shape.iter().product();
        let bytes: Vec<u8> = (0..values).flat_map(|v| (v as f32).to_le_bytes()).collect();
        self.tensor(name, shape, 0, &bytes)
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.directory);
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// The head of an array: element type and count.
pub(crate) fn array(type_id: u32, count: usize) -> Vec<u8> {
    let mut bytes = type_id.to_le_bytes().to_vec();
    bytes.extend((count as u64).to_le_bytes());
    bytes
}

fn string(out: &mut Vec<u8>, value: &str) {
    out.extend((value.len() as u64).to_le_bytes());
    out.extend(value.as_bytes());
}

/// Metadata and embedding of a tiny model: 2 layers, hidden 32, 4 heads over 2, head_dim 8, vocabulary of 6.
pub(crate) fn tiny_gguf(architecture: &str) -> GgufBuilder {
    let key = |name: &str| format!("{architecture}.{name}");
    GgufBuilder::new()
        .str("general.architecture", architecture)
        .u32(&key("block_count"), 2)
        .u32(&key("context_length"), 128)
        .u32(&key("embedding_length"), 32)
        .u32(&key("feed_forward_length"), 64)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .f32(&key("rope.freq_base"), 10_000.0)
        .strings("tokenizer.ggml.tokens", &["<s>", "a", "<|im_end|>", "b", "<|end|>", "</s>"])
        .i32s("tokenizer.ggml.token_type", &[3, 1, 3, 1, 1, 3])
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 5)
        .counting("token_embd.weight", &[6, 32])
}

/// xorshift64*.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 33) % n as u64) as usize
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.next() >> 56) as u8).collect()
    }
}

/// xorshift64*: the bytes that `tools/golden_quants.py` makes of the same seed.
pub(crate) fn random_bytes(n: usize, seed: u64) -> Vec<u8> {
    Random::new(seed).bytes(n)
}

/// A golden file, `path` being below `tests/golden`.
pub(crate) fn golden(path: &str) -> serde_json::Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The checksum of `tools/golden_quants.py`.
pub(crate) fn checksum(values: &[f32]) -> String {
    let bits = |x: &f32| if x.is_nan() { 0x7FC0_0000 } else { x.to_bits() };
    let weight = |i: u64| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let term = |(i, x): (u64, &f32)| u64::from(bits(x)).wrapping_mul(weight(i));
    let sum = (0..).zip(values).map(term).fold(0, u64::wrapping_add);
    format!("{sum:016x}")
}

/// A folder that is removed when dropped.
#[derive(Debug)]
pub(crate) struct TestFolder(PathBuf);

impl TestFolder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("refrain-model-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Writes a safetensors file of F32 tensors with the values 0, 1, 2 …
    pub(crate) fn write_safetensors(&self, file: &str, tensors: &[(&str, &[usize])]) -> PathBuf {
        let data: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, shape)| {
                (0..shape.iter().product()).flat_map(|v: usize| (v as f32).to_le_bytes()).collect()
            })
            .collect();
        let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
            (
                *name,
                safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data).unwrap(),
            )
        });
        self.write(file, safetensors::serialize(views, None).unwrap())
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
