//! Strings of a PDF: their characters, titles, and marks of lists.

use super::bidi;

/// Signs that begin an item of a list.
const BULLETS: &str = "•‣◦▪■●○◆◇➢►✓❖·*-–—\u{F0B7}\u{F0A7}\u{25AA}\u{E00C}";

/// A text string: UTF-16 or UTF-8 by its mark, else close to Latin-1. (ISO 32000-2, 7.9.2.2)
pub(super) fn string(bytes: &[u8]) -> String {
    match crate::text::decode(bytes) {
        Ok(text) if bytes.starts_with(&[0xFE, 0xFF]) || bytes.starts_with(&[0xEF, 0xBB, 0xBF]) => text,
        _ => bytes.iter().map(|&byte| char::from(byte)).collect(),
    }
}

/// Whether a title was given by a person: programs put their own name or that of a file there.
pub(super) fn is_title(title: &str) -> bool {
    let lower = title.to_ascii_lowercase();
    let is_file = [
        "doc", "docx", "tex", "dvi", "indd", "qxd", "pdf", "ps", "odt", "rtf", "txt", "html", "xlsx", "pptx",
        "cdr", "fm",
    ]
    .iter()
    .any(|extension| lower.ends_with(&format!(".{extension}")));
    let is_program = [
        "untitled",
        "microsoft word -",
        "microsoft powerpoint -",
        "powerpoint presentation",
        "about:blank",
        "slide 1",
    ]
    .iter()
    .any(|start| lower.starts_with(start));
    title.chars().any(char::is_alphabetic) && !is_file && !is_program
}

/// The mark that begins an item of a list, as its number if it has one, and the text behind it.
pub(super) fn marker(text: &str) -> Option<(Option<u32>, &str)> {
    let (mark, rest) = text.split_once(' ')?;
    let rest = rest.trim_start();
    let mut characters = mark.chars();
    if let (Some(c), None) = (characters.next(), characters.next())
        && BULLETS.contains(c)
    {
        return (!rest.is_empty()).then_some((None, rest));
    }
    let number = mark.strip_suffix(['.', ')'])?;
    let number = number.strip_prefix('(').unwrap_or(number);
    let is_number = (1..=3).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !rest.is_empty()).then(|| (number.parse().ok(), rest))
}

/// Adds a character, a ligature or another form of letters as those it stands for.
pub(super) fn push(text: &mut String, c: char) {
    const LIGATURES: [&str; 7] = ["ff", "fi", "fl", "ffi", "ffl", "st", "st"];
    match c {
        '\u{FB00}'..='\u{FB06}' => text.push_str(LIGATURES[c as usize - 0xFB00]),
        '\u{FB1D}'..='\u{FDFF}' | '\u{FE70}'..='\u{FEFC}' => text.extend(bidi::letters(c)),
        _ => text.push(c),
    }
}
