//! Every method of the registry under the conformance battery, and what each selects.

use std::sync::Arc;

use refrain_fusion::{
    ChunkSpan, FusionMethod, LegoLink, METHODS, ModelFacts, PassPlan, PrefillInputs, PromptLayout,
    conformance,
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
    let place = |start, end| ChunkSpan { span: Span::new(start, end), ..ChunkSpan::default() };
    let chunks = vec![place(2, 12), place(12, 15), place(15, 21)];
    let layout = PromptLayout {
        layers: 4,
        system: Span::new(0, 2),
        system_cached: true,
        chunks,
        question: Span::new(21, 23),
    };
    let ropes = Ropes::shared(Rope::new(vec![1.0], 1.0), 4);
    let model = ModelFacts {
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        ropes,
        windows: vec![None; layout.layers],
        stable_layers: None,
    };
    let statistics = vec![Vec::new(); 3];
    let inputs = Arc::new(PrefillInputs { layout, model, max_tokens: 30, statistics, reordered: false });
    let rows = |window, head_only| {
        LegoLink { window, head_only, ..LegoLink::default() }.start(&inputs).unwrap().plan().tokens.clone()
    };
    assert_eq!(rows(2, false), [2, 3, 10, 11, 12, 13, 14, 15, 16, 19, 20, 21, 22]);
    assert_eq!(rows(2, true), [2, 3, 12, 13, 15, 16, 21, 22]);
    assert_eq!(rows(0, false), [21, 22]);
}

/// The first plan over two chunks of ten tokens, where layers have these windows.
fn plan_with(windows: [Option<usize>; 4], method: &str) -> refrain_fusion::Result<PassPlan> {
    plan_over(false, windows, method)
}

/// The first plan over two chunks, which may be exact.
fn plan_over(exact: bool, windows: [Option<usize>; 4], method: &str) -> refrain_fusion::Result<PassPlan> {
    let span = Span::new;
    let place = |start, end| ChunkSpan { span: span(start, end), exact, ..ChunkSpan::default() };
    let layout = PromptLayout {
        layers: 4,
        system: Span::new(0, 2),
        system_cached: true,
        chunks: vec![place(2, 12), place(12, 22)],
        question: Span::new(22, 26),
    };
    let ropes = Ropes::shared(Rope::new(vec![1.0], 1.0), 4);
    let model = ModelFacts {
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        ropes,
        windows: windows.into(),
        stable_layers: None,
    };
    let statistics = vec![Vec::new(); 2];
    let inputs = Arc::new(PrefillInputs { layout, model, max_tokens: 30, statistics, reordered: false });
    METHODS.parse(method).unwrap().start(&inputs).map(|pass| pass.plan().clone())
}

#[test]
fn tokens_are_chosen_where_no_window_hides_documents() {
    let layers = |windows, method| -> Vec<usize> {
        plan_with(windows, method).unwrap().checks.keys().copied().collect()
    };
    // The question's first token, at 22, sees back to the first document token, at 2, with a window of 21, and its last one, at 25, with one of 24.
    let (short, wide, wider) = (Some(20), Some(21), Some(24));
    assert_eq!(layers([None; 4], "a3"), [1]);
    assert_eq!(layers([short, short, None, short], "a3"), [2]);
    assert_eq!(layers([short, short, short, wide], "a3:check_layer=0"), [3]);
    assert_eq!(layers([short, None, short, wide], "prophet_kv"), [1, 3]);
    assert_eq!(layers([short, short, None, short], "scout:from=0,to=1,charge=0.9"), [2]);
    // The next layer chooses where none of those asked for can.
    assert_eq!(layers([short, short, short, None], "scout:from=0,to=0.5,charge=0.9"), [3]);
    // The last row chooses where it sees all that the first does.
    assert_eq!(layers([wide, wider, None, wide], "scout:from=0,to=1,charge=0.9"), [1, 2]);
    assert_eq!(layers([wide, wide, wide, wider], "drift:from=0,to=0.5,charge=0.9"), [3]);
    assert_eq!(layers([short, wide, None, short], "scout:from=0,to=1,charge=0.9,rows=question"), [1, 2]);
    for (method, needed) in [
        ("a3", "21 tokens"),
        ("prophet_kv", "21 tokens"),
        ("scout:charge=0.9", "24 tokens"),
        ("drift:charge=0.9", "24 tokens"),
        ("info_flow", "21 tokens"),
    ] {
        let message = plan_with([short; 4], method).unwrap_err().to_string();
        assert!(message.contains("sliding window of 20 tokens") && message.contains(needed), "{message}");
        assert!(message.contains("fewer documents"), "{message}");
    }
    let beyond = plan_with([None, None, short, short], "a3:check_layer=2").unwrap_err().to_string();
    assert!(beyond.contains("one of the layers 0, 1"), "{beyond}");
    for method in ["vanilla", "pie", "full_reuse", "cache_blend", "lego_link", "relax_kv"] {
        plan_with([short; 4], method).unwrap();
    }
}

#[test]
fn no_window_hides_documents_of_which_none_is_to_be_computed() {
    for entry in METHODS.entries {
        let plan = plan_over(true, [Some(20); 4], entry.name);
        plan.unwrap_or_else(|error| panic!("{}: {error}", entry.name));
    }
}
