//! The notation of Hermes 2 Pro, Qwen2.5 and Qwen3: each call as JSON between `<tool_call>` and `</tool_call>`.
//!
//! <https://github.com/NousResearch/Hermes-Function-Calling>

use super::grammar::{Grammar, alternatives};
use super::spec::Spec;

pub(super) const SPEC: Spec = Spec {
    begin: &["<tool_call>"],
    end: Some("</tool_call>"),
    bare: false,
    list: false,
    named: false,
    arguments: "arguments",
    separator: None,
    special: &["<tool_call>", "</tool_call>"],
};

/// The text of calls, each with its name and its arguments as JSON.
pub(super) fn write(calls: &[(String, String)]) -> String {
    let call = |(name, arguments): &(String, String)| {
        format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
    };
    calls.iter().map(call).collect::<Vec<_>>().join("\n")
}

pub(super) fn grammar(grammar: &mut Grammar<'_>, parallel: bool) {
    let (begin, end) = (grammar.token("<tool_call>"), grammar.token("</tool_call>"));
    let body = grammar.json(&alternatives(grammar.tools(), "arguments"));
    grammar.rule("call", &format!("{begin} \"\\n\" {body} \"\\n\" {end}"));
    grammar.rule("start", if parallel { "call (\"\\n\" call)*" } else { "call" });
}
