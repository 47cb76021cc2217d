//! The cache of chunks in a device's memory: it changes no bit, spares reads and copies, holds its bound, and has nothing of a removed chunk.

use std::path::Path;
use std::sync::Arc;

use refrain_cuda::{CudaDevice, Emulated};
use refrain_eviction::Eviction;
use refrain_fusion::{FusionMethod, Pie};
use refrain_kernels::{Device, Dtype};
use refrain_store::Store;

use super::{exact, forced, prefill, random_prompt, shared, tiny};
use crate::prefill::Prefilled;
use crate::{DeviceChunkStats, Engine, Prompt, Settings};

const KV: Dtype = Dtype::F16;

/// A tiny model on emulated threads, with a cache of so many bytes; the store keeps nothing in memory.
fn open(folder: &Path, device_chunk_bytes: u64) -> Engine {
    open_with(folder, device_chunk_bytes, 0)
}

/// A tiny model on emulated threads, with a cache of `device_chunk_bytes` bytes and a store that keeps `memory_bytes` bytes in the host's memory.
fn open_with(folder: &Path, device_chunk_bytes: u64, memory_bytes: u64) -> Engine {
    let device: Arc<dyn Device> = Arc::new(CudaDevice::new(Emulated::new(1), 2).unwrap());
    let settings = Settings { device_chunk_bytes, ..exact(KV) };
    Engine::open_on(&device, &tiny("llama"), Store::open(folder, memory_bytes).unwrap(), settings, |_, _| ())
        .unwrap()
}

fn prompt(engine: &Engine) -> Prompt {
    random_prompt(engine, 5, &[40, 33, 21], 9, 11)
}

fn run(engine: &Engine, prompt: &Prompt, method: &(impl FusionMethod + Clone + 'static)) -> Prefilled {
    prefill(engine, prompt, method, prompt.len())
}

/// Bytes of keys and values of so many tokens at all layers.
fn bytes(engine: &Engine, tokens: usize) -> u64 {
    (tokens * engine.decoder().shape().token_bytes(KV)) as u64
}

/// Bytes that a prefill has read from the store, copied to the device, and found in the device's memory.
fn loaded(prefilled: &Prefilled) -> (u64, u64, u64) {
    let load = prefilled.load.reused.load;
    (load.bytes, load.copied, load.reused)
}

#[test]
fn a_prompt_over_cached_chunks_reads_and_copies_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let without = open(folder.path(), 0);
    let prompt = prompt(&without);
    without.measure(&prompt, &shared(Pie), Eviction::full()).unwrap();
    let expected = forced(&without, &prompt, &Pie, Eviction::full());
    let all = bytes(&without, 5 + 40 + 33 + 21);
    assert_eq!(loaded(&run(&without, &prompt, &Pie)), (all, all, 0));
    assert_eq!(without.device_chunk_stats(), DeviceChunkStats::default());

    let with = open(folder.path(), 1 << 20);
    let first = run(&with, &prompt, &Pie);
    assert_eq!((loaded(&first), with.device_chunk_stats().bytes), ((all, all, 0), all));
    let second = run(&with, &prompt, &Pie);
    assert_eq!((loaded(&second), second.load.reused.bytes_read()), ((0, 0, all), 0));
    assert_eq!(forced(&with, &prompt, &Pie, Eviction::full()), expected);
    let layers = 4 * with.decoder().shape().layers as u64;
    let stats = with.device_chunk_stats();
    assert_eq!((stats.misses, stats.hits), (layers, 2 * layers));
}

#[test]
fn what_a_prompt_found_in_the_stores_memory_is_pinned_for_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let without = open(folder.path(), 0);
    let prompt = prompt(&without);
    let is_pinned = |prefilled: &Prefilled| -> Vec<bool> {
        prefilled.load.reused.segments.iter().map(|segment| segment.reader.is_pinned()).collect()
    };
    let with = open_with(folder.path(), 0, 1 << 24);
    for method in refrain_fusion::METHODS.entries.iter().map(|entry| entry.with([]).unwrap()) {
        let expected = run(&without, &prompt, &method);
        let mut got = run(&with, &prompt, &method);
        assert_eq!(got.logits, expected.logits, "{method:?}");
        got.load.join();
    }
    assert_eq!(is_pinned(&run(&with, &prompt, &Pie)), [true; 4]);
    // Before any prompt, for a measurement, all but the system part.
    let with = open_with(folder.path(), 0, 1 << 24);
    with.load_into_memory(&prompt, &Pie).unwrap();
    assert_eq!(is_pinned(&run(&with, &prompt, &Pie))[1..], [true; 3]);
}

#[test]
fn the_cache_changes_no_bit_of_any_kind_of_pass() {
    let folder = tempfile::tempdir().unwrap();
    let (without, with) = (open(folder.path(), 0), open(folder.path(), 1 << 20));
    let prompt = prompt(&without);
    // Among them are passes that compare fresh rows with cached ones, that leave layers to the next, and that keep chunks' own positions.
    for method in refrain_fusion::METHODS.entries.iter().map(|entry| entry.with([]).unwrap()) {
        let expected = run(&without, &prompt, &method);
        for _ in 0..2 {
            let got = run(&with, &prompt, &method);
            assert_eq!(got.logits, expected.logits, "{method:?}");
            assert_eq!(got.stats.final_rows, expected.stats.final_rows, "{method:?}");
        }
    }
    assert!(with.device_chunk_stats().hits > 0);
}

