//! A device with memory of its own: what does not fit is refused, what runs out ends alone, and the numbers are those of what is done.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_cuda::{CudaDevice, Driver as _, Emulated};
use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{CacheBlend, FusionMethod, METHODS, PassPlan, Pie, Vanilla};
use refrain_kernels::{Device, DeviceFailure, Dtype};
use refrain_kv::{KvAllocator, KvCache, LayerCache};
use refrain_store::Store;

use super::{exact, prefill, random_prompt, shared, tiny};
use crate::advance::PATIENCE;
use crate::decode::{DecodeWorkspace, decode_step};
use crate::prefill::{LayerPrefetcher, PrefetchSizes, Prefetched, Prefilled};
use crate::prefix_cache::{BLOCK, PrefixCache, PrefixRoot, hash, namespace_hash};
use crate::{Advance, Document, Engine, Error, GenerateRequest, Prompt, Sampling, Sequence, Settings};

const MEMORY: u64 = 64 << 20;

/// A tiny model on an emulated GPU, which the driver has others take memory of.
fn on_gpu(store: Store, settings: Settings) -> (Engine, Emulated) {
    let gpu = Emulated::with_memory(1, MEMORY);
    let device: Arc<dyn Device> = Arc::new(CudaDevice::new(gpu.clone(), 1).unwrap());
    (Engine::open_on(&device, &tiny("llama"), store, settings, |_, _| ()).unwrap(), gpu)
}

/// Settings of an engine that keeps no chunks in the GPU's memory.
fn without_chunks() -> Settings {
    Settings { device_chunk_bytes: 0, ..exact(Dtype::F16) }
}

fn in_memory(settings: Settings) -> (Engine, Emulated) {
    on_gpu(Store::in_memory(1 << 24), settings)
}

fn prompt(engine: &Engine) -> Prompt {
    random_prompt(engine, 5, &[40, 33], 9, 11)
}

fn request(method: impl FusionMethod + 'static, tokens: usize) -> GenerateRequest {
    GenerateRequest::new(shared(method), Sampling { max_tokens: tokens, ..Sampling::default() })
}

/// Takes all memory but so many bytes.
fn take(gpu: &Emulated, left: u64) -> impl Drop + use<> {
    gpu.alloc((gpu.memory().1 - left) as usize).unwrap()
}

fn sequence(engine: &Engine, prompt: &Prompt, tokens: usize) -> Sequence {
    let mut prefill = engine.prefill(prompt, request(Vanilla, tokens)).unwrap();
    while prefill.advance().unwrap() != Advance::Done {}
    prefill.finish().unwrap()
}

/// The end of the loading of a prompt's first layer.
fn first_layer(engine: &Engine, found: &Prefilled, prompt: &Prompt) -> Prefetched {
    let (decoder, dtype) = (engine.decoder(), Dtype::F16);
    let (shape, device) = (decoder.shape(), decoder.device());
    let sizes =
        PrefetchSizes { shape, dtype, capacity: prompt.len(), first: 0, layers: shape.layers, ahead: 0 };
    let mut prefetcher = LayerPrefetcher::start(
        found.load.reused.segments.clone(),
        &PassPlan::new(prompt.question_span().positions().collect()),
        decoder.rope_tables(prompt.len(), prompt.len()),
        sizes,
        &KvAllocator::new(device.clone(), engine.buffers().kv.clone()),
        (device, engine.device_chunks()),
    );
    let started = Instant::now();
    loop {
        match prefetcher.poll(0, PATIENCE) {
            Prefetched::Waiting if started.elapsed() < Duration::from_secs(5) => {}
            polled => return polled,
        }
    }
}

fn document() -> Document {
    Document { title: String::new(), text: "one two three four".to_owned() }
}

fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::DeviceFailure(DeviceFailure::OutOfMemory { .. }))
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_before_it_starts() {
    let (engine, gpu) = in_memory(without_chunks());
    let (prompt, launches) = (prompt(&engine), gpu.launches());
    let others = take(&gpu, 60_000);
    let error = engine.prefill(&prompt, request(Pie, 30)).unwrap_err();
    let Error::DeviceMemory { ref device, tokens, kv, activations, free } = error else { panic!("{error}") };
    assert_eq!((device.as_str(), tokens, free), ("emulated CUDA", prompt.len() + 30, 60_000));
    let token_bytes = engine.decoder().shape().token_bytes(Dtype::F16);
    assert_eq!(kv, (tokens * token_bytes) as u64);
    let numbers = format!("{:.1} MiB", (kv + activations) as f64 / f64::from(1 << 20));
    assert!(
        error.to_string().contains(&numbers) && error.to_string().contains("0.1 MiB are free"),
        "{error}"
    );
    let more = take(&gpu, 5000);
    let error = engine.ingest(&[document()], |_| ()).unwrap_err();
    assert!(matches!(error, Error::DeviceMemory { .. }), "{error}");
    assert_eq!(gpu.launches(), launches, "nothing was begun");
    drop((others, more));
    engine.prefill(&prompt, request(Pie, 30)).unwrap().run().unwrap();
}

