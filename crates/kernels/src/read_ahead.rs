//! Reading ahead: threads that wait for a job bring what the next one reads into their own caches.
//!
//! A step of decoding reads every weight once, and between two products threads wait for one another, for a norm or for attention. Memory
//! would be idle meanwhile.

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::prefetch;

/// Most bytes that a thread reads ahead: a part of its second-level cache.
const MOST: usize = 256 << 10;
/// Bytes that are asked for before a thread looks for a job again.
const STEP: usize = 4 << 10;

/// Memory that the next job reads.
#[derive(Debug, Default)]
pub(crate) struct Upcoming {
    start: AtomicPtr<u8>,
    bytes: AtomicUsize,
}

impl Upcoming {
    pub(crate) fn set(&self, words: &[u32]) {
        self.bytes.store(size_of_val(words), Ordering::Relaxed);
        self.start.store(words.as_ptr().cast_mut().cast(), Ordering::Relaxed);
    }
}

/// How far a thread has read ahead.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    start: usize,
    done: usize,
}

impl Reader {
    /// Reads a step of the share of `thread`, one of `threads`, of what comes next. Returns whether there was something left to read.
    pub(crate) fn read(&mut self, upcoming: &Upcoming, thread: usize, threads: usize) -> bool {
        let (start, bytes) = (upcoming.start.load(Ordering::Relaxed), upcoming.bytes.load(Ordering::Relaxed));
        if start.addr() != self.start {
            *self = Reader { start: start.addr(), done: 0 };
        }
        if self.done >= (bytes / threads).min(MOST) {
            return false;
        }
        // Memory may be gone by now, or belong to other bytes: a hint is no access and cannot fail.
        prefetch::to_read_later(start.wrapping_add(bytes / threads * thread + self.done), STEP);
        self.done += STEP;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, Reader, STEP, Upcoming};

    #[test]
    fn each_thread_reads_its_share_once() {
        let (upcoming, mut reader) = (Upcoming::default(), Reader::default());
        assert!(!reader.read(&upcoming, 0, 2), "nothing is expected");
        let (small, large) = (vec![0u32; 5 * STEP / 2], vec![0u32; MOST]);
        upcoming.set(&small);
        let steps = |reader: &mut Reader| (0..1000).take_while(|_| reader.read(&upcoming, 1, 2)).count();
        assert_eq!((steps(&mut reader), steps(&mut reader)), (5, 0));
        upcoming.set(&large);
        assert_eq!(steps(&mut reader), MOST / STEP, "no more than fits its cache");
    }
}
