//! Prompts that take over keys and values of those before them.

use refrain_eviction::POLICIES;
use refrain_fusion::METHODS;

use super::*;
use crate::generate::{FirstToken, Prefill};
use crate::{Answer, GenerateRequest, Oracle, Sampling};

/// Most bytes of the prefix cache.
const BOUND: usize = 64 << 20;

fn first_token(engine: &Engine, prompt: &Prompt, request: &GenerateRequest) -> FirstToken {
    let steps = request.sampling.max_tokens;
    Prefill::start(engine, prompt, request.clone(), AttentionCapture::Nothing, (steps, 0))
        .unwrap()
        .run()
        .unwrap()
}

fn request(method: &str) -> GenerateRequest {
    let sampling = Sampling { max_tokens: 40, ..Sampling::default() };
    GenerateRequest { ignore_eos: true, ..GenerateRequest::new(METHODS.parse(method).unwrap(), sampling) }
}

fn answer(engine: &Engine, prompt: &Prompt, request: &GenerateRequest) -> Answer {
    engine.answer(prompt, request, |_| true).unwrap()
}

/// The prompt of the next turn: the answer but for its last token, and then `more` tokens.
fn next_turn(engine: &Engine, prompt: &Prompt, answer: &Answer, more: usize) -> Prompt {
    let said = &answer.tokens[..answer.tokens.len() - 1];
    let asked = random_prompt(engine, 0, &[], more, 77).question;
    Prompt { question: [&prompt.question, said, &asked].concat(), ..prompt.clone() }
}

/// Methods whose cache holds every token of the prompt.
const METHODS_OF_ALL_TOKENS: [&str; 10] = [
    "vanilla",
    "full_reuse",
    "pie",
    "lego_link",
    "cache_blend",
    "a3",
    "prophet_kv",
    "info_flow",
    "scout:charge=0.3",
    "drift:charge=0.3",
];

/// A prompt that comes again is computed from its last block on, and the logits are those of the first time, to the bit.
#[test]
fn a_prompt_that_comes_again_gives_the_same_bits() {
    for (model, kv) in [
        ("llama", Dtype::F32),
        ("qwen2", Dtype::F16),
        ("qwen3", Dtype::F16),
        ("gemma3_vision", Dtype::F16),
        ("qwen3_moe", Dtype::F16),
    ] {
        for method in METHODS_OF_ALL_TOKENS {
            let engine = tiny_engine(model, exact(kv)).with_prefix_cache(BOUND);
            let prompt = random_prompt(&engine, 20, &[70, 50, 90], 33, 5);
            let request = request(method);
            let FirstToken { logits, sequence, .. } = first_token(&engine, &prompt, &request);
            assert_eq!(sequence.stats().prefix_tokens, 0);
            drop(sequence);
            assert_eq!(engine.prefix_cache_bytes(), 0, "kept once the first token was told");
            let whole = answer(&engine, &prompt, &request);
            let again = first_token(&engine, &prompt, &request);
            let stats = again.sequence.stats();
            // 263 tokens: the block of the last one is computed.
            let read = (stats.prefix_tokens, stats.cached_tokens, stats.reused_tokens);
            assert_eq!(read, (256, 256, 0), "{model} {method}");
            assert_eq!((stats.recomputed_tokens, stats.charged_ratio), (0, 0.0), "{model} {method}");
            assert!(again.logits == logits, "{model} {method}");
            drop(again);
            assert_eq!(answer(&engine, &prompt, &request).tokens, whole.tokens, "{model} {method}");
        }
    }
}

/// A further turn computes what is new, and goes on as the sequence before it would have, to the bit.
#[test]
fn a_further_turn_goes_on_from_the_one_before() {
    for method in METHODS_OF_ALL_TOKENS {
        let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
        let prompt = random_prompt(&engine, 20, &[70, 50, 90], 33, 5);
        let request = request(method);
        let said = answer(&engine, &prompt, &request);
        let turn = next_turn(&engine, &prompt, &said, 30);
        let next = first_token(&engine, &turn, &request);
        // 302 tokens are known: 263 of the prompt and 39 of the answer.
        assert_eq!(next.sequence.stats().prefix_tokens, 288, "{method}");
        let mut before = prefill(&engine, &prompt, &Continued(request.method.clone()), turn.len() + 1);
        let mut logits = Vec::new();
        for token in &turn.question[prompt.question.len()..] {
            logits = before.extend(*token);
        }
        assert!(next.logits == logits, "{method}");
        // A third turn finds the second.
        drop(next);
        let said = answer(&engine, &turn, &request);
        let third = next_turn(&engine, &turn, &said, 20);
        let stats = answer(&engine, &third, &request).stats;
        assert_eq!(stats.prefix_tokens, (turn.len() + said.tokens.len() - 1) / 16 * 16, "{method}");
    }
}

