//! Who holds which chunk.

use std::collections::{BTreeSet, HashMap};

use smallvec::SmallVec;

/// A worker's place in the router's lists. Places of removed workers are given again.
pub(crate) type Slot = u16;

/// The slots of a key's holders, in no order. Up to eight lie in the map itself.
type Holders = SmallVec<[Slot; 8]>;

/// Pairs of key and worker, from both sides. Both sides always hold the same pairs.
#[derive(Debug, Default)]
pub(crate) struct ChunkIndex {
    holders: HashMap<u64, Holders>,
    /// The keys of each slot.
    keys: Vec<BTreeSet<u64>>,
    pairs: usize,
}

impl ChunkIndex {
    /// Makes room for a slot.
    pub(crate) fn reserve(&mut self, slot: Slot) {
        let slots = usize::from(slot) + 1;
        if self.keys.len() < slots {
            self.keys.resize_with(slots, BTreeSet::new);
        }
    }

    pub(crate) fn insert(&mut self, slot: Slot, key: u64) {
        if self.keys[usize::from(slot)].insert(key) {
            self.holders.entry(key).or_default().push(slot);
            self.pairs += 1;
        }
    }

    pub(crate) fn remove(&mut self, slot: Slot, key: u64) {
        if self.keys[usize::from(slot)].remove(&key) {
            self.forget_holder(slot, key);
        }
    }

    /// Makes `keys` all that a slot holds.
    pub(crate) fn replace(&mut self, slot: Slot, keys: impl IntoIterator<Item = u64>) {
        let new: BTreeSet<u64> = keys.into_iter().collect();
        let old = std::mem::take(&mut self.keys[usize::from(slot)]);
        for key in old.difference(&new) {
            self.forget_holder(slot, *key);
        }
        for key in new.difference(&old) {
            self.holders.entry(*key).or_default().push(slot);
            self.pairs += 1;
        }
        self.keys[usize::from(slot)] = new;
    }

    fn forget_holder(&mut self, slot: Slot, key: u64) {
        let Some(holders) = self.holders.get_mut(&key) else { return };
        let Some(at) = holders.iter().position(|holder| *holder == slot) else { return };
        holders.swap_remove(at);
        self.pairs -= 1;
        if holders.is_empty() {
            self.holders.remove(&key);
        } else if holders.spilled() && holders.len() <= holders.inline_size() / 2 {
            holders.shrink_to_fit();
        }
    }

    /// The slots that hold a key, in no order.
    pub(crate) fn holders(&self, key: u64) -> &[Slot] {
        self.holders.get(&key).map_or(&[], |holders| holders)
    }

    /// The keys of a slot, ascending.
    pub(crate) fn keys(&self, slot: Slot) -> impl Iterator<Item = u64> + '_ {
        self.keys[usize::from(slot)].iter().copied()
    }

    /// Pairs of key and worker.
    pub(crate) fn pairs(&self) -> usize {
        self.pairs
    }

    /// Keys that some worker holds.
    pub(crate) fn distinct(&self) -> usize {
        self.holders.len()
    }
}
