//! A chunk on its way from the object store: a layer can be used while later ones still travel.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::chunk::Chunk;
use crate::chunk_file::Header;
use crate::layer::Layer;

/// The part of a chunk that has arrived. A reader that needs more waits: until a time of its own, or until nothing comes any more, within
/// the time limits of the request to the object store.
#[derive(Debug, Default)]
pub(crate) struct InFlightChunk {
    /// When the chunk is late: computing it takes less time than waiting on.
    pub(crate) deadline: Option<Instant>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) header: Option<Arc<Header>>,
    /// The first layers, verified.
    pub(crate) layers: Vec<Layer>,
    /// Nothing comes any more; the chunk is in the store if all of it came.
    pub(crate) is_over: bool,
}

impl InFlightChunk {
    pub(crate) fn until(deadline: Option<Instant>) -> InFlightChunk {
        InFlightChunk { deadline, ..InFlightChunk::default() }
    }

    /// Whether the chunk is late, and not all of it has come.
    pub(crate) fn is_late(&self) -> bool {
        let has_come = |state: &State| {
            state.is_over
                || state.header.as_ref().is_some_and(|header| state.layers.len() == header.id.layers)
        };
        self.deadline.is_some_and(|deadline| deadline <= Instant::now()) && !has_come(&self.state())
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Waits for something, for the end, or until that time.
    fn wait_for<T>(&self, until: Option<Instant>, what: impl Fn(&State) -> Option<T>) -> Option<T> {
        let wait = |state: &mut State| !state.is_over && what(state).is_none();
        let Some(until) = until else {
            return what(
                &self.changed.wait_while(self.state(), wait).unwrap_or_else(PoisonError::into_inner),
            );
        };
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.state(), left, wait);
        what(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Identity of the chunk; none if it does not come.
    pub(crate) fn header(&self, until: Option<Instant>) -> Option<Arc<Header>> {
        self.wait_for(until, |state| state.header.clone())
    }

    /// A layer as it lies at rest, verified; none if it does not come.
    pub(crate) fn layer(&self, layer: usize, until: Option<Instant>) -> Option<Layer> {
        self.wait_for(until, |state| state.layers.get(layer).cloned())
    }

    /// Waits until nothing comes any more.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        self.wait_for(until, |_| None::<()>);
    }

    /// Says so.
    pub(crate) fn end(&self) {
        self.change(|state| state.is_over = true);
    }

    /// The chunk, once all of it is there.
    pub(crate) fn chunk(&self, until: Option<Instant>) -> Option<Chunk> {
        let header = self.header(until)?;
        let layers = (0..header.id.layers).map(|layer| self.layer(layer, until)).collect::<Option<_>>()?;
        Chunk::from_parts(header.id.clone(), header.provenance.clone(), layers).ok()
    }
}
