//! Where a context is cut into documents or examples. Nothing is lost: the parts joined are the context.

use super::super::TokenText;
use crate::Result;

/// How a part of a context begins, at the start of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marker {
    word: &'static str,
    /// The text after the number, if a number follows the word.
    after_number: Option<&'static str>,
}

impl Marker {
    pub(crate) const fn word(word: &'static str) -> Marker {
        Marker { word, after_number: None }
    }

    pub(crate) const fn numbered(word: &'static str, after: &'static str) -> Marker {
        Marker { word, after_number: Some(after) }
    }

    fn begins(self, text: &str) -> bool {
        let Some(rest) = text.strip_prefix(self.word) else { return false };
        let Some(after) = self.after_number else { return true };
        let after_digits = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        after_digits.len() < rest.len() && after_digits.starts_with(after)
    }

    /// The parts of a context. Text before the first marker is a part.
    pub(crate) fn parts(self, context: &str) -> Vec<&str> {
        let lines = context.match_indices('\n').map(|(at, _)| at + 1);
        let mut parts = Vec::new();
        let mut start = 0;
        for at in lines.filter(|at| self.begins(&context[*at..])).chain([context.len()]) {
            if start < at {
                parts.push(&context[start..at]);
            }
            start = at;
        }
        parts
    }
}

/// Joins neighbouring parts while they have at most `tokens` tokens together. A longer part stays alone.
pub(crate) fn pack(parts: &[&str], tokens: usize, text: &dyn TokenText) -> Result<Vec<String>> {
    let mut packed: Vec<String> = Vec::new();
    for part in parts {
        if let Some(last) = packed.last_mut() {
            let joined = format!("{last}{part}");
            if text.encode(&joined)?.len() <= tokens {
                *last = joined;
                continue;
            }
        }
        packed.push((*part).into());
    }
    Ok(packed)
}
