//! A model's fingerprint: a hash of all its bytes, with a memory of what large files hash to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::map::{FileBytes, Stamp};

/// Files below this size are hashed every time: that takes milliseconds, about the grain of a file system's clock, within
/// which an edit could hide.
const REMEMBERED: usize = 16 << 20;
/// Bytes hashed between two reports of progress.
const PIECE: usize = 64 << 20;
/// Largest memory that is read, in bytes, and most files in it.
const MAX_MEMORY: u64 = 4 << 20;
const MAX_FILES: usize = 1 << 12;

/// The file where hashes are remembered, in the cache folder of the user's home; none if there is no home.
pub(crate) fn default_memory() -> Option<PathBuf> {
    Some(std::env::home_dir()?.join(".cache/refrain/file-hashes.json"))
}

/// BLAKE3 over `description` and the hash of every file's bytes, in this order. Hashes of large files are taken from
/// `memory`, or put there; `progress(done, total)` counts pieces of the large files that are not remembered.
pub(crate) fn of(
    description: &[&[u8]],
    files: &[&FileBytes],
    memory: Option<&Path>,
    mut progress: impl FnMut(usize, usize),
) -> [u8; 32] {
    let mut remembered = memory.map(Memory::read).unwrap_or_default();
    let known: Vec<Option<[u8; 32]>> = files.iter().map(|file| remembered.hash(file)).collect();
    let unknown = files.iter().zip(&known).filter(|(file, hash)| is_large(file) && hash.is_none());
    let total = unknown.clone().map(|(file, _)| file.len().div_ceil(PIECE)).sum();
    let learns = unknown.count() > 0;
    let mut hasher = blake3::Hasher::new_derive_key("refrain model fingerprint v2");
    for part in description {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut done = 0;
    for (file, known) in files.iter().zip(known) {
        let hash = known.unwrap_or_else(|| {
            let hash = hash(file, || {
                done += 1;
                progress(done, total);
            });
            remembered.learn(file, hash);
            hash
        });
        hasher.update(&hash);
    }
    if let Some(memory) = memory.filter(|_| learns) {
        remembered.write(memory);
    }
    *hasher.finalize().as_bytes()
}

fn is_large(file: &FileBytes) -> bool {
    file.len() >= REMEMBERED
}

/// BLAKE3 of a file's bytes. Of a large one all cores hash, and `piece_done` is called after every piece.
fn hash(file: &FileBytes, mut piece_done: impl FnMut()) -> [u8; 32] {
    if !is_large(file) {
        return *blake3::hash(file).as_bytes();
    }
    let mut hasher = blake3::Hasher::new();
    for piece in file.chunks(PIECE) {
        hasher.update_rayon(piece);
        piece_done();
    }
    *hasher.finalize().as_bytes()
}

/// Hashes of large files by their canonical paths, each valid as long as the file's [`Stamp`] stays.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Memory(BTreeMap<PathBuf, Remembered>);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Remembered {
    #[serde(flatten)]
    stamp: Stamp,
    blake3: [u8; 32],
}

impl Memory {
    /// The hashes in the file at `path`; none if it is missing, damaged or too large.
    fn read(path: &Path) -> Memory {
        if std::fs::metadata(path).is_ok_and(|meta| meta.len() <= MAX_MEMORY) {
            let bytes = std::fs::read(path).unwrap_or_default();
            return serde_json::from_slice(&bytes).unwrap_or_default();
        }
        Memory::default()
    }

    /// The hash of `file`, if it is known and the file has the stamp that it had then.
    fn hash(&self, file: &FileBytes) -> Option<[u8; 32]> {
        let origin = file.origin().filter(|_| is_large(file))?;
        let known = self.0.get(&origin.path)?;
        (known.stamp == origin.stamp).then_some(known.blake3)
    }

    /// Remembers the hash of `file`, unless the file was changed or replaced since it was opened.
    fn learn(&mut self, file: &FileBytes, blake3: [u8; 32]) {
        let Some(origin) = file.origin().filter(|_| is_large(file)) else { return };
        let unchanged = std::fs::metadata(&origin.path).is_ok_and(|meta| Stamp::of(&meta) == origin.stamp);
        if unchanged && origin.path.to_str().is_some() {
            if self.0.len() >= MAX_FILES {
                self.0.clear();
            }
            self.0.insert(origin.path.clone(), Remembered { stamp: origin.stamp, blake3 });
        }
    }

    /// Writes the memory to `path`, replacing the file there at once. A folder that cannot be written costs time at the
    /// next start and nothing else, so failures are ignored.
    fn write(&self, path: &Path) {
        let Ok(text) = serde_json::to_vec(self) else { return };
        let new = path.with_extension(format!("{}.tmp", std::process::id()));
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written =
            folder.and_then(|()| std::fs::write(&new, text)).and_then(|()| std::fs::rename(&new, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&new);
        }
    }
}

#[cfg(test)]
#[path = "fingerprint_tests.rs"]
mod tests;
