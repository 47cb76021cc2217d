//! Tests that look at keys and values, which the public interface does not show.

mod averaged;
mod batch;
mod blocked_disk;
mod conversations;
#[cfg(feature = "emulate")]
mod device_chunks;
#[cfg(feature = "emulate")]
mod device_memory;
mod documents;
mod drift;
mod eviction;
mod fetch_or_compute;
mod fidelity;
mod finite;
mod golden;
mod grammar;
#[path = "../../../../tests/common/held_objects.rs"]
mod held_objects;
mod identity;
mod left;
mod loading;
#[path = "../../../../tests/common/needs.rs"]
mod needs;
mod oracles;
mod prefix;
mod prefix_cache;
mod retrieval;
mod sparse;
mod speculation;
mod stops;
mod store;
#[cfg(feature = "emulate")]
mod tensor_cores;
mod thinking;

use std::path::PathBuf;
use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::{ChunkStatistics, FusionMethod};
use refrain_kernels::{Buffer, Cpu, Device, Dtype, KvBuffer, Precision, ReferenceDevice};
use refrain_kv::KvCache;
use refrain_model::{Decoder, ModelFiles, Tokenizer};
use refrain_store::{ChunkId, Store};

use crate::cache::{BlockSparseCache, EvictingCache, FullCache};
use crate::decode::{DecodeWorkspace, extend};
use crate::ingest::{ChunkPrefill, IsolatedRun, kinds_of};
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest, Prefilled};
use crate::{Engine, Prompt, PromptChunk, Result, Settings};

/// A folder of tiny random models, next to the golden files made from them.
fn tiny(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny").join(name)
}

/// A real model's file, if it was fetched. On another device than the CPU real models take hours, and under an instruction set that
/// `REFRAIN_CPU` names minutes: the tests that run again there leave them out.
fn real(file: &str) -> Option<PathBuf> {
    if std::env::var_os("REFRAIN_CPU").is_some() { None } else { real_with_any_isa(file) }
}

/// A real model's file, if it was fetched, for a test that is quick under every instruction set of the CPU.
fn real_with_any_isa(file: &str) -> Option<PathBuf> {
    if std::env::var_os("REFRAIN_TEST_DEVICE").is_some() { None } else { needs::real_model(file) }
}

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The tiny models have a context of 512.
fn small() -> Settings {
    Settings { chunk_tokens: 256, ..Settings::default() }
}

fn exact(kv: Dtype) -> Settings {
    Settings { precision: Some(Precision::F32), kv, ..small() }
}

/// The device of the tests: the CPU, or with `REFRAIN_TEST_DEVICE` the reference device (`reference`) or the CUDA device over
/// emulated threads (`cuda`, with the feature `emulate`).
fn device() -> Arc<dyn Device> {
    match std::env::var("REFRAIN_TEST_DEVICE").as_deref() {
        Ok("reference") => Arc::new(ReferenceDevice),
        #[cfg(feature = "emulate")]
        Ok("cuda") => Arc::new(refrain_cuda::CudaDevice::new(refrain_cuda::Emulated::new(3), 0).unwrap()),
        Ok(other) => {
            panic!("REFRAIN_TEST_DEVICE={other}: there is `reference`, and `cuda` with the feature `emulate`")
        }
        Err(_) => Arc::new(Cpu::new(0).unwrap()),
    }
}

/// Whether kernels run on emulated threads of a GPU, which take minutes for what a CPU does in seconds.
fn emulated() -> bool {
    std::env::var_os("REFRAIN_TEST_DEVICE").is_some_and(|device| device == "cuda")
}

fn engine(path: &std::path::Path, settings: Settings) -> Engine {
    Engine::open_on(&device(), path, Store::in_memory(1 << 30), settings, |_, _| ()).unwrap()
}

/// A tiny model with the tokenizer of the tiny Llama.
fn tiny_engine(name: &str, settings: Settings) -> Engine {
    with_tokenizer(&tiny("llama"), name, settings)
}

