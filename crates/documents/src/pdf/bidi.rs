//! Text that runs from right to left, in the order in which it is read: a page tells where each glyph stands, from left to right.

use icu_normalizer::ComposingNormalizerBorrowed;

/// Pairs of signs of which a text from right to left shows the other.
const MIRRORED: [(char, char); 5] = [('(', ')'), ('[', ']'), ('{', '}'), ('<', '>'), ('«', '»')];

/// Letters, points and signs of scripts that run from right to left, whose digits do not.
pub(super) fn is_rtl(c: char) -> bool {
    matches!(c, '\u{590}'..='\u{8FF}' | '\u{FB1D}'..='\u{FDFF}' | '\u{FE70}'..='\u{FEFC}') && !c.is_numeric()
}

pub(super) fn is_ltr(c: char) -> bool {
    c.is_alphabetic() && !is_rtl(c)
}

/// The characters that a form of Arabic or Hebrew letters stands for, from left to right.
pub(super) fn letters(form: char) -> impl Iterator<Item = char> {
    const NORMALIZER: ComposingNormalizerBorrowed<'_> = ComposingNormalizerBorrowed::new_nfkc();
    let letters: Vec<char> = NORMALIZER.normalize_iter(std::iter::once(form)).collect();
    letters.into_iter().rev()
}

/// A text from left to right in the order in which it is read, and one in this order from left to right. All of it runs from right to
/// left, or the parts without other letters do.
pub(super) fn reordered(text: &str, rtl: bool) -> String {
    if !text.contains(is_rtl) {
        return text.to_owned();
    }
    let characters: Vec<char> = text.chars().collect();
    let mut found = String::with_capacity(text.len());
    if rtl {
        turn(&characters, &mut found);
        return found;
    }
    for part in characters.chunk_by(|a, b| is_ltr(*a) == is_ltr(*b)) {
        let (before, inside, behind) = parted(part, is_rtl);
        found.extend(before);
        turn(inside, &mut found);
        found.extend(behind);
    }
    found
}

/// Turns a text around but for the words and the numbers in it that run from left to right.
fn turn(text: &[char], found: &mut String) {
    for part in text.chunk_by(|a, b| is_rtl(*a) == is_rtl(*b)).rev() {
        if part.iter().any(|c| is_ltr(*c)) {
            turn_around(part, char::is_alphanumeric, found);
            continue;
        }
        for part in part.chunk_by(|a, b| is_of_number(*a) == is_of_number(*b)).rev() {
            let is_number = part.iter().any(|c| c.is_numeric());
            turn_around(part, |c| is_number && (c.is_numeric() || is_beside_number(c)), found);
        }
    }
}

/// Turns a text around but for its part from the first to the last character of a kind.
fn turn_around(text: &[char], is_kept: impl Fn(char) -> bool, found: &mut String) {
    let (before, inside, behind) = parted(text, is_kept);
    found.extend(behind.iter().rev().map(|c| mirrored(*c)));
    found.extend(inside);
    found.extend(before.iter().rev().map(|c| mirrored(*c)));
}

/// The parts of a text before the first character of a kind, from there to the last, and behind it.
fn parted(text: &[char], is_kind: impl Fn(char) -> bool) -> (&[char], &[char], &[char]) {
    let start = text.iter().position(|c| is_kind(*c)).unwrap_or(text.len());
    let end = text.iter().rposition(|c| is_kind(*c)).map_or(start, |last| last + 1);
    (&text[..start], &text[start..end], &text[end..])
}

fn is_of_number(c: char) -> bool {
    c.is_numeric() || is_beside_number(c) || ".,:/+-".contains(c)
}

fn is_beside_number(c: char) -> bool {
    "%$€£¥₪°#".contains(c)
}

fn mirrored(c: char) -> char {
    let other = MIRRORED.iter().find_map(|&(open, close)| match c {
        c if c == open => Some(close),
        c if c == close => Some(open),
        _ => None,
    });
    other.unwrap_or(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_from_right_to_left_and_words_and_numbers_in_them_from_left_to_right() {
        for (shown, rtl, read) in [
            ("םלוע םולש", true, "שלום עולם"),
            (".12.5% אוה Windows XP לש ריחמה", true, "המחיר של Windows XP הוא 12.5%."),
            ("(הרעה) ינש", true, "שני (הערה)"),
            ("the word םולש means (peace)", false, "the word שלום means (peace)"),
            ("12 - 15", true, "12 - 15"),
            ("15 - 12 םידומע", true, "עמודים 12 - 15"),
            ("٢٠٢٤ ماع", true, "عام ٢٠٢٤"),
        ] {
            assert_eq!(reordered(shown, rtl), read);
            assert_eq!(reordered(read, rtl), shown);
        }
        let letters: String = ['\u{FEFB}', '\u{FEE1}'].into_iter().flat_map(letters).collect();
        assert_eq!(letters, "الم");
    }
}
