//! The bytes of a model file: memory-mapped, or owned when they come from a test or a fuzzer.
//!
//! This is the one module of the crate that may use `unsafe`: mapping a file, and telling the kernel to drop
//! its resident pages.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{ModelError, Result};

/// Read-only bytes of one file.
#[derive(Debug)]
pub(crate) enum FileBytes {
    /// A file mapped read-only.
    Mapped(Mmap),
    /// Bytes in memory.
    Owned(Vec<u8>),
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
        Ok(Self::Mapped(map))
    }

    /// Gives the resident pages of the map back to the system; a later read faults them in from the file
    /// again.
    ///
    /// A hint: failures are ignored, owned bytes and systems without `madvise` do nothing.
    pub(crate) fn advise_done(&self) {
        #[cfg(unix)]
        if let Self::Mapped(map) = self {
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
            Self::Mapped(map) => map,
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
