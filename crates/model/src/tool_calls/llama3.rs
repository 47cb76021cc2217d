//! The notation of Llama 3.1 and later for tools that a request defines: the answer is a call as JSON, with `parameters`;
//! `<|python_tag|>` may stand before it, and `;` between several.
//!
//! <https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md>

use super::grammar::{Grammar, alternatives};
use super::spec::Spec;

pub(super) const SPEC: Spec = Spec {
    begin: &["<|python_tag|>"],
    end: None,
    bare: true,
    list: false,
    named: false,
    arguments: "parameters",
    separator: Some(";"),
    special: &["<|python_tag|>"],
};

/// The text of calls, each with its name and its arguments as JSON.
pub(super) fn write(calls: &[(String, String)]) -> String {
    let call =
        |(name, arguments): &(String, String)| format!("{{\"name\": {name}, \"parameters\": {arguments}}}");
    calls.iter().map(call).collect::<Vec<_>>().join("; ")
}

pub(super) fn grammar(grammar: &mut Grammar<'_>, parallel: bool) {
    let body = grammar.json(&alternatives(grammar.tools(), "parameters"));
    grammar.rule("call", &body);
    grammar.rule("start", if parallel { "call (\"; \" call)*" } else { "call" });
}
