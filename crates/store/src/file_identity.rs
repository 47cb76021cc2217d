//! Telling two files of one name apart.

use std::fs;
use std::path::Path;

/// Device and number of a file, which differ between two files of one name; none if there is no file.
#[cfg(unix)]
pub fn file_identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Other systems do not rename an open file, so its existence is enough.
#[cfg(not(unix))]
pub fn file_identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|_| (0, 0))
}
