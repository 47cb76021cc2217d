//! Memory of the host that a GPU can read while the CPU goes on.

use std::ptr::NonNull;
use std::slice;

use cudarc::driver::result::{event, free_host, malloc_host, memcpy_htod_async, stream};
use cudarc::driver::sys;

use super::call::Describe;
use crate::driver::DriverError;

/// Segments of a stream: one is written while copies from the others are under way.
const SEGMENTS: usize = 4;
/// Copies begin at multiples of this.
const ALIGNMENT: usize = 64;

/// Pinned memory, from which copies are under way until its event is reached.
#[derive(Debug)]
struct Segment {
    memory: NonNull<u8>,
    /// Recorded behind the last copy from it.
    left: sys::CUevent,
}

/// A ring of segments, through which a stream copies from the host: what is to be copied may change once it lies here.
#[derive(Debug)]
pub(super) struct Staging {
    /// Bytes of a segment.
    bytes: usize,
    segments: Vec<Segment>,
    current: usize,
    /// Bytes of the current segment that are taken.
    taken: usize,
}

// SAFETY: memory and events may be used by any thread.
unsafe impl Send for Staging {}

impl Staging {
    /// A ring of segments of so many bytes, which are pinned as they are needed.
    pub(super) fn new(bytes: usize) -> Staging {
        Staging { bytes, segments: Vec::new(), current: 0, taken: 0 }
    }

    /// Queues a copy to an address, of so many bytes, in a stream, always the same; its context is current. `fill` writes the bytes, piece after
    /// piece, each from the byte on that it is told: whole multiples of `unit` bytes, but for the last piece, and no more than a segment, so
    /// that the writing of a piece overlaps with the copies of those before it, each of which `copy` queues.
    pub(super) fn write(
        &mut self,
        stream: sys::CUstream,
        (to, bytes): (sys::CUdeviceptr, usize),
        unit: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
        copy: impl Fn(sys::CUdeviceptr, &[u8]) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let mut copied = 0;
        while copied < bytes {
            let (left, most) = (bytes - copied, self.bytes - self.taken);
            let piece = if left <= most { left } else { most / unit * unit };
            // Units that are longer than a segment, and bytes for which there is no pinned memory, go without.
            let memory = if unit.min(left) > self.bytes { None } else { self.segment()? };
            let Some(memory) = memory else {
                return write_unpinned(stream, to + copied as u64, left, &mut |first, bytes| {
                    fill(copied + first, bytes)
                });
            };
            if piece == 0 {
                self.leave_segment(stream)?;
                continue;
            }
            // SAFETY: the bytes lie inside of the segment, and no copy has read them since the segment was entered.
            let staged = unsafe { slice::from_raw_parts_mut(memory.as_ptr().add(self.taken), piece) };
            fill(copied, staged);
            // These bytes are left alone until the event of their segment is reached.
            copy(to + copied as u64, staged)?;
            copied += piece;
            self.taken = (self.taken + piece).next_multiple_of(ALIGNMENT);
        }
        Ok(())
    }

    /// The current segment's memory; none if the system refuses to pin even one. Where it refuses to pin another one, the ring is that of
    /// the segments that are there.
    fn segment(&mut self) -> Result<Option<NonNull<u8>>, DriverError> {
        if self.current == self.segments.len() {
            match Segment::new(self.bytes) {
                Some(segment) => self.segments.push(segment),
                None => self.enter(0)?,
            }
        }
        Ok(self.segments.get(self.current).map(|segment| segment.memory))
    }

    /// Goes on to the next segment, when all copies from it are done.
    fn leave_segment(&mut self, stream: sys::CUstream) -> Result<(), DriverError> {
        if let Some(segment) = self.segments.get(self.current) {
            // SAFETY: event and stream are alive.
            unsafe { event::record(segment.left, stream) }.describe("marking copies to the GPU")?;
        }
        self.enter((self.current + 1) % SEGMENTS)
    }

    /// Goes on to a segment, if it is there when all copies from it are done.
    fn enter(&mut self, index: usize) -> Result<(), DriverError> {
        (self.current, self.taken) = (index, 0);
        if let Some(segment) = self.segments.get(index) {
            // SAFETY: the event is alive; it was recorded when the segment was left.
            unsafe { event::synchronize(segment.left) }.describe("waiting for copies to the GPU")?;
        }
        Ok(())
    }

    /// Frees all. No copy may be under way.
    pub(super) fn free(&mut self) {
        for segment in self.segments.drain(..) {
            // SAFETY: both were made by `Segment::new`; an error has no receiver.
            let _ = unsafe { event::destroy(segment.left) };
            // SAFETY: as above.
            let _ = unsafe { free_host(segment.memory.as_ptr().cast()) };
        }
        (self.current, self.taken) = (0, 0);
    }
}

/// Copies from memory that is not pinned, and waits.
fn write_unpinned(
    stream: sys::CUstream,
    to: sys::CUdeviceptr,
    bytes: usize,
    fill: &mut dyn FnMut(usize, &mut [u8]),
) -> Result<(), DriverError> {
    let mut words = vec![0u64; bytes.div_ceil(8)];
    let from = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
    fill(0, from);
    // SAFETY: the bytes stay until the copy is waited for.
    let queued = unsafe { memcpy_htod_async(to, from, stream) };
    // SAFETY: the stream is alive.
    let waited = unsafe { stream::synchronize(stream) };
    queued.and(waited).describe("copying to the GPU")
}

impl Segment {
    fn new(bytes: usize) -> Option<Segment> {
        // SAFETY: the memory is written before it is read.
        let memory = unsafe { malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }.ok()?;
        match event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING) {
            Ok(left) => Some(Segment { memory: NonNull::new(memory.cast())?, left }),
            Err(_) => {
                // SAFETY: the memory has just been made.
                let _ = unsafe { free_host(memory) };
                None
            }
        }
    }
}
