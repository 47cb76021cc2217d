//! Placeholders that stand for users' texts while a template is rendered.

use crate::error::{Result, template_error};

/// A placeholder is `OPEN`, decimal digits from `ZERO` on, `CLOSE`: characters of the private-use area, which no
/// template writes and no template's trimming or splitting touches.
pub(super) const OPEN: char = '\u{F8E0}';
pub(super) const CLOSE: char = '\u{F8E1}';
const ZERO: u32 = 0xF8E2;
/// Stands on both sides of a placeholder. It is white space: where it is gone, the template trims.
pub(super) const PAD: char = '\u{2005}';

/// Whether a character belongs to a placeholder.
pub(super) fn is_placeholder(c: char) -> bool {
    c == PAD || (u32::from(OPEN)..ZERO + 10).contains(&u32::from(c))
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