#[test]
fn requests_have_what_weights_steps_and_the_prefix_cache_leave() {
    let (engine, gpu) = in_memory(without_chunks());
    let memory = engine.request_memory(8, 4).unwrap().unwrap();
    assert_eq!((memory.free, memory.margin, memory.prefix_cache), (gpu.memory().1, MEMORY / 20, 0));
    assert_eq!(memory.requests, memory.free - memory.steps - memory.margin);
    let cached = engine.with_prefix_cache(1 << 20);
    assert_eq!(cached.request_memory(8, 4).unwrap().unwrap().requests, memory.requests - (1 << 20));
    assert!(engine.request_memory(800, 4).unwrap().unwrap().requests < memory.requests);
    let prompt = prompt(&engine);
    assert!(engine.prompt_bytes(&prompt, &Pie, Eviction::full()) > 0);
    let _others = take(&gpu, memory.steps + memory.margin + 50_000);
    let error = engine.request_memory(8, 4).unwrap_err().to_string();
    assert!(error.starts_with("cannot compute on emulated CUDA: of "), "{error}");
    assert!(error.contains("a prompt of 256 tokens takes") && error.contains("--ubatch-size"), "{error}");

    let store = Store::in_memory(1 << 20);
    let on_cpu = Engine::open(&tiny("llama"), store, without_chunks(), |_, _| ()).unwrap();
    assert_eq!(on_cpu.request_memory(8, 4).unwrap(), None);
    assert_eq!(on_cpu.prompt_bytes(&prompt, &Pie, Eviction::full()), 0);
}

/// The memory that an answer of 20 tokens takes on a GPU at most, and what is counted before it starts, which bounds it.
fn peak_and_count(
    (engine, gpu): &(Engine, Emulated),
    prompt: &Prompt,
    method: &Arc<dyn FusionMethod>,
    eviction: &Eviction,
) -> (u64, u64) {
    let (_, before) = (gpu.take_peak(), MEMORY - gpu.memory().1);
    let request = GenerateRequest {
        eviction: eviction.clone(),
        ..GenerateRequest::new(
            method.clone(),
            Sampling { max_tokens: 20, min_tokens: 20, ..Sampling::default() },
        )
    };
    let answer = engine.answer(prompt, &request, |_| true).unwrap();
    assert_eq!(answer.tokens.len(), 20);
    let (taken, room) = (gpu.take_peak() - before, prompt.len() + 20);
    let (kv, activations) = engine.memory_of_prompt(prompt, method, room, eviction).unwrap();
    let counted = kv + activations;
    assert!(taken <= counted, "{method:?} with {eviction:?} took {taken} of {counted}");
    (taken, counted)
}

#[test]
fn a_prompt_takes_no_more_than_was_counted() {
    for settings in [without_chunks(), Settings { ubatch: 32, ..super::small() }] {
        let on_gpu = in_memory(settings);
        let (engine, gpu) = &on_gpu;
        let prompt = random_prompt(engine, 5, &[140, 133], 29, 11);
        for entry in METHODS.entries {
            peak_and_count(&on_gpu, &prompt, &entry.with([]).unwrap(), Eviction::full());
        }
        for policy in [
            "streaming_llm:capacity=64",
            "snap_kv:capacity=64",
            "h2o:capacity=64",
            "snap_kv:capacity=64,per_query_head",
            "full:per_query_head",
        ] {
            for method in [shared(Vanilla), shared(Pie), shared(CacheBlend::default())] {
                peak_and_count(&on_gpu, &prompt, &method, &POLICIES.parse(policy).unwrap());
            }
        }
        let free = gpu.memory().1;
        // A layer at which a method chooses has all rows at once.
        let method = shared(CacheBlend::default());
        let (taken, counted) = peak_and_count(&on_gpu, &prompt, &method, Eviction::full());
        assert_eq!(gpu.memory().1, free, "nothing is kept for the next prompt");
        assert!(counted < 2 * taken, "{taken} of {counted}");
    }
}

