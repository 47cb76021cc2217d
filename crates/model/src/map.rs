//! The bytes of a model file: memory-mapped, or owned when they come from a test or a fuzzer.
//!
//! This is the one module of the crate that may use `unsafe`: mapping a file, and telling the kernel to drop
//! its resident pages.
#![allow(unsafe_code)]

use std::fs::{File, Metadata};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// Read-only bytes of one file.
#[derive(Debug)]
pub(crate) enum FileBytes {
    /// A file mapped read-only, and which one it was.
    Mapped(Mmap, Origin),
    /// Bytes in memory.
    Owned(Vec<u8>),
}

/// A file as it was when it was mapped.
#[derive(Debug)]
pub(crate) struct Origin {
    /// Its canonical path.
    pub(crate) path: PathBuf,
    /// Its state, which differs once it has changed.
    pub(crate) stamp: Stamp,
}

/// A file's state as its file system tells it. Every write changes it: `changed` is set by the system itself, so that
/// setting the time of modification back leaves a trace. Only the clock's grain, some milliseconds, can hide a write.
/// Systems without inodes leave size and time of modification, which a program may set back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    size: u64,
    /// Seconds and nanoseconds of the last modification.
    modified: (i64, i64),
    /// Seconds and nanoseconds of the last change of content or attributes.
    changed: (i64, i64),
    inode: u64,
}

impl Stamp {
    #[cfg(unix)]
    pub(crate) fn of(meta: &Metadata) -> Stamp {
        use std::os::unix::fs::MetadataExt;
        Stamp {
            size: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            inode: meta.ino(),
        }
    }

    #[cfg(not(unix))]
    pub(crate) fn of(meta: &Metadata) -> Stamp {
        let time = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        let modified = time.map_or((0, 0), |time| (time.as_secs() as i64, time.subsec_nanos().into()));
        Stamp { size: meta.len(), modified, changed: (0, 0), inode: 0 }
    }
}

impl FileBytes {
    /// Maps the regular file at `path`.
    ///
    /// # Errors
    /// [`ModelError::Io`] if the file cannot be opened or mapped, or is not a regular file.
    pub(crate) fn map(path: &Path) -> Result<Self> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() {
            return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file")));
        }
        if meta.len() == 0 {
            // An empty file cannot be mapped; its readers report what they miss in it.
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: the map is read-only and only ever lent as `&[u8]`. Another process that truncates or
        // rewrites the file meanwhile is outside the contract of every memory-mapped loader, and is
        // documented in `ModelFiles`.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let path = path.canonicalize().map_err(io)?;
        Ok(Self::Mapped(map, Origin { path, stamp: Stamp::of(&meta) }))
    }

    /// The file that was mapped; none for bytes in memory.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        match self {
            Self::Mapped(_, origin) => Some(origin),
            Self::Owned(_) => None,
        }
    }

    /// Gives the resident pages of the map back to the system; a later read faults them in from the file
    /// again.
    ///
    /// A hint: failures are ignored, owned bytes and systems without `madvise` do nothing.
    pub(crate) fn advise_done(&self) {
        #[cfg(unix)]
        if let Self::Mapped(map, _) = self {
            // SAFETY: MADV_DONTNEED on a file mapping that is never written loses nothing: the next access
            // reads the same bytes from the file.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map, _) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_after_they_were_released() {
        let path = std::env::current_exe().unwrap();
        let bytes = FileBytes::map(&path).unwrap();
        let before: u64 = bytes.iter().step_by(4096).map(|&b| u64::from(b)).sum();
        bytes.advise_done();
        let after: u64 = bytes.iter().step_by(4096).map(|&b| u64::from(b)).sum();
        assert_eq!(before, after);
    }

    #[test]
    fn a_folder_is_not_a_file() {
        let err = FileBytes::map(&std::env::temp_dir()).unwrap_err();
        assert!(matches!(err, ModelError::Io { .. }), "{err}");
    }
}
