//! The character set of a page.

use crate::{ReadError, text};

/// The characters of Windows-1252 for the bytes 0x80 to 0x9F; the others are those of Latin-1.
/// <https://encoding.spec.whatwg.org/index-windows-1252.txt>
const WINDOWS_1252: [char; 32] = [
    '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8D}', 'Ž', '\u{8F}', '\u{90}',
    '‘', '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9D}', 'ž', 'Ÿ',
];

/// Names of Windows-1252 and of the sets that browsers read as it.
const LATIN: [&str; 8] =
    ["windows-1252", "cp1252", "iso-8859-1", "iso8859-1", "latin1", "l1", "us-ascii", "ascii"];

/// The page's text: in UTF-8, in UTF-16 with a mark, or in Windows-1252 where the page says so.
pub(super) fn decode(bytes: &[u8]) -> Result<String, ReadError> {
    let error = match text::decode(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    match declared(bytes) {
        Some(charset) if LATIN.contains(&charset.as_str()) => {
            Ok(bytes.iter().map(|&byte| latin(byte)).collect())
        }
        Some(charset) if !charset.starts_with("utf") => Err(ReadError::Charset { charset }),
        _ => Err(error),
    }
}

fn latin(byte: u8) -> char {
    match byte {
        0x80..=0x9F => WINDOWS_1252[usize::from(byte) - 0x80],
        _ => char::from(byte),
    }
}

/// The name after `charset=` or `encoding=` near the beginning.
fn declared(bytes: &[u8]) -> Option<String> {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(4096)]).to_ascii_lowercase();
    let (_, after) = start.split_once("charset=").or_else(|| start.split_once("encoding="))?;
    let after = after.trim_start_matches(['"', '\'', ' ']);
    let name: String =
        after.chars().take_while(|c| c.is_ascii_alphanumeric() || "-_:.".contains(*c)).take(40).collect();
    (!name.is_empty()).then_some(name)
}
