//! The documents of the files and folders that a command names.

use std::collections::{BTreeSet, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use refrain::documents::{Failure, files, read_path};
use refrain::engine::Document;
use serde::Serialize;

use crate::output::{Console, Fail, count, one_line, show};

/// The kinds of files that hold documents, as help and errors name them.
const KINDS: &str = "text, Markdown, HTML, PDF, DOCX or JSONL";

/// The documents of files and folders.
#[derive(Debug, Default)]
pub(crate) struct Documents {
    pub(crate) documents: Vec<Document>,
    /// The files that gave none.
    pub(crate) failures: Vec<UnreadFile>,
    /// Number of the files of folders that were left out, since their extensions are not known.
    pub(crate) left_out: usize,
    /// Number of the files that are empty or blank.
    pub(crate) empty: usize,
}

/// A file or folder that could not be read.
#[derive(Debug, Serialize)]
pub(crate) struct UnreadFile {
    path: String,
    /// The reason, and the remedy.
    error: String,
}

impl From<Failure> for UnreadFile {
    fn from(failure: Failure) -> UnreadFile {
        UnreadFile { path: failure.path.display().to_string(), error: failure.error.to_string() }
    }
}

impl std::fmt::Display for UnreadFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&one_line(&format!("{}: {}", self.path, self.error)))
    }
}

/// Reads all documents of these files and folders. A file that cannot be read is told on the console, and the others are
/// read all the same.
///
/// # Errors
/// If a path names nothing, or paths are given and none of them holds a document.
pub(crate) fn read_documents(console: Console, paths: &[PathBuf]) -> Result<Documents> {
    let mut documents = Vec::new();
    let (failures, left_out, empty) = each_document(console, paths, |document| {
        documents.push(document);
        Ok(())
    })?;
    Ok(Documents { documents, failures, left_out, empty })
}

/// [`read_documents`], of which `take` gets one after the other; gives the files that could not be read, the number of those that were
/// left out, and the number of those that are empty or blank. A file that several paths lead to is read once.
///
/// # Errors
/// As for [`read_documents`], and those of `take`.
pub(crate) fn each_document(
    console: Console,
    paths: &[PathBuf],
    mut take: impl FnMut(Document) -> Result<()>,
) -> Result<(Vec<UnreadFile>, usize, usize)> {
    let (mut number, mut unread, mut others) = (0, Vec::new(), Vec::new());
    if paths.is_empty() {
        return Ok((unread, 0, 0));
    }
    if let Some(path) = paths.iter().find(|path| is_missing(path)) {
        return Err(Fail::new(format!("there is no file or folder {}", path.display())).into());
    }
    let listed: Vec<_> = paths.iter().map(|path| (path, files(path))).collect();
    let all = listed.iter().map(|(_, files)| files.found.len() as u64).sum();
    let (bar, mut done) = (console.bar("reading", "{pos}/{len} files"), 0);
    let (mut without, mut empty, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
    for (path, files) in listed {
        if files.found.is_empty() && files.failures.is_empty() {
            without.push(path);
        }
        others.extend(files.others);
        unread.extend(files.failures.into_iter().map(UnreadFile::from));
        for file in files.found {
            done += 1;
            show(&bar, done, all);
            if !seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone())) {
                continue;
            }
            let reading = read_path(&file);
            if reading.documents.is_empty() && reading.failures.is_empty() {
                empty.push(file);
            }
            number += reading.documents.len();
            reading.documents.into_iter().try_for_each(&mut take)?;
            unread.extend(reading.failures.into_iter().map(UnreadFile::from));
        }
    }
    bar.finish_and_clear();
    if !others.is_empty() {
        console.say(&left_out(&others));
    }
    if number == 0 {
        return Err(nothing_read(paths, &empty, &unread));
    }
    if !empty.is_empty() {
        console.say(&are_empty(&empty));
    }
    without.iter().for_each(|path| console.warn(&without_documents(path)));
    unread.iter().for_each(|failure| console.warn(&failure.to_string()));
    Ok((unread, others.len(), empty.len()))
}

/// Most files, or kinds of files, that a remark names.
const NAMED: usize = 4;

/// Says which files are empty or blank: by its path where it is one, and else some of them by their names.
fn are_empty(files: &[PathBuf]) -> String {
    if let [file] = files {
        return one_line(&format!("{} is empty or blank", file.display()));
    }
    let names = files.iter().map(|file| file.file_name().unwrap_or_default().display().to_string());
    let mut named: Vec<String> = names.take(NAMED).collect();
    named.extend((files.len() > NAMED).then(|| "…".to_owned()));
    one_line(&format!("{} are empty or blank ({})", count(files.len(), "file"), named.join(", ")))
}

/// Says how many files of folders are left out, with some of their extensions, or names without one.
fn left_out(others: &[PathBuf]) -> String {
    let kind = |path: &PathBuf| match path.extension() {
        Some(extension) => format!(".{}", extension.display()),
        None => path.file_name().unwrap_or_default().display().to_string(),
    };
    let kinds: BTreeSet<String> = others.iter().map(kind).collect();
    let mut named: Vec<&str> = kinds.iter().map(String::as_str).take(NAMED).collect();
    named.extend((kinds.len() > NAMED).then_some("…"));
    let (files, named) = (count(others.len(), "file"), named.join(", "));
    let were = if others.len() == 1 { "was" } else { "were" };
    one_line(&format!(
        "{files} of other kinds {were} left out ({named}): text among them is read where it is given by name"
    ))
}

fn is_missing(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

fn without_documents(path: &Path) -> String {
    format!("{} holds no {KINDS} document", path.display())
}

fn nothing_read(paths: &[PathBuf], empty: &[PathBuf], failures: &[UnreadFile]) -> anyhow::Error {
    match (failures, paths) {
        ([], _) if !empty.is_empty() => Fail::new(are_empty(empty)).into(),
        ([], [path]) => Fail::new(without_documents(path)).into(),
        ([], _) => Fail::new(format!("the {} hold no {KINDS} document", count(paths.len(), "path"))).into(),
        ([failure], _) => Fail::new(failure.to_string()).into(),
        _ => {
            let lines: Vec<_> = failures.iter().map(UnreadFile::to_string).collect();
            let message = format!("none of {} could be read", count(failures.len(), "file"));
            anyhow::anyhow!(lines.join("\n")).context(Fail::new(message))
        }
    }
}

/// The part of a command's last line that counts the files that could not be read; empty where all were read.
pub(crate) fn unread(failures: usize) -> String {
    match failures {
        0 => String::new(),
        failures => format!(", {} could not be read", count(failures, "file")),
    }
}
