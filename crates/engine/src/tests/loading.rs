//! Loading beside computing: where keys and values come from, and what breaks on the way, changes no bit.

use std::path::{Path, PathBuf};
use std::time::Instant;

use refrain_eviction::Eviction;
use refrain_fusion::{A3, FusionMethod, Pie, Vanilla};
use refrain_kernels::Dtype;
use refrain_kv::{CachePool, KvCache, Lender};
use refrain_store::{Problem, Store};

use super::{SMOLLM2, exact, prefill, random_prompt, real, tiny};
use crate::feed::{Feed, Load};
use crate::load::Prefilled;
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

fn run(engine: &Engine, prompt: &Prompt, method: &dyn FusionMethod) -> Prefilled {
    prefill(engine, prompt, method, prompt.len())
}

fn assert_same(a: &Prefilled, b: &Prefilled, what: &str) {
    assert_eq!(a.logits, b.logits, "{what}: logits");
    assert_eq!(a.work.final_rows, b.work.final_rows, "{what}: rows");
    for layer in 0..a.state.cache.shape().layers {
        assert_eq!(a.state.cache.layer(layer), b.state.cache.layer(layer), "{what}: layer {layer}");
        let (Some(a), Some(b)) = (&a.state.bounded, &b.state.bounded) else { continue };
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
            let fresh = run(&first, &prompt, method.as_ref());
            assert_eq!(fresh.loaded.repaired, if reuses { 4 } else { 0 }, "{}", entry.name);
            assert_eq!(fresh.loaded.bytes, 0);
            let memory = run(&first, &prompt, method.as_ref());
            assert_same(&fresh, &memory, entry.name);
            first.store().forget_memory();
            let disk = run(&first, &prompt, method.as_ref());
            assert_same(&fresh, &disk, entry.name);
            assert_eq!(disk.loaded.repaired, 0);
            // All layers were read, whoever needed them, and each chunk once: all of them are in memory now.
            let stats = first.store().stats();
            // Of a document of which parts are asked for nothing is kept; the system part always is.
            let expected = match (reuses, method.sparse()) {
                (false, _) => (0, 0),
                (true, None) => (4, 4),
                (true, Some(_)) => (1, 1),
            };
            assert_eq!((stats.disk_hits, stats.memory_chunks), expected, "{}", entry.name);
            assert_same(&fresh, &run(&first, &prompt, method.as_ref()), entry.name);
            assert_eq!(first.store().stats().disk_hits, stats.disk_hits, "{}", entry.name);
            // Without room in memory the layers pass through.
            let narrow = open(folder.path(), 0, exact(kv));
            assert_same(&fresh, &run(&narrow, &prompt, method.as_ref()), entry.name);
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
            let expected = run(&first, &prompt, method.as_ref());
            let broken = files(folder.path())[which].clone();
            break_last_layer(&broken);
            let second = open(folder.path(), 1 << 20, exact(Dtype::F16));
            let got = run(&second, &prompt, method.as_ref());
            assert_same(&expected, &got, "repaired");
            assert_eq!(got.loaded.repaired, 1, "{method:?}");
            let repairs = second.store().take_repairs();
            assert_eq!(repairs.len(), 1);
            assert_eq!(repairs[0].path, broken);
            assert!(repairs[0].removed && matches!(repairs[0].problem, Problem::Checksum(_)));
            // The file is whole again.
            assert_eq!(second.store().verify(|_| ()).unwrap().whole, 4);
            assert_eq!(run(&second, &prompt, method.as_ref()).loaded.repaired, 0);
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
        let expected = run(&first, &prompt, method.as_ref());
        let chunk = files(folder.path()).into_iter().find(|path| {
            // The system part has none.
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            stem != first.system_id(&prompt.system).key().to_string()
        });
        let kind = method.summarizes()[0].kind();
        let summary = chunk.unwrap().with_extension(format!("{kind}.summary"));
        break_last_layer(&summary);
        let second = open(folder.path(), 1 << 20, exact(Dtype::F16));
        let got = run(&second, &prompt, method.as_ref());
        assert_same(&expected, &got, "repaired");
        let repairs = second.store().take_repairs();
        assert_eq!((got.loaded.repaired, repairs.len()), (1, 1), "{name}");
        assert!(repairs[0].removed && repairs[0].path == summary, "{repairs:?}");
        assert_eq!(run(&second, &prompt, method.as_ref()).loaded.repaired, 0);
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
    assert_eq!((got.loaded.repaired, second.store().take_repairs().len()), (4, 4));
}

/// Layer 0 is not used by a method that computes all of it; the chunk is broken all the same.
#[test]
fn a_broken_layer_that_nobody_needs_is_told_too() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let prompt = prompt(&first);
    let expected = run(&first, &prompt, &A3::default());
    let id = first.chunk_id(&prompt.chunks[1].tokens);
    let path = first.store().show(&id.key()).unwrap().info.path.unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let start = bytes.len() - first.store().get(&id).unwrap().unwrap().bytes();
    bytes[start] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let second = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let got = run(&second, &prompt, &A3::default());
    assert_same(&expected, &got, "repaired");
    assert_eq!(got.loaded.repaired, 1);
    assert_eq!(second.store().take_repairs()[0].problem, Problem::Checksum(0));
}

