//! A chunk on its way from the object store: a layer can be used while later ones still travel.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::chunk::Chunk;
use crate::chunk_file::Header;
use crate::layer::Layer;

/// The part of a chunk that has arrived. A reader that needs more waits, within the time limits of its request.
#[derive(Debug, Default)]
pub(crate) struct InFlightChunk {
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
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Waits for something, or for the end.
    fn wait_for<T>(&self, what: impl Fn(&State) -> Option<T>) -> Option<T> {
        let wait = |state: &mut State| !state.is_over && what(state).is_none();
        what(&self.changed.wait_while(self.state(), wait).unwrap_or_else(PoisonError::into_inner))
    }

    /// Identity of the chunk; none if it does not come.
    pub(crate) fn header(&self) -> Option<Arc<Header>> {
        self.wait_for(|state| state.header.clone())
    }

    /// A layer as it lies at rest, verified; none if it does not come.
    pub(crate) fn layer(&self, layer: usize) -> Option<Layer> {
        self.wait_for(|state| state.layers.get(layer).cloned())
    }

    /// Waits until nothing comes any more.
    pub(crate) fn wait(&self) {
        self.wait_for(|_| None::<()>);
    }

    /// Says so.
    pub(crate) fn end(&self) {
        self.change(|state| state.is_over = true);
    }

    /// The chunk, once all of it is there.
    pub(crate) fn chunk(&self) -> Option<Chunk> {
        let header = self.header()?;
        let layers = (0..header.id.layers).map(|layer| self.layer(layer)).collect::<Option<_>>()?;
        Chunk::from_parts(header.id.clone(), header.provenance.clone(), layers).ok()
    }
}