/// A method behind a pointer.
#[derive(Clone, Debug)]
struct Continued(Arc<dyn FusionMethod>);

impl FusionMethod for Continued {
    fn start(
        &self,
        inputs: &Arc<refrain_fusion::PrefillInputs>,
    ) -> refrain_fusion::Result<Box<dyn refrain_fusion::Pass>> {
        self.0.start(inputs)
    }

    fn reuses(&self) -> bool {
        self.0.reuses()
    }

    fn goes_on(&self) -> bool {
        self.0.goes_on()
    }

    fn statistics(&self) -> Vec<&dyn ChunkStatistics> {
        self.0.statistics()
    }
}

/// Vanilla's turns are those of an engine that keeps nothing.
#[test]
fn what_is_taken_over_is_what_vanilla_computes() {
    let real = real(SMOLLM2);
    for path in [tiny("llama")].into_iter().chain(real) {
        let (plain, engine) =
            (engine(&path, exact(Dtype::F32)), engine(&path, exact(Dtype::F32)).with_prefix_cache(BOUND));
        let request = request("vanilla");
        let mut prompt = random_prompt(&engine, 40, &[], 60, 3);
        for turn in 0..3 {
            let [with, without] = [&engine, &plain].map(|engine| first_token(engine, &prompt, &request));
            assert_eq!(with.sequence.stats().prefix_tokens > 0, turn > 0);
            assert!(with.logits == without.logits, "{}, turn {turn}", path.display());
            drop(with);
            let said = answer(&engine, &prompt, &request);
            prompt = next_turn(&engine, &prompt, &said, 25);
        }
    }
}

/// Nothing crosses namespaces, methods, or prompts that a method worked on with another question.
#[test]
fn what_depends_on_another_is_not_taken_over() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
    let prompt = random_prompt(&engine, 40, &[70, 50], 40, 5);
    let taken = |engine: &Engine, prompt: &Prompt, request: &GenerateRequest| {
        answer(engine, prompt, request).stats.prefix_tokens
    };
    let (a3, vanilla) = (request("a3"), request("vanilla"));
    assert_eq!(taken(&engine, &prompt, &a3), 0);
    assert_eq!(taken(&engine, &prompt, &a3), 192);
    assert_eq!(taken(&engine, &prompt, &request("a3:ratio=0.3")), 0);
    assert_eq!(taken(&engine, &prompt, &vanilla), 0);
    let other = engine.in_namespace("other", None);
    assert_eq!(taken(&other, &prompt, &a3), 0);
    assert_eq!(taken(&other, &prompt, &a3), 192);
    let mut asked = prompt.clone();
    asked.question[20] ^= 1;
    assert_eq!(taken(&engine, &asked, &a3), 0, "another question");
    // Vanilla's rows depend on nothing that comes after them: all blocks before the change are found.
    assert_eq!(taken(&engine, &asked, &vanilla), 176);
    let mut cut = prompt.clone();
    let tokens = [cut.chunks[0].tokens.clone(), cut.chunks[1].tokens.clone()].concat();
    cut.chunks = vec![PromptChunk::whole(0, "one", tokens)];
    assert_eq!(taken(&engine, &cut, &a3), 0, "the same tokens, cut otherwise");
    assert_eq!(taken(&engine, &cut, &vanilla), 192);
    let bounded = |policy| GenerateRequest { eviction: POLICIES.parse(policy).unwrap(), ..vanilla.clone() };
    assert_eq!(taken(&engine, &prompt, &bounded("morph_kv:capacity=100")), 0);
    // An explanation shows all of the question's attention.
    let explained = GenerateRequest { explain: true, ..vanilla };
    let explained = answer(&engine, &prompt, &explained);
    assert!(explained.stats.prefix_tokens == 0 && explained.explanation.is_some());
}

