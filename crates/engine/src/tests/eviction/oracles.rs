//! Results that policies must reproduce exactly, and invariants of every step.

use std::collections::BTreeSet;

use refrain_eviction::{Eviction, PromptSpans, Sizes};
use refrain_fusion::{A3, FusionMethod, LegoLink, Pie, Vanilla};
use refrain_kernels::Dtype;

use super::policy;
use crate::cache::DecodeCache;
use crate::prefill::Prefilled;
use crate::tests::{
    KINDS, SMOLLM2, emulated, engine, exact, max_difference, prefill_with, random_prompt, real, shared,
    small, tiny_engine,
};
use crate::{Engine, GenerateRequest, Prompt, Sampling};

/// Every policy by its own name, small enough to be at work in a prompt of a hundred tokens.
const POLICIES: [&str; 11] = [
    "h2o:capacity=40",
    "h2o:capacity=40,recent=7,normalise",
    "h2o:budget=hf",
    "streaming_llm:capacity=40,positions=original",
    "streaming_llm:capacity=40",
    "scissorhands:capacity=48,history=20,recent=5",
    "keyformer:keep=0.4",
    "morph_kv:capacity=40,window=6",
    "morph_kv:capacity=40,window=6,fuse=max,evict_after=1.3",
    "morph_kv:capacity=40,window=6,profile=code_llama",
    "morph_kv:capacity=40,window=6,profile=code_mistral",
];

/// Tokens that an answer might have beyond those that it has.
const SPARE: usize = 60;

const ONCE: [&str; 4] = [
    "snap_kv:capacity=40,window=8",
    "snap_kv:capacity=40,window=8,kernel=7,pool=max",
    "a3_ex:capacity=40",
    "a3_ex:capacity=12,pool=max",
];

pub(super) fn prompt(engine: &Engine) -> Prompt {
    random_prompt(engine, 5, &[24, 32, 19], 9, 1)
}

/// Prefill and the logits of the forced tokens after it.
pub(super) fn forced<'a>(
    engine: &'a Engine,
    prompt: &Prompt,
    method: &(impl FusionMethod + Clone + 'static),
    eviction: &'a Eviction,
    tokens: usize,
    mut each: impl FnMut(&Prefilled),
) -> Vec<f32> {
    // More room than is used: a cache that holds all of it would not be bounded at all.
    let room = engine.max_seq_len(prompt, tokens + SPARE, eviction).unwrap();
    let mut prefilled = prefill_with(engine, prompt, method, eviction, room).unwrap();
    let mut logits = prefilled.logits.clone();
    each(&prefilled);
    let vocab = engine.decoder().config().vocab;
    for step in 0..tokens {
        logits.extend(prefilled.extend(forced_token(step, vocab)));
        each(&prefilled);
    }
    logits
}

/// The token that is forced at a step.
pub(super) fn forced_token(step: usize, vocab: usize) -> u32 {
    ((step * 7919 + 13) % vocab) as u32
}

fn logits(engine: &Engine, prompt: &Prompt, eviction: &Eviction, tokens: usize) -> Vec<f32> {
    forced(engine, prompt, &Vanilla, eviction, tokens, |_| ())
}

/// The tiny models, and SmolLM2 as it is used (f16 cache, its own precision). Emulated threads take one setting for each model, in turn.
pub(super) fn everywhere(test: impl Fn(&Engine)) {
    for (index, name) in KINDS.into_iter().chain(["mistral_window", "phi4_longrope"]).enumerate() {
        for (nth, settings) in [exact(Dtype::F32), small()].into_iter().enumerate() {
            if !emulated() || index % 2 == nth {
                eprintln!("on {name}, {settings:?}");
                test(&tiny_engine(name, settings));
            }
        }
    }
    if let Some(path) = real(SMOLLM2) {
        test(&engine(&path, small()));
    }
}

