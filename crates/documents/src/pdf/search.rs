//! A bound on the search for objects in a file whose table of objects is broken.
//!
//! `hayro-syntax` then reads an object behind each `obj`, a dictionary at each `<<`, and the data behind each `stream`, and goes on
//! behind that word where they do not end. Of many strings without an end it reads the rest of the file at each, and looks at no limit.

use std::sync::atomic::AtomicBool;

use super::expand::is_space;
use super::guard::{check_time, find};
use super::names::is_regular;
use crate::error::ReadError;

/// Bytes that a search may read for each byte of the file. Of a whole file it reads each byte once for each of the dictionaries around it.
const MAX_RATIO: usize = 32;

/// Bytes that a search may read of any file.
const MIN_BYTES: usize = 1 << 20;

/// Objects inside each other, beyond which `hayro-syntax` reads none.
const MAX_DEPTH: usize = 512;

/// Asserts that a search reads no byte of a file many times.
pub(super) fn check(bytes: &[u8], stop: &AtomicBool) -> Result<(), ReadError> {
    let limit = bytes.len() * MAX_RATIO + MIN_BYTES;
    // The byte before, that before white space, and the end of the stream at hand.
    let (mut previous, mut last, mut stream_end) = (b' ', b' ', 0);
    let mut read = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        let rest = &bytes[at..];
        let length = match byte {
            b'<' if rest.starts_with(b"<<") && (is_space(previous) || b">j".contains(&previous)) => {
                object(rest)
            }
            b'o' if rest.starts_with(b"obj") => object(&rest[3..]),
            // A comment may stand between the numbers of an object, and behind the dictionary of a stream.
            b'%' if b"0123456789+-.>".contains(&last) => comment(rest),
            b's' if last == b'>' && rest.starts_with(b"stream") => {
                if stream_end <= at {
                    stream_end = find(rest, b"endstream").map_or(bytes.len(), |end| at + end);
                }
                stream_end - at
            }
            _ => 0,
        };
        if length > 0 {
            check_time(stop)?;
            read += length;
            if read > limit {
                return Err(ReadError::malformed("PDF", "too many of its objects do not end"));
            }
        }
        previous = byte;
        last = if is_space(byte) { last } else { byte };
    }
    Ok(())
}

/// The bytes that are read of an object, which may not end: all of its text, or that up to an error.
fn object(text: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0_usize);
    loop {
        at += spaces(&text[at..]);
        let rest = &text[at..];
        let (length, deeper) = match rest {
            [b'<', b'<', ..] => (2, 1),
            [b'[', ..] => (1, 1),
            [b'>', b'>', ..] => (2, -1),
            [b']', ..] => (1, -1),
            [b'(', ..] => (string(rest), 0),
            [b'<', ..] => (1 + count(&rest[1..], |byte| is_space(byte) || byte.is_ascii_hexdigit()), 0),
            // The end of a string of hexadecimal digits.
            [b'>', ..] => (1, 0),
            [b'/', ..] => (1 + count(&rest[1..], is_regular), 0),
            _ => (count(rest, is_regular), 0),
        };
        at += length;
        depth = depth.saturating_add_signed(deeper);
        if length == 0 || depth == 0 || depth > MAX_DEPTH {
            return at;
        }
    }
}

/// The length of white space and comments.
fn spaces(text: &[u8]) -> usize {
    let mut at = 0;
    loop {
        at += count(&text[at..], is_space);
        match text.get(at) {
            Some(b'%') => at += comment(&text[at..]),
            _ => return at,
        }
    }
}

fn comment(text: &[u8]) -> usize {
    count(text, |byte| !matches!(byte, b'\r' | b'\n'))
}

/// The length of a string in parentheses, which stand inside it in pairs or behind a reverse solidus.
fn string(text: &[u8]) -> usize {
    let (mut depth, mut is_escaped) = (0_usize, false);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'(' => depth += 1,
            b')' if depth == 1 => return at + 1,
            b')' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

fn count(text: &[u8], is_part: impl Fn(u8) -> bool) -> usize {
    text.iter().take_while(|byte| is_part(**byte)).count()
}
