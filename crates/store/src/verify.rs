//! Reading everything, and removing what is broken.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::file::verify_layers;
use crate::folder::{Folder, Found, open_chunk, read_summary, remove, remove_stale};
use crate::{ChunkKey, Problem, Repair, Result};

/// How far a verification is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VerifyProgress {
    /// Chunk and summary files to read.
    pub files: u64,
    /// Chunk and summary files read.
    pub files_done: u64,
    /// Bytes to read.
    pub bytes: u64,
    /// Bytes read.
    pub bytes_done: u64,
}

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Chunks that are whole.
    pub whole: u64,
    /// Summaries that are whole.
    pub summaries: u64,
    /// Bytes of keys and values, and of tensors of summaries, in what is whole.
    pub bytes: u64,
    /// Chunk and summary files that failed: removed when broken, left alone when of an unknown version or not readable
    /// now.
    pub failed: Vec<Repair>,
    /// Whole summaries of chunks that are not on disk, removed.
    pub orphans: Vec<PathBuf>,
    /// Temporary files of writers that died, removed.
    pub stale: Vec<PathBuf>,
    /// Temporary files that a writer may still be at work on, left alone.
    pub in_progress: Vec<PathBuf>,
    /// What is not the store's, left alone.
    pub foreign: Vec<PathBuf>,
    /// Chunk files that the index did not know, and does now.
    pub entered: u64,
    /// Chunks in the index whose files were gone, and that it has forgotten.
    pub forgotten: u64,
    /// Why the index cannot be used, if so: no chunk is lost by that, but none can be stored.
    pub index_problem: Option<String>,
}

pub(crate) fn verify(folder: &Folder, mut progress: impl FnMut(VerifyProgress)) -> Result<VerifyReport> {
    let mut found = folder.scan()?;
    // Chunks come first: a summary whose chunk turns out broken has none.
    found.sort_by_key(|found| !matches!(found, Found::Chunk(..)));
    let mut state = VerifyProgress::default();
    for found in found.iter().filter(|found| matches!(found, Found::Chunk(..) | Found::Summary(..))) {
        state.files += 1;
        state.bytes += found.bytes();
    }
    progress(state);
    let mut report = VerifyReport::default();
    for found in found {
        match found {
            Found::Chunk(..) | Found::Summary(..) => {
                let bytes = found.bytes();
                verify_file(folder, &found, &mut report)?;
                state.files_done += 1;
                state.bytes_done = (state.bytes_done + bytes).min(state.bytes);
                progress(state);
            }
            Found::Temporary(path) if remove_stale(&path)? => report.stale.push(path),
            Found::Temporary(path) => report.in_progress.push(path),
            Found::Other(path) => report.foreign.push(path),
        }
    }
    Ok(report)
}

/// Verifies a chunk or summary.
fn verify_file(folder: &Folder, found: &Found, report: &mut VerifyReport) -> Result<()> {
    let path = found.path();
    let checked = match found {
        Found::Chunk(key, _) => verify_chunk(path, key),
        Found::Summary(key, kind, _) => {
            read_summary(path, key, kind).map(|summary| summary.map(|summary| summary.bytes() as u64))
        }
        Found::Temporary(_) | Found::Other(_) => Ok(None),
    };
    match (checked, found) {
        // Somebody has removed it meanwhile.
        (Ok(None), _) => {}
        (Err(problem), _) => {
            let removed = problem.is_permanent() && remove(path)?;
            report.failed.push(Repair { path: path.to_owned(), problem, removed });
        }
        (Ok(Some(_)), Found::Summary(key, ..)) if is_missing(&folder.path(key)) && remove_stale(path)? => {
            report.orphans.push(path.to_owned());
        }
        (Ok(Some(bytes)), _) => {
            let is_chunk = matches!(found, Found::Chunk(..));
            *if is_chunk { &mut report.whole } else { &mut report.summaries } += 1;
            report.bytes += bytes;
        }
    }
    Ok(())
}

/// The bytes of a chunk's keys and values, if its file is there and whole.
fn verify_chunk(path: &Path, key: &ChunkKey) -> Result<Option<u64>, Problem> {
    let Some((mut file, header)) = open_chunk(path, key)? else { return Ok(None) };
    verify_layers(&header, &mut file)?;
    Ok(Some(header.bytes() as u64))
}

/// Whether it is certain that there is no such file.
fn is_missing(path: &Path) -> bool {
    matches!(path.try_exists(), Ok(false))
}