#[test]
fn oracle_10_room_for_all_tokens_is_full_attention_to_the_bit() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let full = logits(engine, &prompt, Eviction::full(), 12);
        let most = prompt.len() + 12;
        for (spec, evicts) in [
            ("h2o", false),
            ("streaming_llm:positions=original", false),
            ("streaming_llm", false),
            ("scissorhands", false),
            ("morph_kv", false),
            ("morph_kv:fuse=max,profile=code_llama", false),
            ("morph_kv:profile=code_mistral", false),
            ("keyformer", false),
            ("snap_kv:window=8", false),
            ("a3_ex", false),
            // One slot too few must differ.
            ("h2o", true),
            ("streaming_llm", true),
            ("morph_kv", true),
        ] {
            let capacity = if evicts { prompt.len() - 1 } else { most };
            let got = logits(
                engine,
                &prompt,
                &policy(&format!("{spec}{}capacity={capacity}", if spec.contains(':') { "," } else { ":" })),
                12,
            );
            let same = got.iter().zip(&full).all(|(a, b)| a.to_bits() == b.to_bits());
            let window = engine.decoder().config().layers.iter().any(|layer| layer.window.is_some());
            if window && !evicts {
                // A layer with a window keeps just that, in other slots than full attention has them.
                assert!(max_difference(&got, &full) <= 2e-2, "{spec}");
            } else if !window {
                assert_eq!(same, !evicts, "{spec} with capacity {capacity}");
            }
        }
    });
}

/// A window that a policy's slots can hold is all that its layer sees, whatever the policy keeps.
#[test]
fn windows_are_kept_exactly_where_they_fit() {
    for settings in [exact(Dtype::F32), small()] {
        let tolerance = if settings.precision.is_some() { 1e-4 } else { 2e-2 };
        let engine = tiny_engine("mistral_window", settings);
        let prompt = random_prompt(&engine, 3, &[8], 9, 5);
        let full = logits(&engine, &prompt, Eviction::full(), 40);
        for spec in [
            "scissorhands:capacity=24,recent=2",
            "morph_kv:capacity=12,window=4,evict_after=1.5",
            "snap_kv:capacity=10,window=4",
            "h2o:capacity=15",
            "streaming_llm:capacity=15",
            "h2o:capacity=15,per_query_head",
        ] {
            let got = logits(&engine, &prompt, &policy(spec), 40);
            assert!(max_difference(&got, &full) <= tolerance, "{spec}: {}", max_difference(&got, &full));
        }
        // Where it does not fit, what the policy keeps is seen.
        let few = logits(&engine, &prompt, &policy("streaming_llm:capacity=8"), 40);
        assert!(max_difference(&few, &full) > 2.0 * tolerance);
    }
}

/// A prompt that the one-shot policies prune differs only from the second token on.
#[test]
fn the_first_token_comes_from_full_attention() {
    let engine = tiny_engine("llama", small());
    let (prompt, vocab) = (prompt(&engine), engine.decoder().config().vocab);
    let full = logits(&engine, &prompt, Eviction::full(), 4);
    let expanded = ["h2o:capacity=40,per_query_head", "snap_kv:capacity=40,window=8,per_query_head"];
    for spec in POLICIES.iter().chain(&ONCE).chain(&expanded) {
        let got = logits(&engine, &prompt, &policy(spec), 4);
        assert_eq!(got[..vocab], full[..vocab], "{spec}");
        assert_ne!(got[vocab..2 * vocab], full[vocab..2 * vocab], "{spec}");
    }
}

