//! Reading everything, and removing what is broken.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::file::verify_layers;
use crate::folder::{Folder, Found, open_chunk, remove, remove_stale};
use crate::{ChunkKey, Problem, Repair, Result};

/// How far a verification is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct VerifyProgress {
    /// Chunk files to read.
    pub files: u64,
    /// Chunk files read.
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
    /// Bytes of keys and values in them.
    pub bytes: u64,
    /// Chunk files that failed: removed when broken, left alone when of an unknown version or not readable now.
    pub failed: Vec<Repair>,
    /// Temporary files of writers that died, removed.
    pub stale: Vec<PathBuf>,
    /// Temporary files that a writer may still be at work on, left alone.
    pub in_progress: Vec<PathBuf>,
    /// What is not the store's, left alone.
    pub foreign: Vec<PathBuf>,
}

/// What one chunk file is like.
enum Outcome {
    Whole(u64),
    Failed(Repair),
    Gone,
}

pub(crate) fn verify(folder: &Folder, mut progress: impl FnMut(VerifyProgress)) -> Result<VerifyReport> {
    let found = folder.scan()?;
    let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
    let mut state = VerifyProgress::default();
    for found in &found {
        if let Found::Chunk(_, path) = found {
            state.files += 1;
            state.bytes += size(path);
        }
    }
    progress(state);
    let mut report = VerifyReport::default();
    for found in found {
        match found {
            Found::Chunk(key, path) => {
                let bytes = size(&path);
                match verify_file(&key, &path)? {
                    Outcome::Whole(bytes) => {
                        report.whole += 1;
                        report.bytes += bytes;
                    }
                    Outcome::Failed(repair) => report.failed.push(repair),
                    Outcome::Gone => {}
                }
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

fn verify_file(key: &ChunkKey, path: &Path) -> Result<Outcome> {
    let checked = || -> Result<Option<u64>, Problem> {
        let Some((mut file, header)) = open_chunk(path, key)? else { return Ok(None) };
        verify_layers(&header, &mut file)?;
        Ok(Some(header.id.layout().map_or(0, |layout| layout.total as u64)))
    };
    Ok(match checked() {
        Ok(Some(bytes)) => Outcome::Whole(bytes),
        Ok(None) => Outcome::Gone,
        Err(problem) => {
            let removed = problem.is_permanent() && remove(path)?;
            Outcome::Failed(Repair { path: path.to_owned(), problem, removed })
        }
    })
}