#[test]
fn a_chat_without_documents_outlives_a_removed_document() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
    let (chat, over) = (random_prompt(&engine, 40, &[], 40, 5), random_prompt(&engine, 40, &[70], 40, 6));
    let taken = |prompt: &Prompt| answer(&engine, prompt, &request("vanilla")).stats.prefix_tokens;
    assert_eq!([&chat, &over].map(taken), [0, 0]);
    engine.forget_prefixes();
    assert_eq!([&chat, &over].map(taken), [64, 0]);
}

/// A prompt that waited for its turn while one of its documents was removed is answered, and leaves nothing of it.
#[test]
fn a_prompt_over_a_removed_document_is_not_kept() {
    for method in ["vanilla", "pie"] {
        let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
        let prompt = random_prompt(&engine, 20, &[70, 50], 33, 5);
        let (removed, request) = (engine.keys_of(&prompt.chunks[1..], true), request(method));
        let waiting = engine.prefill(&prompt, request.clone()).unwrap();
        engine.store().delete(&removed).unwrap();
        engine.forget_prefixes();
        waiting.answer(|_| true).unwrap();
        assert_eq!(engine.prefix_cache_bytes(), 0, "{method}");
        engine.store().admit(|| removed);
        assert_eq!(answer(&engine, &prompt, &request).stats.prefix_tokens, 0);
        assert!(engine.prefix_cache_bytes() > 0, "{method}");
    }
}

/// A scaling of positions that depends on the length of a request is a part of what keys depend on.
#[test]
fn keys_that_were_rotated_otherwise_are_not_taken_over() {
    let engine = tiny_engine("phi3_longrope", exact(Dtype::F32)).with_prefix_cache(BOUND);
    let config = engine.decoder().config();
    let prompt = random_prompt(&engine, 30, &[], 30, 5);
    let turned = |tokens: usize| engine.decoder().ropes(prompt.len() + tokens);
    let long = (1..config.context - prompt.len()).find(|tokens| turned(*tokens) != turned(1)).unwrap();
    let taken = |max_tokens: usize| {
        let mut request = request("vanilla");
        request.sampling.max_tokens = max_tokens;
        let first = first_token(&engine, &prompt, &request);
        let tokens = first.sequence.stats().prefix_tokens;
        let mut sequence = first.sequence;
        sequence.push_tokens(&mut |_| true);
        tokens
    };
    assert_eq!([taken(4), taken(4), taken(long), taken(long), taken(4)], [0, 48, 0, 48, 48]);
}

/// The bound holds, and a cache that is full still serves what was used last.
#[test]
fn the_bound_of_bytes_holds() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32)).with_prefix_cache(1 << 20);
    for seed in 0..12 {
        let prompt = random_prompt(&engine, 40, &[], 200, seed + 1);
        answer(&engine, &prompt, &request("vanilla"));
        assert!(engine.prefix_cache_bytes() <= 1 << 20);
        let again = answer(&engine, &prompt, &request("vanilla"));
        assert!(again.stats.prefix_tokens >= 224, "{}", again.stats.prefix_tokens);
    }
    assert!(engine.prefix_cache_bytes() > 1 << 18);
}

/// A method that retrieves blocks takes nothing over, whether another method or its own first turn, which is within its window, has left it.
#[test]
fn a_method_that_retrieves_goes_on_retrieving() {
    for method in [
        "inf_llm:local=32,block=16,topk=2,representatives=2",
        "inf_llm:local=300,block=16,topk=2,representatives=2",
    ] {
        let plain = engine(&tiny("llama"), exact(Dtype::F16));
        let cached = plain.with_prefix_cache(BOUND);
        let prompt = random_prompt(&plain, 40, &[], 160, 3);
        answer(&cached, &prompt, &request("vanilla"));
        let request = request(method);
        let first = answer(&cached, &prompt, &request);
        assert_eq!(first.tokens, answer(&plain, &prompt, &request).tokens, "{method}");
        let turn = next_turn(&plain, &prompt, &first, 90);
        let further = answer(&cached, &turn, &request);
        assert_eq!((first.stats.prefix_tokens, further.stats.prefix_tokens), (0, 0), "{method}");
        assert_eq!(further.tokens, answer(&plain, &turn, &request).tokens, "{method}");
    }
}

