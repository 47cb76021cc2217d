//! Long texts in pieces: encoding takes some 130 bytes of memory for a byte of text, whatever a text's length is.
//!
//! A text is cut between a letter or digit and the single space or line break behind it, where no token of the vocabulary has both, and
//! where a stretch around the place gives the same ids in one piece and in two: pre-tokenizers look no farther than a word.

use super::pipeline::{Pipeline, Specials};
use crate::error::Result;

/// Bytes of a piece. One without a place to cut is longer.
const PIECE: usize = 256 << 10;
/// Bytes on each side of a place that are looked at.
const CONTEXT: usize = 256;
/// Places that are tried for the end of a piece, before the whole rest is one.
const TRIES: usize = 64;

/// Appends the ids of a text to those of the text before it, and says whether there are at most `most` of them. Where there are more,
/// the rest of the text is not encoded.
pub(super) fn encode_to(
    ids: &mut Vec<u32>,
    pipeline: &Pipeline,
    text: &str,
    specials: Specials,
    most: usize,
) -> Result<bool> {
    encode_by(PIECE, ids, pipeline, text, specials, most)
}

fn encode_by(
    piece: usize,
    ids: &mut Vec<u32>,
    pipeline: &Pipeline,
    text: &str,
    specials: Specials,
    most: usize,
) -> Result<bool> {
    let mut rest = text;
    loop {
        let (head, tail) = rest.split_at(end_of_piece(piece, pipeline, rest, specials)?);
        let more = match ids.last() {
            Some(last) => pipeline.encode_whole_after(*last, head, specials)?,
            None => pipeline.encode_whole(head, specials)?,
        };
        ids.extend(more);
        if ids.len() > most || tail.is_empty() {
            return Ok(ids.len() <= most);
        }
        rest = tail;
    }
}

/// The end of a text's first piece, in bytes.
fn end_of_piece(piece: usize, pipeline: &Pipeline, text: &str, specials: Specials) -> Result<usize> {
    if text.len() <= piece || pipeline.spans_words() {
        return Ok(text.len());
    }
    let start = text.ceil_char_boundary(piece);
    let places = text[start..].match_indices([' ', '\n']).map(|(at, _)| start + at);
    for at in places.filter(|at| is_between_words(text, *at)).take(TRIES) {
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

/// Whether two texts give the same ids in one piece and in two.
fn is_cut(pipeline: &Pipeline, before: &str, behind: &str, specials: Specials) -> Result<bool> {
    let mut two = pipeline.encode_whole(before, specials)?;
    let Some(last) = two.last().copied() else { return Ok(false) };
    two.extend(pipeline.encode_whole_after(last, behind, specials)?);
    Ok(two == pipeline.encode_whole(&format!("{before}{behind}"), specials)?)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::pipeline::spans_words;
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

    /// Asserts that pieces of a text give the ids of the whole text, and says how many pieces of 60 bytes there are.
    pub(in crate::tokenizer) fn check(pipeline: &Pipeline, text: &str, specials: Specials) -> usize {
        let whole = pipeline.encode_whole(text, specials).unwrap();
        for piece in [1, 60, 500] {
            let mut ids = Vec::new();
            assert!(encode_by(piece, &mut ids, pipeline, text, specials, whole.len()).unwrap());
            assert_eq!(ids, whole, "pieces of {piece} bytes of {text:?}");
        }
        if let Some(most) = whole.len().checked_sub(1) {
            assert!(!encode_by(60, &mut Vec::new(), pipeline, text, specials, most).unwrap());
        }
        let (mut rest, mut pieces) = (text, 0);
        while !rest.is_empty() {
            rest = &rest[end_of_piece(60, pipeline, rest, specials).unwrap()..];
            pieces += 1;
        }
        pieces
    }
}
