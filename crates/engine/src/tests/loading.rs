//! Loading beside computing: where keys and values come from, and what breaks on the way, changes no bit.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_eviction::Eviction;
use refrain_fusion::{A3, Drift, FusionMethod, PassPlan, Pie, Vanilla};
#[cfg(feature = "emulate")]
use refrain_kernels::Precision;
use refrain_kernels::{Cpu, Device, Dtype};
use refrain_kv::{KvAllocator, Span};
#[cfg(feature = "emulate")]
use refrain_model::{Decoder, ModelFiles};
use refrain_store::Store;

#[cfg(feature = "emulate")]
use super::{SMOLLM2, real};
use super::{exact, prefill, random_prompt, shared, small, tiny};
use crate::advance::PATIENCE;
use crate::prefill::{LayerPrefetcher, PrefetchSizes, Prefetched, Prefilled};
use crate::{Engine, Prompt, Settings};

fn open(folder: &Path, memory: u64, settings: Settings) -> Engine {
    Engine::open(&tiny("llama"), Store::open(folder, memory).unwrap(), settings, |_, _| ()).unwrap()
}

/// The first chunk comes twice.
fn prompt(engine: &Engine) -> Prompt {
    let mut prompt = random_prompt(engine, 5, &[40, 33, 21], 9, 11);
    prompt.chunks.push(prompt.chunks[0].clone());
    prompt
}

fn run(engine: &Engine, prompt: &Prompt, method: &(impl FusionMethod + Clone + 'static)) -> Prefilled {
    prefill(engine, prompt, method, prompt.len())
}

fn assert_same(a: &Prefilled, b: &Prefilled, what: &str) {
    assert_eq!(a.logits, b.logits, "{what}: logits");
    assert_eq!(a.stats.final_rows, b.stats.final_rows, "{what}: rows");
    for layer in 0..a.cache.decoder.config().num_layers() {
        assert_eq!(a.layer(layer), b.layer(layer), "{what}: layer {layer}");
        let (Some(a), Some(b)) = (a.evicting(), b.evicting()) else { continue };
        assert_eq!(a.positions(layer, 0), b.positions(layer, 0), "{what}: layer {layer}");
        assert_eq!(a.keys(layer, 0), b.keys(layer, 0), "{what}: layer {layer}");
    }
}

/// Files of all chunks, system part included.
fn files(folder: &Path) -> Vec<PathBuf> {
    let inside = |path: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let all = inside(folder);
    let files = all.iter().filter(|path| path.is_dir()).flat_map(|path| inside(path));
    files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect()
}

/// Flips a bit of the last layer: the header and all layers before are whole.
fn break_last_layer(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let last = bytes.len() - 9;
    bytes[last] ^= 4;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn memory_disk_and_fresh_chunks_give_the_same_bits() {
    for kv in [Dtype::F16, Dtype::F32] {
        for entry in refrain_fusion::METHODS.entries {
            let method = entry.with([]).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let reuses = method.reuses();
            let first = open(folder.path(), 1 << 20, exact(kv));
            let prompt = prompt(&first);
            let fresh = run(&first, &prompt, &method);
            assert_eq!(fresh.load.reused.prefilled, if reuses { 4 } else { 0 }, "{}", entry.name);
            assert_eq!(fresh.load.reused.load.bytes, 0);
            let memory = run(&first, &prompt, &method);
            assert_same(&fresh, &memory, entry.name);
            first.store().forget_memory();
            let disk = run(&first, &prompt, &method);
            assert_same(&fresh, &disk, entry.name);
            assert_eq!(disk.load.reused.prefilled, 0);
            // All layers were read, needed or not, and each chunk once: all of them are in memory now.
            let stats = first.store().stats();
            // Of a document of which parts are asked for nothing is kept; the system part always is.
            let expected = match (reuses, method.keeps_all_tokens()) {
                (false, _) => (0, 0),
                (true, true) => (4, 4),
                (true, false) => (1, 1),
            };
            assert_eq!((stats.disk_hits, stats.memory_chunks), expected, "{}", entry.name);
            assert_same(&fresh, &run(&first, &prompt, &method), entry.name);
            assert_eq!(first.store().stats().disk_hits, stats.disk_hits, "{}", entry.name);
            // Without room in memory the layers pass through.
            let narrow = open(folder.path(), 0, exact(kv));
            assert_same(&fresh, &run(&narrow, &prompt, &method), entry.name);
            assert_eq!(narrow.store().stats().memory_chunks, 0);
        }
    }
}

#[test]
fn a_chunk_whose_last_layer_is_broken_might_as_well_be_missing() {
    for method in refrain_fusion::METHODS.entries {
        let method = method.with([]).unwrap();
        if !method.reuses() {
            continue;
        }
        for which in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let first = open(folder.path(), 1 << 20, exact(Dtype::F16));
            let prompt = prompt(&first);
            let expected = run(&first, &prompt, &method);
            break_last_layer(&files(folder.path())[which]);
            let second = open(folder.path(), 1 << 20, exact(Dtype::F16));
            let got = run(&second, &prompt, &method);
            assert_same(&expected, &got, "repaired");
            assert_eq!(second.store().stats().removed, 1);
            // A layer that the answer did not need is found broken after it, and made again for the next one.
            let next = run(&second, &prompt, &method);
            assert_same(&expected, &next, "repaired");
            assert_eq!(got.load.reused.prefilled + next.load.reused.prefilled, 1, "{method:?}");
            // The file is whole again.
            assert_eq!(second.store().verify(|_| ()).unwrap().whole, 4);
            assert_eq!(run(&second, &prompt, &method).load.reused.prefilled, 0);
        }
    }
}

#[test]
fn a_broken_summary_is_made_again() {
    for name in ["sam_kv", "multi_inf_llm"] {
        let method = refrain_fusion::METHODS.parse(name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let first = open(folder.path(), 1 << 20, exact(Dtype::F16));
        let prompt = prompt(&first);
        let expected = run(&first, &prompt, &method);
        let chunk = files(folder.path()).into_iter().find(|path| {
            // The system part has none.
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            stem != first.system_id(&prompt.system).key().to_string()
        });
        let kind = method.statistics()[0].kind();
        let summary = chunk.unwrap().with_extension(format!("{kind}.summary"));
        break_last_layer(&summary);
        let second = open(folder.path(), 1 << 20, exact(Dtype::F16));
        let got = run(&second, &prompt, &method);
        assert_same(&expected, &got, "repaired");
        assert_eq!((got.load.reused.prefilled, second.store().stats().removed), (1, 1), "{name}");
        assert_eq!(run(&second, &prompt, &method).load.reused.prefilled, 0);
    }
}

/// All of them are found in one go, and told one by one.
#[test]
fn many_broken_chunks_are_repaired_together() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let prompt = prompt(&first);
    let expected = run(&first, &prompt, &A3::default());
    files(folder.path()).iter().for_each(|file| break_last_layer(file));
    let second = open(folder.path(), 0, exact(Dtype::F16));
    let got = run(&second, &prompt, &A3::default());
    assert_same(&expected, &got, "repaired");
    assert_eq!((got.load.reused.prefilled, second.store().stats().removed), (4, 4));
}

/// Layer 0 is not used by a method that computes all of it: a broken one is told, and the finished prefill stands.
#[test]
fn a_broken_layer_that_was_not_needed_is_told_and_the_prefill_stands() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let prompt = prompt(&first);
    let expected = run(&first, &prompt, &A3::default());
    let id = first.chunk_id(&prompt.chunks[1]);
    let path = first.store().show(&id.key()).unwrap().info.path.unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let start = bytes.len() - first.store().get(&id).unwrap().unwrap().bytes();
    bytes[start] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let second = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let got = run(&second, &prompt, &A3::default());
    assert_same(&expected, &got, "found broken");
    assert_eq!(got.load.reused.prefilled, 0, "nothing is computed twice");
    assert_eq!(second.store().stats().removed, 1);
    let next = run(&second, &prompt, &A3::default());
    assert_same(&expected, &next, "made again");
    assert_eq!(next.load.reused.prefilled, 1);
}

