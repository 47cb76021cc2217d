//! Files of others in the store's folder.

use super::Store;
use crate::Result;

impl Store {
    /// Runs `write`, which writes to a file in the store's folder that is not the store's own. Where the disk `is_full` for it, the least recently used
    /// chunks that are not pinned go until `bytes` have gone, and `write` runs once more.
    ///
    /// # Errors
    /// The errors of `write`.
    pub fn write_beside<T, E>(
        &self,
        bytes: u64,
        mut write: impl FnMut() -> Result<T, E>,
        is_full: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        match &self.0.disk {
            Some(disk) => disk.write_beside(bytes, write, is_full),
            None => write(),
        }
    }
}
