//! The order between streams.
//!
//! **Invariant.** A piece of work is done after the last piece of every other stream that uses any of its memory and was queued before it, unless
//! both only read that memory.
//! Memory is freed after all pieces that use it. Nothing else orders two streams, so that one goes on while another is busy with other memory.
//!
//! A stream numbers the pieces of work that are queued in it, and memory has, of each stream that used it, the number of the last piece. A
//! wait for a piece is a wait for an event that was recorded behind it. A stream records one behind every [`EVERY`] pieces and keeps the last
//! [`MARKS`] of them, so that a wait takes in fewer than [`EVERY`] pieces too many. The oldest event that is kept stands for all before it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{event, stream};
use cudarc::driver::sys;

use super::call::Describe;
use crate::driver::DriverError;

/// Pieces of work between two events of a stream.
const EVERY: u64 = 16;
/// Most events of a stream.
const MARKS: usize = 64;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A place in a stream.
#[derive(Debug)]
struct Mark {
    event: sys::CUevent,
    /// Pieces of work before it.
    pieces: u64,
}

// SAFETY: an event may be used by any thread.
unsafe impl Send for Mark {}

/// The pieces of work that were queued in a stream. Its calls need the stream's context to be current.
#[derive(Debug, Default)]
pub(super) struct Pieces(Mutex<Queued>);

#[derive(Debug, Default)]
struct Queued {
    pieces: u64,
    /// The oldest first.
    marks: VecDeque<Mark>,
}

impl Queued {
    /// Records an event behind all that is queued.
    fn mark(&mut self, stream: sys::CUstream) -> Result<(), DriverError> {
        let oldest = if self.marks.len() < MARKS { None } else { self.marks.pop_front() };
        let event = match oldest {
            Some(mark) => mark.event,
            None => event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).describe("making an event")?,
        };
        // SAFETY: event and stream are alive; a wait for the event as it was recorded before is none for this place.
        unsafe { event::record(event, stream) }.describe("marking a place in a stream")?;
        self.marks.push_back(Mark { event, pieces: self.pieces });
        Ok(())
    }
}

impl Pieces {
    /// Counts a piece of work that was queued; returns its number.
    ///
    /// It is counted after it was queued, so that an event that another thread records in between does not stand for it.
    pub(super) fn count(&self, stream: sys::CUstream) -> u64 {
        let mut queued = lock(&self.0);
        queued.pieces += 1;
        if queued.pieces.is_multiple_of(EVERY) {
            // If no event can be recorded here, the next wait for this piece records one.
            let _ = queued.mark(stream);
        }
        queued.pieces
    }

    /// Has what is queued next in `waiting` wait for a piece of `stream`; returns up to which piece it waits then.
    pub(super) fn wait(
        &self,
        stream: sys::CUstream,
        piece: u64,
        waiting: sys::CUstream,
    ) -> Result<u64, DriverError> {
        // The wait is for the event as recorded last, so that no other thread may record it in between.
        let mut queued = lock(&self.0);
        if queued.marks.back().is_none_or(|last| last.pieces < piece) {
            queued.mark(stream)?;
        }
        let mark = &queued.marks[queued.marks.partition_point(|mark| mark.pieces < piece)];
        // SAFETY: event and stream are alive.
        unsafe { stream::wait_event(waiting, mark.event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .describe("waiting for a stream")?;
        Ok(mark.pieces)
    }

    /// Destroys the events.
    pub(super) fn free(&mut self) {
        for mark in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).marks.drain(..) {
            // SAFETY: the event is alive; an error has no receiver.
            let _ = unsafe { event::destroy(mark.event) };
        }
    }
}

/// Pieces of other streams, by their handles, that a stream waits for.
#[derive(Debug, Default)]
pub(super) struct Awaited(Mutex<HashMap<usize, u64>>);

impl Awaited {
    /// Has what is queued next in `waiting`, the stream of this value, wait for a piece of another, which has counted `pieces`.
    pub(super) fn wait_for(
        &self,
        (other, pieces): (sys::CUstream, &Pieces),
        piece: u64,
        waiting: sys::CUstream,
    ) -> Result<(), DriverError> {
        if other == waiting {
            return Ok(());
        }
        let mut awaited = lock(&self.0);
        let known = awaited.entry(other.addr()).or_default();
        if *known < piece {
            *known = pieces.wait(other, piece, waiting)?;
        }
        Ok(())
    }
}
