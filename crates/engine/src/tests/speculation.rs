//! Answers whose tokens are proposed from what was said before.

use refrain_eviction::POLICIES;
use refrain_fusion::METHODS;

use super::*;
use crate::step_cost::StepCost;
use crate::{Answer, GenerateRequest, Instructions, Sampling, Sequence, StructuredOutput, decode_step};

/// An answer whose tokens `note` is told of, and how many steps it took.
fn decoded(
    engine: &Engine,
    prompt: &Prompt,
    request: GenerateRequest,
    note: &mut dyn FnMut(crate::TokenEvent<'_>),
) -> (Answer, usize) {
    let mut prefill = engine.prefill(prompt, request).unwrap();
    while prefill.advance().unwrap() != crate::Advance::Done {}
    let mut sequence: Sequence = prefill.finish().unwrap();
    let (mut steps, mut workspace) = (0, DecodeWorkspace::default());
    let mut stream = |event: crate::TokenEvent<'_>| {
        note(event);
        true
    };
    loop {
        if let Some(finish) = sequence.push_tokens(&mut stream) {
            return (sequence.finish(finish, &mut |_| true), steps);
        }
        // The measured cost of steps, and with it the number of proposals, depends on the machine.
        workspace.cost = StepCost::default();
        decode_step(&mut [&mut sequence], &mut workspace).unwrap();
        steps += 1;
    }
}

/// An answer with the likelihoods of its tokens, and how many steps it took.
fn answer(engine: &Engine, prompt: &Prompt, request: &GenerateRequest) -> (Answer, Vec<u32>, usize) {
    let mut likely = Vec::new();
    let (answer, steps) = decoded(engine, prompt, request.clone(), &mut |event| {
        likely.extend(event.logprobs.map(|logprobs| logprobs.logprob.to_bits()));
    });
    (answer, likely, steps)
}

fn request(method: &str, sampling: Sampling, speculative_tokens: usize) -> GenerateRequest {
    let method = METHODS.parse(method).unwrap();
    GenerateRequest { speculative_tokens, ignore_eos: true, ..GenerateRequest::new(method, sampling) }
}

/// Sampling by which a tiny model repeats itself, and by which it does not.
fn samplings() -> Vec<Sampling> {
    let base = Sampling { max_tokens: 60, logprobs: Some(1), ..Sampling::default() };
    vec![
        base.clone(),
        Sampling { temperature: 0.3, seed: 5, ..base.clone() },
        Sampling { temperature: 1.5, seed: 6, top_p: 0.9, ..base.clone() },
        Sampling {
            repetition_penalty: 1.2,
            frequency_penalty: 0.2,
            temperature: 0.6,
            seed: 7,
            ..base.clone()
        },
        Sampling { logit_bias: [(9, 100.0)].into(), ..base },
    ]
}

/// Tokens and their likelihoods are the same to the bit as without proposals, for every method and way to sample.
fn same_without_proposals(precision: Precision, kv: Dtype, nth: usize) {
    let models = ["llama", "qwen2", "qwen3", "gemma3_vision", "qwen3_moe"].into_iter().enumerate();
    // Emulated threads take one precision for each model.
    for (_, model) in models.filter(|(index, _)| !emulated() || index % 3 == nth) {
        let engine = tiny_engine(model, Settings { precision: Some(precision), kv, ..small() });
        for method in ["vanilla", "pie", "a3", "drift:charge=0.3"] {
            let mut saved = 0;
            for (index, sampling) in samplings().into_iter().enumerate() {
                let prompt = random_prompt(&engine, 20, &[70, 90], 25, 5 + index as u64);
                let (plain, likely, steps) = answer(&engine, &prompt, &request(method, sampling.clone(), 0));
                let (proposed, also, fewer) = answer(&engine, &prompt, &request(method, sampling, 8));
                assert_eq!(plain.tokens, proposed.tokens, "{model} {precision} {method} {index}");
                assert_eq!((plain.text, likely), (proposed.text, also));
                assert_eq!(proposed.stats.kv_bytes_held, plain.stats.kv_bytes_held);
                assert_eq!(steps, 59);
                saved += steps - fewer;
            }
            assert!(saved > 40, "{model} {method}: {saved} steps saved");
        }
    }
}

#[test]
fn an_answer_in_f32_is_the_one_without_proposals() {
    same_without_proposals(Precision::F32, Dtype::F32, 0);
}

#[test]
fn an_answer_in_bf16_is_the_one_without_proposals() {
    same_without_proposals(Precision::Bf16, Dtype::F16, 1);
}

#[test]
fn an_answer_in_q8_is_the_one_without_proposals() {
    same_without_proposals(Precision::Q8, Dtype::F16, 2);
}

