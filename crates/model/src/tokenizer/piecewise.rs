//! Long texts in pieces: encoding takes memory for a piece, some 130 to 350 bytes a byte, whatever a text's length is.
//!
//! A text is cut between a letter or digit and the single space or line break behind it, or between a line break and the character behind
//! it, where no token of the vocabulary has both, and where a stretch around the place gives the same ids in one piece and in two:
//! pre-tokenizers look no farther than a word.

use super::pipeline::{Pipeline, Specials};
use crate::error::Result;

/// Bytes of a piece. One without a place to cut is longer.
const PIECE: usize = 256 << 10;
/// Bytes on each side of a place that are looked at.
const CONTEXT: usize = 256;
/// Places that are tried for the end of a piece, before the whole rest is one.
const TRIES: usize = 64;

/// Appends the ids of a text to those of the text before it.
pub(super) fn encode_to(
    ids: &mut Vec<u32>,
    pipeline: &Pipeline,
    text: &str,
    specials: Specials,
) -> Result<()> {
    encode_by(PIECE, ids, pipeline, text, specials)
}

fn encode_by(
    piece: usize,
    ids: &mut Vec<u32>,
    pipeline: &Pipeline,
    text: &str,
    specials: Specials,
) -> Result<()> {
    let mut rest = text;
    loop {
        let (head, tail) = rest.split_at(end_of_piece(piece, pipeline, rest, specials)?);
        let more = match ids.last() {
            Some(last) => pipeline.encode_whole_after(*last, head, specials)?,
            None => pipeline.encode_whole(head, specials)?,
        };
        ids.extend(more);
        if tail.is_empty() {
            return Ok(());
        }
        rest = tail;
    }
}

/// The end of a text's first piece, in bytes.
fn end_of_piece(piece: usize, pipeline: &Pipeline, text: &str, specials: Specials) -> Result<usize> {
    if text.len() <= piece {
        return Ok(text.len());
    }
    let start = text.ceil_char_boundary(piece);
    let spaces = text[start..].match_indices([' ', '\n']).map(|(at, _)| start + at);
    let places = spaces.flat_map(|at| {
        let word_end = (!pipeline.spans_words() && is_between_words(text, at)).then_some(at);
        let line_start = (!pipeline.spans_lines() && is_before_line(text, at)).then_some(at + 1);
        word_end.into_iter().chain(line_start)
    });
    for at in places.take(TRIES) {
        let before = &text[text.floor_char_boundary(at.saturating_sub(CONTEXT))..at];
        let behind = &text[at..text.ceil_char_boundary(at + CONTEXT)];
        if is_cut(pipeline, before, behind, specials)? {
            return Ok(at);
        }
    }
    Ok(text.len())
}

/// Whether a letter or digit stands on each side of the white space at `at`.
fn is_between_words(text: &str, at: usize) -> bool {
    let before = text[..at].chars().next_back();
    let behind = text[at..].chars().nth(1);
    before.is_some_and(char::is_alphanumeric) && behind.is_some_and(char::is_alphanumeric)
}

/// Whether a line break stands at `at`, and a line that does not begin with white space behind it.
fn is_before_line(text: &str, at: usize) -> bool {
    text[at..].strip_prefix('\n').is_some_and(|line| line.starts_with(|c: char| !c.is_whitespace()))
}

/// Whether two texts give the same ids in one piece and in two.
fn is_cut(pipeline: &Pipeline, before: &str, behind: &str, specials: Specials) -> Result<bool> {
    let mut two = pipeline.encode_whole(before, specials)?;
    let Some(last) = two.last().copied() else { return Ok(false) };
    two.extend(pipeline.encode_whole_after(last, behind, specials)?);
    Ok(two == pipeline.encode_whole(&format!("{before}{behind}"), specials)?)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::pipeline::{spans_lines, spans_words};
    use super::*;

    #[test]
    fn tokens_of_two_words_are_known() {
        for token in ["a▁b", "a▁", "▁a▁", "helloĠworld", "xĊ", "1\n"] {
            assert!(spans_words(token), "{token}");
        }
        for token in ["▁a", "▁▁", "ĠĠĊ", "ĊĠ", ".Ċ", "{▁", "hello", "", "▁a-b"] {
            assert!(!spans_words(token), "{token}");
        }
    }

    #[test]
    fn tokens_of_two_lines_are_known() {
        for token in ["\n|", "Ċa", "|>\n<|", "ĊĊ}"] {
            assert!(spans_lines(token), "{token}");
        }
        for token in ["\n", "a\n", "ĊĊ", "Ċĉ", "ĊĠĠ", "\n▁", "č\n", "▁a", ""] {
            assert!(!spans_lines(token), "{token}");
        }
    }

    /// Asserts that pieces of a text give the ids of the whole text, and says how many pieces of 60 bytes there are.
    pub(in crate::tokenizer) fn check(pipeline: &Pipeline, text: &str, specials: Specials) -> usize {
        let whole = pipeline.encode_whole(text, specials).unwrap();
        for piece in [1, 60, 500] {
            let mut ids = Vec::new();
            encode_by(piece, &mut ids, pipeline, text, specials).unwrap();
            assert_eq!(ids, whole, "pieces of {piece} bytes of {text:?}");
        }
        let (mut rest, mut pieces) = (text, 0);
        while !rest.is_empty() {
            rest = &rest[end_of_piece(60, pipeline, rest, specials).unwrap()..];
            pieces += 1;
        }
        pieces
    }
}
