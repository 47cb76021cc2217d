//! Several answers at once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{FusionMethod, METHODS};
use refrain_kernels::{Dtype, Precision};

use super::{SMOLLM2, engine, random_prompt, real, small, tiny};
use crate::{Answer, Engine, Error, Ongoing, Progress, Prompt, Request, Sampling, Settings, Steps, step};

/// A request, and what it comes to alone.
struct Asked {
    prompt: Prompt,
    method: Arc<dyn FusionMethod>,
    eviction: Eviction,
    sampling: Sampling,
    alone: Answer,
    /// Of each token, the likelihood's bits.
    likely: Vec<u32>,
}

/// Methods, policies and ways to choose tokens of all kinds.
fn asked(engine: &Engine) -> Vec<Asked> {
    let specs = [
        ("vanilla", "full", 0.0, 9),
        ("a3", "full", 0.8, 14),
        ("pie", "morph_kv:capacity=40,window=8", 0.0, 6),
        ("sam_kv:block=16", "full", 0.0, 11),
        ("inf_llm:local=32,block=16,topk=2,representatives=2", "full", 0.0, 12),
        ("cache_blend", "h2o:capacity=48,per_query_head=true", 1.2, 13),
        ("vanilla", "streaming_llm:capacity=32", 0.0, 1),
        ("lego_link", "snap_kv:capacity=64", 0.0, 10),
        ("full_reuse", "keyformer:capacity=50", 0.0, 8),
    ];
    let ask = |(index, (method, policy, temperature, tokens)): (usize, &(&str, &str, f32, usize))| {
        let chunks = &[50, 70, 33, 90][..1 + index % 4];
        let prompt = random_prompt(engine, 6, chunks, 5 + index, 91 + index as u64);
        let method = METHODS.parse(method).unwrap();
        let eviction = POLICIES.parse(policy).unwrap();
        let sampling = Sampling {
            temperature: *temperature,
            seed: index as u64,
            max_tokens: *tokens,
            logprobs: Some(2),
            ..Sampling::default()
        };
        let mut likely = Vec::new();
        let request =
            Request { eviction: &eviction, ends: false, ..Request::new(method.as_ref(), &sampling) };
        let alone = engine.answer(&prompt, &request, |progress| note(&mut likely, progress)).unwrap();
        assert_eq!((alone.tokens.len(), likely.len()), (*tokens, *tokens));
        Asked { prompt, method, eviction, sampling, alone, likely }
    };
    specs.iter().enumerate().map(ask).collect()
}

fn note(likely: &mut Vec<u32>, progress: Progress<'_>) -> bool {
    likely.extend(progress.likely.map(|likely| likely.logprob.to_bits()));
    true
}

fn start(engine: &Engine, asked: &Asked) -> crate::Result<Ongoing> {
    let Asked { prompt, method, eviction, sampling, .. } = asked;
    engine.start(prompt, &Request { eviction, ends: false, ..Request::new(method.as_ref(), sampling) })
}

/// Answers under way, by their place among those asked for, with the likelihoods seen so far; and those that have ended.
#[derive(Default)]
struct Running {
    going: BTreeMap<usize, (Ongoing, Vec<u32>)>,
    ended: BTreeMap<usize, (Answer, Vec<u32>)>,
    steps: Steps,
    most: usize,
}

impl Running {
    /// A token of each.
    fn step(&mut self) {
        for index in self.going.keys().copied().collect::<Vec<_>>() {
            let (ongoing, likely) = self.going.get_mut(&index).unwrap();
            if let Some(finish) = ongoing.write(&mut |progress| note(likely, progress)) {
                let (ongoing, likely) = self.going.remove(&index).unwrap();
                self.ended.insert(index, (ongoing.finish(finish, &mut |_| true), likely));
            }
        }
        self.most = self.most.max(self.going.len());
        step(&mut self.going.values_mut().map(|(ongoing, _)| ongoing).collect::<Vec<_>>(), &mut self.steps)
            .unwrap();
    }
}