/// An answer that ends by a stop text, within the tokens of a step, leaves what one without proposals leaves, and each token tells what was
/// held with it.
#[test]
fn what_was_chosen_behind_a_stop_text_is_not_counted() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16));
    let prompt = random_prompt(&engine, 20, &[70, 90], 25, 5);
    let held = |sampling: &Sampling, speculative_tokens| {
        let mut held = Vec::new();
        let request = request("vanilla", sampling.clone(), speculative_tokens);
        let (Answer { finish, stats, .. }, steps) = decoded(&engine, &prompt, request, &mut |event| {
            held.extend(event.token.map(|_| (event.retained, event.kv_bytes_held)));
        });
        (finish, held, (stats.retained_tokens, stats.kv_bytes_held, stats.kv_bytes_full), steps)
    };
    // The model says one token over and over.
    let sampling = Sampling { max_tokens: 60, logit_bias: [(9, 100.0)].into(), ..Sampling::default() };
    let said = answer(&engine, &prompt, &request("vanilla", sampling.clone(), 0)).0;
    let unit = engine.tokenizer().decode(&said.tokens[..1], false);
    let mut saved = 0;
    for times in [7, 12, 13, 29] {
        let stop = vec![unit.repeat(times)];
        let sampling = Sampling { stop, ..sampling.clone() };
        let (plain, proposed) = (held(&sampling, 0), held(&sampling, 8));
        assert_eq!(plain.0, crate::FinishReason::Stop);
        assert_eq!((&plain.1, plain.2), (&proposed.1, proposed.2), "{times}");
        assert_eq!(plain.2.0, prompt.len() + plain.1.len() - 1);
        saved += plain.3 - proposed.3;
    }
    assert!(saved > 10, "{saved} steps saved");
}

/// Sequences that decode together with proposals, right and wrong ones, say what each says alone without.
#[test]
fn answers_of_a_batch_are_those_of_each_alone() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16));
    let prompts: Vec<Prompt> = (0..5).map(|seed| random_prompt(&engine, 20, &[70], 25, 5 + seed)).collect();
    let request = |index: usize, speculative_tokens| {
        let sampling = samplings().swap_remove(index);
        request("vanilla", Sampling { max_tokens: 40 + 5 * index, ..sampling }, speculative_tokens)
    };
    let alone: Vec<Vec<u32>> =
        (0..5).map(|i| answer(&engine, &prompts[i], &request(i, 0)).0.tokens).collect();
    let mut wrong = 0;
    let mut sequences: Vec<(usize, Sequence)> = (0..5)
        .map(|index| {
            let mut prefill = engine.prefill(&prompts[index], request(index, 8)).unwrap();
            while prefill.advance().unwrap() != crate::Advance::Done {}
            (index, prefill.finish().unwrap())
        })
        .collect();
    let mut workspace = DecodeWorkspace::default();
    while !sequences.is_empty() {
        let mut going = Vec::new();
        for (index, mut sequence) in sequences {
            match sequence.push_tokens(&mut |_| true) {
                Some(finish) => {
                    let said = sequence.finish(finish, &mut |_| true);
                    assert_eq!(said.tokens, alone[index], "{index}");
                    wrong += said.stats.draft_tokens - said.stats.accepted_draft_tokens;
                }
                None => going.push((index, sequence)),
            }
        }
        sequences = going;
        workspace.cost = StepCost::default();
        let mut refs: Vec<&mut Sequence> = sequences.iter_mut().map(|(_, sequence)| sequence).collect();
        decode_step(&mut refs, &mut workspace).unwrap();
    }
    assert!(wrong > 0, "no proposal was wrong");
}

/// Tokens that were chosen before a failure at a proposed one stand, and the answer may end with one of them.
#[test]
fn a_failure_at_a_proposed_token_comes_behind_the_tokens_before_it() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 20, &[], 25, 5);
    let twice = engine.tokenizer().decode(&[9, 9], false);
    let (failed, stopped) = (crate::FinishReason::Failed, crate::FinishReason::Stop);
    for (stop, finish) in [(vec![], failed), (vec![twice], stopped)] {
        let sampling =
            Sampling { stop, max_tokens: 60, logit_bias: [(9, 100.0)].into(), ..Sampling::default() };
        let mut prefill = engine.prefill(&prompt, request("vanilla", sampling, 8)).unwrap();
        while prefill.advance().unwrap() != crate::Advance::Done {}
        let mut sequence = prefill.finish().unwrap();
        assert_eq!(sequence.push_tokens(&mut |_| true), None);
        // The last token of the answer, and one that is proposed behind it.
        for _ in 0..2 {
            extend(&mut [&mut sequence.cache], &[9], &mut DecodeWorkspace::default()).unwrap();
        }
        let vocab = engine.decoder().config().vocab;
        let mut rows = [vec![0.0; vocab], vec![f32::NAN; vocab]];
        sequence.verify(&[9], rows.iter_mut().map(Vec::as_mut_slice));
        let mut told = 0;
        let ended = sequence.push_tokens(&mut |event| {
            told += usize::from(event.token.is_some());
            true
        });
        assert_eq!((ended, told, sequence.answer_tokens()), (Some(finish), 1, 2));
        assert_eq!(sequence.take_failure().is_some(), finish == failed);
    }
}

