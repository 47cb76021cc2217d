//! What it takes to fetch objects, as earlier fetches have shown.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::client::MAX_CONCURRENT;

/// The part of the mean that an object makes up, and those before it.
const SHARE: f64 = 0.5;
/// Seconds of receiving after which bytes have lost most of their weight in the rate.
const MEMORY: f64 = 2.0;
/// The age of the last measurement at which an object is fetched only to measure again.
const STALE: Duration = Duration::from_secs(2);

/// The way to the object store: moving averages of the time until an object's first byte, and of the bytes a second that all objects
/// which arrive together have.
///
/// Objects that arrive together share the way. A clock that runs at 1/n of the time while n objects arrive gives each its own share: its
/// bytes by that clock are the rate of all.
#[derive(Debug)]
pub(super) struct Link(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Objects that were asked for and have not come, and their bytes.
    objects: usize,
    bytes: u64,
    /// Objects that are arriving.
    arriving: usize,
    /// The clock, in seconds, and when it was set.
    clock: f64,
    set: Instant,
    /// Seconds until the first byte of an object.
    latency: Option<f64>,
    /// Bytes, and seconds of the clock that they took, with decaying weights.
    received: f64,
    receiving: f64,
    /// When the last measurement was made.
    measured: Option<Instant>,
}

