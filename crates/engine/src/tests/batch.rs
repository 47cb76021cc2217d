//! Several answers at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{FusionMethod, METHODS, Vanilla};
use refrain_kernels::{Dtype, Precision};

use super::{SMOLLM2, engine, exact, random_prompt, real, small, tiny, tiny_engine};
use crate::{
    Advance, Answer, DecodeWorkspace, Engine, GenerateRequest, Prompt, Sampling, Sequence, Settings,
    TokenEvent, decode_step,
};

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
        ("prophet_kv", "full", 0.0, 7),
        ("relax_kv", "full", 0.0, 9),
        ("drift:charge=0.3", "full", 0.0, 8),
        ("scout:charge=0.3", "h2o:capacity=48", 0.0, 8),
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
        let request = GenerateRequest {
            eviction: eviction.clone(),
            ignore_eos: true,
            ..GenerateRequest::new(method.clone(), sampling.clone())
        };
        let alone = engine.answer(&prompt, &request, |event| note(&mut likely, event)).unwrap();
        assert_eq!((alone.tokens.len(), likely.len()), (*tokens, *tokens));
        Asked { prompt, method, eviction, sampling, alone, likely }
    };
    specs.iter().enumerate().map(ask).collect()
}

fn note(likely: &mut Vec<u32>, event: TokenEvent<'_>) -> bool {
    likely.extend(event.logprobs.map(|logprobs| logprobs.logprob.to_bits()));
    true
}

/// Begins a request; `between` is called between two steps of its prefill.
fn start(engine: &Engine, asked: &Asked, mut between: impl FnMut()) -> Sequence {
    let Asked { prompt, method, eviction, sampling, .. } = asked;
    let (eviction, request) = (eviction.clone(), GenerateRequest::new(method.clone(), sampling.clone()));
    let request = GenerateRequest { eviction, ignore_eos: true, ..request };
    let mut prefill = engine.prefill(prompt, request).unwrap();
    while prefill.advance().unwrap() != Advance::Done {
        between();
    }
    prefill.finish().unwrap()
}

/// Answers under way, by their index among those asked for, with the likelihoods seen so far; and those that have ended.
#[derive(Default)]
struct Running {
    going: BTreeMap<usize, (Sequence, Vec<u32>)>,
    ended: BTreeMap<usize, (Answer, Vec<u32>)>,
    workspace: DecodeWorkspace,
    most: usize,
}

impl Running {
    /// A token of each.
    fn step(&mut self) {
        for index in self.going.keys().copied().collect::<Vec<_>>() {
            let (sequence, likely) = self.going.get_mut(&index).unwrap();
            if let Some(finish) = sequence.push_tokens(&mut |event| note(likely, event)) {
                let (sequence, likely) = self.going.remove(&index).unwrap();
                self.ended.insert(index, (sequence.finish(finish, &mut |_| true), likely));
            }
        }
        self.most = self.most.max(self.going.len());
        let mut sequences: Vec<_> = self.going.values_mut().map(|(sequence, _)| sequence).collect();
        decode_step(&mut sequences, &mut self.workspace).unwrap();
    }
}

/// A request's tokens and their likelihoods are the same to the bit beside any others; requests come while others
/// are under way, at first one after the other and then between the layers of each other's prefill.
fn same_beside_others(engine: &Engine) {
    let all = asked(engine);
    for interleaved in [false, true] {
        let (mut running, mut pauses) = (Running::default(), 0);
        for (index, asked) in all.iter().enumerate() {
            let sequence = start(engine, asked, || {
                pauses += 1;
                if interleaved && pauses % 3 == 2 {
                    running.step();
                }
            });
            running.going.insert(index, (sequence, Vec::new()));
            if !interleaved && index % 3 == 2 {
                running.step();
            }
        }
        while !running.going.is_empty() {
            running.step();
        }
        assert!(running.most >= if interleaved { 2 } else { 6 }, "{}", running.most);
        for (index, asked) in all.iter().enumerate() {
            let (answer, likely) = &running.ended[&index];
            let what = format!("{:?}, {:?}", asked.method, asked.eviction);
            assert_eq!(answer.tokens, asked.alone.tokens, "{what}");
            assert_eq!((&answer.text, answer.finish), (&asked.alone.text, asked.alone.finish), "{what}");
            assert_eq!(*likely, asked.likely, "{what}");
            let (a, b) = (&answer.stats, &asked.alone.stats);
            assert_eq!(
                (a.kv_bytes, a.retained_tokens, a.answer_tokens),
                (b.kv_bytes, b.retained_tokens, b.answer_tokens)
            );
            let bytes =
                engine.max_kv_bytes(&asked.prompt, asked.sampling.max_tokens, &asked.eviction).unwrap();
            assert!(
                a.kv_bytes <= bytes + bytes / 16 || !asked.method.keeps_all_tokens(),
                "{what}: {} {bytes}",
                a.kv_bytes
            );
        }
    }
}

