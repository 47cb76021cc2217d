//! The streams that use some memory, which the order between streams (`order`) follows from.

use std::sync::{Arc, Mutex};

use super::order::lock;
use super::stream::Stream;
use crate::driver::DriverError;

/// The way in which a piece of work uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// The last pieces of a stream that used some memory.
#[derive(Debug)]
struct Use {
    stream: Arc<Stream>,
    piece: u64,
    /// The last one that may have changed it; 0 if there is none.
    write: u64,
}

/// The streams that have used some memory; the first one has allocated it.
#[derive(Debug)]
pub(super) struct Uses(Mutex<Vec<Use>>);

impl Uses {
    /// Memory that a piece of a stream allocates.
    pub(super) fn new(stream: &Arc<Stream>, piece: u64) -> Uses {
        Uses(Mutex::new(vec![Use { stream: stream.clone(), piece, write: piece }]))
    }

    /// Has what is queued next in `waiting` wait for all other streams' uses, or for those that may have changed the memory if it only reads.
    pub(super) fn wait(&self, waiting: &Stream, access: Access) -> Result<(), DriverError> {
        let piece = |last: &Use| if access == Access::Read { last.write } else { last.piece };
        lock(&self.0).iter().try_for_each(|last| waiting.wait_for(&last.stream, piece(last)))
    }

    /// Notes that a piece of a stream uses the memory.
    pub(super) fn note(&self, stream: &Arc<Stream>, piece: u64, access: Access) {
        let write = if access == Access::Read { 0 } else { piece };
        let mut uses = lock(&self.0);
        match uses.iter_mut().find(|last| Arc::ptr_eq(&last.stream, stream)) {
            Some(last) => (last.piece, last.write) = (last.piece.max(piece), last.write.max(write)),
            None => uses.push(Use { stream: stream.clone(), piece, write }),
        }
    }

    /// The one stream that has used the memory; none if there are several.
    pub(super) fn only_stream(&self) -> Option<Arc<Stream>> {
        match &lock(&self.0)[..] {
            [only] => Some(only.stream.clone()),
            _ => None,
        }
    }
}
