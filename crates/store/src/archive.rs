//! Chunks in one file, to carry them elsewhere: a tar archive of chunk and aux tensors files under the names they have in a
//! store's folder, a chunk before its aux tensors.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::folder::{FolderEntry, classify, open_chunk};
use crate::{Chunk, ChunkId, ChunkKey, Problem, PutOutcome, Result, Store, StoreError, aux_file};

/// How far an export or an import is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ArchiveProgress {
    /// Bytes to read; none where that is not known.
    pub bytes: Option<u64>,
    /// Bytes read.
    pub bytes_done: u64,
}

/// Counts of an export or an import.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ArchiveReport {
    /// Chunks written, or stored.
    pub chunks: u64,
    /// Aux tensors written, or stored.
    pub aux_files: u64,
    /// Bytes of their files.
    pub bytes: u64,
    /// Chunks of an import that were there already.
    pub known: u64,
    /// Files that were left out, by name, and why.
    pub left_out: Vec<(PathBuf, String)>,
}

/// Writes the chunks `keys` of a store's folder with their aux tensors. Chunks that cannot be used are left out.
///
/// # Errors
/// If the archive cannot be written or the folder cannot be read.
pub fn export(
    store: &Store,
    keys: &[ChunkKey],
    out: impl Write,
    mut progress: impl FnMut(ArchiveProgress),
) -> Result<ArchiveReport> {
    let Some(folder) = store.folder_on_disk() else { return Ok(ArchiveReport::default()) };
    let mut files: Vec<(ChunkKey, Vec<FolderEntry>)> = Vec::new();
    for key in keys {
        let mut found = folder.files(key)?;
        found.sort_by_key(|found| !matches!(found, FolderEntry::Chunk(..)));
        files.push((*key, found));
    }
    let total = files.iter().flat_map(|(_, found)| found).map(FolderEntry::bytes).sum();
    let mut state = ArchiveProgress { bytes: Some(total), bytes_done: 0 };
    let (mut archive, mut report) = (tar::Builder::new(out), ArchiveReport::default());
    for (key, found) in files {
        let name = |path: &Path| path.strip_prefix(folder.root()).unwrap_or(path).to_owned();
        match open_chunk(&folder.path(&key), &key) {
            Ok(Some(_)) => {}
            Ok(None) => continue,
            Err(problem) => {
                report.left_out.push((name(&folder.path(&key)), problem.to_string()));
                continue;
            }
        }
        for found in found {
            let path = found.path();
            let failed = |action| move |source| StoreError::Io { action, path: path.to_owned(), source };
            let file = match File::open(path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed("read")(error)),
            };
            let size = file.metadata().map_err(failed("read"))?.len();
            append(&mut archive, &name(path), size, file).map_err(failed("write to the archive"))?;
            *if matches!(found, FolderEntry::Chunk(..)) {
                &mut report.chunks
            } else {
                &mut report.aux_files
            } += 1;
            report.bytes += size;
            state.bytes_done += size;
            progress(state);
        }
    }
    let failed = |source| StoreError::Io { action: "write", path: "the archive".into(), source };
    archive.into_inner().and_then(|mut out| out.flush()).map_err(failed)?;
    Ok(report)
}

fn append(archive: &mut tar::Builder<impl Write>, name: &Path, size: u64, file: File) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(0o600);
    archive.append_data(&mut header, name, file.take(size))
}

/// Stores what an archive holds, all of it verified. `into` is the namespace that its chunks are to have, if not their own.
/// A file that is broken, of another version or not a store's is left out, and told.
///
/// # Errors
/// If the archive cannot be read or holds nothing, or a chunk cannot be stored.
pub fn import(
    store: &Store,
    archive: impl Read,
    into: Option<&str>,
    mut progress: impl FnMut(ArchiveProgress),
) -> Result<ArchiveReport> {
    let failed = |error: io::Error| StoreError::Archive { why: error.to_string() };
    let (mut report, mut state) = (ArchiveReport::default(), ArchiveProgress::default());
    let mut archive = tar::Archive::new(archive);
    // The chunk that came last: its key in the archive, and its identity here.
    let mut last: Option<(ChunkKey, ChunkId)> = None;
    let mut is_empty = true;
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        is_empty = false;
        let name = entry.path().map_err(failed)?.into_owned();
        let size = entry.size();
        let found = classify(Path::new(""), name.clone());
        // Others can say that they are large with few bytes.
        let is_plain = entry.header().entry_type().is_file();
        let outcome = match &found {
            _ if !is_plain => Err(Problem::Header("it is no plain file".to_owned())),
            FolderEntry::Chunk(key, _) => read(&mut entry, size).map_err(failed)?.and_then(|bytes| {
                let chunk = Chunk::from_bytes(&bytes)?;
                if chunk.key() != *key {
                    return Err(Problem::Identity("key than its name"));
                }
                let chunk = match into {
                    Some(namespace) => chunk.moved(namespace),
                    None => chunk,
                };
                last = Some((*key, chunk.id().clone()));
                store.admit(|| vec![chunk.key()]);
                Ok(store.put(chunk))
            }),
            FolderEntry::Aux(key, kind, _) => match last.as_ref().filter(|(last, _)| last == key) {
                Some((_, id)) => read(&mut entry, size)
                    .map_err(failed)?
                    .and_then(|bytes| aux_file::decode(&bytes, key, kind))
                    .map(|aux| store.put_aux_tensors(id, kind, aux)),
                None => Err(Problem::Header("its chunk does not stand before it".to_owned())),
            },
            FolderEntry::Temporary(_) | FolderEntry::Other(_) => {
                Err(Problem::Header("it is neither a chunk nor an aux tensors file by its name".to_owned()))
            }
        };
        state.bytes_done += size;
        progress(state);
        match outcome {
            Ok(outcome) => match outcome? {
                PutOutcome::NotStored { error } => return Err(error),
                PutOutcome::Known => report.known += u64::from(matches!(found, FolderEntry::Chunk(..))),
                PutOutcome::Stored { bytes } => report.count(&found, bytes),
                PutOutcome::MemoryOnly => report.count(&found, size),
                // Somebody did so at this moment.
                PutOutcome::Deleted => report.left_out.push((name, "it was deleted".to_owned())),
            },
            Err(problem) => report.left_out.push((name, problem.to_string())),
        }
    }
    if is_empty { Err(StoreError::Archive { why: "it holds no file".to_owned() }) } else { Ok(report) }
}

impl ArchiveReport {
    fn count(&mut self, found: &FolderEntry, bytes: u64) {
        *if matches!(found, FolderEntry::Chunk(..)) { &mut self.chunks } else { &mut self.aux_files } += 1;
        self.bytes += bytes;
    }
}

/// All of an entry. What an archive says about its size is not believed before the bytes are there.
fn read(entry: &mut impl Read, size: u64) -> io::Result<Result<Vec<u8>, Problem>> {
    let mut bytes = Vec::new();
    entry.read_to_end(&mut bytes)?;
    let found = bytes.len() as u64;
    Ok(if found == size { Ok(bytes) } else { Err(Problem::Length { expected: size, found }) })
}
