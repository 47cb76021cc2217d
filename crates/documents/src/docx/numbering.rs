//! The lists of a document, and the labels of their items: `1.`, `(a)`, `4.2`.

use std::collections::HashMap;

use super::parts::{Archive, Xml, attribute, each, local};
use crate::error::ReadError;
use crate::limits::MAX_LIST_DEPTH;

const LEVELS: usize = MAX_LIST_DEPTH + 1;

/// The lists by their ids.
#[derive(Default)]
pub(super) struct Numbering {
    lists: HashMap<String, List>,
    definitions: HashMap<String, Definition>,
}

#[derive(Default)]
struct List {
    definition: String,
    /// The number of the list's first item at each level, where it does not go on with that of its definition.
    starts: [Option<u32>; LEVELS],
}

#[derive(Default)]
struct Definition {
    levels: [Level; LEVELS],
    /// The last number given at each level: lists of one definition go on counting.
    last: [Option<u32>; LEVELS],
}

#[derive(Default)]
struct Level {
    /// The kind of numbers, by its name in the file; empty where the level is not defined.
    format: String,
    /// The label, in which `%1` stands for the number of the first level.
    text: Option<String>,
    start: Option<u32>,
    /// Items of the levels above do not begin it anew.
    goes_on: bool,
    /// All numbers are decimal.
    decimal: bool,
}

impl Numbering {
    /// The label of the next item of a list at a depth; none where it has a bullet.
    pub(super) fn next(&mut self, list: &str, depth: usize) -> Option<String> {
        let depth = depth.min(MAX_LIST_DEPTH);
        let list = self.lists.get_mut(list)?;
        let Definition { levels, last } = self.definitions.get_mut(&list.definition)?;
        let next = last[depth].map_or(levels[depth].first(), |last| last.saturating_add(1));
        last[depth] = Some(list.starts[depth].take().unwrap_or(next));
        for below in depth + 1..LEVELS {
            if !levels[below].goes_on {
                last[below] = None;
            }
        }
        label(levels, last, depth)
    }
}

impl Level {
    fn first(&self) -> u32 {
        self.start.unwrap_or(1)
    }
}

fn label(levels: &[Level; LEVELS], last: &[Option<u32>; LEVELS], depth: usize) -> Option<String> {
    let level = &levels[depth];
    if matches!(level.format.as_str(), "" | "bullet") {
        return None;
    }
    let default = format!("%{}.", depth + 1);
    let mut parts = level.text.as_ref().unwrap_or(&default).split('%');
    let mut label = parts.next()?.to_owned();
    for part in parts {
        let at = part.chars().next().and_then(|c| c.to_digit(10)).and_then(|at| (at as usize).checked_sub(1));
        match at.and_then(|at| Some((levels.get(at)?, last[at]))) {
            Some((of, last)) => {
                let format = if level.decimal { "decimal" } else { &of.format };
                label.push_str(&number(format, last.unwrap_or(of.first())));
                label.push_str(&part[1..]);
            }
            None => {
                label.push('%');
                label.push_str(part);
            }
        }
    }
    let label = label.trim();
    (!label.is_empty()).then(|| label.to_owned())
}

/// A number as a format writes it; in decimals where the format has no sign for it, or is not known.
fn number(format: &str, number: u32) -> String {
    match (format, number) {
        ("none", _) => String::new(),
        ("decimalZero", _) => format!("{number:02}"),
        ("lowerLetter", 1..=780) => letters(b'a', number),
        ("upperLetter", 1..=780) => letters(b'A', number),
        ("lowerRoman", 1..=3999) => roman(number).to_ascii_lowercase(),
        ("upperRoman", 1..=3999) => roman(number),
        _ => number.to_string(),
    }
}

/// `a` to `z`, then `aa` to `zz`, then `aaa`.
fn letters(first: u8, number: u32) -> String {
    let (round, letter) = ((number - 1) / 26, (number - 1) % 26);
    char::from(first + letter as u8).to_string().repeat(round as usize + 1)
}

fn roman(mut number: u32) -> String {
    const SIGNS: [(u32, &str); 13] = [
        (1000, "M"),
        (900, "CM"),
        (500, "D"),
        (400, "CD"),
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    ];
    let mut roman = String::new();
    for (value, sign) in SIGNS {
        while number >= value {
            roman.push_str(sign);
            number -= value;
        }
    }
    roman
}

pub(super) fn read(archive: &mut Archive<'_>, part: &str) -> Result<Numbering, ReadError> {
    let mut numbering = Numbering::default();
    let (mut definition, mut list, mut depth) = (String::new(), None, 0);
    each(archive, part, |event| {
        let (Xml::Start(tag) | Xml::Empty(tag)) = event else { return Ok(()) };
        let number = |name: &str| attribute(tag, name).and_then(|number| number.parse::<u32>().ok());
        let name = tag.local_name();
        let name = local(name.as_ref());
        match name {
            "abstractNum" => {
                (definition, list, depth) = (attribute(tag, "abstractNumId").unwrap_or_default(), None, 0);
            }
            "num" => (list, depth) = (attribute(tag, "numId"), 0),
            "lvl" | "lvlOverride" => depth = number("ilvl").unwrap_or_default() as usize,
            _ => {}
        }
        if depth > MAX_LIST_DEPTH {
            return Ok(());
        }
        if let Some(list) = &list {
            if matches!(name, "abstractNumId" | "startOverride") {
                let list = numbering.lists.entry(list.clone()).or_default();
                match name {
                    "abstractNumId" => list.definition = attribute(tag, "val").unwrap_or_default(),
                    _ => list.starts[depth] = number("val"),
                }
                ReadError::check_styles(numbering.lists.len())?;
            }
        } else if matches!(name, "numFmt" | "lvlText" | "start" | "lvlRestart" | "isLgl") {
            let level = &mut numbering.definitions.entry(definition.clone()).or_default().levels[depth];
            match name {
                "numFmt" => level.format = attribute(tag, "val").unwrap_or_default(),
                "lvlText" => level.text = attribute(tag, "val"),
                "start" => level.start = number("val"),
                "lvlRestart" => level.goes_on = number("val") == Some(0),
                _ => level.decimal = attribute(tag, "val").is_none_or(|on| on != "0" && on != "false"),
            }
            ReadError::check_styles(numbering.definitions.len())?;
        }
        Ok(())
    })?;
    Ok(numbering)
}
