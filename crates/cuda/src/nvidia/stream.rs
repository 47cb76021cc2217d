//! Streams: queues of work of a GPU.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::result::{event, stream};
use cudarc::driver::sys;

use super::call::Describe;
use super::context::Context;
use super::staging::Staging;
use crate::driver::DriverError;

/// A stream of a GPU's context. Its calls need that context to be current.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    /// The event that other streams wait for.
    marker: Mutex<Marker>,
    staging: Mutex<Staging>,
}

#[derive(Debug)]
struct Marker(sys::CUevent);

// SAFETY: a stream may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Stream {}
// SAFETY: an event may be used by any thread.
unsafe impl Send for Marker {}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream, DriverError> {
        context.bind()?;
        let marker =
            event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).describe("making an event")?;
        match stream::create(stream::StreamKind::NonBlocking).describe("making a stream") {
            Ok(raw) => Ok(Stream {
                context: context.clone(),
                raw,
                marker: Mutex::new(Marker(marker)),
                staging: Mutex::default(),
            }),
            Err(error) => {
                // SAFETY: the event has just been made.
                let _ = unsafe { event::destroy(marker) };
                Err(error)
            }
        }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Has all that is queued from now on wait for what another stream holds.
    pub(super) fn wait_for(&self, other: &Stream) -> Result<(), DriverError> {
        if self.raw == other.raw {
            return Ok(());
        }
        // The wait is for the event as recorded last, so that nobody may record it in between.
        let marker = other.marker.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: event and stream are alive.
        unsafe { event::record(marker.0, other.raw) }.describe("marking a place in a stream")?;
        // SAFETY: as above.
        unsafe { stream::wait_event(self.raw, marker.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .describe("waiting for a stream")
    }

    /// Queues a copy from the host.
    pub(super) fn write(&self, to: sys::CUdeviceptr, from: &[u8]) -> Result<(), DriverError> {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner).write(self.raw, to, from)
    }

    /// Waits for all that is queued.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is alive.
        unsafe { stream::synchronize(self.raw) }.describe("waiting for the GPU")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // An error has no receiver: the last user is gone.
        let _ = self.context.bind();
        let _ = self.synchronize();
        self.staging.get_mut().unwrap_or_else(PoisonError::into_inner).free();
        let marker = self.marker.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the event is alive.
        let _ = unsafe { event::destroy(marker.0) };
        // SAFETY: the stream is alive.
        let _ = unsafe { stream::destroy(self.raw) };
    }
}
