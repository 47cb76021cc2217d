//! Marks of calls in text that may break off anywhere.

use super::spec::{ARGS, CALL_ID};

/// The beginning of a named call, before its arguments.
pub(super) enum Head {
    Wait,
    Found { name: String, length: usize },
    None,
}

/// Reads `name[ARGS]` or `name[CALL_ID]id[ARGS]` of a known tool.
pub(super) fn head(text: &str, names: &[String]) -> Head {
    let can_become = |text: &str, mark: &str| text.starts_with(mark) || mark.starts_with(text);
    let Some((name, _)) = text.split_once('[') else {
        let can_be = names.iter().any(|name| name.starts_with(text));
        return if can_be { Head::Wait } else { Head::None };
    };
    let mut rest = &text[name.len()..];
    if !names.iter().any(|known| known == name) {
        return Head::None;
    }
    if let Some(id) = rest.strip_prefix(CALL_ID) {
        rest = id.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
    } else if CALL_ID.starts_with(rest) {
        return Head::Wait;
    }
    match rest.strip_prefix(ARGS) {
        Some(arguments) => match arguments.trim_start().chars().next() {
            None => Head::Wait,
            Some('{') => {
                Head::Found { name: name.to_owned(), length: text.len() - arguments.trim_start().len() }
            }
            Some(_) => Head::None,
        },
        None if can_become(rest, ARGS) => Head::Wait,
        None => Head::None,
    }
}

/// The length of the longest end of a text that is the beginning of a mark.
pub(super) fn held_back(text: &str, marks: &[&str]) -> usize {
    let is_held = |length: &usize| {
        let end = &text.as_bytes()[text.len() - length..];
        marks.iter().any(|mark| length < &mark.len() && mark.as_bytes().starts_with(end))
    };
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or_default();
    (1..=longest.min(text.len())).rev().find(is_held).unwrap_or_default()
}
