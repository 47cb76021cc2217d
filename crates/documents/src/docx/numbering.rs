//! The lists of a document: which have numbers, and the next number of each.

use std::collections::HashMap;

use super::parts::{Archive, Xml, attribute, each, local};
use crate::error::ReadError;
use crate::limits::MAX_LIST_DEPTH;

/// The lists by their ids.
#[derive(Default)]
pub(super) struct Numbering {
    /// The definition of each list.
    definitions: HashMap<String, String>,
    /// Whether each level of each definition has numbers.
    numbered: HashMap<String, [bool; MAX_LIST_DEPTH + 1]>,
    /// The last number given at each level of each list.
    last: HashMap<String, [u32; MAX_LIST_DEPTH + 1]>,
}

impl Numbering {
    /// The number of the next item of a list at a depth; none where it has a bullet.
    pub(super) fn next(&mut self, list: &str, depth: usize) -> Option<u32> {
        let depth = depth.min(MAX_LIST_DEPTH);
        let definition = self.definitions.get(list)?;
        if !self.numbered.get(definition)?[depth] {
            return None;
        }
        if !self.last.contains_key(list) {
            self.last.insert(list.to_owned(), Default::default());
        }
        let last = self.last.get_mut(list)?;
        last[depth] = last[depth].saturating_add(1);
        last[depth + 1..].fill(0);
        Some(last[depth])
    }
}

pub(super) fn read(archive: &mut Archive<'_>) -> Result<Numbering, ReadError> {
    let mut numbering = Numbering::default();
    let (mut definition, mut list, mut depth) = (String::new(), String::new(), 0);
    each(archive, "word/numbering.xml", |event| {
        let (Xml::Start(tag) | Xml::Empty(tag)) = event else { return Ok(()) };
        match local(tag.local_name().as_ref()) {
            "abstractNum" => definition = attribute(tag, "abstractNumId").unwrap_or_default(),
            "lvl" => depth = attribute(tag, "ilvl").and_then(|depth| depth.parse().ok()).unwrap_or_default(),
            "numFmt" => {
                let format = attribute(tag, "val").unwrap_or_default();
                if depth <= MAX_LIST_DEPTH && format != "bullet" && format != "none" {
                    numbering.numbered.entry(definition.clone()).or_default()[depth] = true;
                    ReadError::check_styles(numbering.numbered.len())?;
                }
            }
            "num" => list = attribute(tag, "numId").unwrap_or_default(),
            "abstractNumId" => {
                numbering.definitions.insert(list.clone(), attribute(tag, "val").unwrap_or_default());
                ReadError::check_styles(numbering.definitions.len())?;
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(numbering)
}