/// The prefix cache is counted once: what makes room for further rows goes before they are copied.
#[test]
fn the_prefix_cache_never_takes_more_than_its_bound() {
    let (engine, gpu) = in_memory(without_chunks());
    let (device, shape) = (engine.decoder().device(), engine.decoder().shape());
    let (slots, bound) = (6 * BLOCK, 8 * BLOCK * shape.token_bytes(Dtype::F16));
    let mut rows = KvCache::vacant(&**device, shape, Dtype::F16, slots);
    (0..shape.layers)
        .for_each(|layer| rows.install(layer, LayerCache::new(&**device, shape, Dtype::F16, slots)));
    let cache = PrefixCache::new(bound);
    let namespaces = [Some(namespace_hash("a")), None];
    let root = PrefixRoot { hash: hash(&[b"root"], &[]), fused: None, namespaces, forgotten: 0 };
    let (_, before) = (gpu.take_peak(), MEMORY - gpu.memory().1);
    for first in 0..4u32 {
        let ids: Vec<u32> = (0..slots as u32).map(|i| i + 1000 * first).collect();
        cache.insert(&**device, &root, &ids, &rows);
        assert_eq!(cache.bytes(), 6 * BLOCK * shape.token_bytes(Dtype::F16), "the run before has gone");
    }
    let taken = gpu.take_peak() - before;
    assert!(taken <= bound as u64, "{taken} of {bound}");
}

/// Where a policy bounds the cache, two layers of the prompt are there at a time. Only a method that reuses some has further ones brought in ahead.
#[test]
fn a_bounded_cache_is_counted_with_the_layers_that_are_there_at_a_time() {
    let policy = POLICIES.parse("streaming_llm:capacity=64").unwrap();
    for threads in [1, 16] {
        let device = CudaDevice::new(Emulated::with_memory(1, MEMORY), threads).unwrap();
        let device: Arc<dyn Device> = Arc::new(device);
        let store = Store::in_memory(1 << 20);
        let engine = Engine::open_on(&device, &tiny("llama"), store, without_chunks(), |_, _| ()).unwrap();
        let prompt = random_prompt(&engine, 5, &[140, 133], 29, 11);
        let beside = |method: &dyn FusionMethod, eviction: &Eviction| {
            engine.memory_of_prompt(&prompt, method, prompt.len() + 20, eviction).unwrap().1
        };
        let shape = engine.decoder().shape();
        let layer = (prompt.len() * shape.token_bytes(Dtype::F16) / shape.layers) as u64;
        assert_eq!(
            beside(&Vanilla, &policy) - beside(&Vanilla, Eviction::full()),
            2 * layer,
            "{threads} threads"
        );
        assert!(beside(&Pie, &policy) - beside(&Pie, Eviction::full()) > 2 * layer, "{threads} threads");
        // A layer is expanded to a copy for each query head of a group.
        let expanded = POLICIES.parse("streaming_llm:capacity=64,per_query_head").unwrap();
        let config = engine.decoder().config();
        let layers = (1 + config.heads / config.kv_heads) as u64;
        assert!(layers > 2);
        assert_eq!(beside(&Vanilla, &expanded) - beside(&Vanilla, Eviction::full()), layers * layer);
    }
}

/// Methods whose computed rows are known before the prompt starts are counted with these, and not with all rows.
#[test]
fn rows_that_are_reused_are_not_counted_as_computed() {
    let on_gpu = in_memory(without_chunks());
    let prompt = random_prompt(&on_gpu.0, 5, &[40; 11], 19, 11);
    for method in [
        "pie",
        "full_reuse",
        "lego_link:window=4",
        "lego_link:charge=0.1",
        "prophet_kv:ratio=0.1",
        "prophet_kv:charge=0.1",
        "info_flow:ratio=0.1",
        "info_flow:ratio=0.1,reorder=true",
        "scout:charge=0.1",
        "drift:charge=0.1",
    ] {
        let method = METHODS.parse(method).unwrap();
        // Chunks are prefilled once.
        peak_and_count(&on_gpu, &prompt, &method, Eviction::full());
        let (taken, counted) = peak_and_count(&on_gpu, &prompt, &method, Eviction::full());
        // All rows would be four times as many and more. scout and drift may compute twice the question where chunks are exact.
        assert!(counted <= 2 * taken, "{method:?} took {taken} of {counted}");
    }
}

