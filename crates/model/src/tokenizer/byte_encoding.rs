//! How a vocabulary writes bytes and spaces in the texts of its tokens.

/// The writing of bytes and spaces in token texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ByteEncoding {
    /// GPT-2's: each byte is one printable character.
    ByteLevel,
    /// SentencePiece's: a space is `▁`, a byte that no token has is `<0x0A>`.
    Metaspace {
        /// Whether encoding puts a space before the text, which decoding takes away.
        prefixed: bool,
    },
}

impl ByteEncoding {
    /// Appends the bytes that the token text `token` stands for.
    pub(super) fn push_bytes(self, token: &str, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => push_byte_level(token, out),
            Self::Metaspace { .. } => push_metaspace(token, out),
        }
    }
}

/// Appends the bytes of a token that GPT-2's alphabet writes; characters outside of it stand for themselves.
fn push_byte_level(token: &str, out: &mut Vec<u8>) {
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

/// Appends the bytes of a token of SentencePiece.
fn push_metaspace(token: &str, out: &mut Vec<u8>) {
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
}
