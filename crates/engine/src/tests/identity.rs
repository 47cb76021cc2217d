//! Identities beyond the oracles: bits, counts, missing chunks, decoding.

use refrain_eviction::Eviction;
use refrain_fusion::{A3, FullReuse, FusionMethod, LegoLink, Pie, Vanilla};
use refrain_kernels::{Dtype, Precision};
use refrain_store::Store;

use super::{SMOLLM2, engine, exact, max_difference, prefill, random_prompt, real, small, tiny};
use crate::forward::State;
use crate::{
    Document, Engine, Error, Finish, Instructions, Progress, Prompt, PromptChunk, Request, Sampling,
    Settings, argmax,
};

fn methods() -> Vec<std::sync::Arc<dyn FusionMethod>> {
    refrain_fusion::METHODS.entries.iter().map(|entry| entry.with([]).unwrap()).collect()
}

/// Keys of layer 0 depend on the token alone: the cached one, stored and rotated to its place, must have the bits of
/// the one that vanilla stores and rotates.
#[test]
fn a_cached_key_at_its_place_has_vanillas_bits() {
    for kv in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let engine = engine(&tiny("llama"), Settings { kv, ..small() });
        let prompt = random_prompt(&engine, 5, &[40, 33], 9, 3);
        let run = |method: &dyn FusionMethod| prefill(&engine, &prompt, method, prompt.len());
        let (vanilla, pie) = (run(&Vanilla), run(&Pie));
        assert_eq!(vanilla.state.cache.layer(0), pie.state.cache.layer(0), "{kv}");
        assert_ne!(vanilla.state.cache.layer(1), pie.state.cache.layer(1), "{kv}");
    }
}

#[test]
fn accounts_are_counted() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16));
    let prompt = random_prompt(&engine, 5, &[60, 40], 10, 4);
    let layers = engine.decoder().config().num_layers() as f64;
    let account = |method: &dyn FusionMethod| engine.measure(&prompt, method, Eviction::full()).unwrap();
    let vanilla = account(&Vanilla);
    assert_eq!((vanilla.prompt_tokens, vanilla.document_tokens, vanilla.cached_tokens), (115, 100, 0));
    assert_eq!((vanilla.recompute_ratio, vanilla.bytes_loaded), (1.0, 0));
    assert_eq!(vanilla.full_layers as f64, layers);
    account(&Pie); // The first run computes what later ones load.
    for method in [&Pie as &dyn FusionMethod, &FullReuse] {
        let reuse = account(method);
        assert_eq!((reuse.cached_tokens, reuse.recomputed_tokens, reuse.recompute_ratio), (105, 0, 0.0));
        assert_eq!(reuse.bytes_loaded, 105 * engine.decoder().shape().token_bytes(Dtype::F16) as u64);
    }
    let lego = account(&LegoLink { window: 5, head_only: false });
    assert_eq!((lego.recomputed_tokens, lego.recompute_ratio, lego.full_layers), (20, 0.2, 0));
    assert_eq!(lego.cached_tokens, 105 - 20);
    let a3 = account(&A3 { ratio: 0.2, ..A3::default() });
    assert_eq!((a3.recomputed_tokens, a3.full_layers, a3.cached_tokens), (21, 2, 105 - 21));
    assert!((a3.recompute_ratio - (2.0 + (layers - 2.0) * 0.21) / layers).abs() < 1e-9);
}

/// Chunks that are not at hand are computed at every layer, by every method, and are not stored.
#[test]
fn a_missing_chunk_is_computed_within_the_prompt() {
    let open = |repair| engine(&tiny("llama"), Settings { repair, ..exact(Dtype::F32) });
    let (without, with) = (open(false), open(true));
    let prompt = random_prompt(&without, 5, &[40, 30], 9, 5);
    let expected = prefill(&without, &prompt, &Vanilla, prompt.len()).logits;
    for method in methods() {
        let got = prefill(&without, &prompt, method.as_ref(), prompt.len());
        assert!(max_difference(&got.logits, &expected) <= 1e-4, "{method:?}");
        assert!(!without.store().contains(&without.chunk_id(&prompt.chunks[0].tokens)), "{method:?}");
    }
    // One of two chunks there: its tokens alone are candidates.
    without.compute_chunk(without.chunk_id(&prompt.chunks[1].tokens), "second", &[]).unwrap();
    let a3 = prefill(&without, &prompt, &A3::default(), prompt.len());
    assert!((5..45).all(|p| a3.work.final_rows.contains(&p)));
    assert_eq!(a3.work.final_rows.len(), 40 + 11 + 9);
    with.ingest_system(&prompt).unwrap();
    assert_eq!(with.measure(&prompt, &Pie, Eviction::full()).unwrap().repaired_chunks, 2);
    assert_eq!(with.measure(&prompt, &Pie, Eviction::full()).unwrap().repaired_chunks, 0);
}

