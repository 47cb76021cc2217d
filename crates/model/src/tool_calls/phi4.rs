//! The notations of Phi-4-mini: a JSON list of calls between `<|tool_call|>` and `<|/tool_call|>`, or behind `functools`
//! where the prompt asks for that.
//!
//! <https://huggingface.co/microsoft/Phi-4-mini-instruct>

use super::grammar::{Grammar, alternatives, list};
use super::spec::Spec;

pub(super) const SPEC: Spec = Spec {
    begin: &["<|tool_call|>"],
    end: Some("<|/tool_call|>"),
    bare: false,
    list: true,
    named: false,
    arguments: "arguments",
    separator: None,
    special: &["<|tool_call|>", "<|/tool_call|>"],
};

pub(super) const FUNCTOOLS: Spec = Spec { begin: &["functools", "<|tool_call|>"], ..SPEC };

/// The text of calls, each with its name and its arguments as JSON.
pub(super) fn write(calls: &[(String, String)]) -> String {
    format!("<|tool_call|>{}<|/tool_call|>", json_list(calls))
}

/// The text of calls behind `functools`.
pub(super) fn write_functools(calls: &[(String, String)]) -> String {
    format!("functools{}", json_list(calls))
}

fn json_list(calls: &[(String, String)]) -> String {
    let call =
        |(name, arguments): &(String, String)| format!("{{\"name\": {name}, \"arguments\": {arguments}}}");
    format!("[{}]", calls.iter().map(call).collect::<Vec<_>>().join(", "))
}

pub(super) fn grammar(grammar: &mut Grammar<'_>, parallel: bool) {
    let (begin, end) = (grammar.token("<|tool_call|>"), grammar.token("<|/tool_call|>"));
    let body = grammar.json(&list(alternatives(grammar.tools(), "arguments"), parallel));
    grammar.rule("start", &format!("{begin} {body} {end}"));
}

pub(super) fn grammar_functools(grammar: &mut Grammar<'_>, parallel: bool) {
    let body = grammar.json(&list(alternatives(grammar.tools(), "arguments"), parallel));
    grammar.rule("start", &format!("\"functools\" {body}"));
}