/// The loaders that are left wait for their turn, which the layer of the one that panicked would have to come before.
#[test]
fn a_loader_that_panics_is_told_and_not_waited_for() {
    let device: Arc<dyn Device> = Arc::new(Cpu::new(2).unwrap());
    let engine =
        Engine::open_on(&device, &tiny("llama"), Store::in_memory(1 << 20), small(), |_, _| ()).unwrap();
    let (prompt, decoder) = (prompt(&engine), engine.decoder());
    let mut segments = run(&engine, &prompt, &Pie).load.reused.segments.to_vec();
    // Beyond all positions that there are.
    segments[0].span = Span::new(1000, 1040);
    let (shape, dtype) = (decoder.shape(), engine.settings().kv);
    let sizes =
        PrefetchSizes { shape, dtype, capacity: prompt.len(), first: 0, layers: shape.layers, ahead: 0 };
    let mut prefetcher = LayerPrefetcher::start(
        segments.into(),
        &PassPlan::new(prompt.question_span().positions().collect()),
        decoder.rope_tables(prompt.len(), prompt.len()),
        sizes,
        &KvAllocator::new(device.clone(), Arc::default()),
        (&device, engine.device_chunks()),
    );
    let started = Instant::now();
    let polled = loop {
        match prefetcher.poll(0, PATIENCE) {
            Prefetched::Waiting if started.elapsed() < Duration::from_secs(5) => {}
            polled => break polled,
        }
    };
    assert!(matches!(polled, Prefetched::Broken), "{polled:?}");
}

#[test]
fn loading_is_accounted() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let prompt = prompt(&engine);
    engine.measure(&prompt, &shared(Pie), Eviction::full()).unwrap();
    engine.store().forget_memory();
    let all = (prompt.len() - prompt.question.len()) * engine.decoder().shape().token_bytes(Dtype::F16);
    for _ in 0..2 {
        let account = engine.measure(&prompt, &shared(Pie), Eviction::full()).unwrap();
        assert_eq!(account.bytes_loaded, all as u64);
        assert!(account.load_seconds > 0.0 && account.ttft >= account.compute_ttft);
        assert!(account.compute_ttft > 0.0);
    }
    let vanilla = engine.measure(&prompt, &shared(Vanilla), Eviction::full()).unwrap();
    assert_eq!((vanilla.bytes_loaded, vanilla.load_seconds), (0, 0.0));
}

