//! Last uses of chunks that wait in memory, so that reading a chunk writes nothing.

use std::collections::HashMap;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::ChunkKey;

/// Longest time for which uses wait before they are written to the index.
const FLUSH: Duration = Duration::from_secs(10);
/// Most uses that wait.
const MAX_UNWRITTEN: usize = 4096;

/// Last uses that the index does not know yet.
#[derive(Debug)]
pub(super) struct UnwrittenUses(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Milliseconds since 1970.
    last_used: HashMap<ChunkKey, u64>,
    /// When the uses were last taken.
    taken: Instant,
}

impl UnwrittenUses {
    pub(super) fn new() -> UnwrittenUses {
        UnwrittenUses(Mutex::new(State { last_used: HashMap::new(), taken: Instant::now() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a use at `now` (ms since 1970), and says whether the uses are to be written now.
    pub(super) fn add(&self, key: ChunkKey, now: u64) -> bool {
        let mut state = self.state();
        state.last_used.insert(key, now);
        state.taken.elapsed() >= FLUSH || state.last_used.len() >= MAX_UNWRITTEN
    }

    /// Takes all uses, to write them.
    pub(super) fn take(&self) -> HashMap<ChunkKey, u64> {
        let mut state = self.state();
        state.taken = Instant::now();
        mem::take(&mut state.last_used)
    }

    /// Puts back uses that were not written, unless a chunk has been used again since.
    pub(super) fn put_back(&self, unwritten: HashMap<ChunkKey, u64>) {
        let mut state = self.state();
        unwritten.into_iter().for_each(|(key, used)| _ = state.last_used.entry(key).or_insert(used));
    }

    /// Forgets the use of a chunk that is removed.
    pub(super) fn remove(&self, key: &ChunkKey) {
        self.state().last_used.remove(key);
    }
}