/// A long layer is computed part by part: answers are the same to the bit, and a step is a part.
#[test]
fn parts_of_a_layer_are_the_layer() {
    for kv in [Dtype::F32, Dtype::F16] {
        let whole = engine(&tiny("llama"), exact(kv));
        let parts = engine(&tiny("llama"), Settings { ubatch: 24, ..exact(kv) });
        let prompt = random_prompt(&whole, 6, &[70, 41, 90], 9, 17);
        let sampling = Sampling { max_tokens: 6, logprobs: Some(1), ..Sampling::default() };
        let names = METHODS.entries.iter().map(|entry| entry.name);
        // Rows see keys of later rows, which belong to later parts.
        for name in names.chain(["cache_blend:mask=bottom_right,ratio=0.8"]) {
            let method = METHODS.parse(name).unwrap();
            let of = |engine: &Engine| {
                engine.ingest_prompt(&prompt, std::slice::from_ref(&method)).unwrap();
                let request = GenerateRequest {
                    ignore_eos: true,
                    ..GenerateRequest::new(method.clone(), sampling.clone())
                };
                let mut likely = Vec::new();
                let answer = engine.answer(&prompt, &request, |event| note(&mut likely, event)).unwrap();
                let mut prefill = engine.prefill(&prompt, request).unwrap();
                let mut steps = 0;
                while prefill.advance().unwrap() != Advance::Done {
                    steps += 1;
                }
                (answer.tokens, likely, steps)
            };
            let (whole, parts) = (of(&whole), of(&parts));
            assert_eq!((&whole.0, &whole.1), (&parts.0, &parts.1), "{name}");
            let splits = ["vanilla", "a3", "cache_blend"].contains(&name);
            assert!(!splits || parts.2 >= whole.2 + 10, "{name}: {} and {} steps", whole.2, parts.2);
        }
    }
}

/// Weights that a policy sums over a layer that was computed part by part are those of the layer.
#[test]
fn policies_see_all_parts_of_a_layer() {
    for kv in [Dtype::F32, Dtype::F16] {
        let whole = engine(&tiny("llama"), exact(kv));
        let parts = engine(&tiny("llama"), Settings { ubatch: 24, ..exact(kv) });
        let prompt = random_prompt(&whole, 6, &[70, 41, 90], 9, 17);
        for policy in ["h2o:capacity=40,recent=10", "keyformer:capacity=40,noise=false"] {
            let eviction = POLICIES.parse(policy).unwrap();
            let of = |engine: &Engine| {
                let sampling = Sampling { max_tokens: 6, logprobs: Some(1), ..Sampling::default() };
                let request = GenerateRequest {
                    eviction: eviction.clone(),
                    ignore_eos: true,
                    ..GenerateRequest::new(Arc::new(Vanilla), sampling)
                };
                let mut likely = Vec::new();
                let answer = engine.answer(&prompt, &request, |event| note(&mut likely, event)).unwrap();
                (answer.tokens, likely)
            };
            assert_eq!(of(&whole), of(&parts), "{policy}");
        }
    }
}