/// A real model that repeats a list takes few steps, and says the same.
#[test]
fn a_real_model_copies_in_few_steps() {
    let Some(path) = real(SMOLLM2) else { return };
    let engine = engine(&path, Settings::default());
    let text = "Repeat this list, word for word: chain, gears, brakes, saddle, pedals, rims, spokes, hubs, cables, levers, \
                grips, stem, fork, frame.";
    let prompt = engine.prompt(&[], text, &Instructions::default()).unwrap();
    let sampling = Sampling { max_tokens: 36, ..Sampling::default() };
    let (plain, _, steps) = answer(&engine, &prompt, &request("vanilla", sampling.clone(), 0));
    let (proposed, _, fewer) = answer(&engine, &prompt, &request("vanilla", sampling, 8));
    assert_eq!(plain.tokens, proposed.tokens);
    assert!(fewer * 2 < steps, "{fewer} of {steps} steps: {}", plain.text);
}

/// A cache that evicts tokens gets no proposals, and its answer stays as it is.
#[test]
fn a_bounded_cache_decodes_token_by_token() {
    let engine = tiny_engine("llama", exact(Dtype::F32));
    let prompt = random_prompt(&engine, 20, &[70], 25, 5);
    for policy in ["h2o:capacity=48", "morph_kv:capacity=40,window=8", "streaming_llm:capacity=32"] {
        let with = |speculative_tokens| {
            let sampling =
                Sampling { logit_bias: [(9, 100.0)].into(), max_tokens: 30, ..Sampling::default() };
            let eviction = POLICIES.parse(policy).unwrap();
            let request = request("vanilla", sampling, speculative_tokens);
            answer(&engine, &prompt, &GenerateRequest { eviction, ..request })
        };
        let ((plain, ..), (proposed, _, steps)) = (with(0), with(8));
        assert_eq!((plain.tokens, steps), (proposed.tokens, 29), "{policy}");
    }
}

/// Stop texts, end tokens, grammars and limits end an answer where they would without proposals.
#[test]
fn answers_end_where_they_would() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 20, &[], 25, 5);
    let base = Sampling { temperature: 0.3, seed: 5, max_tokens: 60, ..Sampling::default() };
    let (whole, ..) = answer(&engine, &prompt, &request("vanilla", base.clone(), 0));
    let words: Vec<char> = whole.text.chars().collect();
    let mut cases: Vec<GenerateRequest> = (10..words.len().saturating_sub(3))
        .step_by(7)
        .map(|at| {
            let stop = vec![words[at..at + 3].iter().collect()];
            request("vanilla", Sampling { stop, ..base.clone() }, 0)
        })
        .collect();
    cases.extend((1..12).map(|max_tokens| request("vanilla", Sampling { max_tokens, ..base.clone() }, 0)));
    let grammar = engine.grammar(&StructuredOutput::Regex("(ab, ){12}end".to_owned())).unwrap();
    cases.push(GenerateRequest { grammar: Some(grammar), ..request("vanilla", base.clone(), 0) });
    cases.push(GenerateRequest { ignore_eos: false, ..request("vanilla", base, 0) });
    for case in cases {
        let (plain, ..) = answer(&engine, &prompt, &case);
        let (proposed, ..) = answer(&engine, &prompt, &GenerateRequest { speculative_tokens: 6, ..case });
        assert_eq!(
            (plain.tokens, plain.text, plain.finish),
            (proposed.tokens, proposed.text, proposed.finish)
        );
    }
}

/// Kept prefixes hold the tokens of answers, and none that was proposed in vain.
#[test]
fn prefixes_of_answers_with_proposals_are_exact() {
    let plain = engine(&tiny("llama"), exact(Dtype::F32));
    let keeping = plain.with_prefix_cache(64 << 20);
    let prompt = random_prompt(&plain, 20, &[], 40, 5);
    for sampling in samplings() {
        let (said, ..) = answer(&keeping, &prompt, &request("vanilla", sampling.clone(), 8));
        let question = [&prompt.question[..], &said.tokens, &[3, 4, 5]].concat();
        let next = Prompt { question, ..prompt.clone() };
        let request = request("vanilla", sampling, 8);
        let (with, likely, _) = answer(&keeping, &next, &request);
        let (without, also, _) = answer(&plain, &next, &request);
        assert!(with.stats.prefix_tokens >= 112, "{}", with.stats.prefix_tokens);
        assert_eq!((with.tokens, likely), (without.tokens, also));
    }
}
