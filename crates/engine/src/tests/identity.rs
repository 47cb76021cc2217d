//! Identities beyond the oracles: bits, counts, missing chunks, decoding.

use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::{A3, FullReuse, FusionMethod, LegoLink, Pie, Vanilla};
use refrain_kernels::{Dtype, Precision};
use refrain_store::Store;

use super::{
    SMOLLM2, engine, exact, max_difference, prefill, random_prompt, real, shared, small, tiny, tiny_engine,
};
use crate::{
    Document, Engine, Error, FinishReason, GenerateRequest, Instructions, Prompt, PromptChunk, Sampling,
    Settings, TokenEvent, argmax,
};

fn methods() -> Vec<Arc<dyn FusionMethod>> {
    refrain_fusion::METHODS.entries.iter().map(|entry| entry.with([]).unwrap()).collect()
}

/// Keys of layer 0 depend on the token alone: the cached one, stored and rotated to its place, must have the bits of
/// the one that vanilla stores and rotates. In `f32`, where a row's bits never depend on the rows that are computed with it.
#[test]
fn a_cached_key_at_its_place_has_vanillas_bits() {
    for kv in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let engine = engine(&tiny("llama"), exact(kv));
        let prompt = random_prompt(&engine, 5, &[40, 33], 9, 3);
        let (vanilla, pie) = (
            prefill(&engine, &prompt, &Vanilla, prompt.len()),
            prefill(&engine, &prompt, &Pie, prompt.len()),
        );
        assert_eq!(vanilla.layer(0), pie.layer(0), "{kv}");
        assert_ne!(vanilla.layer(1), pie.layer(1), "{kv}");
    }
}

#[test]
fn accounts_are_counted() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16));
    let prompt = random_prompt(&engine, 5, &[60, 40], 10, 4);
    let layers = engine.decoder().config().num_layers() as f64;
    let stats = |method: Arc<dyn FusionMethod>| engine.measure(&prompt, &method, Eviction::full()).unwrap();
    let vanilla = stats(shared(Vanilla));
    assert_eq!((vanilla.prompt_tokens, vanilla.document_tokens, vanilla.cached_tokens), (115, 100, 0));
    assert_eq!((vanilla.recompute_ratio, vanilla.bytes_loaded), (1.0, 0));
    assert_eq!(vanilla.full_layers as f64, layers);
    stats(shared(Pie)); // The first run computes what later ones load.
    for method in [shared(Pie), shared(FullReuse)] {
        let reuse = stats(method);
        assert_eq!((reuse.cached_tokens, reuse.recomputed_tokens, reuse.recompute_ratio), (105, 0, 0.0));
        // A device with a memory of its own may have kept them there.
        assert_eq!(
            reuse.bytes_loaded + reuse.device_bytes_reused,
            105 * engine.decoder().shape().token_bytes(Dtype::F16) as u64
        );
    }
    let lego = stats(shared(LegoLink { window: 5, ..LegoLink::default() }));
    assert_eq!((lego.recomputed_tokens, lego.recompute_ratio, lego.full_layers), (20, 0.2, 0));
    assert_eq!(lego.cached_tokens, 105 - 20);
    let a3 = stats(shared(A3 { ratio: 0.2, ..A3::default() }));
    assert_eq!((a3.recomputed_tokens, a3.full_layers, a3.cached_tokens), (21, 2, 105 - 21));
    assert!((a3.recompute_ratio - (2.0 + (layers - 2.0) * 0.21) / layers).abs() < 1e-9);
}

#[test]
fn missing_chunks_are_prefilled_once() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[40, 30], 9, 5);
    engine.ingest_system(&prompt).unwrap();
    for missing in [2, 0] {
        let account = engine.measure(&prompt, &shared(Pie), Eviction::full()).unwrap();
        assert_eq!(account.prefilled_chunks, missing);
    }
}