/// The first pass of the question goes through a part of the layers: the last pass takes them over, and loads the others.
#[test]
fn layers_of_a_first_pass_are_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let prompt = prompt(&first);
    let expected = run(&first, &prompt, &Pie);
    let bytes = |prefilled: &Prefilled| prefilled.load.reused.bytes_read();
    let second = || open(folder.path(), 1 << 20, exact(Dtype::F16));
    let pie = run(&second(), &prompt, &Pie);
    assert!(bytes(&pie) > 0 && expected.logits == pie.logits);
    for to in [0.4, 0.95, 1.0] {
        let method = Drift { charge: 0.5, from: 0.0, to, ..Drift::default() };
        let drift = run(&second(), &prompt, &method);
        assert!(drift.stats.probe_rows > 0, "the question has a first pass");
        assert_eq!(bytes(&drift), bytes(&pie), "first pass up to {to}");
    }
}

#[test]
#[cfg(feature = "emulate")]
fn weights_are_counted_before_they_are_loaded() {
    let every = [Precision::F32, Precision::Bf16, Precision::Q8];
    let tiny = ["llama", "qwen2", "qwen3_moe", "phi3"].map(|name| (tiny(name), &every[..]));
    for (path, precisions) in tiny.into_iter().chain(real(SMOLLM2).map(|path| (path, &every[2..]))) {
        for precision in precisions {
            let gpu = refrain_cuda::Emulated::new(1);
            let device: Arc<dyn Device> = Arc::new(refrain_cuda::CudaDevice::new(gpu.clone(), 2).unwrap());
            let files = ModelFiles::open(&path).unwrap();
            let counted = Decoder::bytes_of(&files, &*device, *precision).unwrap();
            assert_eq!(gpu.take_peak(), 0, "nothing is packed");
            let decoder = Decoder::load(files, &device, *precision, None, |_, _| ()).unwrap();
            let loaded = (gpu.take_peak() as usize, decoder.weight_bytes() + decoder.table_bytes());
            assert_eq!(loaded, (counted, counted), "{}, {precision}", path.display());
        }
    }
}

#[test]
#[cfg(feature = "emulate")]
fn embeddings_of_a_gpu_are_those_of_the_file_to_the_bit() {
    // Embeddings of llama are f16, and are read from the file. Those of phi3, which has an output projection beside them, of qwen2 and of gemma3, which scales
    // them, are bf16.
    for (name, is_bf16) in [("llama", false), ("phi3", true), ("qwen2", true), ("gemma3", true)] {
        for precision in [Precision::F32, Precision::Bf16] {
            let gpu = refrain_cuda::Emulated::new(2);
            let cuda: Arc<dyn Device> = Arc::new(refrain_cuda::CudaDevice::new(gpu.clone(), 2).unwrap());
            let cpu: Arc<dyn Device> = Arc::new(Cpu::new(2).unwrap());
            let [cpu, cuda] = [cpu, cuda].map(|device| {
                let files = ModelFiles::open(tiny(name)).unwrap();
                Decoder::load(files, &device, precision, None, |_, _| ()).unwrap()
            });
            let (ids, before) = ([5, 0, 5, 9], gpu.written());
            let embedded = |decoder: &Decoder| {
                let mut x = decoder.device().floats(0);
                decoder.embed(ids.len(), |row| ids[row], &mut x).unwrap();
                assert!(decoder.embed(1, |_| u32::MAX, &mut decoder.device().floats(0)).is_err(), "{name}");
                refrain_kernels::download(&**decoder.device(), &x)
            };
            let bits = |x: Vec<f32>| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            let expected = bits(embedded(&cpu));
            assert_eq!(bits(embedded(&cuda)), expected, "{name}, {precision}");
            let row = 4 * cuda.config().hidden as u64;
            let copied = gpu.written() - before;
            assert_eq!(copied < 4 * row, is_bf16, "{name}, {precision}: {copied} bytes");
        }
    }
}

#[test]
#[cfg(feature = "emulate")]
fn a_model_that_does_not_fit_into_a_gpu_is_refused_with_the_numbers() {
    let gpu = refrain_cuda::Emulated::with_memory(1, 20_000);
    let device: Arc<dyn Device> = Arc::new(refrain_cuda::CudaDevice::new(gpu, 1).unwrap());
    let opened = Engine::open_on(&device, &tiny("llama"), Store::in_memory(1 << 20), small(), |_, _| ());
    let error = opened.unwrap_err().to_string();
    assert!(error.starts_with("cannot compute on emulated CUDA: the model's weights take"), "{error}");
    assert!(error.ends_with("MiB there, and 0.0 MiB are free"), "{error}");
}