#[test]
fn oracle_12_sizes_and_recent_tokens_hold_at_every_step() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let n = prompt.len();
        for spec in POLICIES {
            // The real model and emulated threads take their time: they go the way that people go.
            let slow = emulated() || engine.decoder().config().num_layers() > 10;
            let all = [shared(LegoLink::default()), shared(Vanilla), shared(Pie)];
            for method in &all[..if slow { 1 } else { 3 }] {
                let eviction = policy(spec);
                let option = |name: &str| {
                    let value = spec.split([':', ',']).find_map(|word| word.strip_prefix(name));
                    value.and_then(|value| value.strip_prefix('=')).and_then(|value| value.parse().ok())
                };
                let capacity = option("capacity").unwrap_or(if spec.starts_with("h2o") { 16 } else { 35 });
                let most = if spec.contains("evict_after") { 53 } else { capacity + 1 };
                let recent: usize = match spec.split(':').next().unwrap() {
                    "streaming_llm" => capacity - 4,
                    "h2o" => option("recent").unwrap_or(capacity / 2),
                    "scissorhands" => 5,
                    "keyformer" => 10,
                    _ => 6,
                };
                let mut at = n;
                let mut bytes = BTreeSet::new();
                forced(engine, &prompt, method, &eviction, 40, |prefilled| {
                    let bounded = prefilled.evicting().unwrap();
                    bytes.insert((bounded.kv_bytes(), bounded.side_bytes()));
                    for layer in 0..engine.decoder().config().num_layers() {
                        let window =
                            engine.decoder().config().layers[layer].window.is_some_and(|w| w <= capacity);
                        for head in 0..engine.decoder().config().kv_heads {
                            let positions: BTreeSet<usize> =
                                bounded.positions(layer, head).iter().map(|p| *p as usize).collect();
                            let what = format!("{spec} {method:?} layer {layer} head {head} at {at}");
                            assert_eq!(
                                positions.len(),
                                bounded.positions(layer, head).len(),
                                "{what}: twice"
                            );
                            assert!(positions.len() <= most, "{what}: {} tokens", positions.len());
                            assert!(positions.last().unwrap() < &at, "{what}: a token to come");
                            let recent = if window { recent.min(15) } else { recent };
                            assert!((at - recent..at).all(|p| positions.contains(&p)), "{what}: recent");
                            if spec.starts_with("streaming") && !window {
                                assert!((0..4).all(|p| positions.contains(&p)), "{what}: sinks");
                            }
                        }
                    }
                    at += 1;
                });
                let side: BTreeSet<usize> = bytes.iter().map(|(_, side)| *side).collect();
                let kv: BTreeSet<usize> = bytes.iter().map(|(kv, _)| *kv).collect();
                assert_eq!(kv.len(), 1, "{spec}: slots are allocated once");
                // Turned sinks are kept from the first step on that turns them.
                assert!(side.len() <= 2, "{spec}: {side:?}");
            }
        }
    });
}

#[test]
fn what_is_decoded_stays_after_the_prompt_was_pruned_once() {
    let engine = tiny_engine("llama", exact(Dtype::F32));
    let prompt = prompt(&engine);
    let (n, system, question) = (prompt.len(), prompt.system_span(), prompt.question_span());
    for spec in ONCE {
        let eviction = policy(spec);
        let capacity = if spec.contains("=12") { 12 } else { 40 };
        let mut step = 0;
        forced(&engine, &prompt, &A3::default(), &eviction, 9, |prefilled| {
            let bounded = prefilled.evicting().unwrap();
            for head in 0..2 {
                let positions = bounded.positions(1, head);
                assert_eq!(positions.len(), capacity + step, "{spec}");
                assert!((n..n + step).all(|p| positions.contains(&(p as u32))), "{spec}");
                let last =
                    if spec.starts_with("snap") { 8 } else { question.len().min(capacity - system.len()) };
                assert!((n - last..n).all(|p| positions.contains(&(p as u32))), "{spec}");
                if spec.starts_with("a3_ex") {
                    assert!(system.positions().all(|p| positions.contains(&p)), "{spec}: system part");
                }
            }
            step += 1;
        });
    }
    let few = policy("a3_ex:capacity=5");
    let error = engine.max_seq_len(&prompt, 1, &few).unwrap_err().to_string();
    assert!(error.contains("capacity 5") && error.contains("5 tokens"), "{error}");
}

