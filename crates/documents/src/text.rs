//! Plain text, Markdown and JSONL.

use crate::document::Document;
use crate::error::ReadError;
use crate::markdown::collapse;
use crate::split;

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

/// A text as one document, none where it is blank. Front matter that gives the title of a Markdown document is no part of its text.
///
/// A document that begins with a heading of the first level has its title already: its own is empty.
pub(crate) fn document(text: String, stem: &str) -> Vec<Document> {
    if text.trim().is_empty() {
        return Vec::new();
    }
    let (given, text) = match front_matter(&text).filter(|(_, text)| !text.trim().is_empty()) {
        Some((title, text)) => (Some(title), text.trim_start().to_owned()),
        None => (None, text),
    };
    let heading = split::title(&text);
    let is_heading =
        |title: &String| heading.as_ref().is_some_and(|heading| heading.begins && heading.text == *title);
    let title = match (given.filter(|title| !is_heading(title)), &heading) {
        (Some(title), _) => title,
        (None, Some(heading)) if heading.begins => String::new(),
        (None, Some(heading)) => heading.text.clone(),
        (None, None) => stem.to_owned(),
    };
    vec![Document { title, text }]
}

/// The title in the front matter of a text, entries of YAML between lines `---`, and the text behind it. Other YAML has no title.
fn front_matter(text: &str) -> Option<(String, &str)> {
    let mut lines = text.split_inclusive('\n');
    let mut at = lines.next().filter(|line| line.trim_end() == "---")?.len();
    for line in lines {
        if matches!(line.trim_end(), "---" | "...") {
            return Some((given_title(&text[..at])?, &text[at + line.len()..]));
        }
        at += line.len();
        let goes_on = line.trim().is_empty() || line.starts_with([' ', '\t', '#', '-']);
        let key = line.split_once(':').map_or("", |(key, _)| key);
        if !goes_on && (key.is_empty() || key.contains(' ')) {
            return None;
        }
    }
    None
}

fn given_title(front: &str) -> Option<String> {
    let title = front.lines().find_map(|line| line.strip_prefix("title:"))?.trim();
    let bare = ['"', '\''].iter().find_map(|quote| title.strip_prefix(*quote)?.strip_suffix(*quote));
    Some(collapse(bare.unwrap_or(title))).filter(|title| !title.is_empty() && !title.starts_with(['>', '|']))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_of_markdown_are_found_before_and_below_its_beginning() {
        for (text, title, start) in [
            (
                "---\nlayout: page\ntitle: \"Vacation policy\"\ntags:\n- a\n---\n\nTake it.",
                "Vacation policy",
                "Take",
            ),
            ("---\ntitle: Vacation\n---\n# Vacation\n\nTake it.", "", "# Vacation"),
            ("---\ntitle: Vacation\n---\n# Rules\n\nTake it.", "Vacation", "# Rules"),
            ("---\ndate: 2024-01-01\n---\nTake it.", "stem", "---\ndate"),
            ("---\ntitle: >\n  Vacation\n---\nTake it.", "stem", "---\ntitle"),
            ("---\nNo entry.\n---\nTake it.", "stem", "---\nNo entry."),
            ("---\ntitle: Alone\n---\n", "stem", "---\ntitle"),
            ("<!-- lint off -->\n[![badge](a.svg)](b)\n\n# Vacation\n\nTake it.", "Vacation", "<!--"),
            ("Vacation\n========\n\nTake it.", "", "Vacation\n==="),
            ("\n# Vacation\n\nTake it.", "", "\n# Vacation"),
            ("Text.\n\n## Part\n\nTake it.\n\n# Other", "stem", "Text."),
            ("Text.", "stem", "Text."),
        ] {
            let [document] = &document(text.to_owned(), "stem")[..] else { panic!("{text}") };
            assert_eq!(document.title, title, "{text}");
            assert!(document.text.starts_with(start), "{text}");
        }
    }

    #[test]
    fn a_title_of_a_record_may_be_null() {
        let records =
            records("{\"title\": null, \"text\": \"a\"}\n{\"title\": \"T\", \"text\": \"b\"}").unwrap();
        assert_eq!(records.iter().map(|record| &*record.title).collect::<Vec<_>>(), ["", "T"]);
    }
}