/// With repair off, a chunk that breaks midway is computed within the prompt, as one that was never there.
#[test]
fn a_broken_chunk_may_be_left_to_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { repair: false, ..exact(Dtype::F32) };
    let first = open(folder.path(), 1 << 20, exact(Dtype::F32));
    let prompt = prompt(&first);
    run(&first, &prompt, &Pie);
    let id = first.chunk_id(&prompt.chunks[0].tokens);
    let path = first.store().show(&id.key()).unwrap().info.path.unwrap();
    break_last_layer(&path);
    let broken = open(folder.path(), 1 << 20, settings.clone());
    let got = run(&broken, &prompt, &Pie);
    assert_eq!((got.loaded.repaired, got.loaded.chunk_cached.clone()), (0, vec![false, true, true, false]));
    let missing = open(folder.path(), 1 << 20, settings);
    assert!(!path.exists());
    assert_same(&run(&missing, &prompt, &Pie), &got, "left to the prompt");
}

#[test]
fn loading_is_accounted() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open(folder.path(), 1 << 20, exact(Dtype::F16));
    let prompt = prompt(&engine);
    engine.measure(&prompt, &Pie, Eviction::full()).unwrap();
    engine.store().forget_memory();
    let all = (prompt.len() - prompt.question.len()) * engine.decoder().shape().token_bytes(Dtype::F16);
    for _ in 0..2 {
        let account = engine.measure(&prompt, &Pie, Eviction::full()).unwrap();
        assert_eq!(account.bytes_loaded, all as u64);
        assert!(account.load_seconds > 0.0 && account.ttft >= account.compute_ttft);
        assert!(account.compute_ttft > 0.0);
    }
    let vanilla = engine.measure(&prompt, &Vanilla, Eviction::full()).unwrap();
    assert_eq!((vanilla.bytes_loaded, vanilla.load_seconds), (0, 0.0));
}

/// Loading alone, from the page cache and from memory, beside a copy of as many bytes by one thread and by all.
/// `cargo test --release -p refrain-engine --lib -- --ignored --nocapture speed_of_loading`
#[test]
#[ignore = "a measurement"]
fn speed_of_loading() {
    let Some(path) = real(SMOLLM2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path(), 1 << 30).unwrap();
    let engine = Engine::open(&path, store, Settings::default(), |_, _| ()).unwrap();
    let prompt = random_prompt(&engine, 30, &[512; 8], 20, 3);
    let room = prompt.len();
    drop(run(&engine, &prompt, &Pie));
    let threads = engine.decoder().backend().threads();
    let load = |threads: usize| {
        let started = Instant::now();
        let loaded = engine.open_parts(&prompt, &Pie, room).unwrap();
        let opened = started.elapsed();
        let plan = Pie.plan(&engine.view(&prompt, true, &prompt.places(|_| true))).unwrap();
        let cache = KvCache::vacant(engine.decoder().shape(), Dtype::F16, room);
        let table = engine.decoder().ropes(room).tables(0..room as u32);
        let planned = started.elapsed();
        let pool = CachePool::default();
        let (lender, ahead) = (Lender::new(&pool), cache.shape().layers);
        let backend = engine.decoder().backend();
        let load = Load::new(&loaded.segments, &plan, &table, &cache, &lender, ahead, backend);
        let layers = std::thread::scope(|scope| {
            let mut feed = Feed::start(scope, &load, threads);
            (0..cache.shape().layers)
                .map(|layer| feed.take(layer, || Ok(())).unwrap().unwrap())
                .collect::<Vec<_>>()
        });
        let wall = started.elapsed();
        drop(layers);
        let (bytes, busy, _) = load.finish();
        println!(
            "  {threads} loaders: {:.2} GB/s, {wall:?} ({opened:?} opening, {:?} table, {busy:?} busy)",
            bytes as f64 / 1e9 / wall.as_secs_f64(),
            planned - opened
        );
        bytes
    };
    let mut bytes = 0;
    for round in 0..6 {
        println!("round {round}");
        for threads in [1, threads] {
            engine.store().forget_memory();
            print!("disk  ");
            bytes = load(threads);
            print!("memory");
            load(threads);
        }
        let source = vec![1u8; bytes as usize];
        let mut copy = vec![2u8; bytes as usize];
        for threads in [1, threads] {
            let each = bytes as usize / threads;
            let started = Instant::now();
            std::thread::scope(|scope| {
                for (from, to) in source.chunks(each).zip(copy.chunks_mut(each)) {
                    scope.spawn(|| to.copy_from_slice(from));
                }
            });
            println!("memcpy {threads}: {:.2} GB/s", bytes as f64 / 1e9 / started.elapsed().as_secs_f64());
        }
        assert_eq!(copy[bytes as usize / 2], 1);
    }
}
