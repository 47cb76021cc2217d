//! Tokens to text, one at a time or all at once.

use super::Tokenizer;
use super::byte_encoding::ByteEncoding;

/// Turns tokens into text as they come. Half a character is held back until its other bytes arrive; control tokens
/// give nothing. By default the tokens begin a text: the space that some vocabularies put before a text is left out.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    pending: Vec<u8>,
    started: bool,
}

impl Detokenizer {
    /// A detokenizer of tokens that continue a text: a space at their beginning is text.
    #[must_use]
    pub fn continuing() -> Detokenizer {
        Detokenizer { started: true, ..Detokenizer::default() }
    }

    /// Adds a token; returns the text that is complete now, if there is any.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Option<String> {
        if tokenizer.is_special(id) { None } else { self.add(tokenizer, id) }
    }

    /// The text that was held back, with U+FFFD for an incomplete character. The next token begins a new text.
    pub fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(self).pending;
        (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned())
    }

    /// Adds a token, a control token too.
    fn add(&mut self, tokenizer: &Tokenizer, id: u32) -> Option<String> {
        let held = self.pending.len();
        tokenizer.push_bytes(id, &mut self.pending);
        if !self.started && self.pending.len() > held {
            self.started = true;
            if tokenizer.bytes == (ByteEncoding::Metaspace { prefixed: true })
                && self.pending.starts_with(b" ")
            {
                self.pending.remove(0);
            }
        }
        let text = take_complete(&mut self.pending);
        (!text.is_empty()).then_some(text)
    }
}

impl Tokenizer {
    /// The text of tokens. Bytes that are no UTF-8 become U+FFFD, unknown ids nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut text = String::new();
        let mut detokenizer = Detokenizer::default();
        for id in ids.iter().filter(|id| !(skip_special && self.is_special(**id))) {
            text.extend(detokenizer.add(self, *id));
        }
        text.extend(detokenizer.finish());
        text
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

#[cfg(test)]
mod tests {
    use super::*;

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