/// Documents behind the beginning that was taken over are computed, and the account says so.
#[test]
fn documents_behind_a_taken_over_beginning_are_charged() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
    let layers = engine.decoder().config().num_layers();
    let prompt = random_prompt(&engine, 20, &[70, 50], 33, 5);
    let other = Prompt { question: random_prompt(&engine, 0, &[], 41, 6).question, ..prompt.clone() };
    let last = Prompt {
        chunks: vec![
            prompt.chunks[0].clone(),
            PromptChunk { tokens: vec![7; 50], ..prompt.chunks[1].clone() },
        ],
        ..other.clone()
    };
    answer(&engine, &prompt, &request("vanilla"));
    // The first 16 tokens; then the whole blocks up to the question; then those of the first document.
    let stats = |prompt: &Prompt| answer(&engine, prompt, &request("vanilla")).stats;
    let found = stats(&last);
    assert_eq!((found.prefix_tokens, found.recomputed_tokens), (80, 60));
    assert_eq!((found.charged_ratio, found.recompute_ratio, found.full_layers), (0.5, 0.5, 0));
    let found = stats(&other);
    assert_eq!((found.prefix_tokens, found.recomputed_tokens, found.full_layers), (128, 12, 0));
    let fresh =
        Prompt { chunks: vec![PromptChunk { tokens: vec![9; 70], ..prompt.chunks[0].clone() }], ..other };
    let found = stats(&fresh);
    assert_eq!((found.prefix_tokens, found.charged_ratio, found.full_layers), (16, 1.0, layers));
}

/// A comparison computes all that it measures, and leaves nothing that would spare a later prompt its computing.
#[test]
fn comparisons_take_nothing_from_the_prefix_cache_and_leave_nothing_there() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
    let prompt = random_prompt(&engine, 20, &[70, 50, 90], 33, 5);
    for method in ["vanilla", "pie"] {
        answer(&engine, &prompt, &request(method));
    }
    let kept = engine.prefix_cache_bytes();
    assert!(kept > 0);
    let methods = ["vanilla", "pie"].map(|name| (name.to_owned(), METHODS.parse(name).unwrap()));
    for _ in 0..2 {
        let rows = engine.compare(&prompt, &methods, Eviction::full(), 4).unwrap();
        let vanilla = &rows[0].stats;
        assert_eq!((vanilla.prefix_tokens, vanilla.charged_ratio), (0, 1.0));
        assert_eq!(rows[1].stats.prefix_tokens, 0);
    }
    for oracle in [Oracle::Chosen, Oracle::Keys] {
        let (mixed, _) = engine.oracle(&prompt, &methods[1].1, oracle).unwrap();
        assert_eq!(mixed.prefix_cache_bytes(), 0, "its chunks are others under the same keys");
    }
    assert_eq!(engine.prefix_cache_bytes(), kept);
}

/// Methods of a second turn take over what the first has left, and are compared with vanilla over the whole prompt. Vanilla and `pie` repair
/// nothing, so that what they take over is what they would compute.
#[test]
fn a_comparison_may_take_over_what_the_turn_before_has_left() {
    let engine = engine(&tiny("llama"), exact(Dtype::F16)).with_prefix_cache(BOUND);
    let prompt = random_prompt(&engine, 20, &[70, 50], 33, 5);
    answer(&engine, &prompt, &request("vanilla"));
    let turn = next_turn(&engine, &prompt, &answer(&engine, &prompt, &request("pie")), 20);
    let kept = engine.prefix_cache_bytes();
    let methods = ["vanilla", "pie"].map(|name| (name.to_owned(), METHODS.parse(name).unwrap()));
    let anew = engine.compare(&turn, &methods, Eviction::full(), 4).unwrap();
    let taken = engine.compare_taking_over(&turn, &methods, Eviction::full(), 4).unwrap();
    for (taken, anew) in taken.iter().zip(&anew) {
        let name = &taken.method;
        assert!(taken.stats.prefix_tokens >= prompt.len() / 16 * 16, "{name}: {}", taken.stats.prefix_tokens);
        assert_eq!(anew.stats.prefix_tokens, 0, "{name}");
        assert!((taken.kl - anew.kl).abs() < 1e-6, "{name}: {} and {}", taken.kl, anew.kl);
    }
    assert!(taken[1].kl > 1e-3, "{}", taken[1].kl);
    assert_eq!(engine.prefix_cache_bytes(), kept);
}
