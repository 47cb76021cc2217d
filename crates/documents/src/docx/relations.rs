//! The names of a document's parts, which the relations of the archive and of its main part tell.
//! <https://ecma-international.org/publications-and-standards/standards/ecma-376/> (part 2, 6.5: relationships)

use super::parts::{Archive, Xml, attribute, each, local};
use crate::error::ReadError;

/// The parts that are read.
pub(super) struct Names {
    pub(super) main: String,
    pub(super) properties: String,
    pub(super) styles: String,
    pub(super) numbering: String,
    pub(super) footnotes: String,
    pub(super) endnotes: String,
}

/// Reads the names; a part that no relation tells has the name that Word gives it.
pub(super) fn read(archive: &mut Archive<'_>) -> Result<Names, ReadError> {
    let mut names = Names {
        main: "word/document.xml".to_owned(),
        properties: "docProps/core.xml".to_owned(),
        styles: "word/styles.xml".to_owned(),
        numbering: "word/numbering.xml".to_owned(),
        footnotes: "word/footnotes.xml".to_owned(),
        endnotes: "word/endnotes.xml".to_owned(),
    };
    follow(
        archive,
        "",
        &mut [("officeDocument", &mut names.main), ("core-properties", &mut names.properties)],
    )?;
    let main = names.main.clone();
    follow(
        archive,
        &main,
        &mut [
            ("styles", &mut names.styles),
            ("numbering", &mut names.numbering),
            ("footnotes", &mut names.footnotes),
            ("endnotes", &mut names.endnotes),
        ],
    )?;
    Ok(names)
}

/// Puts in the names of the parts that `source` relates to, each by the last word of its relation's type.
fn follow(
    archive: &mut Archive<'_>,
    source: &str,
    wanted: &mut [(&str, &mut String)],
) -> Result<(), ReadError> {
    let (folder, file) = source.rsplit_once('/').unwrap_or(("", source));
    let mut found = vec![None; wanted.len()];
    each(archive, &resolve(folder, &format!("_rels/{file}.rels")), |event| {
        let (Xml::Start(tag) | Xml::Empty(tag)) = event else { return Ok(()) };
        if local(tag.local_name().as_ref()) == "Relationship" {
            let kind = attribute(tag, "Type").unwrap_or_default();
            let kind = kind.rsplit('/').next().unwrap_or_default();
            if let Some(at) = wanted.iter().position(|(name, _)| *name == kind) {
                found[at] = attribute(tag, "Target").map(|target| resolve(folder, &target));
            }
        }
        Ok(())
    })?;
    for ((_, name), found) in wanted.iter_mut().zip(found) {
        // A relation may lead out of the archive, or nowhere.
        if let Some(found) = found.filter(|found| archive.zip.index_for_name(found).is_some()) {
            **name = found;
        }
    }
    Ok(())
}

/// The name of a part from the root of the archive, given from a folder of it.
fn resolve(folder: &str, target: &str) -> String {
    let mut path: Vec<&str> = Vec::new();
    let folder = if target.starts_with('/') { "" } else { folder };
    for step in folder.split('/').chain(target.split('/')) {
        match step {
            "" | "." => {}
            ".." => drop(path.pop()),
            _ => path.push(step),
        }
    }
    path.join("/")
}
