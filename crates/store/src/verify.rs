//! Reading everything, and removing what is broken.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::chunk_file::verify_layers;
use crate::folder::{Folder, FolderEntry, open_chunk, read_aux_file, remove, remove_stale};
use crate::info::as_paths;
use crate::{ChunkKey, Problem, Repair, Result};

/// How far a verification is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VerifyProgress {
    /// Chunk and aux tensors files to read.
    pub files: u64,
    /// Chunk and aux tensors files read.
    pub files_done: u64,
    /// Bytes to read.
    pub bytes: u64,
    /// Bytes read.
    pub bytes_done: u64,
}

/// The findings of a verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Chunks that are whole.
    pub whole: u64,
    /// Aux tensors that are whole.
    pub aux_files: u64,
    /// Bytes of keys and values, and of tensors of aux tensors, in what is whole.
    pub bytes: u64,
    /// Chunk and aux tensors files that failed: removed when broken, left alone when of an unknown version or not readable
    /// now.
    pub failed: Vec<Repair>,
    /// Whole aux tensors of chunks that are not on disk, removed.
    #[serde(serialize_with = "as_paths")]
    pub orphans: Vec<PathBuf>,
    /// Temporary files of writers that died, removed.
    #[serde(serialize_with = "as_paths")]
    pub stale: Vec<PathBuf>,
    /// Temporary files that a writer may still be at work on, left alone.
    #[serde(serialize_with = "as_paths")]
    pub in_progress: Vec<PathBuf>,
    /// Files that are not the store's; they are left alone.
    #[serde(serialize_with = "as_paths")]
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
    // Chunks come first: an aux tensors file whose chunk turns out broken has none.
    found.sort_by_key(|found| !matches!(found, FolderEntry::Chunk(..)));
    let mut state = VerifyProgress::default();
    for found in found.iter().filter(|found| matches!(found, FolderEntry::Chunk(..) | FolderEntry::Aux(..))) {
        state.files += 1;
        state.bytes += found.bytes();
    }
    progress(state);
    let mut report = VerifyReport::default();
    for found in found {
        match found {
            FolderEntry::Chunk(..) | FolderEntry::Aux(..) => {
                let bytes = found.bytes();
                verify_file(folder, &found, &mut report)?;
                state.files_done += 1;
                state.bytes_done = (state.bytes_done + bytes).min(state.bytes);
                progress(state);
            }
            FolderEntry::Temporary(path) if remove_stale(&path)? => report.stale.push(path),
            FolderEntry::Temporary(path) => report.in_progress.push(path),
            FolderEntry::Other(path) => report.foreign.push(path),
        }
    }
    Ok(report)
}

/// Verifies a chunk or aux tensors.
fn verify_file(folder: &Folder, found: &FolderEntry, report: &mut VerifyReport) -> Result<()> {
    let path = found.path();
    let checked = match found {
        FolderEntry::Chunk(key, _) => verify_chunk(path, key),
        FolderEntry::Aux(key, kind, _) => {
            read_aux_file(path, key, kind).map(|aux| aux.map(|aux| aux.bytes() as u64))
        }
        FolderEntry::Temporary(_) | FolderEntry::Other(_) => Ok(None),
    };
    match (checked, found) {
        // Somebody has removed it meanwhile.
        (Ok(None), _) => {}
        (Err(problem), _) => {
            let removed = problem.is_permanent() && remove(path)?;
            report.failed.push(Repair { path: path.to_owned(), problem, removed });
        }
        (Ok(Some(_)), FolderEntry::Aux(key, ..)) if is_missing(&folder.path(key)) && remove_stale(path)? => {
            report.orphans.push(path.to_owned());
        }
        (Ok(Some(bytes)), _) => {
            let is_chunk = matches!(found, FolderEntry::Chunk(..));
            *if is_chunk { &mut report.whole } else { &mut report.aux_files } += 1;
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
