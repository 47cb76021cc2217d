//! The parts of a document: XML inside a zip archive, each read as a stream of bounded length.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::time::{Duration, Instant};

use quick_xml::Reader;
use quick_xml::events::{BytesRef, BytesStart, Event};
use zip::ZipArchive;
use zip::result::ZipError;

use crate::error::ReadError;
use crate::limits::{MAX_PART_BYTES, MAX_TEXT_BYTES, MAX_XML_DEPTH};

/// Bytes of an attribute's value: Word's own names and ids are shorter.
const MAX_VALUE_BYTES: usize = 1024;

/// A document's archive, and the time that reading may take.
pub(super) struct Archive<'a> {
    pub(super) zip: ZipArchive<Cursor<&'a [u8]>>,
    pub(super) time: Duration,
    pub(super) started: Instant,
}

/// An element or a text of a part.
pub(super) enum Xml<'a> {
    Start(&'a BytesStart<'a>),
    Empty(&'a BytesStart<'a>),
    /// An end tag, by its name without prefix.
    End(&'a str),
    Text(&'a str),
}

/// Calls `step` for all that a part holds, in order. A part that is absent holds nothing.
pub(super) fn each(
    archive: &mut Archive<'_>,
    part: &str,
    mut step: impl FnMut(&Xml<'_>) -> Result<(), ReadError>,
) -> Result<(), ReadError> {
    let (time, started) = (archive.time, archive.started);
    let file = match archive.zip.by_name(part) {
        Ok(file) => file,
        Err(ZipError::FileNotFound) => return Ok(()),
        Err(error) => return Err(malformed(error)),
    };
    let mut bounded = BufReader::new(file.take(MAX_PART_BYTES as u64));
    let read = events(&mut bounded, &mut |event| {
        if started.elapsed() > time {
            return Err(ReadError::late(time));
        }
        step(event)
    });
    if bounded.get_ref().limit() == 0 {
        return Err(ReadError::too_large("part of the document", MAX_PART_BYTES));
    }
    read
}

/// A part that ends when so many bytes are read of it: an event lies in memory as a whole.
struct OfOneEvent<'a, R> {
    part: &'a mut R,
    left: usize,
}

impl<R: BufRead> Read for OfOneEvent<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(out)?;
        self.consume(read);
        Ok(read)
    }
}

impl<R: BufRead> BufRead for OfOneEvent<'_, R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let bytes = self.part.fill_buf()?;
        Ok(&bytes[..bytes.len().min(self.left)])
    }

    fn consume(&mut self, count: usize) {
        self.left -= count;
        self.part.consume(count);
    }
}

fn events(
    part: &mut impl BufRead,
    step: &mut dyn FnMut(&Xml<'_>) -> Result<(), ReadError>,
) -> Result<(), ReadError> {
    let mut reader = Reader::from_reader(OfOneEvent { part, left: MAX_TEXT_BYTES });
    let (mut buffer, mut depth) = (Vec::new(), 0_usize);
    loop {
        buffer.clear();
        reader.get_mut().left = MAX_TEXT_BYTES;
        let event = reader.read_event_into(&mut buffer);
        if reader.get_ref().left == 0 {
            return Err(ReadError::too_large("text", MAX_TEXT_BYTES));
        }
        match event.map_err(malformed)? {
            Event::Start(tag) => {
                depth += 1;
                // The reader keeps the name of each element that is open.
                if depth > MAX_XML_DEPTH {
                    let limit = MAX_XML_DEPTH.to_string();
                    return Err(ReadError::TooLarge { what: "elements inside elements", limit });
                }
                step(&Xml::Start(&tag))?;
            }
            Event::Empty(tag) => step(&Xml::Empty(&tag))?,
            Event::End(tag) => {
                depth = depth.saturating_sub(1);
                step(&Xml::End(local(tag.local_name().as_ref())))?;
            }
            Event::Text(text) => step(&Xml::Text(&text.decode().map_err(malformed)?))?,
            Event::CData(text) => step(&Xml::Text(&text.decode().map_err(malformed)?))?,
            Event::GeneralRef(name) => step(&Xml::Text(character(&name)?.encode_utf8(&mut [0; 4])))?,
            Event::DocType(_) => return Err(malformed("a document type, which no part may declare")),
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
            Event::Eof => return Ok(()),
        }
    }
}

/// The character of `&#39;` or `&amp;`; XML knows no others without a document type.
fn character(name: &BytesRef<'_>) -> Result<char, ReadError> {
    if let Some(c) = name.resolve_char_ref().map_err(malformed)? {
        return Ok(c);
    }
    match local(name) {
        "amp" => Ok('&'),
        "lt" => Ok('<'),
        "gt" => Ok('>'),
        "quot" => Ok('"'),
        "apos" => Ok('\''),
        _ => Err(malformed("an entity that is not declared")),
    }
}

/// A name of bytes; none of those that are looked for is other than ASCII.
pub(super) fn local(name: &[u8]) -> &str {
    std::str::from_utf8(name).unwrap_or_default()
}

/// The value of a tag's attribute, whatever its prefix. A value beyond all use is none: it may be copied for each paragraph.
pub(super) fn attribute(tag: &BytesStart<'_>, name: &str) -> Option<String> {
    let found = tag
        .attributes()
        .with_checks(false)
        .flatten()
        .find(|a| a.key.local_name().as_ref() == name.as_bytes())
        .filter(|a| a.value.len() <= MAX_VALUE_BYTES)?;
    Some(found.normalized_value(quick_xml::XmlVersion::Implicit1_0).ok()?.into_owned())
}

pub(super) fn malformed(error: impl ToString) -> ReadError {
    ReadError::malformed("DOCX", error)
}

/// The refusal of an archive that holds no document of Word.
pub(super) fn other_archive() -> ReadError {
    ReadError::Unsupported {
        format: "a zip archive that is no Word document",
        remedy: "unpack it, or save it as .docx or .pdf",
    }
}
