//! Every method of the registry under the conformance battery, and what each selects.

use std::sync::Arc;

use refrain_fusion::{
    ChunkSpan, FusionMethod, LegoLink, METHODS, ModelFacts, PrefillInputs, PromptLayout, conformance,
};
use refrain_kv::{Rope, Ropes, Span};
use refrain_registry::OptionType;

#[test]
fn every_registered_method_conforms() {
    for entry in METHODS.entries {
        conformance::check(entry.with([]).unwrap().as_ref());
        for option in entry.options() {
            let words = match &option.value_type {
                OptionType::Choice(words) => words.iter().map(String::as_str).collect(),
                OptionType::Boolean => vec!["true", "false"],
                _ => continue,
            };
            for word in words {
                conformance::check(entry.with([(option.name.as_str(), word)]).unwrap().as_ref());
            }
        }
    }
}

#[test]
fn lego_link_takes_both_ends_of_every_chunk() {
    let place = |start, end| ChunkSpan { span: Span::new(start, end), cached: true, ..ChunkSpan::default() };
    let chunks = vec![place(2, 12), place(12, 15), place(15, 21)];
    let layout = PromptLayout {
        layers: 4,
        system: Span::new(0, 2),
        system_cached: true,
        chunks,
        question: Span::new(21, 23),
    };
    let ropes = Ropes::shared(Rope::new(vec![1.0], 1.0), 4);
    let model = ModelFacts { heads: 1, kv_heads: 1, head_dim: 2, ropes, stable_layers: None };
    let statistics = vec![Vec::new(); 3];
    let inputs = Arc::new(PrefillInputs { layout, model, max_tokens: 30, statistics, reordered: false });
    let rows = |window, head_only| {
        LegoLink { window, head_only, ..LegoLink::default() }.start(&inputs).unwrap().plan().tokens.clone()
    };
    assert_eq!(rows(2, false), [2, 3, 10, 11, 12, 13, 14, 15, 16, 19, 20, 21, 22]);
    assert_eq!(rows(2, true), [2, 3, 12, 13, 15, 16, 21, 22]);
    assert_eq!(rows(0, false), [21, 22]);
}
