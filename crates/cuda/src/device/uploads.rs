//! Copies from the host that are kept for later layers: tables of rotations and short arrays.

use std::sync::Arc;

use refrain_kernels::TableEntries;

use super::block::Block;
use crate::driver::Driver;

/// Bytes that are kept at most: cosines and sines of 128 Ki tokens with heads of 128.
const MOST_BYTES: usize = 64 << 20;
/// Uploads that are kept at most.
const MOST: usize = 512;
/// Bytes of the longest array that is kept. A longer one is not worth its comparison.
pub(super) const LONGEST: usize = 256 << 10;

/// The source of a copy.
#[derive(PartialEq)]
pub(super) enum Content {
    /// Some entries of a table, and the number of elements of cosines.
    Entries(TableEntries, usize),
    Bytes(Box<[u8]>),
}

struct Kept<D: Driver> {
    content: Content,
    block: Arc<Block<D>>,
    /// The last use.
    used: u64,
}

/// Uploads of one queue, or of all where they are only read: other memory that several queues used would make them wait for each other. They are
/// kept until logits end a step, or until there are too many: the least recently used go first.
pub(super) struct Uploads<D: Driver> {
    kept: Vec<Kept<D>>,
    bytes: usize,
    uses: u64,
}

impl<D: Driver> Default for Uploads<D> {
    fn default() -> Uploads<D> {
        Uploads { kept: Vec::new(), bytes: 0, uses: 0 }
    }
}

impl<D: Driver> Uploads<D> {
    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives the memory back.
    pub(super) fn clear(&mut self) {
        (self.kept, self.bytes) = (Vec::new(), 0);
    }

    /// The copy of a content, if it is kept.
    pub(super) fn find(&mut self, is: impl Fn(&Content) -> bool) -> Option<Arc<Block<D>>> {
        let found = self.kept.iter_mut().find(|kept| is(&kept.content))?;
        self.uses += 1;
        found.used = self.uses;
        Some(found.block.clone())
    }

    /// Keeps a copy, unless it is too large.
    pub(super) fn keep(&mut self, content: Content, block: &Arc<Block<D>>) {
        let bytes = block.bytes();
        if bytes > MOST_BYTES {
            return;
        }
        while self.bytes + bytes > MOST_BYTES || self.kept.len() >= MOST {
            let Some((oldest, _)) = self.kept.iter().enumerate().min_by_key(|(_, kept)| kept.used) else {
                return;
            };
            self.bytes -= self.kept.swap_remove(oldest).block.bytes();
        }
        self.uses += 1;
        self.bytes += bytes;
        self.kept.push(Kept { content, block: block.clone(), used: self.uses });
    }
}
