//! The names in the bytes of a PDF, found without reading its objects: a string or a comment may hold one that means nothing.

use std::borrow::Cow;

use super::expand::is_space;

/// Bytes behind a name in which its value is looked for.
const MAX_VALUE_BYTES: usize = 1024;

/// A name, its escapes undone.
pub(super) struct Name<'a> {
    /// The place of its solidus.
    pub(super) at: usize,
    pub(super) name: Cow<'a, [u8]>,
    /// The bytes behind it.
    pub(super) rest: &'a [u8],
}

pub(super) fn names(text: &[u8]) -> impl Iterator<Item = Name<'_>> {
    let starts = text.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    starts.map(|(at, _)| {
        let tail = &text[at + 1..];
        let (name, rest) = tail.split_at(tail.iter().take_while(|byte| is_regular(**byte)).count());
        Name { at, name: unescaped(name), rest }
    })
}

impl Name<'_> {
    pub(super) fn is(&self, names: &[&str]) -> bool {
        names.iter().any(|name| name.as_bytes() == &*self.name)
    }

    /// The value is this name.
    pub(super) fn is_followed_by(&self, name: &str) -> bool {
        let value = self.value().and_then(|value| names(value).next());
        value.is_some_and(|value| value.at == 0 && value.is(&[name]))
    }

    /// The value is another object, or an array that holds one. Values that are not told are counted among these.
    pub(super) fn is_indirect(&self) -> bool {
        let Some(value) = self.value() else { return true };
        match value.first() {
            Some(b'[') => {
                let array = value[1..].split(|byte| *byte == b']').next().unwrap_or_default();
                array.contains(&b'(') || has_reference(array)
            }
            first => first.is_some_and(u8::is_ascii_digit),
        }
    }

    /// The value is a number beyond a limit, or another object.
    pub(super) fn is_number_beyond(&self, limit: u64) -> bool {
        let Some(value) = self.value() else { return true };
        let token = |text: &[u8]| text.iter().take_while(|byte| is_regular(**byte)).count();
        let (number, rest) = value.split_at(token(value));
        let next = skip_space(rest).unwrap_or(b"0");
        let digits: String = number
            .iter()
            .filter(|byte| matches!(byte, b'0'..=b'9' | b'.'))
            .map(|byte| char::from(*byte))
            .collect();
        let whole = digits.split('.').next().unwrap_or_default();
        let beyond = !whole.is_empty() && whole.parse::<u64>().map_or(true, |number| number > limit);
        beyond || next.first().is_some_and(u8::is_ascii_digit)
    }

    /// The value is an array of three numbers: the widths of a cross-reference stream, or an array that a comment may hide.
    pub(super) fn is_of_widths(&self) -> bool {
        let Some([b'[', array @ ..]) = self.value() else { return false };
        let is_inside = |byte: u8| is_space(byte) || byte.is_ascii_digit() || b"+-.".contains(&byte);
        let (numbers, rest) = array.split_at(array.iter().take_while(|byte| is_inside(**byte)).count());
        let numbers = numbers.split(|byte| is_space(*byte)).filter(|number| !number.is_empty());
        rest.starts_with(b"%") || rest.starts_with(b"]") && numbers.count() == 3
    }

    fn value(&self) -> Option<&[u8]> {
        skip_space(&self.rest[..self.rest.len().min(MAX_VALUE_BYTES)])
    }
}

/// The text holds a number before an `R`.
fn has_reference(text: &[u8]) -> bool {
    let mut last = 0;
    text.iter().filter(|byte| !is_space(**byte)).any(|byte| {
        let before = std::mem::replace(&mut last, *byte);
        *byte == b'R' && before.is_ascii_digit()
    })
}

/// The bytes behind white space and comments; none where these do not end.
fn skip_space(mut text: &[u8]) -> Option<&[u8]> {
    loop {
        text = &text[text.iter().take_while(|byte| is_space(**byte)).count()..];
        if text.first()? != &b'%' {
            return Some(text);
        }
        text = &text[text.iter().position(|byte| matches!(byte, b'\r' | b'\n'))?..];
    }
}

/// A name without the escapes `#xx`. (ISO 32000-2, 7.3.5)
fn unescaped(name: &[u8]) -> Cow<'_, [u8]> {
    if !name.contains(&b'#') {
        return Cow::Borrowed(name);
    }
    let digit = |at: usize| name.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut plain = Vec::with_capacity(name.len());
    let mut at = 0;
    while at < name.len() {
        match (name[at], digit(at + 1), digit(at + 2)) {
            (b'#', Some(high), Some(low)) => {
                plain.push((high << 4 | low) as u8);
                at += 3;
            }
            (byte, ..) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    Cow::Owned(plain)
}

pub(super) fn is_regular(byte: u8) -> bool {
    !is_space(byte) && !b"()<>[]{}/%".contains(&byte)
}