#[test]
fn chunks_in_the_gpus_memory_are_counted_and_make_room_for_prompts() {
    let (engine, gpu) = in_memory(Settings { device_chunk_bytes: 1 << 20, ..exact(Dtype::F16) });
    let (memory, prompt) =
        (engine.request_memory(8, 4).unwrap().unwrap(), random_prompt(&engine, 5, &[40; 11], 19, 11));
    assert_eq!(memory.device_chunks, 1 << 20);
    assert_eq!(memory.requests, memory.free - memory.steps - memory.margin - (1 << 20));
    engine.prefill(&prompt, request(Pie, 1)).unwrap().run().unwrap();
    let held = engine.device_chunk_stats().bytes;
    assert!(held > 0);
    let (kv, activations) =
        engine.memory_of_prompt(&prompt, &Pie, prompt.len() + 1, Eviction::full()).unwrap();
    let others = take(&gpu, kv + activations - held / 2);
    engine.prefill(&prompt, request(Pie, 1)).unwrap().run().unwrap();
    drop(others);
    // Chunks get none of the memory that the prompt takes.
    engine.device_chunks().clear();
    let others = take(&gpu, kv + activations);
    engine.prefill(&prompt, request(Pie, 1)).unwrap().run().unwrap();
    assert_eq!(engine.device_chunk_stats().bytes, 0);
    drop(others);
    // A layer that there is no memory for is not kept, and those that are go.
    let found = prefill(&engine, &prompt, &Pie, prompt.len());
    assert!(engine.device_chunk_stats().bytes > 0);
    let reader = &found.load.reused.segments[0].reader;
    gpu.fragment(100);
    let (device, layer) = (engine.decoder().device(), reader.layer(0).unwrap());
    assert!(engine.device_chunks().keep(&**device, (reader.id().key(), 0), &layer, (0, 0)).is_none());
    assert_eq!(engine.device_chunk_stats().bytes, 0);
}

#[test]
fn chunks_get_none_of_the_memory_of_a_prompt_that_is_under_way() {
    let (engine, gpu) = in_memory(Settings { device_chunk_bytes: 1 << 20, ..exact(Dtype::F16) });
    let (large, small) = (random_prompt(&engine, 5, &[40; 11], 19, 11), prompt(&engine));
    let (kv, activations) = engine.memory_of_prompt(&large, &Pie, large.len() + 1, Eviction::full()).unwrap();
    let others = take(&gpu, kv + activations);
    let begun = engine.prefill(&large, request(Pie, 1)).unwrap();
    drop(others);
    // It leaves room for chunks, and does not end that of the prompt before.
    let held = || {
        engine.prefill(&small, request(Pie, 1)).unwrap().run().unwrap();
        engine.device_chunk_stats().bytes
    };
    assert_eq!(held(), 0);
    drop(begun);
    assert!(held() > 0);
}

#[test]
fn chunks_in_the_gpus_memory_make_room_for_layers_that_are_brought_in() {
    let (engine, gpu) = in_memory(Settings { device_chunk_bytes: 1 << 20, ..exact(Dtype::F16) });
    let prompt = prompt(&engine);
    let found = prefill(&engine, &prompt, &Pie, prompt.len());
    assert!(engine.device_chunk_stats().bytes > 0);
    // Others take memory after the prompt was counted.
    let _others = take(&gpu, 100);
    let polled = first_layer(&engine, &found, &prompt);
    assert!(matches!(polled, Prefetched::Ready(_)), "{polled:?}");
}

/// Nothing of a chunk is lost or made again for want of memory.
#[test]
fn a_loader_that_runs_out_of_memory_leaves_the_chunk_in_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = || Store::open(folder.path(), 1 << 24).unwrap();
    let (first, _gpu) = on_gpu(store(), without_chunks());
    let prompt = prompt(&first);
    let expected = prefill(&first, &prompt, &Pie, prompt.len());
    let (engine, gpu) = on_gpu(store(), without_chunks());

    let found = prefill(&engine, &prompt, &Pie, prompt.len());
    let others = take(&gpu, 100);
    let polled = first_layer(&engine, &found, &prompt);
    let Prefetched::Failed(failure) = polled else { panic!("{polled:?}") };
    assert!(matches!(failure, DeviceFailure::OutOfMemory { free: 100, .. }), "{failure}");
    drop((others, found));

    let (engine, gpu) = on_gpu(store(), without_chunks());
    let mut begun = engine.prefill(&prompt, request(Pie, 1)).unwrap();
    // Others take memory after the prompt was counted.
    let others = take(&gpu, 20_000);
    let error = loop {
        match begun.advance() {
            Ok(advance) => assert_ne!(advance, Advance::Done),
            Err(error) => break error,
        }
    };
    assert!(is_out_of_memory(&error), "{error}");
    assert_eq!(begun.advance().unwrap(), Advance::Done, "the prefill is over");
    drop((begun, others));
    assert_eq!((engine.store().stats().removed, engine.store().stats().unusable), (0, 0));
    let again = prefill(&engine, &prompt, &Pie, prompt.len());
    assert_eq!((again.load.reused.prefilled, again.logits), (0, expected.logits));
    assert_eq!(engine.store().verify(|_| ()).unwrap().whole, 3);
}