/// Prefills of several requests take turns, a layer of each: their answers are those alone.
#[test]
fn prefills_take_turns() {
    let engine = engine(&tiny("llama"), small());
    let all = asked(&engine);
    let begin = |asked: &Asked| {
        let request = GenerateRequest::new(asked.method.clone(), asked.sampling.clone());
        let eviction = asked.eviction.clone();
        let request = GenerateRequest { eviction, ignore_eos: true, ..request };
        engine.prefill(&asked.prompt, request).unwrap()
    };
    let mut prefills: Vec<_> = all.iter().map(|asked| Some(begin(asked))).collect();
    let (mut running, mut turns) = (Running::default(), 0);
    while prefills.iter().any(Option::is_some) {
        for (index, slot) in prefills.iter_mut().enumerate() {
            let Some(mut prefill) = slot.take() else { continue };
            turns += 1;
            match prefill.advance().unwrap() {
                Advance::Done => _ = running.going.insert(index, (prefill.finish().unwrap(), Vec::new())),
                _ => *slot = Some(prefill),
            }
        }
    }
    assert!(turns > all.len() * engine.decoder().config().num_layers());
    while !running.going.is_empty() {
        running.step();
    }
    for (index, asked) in all.iter().enumerate() {
        assert_eq!(running.ended[&index].0.tokens, asked.alone.tokens, "{:?}", asked.method);
        assert_eq!(running.ended[&index].1, asked.likely, "{:?}", asked.method);
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
    if let Some(path) = real(SMOLLM2) {
        same_beside_others(&engine(&path, small()));
    }
}

#[test]
fn a_prefill_may_be_dropped_after_any_step() {
    let engine = engine(&tiny("llama"), small());
    for method in
        ["vanilla", "a3", "prophet_kv", "relax_kv", "sam_kv:block=16", "inf_llm:local=32,block=16,topk=2"]
    {
        let prompt = random_prompt(&engine, 6, &[60, 60], 6, 5);
        let request = GenerateRequest::new(METHODS.parse(method).unwrap(), Sampling::default());
        let expected = engine.answer(&prompt, &request, |_| true).unwrap().tokens;
        for steps in 0.. {
            let mut prefill = engine.prefill(&prompt, request.clone()).unwrap();
            if (0..steps).any(|_| prefill.advance().unwrap() == Advance::Done) {
                assert!(steps >= engine.decoder().config().num_layers(), "{method}: {steps}");
                break;
            }
            assert!(prefill.finish().is_none(), "{method}: no sequence before its first token");
        }
        // Nothing of it is left behind.
        assert_eq!(engine.answer(&prompt, &request, |_| true).unwrap().tokens, expected);
    }
}

/// A sequence that breaks a step, by an error or a panic, ends alone: the others repeat the step and say what they would have said.
#[test]
fn a_step_that_one_sequence_breaks_is_repeated_by_the_others() {
    let engine = tiny_engine("llama", exact(Dtype::F32));
    let sampling = |seed| Sampling { temperature: 0.8, seed, max_tokens: 12, ..Sampling::default() };
    let request = |seed| GenerateRequest {
        ignore_eos: true,
        speculative_tokens: 4,
        ..GenerateRequest::new(METHODS.parse("a3").unwrap(), sampling(seed))
    };
    let prompt = |seed| random_prompt(&engine, 6, &[40, 30], 12, seed);
    let alone: Vec<_> =
        (1..4).map(|seed| engine.answer(&prompt(seed), &request(seed), |_| true).unwrap().tokens).collect();
    for panics in [false, true] {
        let mut sequences: Vec<Sequence> = (1..4)
            .map(|seed| {
                let mut prefill = engine.prefill(&prompt(seed), request(seed)).unwrap();
                while prefill.advance().unwrap() != Advance::Done {}
                prefill.finish().unwrap()
            })
            .collect();
        let (mut answers, mut workspace, mut steps) = (vec![None, None, None], DecodeWorkspace::default(), 0);
        while !sequences.is_empty() {
            let mut going = Vec::new();
            for mut sequence in sequences {
                match sequence.push_tokens(&mut |_| true) {
                    Some(finish) => {
                        let answer = sequence.finish(finish, &mut |_| true).tokens;
                        let of = alone.iter().position(|tokens| *tokens == answer).unwrap();
                        answers[of] = Some(answer);
                    }
                    None => going.push(sequence),
                }
            }
            sequences = going;
            steps += 1;
            if steps == 3 {
                // The second sequence has a token without an embedding, or a position beyond its cache.
                match panics {
                    false => sequences[1].next_token = u32::MAX,
                    true => sequences[1].cache.len = 1 << 20,
                }
            }
            let step = |sequences: &mut [Sequence], workspace: &mut DecodeWorkspace| {
                let mut batch: Vec<_> = sequences.iter_mut().collect();
                let stepped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    decode_step(&mut batch, workspace)
                }));
                matches!(stepped, Ok(Ok(())))
            };
            if !step(&mut sequences, &mut workspace) {
                assert_eq!(steps, 3);
                workspace = DecodeWorkspace::default();
                sequences.remove(1);
                for sequence in &mut sequences {
                    assert!(!sequence.has_next_token() && sequence.undo_step());
                    assert!(
                        step(std::slice::from_mut(sequence), &mut workspace) && sequence.has_next_token()
                    );
                }
            }
        }
        assert_eq!(answers, [Some(alone[0].clone()), None, Some(alone[2].clone())]);
    }
}
