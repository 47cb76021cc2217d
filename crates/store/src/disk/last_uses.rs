//! Last uses of chunks on their way to the index.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::SystemTime;

use super::Disk;
use crate::ChunkKey;
use crate::clock::milliseconds;
use crate::index::{IndexError, IndexRow, Tables};

impl Disk {
    /// Remembers that a chunk is used now. The index learns of it some seconds later, from another thread: a reader waits for no disk.
    pub(crate) fn touch(self: &Arc<Self>, key: ChunkKey) {
        if self.uses.add(key, milliseconds(SystemTime::now())) {
            let (disk, uses) = (self.clone(), self.uses.take());
            // While another process writes, the uses wait for the next time. Without a thread they are lost.
            let _ =
                thread::Builder::new().name("uses".to_owned()).spawn(move || disk.write_uses(uses, false));
        }
    }

    /// Writes the last uses to the index. Where the index cannot be written they are lost.
    pub(crate) fn flush(&self) {
        self.write_uses(self.uses.take(), true);
    }

    /// Writes last uses to the index; with `wait` also if another process writes there now.
    fn write_uses(&self, uses: HashMap<ChunkKey, u64>, wait: bool) {
        if uses.is_empty() {
            return;
        }
        let enter = |tables: &mut Tables<'_>| self.enter_uses(tables, &uses);
        let written = self.index().and_then(|index| match wait {
            true => index.write(enter).map(Some),
            false => index.try_write(enter),
        });
        if let Ok(None) = written {
            self.uses.put_back(uses);
        }
    }

    /// Enters last uses, and the chunks among them that have a file and no row.
    pub(super) fn enter_uses(
        &self,
        tables: &mut Tables<'_>,
        uses: &HashMap<ChunkKey, u64>,
    ) -> Result<(), IndexError> {
        let now = milliseconds(SystemTime::now());
        for (key, used) in uses {
            let row = match tables.row(key)? {
                // A clock that was ahead for a time keeps no chunk for longer than others.
                Some(row) => Some(IndexRow { last_used: row.last_used.min(now).max(*used), ..row }),
                None => self.row_of_file(key, *used),
            };
            row.map_or(Ok(()), |row| tables.set(key, &row))?;
        }
        Ok(())
    }
}
