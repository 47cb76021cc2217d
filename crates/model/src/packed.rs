//! The file of packed weights beside a model, from which later starts read them instead of packing them again.
//!
//! It has the panels of each matrix one after another, each with the XXH3-64 of its bytes behind it, then an index (JSON), the XXH3-64 of its bytes
//! and its length in eight bytes. The index names the layout of the device, the model's fingerprint and the precision: a file of others is replaced.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{DirEntry, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use refrain_kernels::{Device, PackedPanels, Precision};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::error::{ModelError, Result};
use crate::files::ModelFiles;
use crate::map::FileBytes;

/// Models below this size, in bytes, are packed in milliseconds: they get no such file.
const LEAST_MODEL: usize = 32 << 20;
/// Largest index that is read, in bytes.
const MAX_INDEX: usize = 16 << 20;
/// A file that is being written, and was not written to for so long, is of a program that was stopped.
const ABANDONED: Duration = Duration::from_secs(600);
/// Bytes that are read between two releases of the file's pages, so that large matrices and what is taken from them are not in memory together.
const RELEASED: usize = 32 << 20;
/// Bytes of a hash, and of the length of the index.
const WORD: usize = 8;

/// The place of a model's packed weights, and what they must be of.
#[derive(Clone, Debug)]
pub struct PackedWeights {
    path: PathBuf,
    of: Identity,
}

/// Packed weights of equal identity have equal bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    layout: String,
    fingerprint: [u8; 32],
    precision: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Index {
    of: Identity,
    /// The matrices by the name of their first part.
    matrices: BTreeMap<String, Place>,
}

/// The panels of one matrix.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Place {
    offset: usize,
    panels: usize,
    panel_words: usize,
    four_bits: bool,
}

impl PackedWeights {
    /// The place beside a model: `<file>.<precision>.packed`, or `<precision>.packed` in its folder. None for a small model, and for a
    /// device that gives its packed weights to nobody.
    pub fn beside(
        files: &ModelFiles,
        fingerprint: [u8; 32],
        precision: Precision,
        device: &dyn Device,
    ) -> Option<PackedWeights> {
        let size: usize = files.weights().files().iter().map(|file| file.len()).sum();
        let layout = device.packed_layout().filter(|_| size >= LEAST_MODEL)?.to_owned();
        let path = match files.folder() {
            Some(folder) => folder.join(format!("{precision}.packed")),
            None => {
                let mut name = files.path().file_name()?.to_owned();
                name.push(format!(".{precision}.packed"));
                files.path().with_file_name(name)
            }
        };
        Some(PackedWeights { path, of: Identity { layout, fingerprint, precision: precision.to_string() } })
    }

    /// The file, if there is one of these weights.
    pub(crate) fn open(&self) -> Option<PackedReader> {
        let bytes = FileBytes::map(&self.path).ok()?;
        let (rest, length) = bytes.split_last_chunk::<WORD>()?;
        let (rest, hash) = rest.split_last_chunk::<WORD>()?;
        let length =
            usize::try_from(u64::from_le_bytes(*length)).ok().filter(|length| *length <= MAX_INDEX)?;
        let panels = rest.len().checked_sub(length)?;
        let index = &rest[panels..];
        if XxHash3_64::oneshot(index).to_le_bytes() != *hash {
            return None;
        }
        let Index { of, matrices } = serde_json::from_slice(index).ok()?;
        if of != self.of {
            return None;
        }
        // A program that was stopped while another one wrote the file has left its part behind.
        self.remove_left_parts();
        Some(PackedReader { path: self.path.clone(), bytes, panels, matrices, read: AtomicUsize::new(0) })
    }

    /// A file for these weights, which takes its place when it is whole. A folder that cannot be written costs time at the next start and
    /// nothing else.
    pub(crate) fn create(&self) -> Option<PackedWriter> {
        self.remove_left_parts();
        // Programs in containers that share the folder may have one process id.
        let random = RandomState::new().hash_one(std::process::id());
        let part = self.path.with_extension(format!("{random:016x}.part"));
        let file = File::create_new(&part).ok()?;
        let index = Index { of: self.of.clone(), matrices: BTreeMap::new() };
        let out = Some(BufWriter::with_capacity(1 << 20, file));
        Some(PackedWriter {
            path: self.path.clone(),
            part,
            state: RefCell::new(Written { out, at: 0, index }),
        })
    }

    /// Removes what stopped programs have left of these weights.
    fn remove_left_parts(&self) {
        let (Some(folder), Some(stem)) = (self.path.parent(), self.path.file_stem()) else { return };
        let is_left = |entry: &DirEntry| {
            let path = PathBuf::from(entry.file_name());
            let age = entry.metadata().and_then(|meta| meta.modified()).map(|time| time.elapsed());
            path.extension().is_some_and(|extension| extension == "part")
                && path.file_stem().map(Path::new).and_then(Path::file_stem) == Some(stem)
                && age.is_ok_and(|age| age.is_ok_and(|age| age > ABANDONED))
        };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter(is_left).for_each(|entry| _ = std::fs::remove_file(entry.path()));
    }
}