impl Link {
    pub(super) fn new() -> Link {
        Link(Mutex::new(State {
            objects: 0,
            bytes: 0,
            arriving: 0,
            clock: 0.0,
            set: Instant::now(),
            latency: None,
            received: 0.0,
            receiving: 0.0,
            measured: None,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An object of so many bytes is asked for.
    pub(super) fn asked(&self, bytes: u64) {
        let mut state = self.state();
        state.objects += 1;
        state.bytes += bytes;
    }

    /// It has come, or does not come.
    pub(super) fn ended(&self, bytes: u64) {
        let mut state = self.state();
        state.objects -= 1;
        state.bytes -= bytes;
    }

    /// A request was answered after this time.
    pub(super) fn answered(&self, took: Duration, now: Instant) {
        let (mut state, took) = (self.state(), took.as_secs_f64());
        state.latency = Some(state.latency.map_or(took, |mean| mean + SHARE * (took - mean)));
        state.measured = Some(now);
    }

    /// An object begins to arrive.
    pub(super) fn begin(&self, now: Instant) -> Arrival<'_> {
        let mut state = self.state();
        state.set_clock(now);
        state.arriving += 1;
        state.weigh(SHARE);
        Arrival { link: self, clock: state.clock }
    }

    /// The time that so many further objects of so many bytes are expected to take with those that are on their way; none before
    /// the first measurement.
    pub(super) fn expected(&self, objects: usize, bytes: u64) -> Option<Duration> {
        let state = self.state();
        let turns = (state.objects + objects).div_ceil(MAX_CONCURRENT) as f64;
        let seconds_a_byte = if state.has_rate() { state.receiving / state.received } else { 0.0 };
        let seconds = state.latency? * turns + (state.bytes + bytes) as f64 * seconds_a_byte;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Whether bytes have been measured, and not only the time until an answer.
    pub(super) fn has_rate(&self) -> bool {
        self.state().has_rate()
    }

    /// Whether it is time to measure again. The caller does: the next call says so only after the same time.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        let mut state = self.state();
        let stale = state.measured.is_some_and(|at| now.saturating_duration_since(at) >= STALE);
        if stale {
            state.measured = Some(now);
        }
        stale
    }

    /// The last measurement was made at this time.
    #[cfg(test)]
    pub(super) fn was_measured(&self, at: Instant) {
        self.state().measured = Some(at);
    }
}

impl State {
    fn set_clock(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.set).as_secs_f64();
        self.clock += passed / self.arriving.max(1) as f64;
        self.set = now;
    }

    /// Lessens the weight of what was received until now.
    fn weigh(&mut self, weight: f64) {
        self.received *= weight;
        self.receiving *= weight;
    }

    fn has_rate(&self) -> bool {
        self.received > 0.0
    }
}

/// An object that is arriving.
pub(super) struct Arrival<'a> {
    link: &'a Link,
    /// The clock when bytes came last.
    clock: f64,
}

impl Arrival<'_> {
    /// So many bytes have come since the last call.
    pub(super) fn came(&mut self, bytes: usize, now: Instant) {
        let mut state = self.link.state();
        state.set_clock(now);
        let took = state.clock - self.clock;
        self.clock = state.clock;
        state.weigh((-took / MEMORY).exp());
        state.received += bytes as f64;
        state.receiving += took;
        state.measured = Some(now);
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        let mut state = self.link.state();
        state.set_clock(Instant::now());
        state.arriving -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn seconds(expected: Option<Duration>) -> f64 {
        expected.unwrap().as_secs_f64()
    }

    /// Receives objects of 10 pieces of 100 kB, `together` at a time, of which all together have so many bytes a second.
    fn receive(link: &Link, now: &mut Instant, together: usize, bytes_a_second: f64) {
        let mut arrivals: Vec<_> = (0..together).map(|_| link.begin(*now)).collect();
        for _ in 0..10 {
            *now += Duration::from_secs_f64(together as f64 * 1e5 / bytes_a_second);
            arrivals.iter_mut().for_each(|arrival| arrival.came(100_000, *now));
        }
        drop(arrivals);
        // The end of an arrival is told by the real clock.
        link.state().set = *now;
    }

    #[test]
    fn nothing_is_expected_before_it_was_measured() {
        let link = Link::new();
        assert!(link.expected(1, 1000).is_none() && !link.is_stale(Instant::now() + 60 * STALE));
        link.answered(20 * MS, Instant::now());
        assert!(!link.has_rate() && seconds(link.expected(1, 1000)) == 0.020);
    }

    /// However many objects share the way, the rate is that of all of them.
    #[test]
    fn the_rate_is_that_of_all_objects_that_arrive_together() {
        for together in [1, 3, 8] {
            let (link, mut now) = (Link::new(), Instant::now());
            link.answered(Duration::ZERO, now);
            for _ in 0..20 {
                receive(&link, &mut now, together, 1e6);
            }
            let expected = seconds(link.expected(1, 2_000_000));
            assert!((expected - 2.0).abs() < 0.01, "{together} together: {expected}");
        }
    }

    #[test]
    fn objects_under_way_are_waited_for_first() {
        let (link, mut now) = (Link::new(), Instant::now());
        link.answered(100 * MS, now);
        receive(&link, &mut now, 1, 1e6);
        let alone = seconds(link.expected(1, 1_000_000));
        assert!((alone - 1.1).abs() < 1e-6, "{alone}");
        (0..MAX_CONCURRENT).for_each(|_| link.asked(500_000));
        let behind = seconds(link.expected(1, 1_000_000));
        assert!((behind - (0.2 + 5.0)).abs() < 1e-6, "{behind}");
        (0..MAX_CONCURRENT).for_each(|_| link.ended(500_000));
        assert_eq!(seconds(link.expected(1, 1_000_000)), alone);
    }

    /// A way that was slow is expected to be fast after a few objects that were, and the other way round.
    #[test]
    fn what_was_measured_last_counts_most() {
        for (before, after) in [(1e5, 1e7), (1e7, 1e5)] {
            let (link, mut now) = (Link::new(), Instant::now());
            for rate in [before, after] {
                for _ in 0..12 {
                    link.answered(Duration::from_secs_f64(1e6 / rate), now);
                    receive(&link, &mut now, 1, rate);
                }
            }
            let (expected, right) = (seconds(link.expected(1, 1_000_000)), 2e6 / after);
            assert!((expected / right - 1.0).abs() < 0.1, "{expected} for {right}");
        }
    }

    /// An object that trickles is noticed before its end.
    #[test]
    fn bytes_count_as_they_come() {
        let (link, mut now) = (Link::new(), Instant::now());
        link.answered(Duration::ZERO, now);
        receive(&link, &mut now, 1, 1e7);
        let mut arrival = link.begin(now);
        for _ in 0..10 {
            now += Duration::from_secs(1);
            arrival.came(1000, now);
        }
        let expected = seconds(link.expected(1, 1_000_000));
        assert!(expected > 100.0, "{expected}");
    }

    #[test]
    fn it_is_time_to_measure_again_once_in_a_while() {
        let (link, now) = (Link::new(), Instant::now());
        link.answered(MS, now);
        assert!(!link.is_stale(now + STALE - MS));
        assert!(link.is_stale(now + STALE));
        assert!(!link.is_stale(now + STALE + MS), "one measures for all");
        assert!(link.is_stale(now + 2 * STALE));
    }
}