#[test]
fn edge_prompts() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let bare = random_prompt(&engine, 5, &[], 9, 6);
    let expected = prefill(&engine, &bare, &Vanilla, 64).logits;
    for method in methods() {
        let got = prefill(&engine, &bare, method.as_ref(), 64).logits;
        assert!(max_difference(&got, &expected) <= 1e-4, "{method:?} without documents");
    }
    // |Re| = 0: after layer 1 only the question runs.
    let prompt = random_prompt(&engine, 5, &[20], 9, 6);
    let none = prefill(&engine, &prompt, &A3 { ratio: 0.0, ..A3::default() }, 64);
    assert_eq!(none.work.final_rows.len(), 9);
    // The same chunk twice is one entry, placed twice.
    let mut twice = prompt.clone();
    twice.chunks.push(twice.chunks[0].clone());
    engine.measure(&twice, &Pie, Eviction::full()).unwrap();
    let mut silent = prompt;
    silent.question.clear();
    assert!(matches!(engine.measure(&silent, &Pie, Eviction::full()), Err(Error::EmptyQuestion)));
    let context = engine.decoder().config().context;
    let long = random_prompt(&engine, 5, &[context], 9, 6);
    let error = engine.measure(&long, &Pie, Eviction::full()).unwrap_err().to_string();
    assert!(error.contains(&format!("{context}")) && error.contains("fewer documents"), "{error}");
}

/// Computing a prompt in steps gives the bits of computing it at once, and threads do not matter.
#[test]
fn steps_and_threads_do_not_change_bits() {
    // With tiles, fewer than 16 rows take another way than more.
    for (precision, steps) in [(Precision::Bf16, [52, 26]), (Precision::F32, [1, 7])] {
        let logits = |threads, step: usize| {
            let settings = Settings { threads, precision: Some(precision), ..small() };
            let engine = engine(&tiny("llama"), settings);
            let ids = random_prompt(&engine, 5, &[90], 9, 8).ids();
            let mut state = State::new(&engine.decoder, Dtype::F16, ids.len(), ids.len());
            let vocab = engine.decoder().config().vocab;
            let parts: Vec<f32> =
                ids.chunks(step).flat_map(|ids| state.extend(ids).unwrap().to_vec()).collect();
            parts[parts.len() - vocab..].to_vec()
        };
        let all = logits(1, 1000);
        for (threads, step) in [(1, steps[0]), (2, 1000), (3, steps[1])] {
            assert_eq!(all, logits(threads, step), "{precision}: {threads} threads, {step} at once");
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
        let stream = |progress: Progress<'_>| {
            streamed.push_str(progress.text);
            true
        };
        let sampling = Sampling { max_tokens: 40, ..Sampling::default() };
        let answer = engine
            .answer(&prompt, &Request { explain: true, ..Request::new(method.as_ref(), &sampling) }, stream)
            .unwrap();
        assert!(answer.text.contains("34"), "{method:?}: {}", answer.text);
        assert_eq!(answer.text, streamed);
        assert_eq!(answer.account.answer_tokens, answer.tokens.len());
        assert!(answer.account.tpot.unwrap() > 0.0 && answer.account.ttft >= answer.account.compute_ttft);
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
        engine.answer(&prompt, &Request::new(&Vanilla, &sampling), |_| go_on).unwrap()
    };
    let base = Sampling { max_tokens: 24, ..Sampling::default() };
    let whole = answer(base.clone(), true);
    let word: String = whole.text.chars().skip(6).take(3).collect();
    let cut = answer(Sampling { stop: vec![word.clone()], ..base.clone() }, true);
    assert_eq!(cut.finish, Finish::Stop);
    assert_eq!(cut.text, whole.text.split(&word).next().unwrap());
    assert_eq!(answer(base.clone(), false).finish, Finish::Cancelled);
    let one = answer(Sampling { max_tokens: 1, ..base.clone() }, true);
    assert_eq!((one.finish, one.tokens.len(), one.account.tpot), (Finish::Length, 1, None));
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
    assert_eq!(after.loaded.repaired, prompt.chunks.len() + 1, "every chunk and the system part");
    assert_eq!(argmax(&before.logits), argmax(&after.logits));
}
