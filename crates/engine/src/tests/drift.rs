//! Tokens that methods choose, and logits that follow, against independent implementations (`tools/golden_drift.py`, `tools/golden_choices.py`).

use refrain_eviction::POLICIES;
use refrain_fusion::{Drift, METHODS, Pie, Scout};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::*;
use crate::prefill::AttentionMap;

#[derive(Deserialize)]
struct Golden {
    model: String,
    system: Vec<u32>,
    chunks: Vec<Vec<u32>>,
    question: Vec<u32>,
    answer: Vec<u32>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prefix: Vec<u32>,
    method: String,
    /// Document tokens computed at the last layer.
    rows: Vec<u32>,
    /// How many are computed at each layer.
    layer_rows: Option<Vec<usize>>,
    /// Spans `[start, end)` of the documents' tokens that a method keeps at each layer, if it keeps a part of them.
    kept: Option<Vec<Vec<(u32, u32)>>>,
    ambiguous: Option<usize>,
    logits: Vec<Vec<f32>>,
}

fn read<T: DeserializeOwned>(file: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(tiny("..").join(file)).unwrap()).unwrap()
}

/// `[start, end)` of the document tokens to which the question gives weight at each layer.
fn attended(engine: &Engine, prompt: &Prompt, method: Arc<dyn FusionMethod>) -> Vec<Vec<(u32, u32)>> {
    let (eviction, max_seq_len) = (Eviction::full().clone(), prompt.len());
    let request = PrefillRequest { method, eviction, max_seq_len, capture: AttentionCapture::Maps };
    let mut prefilled = PrefillJob::start(engine, prompt, request).unwrap().run().unwrap();
    prefilled.load.join();
    let start = prompt.system.len() as u32;
    let spans = |map: &AttentionMap| {
        let mut spans: Vec<(u32, u32)> = Vec::new();
        let weights = (start..).zip(map.rows().last().unwrap());
        for (position, _) in weights.filter(|(_, weight)| **weight > 0.0) {
            match spans.last_mut() {
                Some((_, end)) if *end == position => *end += 1,
                _ => spans.push((position, position + 1)),
            }
        }
        spans
    };
    prefilled.stats.maps.iter().map(spans).collect()
}

impl Golden {
    fn assert_followed(&self) {
        let chunk =
            |(i, tokens): (usize, &Vec<u32>)| PromptChunk::whole(i, format!("chunk {i}"), tokens.clone());
        let prompt = Prompt {
            system: self.system.clone(),
            system_reusable: true,
            chunks: self.chunks.iter().enumerate().map(chunk).collect(),
            question: self.question.clone(),
            ..Prompt::default()
        };
        let engine = tiny_engine(&self.model, exact(Dtype::F32));
        for case in &self.cases {
            let what = format!("{} {} behind {} tokens", self.model, case.method, case.prefix.len());
            let engine = match case.prefix.as_slice() {
                [] => without_bos(&self.model, exact(Dtype::F32)),
                prefix => engine.behind(prefix).unwrap(),
            };
            let method = METHODS.parse(&case.method).unwrap();
            let mut got = prefill(&engine, &prompt, &method, prompt.len() + self.answer.len());
            let rows = &got.stats.final_rows[..got.stats.final_rows.len() - prompt.question.len()];
            assert_eq!(rows, case.rows, "{what}: the recomputed tokens");
            if let Some(rows) = &case.layer_rows {
                assert_eq!(&got.stats.document_rows, rows, "{what}: rows of each layer");
            }
            if let Some(kept) = &case.kept {
                assert_eq!(attended(&engine, &prompt, method.clone()), *kept, "{what}: the kept tokens");
            }
            if let Some(ambiguous) = case.ambiguous {
                assert_eq!(got.stats.ambiguous_cases, ambiguous, "{what}: ambiguous cases");
            }
            let mut logits = vec![got.logits.clone()];
            logits.extend(self.answer.iter().map(|token| got.extend(*token)));
            for (step, (got, expected)) in logits.iter().zip(&case.logits).enumerate() {
                let error = max_difference(got, expected);
                assert!(error <= 1e-4, "{what}: step {step}: {error}");
            }
        }
    }
}

#[test]
fn scout_and_drift_compute_what_an_independent_implementation_does() {
    read::<Golden>("drift.json").assert_followed();
}

#[test]
fn methods_of_papers_choose_and_compute_what_an_independent_implementation_does() {
    read::<Vec<Golden>>("choices.json").iter().for_each(Golden::assert_followed);
}

#[test]
fn drift_that_adds_nothing_is_scout_to_the_bit_and_both_stay_within_their_charge() {
    everywhere(|engine| {
        let prompt = random_prompt(engine, 5, &[60, 90, 75], 6, 4);
        for charge in [0.2, 0.35] {
            let scout = prefill(engine, &prompt, &Scout { charge, ..Scout::default() }, prompt.len());
            let still = Drift { charge, alpha: 0.0, spread: 0.0, ..Drift::default() };
            let same = prefill(engine, &prompt, &still, prompt.len());
            assert_eq!(scout.logits, same.logits, "{charge}");
            let drift = prefill(engine, &prompt, &Drift { charge, ..Drift::default() }, prompt.len());
            assert_ne!(scout.logits, drift.logits, "{charge}");
            let layers = engine.decoder().config().num_layers();
            let rows = drift.stats.document_rows.iter().sum::<usize>() + drift.stats.probe_rows;
            let most = charge * (prompt.document_tokens() * layers) as f64;
            assert!(rows as f64 <= most && rows as f64 > most - 2.0 * layers as f64, "{rows} of {most}");
        }
    });
}

#[test]
fn a_charge_too_small_for_one_token_recomputes_nothing() {
    let engine = tiny_engine("llama", exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[20, 30], 9, 4);
    let pie = prefill(&engine, &prompt, &Pie, prompt.len());
    for charge in [0.0, 0.01] {
        let drift = prefill(&engine, &prompt, &Drift { charge, ..Drift::default() }, prompt.len());
        assert_eq!((drift.logits, drift.stats.probe_rows), (pie.logits.clone(), 0));
    }
}

/// A chunk all of whose tokens are computed is compared with what is stored of it, at every layer.
#[test]
fn corrections_do_not_depend_on_what_memory_held_before() {
    let method = Drift { charge: 0.6, seam: 2, from: 0.0, to: 0.5, ..Drift::default() };
    let bounded = POLICIES.parse("h2o:capacity=48").unwrap();
    for eviction in [Eviction::full(), &bounded] {
        let logits = |seeds: &[u64]| {
            let engine = tiny_engine("llama", exact(Dtype::F16));
            let prompts = seeds.iter().map(|seed| random_prompt(&engine, 5, &[40, 2, 30], 9, *seed));
            let run =
                |prompt: Prompt| prefill_with(&engine, &prompt, &method, eviction, prompt.len()).unwrap();
            prompts.fold(Vec::new(), |_, prompt| run(prompt).logits)
        };
        assert_eq!(logits(&[4]), logits(&[5, 4]), "{eviction:?}");
    }
}
