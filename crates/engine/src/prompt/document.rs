//! Documents: text files, Markdown and JSONL records.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A document to answer from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Its title; may be empty.
    #[serde(default)]
    pub title: String,
    /// Its text.
    pub text: String,
}

impl Document {
    /// The document's text in the prompt: the title on a line of its own, the text, an empty line.
    pub fn prompt_text(&self) -> String {
        let text = self.text.trim();
        match self.title.trim() {
            "" => format!("{text}\n\n"),
            title => format!("{title}\n{text}\n\n"),
        }
    }

    /// Reads a file, or all files of a folder and its subfolders in the order of their names.
    ///
    /// `.jsonl` holds a record `{"title": …, "text": …}` a line; `.txt`, `.md` and `.markdown` are documents of their
    /// own. Other files of a folder are passed over; given by name they are read as text.
    ///
    /// # Errors
    /// If a file cannot be read, is not UTF-8, or a record is malformed: naming file, line and byte.
    pub fn read(path: &Path) -> Result<Vec<Document>> {
        let mut documents = Vec::new();
        for file in files(path)? {
            let bytes = std::fs::read(&file).map_err(|error| unreadable(&file, &error.to_string()))?;
            let text = String::from_utf8(bytes).map_err(|error| {
                let at = error.utf8_error().valid_up_to();
                unreadable(&file, &format!("not UTF-8 at byte {at}; convert it, for example with iconv"))
            })?;
            let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
            if is(&file, &["jsonl", "ndjson"]) {
                documents.extend(records(&file, text)?);
            } else if !text.trim().is_empty() {
                documents.push(Document {
                    title: title(text).unwrap_or_else(|| stem(&file)),
                    text: text.to_owned(),
                });
            }
        }
        Ok(documents)
    }
}

fn unreadable(path: &Path, reason: &str) -> Error {
    Error::Document { path: path.to_owned(), reason: reason.to_owned() }
}

fn is(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
    extensions.contains(&extension.as_str())
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A Markdown document that begins with a heading has its title already.
fn title(text: &str) -> Option<String> {
    text.trim_start().starts_with("# ").then(String::new)
}

fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let fail = |error: std::io::Error| unreadable(path, &error.to_string());
    if !std::fs::metadata(path).map_err(fail)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut entries = std::fs::read_dir(path)
        .and_then(|entries| entries.map(|entry| entry.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>())
        .map_err(fail)?;
    entries.sort();
    let hidden = |p: &PathBuf| p.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    entries.retain(|p| !hidden(p) && (p.is_dir() || is(p, &["txt", "md", "markdown", "jsonl", "ndjson"])));
    let mut found = Vec::new();
    for entry in entries {
        // A folder that is a link could lead back to here.
        if !(entry.is_symlink() && entry.is_dir()) {
            found.extend(files(&entry)?);
        }
    }
    Ok(found)
}

fn records(path: &Path, text: &str) -> Result<Vec<Document>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let records: Result<Vec<Document>> = lines
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|error| {
                let error = error.to_string();
                let what = error.split(" at line ").next().unwrap_or_default();
                let reason = format!(
                    "line {}: {what}; each line must be a JSON object with \"text\" and, if wanted, \"title\"",
                    index + 1
                );
                unreadable(path, &reason)
            })
        })
        .collect();
    Ok(records?.into_iter().filter(|record| !record.text.trim().is_empty()).collect())
}
