//! Tokens to text, one at a time.

use super::{Spelling, Tokenizer};

/// Turns tokens into text as they come. Half a character is held back until its other bytes arrive; control tokens
/// give nothing.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    pending: Vec<u8>,
    started: bool,
}

impl Detokenizer {
    /// Adds a token; returns the text that is complete now, if there is any.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Option<String> {
        if tokenizer.is_special(id) { None } else { self.add(tokenizer, id) }
    }

    /// What was held back, with U+FFFD for an incomplete character. The next token begins a new text.
    pub fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(self).pending;
        (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned())
    }

    /// Adds a token, a control token too.
    pub(super) fn add(&mut self, tokenizer: &Tokenizer, id: u32) -> Option<String> {
        let held = self.pending.len();
        tokenizer.push_bytes(id, &mut self.pending);
        if !self.started && self.pending.len() > held {
            self.started = true;
            if tokenizer.spelling == (Spelling::Spaces { prefixed: true }) && self.pending.starts_with(b" ") {
                self.pending.remove(0);
            }
        }
        let text = take_complete(&mut self.pending);
        (!text.is_empty()).then_some(text)
    }
}

/// Takes all but an incomplete character at the end; bytes that can never become one are U+FFFD.
fn take_complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    for chunk in bytes.utf8_chunks() {
        let invalid = chunk.invalid();
        text.push_str(chunk.valid());
        done += chunk.valid().len();
        let at_end = done + invalid.len() == bytes.len();
        if at_end && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none()) {
            break;
        }
        if !invalid.is_empty() {
            text.push('\u{FFFD}');
        }
        done += invalid.len();
    }
    bytes.drain(..done);
    text
}

/// The bytes of a token in GPT-2's spelling; characters outside of it stand for themselves.
pub(super) fn push_byte_level(token: &str, out: &mut Vec<u8>) {
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => out.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// GPT-2 writes printable Latin-1 bytes as themselves and the 68 others, in order, as U+0100 and following.
/// <https://github.com/openai/gpt-2/blob/master/src/encoder.py>
fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The bytes of a token in SentencePiece's spelling.
pub(super) fn push_spaces(token: &str, out: &mut Vec<u8>) {
    let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => out.push(byte),
        None => out.extend(token.replace('▁', " ").into_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..0x144).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        for (token, bytes) in
            [("Ġthe", b" the".as_slice()), ("Ċ", b"\n"), ("ä½ł", "你".as_bytes()), ("ŁŃ", &[0x9F, 0xAD])]
        {
            let mut out = Vec::new();
            push_byte_level(token, &mut out);
            assert_eq!(out, bytes, "{token}");
        }
    }

    #[test]
    fn characters_are_complete_or_held_back() {
        let mut bytes = "é".as_bytes()[..1].to_vec();
        assert_eq!(take_complete(&mut bytes), "");
        bytes.extend(b"x");
        assert_eq!(take_complete(&mut bytes), "\u{FFFD}x");
        let mut bytes = [b"a\xFF".as_slice(), &"😀".as_bytes()[..3]].concat();
        assert_eq!(take_complete(&mut bytes), "a\u{FFFD}");
        assert_eq!(bytes.len(), 3);
        bytes.push(0x80);
        assert_eq!(take_complete(&mut bytes), "😀");
        assert!(bytes.is_empty());
    }
}