#[test]
fn a_step_of_decoding_that_runs_out_of_memory_can_be_repeated() {
    let (engine, gpu) = in_memory(without_chunks());
    let tokens = |fails: bool| {
        let prompts = [prompt(&engine), random_prompt(&engine, 5, &[20], 7, 3)];
        let mut sequences = prompts.each_ref().map(|prompt| sequence(&engine, prompt, 6));
        let mut workspace = DecodeWorkspace::default();
        let mut told = Vec::new();
        for step in 0..5 {
            for sequence in &mut sequences {
                sequence.push_tokens(&mut |event| {
                    told.extend(event.token);
                    true
                });
            }
            let [a, b] = &mut sequences;
            if fails && step == 2 {
                gpu.fragment(300);
                let error = decode_step(&mut [a, b], &mut workspace).unwrap_err();
                assert!(is_out_of_memory(&error), "{error}");
                gpu.fragment(MEMORY);
                assert!(a.undo_step() && b.undo_step());
            }
            decode_step(&mut [a, b], &mut workspace).unwrap();
        }
        told
    };
    assert_eq!(tokens(true), tokens(false));
}

#[test]
fn a_prompt_without_room_in_the_prefix_cache_is_answered() {
    let (engine, gpu) = in_memory(without_chunks());
    let engine = engine.with_prefix_cache(1 << 20);
    let prompt = prompt(&engine);
    let push = |mut sequence: Sequence| sequence.push_tokens(&mut |_| true);
    let begun = sequence(&engine, &prompt, 6);
    let others = take(&gpu, 100);
    assert_eq!((push(begun), engine.prefix_cache_bytes()), (None, 0));
    drop(others);
    push(sequence(&engine, &prompt, 6));
    assert!(engine.prefix_cache_bytes() > 0);
}

#[test]
fn a_gpu_that_has_failed_is_told_by_every_request() {
    let (engine, gpu) = in_memory(without_chunks());
    let prompt = prompt(&engine);
    prefill(&engine, &prompt, &Pie, prompt.len());
    gpu.fail("an illegal address");
    for method in [shared(Pie), shared(Vanilla)] {
        let request = GenerateRequest::new(method, Sampling::default());
        let error = engine.answer(&prompt, &request, |_| true).unwrap_err();
        assert!(matches!(&error, Error::DeviceFailure(DeviceFailure::Broken { .. })), "{error}");
        assert!(error.to_string().contains("an illegal address"), "{error}");
    }
    assert!(engine.ingest(&[document()], |_| ()).is_err());
    assert_eq!((engine.store().stats().removed, engine.store().stats().unusable), (0, 0));
}

#[test]
fn weights_that_run_out_of_memory_are_told_as_such() {
    let gpu = Emulated::with_memory(1, MEMORY);
    gpu.fragment(1000);
    let device: Arc<dyn Device> = Arc::new(CudaDevice::new(gpu, 1).unwrap());
    let store = Store::in_memory(1 << 20);
    let error = Engine::open_on(&device, &tiny("llama"), store, without_chunks(), |_, _| ()).unwrap_err();
    assert!(matches!(&error, Error::Device { reason, .. } if reason.contains("out of memory")), "{error}");
}

#[test]
fn what_all_layers_share_is_copied_to_the_gpu_once() {
    let (engine, gpu) = in_memory(without_chunks());
    let prompt = prompt(&engine);
    let mut sequence = sequence(&engine, &prompt, 9);
    let mut workspace = DecodeWorkspace::default();
    let config = engine.decoder().config();
    let tables: usize = config.ropes.iter().map(|rope| 4 * rope.rotary_dim).sum();
    for _ in 0..3 {
        let before = gpu.written();
        decode_step(&mut [&mut sequence], &mut workspace).unwrap();
        // The token's embedding, its tables, and the range that it sees.
        assert_eq!(gpu.written() - before, (4 * config.hidden + tables + 8) as u64);
    }
}
