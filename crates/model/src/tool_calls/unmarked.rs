//! Calls without the marks of their notation, as small models write them: bare, or in a fence of Markdown.

use std::ops::Range;

use super::fields::{NAME, call, name, string};
use super::scanner::ObjectScanner;

const FENCE: &str = "```";
/// The language that a fence may name.
const LANGUAGE: &str = "json";

/// An answer that may be calls without marks, as far as it is read.
#[derive(Debug, Default)]
pub(super) struct Unmarked {
    /// Bytes before the object that is being read, or before what is not read yet.
    at: usize,
    object: Option<ObjectScanner>,
    list: List,
    /// The number of calls before the fence that is open.
    fence: Option<usize>,
    /// Names and arguments of the calls that are read.
    pub(super) calls: Vec<(String, String)>,
}

/// The place in a JSON list of calls.
#[derive(Debug, Default, Clone, Copy)]
enum List {
    #[default]
    Outside,
    BeforeCall,
    BehindCall,
}

impl Unmarked {
    /// Reads on in an answer, which may have grown, by a model that may call the tools `names` and writes their arguments
    /// under `key`; none where the answer cannot be calls alone.
    pub(super) fn read(&mut self, answer: &str, names: &[String], key: &str) -> Option<()> {
        loop {
            if let Some(object) = &mut self.object {
                let text = &answer[self.at..];
                let is_done = object.read(text).ok()?;
                let text = &text[..object.read];
                // A field is read with the comma or the brace behind it, so that two of them and a comma are too many.
                if object.fields.len() > 1 + usize::from(is_done) || !can_be_call(object, text, names, key) {
                    return None;
                }
                if !is_done {
                    return Some(());
                }
                self.calls.push(call(object, text, names)?);
                self.at += text.len();
                self.object = None;
            }
            let rest = answer[self.at..].trim_start();
            self.at = answer.len() - rest.len();
            let Some(first) = rest.chars().next() else { return Some(()) };
            match (self.list, first) {
                (List::Outside, '{') => self.object = Some(ObjectScanner::new()),
                (List::BeforeCall, '{') => {
                    self.object = Some(ObjectScanner::new());
                    self.list = List::BehindCall;
                }
                (List::Outside, '[') | (List::BehindCall, ',') => {
                    self.list = List::BeforeCall;
                    self.at += 1;
                }
                (List::BehindCall, ']') => {
                    self.list = List::Outside;
                    self.at += 1;
                }
                (List::Outside, '`') => {
                    let Some(behind) = rest.strip_prefix(FENCE) else {
                        return FENCE.starts_with(rest).then_some(());
                    };
                    let behind = match self.fence {
                        Some(calls) if calls == self.calls.len() => return None,
                        Some(_) => {
                            self.fence = None;
                            behind
                        }
                        None if LANGUAGE.starts_with(behind) => return Some(()),
                        None => {
                            self.fence = Some(self.calls.len());
                            behind.strip_prefix(LANGUAGE).unwrap_or(behind)
                        }
                    };
                    self.at = answer.len() - behind.len();
                }
                _ => return None,
            }
        }
    }

    /// Whether all of an answer is read, and is calls.
    pub(super) fn is_whole(&self, answer: &str) -> bool {
        self.at == answer.len()
            && self.object.is_none()
            && matches!(self.list, List::Outside)
            && self.fence.is_none()
            && !self.calls.is_empty()
    }
}

/// Whether an object can become a call of a known tool that has a name and arguments alone, as far as its text is read.
fn can_be_call(object: &ObjectScanner, text: &str, names: &[String], key: &str) -> bool {
    // A tool's definition has `parameters` as well: they are arguments only in a notation that calls them so.
    let keys = [NAME, "arguments", key];
    let can_be_value = |(key, start): (Range<usize>, usize)| match string(&text[key]).as_deref() {
        Some(NAME) => can_become(&text[start..], names),
        _ => text[start..].starts_with(['{', '"']),
    };
    object.keys().all(|key| can_become(&text[key], &keys))
        && object.open_key().is_none_or(|start| can_become(&text[start..], &keys))
        && object.open_value().is_none_or(can_be_value)
        && name(object, text).is_none_or(|name| names.contains(&name))
}

/// Whether the JSON text of a string, which may break off, can become that of one of these.
fn can_become<T: AsRef<str>>(json: &str, strings: &[T]) -> bool {
    let mut strings = strings.iter().map(T::as_ref);
    match string(json) {
        Some(whole) => strings.any(|string| string == whole),
        // An escape may stand for any character.
        None => {
            let begun = json.strip_prefix('"').and_then(|begun| begun.split('\\').next());
            begun.is_some_and(|begun| strings.any(|string| string.starts_with(begun)))
        }
    }
}