#[test]
fn oracle_11_policies_that_are_one_another() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let run = |spec: &str| logits(engine, &prompt, &policy(spec), 30);
        // H2O and Keyformer make their sums in different orders: of two scores that are nearly equal each may keep the other's token, until
        // neither has both. The others' logits are the same to the bit.
        for (one, other, differing) in [
            ("keyformer:capacity=40,recent_share=0.5,noise=false,tau_end=1", "h2o:capacity=40,recent=20", 15),
            ("h2o:capacity=40,recent=40", "streaming_llm:capacity=40,sinks=0,positions=original", 0),
            ("morph_kv:capacity=40,window=1", "morph_kv:capacity=40,window=1,fuse=max", 0),
        ] {
            let (first, second) = (run(one), run(other));
            let vocabulary = first.len() / 30;
            let steps = first.chunks_exact(vocabulary).zip(second.chunks_exact(vocabulary));
            let found = steps.filter(|(first, second)| max_difference(first, second) > 1e-4).count();
            assert!(
                found <= differing && (differing > 0 || first == second),
                "{one}, {other}: {found} of 30"
            );
        }
        if engine.decoder().config().layers.iter().any(|layer| layer.window.is_some()) {
            return;
        }
        for other in ["keyformer:capacity=40,recent_share=0.5,noise_seed=1", "h2o:capacity=40,recent=19"] {
            assert!(
                max_difference(&run("h2o:capacity=40,recent=20"), &run(other)) > 1e-3,
                "{other} is another"
            );
        }
    });
}

#[test]
fn a_cache_for_every_query_head_takes_that_much_more_and_gives_the_same_where_nothing_is_evicted() {
    for name in ["llama", "phi4_longrope"] {
        let engine = tiny_engine(name, exact(Dtype::F32));
        let prompt = prompt(&engine);
        let config = engine.decoder().config();
        let group = config.heads / config.kv_heads;
        let sampling = Sampling { max_tokens: 20, ..Sampling::default() };
        let account = |spec: &str| {
            let eviction = policy(spec);
            let request = GenerateRequest {
                eviction: eviction.clone(),
                ignore_eos: true,
                ..GenerateRequest::new(shared(Vanilla), sampling.clone())
            };
            engine.answer(&prompt, &request, |_| true).unwrap().stats
        };
        let full = logits(&engine, &prompt, Eviction::full(), 12);
        let expanded = logits(&engine, &prompt, &policy("full:per_query_head"), 12);
        assert!(max_difference(&full, &expanded) <= 1e-4);
        let (kv, query) = (
            account("morph_kv:capacity=40,window=6"),
            account("morph_kv:capacity=40,window=6,per_query_head"),
        );
        assert_eq!((kv.kv_accounting, query.kv_accounting), ("kv_head", "query_head"));
        assert_eq!(query.kv_bytes, group * kv.kv_bytes);
        // Beside the bounded caches there is a layer of the prompt, and a copy of it for every query head.
        let layer = prompt.len() * engine.decoder().shape().token_bytes(Dtype::F32) / config.num_layers();
        assert!(query.kv_bytes_peak >= query.kv_bytes + (1 + group) * layer, "{query:?}");
        assert_eq!((kv.retained_tokens, query.retained_tokens), (41, 41));
        assert!(
            account("snap_kv:capacity=40,window=8,per_query_head").kv_bytes
                > account("snap_kv:capacity=40,window=8").kv_bytes
        );
        // Sets of their own choose otherwise.
        let apart = logits(&engine, &prompt, &policy("h2o:capacity=40,per_query_head"), 30);
        assert!(max_difference(&apart, &logits(&engine, &prompt, &policy("h2o:capacity=40"), 30)) > 1e-4);
    }
}

#[test]
fn the_account_says_what_is_held() {
    let engine = tiny_engine("llama", small());
    let prompt = prompt(&engine);
    let n = prompt.len();
    let token = engine.decoder().shape().token_bytes(Dtype::F16);
    let sampling = Sampling { max_tokens: 50, ..Sampling::default() };
    let answer = |spec: &str| {
        let eviction = policy(spec);
        let request = GenerateRequest {
            eviction: eviction.clone(),
            ignore_eos: true,
            ..GenerateRequest::new(shared(A3::default()), sampling.clone())
        };
        let mut most = 0;
        let answer = engine.answer(&prompt, &request, |event| {
            most = most.max(event.retained);
            event.tokens < 50
        });
        (answer.unwrap().stats, most)
    };
    let (full, held) = answer("full");
    assert_eq!((full.answer_tokens, full.retained_tokens, held), (50, n + 49, n + 49));
    assert_eq!((full.kv_bytes, full.kv_bytes_full, full.side_bytes), ((n + 50) * token, (n + 49) * token, 0));
    let (morph, held) = answer("morph_kv:capacity=40,window=6");
    assert_eq!((morph.retained_tokens, held), (41, 41));
    assert_eq!((morph.kv_bytes, morph.kv_bytes_full), (41 * token, (n + 49) * token));
    assert!(morph.side_bytes > 0 && morph.kv_bytes_peak > morph.kv_bytes);
    // The prompt is held a few layers at a time beside the bounded cache.
    let layers = engine.decoder().config().num_layers();
    assert!(morph.kv_bytes_peak <= (41 + n + 50) * token, "{layers} layers");
    let (snap, _) = answer("snap_kv:capacity=40,window=8");
    assert_eq!((snap.retained_tokens, snap.kv_bytes), (40 + 49, (40 + 50) * token));
}

