//! The notations of Mistral: `[TOOL_CALLS]` before a JSON list of calls, and since Mistral Small 3.2 before each call as
//! `name[ARGS]{…}`.
//!
//! <https://github.com/mistralai/mistral-common/blob/main/src/mistral_common/tokens/tokenizers/instruct.py>

use super::grammar::{Grammar, alternatives, list, quoted};
use super::spec::{ARGS, CALL_ID, Spec};

const CALLS: &str = "[TOOL_CALLS]";

pub(super) const SPEC: Spec = Spec {
    begin: &[CALLS],
    end: None,
    bare: false,
    list: true,
    named: true,
    arguments: "arguments",
    separator: None,
    special: &[CALLS, ARGS, CALL_ID],
};

/// The text of calls, each with its name and its arguments as JSON.
pub(super) fn write(calls: &[(String, String)]) -> String {
    let call =
        |(name, arguments): &(String, String)| format!("{{\"name\": {name}, \"arguments\": {arguments}}}");
    format!("{CALLS}[{}]", calls.iter().map(call).collect::<Vec<_>>().join(", "))
}

pub(super) fn grammar(grammar: &mut Grammar<'_>, parallel: bool) {
    let begin = grammar.token(CALLS);
    let body = grammar.json(&list(alternatives(grammar.tools(), "arguments"), parallel));
    grammar.rule("start", &format!("{begin} {body}"));
}

/// The text of calls in the newer notation. Names are given as JSON.
pub(super) fn write_named(calls: &[(String, String)]) -> String {
    let call =
        |(name, arguments): &(String, String)| format!("{CALLS}{}{ARGS}{arguments}", name.trim_matches('"'));
    calls.iter().map(call).collect()
}

pub(super) fn grammar_named(grammar: &mut Grammar<'_>, parallel: bool) {
    let (begin, args) = (grammar.token(CALLS), grammar.token(ARGS));
    let mut calls = Vec::new();
    for tool in grammar.tools().to_vec() {
        let body = grammar.json(&tool.parameters);
        calls.push(format!("{begin} {} {args} {body}", quoted(&tool.name)));
    }
    grammar.rule("call", &calls.join(" | "));
    grammar.rule("start", if parallel { "call+" } else { "call" });
}
