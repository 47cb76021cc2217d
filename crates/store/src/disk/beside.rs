//! Files beside the chunks, on a disk that the chunks may fill.

use std::sync::atomic::Ordering::Relaxed;

use super::Disk;
use super::eviction::choose_victims;
use crate::clock::now;
use crate::{Limits, Result};

impl Disk {
    /// Runs `write`, which writes something beside the chunks, and once more where the disk `is_full` for it, after chunks of `bytes` have gone.
    pub(crate) fn write_beside<T, E>(
        &self,
        bytes: u64,
        mut write: impl FnMut() -> Result<T, E>,
        is_full: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let full = match write() {
            Err(error) if is_full(&error) && !self.frees_nothing.load(Relaxed) => error,
            outcome => return outcome,
        };
        match self.make_room(bytes) {
            Ok(true) => write(),
            Ok(false) => Err(full),
            Err(error) => {
                tracing::warn!(%error, "chunks cannot make room on a full disk");
                Err(full)
            }
        }
    }

    /// Removes the least recently used chunks that are not pinned, until `bytes` have gone, and says whether any have.
    fn make_room(&self, bytes: u64) -> Result<bool> {
        self.change_index(|tables| {
            let disk = tables.totals(None)?.bytes.saturating_sub(bytes);
            let limits = Limits { disk, ..self.limits.clone() };
            let victims = choose_victims(tables, None, &limits, false, now())?;
            self.evict(tables, &victims)?;
            Ok(!victims.is_empty())
        })
    }
}
