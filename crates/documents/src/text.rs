//! Plain text, Markdown and JSONL.

use crate::document::Document;
use crate::error::ReadError;

/// The text of bytes in UTF-8, or in UTF-16 where a byte order mark says so. Text in UTF-8 has no zero byte.
pub(crate) fn decode(bytes: &[u8]) -> Result<String, ReadError> {
    let wide = match bytes {
        [0xFF, 0xFE, rest @ ..] => Some((rest, u16::from_le_bytes as fn([u8; 2]) -> u16)),
        [0xFE, 0xFF, rest @ ..] => Some((rest, u16::from_be_bytes as fn([u8; 2]) -> u16)),
        _ => None,
    };
    match wide {
        Some((rest, unit)) => {
            let odd = rest.len() % 2;
            let units = rest.chunks_exact(2).map(|pair| unit([pair[0], pair[1]]));
            let text: Result<String, _> = char::decode_utf16(units).collect();
            text.ok()
                .filter(|_| odd == 0)
                .ok_or_else(|| ReadError::malformed("UTF-16 text", "half a character"))
        }
        None if bytes.contains(&0) => Err(ReadError::no_text_format("a binary file")),
        None => {
            let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
            let text =
                std::str::from_utf8(bytes).map_err(|error| ReadError::NotUtf8 { at: error.valid_up_to() })?;
            Ok(text.to_owned())
        }
    }
}

/// A text as one document, none where it is blank.
///
/// A Markdown document that begins with a heading of the first level has its title already: its own is empty.
pub(crate) fn document(text: String, stem: &str) -> Vec<Document> {
    if text.trim().is_empty() {
        return Vec::new();
    }
    let title = if text.trim_start().starts_with("# ") { String::new() } else { stem.to_owned() };
    vec![Document { title, text }]
}

/// Records `{"title": …, "text": …}`, one a line.
pub(crate) fn records(text: &str) -> Result<Vec<Document>, ReadError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let records: Result<Vec<Document>, ReadError> = lines
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|error| {
                let error = error.to_string();
                let reason = error.split(" at line ").next().unwrap_or_default().to_owned();
                ReadError::Record { line: index + 1, reason }
            })
        })
        .collect();
    Ok(records?.into_iter().filter(|record| !record.text.trim().is_empty()).collect())
}