/// Admission counts what a policy keeps beside keys and values before it is there; the room of one step is small.
#[test]
fn a_request_holds_no_more_than_was_counted_before_it() {
    let engine = tiny_engine("llama", small());
    let prompt = prompt(&engine);
    let sampling = Sampling { max_tokens: 50, ..Sampling::default() };
    let held = |spec: &str| {
        let eviction = policy(spec);
        let counted = engine.max_kv_bytes(&prompt, sampling.max_tokens, &eviction).unwrap();
        let request = GenerateRequest {
            eviction,
            ignore_eos: true,
            ..GenerateRequest::new(shared(Vanilla), sampling.clone())
        };
        let stats = engine.answer(&prompt, &request, |_| true).unwrap().stats;
        let held = stats.kv_bytes + stats.side_bytes;
        assert!(held <= counted + counted / 16, "{spec}: {held} bytes were held and {counted} counted");
        (stats.kv_bytes, counted)
    };
    for spec in POLICIES.iter().chain(&ONCE) {
        held(spec);
        held(&format!("{spec},per_query_head"));
    }
    for profile in ["paper", "code_llama", "code_mistral"] {
        let (kv_bytes, counted) = held(&format!("morph_kv:capacity=100,window=90,profile={profile}"));
        assert!(
            2 * counted > 3 * kv_bytes,
            "{profile}: {counted} were counted, {kv_bytes} of them keys and values"
        );
    }
}

/// A layer of the prompt has all of its tokens while a policy chooses among them.
#[test]
fn what_a_policy_keeps_beside_a_layer_of_the_prompt_is_counted() {
    let engine = tiny_engine("llama", small());
    let prompt = prompt(&engine);
    let config = engine.decoder().config();
    let spans = PromptSpans { system: prompt.system_span(), question: prompt.question_span() };
    let sizes = Sizes {
        heads: config.kv_heads,
        group: config.heads / config.kv_heads,
        head_dim: config.head_dim,
        capacity: prompt.len(),
        rows: prompt.len() + 50,
    };
    for spec in POLICIES.iter().chain(&ONCE).chain(&["scissorhands:capacity=16,recent=1,history=1000"]) {
        let eviction = policy(spec);
        let held = eviction.policy.scorer(&spans, sizes).bytes();
        let counted = engine.prompt_bytes(&prompt, &Vanilla, &eviction);
        assert!(held <= counted, "{spec}: {held} bytes are held and {counted} counted");
    }
}

#[test]
fn streaming_llm_goes_on_past_the_context_and_others_say_that_they_cannot() {
    let engine = tiny_engine("llama", small());
    let prompt = prompt(&engine);
    let context = engine.decoder().config().context;
    let sampling = Sampling { max_tokens: context + 50, ..Sampling::default() };
    let answer = |spec: &str| {
        let eviction = policy(spec);
        let request = GenerateRequest {
            eviction: eviction.clone(),
            ignore_eos: true,
            ..GenerateRequest::new(shared(Vanilla), sampling.clone())
        };
        engine.answer(&prompt, &request, |_| true).map(|answer| answer.tokens.len())
    };
    assert_eq!(answer("streaming_llm:capacity=40").unwrap(), context + 50);
    for spec in [
        "streaming_llm:capacity=40,positions=original",
        "morph_kv:capacity=40,window=6",
        "streaming_llm:capacity=4096",
    ] {
        let error = answer(spec).unwrap_err().to_string();
        assert!(error.contains("context"), "{spec}: {error}");
    }
}