#[test]
fn edge_prompts() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let bare = random_prompt(&engine, 5, &[], 9, 6);
    let expected = prefill(&engine, &bare, &Vanilla, 64).logits;
    for method in methods() {
        let got = prefill(&engine, &bare, &method, 64).logits;
        assert!(max_difference(&got, &expected) <= 1e-4, "{method:?} without documents");
    }
    // |Re| = 0: after layer 1 only the question runs.
    let prompt = random_prompt(&engine, 5, &[20], 9, 6);
    let none = prefill(&engine, &prompt, &A3 { ratio: 0.0, ..A3::default() }, 64);
    assert_eq!(none.stats.final_rows.len(), 9);
    // The same chunk twice is one entry, placed twice.
    let mut twice = prompt.clone();
    twice.chunks.push(twice.chunks[0].clone());
    engine.measure(&twice, &shared(Pie), Eviction::full()).unwrap();
    let mut silent = prompt;
    silent.question.clear();
    assert!(matches!(engine.measure(&silent, &shared(Pie), Eviction::full()), Err(Error::EmptyQuestion)));
    let context = engine.decoder().config().context;
    let long = random_prompt(&engine, 5, &[context], 9, 6);
    let error = engine.measure(&long, &shared(Pie), Eviction::full()).unwrap_err().to_string();
    assert!(error.contains(&format!("the model's context is {context}")), "{error}");
}

/// Computing a prompt in steps gives the bits of computing it at once, and threads do not matter.
#[test]
fn steps_and_threads_do_not_change_bits() {
    // With tiles, fewer than 16 rows take another way than more: a step is a token then, and so is the rest of the prompt.
    for precision in [Precision::Bf16, Precision::F32] {
        for name in ["llama", "gemma3", "qwen3_moe"] {
            let logits = |threads, decoded: usize| {
                let settings = Settings { threads, precision: Some(precision), ..small() };
                let engine = tiny_engine(name, settings);
                let ids = random_prompt(&engine, 5, &[90], 9, 8).ids();
                let (first, rest) = ids.split_at(ids.len() - decoded);
                let prompt = Prompt { question: first.to_vec(), ..Prompt::default() };
                let mut prefilled = prefill(&engine, &prompt, &Vanilla, ids.len());
                rest.iter().fold(prefilled.logits.clone(), |_, token| prefilled.extend(*token))
            };
            let (all, most) = (logits(1, 0), logits(1, 60));
            assert_eq!(all, logits(2, 0), "{name} {precision}: 2 threads");
            assert_eq!(most, logits(3, 60), "{name} {precision}: 3 threads");
            if precision == Precision::F32 {
                assert_eq!(all, most, "{name}: one token at a time");
                assert_eq!(all, logits(2, 7), "{name}: the last ones one at a time");
            }
        }
    }
}

fn documents() -> Vec<Document> {
    let text = |title: &str, text: &str| Document { title: title.to_owned(), text: text.to_owned() };
    vec![
        text(
            "Harbour",
            "The harbour master of Ostrava Bay is called Lena Novak. Ships must report by radio on channel 12.",
        ),
        text(
            "Lighthouse",
            "The lighthouse was built in 1871 and is 34 metres tall. Its lamp turns once every nine seconds.",
        ),
    ]
}

#[test]
fn smollm2_answers_from_documents() {
    let Some(path) = real(SMOLLM2) else { return };
    let engine = engine(&path, Settings::default());
    engine.ingest(&documents(), |_| ()).unwrap();
    let prompt =
        engine.prompt(&documents(), "How tall is the lighthouse?", &Instructions::default()).unwrap();
    for method in ["vanilla", "a3:ratio=0.3"] {
        let method = refrain_fusion::METHODS.parse(method).unwrap();
        let mut streamed = String::new();
        let stream = |event: TokenEvent<'_>| {
            streamed.push_str(event.text);
            true
        };
        let sampling = Sampling { max_tokens: 40, ..Sampling::default() };
        let answer = engine
            .answer(
                &prompt,
                &GenerateRequest { explain: true, ..GenerateRequest::new(method.clone(), sampling.clone()) },
                stream,
            )
            .unwrap();
        assert!(answer.text.contains("34"), "{method:?}: {}", answer.text);
        assert_eq!(answer.text, streamed);
        assert_eq!(answer.stats.answer_tokens, answer.tokens.len());
        assert!(answer.stats.tpot.unwrap() > 0.0 && answer.stats.ttft >= answer.stats.compute_ttft);
        let explanation = answer.explanation.unwrap();
        assert!(!explanation.tokens.is_empty() && explanation.recomputed_share <= 1.001);
    }
    let vanilla: Vec<_> = ["vanilla", "full_reuse", "a3:ratio=1"]
        .map(|m| (m.to_owned(), refrain_fusion::METHODS.parse(m).unwrap()))
        .into();
    let rows = engine.compare(&prompt, &vanilla, Eviction::full(), 16).unwrap();
    assert_eq!((rows[0].kl, rows[0].top1, rows[0].speedup), (0.0, 1.0, 1.0));
    assert!(rows[1].kl > rows[2].kl, "{rows:?}");
    assert!(rows[2].kl < 1e-3, "{rows:?}");
}

