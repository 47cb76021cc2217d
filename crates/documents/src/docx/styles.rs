//! The styles of a document: which of them are headings.

use std::collections::HashMap;

use super::parts::{Archive, Xml, attribute, each, local};
use crate::error::ReadError;

/// Styles from which a style may inherit, one after the other.
const MAX_INHERITANCE: usize = 16;

/// The role that a style gives to a paragraph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The document's title.
    Title,
    /// A heading of level 1 to 6.
    Heading(usize),
    /// A line of a table of contents.
    Contents,
    /// Programs, and other text whose lines stay.
    Code,
}

#[derive(Clone, Debug, Default)]
struct Style {
    name: String,
    based_on: Option<String>,
    outline: Option<usize>,
    numbering: Option<(String, usize)>,
    /// The role that the style has by itself.
    role: Option<Role>,
}

/// The styles by their ids.
#[derive(Default)]
pub(super) struct Styles(HashMap<String, Style>);

impl Styles {
    pub(super) fn role(&self, id: &str) -> Option<Role> {
        self.chain(id).find_map(|(id, style)| style.map_or_else(|| role(id, None), |style| style.role))
    }

    /// The list that a style puts its paragraphs in, and how deep: a style may set the depth alone.
    pub(super) fn numbering<'a>(&'a self, id: &'a str) -> Option<(&'a str, usize)> {
        let mut found = self.chain(id).filter_map(|(_, style)| style?.numbering.as_ref()).peekable();
        let depth = found.peek()?.1;
        found.map(|(list, _)| list.as_str()).find(|list| !list.is_empty()).map(|list| (list, depth))
    }

    fn chain<'a>(&'a self, id: &'a str) -> impl Iterator<Item = (&'a str, Option<&'a Style>)> {
        std::iter::successors(Some((id, self.0.get(id))), |(_, style)| {
            let next = (*style)?.based_on.as_deref()?;
            Some((next, self.0.get(next)))
        })
        .take(MAX_INHERITANCE)
    }
}

/// The role of a style by its name, and by its level in the outline.
fn role(name: &str, outline: Option<usize>) -> Option<Role> {
    // Names are the same in all languages of Word; ids are not.
    let name = name.to_ascii_lowercase().replace(' ', "");
    if name == "title" {
        return Some(Role::Title);
    }
    if name.starts_with("toc") && !name.starts_with("tocheading") {
        return Some(Role::Contents);
    }
    if matches!(name.as_str(), "htmlpreformatted" | "preformattedtext" | "sourcecode" | "code" | "plaintext")
    {
        return Some(Role::Code);
    }
    let level = name.strip_prefix("heading").and_then(|level| level.parse::<usize>().ok());
    let level = level.or(outline).filter(|level| (1..=9).contains(level))?;
    Some(Role::Heading(level.min(6)))
}

pub(super) fn read(archive: &mut Archive<'_>, part: &str) -> Result<Styles, ReadError> {
    let mut styles = Styles::default();
    let mut id = String::new();
    let mut style = Style::default();
    each(archive, part, |event| {
        match event {
            Xml::Start(tag) | Xml::Empty(tag) => {
                let value = || attribute(tag, "val");
                match local(tag.local_name().as_ref()) {
                    "style" => {
                        id = attribute(tag, "styleId").unwrap_or_default();
                        style = Style::default();
                    }
                    "name" => style.name = value().unwrap_or_default(),
                    "basedOn" => style.based_on = value(),
                    "outlineLvl" => {
                        style.outline =
                            value().and_then(|v| v.parse::<usize>().ok()).map(|v| v.saturating_add(1))
                    }
                    "numId" => {
                        style.numbering =
                            value().map(|v| (v, style.numbering.take().map_or(0, |(_, depth)| depth)))
                    }
                    "ilvl" => {
                        let depth = value().and_then(|v| v.parse().ok()).unwrap_or_default();
                        style.numbering = Some((style.numbering.take().unwrap_or_default().0, depth));
                    }
                    _ => {}
                }
            }
            Xml::End("style") => {
                style.role = role(&style.name, style.outline);
                styles.0.insert(std::mem::take(&mut id), std::mem::take(&mut style));
                ReadError::check_styles(styles.0.len())?;
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(styles)
}