/// Whatever else runs beside a request, its tokens and their likelihoods are the same to the bit; requests come while others
/// are under way, at first one after the other and then between the layers of each other's prefill.
fn same_beside_others(engine: &Engine) {
    let all = asked(engine);
    for interleaved in [false, true] {
        let running = Arc::new(Mutex::new(Running::default()));
        let pauses = Arc::new(AtomicUsize::new(0));
        let engine = match interleaved {
            false => engine.clone(),
            true => {
                let (running, pauses) = (running.clone(), pauses.clone());
                engine.pausing(move || {
                    if pauses.fetch_add(1, Relaxed) % 3 == 2 {
                        running.lock().unwrap().step();
                    }
                    true
                })
            }
        };
        for (index, asked) in all.iter().enumerate() {
            let ongoing = start(&engine, asked).unwrap();
            running.lock().unwrap().going.insert(index, (ongoing, Vec::new()));
            if !interleaved && index % 3 == 2 {
                running.lock().unwrap().step();
            }
        }
        let mut running = running.lock().unwrap();
        while !running.going.is_empty() {
            running.step();
        }
        assert!(running.most >= if interleaved { 2 } else { 6 }, "{}", running.most);
        assert_eq!(interleaved, pauses.load(Relaxed) > 0);
        for (index, asked) in all.iter().enumerate() {
            let (answer, likely) = &running.ended[&index];
            let what = format!("{:?}, {:?}", asked.method, asked.eviction);
            assert_eq!(answer.tokens, asked.alone.tokens, "{what}");
            assert_eq!((&answer.text, answer.finish), (&asked.alone.text, asked.alone.finish), "{what}");
            assert_eq!(*likely, asked.likely, "{what}");
            let (a, b) = (&answer.account, &asked.alone.account);
            assert_eq!(
                (a.kv_bytes, a.retained_tokens, a.answer_tokens),
                (b.kv_bytes, b.retained_tokens, b.answer_tokens)
            );
            let bytes = engine.kv_bytes(&asked.prompt, asked.sampling.max_tokens, &asked.eviction).unwrap();
            assert!(
                a.kv_bytes <= bytes + bytes / 16 || asked.method.sparse().is_some(),
                "{what}: {} {bytes}",
                a.kv_bytes
            );
        }
    }
}

#[test]
fn an_answer_is_the_same_whatever_runs_beside_it() {
    for precision in [Precision::F32, Precision::Bf16, Precision::Q8] {
        let settings = Settings { precision: Some(precision), kv: Dtype::F16, ..small() };
        same_beside_others(&engine(&tiny("llama"), settings));
    }
}

#[test]
fn an_answer_of_a_real_model_is_the_same_whatever_runs_beside_it() {
    if std::env::var("REFRAIN_CPU").is_ok_and(|isa| isa == "portable") {
        eprintln!("skipped: two minutes without vector instructions; the tiny model runs");
        return;
    }
    if let Some(path) = real(SMOLLM2) {
        same_beside_others(&engine(&path, small()));
    }
}

#[test]
fn a_prefill_that_nobody_wants_any_more_ends_between_two_layers() {
    let engine = engine(&tiny("llama"), small());
    for (method, least) in
        [("vanilla", 1), ("a3", 1), ("sam_kv:block=16", 2), ("inf_llm:local=32,block=16,topk=2", 1)]
    {
        let prompt = random_prompt(&engine, 6, &[60, 60], 6, 5);
        let (method, sampling) = (METHODS.parse(method).unwrap(), Sampling::default());
        let request = Request::new(method.as_ref(), &sampling);
        for at in 0.. {
            let seen = Arc::new(AtomicUsize::new(0));
            let count = seen.clone();
            let limited = engine.pausing(move || count.fetch_add(1, Relaxed) < at);
            match limited.start(&prompt, &request) {
                Err(Error::Cancelled) => assert_eq!(seen.load(Relaxed), at + 1),
                Ok(_) => {
                    assert!(at >= least, "{at}");
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
        // Nothing of it is left behind.
        engine.start(&prompt, &request).unwrap();
    }
}
