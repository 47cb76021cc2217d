//! Whitespace, digits and words as Python's `str` and `re` define them, in which the reference metrics are written.

use unicode_properties::{GeneralCategory, GeneralCategoryGroup, UnicodeGeneralCategory};

/// `str.isspace`: Unicode's whitespace and the four information separators.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// `\d`: decimal digits of any script.
pub(crate) fn is_digit(c: char) -> bool {
    c.is_ascii_digit() || !c.is_ascii() && c.general_category() == GeneralCategory::DecimalNumber
}

/// `\w`: letters and numbers of any script, and the underscore.
pub(crate) fn is_word(c: char) -> bool {
    use GeneralCategoryGroup::{Letter, Number};
    c == '_' || matches!(c.general_category_group(), Letter | Number)
}

/// `str.strip()`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.split()`.
pub(crate) fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `text` cut where `\b` matches: maximal runs of characters that are `\w`, or that are not.
pub(crate) fn runs(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let word = is_word(text.chars().next()?);
        let (run, rest) = text.split_at(text.find(|c| is_word(c) != word).unwrap_or(text.len()));
        text = rest;
        Some(run)
    })
}

/// The digits of the first `prefix` that is followed by some: the group of `{prefix}(\d+)`.
pub(crate) fn digits_after<'t>(text: &'t str, prefix: &str) -> Option<&'t str> {
    text.match_indices(prefix).find_map(|(at, _)| {
        let rest = &text[at + prefix.len()..];
        let digits = &rest[..rest.find(|c| !is_digit(c)).unwrap_or(rest.len())];
        (!digits.is_empty()).then_some(digits)
    })
}

/// The first line of a text, leading line breaks ignored. Predictions of trec, triviaqa, samsum and lsht are cut to
/// it before they are scored.
pub fn first_line(prediction: &str) -> &str {
    let text = prediction.trim_start_matches('\n');
    text.split_once('\n').map_or(text, |(line, _)| line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whitespace_is_pythons() {
        assert_eq!(strip("\u{1c} \u{3000}a b\u{85}\n"), "a b");
        assert_eq!(split("a\u{1f}b\u{a0}c\u{200b}d").collect::<Vec<_>>(), ["a", "b", "c\u{200b}d"]);
    }

    #[test]
    fn words_and_digits_are_pythons() {
        assert_eq!(runs("caf\u{e9}, a_1　二③").collect::<Vec<_>>(), ["caf\u{e9}", ", ", "a_1", "　", "二③"]);
        // A combining accent is no \w, so it ends a word.
        assert_eq!(runs("a\u{301}b").collect::<Vec<_>>(), ["a", "\u{301}", "b"]);
        assert!(is_digit('１') && is_digit('٣') && !is_digit('②') && !is_digit('一'));
        assert_eq!(digits_after("Paragraph x, Paragraph 12.", "Paragraph "), Some("12"));
        assert_eq!(digits_after("Paragraph ", "Paragraph "), None);
    }

    #[test]
    fn the_first_line_is_the_first_with_text() {
        assert_eq!(first_line("\n\n a b \nc"), " a b ");
        assert_eq!(first_line("\n \nb"), " ");
        assert_eq!(first_line("a"), "a");
        assert_eq!(first_line("\n\n"), "");
    }
}
