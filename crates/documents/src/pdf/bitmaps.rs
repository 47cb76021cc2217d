//! The characters of TeX's bitmap fonts. Their glyphs have the names of their codes alone (`/a82`), which are those of its encodings OT1 and
//! T1; the codes that a font has tell which of the two it is.

use hayro_font::Font;
use hayro_syntax::object::dict::keys::{DIFFERENCES, ENCODING, SUBTYPE, TO_UNICODE};
use hayro_syntax::object::{Array, Dict, Name, Object};

/// Codes of a font, a byte each.
const CODES: usize = 256;

/// Entries of an encoding's differences that are read: a code and a name for each glyph, and for each that is left out.
const MAX_ENTRIES: usize = 4 * CODES;

/// Small letters from which a font is one of text.
const TEXT_LETTERS: usize = 6;

/// Letters of one width from which a font is one of programs.
const PROGRAM_LETTERS: usize = 10;

/// A code without a character.
const NONE: char = '\0';

/// Codes 0 to 31 of OT1.
const OT1: &str = "ΓΔΘΛΞΠΣΥΦΨΩﬀﬁﬂﬃﬄıȷ`´ˇ˘¯˚¸ßæœøÆŒØ";

/// Other codes of OT1 that are not those of ASCII.
const OT1_SIGNS: [(usize, char); 11] = [
    (32, NONE),
    (34, '”'),
    (60, '¡'),
    (62, '¿'),
    (92, '“'),
    (95, '˙'),
    (123, '–'),
    (124, '—'),
    (125, '˝'),
    (126, '˜'),
    (127, '¨'),
];

/// Codes 0 to 31 of T1. The mark of a compound is not drawn.
const T1: &str = "`´ˆ˜¨˝˚ˇ˘¯˙¸˛‚‹›“”„«»–—\0₀ıȷﬀﬁﬂﬃﬄ";

/// Codes 127 to 255 of T1.
const T1_LETTERS: &str = "-ĂĄĆČĎĚĘĞĹĽŁŃŇŊŐŔŘŚŠŞŤŢŰŮŸŹŽŻĲİđ§ăąćčďěęğĺľłńňŋőŕřśšşťţűůÿźžżĳ¡¿£\
    ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖŒØÙÚÛÜÝÞẞàáâãäåæçèéêëìíîïðñòóôõöœøùúûüýþß";

/// The bullet of TS1, an encoding of signs.
const BULLET: (usize, char) = (136, '•');

/// The characters of a bitmap font by their codes.
pub(super) struct Bitmaps {
    characters: Box<[char; CODES]>,
    /// All letters are of one width.
    pub(super) mono: bool,
}

impl Bitmaps {
    /// The characters of a font; none where it is of another kind, or its glyphs have other names.
    pub(super) fn of(dict: &Dict<'_>, font: &Font<'_>) -> Option<Self> {
        let is_bitmap = dict.get::<Name<'_>>(SUBTYPE).is_some_and(|subtype| &*subtype == b"Type3");
        if !is_bitmap || dict.contains_key(TO_UNICODE) {
            return None;
        }
        let used = codes(&dict.get::<Dict<'_>>(ENCODING)?)?;
        let of = |range: std::ops::RangeInclusive<usize>| range.filter(|code| used[*code]);
        let letters = || of(65..=90).chain(of(97..=122));
        let width = |code: usize| font.code_advance(code as u32).x;
        let first = letters().next().map(width);
        let is_even = letters().all(|code| first.is_some_and(|first| (width(code) - first).abs() < 1.0));
        let mono = is_even && letters().count() >= PROGRAM_LETTERS;

        let mut characters = Box::new([NONE; CODES]);
        let mut set = |start: usize, list: &str| {
            list.chars().enumerate().for_each(|(at, c)| characters[start + at] = c);
        };
        let ascii: String = (33..127_u8).map(char::from).collect();
        set(33, &ascii);
        let is_text = of(97..=122).count() >= TEXT_LETTERS || used[44] || used[46];
        let is_t1 = of(128..=255).next().is_some()
            || of(16..=17).chain(of(21..=22)).chain(of(27..=31)).count() > of(11..=15).count();
        if is_text && is_t1 {
            set(0, T1);
            set(127, T1_LETTERS);
        } else if is_text && !mono {
            set(0, OT1);
            OT1_SIGNS.iter().for_each(|(code, c)| characters[*code] = *c);
        } else if !is_text {
            characters[BULLET.0] = BULLET.1;
        }
        if is_text && !mono {
            (characters[39], characters[96]) = ('’', '‘');
        }
        Some(Bitmaps { characters, mono })
    }

    pub(super) fn character(&self, code: u32) -> Option<char> {
        self.characters.get(code as usize).copied().filter(|c| *c != NONE)
    }
}

/// The codes that an encoding has glyphs for; none where a glyph's name is another than its code's, or where the glyphs are numbered
/// from the first one, which tells no characters.
fn codes(encoding: &Dict<'_>) -> Option<[bool; CODES]> {
    let mut used = [false; CODES];
    let mut code = 0;
    for entry in encoding.get::<Array<'_>>(DIFFERENCES)?.iter::<Object<'_>>().take(MAX_ENTRIES) {
        match entry {
            Object::Number(number) => code = usize::try_from(number.as_i64()).ok()?,
            Object::Name(name) => {
                if &*name != b".notdef" {
                    let number = name.as_str().trim_start_matches(|c: char| c.is_ascii_alphabetic());
                    let is_code = number.len() < name.as_str().len() && number.parse() == Ok(code);
                    *used.get_mut(code).filter(|_| is_code)? = true;
                }
                code = code.checked_add(1)?;
            }
            _ => {}
        }
    }
    (used.contains(&true) && !(used[0] && used[1])).then_some(used)
}
