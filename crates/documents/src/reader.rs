//! Files of all formats, one by one or by the folder.

use std::path::{Path, PathBuf};

use crate::document::Document;
use crate::error::ReadError;
use crate::limits::{MAX_FILE_BYTES, MAX_FOLDER_DEPTH, MAX_TEXT_BYTES, MAX_TITLE_CHARS};
use crate::origin::Origin;
use crate::{docx, html, pdf, text};

/// The documents and failures of a file or a folder.
#[derive(Debug, Default)]
pub struct Reading {
    /// The documents, in the order of the files' names.
    pub documents: Vec<Document>,
    /// The files that gave none.
    pub failures: Vec<Failure>,
}

/// A file or folder that could not be read.
#[derive(Debug)]
pub struct Failure {
    /// The file.
    pub path: PathBuf,
    /// The reason.
    pub error: ReadError,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.error)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    Records,
    Html,
    Pdf,
    Docx,
}

const EXTENSIONS: [(&str, Format); 11] = [
    ("txt", Format::Text),
    ("text", Format::Text),
    ("md", Format::Text),
    ("markdown", Format::Text),
    ("jsonl", Format::Records),
    ("ndjson", Format::Records),
    ("html", Format::Html),
    ("htm", Format::Html),
    ("xhtml", Format::Html),
    ("pdf", Format::Pdf),
    ("docx", Format::Docx),
];

/// The first bytes of files that hold no text, as people have them beside their documents.
const SIGNATURES: [(&[u8], &str); 11] = [
    (b"\x89PNG", "an image"),
    (b"\xFF\xD8\xFF", "an image"),
    (b"GIF87a", "an image"),
    (b"GIF89a", "an image"),
    (b"II*\0", "an image"),
    (b"MM\0*", "an image"),
    (b"\x1F\x8B", "an archive"),
    (b"\xFD7zXZ", "an archive"),
    (b"7z\xBC\xAF", "an archive"),
    (b"Rar!\x1A", "an archive"),
    (b"\x7FELF", "a program"),
];

/// Reads the documents of one file that others have sent: its bytes, and its name for the format and the title.
///
/// The bytes decide the format where they can (PDF, zip, HTML without a known extension), then the extension; other files are
/// read as text. A file of JSONL holds a document a line, any other file one, or none where a text is blank. The title is that in the
/// file (`<title>`, the document's properties, `title` in the front matter of Markdown), or its first heading, or the name without
/// extension. The heading that names a text is of the first level, and a text that begins with it has an empty title. Titles end at
/// their [limit](crate::limits::MAX_TITLE_CHARS).
///
/// # Errors
/// If the file cannot be read as its format, is encrypted, has no text, or passes one of the [limits](crate::limits).
pub fn read(bytes: &[u8], name: &str) -> Result<Vec<Document>, ReadError> {
    read_holding(bytes, name, ())
}

/// Reads as [`read`] does, and drops `held` once nothing is read any more: a PDF whose time is up may be read for longer, on a
/// thread of its own.
///
/// # Errors
/// Those of [`read`].
pub fn read_holding(bytes: &[u8], name: &str, held: impl Send + 'static) -> Result<Vec<Document>, ReadError> {
    read_of(Origin::Sent, bytes, name, held)
}

fn read_of(
    origin: Origin,
    bytes: &[u8],
    name: &str,
    held: impl Send + 'static,
) -> Result<Vec<Document>, ReadError> {
    if bytes.len() > MAX_FILE_BYTES {
        return Err(ReadError::too_large("file", MAX_FILE_BYTES));
    }
    let stem = Path::new(name).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let format = format(bytes, name)?;
    if bytes.is_empty() && !matches!(format, Format::Text | Format::Records) {
        return Err(ReadError::NoText { remedy: "the file is empty; fetch or export it again" });
    }
    let mut documents = match format {
        Format::Text => text::document(text::decode(bytes)?, &stem),
        Format::Records => text::records(&text::decode(bytes)?)?,
        Format::Html => vec![html::read(bytes, &stem)?],
        Format::Pdf => vec![pdf::read(bytes, &stem, origin, held)?],
        Format::Docx => vec![docx::read(bytes, &stem, origin)?],
    };
    if documents.iter().any(|document| document.text.len() > MAX_TEXT_BYTES) {
        return Err(ReadError::too_large("text", MAX_TEXT_BYTES));
    }
    documents.iter_mut().for_each(|document| cut(&mut document.title));
    Ok(documents)
}

/// Cuts a title at its limit, and gives its memory back.
fn cut(title: &mut String) {
    if let Some((end, _)) = title.char_indices().nth(MAX_TITLE_CHARS) {
        title.truncate(end);
    }
    title.shrink_to_fit();
}