/// An open file of packed weights.
#[derive(Debug)]
pub(crate) struct PackedReader {
    path: PathBuf,
    bytes: FileBytes,
    /// Bytes before the index.
    panels: usize,
    matrices: BTreeMap<String, Place>,
    /// Bytes that were read.
    read: AtomicUsize,
}

/// One matrix of the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedMatrix<'a> {
    file: &'a PackedReader,
    place: Place,
}

impl PackedReader {
    /// The matrix of this name.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn matrix(&self, name: &str) -> Result<PackedMatrix<'_>> {
        let place = self.matrices.get(name).ok_or_else(|| self.damaged(format!("there is no {name}")))?;
        Ok(PackedMatrix { file: self, place: *place })
    }

    /// Counts bytes that were read, and gives the resident pages back to the system at every [`RELEASED`] of them (a hint).
    fn count(&self, bytes: usize) {
        let before = self.read.fetch_add(bytes, Ordering::Relaxed);
        if before / RELEASED != (before + bytes) / RELEASED {
            self.bytes.advise_done();
        }
    }

    fn damaged(&self, what: String) -> ModelError {
        ModelError::Io {
            path: self.path.clone(),
            source: io::Error::new(io::ErrorKind::InvalidData, format!("{what} in these packed weights")),
        }
    }
}

impl PackedMatrix<'_> {
    /// Whether its blocks are of four bits.
    ///
    /// # Errors
    /// If they are, and `precision` has no such blocks.
    pub(crate) fn four_bits(&self, precision: Precision) -> Result<bool> {
        match self.place.four_bits {
            true if precision != Precision::Q8 => {
                Err(self.file.damaged(format!("there are blocks of four bits for {precision}")))
            }
            four_bits => Ok(four_bits),
        }
    }

    /// Copies panel `p` to `out`.
    ///
    /// # Errors
    /// If there is no such panel of this length, or its bytes are not those that were written.
    pub(crate) fn panel(&self, p: usize, out: &mut [u32]) -> Result<()> {
        let Place { offset, panels, panel_words, .. } = self.place;
        let bytes = size_of_val(out);
        let found = (p < panels && out.len() == panel_words)
            .then(|| offset.checked_add(p.checked_mul(bytes + WORD)?))
            .flatten()
            .filter(|at| at.checked_add(bytes + WORD).is_some_and(|end| end <= self.file.panels));
        let Some(at) = found else {
            return Err(self.file.damaged(format!("there is no panel {p} of {} words", out.len())));
        };
        let (panel, hash) = self.file.bytes[at..at + bytes + WORD].split_at(bytes);
        let out: &mut [u8] = bytemuck::cast_slice_mut(out);
        out.copy_from_slice(panel);
        if XxHash3_64::oneshot(out).to_le_bytes() != hash {
            return Err(self.file.damaged(format!("a panel at byte {at} is damaged")));
        }
        self.file.count(bytes);
        Ok(())
    }
}

/// A file of packed weights that is being written. Its failure (a full disk) leaves no file, and is no error.
#[derive(Debug)]
pub(crate) struct PackedWriter {
    path: PathBuf,
    part: PathBuf,
    state: RefCell<Written>,
}

#[derive(Debug)]
struct Written {
    /// None after a failure.
    out: Option<BufWriter<File>>,
    at: usize,
    index: Index,
}

impl PackedWriter {
    /// Adds a matrix.
    pub(crate) fn add(&self, name: &str, matrix: &PackedPanels<'_>) {
        let Written { out, at, index } = &mut *self.state.borrow_mut();
        let Some(file) = out else { return };
        let PackedPanels { words, panel_words, four_bits } = *matrix;
        let panels = words.chunks_exact(panel_words);
        let place = Place { offset: *at, panels: panels.len(), panel_words, four_bits };
        let written = panels.map(bytemuck::cast_slice).try_for_each(|panel: &[u8]| {
            *at += panel.len() + WORD;
            file.write_all(panel)?;
            file.write_all(&XxHash3_64::oneshot(panel).to_le_bytes())
        });
        match written {
            Ok(()) => _ = index.matrices.insert(name.to_owned(), place),
            Err(_) => *out = None,
        }
    }

    /// Puts the file into its place, with its index.
    pub(crate) fn finish(self) {
        let Written { out, index, .. } = &mut *self.state.borrow_mut();
        let Some(mut file) = out.take() else { return };
        let mut put = || -> io::Result<()> {
            let index = serde_json::to_vec(index)?;
            file.write_all(&index)?;
            file.write_all(&XxHash3_64::oneshot(&index).to_le_bytes())?;
            file.write_all(&(index.len() as u64).to_le_bytes())?;
            file.flush()?;
            std::fs::rename(&self.part, &self.path)
        };
        let _ = put();
    }
}

impl Drop for PackedWriter {
    fn drop(&mut self) {
        // Nothing is there any more once the file has its place.
        let _ = std::fs::remove_file(&self.part);
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
