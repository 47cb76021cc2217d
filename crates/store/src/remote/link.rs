//! Latency and bytes a second of the link to the object store, as its downloads have shown them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::LinkSpeed;

/// Objects that are fetched at once.
pub(super) const MAX_CONCURRENT: usize = 8;
/// The weight that earlier measurements keep when an object comes: a link that has changed is known after three or four objects.
const KEPT: f64 = 0.25;
/// The age at which a measurement is made again.
const STALE: Duration = Duration::from_secs(2);

/// The link to the object store: how long it takes until an object's first byte, and how many bytes a second come of all objects that
/// arrive at the same time.
#[derive(Debug)]
pub(super) struct Link(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Objects that are asked for, or wait for their turn, and their bytes.
    objects: usize,
    bytes: u64,
    /// When requests without an answer were sent.
    unanswered: Vec<Instant>,
    /// Objects that arrive now.
    arriving: usize,
    /// Until when `busy` is counted.
    counted: Instant,
    /// Seconds until the first byte of an object, a weighted mean.
    latency: Option<f64>,
    /// Bytes that came, and the seconds in which at least one object arrived, both with the same weights.
    received: f64,
    busy: f64,
    /// When something was measured last.
    measured: Option<Instant>,
}

impl Link {
    pub(super) fn new() -> Link {
        Link(Mutex::new(State {
            objects: 0,
            bytes: 0,
            unanswered: Vec::new(),
            arriving: 0,
            counted: Instant::now(),
            latency: None,
            received: 0.0,
            busy: 0.0,
            measured: None,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An object of so many bytes is wanted.
    pub(super) fn queue(&self, bytes: u64) {
        let mut state = self.state();
        state.objects += 1;
        state.bytes += bytes;
    }

    /// It has come, or does not come.
    pub(super) fn done(&self, bytes: u64) {
        let mut state = self.state();
        state.objects -= 1;
        state.bytes -= bytes;
    }

    /// A request is sent.
    pub(super) fn ask(&self, now: Instant) {
        self.state().unanswered.push(now);
    }

    /// The request that was sent at `asked` is over; unless it failed, its answer tells the latency.
    pub(super) fn answered(&self, asked: Instant, now: Instant, is_answer: bool) {
        let mut state = self.state();
        if let Some(index) = state.unanswered.iter().position(|at| *at == asked) {
            state.unanswered.swap_remove(index);
        }
        if is_answer {
            let took = now.saturating_duration_since(asked).as_secs_f64();
            state.latency = Some(state.latency.map_or(took, |mean| KEPT * mean + (1.0 - KEPT) * took));
            state.measured = Some(now);
        }
    }

    /// An object begins to arrive.
    pub(super) fn begin(&self, now: Instant) {
        let mut state = self.state();
        state.count(now);
        state.arriving += 1;
        state.received *= KEPT;
        state.busy *= KEPT;
    }

    /// So many bytes of an object have come.
    pub(super) fn came(&self, bytes: usize, now: Instant) {
        let mut state = self.state();
        state.count(now);
        state.received += bytes as f64;
        state.measured = Some(now);
    }

    /// An object arrives no longer.
    pub(super) fn end(&self, now: Instant) {
        let mut state = self.state();
        state.count(now);
        state.arriving -= 1;
    }

    /// The time that so many further objects of so many bytes are expected to take behind those that are on their way; none before
    /// the first measurement. A request that has waited longer than the latency is a measurement too, and so is an object of which nothing
    /// comes any more.
    pub(super) fn expected(&self, objects: usize, bytes: u64, now: Instant) -> Option<Duration> {
        let mut state = self.state();
        state.count(now);
        let waited = state.unanswered.iter().map(|at| now.saturating_duration_since(*at).as_secs_f64());
        let latency = waited.chain(state.latency).reduce(f64::max)?;
        let turns = (state.objects + objects).div_ceil(MAX_CONCURRENT) as f64;
        let seconds_a_byte = if state.received > 0.0 { state.busy / state.received } else { 0.0 };
        let seconds = latency * turns + (state.bytes + bytes) as f64 * seconds_a_byte;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Latency and bytes a second, as far as they were measured.
    pub(super) fn speed(&self, now: Instant) -> LinkSpeed {
        let mut state = self.state();
        state.count(now);
        let is_measured = state.received > 0.0 && state.busy > 0.0;
        LinkSpeed {
            latency: state.latency,
            bytes_per_second: is_measured.then(|| state.received / state.busy),
        }
    }

    /// Whether the link is to be measured again: the last measurement is old, and nothing is on its way that would be one. The caller
    /// does it, so that the next call says no.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        let mut state = self.state();
        let is_old = |at: Instant| now.saturating_duration_since(at) >= STALE;
        let stale = state.objects == 0 && state.measured.is_some_and(is_old);
        if stale {
            state.measured = Some(now);
        }
        stale
    }
}

/// Runs when it is dropped: a count is taken back however the work that it counts ends, a panic included.
pub(super) struct OnDrop<F: FnMut()>(pub(super) F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl State {
    /// Counts the time until now as busy if an object arrives.
    fn count(&mut self, now: Instant) {
        if self.arriving > 0 {
            self.busy += now.saturating_duration_since(self.counted).as_secs_f64();
        }
        self.counted = self.counted.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A link, and a clock that only the test moves.
    struct Clock {
        link: Link,
        now: Instant,
    }

    impl Clock {
        fn new() -> Clock {
            let link = Link::new();
            let now = Instant::now();
            Clock { link, now }
        }

        fn answers(&mut self, latency: Duration) {
            let asked = self.now;
            self.link.ask(asked);
            self.now += latency;
            self.link.answered(asked, self.now, true);
        }

        /// Receives objects of 10 pieces of 100 kB, `together` at a time, of which all together have so many bytes a second.
        fn receive(&mut self, together: usize, bytes_a_second: f64) {
            (0..together).for_each(|_| self.link.begin(self.now));
            for _ in 0..10 * together {
                self.now += Duration::from_secs_f64(1e5 / bytes_a_second);
                self.link.came(100_000, self.now);
            }
            (0..together).for_each(|_| self.link.end(self.now));
        }

        /// Expected seconds of an object of so many bytes.
        fn expected(&self, bytes: u64) -> f64 {
            self.link.expected(1, bytes, self.now).unwrap().as_secs_f64()
        }
    }

    #[test]
    fn nothing_is_expected_before_it_was_measured() {
        let mut clock = Clock::new();
        assert!(clock.link.expected(1, 1000, clock.now).is_none());
        assert!(!clock.link.is_stale(clock.now + 60 * STALE));
        clock.answers(20 * MS);
        assert_eq!(clock.expected(1000), 0.020);
    }

    #[test]
    fn latency_and_rate_are_told_once_they_were_measured() {
        let mut clock = Clock::new();
        assert_eq!(clock.link.speed(clock.now), LinkSpeed::default());
        clock.answers(20 * MS);
        clock.receive(3, 1e6);
        let LinkSpeed { latency, bytes_per_second } = clock.link.speed(clock.now);
        assert_eq!(latency, Some(0.020));
        assert!((bytes_per_second.unwrap() / 1e6 - 1.0).abs() < 0.01, "{bytes_per_second:?}");
    }

    /// However many objects share the link, the rate is that of all of them, and time in which nothing arrives does not count.
    #[test]
    fn the_rate_is_that_of_all_objects_that_arrive_together() {
        for together in [1, 3, 8] {
            let mut clock = Clock::new();
            clock.answers(Duration::ZERO);
            for _ in 0..4 {
                clock.receive(together, 1e6);
                clock.now += Duration::from_secs(60);
            }
            let expected = clock.expected(2_000_000);
            assert!((expected - 2.0).abs() < 0.01, "{together} together: {expected}");
        }
    }

    #[test]
    fn objects_under_way_are_waited_for_first() {
        let mut clock = Clock::new();
        clock.answers(100 * MS);
        clock.receive(1, 1e6);
        let alone = clock.expected(1_000_000);
        assert!((alone - 1.1).abs() < 1e-6, "{alone}");
        (0..MAX_CONCURRENT).for_each(|_| clock.link.queue(500_000));
        let behind = clock.expected(1_000_000);
        assert!((behind - (0.2 + 5.0)).abs() < 1e-6, "{behind}");
        (0..MAX_CONCURRENT).for_each(|_| clock.link.done(500_000));
        assert_eq!(clock.expected(1_000_000), alone);
    }

    /// A link that was slow is expected to be fast after a few objects that were, and the other way round.
    #[test]
    fn what_was_measured_last_counts_most() {
        for (before, after) in [(1e5, 1e7), (1e7, 1e5)] {
            let mut clock = Clock::new();
            for rate in [before, after] {
                for _ in 0..6 {
                    clock.answers(Duration::from_secs_f64(1e6 / rate));
                    clock.receive(1, rate);
                }
            }
            let (expected, right) = (clock.expected(1_000_000), 2e6 / after);
            assert!((expected / right - 1.0).abs() < 0.1, "{expected} for {right}");
        }
    }

    #[test]
    fn a_request_without_an_answer_is_expected_to_take_as_long_as_it_has() {
        let mut clock = Clock::new();
        clock.answers(10 * MS);
        let asked = clock.now;
        clock.link.ask(asked);
        clock.now += Duration::from_secs(3);
        assert_eq!(clock.expected(0), 3.0);
        clock.link.answered(asked, clock.now, false);
        assert_eq!(clock.expected(0), 0.010, "a failure is no latency");
    }

    /// The first request of all may hang.
    #[test]
    fn a_first_request_without_an_answer_is_a_measurement() {
        let mut clock = Clock::new();
        clock.link.ask(clock.now);
        clock.now += Duration::from_secs(3);
        assert_eq!(clock.expected(0), 3.0);
    }

    #[test]
    fn an_object_that_stops_half_way_is_noticed_before_its_end() {
        let mut clock = Clock::new();
        clock.answers(Duration::ZERO);
        clock.receive(1, 1e7);
        clock.link.begin(clock.now);
        clock.link.came(1000, clock.now);
        clock.now += Duration::from_secs(10);
        let expected = clock.expected(1_000_000);
        assert!(expected > 10.0, "{expected}");
    }

    #[test]
    fn it_is_time_to_measure_again_once_in_a_while_and_if_nothing_is_under_way() {
        let mut clock = Clock::new();
        clock.answers(MS);
        let (link, now) = (&clock.link, clock.now);
        assert!(!link.is_stale(now + STALE - MS));
        link.queue(0);
        assert!(!link.is_stale(now + STALE));
        link.done(0);
        assert!(link.is_stale(now + STALE));
        assert!(!link.is_stale(now + STALE + MS), "one measures for all");
        assert!(link.is_stale(now + 2 * STALE));
    }
}
