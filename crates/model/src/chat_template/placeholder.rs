//! Placeholders that stand for users' texts while a template is rendered.
//!
//! All are characters of the private-use area, which no template writes and no template's trimming or splitting touches.
//! A text is replaced by a number between two brackets. The other ASCII characters of a user's JSON value are each replaced
//! by a character that stands for it, so that every part of the value is known for a user's.

use crate::error::{Result, template_error};

/// A placeholder is `OPEN`, one `ESCAPE` for each time that the text was written as a JSON string, decimal digits from
/// `ZERO` on, `CLOSE`.
pub(super) const OPEN: char = '\u{F8E0}';
pub(super) const CLOSE: char = '\u{F8E1}';
const ZERO: u32 = 0xF8E2;
pub(super) const ESCAPE: char = '\u{F8EC}';
/// Stands on both sides of a placeholder. It is white space: where it is gone, the template trims.
pub(super) const PAD: char = '\u{2005}';
/// The character that stands for the ASCII character 0.
const ASCII: u32 = 0xF700;

/// Whether a character belongs to a placeholder or stands for a user's character.
pub(super) fn is_placeholder(c: char) -> bool {
    c == PAD || (OPEN..=ESCAPE).contains(&c) || unmarked(c).is_some()
}

/// Refuses a template in which a placeholder could be mistaken.
pub(super) fn check_source(source: &str) -> Result<()> {
    match source.chars().find(|c| is_placeholder(*c)) {
        Some(c) => Err(template_error(format!(
            "contains the character U+{:04X}, which is needed to tell its own text from a user's",
            u32::from(c)
        ))),
        None => Ok(()),
    }
}

/// The placeholder of the text `index`.
pub(super) fn placeholder(index: usize) -> String {
    let digit = |c: char| c.to_digit(10).and_then(|d| char::from_u32(ZERO + d)).unwrap_or(c);
    let digits: String = index.to_string().chars().map(digit).collect();
    format!("{OPEN}{digits}{CLOSE}")
}

/// The index that a placeholder's digits say; `None` if they are mutilated.
pub(super) fn index_of(digits: &str) -> Option<usize> {
    let digit = |c: char| u32::from(c).checked_sub(ZERO).filter(|d| *d < 10);
    let number = digits.chars().try_fold(0usize, |n, c| n.checked_mul(10)?.checked_add(digit(c)? as usize));
    number.filter(|_| !digits.is_empty())
}

/// The character that stands for a user's ASCII character; others stand for themselves.
pub(super) fn marked(c: char) -> char {
    char::from_u32(ASCII + u32::from(c)).filter(|_| c.is_ascii()).unwrap_or(c)
}

/// The user's ASCII character that a character stands for.
pub(super) fn unmarked(c: char) -> Option<char> {
    u32::from(c).checked_sub(ASCII).and_then(char::from_u32).filter(char::is_ascii)
}

/// A JSON text whose strings hold placeholders, as a user's: its ASCII characters are marked, and its placeholders
/// stand for texts that are escaped once more.
pub(super) fn marked_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len() * 3);
    for c in json.chars() {
        match unmarked(c) {
            Some(c) => out.extend(escaped(&c.to_string()).chars().map(marked)),
            None if c == OPEN => out.extend([OPEN, ESCAPE]),
            None => out.push(marked(c)),
        }
    }
    out
}

/// A text as it stands between the quotes of a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