#[test]
fn the_cache_holds_its_bound() {
    let folder = tempfile::tempdir().unwrap();
    let without = open(folder.path(), 0);
    let prompt = prompt(&without);
    let expected = run(&without, &prompt, &Pie);
    let layer = bytes(&without, 40) / without.decoder().shape().layers as u64;
    // Too little for a layer of the longest chunk; for one; for most of them.
    for bound in [layer - 1, layer, bytes(&without, 60)] {
        let engine = open(folder.path(), bound);
        for _ in 0..3 {
            assert_eq!(run(&engine, &prompt, &Pie).logits, expected.logits);
            let held = engine.device_chunk_stats().bytes;
            assert!(held > 0 && held <= bound, "{held} of {bound}");
        }
    }
}

/// An LRU cache finds nothing of a prompt that exceeds it: each layer drops the one that is asked for next.
#[test]
fn a_prompt_that_exceeds_the_cache_finds_what_fits() {
    let folder = tempfile::tempdir().unwrap();
    let without = open(folder.path(), 0);
    let prompt = random_prompt(&without, 5, &[30; 5], 9, 11);
    let expected = run(&without, &prompt, &Pie);
    let (layers, fits) = (without.decoder().shape().layers as u64, bytes(&without, 5 + 3 * 30));
    let engine = open(folder.path(), fits);
    for round in 0..4 {
        let found = run(&engine, &prompt, &Pie);
        assert_eq!(found.logits, expected.logits);
        assert_eq!(loaded(&found).2, if round == 0 { 0 } else { fits }, "round {round}");
        let stats = engine.device_chunk_stats();
        assert_eq!((stats.bytes, stats.hits), (fits, round * layers * (1 + 3)));
    }
    // Chunks of another prompt take the room of those that it does not use.
    let other = Prompt { chunks: random_prompt(&engine, 5, &[30; 4], 9, 12).chunks, ..prompt.clone() };
    let first = loaded(&run(&engine, &other, &Pie)).2;
    assert_eq!(first, bytes(&engine, 5), "the system part is common");
    assert_eq!(loaded(&run(&engine, &other, &Pie)).2, fits);
    assert_eq!(loaded(&run(&engine, &prompt, &Pie)).2, bytes(&engine, 5));
}

#[test]
fn a_removed_chunk_leaves_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open(folder.path(), 1 << 20);
    let prompt = prompt(&engine);
    let expected = run(&engine, &prompt, &Pie);
    let (store, id) = (engine.store(), engine.chunk_id(&prompt.chunks[1]));
    let all = engine.device_chunk_stats().bytes;
    let before = store.removals();
    let layer = store.get(&id).unwrap().unwrap().layer(0);
    assert!(store.remove(&id.key()).unwrap());
    assert_eq!(engine.device_chunk_stats().bytes, all - bytes(&engine, 33));
    // A loader that had opened the chunk before comes too late.
    let (chunks, device) = (engine.device_chunks(), &**engine.decoder().device());
    assert!(chunks.keep(device, (id.key(), 0), &layer, (0, before)).is_some());
    assert!(chunks.get(id.key(), 0).is_none());
    let again = run(&engine, &prompt, &Pie);
    assert_eq!((again.load.reused.prefilled, &again.logits), (1, &expected.logits));
    assert_eq!(loaded(&again).2, bytes(&engine, 5 + 40 + 21), "the others are still there");
    store.forget_memory();
    assert_eq!(engine.device_chunk_stats().bytes, 0);
}

#[test]
fn another_namespace_does_not_see_cached_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open(folder.path(), 1 << 20);
    let prompt = prompt(&engine);
    run(&engine, &prompt, &Pie);
    let other = engine.in_namespace("other", None);
    let got = run(&other, &prompt, &Pie);
    assert_eq!((got.load.reused.prefilled, loaded(&got).2), (4, 0));
}

#[test]
fn an_account_names_the_device_and_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open(folder.path(), 1 << 20);
    let prompt = prompt(&engine);
    let all = bytes(&engine, 5 + 40 + 33 + 21);
    let measure = |engine: &Engine| engine.measure(&prompt, &shared(Pie), Eviction::full()).unwrap();
    let (first, second) = (measure(&engine), measure(&engine));
    assert_eq!((first.device.as_str(), first.device_bytes_copied), ("emulated CUDA", all));
    assert_eq!((second.device_bytes_copied, second.device_bytes_reused, second.bytes_loaded), (0, all, 0));
    assert!(first.load_seconds > 0.0 && first.load_wait_seconds > 0.0);
    assert!((first.ttft - first.compute_ttft - first.load_wait_seconds).abs() < 1e-9);
    let cpu = super::Cpu::new(1).unwrap();
    let (name, cpu): (_, Arc<dyn Device>) = (cpu.name(), Arc::new(cpu));
    let engine =
        Engine::open_on(&cpu, &tiny("llama"), Store::open(folder.path(), 0).unwrap(), exact(KV), |_, _| ())
            .unwrap();
    let account = measure(&engine);
    assert_eq!((account.device, account.device_bytes_copied, account.device_bytes_reused), (name, 0, 0));
    assert_eq!(engine.device_chunk_stats(), DeviceChunkStats::default());
}