fn format(bytes: &[u8], name: &str) -> Result<Format, ReadError> {
    let named = extension(name);
    // Some programs write a line before the header of a PDF.
    if bytes[..bytes.len().min(1024)].windows(5).any(|window| window == b"%PDF-")
        && named.is_none_or(|f| f == Format::Pdf)
        || bytes.starts_with(b"%PDF-")
    {
        return Ok(Format::Pdf);
    }
    if let Some((_, format)) = SIGNATURES.iter().find(|(signature, _)| bytes.starts_with(signature)) {
        return Err(ReadError::no_text_format(format));
    }
    match bytes {
        [b'P', b'K', 3, 4, ..] => Ok(Format::Docx),
        [0xD0, 0xCF, 0x11, 0xE0, ..] if named == Some(Format::Docx) => Err(ReadError::Encrypted),
        [0xD0, 0xCF, 0x11, 0xE0, ..] => Err(ReadError::Unsupported {
            format: "a file of Office before 2007, or an encrypted one",
            remedy: "save it as .docx without a password",
        }),
        [b'{', b'\\', b'r', b't', b'f', ..] => {
            Err(ReadError::Unsupported { format: "RTF", remedy: "save it as .docx or .txt" })
        }
        _ => Ok(named.unwrap_or_else(|| if html::is_html(bytes) { Format::Html } else { Format::Text })),
    }
}

fn extension(name: &str) -> Option<Format> {
    let extension = Path::new(name).extension()?.to_str()?.to_ascii_lowercase();
    EXTENSIONS.iter().find(|(known, _)| *known == extension).map(|(_, format)| *format)
}

/// Reads a file, or all files of known extensions in a folder and its subfolders.
///
/// A file that cannot be read stands among the failures, and the others are read all the same. Files are the user's own: an encrypted PDF that opens without
/// a password is read, though what its hidden objects hold is not bounded.
pub fn read_path(path: &Path) -> Reading {
    let Files { found, failures, .. } = files(path);
    let mut reading = Reading { documents: Vec::new(), failures };
    for file in found {
        match read_file(&file) {
            Ok(documents) => reading.documents.extend(documents),
            Err(error) => reading.failures.push(Failure { path: file, error }),
        }
    }
    reading
}

fn read_file(path: &Path) -> Result<Vec<Document>, ReadError> {
    if std::fs::metadata(path)?.len() > MAX_FILE_BYTES as u64 {
        return Err(ReadError::too_large("file", MAX_FILE_BYTES));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    read_of(Origin::Own, &std::fs::read(path)?, &name, ())
}

/// The files of a path, in the order of their names.
#[derive(Debug, Default)]
pub struct Files {
    /// The files that [`read_path`] reads.
    pub found: Vec<PathBuf>,
    /// The folders that are not listed: those that cannot be, and links, one of which could lead back to where it lies.
    pub failures: Vec<Failure>,
    /// The files of a folder that are left out, since their extensions are not known.
    pub others: Vec<PathBuf>,
}

/// The files that [`read_path`] reads, and those that it leaves out.
///
/// A file given by name is read whatever its extension. Hidden files and folders are passed over.
pub fn files(path: &Path) -> Files {
    let mut files = Files::default();
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => walk(path, 0, &mut files),
        Ok(_) => files.found.push(path.to_owned()),
        Err(error) => files.failures.push(Failure { path: path.to_owned(), error: error.into() }),
    }
    files
}

fn walk(folder: &Path, depth: usize, files: &mut Files) {
    let mut entries = match list(folder, depth) {
        Ok(entries) => entries,
        Err(error) => return files.failures.push(Failure { path: folder.to_owned(), error }),
    };
    entries.sort();
    for entry in entries {
        let name = entry.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') {
            continue;
        }
        if !entry.is_dir() {
            // Reading a pipe might never end. A broken link is listed, so that its failure is reported.
            let is_file = std::fs::metadata(&entry).map_or(true, |metadata| metadata.is_file());
            match (is_file, extension(&name)) {
                (true, Some(_)) => files.found.push(entry),
                (true, None) => files.others.push(entry),
                (false, _) => {}
            }
        } else if entry.is_symlink() {
            files.failures.push(Failure { path: entry, error: ReadError::LinkedFolder });
        } else {
            walk(&entry, depth + 1, files);
        }
    }
}

fn list(folder: &Path, depth: usize) -> Result<Vec<PathBuf>, ReadError> {
    if depth > MAX_FOLDER_DEPTH {
        return Err(ReadError::TooLarge {
            what: "folders inside each other",
            limit: format!("{MAX_FOLDER_DEPTH}"),
        });
    }
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    Ok(entries.collect::<std::io::Result<Vec<_>>>()?)
}