/// A copy of a tiny model's folder with the first `from` of `edited`, one of its files, replaced.
fn tiny_copy(name: &str, edited: &str, (from, to): (&str, &str)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(tiny(name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join(edited);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{edited} of {name} has {from}");
    std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
    folder
}

/// A tiny model with a setting of its `config.json` replaced.
fn tiny_engine_with(name: &str, (from, to): (&str, &str), settings: Settings) -> Engine {
    let folder = tiny_copy(name, "config.json", (from, to));
    with_tokenizer(&tiny("llama"), folder.path().to_str().unwrap(), settings)
}

/// A tiny model whose tokenizer puts no BOS before a prompt.
fn without_bos(name: &str, settings: Settings) -> Engine {
    let folder = tiny_copy("llama", "tokenizer_config.json", ("{", r#"{"add_bos_token": false,"#));
    let engine = with_tokenizer(folder.path(), name, settings);
    assert_eq!(engine.tokenizer().bos(), None);
    engine
}

fn with_tokenizer(folder: &std::path::Path, name: &str, settings: Settings) -> Engine {
    let files = |folder: PathBuf| ModelFiles::open(folder).unwrap();
    let tokenizer = Tokenizer::open(&files(folder.to_owned())).unwrap();
    let precision = settings.precision.unwrap_or(Precision::Bf16);
    let decoder = Decoder::load(files(tiny(name)), &device(), precision, None, |_, _| ()).unwrap();
    Engine::new(decoder, tokenizer, None, Store::in_memory(1 << 30), settings, [0; 32]).unwrap()
}

/// A prompt of random tokens: system part of `system` tokens (BOS among them, where there is one), chunks, question.
fn random_prompt(engine: &Engine, system: usize, chunks: &[usize], question: usize, seed: u64) -> Prompt {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let vocab = engine.decoder().config().vocab as u64;
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as u32 % vocab as u32
    };
    let mut tokens = |count: usize| (0..count).map(|_| token()).collect::<Vec<u32>>();
    let mut start = tokens(system);
    if let (Some(bos), Some(first)) = (engine.tokenizer().bos(), start.first_mut()) {
        *first = bos;
    }
    let chunk = |(i, count): (usize, &usize)| PromptChunk::whole(i, format!("chunk {i}"), tokens(*count));
    let chunks = chunks.iter().enumerate().map(chunk).collect();
    Prompt { system: start, system_reusable: true, chunks, question: tokens(question), ..Prompt::default() }
}

/// A method that is shared.
fn shared(method: impl FusionMethod + 'static) -> Arc<dyn FusionMethod> {
    Arc::new(method)
}

/// Prefill under an eviction policy.
fn prefill_with(
    engine: &Engine,
    prompt: &Prompt,
    method: &(impl FusionMethod + Clone + 'static),
    eviction: &Eviction,
    max_seq_len: usize,
) -> Result<Prefilled> {
    let (method, eviction, capture) = (shared(method.clone()), eviction.clone(), AttentionCapture::Nothing);
    let request = PrefillRequest { method, eviction, max_seq_len, capture };
    let mut prefilled = PrefillJob::start(engine, prompt, request)?.run()?;
    prefilled.load.join();
    Ok(prefilled)
}

/// Prefill with full attention.
fn prefill(
    engine: &Engine,
    prompt: &Prompt,
    method: &(impl FusionMethod + Clone + 'static),
    max_seq_len: usize,
) -> Prefilled {
    prefill_with(engine, prompt, method, Eviction::full(), max_seq_len).unwrap()
}

impl Prefilled {
    /// The logits after one more token.
    fn extend(&mut self, token: u32) -> Vec<f32> {
        extend(&mut [&mut self.cache], &[token], &mut DecodeWorkspace::default()).unwrap().to_vec()
    }

    /// The cache of all tokens; none where a policy bounds it.
    fn whole(&self) -> Option<&KvCache> {
        let cache = self.cache.cache.as_any();
        let full = cache.downcast_ref::<FullCache>();
        full.or(cache.downcast_ref::<BlockSparseCache>().map(|cache| &cache.full)).map(|cache| &cache.kv)
    }

    /// The cache of all tokens.
    fn full(&self) -> &KvCache {
        self.whole().unwrap()
    }

    /// Keys and values of a layer of the cache of all tokens.
    fn layer(&self, layer: usize) -> Option<[Vec<f32>; 2]> {
        let (device, cache) = (&**self.cache.decoder.device(), self.whole()?.layer(layer));
        Some([&cache.k, &cache.v].map(|kv| download_kv(device, kv)))
    }

    /// The cache that a policy bounds.
    fn evicting(&self) -> Option<&EvictingCache> {
        self.cache.cache.as_any().downcast_ref()
    }
}

impl Engine {
    /// Keys before RoPE and values of each layer of one causal prefill, without the first `dropped` tokens.
    fn isolated(&self, ids: &[u32], dropped: usize, dtype: Dtype) -> Vec<(Buffer, Buffer)> {
        let mut run = IsolatedRun::start(self, ids, dropped, None, dtype).unwrap();
        while !run.advance(&[]).unwrap() {}
        run.finish(self).0
    }

    /// Prefills a chunk alone and stores it.
    fn compute_chunk(&self, id: ChunkId, label: &str, statistics: &[&dyn ChunkStatistics]) {
        let mut chunk = ChunkPrefill::start(self, id, &[], label.to_owned(), !statistics.is_empty()).unwrap();
        while !chunk.advance(statistics).unwrap() {}
        chunk.finish().store(&kinds_of(statistics)).unwrap();
    }
}

/// Tiny models that differ in what their layers compute: one for each family with something of its own.
const KINDS: [&str; 7] = ["llama", "phi3", "qwen3", "gemma3_vision", "smollm3", "olmo2", "qwen3_moe"];

/// Runs an oracle on tiny models of every kind and on SmolLM2 where it is there.
fn everywhere(oracle: impl Fn(&Engine)) {
    // With a tokenizer of its own.
    oracle(&engine(&tiny("phi3"), exact(Dtype::F32)));
    for name in KINDS {
        eprintln!("on {name}");
        oracle(&tiny_engine(name, exact(Dtype::F32)));
    }
    if let Some(path) = real(SMOLLM2) {
        oracle(&engine(&path, exact(Dtype::F32)));
    }
}

/// Keys and values of a stored chunk, all layers one after the other.
fn keys_and_values(engine: &Engine, id: &ChunkId) -> Vec<f32> {
    let chunk = engine.store().get(id).unwrap().unwrap();
    let layer = |layer| [chunk.layer(layer).k().floats(), chunk.layer(layer).v().floats()].concat();
    (0..chunk.layers()).flat_map(layer).collect()
}

/// Tokens of an answer that nobody chose.
const STEPS: [u32; 6] = [7, 30, 12, 5, 90, 44];

/// The first logits, and those after each of [`STEPS`].
fn forced(
    engine: &Engine,
    prompt: &Prompt,
    method: &(impl FusionMethod + Clone + 'static),
    eviction: &Eviction,
) -> Vec<f32> {
    let max_seq_len = engine.max_seq_len(prompt, 40, eviction).unwrap();
    let mut prefilled = prefill_with(engine, prompt, method, eviction, max_seq_len).unwrap();
    let mut logits = prefilled.logits.clone();
    for token in STEPS {
        logits.extend(prefilled.extend(token));
    }
    logits
}

/// All elements, in the host's memory.
fn download_kv(device: &dyn Device, kv: &KvBuffer) -> Vec<f32> {
    device.download_kv(kv, 0..kv.len()).as_slice().floats()
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
