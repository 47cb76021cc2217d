//! The chunks that a worker holds: those least recently used leave each tier.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use lru::LruCache;

/// Where a worker has a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Memory,
    Disk,
}

/// A tier: chunks with the time at which their last byte is there. A tier of no chunks is none.
#[derive(Debug)]
struct Lru(Option<LruCache<u32, f64>>);

impl Lru {
    fn new(chunks: usize) -> Lru {
        // Grows as it fills: most workers of a short simulation never do.
        Lru(NonZeroUsize::new(chunks).map(|_| LruCache::unbounded()))
    }

    fn get(&mut self, chunk: u32) -> Option<f64> {
        self.0.as_mut()?.get(&chunk).copied()
    }

    fn contains(&self, chunk: u32) -> bool {
        self.0.as_ref().is_some_and(|lru| lru.contains(&chunk))
    }

    /// Puts a chunk first; the one that leaves for it.
    fn put(&mut self, chunk: u32, there: f64, room: usize) -> Option<u32> {
        let lru = self.0.as_mut()?;
        lru.put(chunk, there);
        if lru.len() > room { lru.pop_lru().map(|(chunk, _)| chunk) } else { None }
    }
}

/// The tiers of a worker. A chunk that comes in is written to both.
#[derive(Debug)]
pub(crate) struct Tiers {
    memory: Lru,
    disk: Lru,
    memory_chunks: usize,
    disk_chunks: usize,
    /// Since the last state: chunks that are held now and were not, or the other way round.
    changes: BTreeMap<u32, bool>,
}

impl Tiers {
    pub(crate) fn new(memory_chunks: usize, disk_chunks: usize) -> Tiers {
        Tiers {
            memory: Lru::new(memory_chunks),
            disk: Lru::new(disk_chunks),
            memory_chunks,
            disk_chunks,
            changes: BTreeMap::new(),
        }
    }

    /// Where a chunk is, and the time at which its last byte is there. It counts as used.
    pub(crate) fn find(&mut self, chunk: u32) -> Option<(Tier, f64)> {
        let (memory, disk) = (self.memory.get(chunk), self.disk.get(chunk));
        memory.map(|there| (Tier::Memory, there)).or(disk.map(|there| (Tier::Disk, there)))
    }

    /// Keeps a chunk in both tiers, from the time `there` on.
    pub(crate) fn keep(&mut self, chunk: u32, there: f64) {
        if !self.holds(chunk) {
            self.change(chunk, true);
        }
        let from_memory = self.memory.put(chunk, there, self.memory_chunks);
        let from_disk = self.disk.put(chunk, there, self.disk_chunks);
        // The same chunk may leave both at once.
        let from_disk = from_disk.filter(|left| from_memory != Some(*left));
        for left in [from_memory, from_disk].into_iter().flatten() {
            if !self.holds(left) {
                self.change(left, false);
            }
        }
    }

    fn holds(&self, chunk: u32) -> bool {
        self.memory.contains(chunk) || self.disk.contains(chunk)
    }

    fn change(&mut self, chunk: u32, held: bool) {
        match self.changes.remove(&chunk) {
            // A chunk that comes and goes between two states changes nothing.
            Some(before) => debug_assert_ne!(before, held),
            None => _ = self.changes.insert(chunk, held),
        }
    }

    /// The chunks that came and those that left since the last call.
    pub(crate) fn take_changes(&mut self) -> (Vec<u32>, Vec<u32>) {
        let (came, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.changes).into_iter().partition(|(_, held)| *held);
        let chunks = |changes: Vec<(u32, bool)>| changes.into_iter().map(|(chunk, _)| chunk).collect();
        (chunks(came), chunks(left))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_least_recently_used_leaves_each_tier() {
        let mut tiers = Tiers::new(2, 3);
        (1..=3).for_each(|chunk| tiers.keep(chunk, f64::from(chunk)));
        assert_eq!(tiers.take_changes(), (vec![1, 2, 3], vec![]));
        assert_eq!(tiers.find(1), Some((Tier::Disk, 1.0)));
        assert_eq!(tiers.find(2), Some((Tier::Memory, 2.0)));
        // 1 and 2 were used after 3, which leaves.
        tiers.keep(4, 4.0);
        assert_eq!(tiers.take_changes(), (vec![4], vec![3]));
        assert_eq!(tiers.find(3), None);
        assert_eq!(tiers.find(2), Some((Tier::Memory, 2.0)));
        // A chunk that comes and goes between two states is not told.
        tiers.keep(5, 5.0);
        (6..=8).for_each(|chunk| tiers.keep(chunk, 6.0));
        assert_eq!(tiers.take_changes(), (vec![6, 7, 8], vec![1, 2, 4]));
    }

    /// Whatever comes, the changes that were told add up to what is held.
    #[test]
    fn changes_add_up() {
        let mut tiers = Tiers::new(5, 9);
        let (mut told, mut x) = (BTreeSet::new(), 1_u32);
        for step in 0..2000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let chunk = (x >> 16) % 20;
            if tiers.find(chunk).is_none_or(|(tier, _)| tier == Tier::Disk) {
                tiers.keep(chunk, 0.0);
            }
            if step % 7 == 0 {
                let (came, left) = tiers.take_changes();
                left.iter().for_each(|chunk| assert!(told.remove(chunk), "{chunk} left and was not there"));
                came.iter().for_each(|chunk| assert!(told.insert(*chunk), "{chunk} came twice"));
                let held: BTreeSet<u32> = (0..20).filter(|chunk| tiers.holds(*chunk)).collect();
                assert_eq!(told, held);
                assert!(held.len() >= 9.min(step), "a full tier stays full");
            }
        }
    }

    #[test]
    fn a_worker_may_have_no_disk() {
        let mut tiers = Tiers::new(1, 0);
        tiers.keep(1, 0.0);
        tiers.keep(2, 0.0);
        assert_eq!((tiers.find(1), tiers.find(2)), (None, Some((Tier::Memory, 0.0))));
        assert_eq!(tiers.take_changes(), (vec![2], vec![]));
    }
}