#[test]
fn stop_strings_cancelling_and_limits_end_an_answer() {
    let Some(path) = real(SMOLLM2) else { return };
    let engine = engine(&path, Settings::default());
    let prompt = engine.prompt(&[], "Count from one to ten in digits.", &Instructions::default()).unwrap();
    let answer = |sampling: Sampling, go_on: bool| {
        engine.answer(&prompt, &GenerateRequest::new(shared(Vanilla), sampling), |_| go_on).unwrap()
    };
    let base = Sampling { max_tokens: 24, ..Sampling::default() };
    let whole = answer(base.clone(), true);
    let word: String = whole.text.chars().skip(6).take(3).collect();
    let cut = answer(Sampling { stop: vec![word.clone()], ..base.clone() }, true);
    assert_eq!(cut.finish, FinishReason::Stop);
    assert_eq!(cut.text, whole.text.split(&word).next().unwrap());
    assert_eq!(answer(base.clone(), false).finish, FinishReason::Cancelled);
    let one = answer(Sampling { max_tokens: 1, ..base.clone() }, true);
    assert_eq!((one.finish, one.tokens.len(), one.stats.tpot), (FinishReason::Length, 1, None));
    let sampled = |seed| answer(Sampling { temperature: 1.5, seed, ..base.clone() }, true).tokens;
    assert_eq!(sampled(1), sampled(1));
    assert_ne!(sampled(1), sampled(2));
}

/// A second ingest does nothing; a broken file is computed again and the answer is the same.
#[test]
fn a_corrupted_chunk_file_is_repaired_silently() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let store = Store::open(folder.path(), 1 << 20).unwrap();
        Engine::open(&tiny("llama"), store, exact(Dtype::F16), |_, _| ()).unwrap()
    };
    let first = open();
    let report = first.ingest(&documents(), |_| ()).unwrap();
    assert!(report.computed > 0 && report.computed == report.chunks);
    assert_eq!(first.ingest(&documents(), |_| ()).unwrap().computed, 0);
    let prompt: Prompt = {
        let chunks: Vec<PromptChunk> = first.chunks(&documents()).unwrap();
        Prompt { chunks, ..random_prompt(&first, 5, &[], 9, 9) }
    };
    let before = prefill(&first, &prompt, &A3::default(), prompt.len());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        files.extend(std::fs::read_dir(entry).unwrap().map(|e| e.unwrap().path()));
    }
    assert!(files.len() >= report.computed);
    for file in &files {
        let mut bytes = std::fs::read(file).unwrap();
        let last = bytes.len() - 9;
        bytes[last] ^= 4;
        std::fs::write(file, bytes).unwrap();
    }
    let second = open();
    let after = prefill(&second, &prompt, &A3::default(), prompt.len());
    assert_eq!(before.logits, after.logits);
    assert_eq!(after.load.reused.prefilled, prompt.chunks.len() + 1, "every chunk and the system part");
    assert_eq!(argmax(&before.logits), argmax(&after.logits));
}

/// An ingest tells of its progress within a chunk, up to all of its tokens, and at most every hundredth of them beside the chunks' ends.
#[test]
fn progress_is_told_within_a_chunk() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16));
    let text = "Turn the left screw by a half. ".repeat(8);
    let document = Document { title: "Brakes".to_owned(), text };
    let mut told = Vec::new();
    let report = engine.ingest(&[document], |progress| told.push((progress.done, progress.total))).unwrap();
    assert!(report.computed >= 1);
    assert!(told.iter().all(|(_, total)| *total == report.computed_tokens), "{told:?}");
    assert!(told.windows(2).all(|pair| pair[0].0 < pair[1].0), "{told:?}");
    assert_eq!((told[0].0, told.last().unwrap().0), (0, report.computed_tokens));
    assert!(told.len() > report.computed + 1, "{told:?}");
    assert!(told.len() <= report.computed + 1 + 100, "{told:?}");
}
