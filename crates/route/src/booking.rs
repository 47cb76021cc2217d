//! Bookings: the requests that this gateway has at each worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::state::Load;

/// The requests that this gateway has at a worker.
#[derive(Debug, Default)]
pub(crate) struct Own {
    running: AtomicU32,
    /// Requests without a first token.
    waiting: AtomicU32,
    /// Waiting requests that the worker decodes as of its latest report: an answer that comes whole has no first token here.
    decoded: AtomicU32,
    /// Microseconds of work of the waiting ones, as estimated when they were booked.
    work: AtomicU64,
    /// The time, in microseconds, at which that work was to end.
    end: AtomicU64,
}

impl Own {
    pub(crate) fn load(&self) -> Load {
        let waiting = self.waiting.load(Relaxed);
        let decoded = self.decoded.load(Relaxed).min(waiting);
        Load { running: self.running.load(Relaxed) + decoded, waiting: waiting - decoded }
    }

    /// Takes over how many of the requests are decoded: those beyond the number that waits at the worker, as far as it decodes so many.
    pub(crate) fn take_reported(&self, reported: Load) {
        let more = self.waiting.load(Relaxed).saturating_sub(reported.waiting);
        let decoded = more.min(reported.running.saturating_sub(self.running.load(Relaxed)));
        self.decoded.store(decoded, Relaxed);
    }

    /// Seconds from `now` to the end of the work of the requests that wait for their first token. It passes with the time, but not below
    /// the work of all but one of them, since only one can be under way. The work of those that are decoded has passed.
    pub(crate) fn wait(&self, now: f64) -> f64 {
        let waiting = u64::from(self.waiting.load(Relaxed));
        if waiting == 0 {
            return 0.0;
        }
        let work = self.work.load(Relaxed);
        let left = self.end.load(Relaxed).saturating_sub(microseconds(now));
        let (one, decoded) = (work / waiting, u64::from(self.decoded.load(Relaxed)).min(waiting));
        left.clamp(one * waiting.saturating_sub(decoded + 1), work - one * decoded) as f64 * 1e-6
    }

    /// Books a request of `work` seconds.
    pub(crate) fn book(self: &Arc<Own>, now: f64, work: f64) -> Booking {
        self.end.store(microseconds(now + self.wait(now) + work), Relaxed);
        let work = microseconds(work);
        self.waiting.fetch_add(1, Relaxed);
        self.work.fetch_add(work, Relaxed);
        Booking { own: self.clone(), work: Some(work) }
    }
}

fn microseconds(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

/// A request's place at a worker. It belongs to the answer's stream, and dropping it frees the place. It may outlive the router and the
/// worker.
#[derive(Debug)]
#[must_use = "dropping a booking frees the place"]
pub struct Booking {
    own: Arc<Own>,
    /// Microseconds that were booked; none after the first token.
    work: Option<u64>,
}

impl Booking {
    /// The first token came: the request is decoded from now on, and keeps nobody waiting. Further calls change nothing.
    pub fn first_token(&mut self) {
        if self.end_waiting().is_some() {
            self.own.running.fetch_add(1, Relaxed);
        }
    }

    /// Takes back what was booked of waiting, unless that was done before; the work that it was.
    fn end_waiting(&mut self) -> Option<u64> {
        let work = self.work.take()?;
        self.own.work.fetch_sub(work, Relaxed);
        self.own.waiting.fetch_sub(1, Relaxed);
        Some(work)
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        match self.end_waiting() {
            // A whole answer that the worker was decoding: the time of its work has passed already. A request without work has no answer.
            Some(1..)
                if self.own.decoded.fetch_update(Relaxed, Relaxed, |some| some.checked_sub(1)).is_ok() => {}
            // A request that ends without a first token leaves its time to those behind it.
            Some(work) => {
                let _ = self.own.end.fetch_update(Relaxed, Relaxed, |end| Some(end.saturating_sub(work)));
            }
            None => _ = self.own.running.fetch_sub(1, Relaxed),
        }
    }
}
