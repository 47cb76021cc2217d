//! Limits on reading a file: it may be damaged, or made to harm its reader.
//!
//! Those that only large files pass are lower in this crate's tests.

use std::time::Duration;

/// Bytes of a file.
pub const MAX_FILE_BYTES: usize = 256 << 20;

/// Bytes of text that one file of HTML, PDF or DOCX may give, and of a file of plain text or of a record of JSONL.
pub const MAX_TEXT_BYTES: usize = if cfg!(test) { 1 << 20 } else { 32 << 20 };

/// Bytes that one compressed part of a file may hold: a part of a DOCX, a stream of a PDF.
pub const MAX_PART_BYTES: usize = if cfg!(test) { 4 << 20 } else { 256 << 20 };

/// Bytes that all streams of a PDF but its images may hold together.
pub const MAX_PDF_BYTES: usize = if cfg!(test) { 16 << 20 } else { 1 << 30 };

/// Pages of a PDF.
pub const MAX_PAGES: usize = 20_000;

/// Drawing operations of a PDF, those of forms counted at each use: some thousand a page are common.
pub const MAX_PDF_OPERATIONS: usize = 100_000_000;

/// Texts of a page of a PDF that stand apart from those before them: each takes a hundred bytes, and a plan with many labels has some ten thousand.
pub const MAX_PAGE_SPANS: usize = if cfg!(test) { 1 << 12 } else { 1 << 19 };

/// Such texts of all pages of a PDF.
pub const MAX_SPANS: usize = 1 << 23;

/// Maps of codes that the fonts of a PDF name: each takes up to half a megabyte.
pub const MAX_FONT_MAPS: usize = if cfg!(test) { 16 } else { 1 << 10 };

/// Forms inside forms of a PDF.
pub const MAX_FORM_DEPTH: usize = 12;

/// Time for a PDF or a DOCX.
pub const MAX_TIME: Duration = Duration::from_secs(120);

/// Time for a PDF or a DOCX that others have sent, and for which the files of others wait.
pub const MAX_SENT_TIME: Duration = Duration::from_secs(30);

/// Bytes of stack for reading a PDF, whose objects lie inside each other.
pub const PDF_STACK_BYTES: usize = 16 << 20;

/// Rows and cells of a table of HTML or DOCX, and cells of all tables of a PDF: an empty one takes more memory than its tag has bytes.
pub const MAX_CELLS: usize = if cfg!(test) { 1 << 16 } else { 1 << 22 };

/// Characters of a title, which ends there.
pub const MAX_TITLE_CHARS: usize = 1000;

/// Styles of a DOCX, and definitions of its lists: Word makes some hundred.
pub const MAX_STYLES: usize = if cfg!(test) { 1 << 12 } else { 1 << 16 };

/// Elements of a DOCX's part inside elements: Word nests some dozen.
pub const MAX_XML_DEPTH: usize = 1 << 16;

/// Lists inside lists, beyond which deeper ones are written at this depth.
pub const MAX_LIST_DEPTH: usize = 8;

/// Folders inside folders.
pub const MAX_FOLDER_DEPTH: usize = 64;

/// Entries of a zip archive.
pub const MAX_ZIP_ENTRIES: usize = 65_536;
