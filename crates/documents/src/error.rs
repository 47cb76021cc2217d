//! Why a file cannot be read.

use std::time::Duration;

use crate::limits::{MAX_CELLS, MAX_STYLES};

/// The reason for which a file gives no documents: one line, made to follow the name of the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file system refuses.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// A folder inside another by a link, which could lead back to where it lies.
    #[error("is a link to a folder, which is not followed; give it by name")]
    LinkedFolder,
    /// Bytes that are no text in UTF-8.
    #[error("not UTF-8 at byte {at}; convert it, for example with iconv")]
    NotUtf8 {
        /// The first such byte.
        at: usize,
    },
    /// A character set that is not known here.
    #[error("its text is in {charset}; convert it to UTF-8, for example with iconv")]
    Charset {
        /// Its name in the file.
        charset: String,
    },
    /// A malformed record of JSONL.
    #[error("line {line}: {reason}; each line must be a JSON object with \"text\" and, if wanted, \"title\"")]
    Record {
        /// The line, counted from 1.
        line: usize,
        /// The fault.
        reason: String,
    },
    /// A file that opens with a password only.
    #[error("encrypted; save it without a password first")]
    Encrypted,
    /// A file without any text.
    #[error("has no text: {remedy}")]
    NoText {
        /// The way to its text.
        remedy: &'static str,
    },
    /// A file that breaks the rules of its format.
    #[error("not a well-formed {format}: {reason}; open it in a program that shows it, and save it anew")]
    Malformed {
        /// The format.
        format: &'static str,
        /// The fault.
        reason: String,
    },
    /// A file that would take too much time or memory.
    #[error("too large: {what} beyond the limit of {limit}; split it, or export its text")]
    TooLarge {
        /// The quantity that passes its limit.
        what: &'static str,
        /// The limit, with its unit.
        limit: String,
    },
    /// A format that is not read.
    #[error("{format} is not read; {remedy}")]
    Unsupported {
        /// The format.
        format: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
}

impl ReadError {
    /// A limit of bytes was passed.
    pub(crate) fn too_large(what: &'static str, bytes: usize) -> Self {
        ReadError::TooLarge { what, limit: format!("{} MiB", bytes >> 20) }
    }

    /// A file of another kind than those that are read.
    pub(crate) fn no_text_format(format: &'static str) -> Self {
        ReadError::Unsupported { format, remedy: "PDF, DOCX, HTML, Markdown, text and JSONL are" }
    }

    /// Whether a table's rows and cells are within their limit.
    ///
    /// # Errors
    /// If there are more.
    pub(crate) fn check_cells(cells: usize) -> Result<(), Self> {
        if cells > MAX_CELLS {
            return Err(ReadError::TooLarge { what: "cells of a table", limit: MAX_CELLS.to_string() });
        }
        Ok(())
    }

    /// Whether a document's styles, or definitions of lists, are within their limit.
    ///
    /// # Errors
    /// If there are more.
    pub(crate) fn check_styles(styles: usize) -> Result<(), Self> {
        if styles > MAX_STYLES {
            return Err(ReadError::TooLarge { what: "styles", limit: MAX_STYLES.to_string() });
        }
        Ok(())
    }

    /// The time for a file was up.
    pub(crate) fn late(limit: Duration) -> Self {
        ReadError::TooLarge { what: "time", limit: format!("{} s", limit.as_secs()) }
    }

    pub(crate) fn malformed(format: &'static str, reason: impl ToString) -> Self {
        // Reasons of other crates may hold line breaks and bytes of the file.
        let reason: String =
            reason.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
        ReadError::Malformed { format, reason: reason.trim().to_owned() }
    }
}
