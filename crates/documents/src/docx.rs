//! DOCX (Office Open XML): the text of a Word document as Markdown.
//! <https://ecma-international.org/publications-and-standards/standards/ecma-376/>
//!
//! A document is a zip archive of XML. Each part is read as a stream of bounded length; document types are refused, so that
//! no entity can be declared.

use std::io::Cursor;
use std::time::{Duration, Instant};

use parts::{Archive, Xml, each, local, malformed, other_archive};
use zip::ZipArchive;

use crate::document::Document;
use crate::error::ReadError;
use crate::limits::MAX_ZIP_ENTRIES;
use crate::markdown::collapse;
use crate::origin::Origin;

mod body;
mod numbering;
mod parts;
mod relations;
mod styles;

pub(crate) fn read(bytes: &[u8], stem: &str, origin: Origin) -> Result<Document, ReadError> {
    read_within(bytes, stem, origin.time())
}

fn read_within(bytes: &[u8], stem: &str, time: Duration) -> Result<Document, ReadError> {
    let zip = ZipArchive::new(Cursor::new(bytes)).map_err(malformed)?;
    if zip.len() > MAX_ZIP_ENTRIES {
        return Err(ReadError::TooLarge { what: "parts", limit: format!("{MAX_ZIP_ENTRIES}") });
    }
    let mut archive = Archive { zip, time, started: Instant::now() };
    let names = relations::read(&mut archive)?;
    if archive.zip.index_for_name(&names.main).is_none() {
        return Err(other_archive());
    }
    let styles = styles::read(&mut archive, &names.styles)?;
    let numbering = numbering::read(&mut archive, &names.numbering)?;
    let body = body::read(&mut archive, &names, &styles, numbering)?;
    let (text, heading) = body.out.finish()?;
    if text.is_empty() {
        return Err(ReadError::NoText { remedy: "pictures of text need OCR first" });
    }
    let title = [core_title(&mut archive, &names.properties)?, body.title, heading];
    let title = title.into_iter().flatten().map(|title| collapse(&title)).find(|title| !title.is_empty());
    Ok(Document { title: title.unwrap_or_else(|| stem.to_owned()), text })
}

/// The title among the document's properties.
fn core_title(archive: &mut Archive<'_>, part: &str) -> Result<Option<String>, ReadError> {
    let (mut title, mut inside) = (String::new(), false);
    each(archive, part, |event| {
        match event {
            Xml::Start(tag) | Xml::Empty(tag) => {
                inside = local(tag.local_name().as_ref()) == "title" && matches!(event, Xml::Start(_))
            }
            Xml::End(_) => inside = false,
            Xml::Text(text) if inside => title.push_str(text),
            Xml::Text(_) => {}
        }
        Ok(())
    })?;
    Ok((!title.is_empty()).then_some(title))
}

#[cfg(test)]
mod tests;
