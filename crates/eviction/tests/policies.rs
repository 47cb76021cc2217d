//! Every policy of the registry under the conformance battery, and what budgets come to.

use refrain_eviction::{AttentionNeeds, Budget, POLICIES, PromptSpans, conformance};
use refrain_kv::Span;
use refrain_registry::OptionType;

#[test]
fn every_registered_policy_conforms() {
    for entry in POLICIES.entries {
        conformance::check(&entry.with([]).unwrap());
        // Small enough to be at work in short prompts.
        let options = entry.options();
        let has = |name: &str| options.iter().any(|option| option.name == name);
        let mut small = Vec::new();
        small.extend(has("capacity").then_some(("capacity", "24")));
        small.extend(has("window").then_some(("window", "5")));
        let with = |name: &str, value: &str| {
            entry.with(small.iter().copied().chain([(name, value)])).unwrap_or_else(|error| panic!("{error}"))
        };
        conformance::check(&entry.with(small.iter().copied()).unwrap());
        for option in &options {
            let values = match &option.value_type {
                OptionType::Choice(words) => words.iter().map(String::as_str).collect(),
                OptionType::Boolean => vec!["true", "false"],
                OptionType::Number { .. } if option.name == "evict_after" => vec!["1.4"],
                _ => continue,
            };
            for value in values {
                conformance::check(&with(&option.name, value));
            }
        }
    }
}

fn budget(spec: &str, n: usize) -> Option<Budget> {
    let prompt = PromptSpans { system: Span::new(0, 2), question: Span::new(n - 3, n) };
    POLICIES.parse(spec).unwrap().policy.budget(&prompt).unwrap()
}

#[test]
fn budgets_are_those_of_the_definitions() {
    let constant = |keep| Some(Budget { keep, most: keep, decoding: true });
    assert_eq!(budget("full", 5000), None);
    assert_eq!(budget("morph_kv", 5000), constant(600));
    // Pruned when the present token makes it (cap + 1) · evict_after, to cap + 1 with it.
    assert_eq!(
        budget("morph_kv:capacity=9,window=2,evict_after=1.5", 50),
        Some(Budget { keep: 9, most: 13, decoding: true })
    );
    assert_eq!(
        budget("morph_kv:capacity=9,window=2,evict_after=2", 50),
        Some(Budget { keep: 9, most: 18, decoding: true })
    );
    assert_eq!(budget("h2o:capacity=100,recent=30", 5000), constant(100));
    assert_eq!(budget("h2o:budget=hf", 5000), constant(1000));
    assert_eq!(budget("streaming_llm:capacity=100", 5000), constant(100));
    assert_eq!(
        budget("scissorhands:capacity=100", 5000),
        Some(Budget { keep: 51, most: 100, decoding: true })
    );
    assert_eq!(budget("keyformer", 100), constant(60));
    assert_eq!(budget("snap_kv:capacity=100", 5000), Some(Budget { keep: 100, most: 100, decoding: false }));
    assert_eq!((budget("snap_kv:capacity=100", 100), budget("a3_ex:capacity=100", 99)), (None, None));
    // Where system part and question alone are too many, the system part goes before.
    assert_eq!(budget("a3_ex:capacity=4", 100), Some(Budget { keep: 4, most: 4, decoding: false }));
}

#[test]
fn keyformers_temperature_rises_over_the_whole_answer() {
    let prompt = PromptSpans { system: Span::new(0, 2), question: Span::new(47, 50) };
    let at = |spec: &str, answer: usize, step: usize| match POLICIES
        .parse(spec)
        .unwrap()
        .policy
        .needs(&prompt, answer)
    {
        AttentionNeeds::NoisySums { tau, .. } => tau.at(step),
        needs => panic!("{needs:?}"),
    };
    assert_eq!([0, 8, 16, 32].map(|step| at("keyformer", 32, step)), [1.0, 1.25, 1.5, 2.0]);
    assert_eq!([0, 32, 512].map(|step| at("keyformer", 512, step)), [1.0, 1.0625, 2.0]);
    assert_eq!([0, 2, 5].map(|step| at("keyformer:tau_step=0.5", 512, step)), [1.0, 2.0, 2.0]);
    assert_eq!([0, 7].map(|step| at("keyformer:tau_end=1", 8, step)), [1.0, 1.0]);
}
