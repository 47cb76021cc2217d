//! What was copied from the host and is likely to be needed again, as at the next layer: tables of rotations and short arrays.

use std::sync::{Arc, MutexGuard, PoisonError};

use refrain_kernels::{Rotary, TableEntries};

use super::block::Block;
use super::context::CudaDevice;
use crate::driver::Driver;

/// Bytes that are kept at most: cosines and sines of 128 Ki tokens with heads of 128.
const MOST_BYTES: usize = 64 << 20;
/// Uploads that are kept at most.
const MOST: usize = 512;
/// Bytes of the longest array that is kept. A longer one is not worth its comparison.
const LONGEST: usize = 256 << 10;

#[derive(PartialEq)]
enum Content {
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

/// The uploads of one queue: memory that several queues used would make them wait for each other. The least recently used go first.
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

    fn find(&mut self, is: impl Fn(&Content) -> bool) -> Option<Arc<Block<D>>> {
        let found = self.kept.iter_mut().find(|kept| is(&kept.content))?;
        self.uses += 1;
        found.used = self.uses;
        Some(found.block.clone())
    }

    fn keep(&mut self, content: Content, block: &Arc<Block<D>>) {
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

/// Bytes from the cosines of a table to its sines.
pub(super) fn table_stride(elements: usize) -> usize {
    (4 * elements).next_multiple_of(16)
}

impl<D: Driver> CudaDevice<D> {
    pub(super) fn uploads(&self) -> MutexGuard<'_, Uploads<D>> {
        self.uploads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An array in the GPU's memory.
    pub(super) fn kept_block_of<T: bytemuck::NoUninit>(&self, numbers: &[T]) -> Arc<Block<D>> {
        let bytes: &[u8] = bytemuck::cast_slice(numbers);
        if bytes.len() > LONGEST {
            return Arc::new(self.block_of(bytes));
        }
        let found =
            self.uploads().find(|content| matches!(content, Content::Bytes(kept) if **kept == *bytes));
        found.unwrap_or_else(|| {
            let block = Arc::new(self.block_of(bytes));
            self.uploads().keep(Content::Bytes(bytes.into()), &block);
            block
        })
    }

    /// Cosines, and [`table_stride`] further on sines.
    pub(super) fn table_of(&self, rotary: Rotary<'_>) -> Arc<Block<D>> {
        let Rotary { cos, sin, entries } = rotary;
        let content = entries.map(|entries| Content::Entries(entries, cos.len()));
        if let Some(found) = content.as_ref().and_then(|content| self.uploads().find(|kept| kept == content))
        {
            return found;
        }
        let (stride, bytes) = (table_stride(cos.len()), 4 * sin.len());
        let block = Arc::new(self.block(if cos.is_empty() { 0 } else { stride + bytes }));
        self.write(&block, 0, bytemuck::cast_slice(cos));
        self.write(&block, stride, bytemuck::cast_slice(sin));
        if let Some(content) = content {
            self.uploads().keep(content, &block);
        }
        block
    }
}
