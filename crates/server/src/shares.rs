//! Fair shares of the compute thread: the key whose work has taken the least time goes next.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The time of an ingest counts this many times: questions are waited for.
const INGEST: u32 = 3;

/// The time of answers under way counts this many times: they have their first token.
const DECODE: u32 = 2;

/// The time of a prompt counts twice from here on, so that a short one beside a long one waits less than it would for half of
/// the time.
const LONG: Duration = Duration::from_secs(1);

/// The lead of a key that comes back after it has done nothing: a short question then goes first.
const LEAD: Duration = Duration::from_millis(100);

/// The time for which a key is remembered that has no work, so that coming back again and again gives no lead.
const REMEMBERED: Duration = Duration::from_secs(10);

/// While a key has questions and ingests, one of its turns in this many belongs to an ingest.
const INGEST_TURN: usize = 4;

/// Compute time by key, of those that have work.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    keys: HashMap<String, Share>,
    /// The time of the last note of who has work.
    last: Option<Instant>,
}

#[derive(Debug, Default)]
struct Share {
    used: Duration,
    turns: usize,
    /// When the key had work last.
    active: Option<Instant>,
}

impl Shares {
    /// Takes note of the keys that have work. A key that comes has used the least time of the others, less a lead, or what it had used where
    /// that is more: what it did not use before is no further credit.
    pub(crate) fn set_active<'a>(&mut self, keys: impl Iterator<Item = &'a str> + Clone, now: Instant) {
        self.keys.retain(|_, share| share.active.is_some_and(|time| now < time + REMEMBERED));
        let is_new = |key: &str| self.keys.get(key).is_none_or(|share| share.active != self.last);
        let others =
            self.keys.values().filter(|share| share.active == self.last).map(|share| share.used).min();
        let least = others.unwrap_or_default().saturating_sub(LEAD);
        let come: Vec<&str> = keys.clone().filter(|key| is_new(key)).collect();
        for key in come {
            let share = self.keys.entry(key.to_owned()).or_default();
            share.used = share.used.max(least);
        }
        for key in keys {
            self.keys.entry(key.to_owned()).or_default().active = Some(now);
        }
        self.last = Some(now);
    }

    /// The time that a key has used.
    pub(crate) fn used(&self, key: &str) -> Duration {
        self.keys.get(key).map(|share| share.used).unwrap_or_default()
    }

    /// Whether the next turn of a key belongs to its ingest, if it has one.
    pub(crate) fn ingest_is_due(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|share| (share.turns + 1).is_multiple_of(INGEST_TURN))
    }

    /// Charges a step of a prompt that has taken `before` so far.
    pub(crate) fn charge_prefill(&mut self, key: &str, step: Duration, before: Duration) {
        self.charge(key, if before > LONG { step * 2 } else { step });
    }

    /// Charges a step of an ingest.
    pub(crate) fn charge_ingest(&mut self, key: &str, step: Duration) {
        self.charge(key, step * INGEST);
    }

    /// Charges an answer's part of a step of decoding.
    pub(crate) fn charge_decode(&mut self, key: &str, part: Duration) {
        if let Some(share) = self.keys.get_mut(key) {
            share.used += part * DECODE;
        }
    }

    /// Charges a turn.
    fn charge(&mut self, key: &str, time: Duration) {
        if let Some(share) = self.keys.get_mut(key) {
            share.used += time;
            share.turns += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work of a key: milliseconds of each step, and how many are left.
    struct Work {
        key: &'static str,
        step: u64,
        left: usize,
        is_ingest: bool,
        took: Duration,
    }

    fn work(key: &'static str, step: u64, left: usize, is_ingest: bool) -> Work {
        Work { key, step, left, is_ingest, took: Duration::ZERO }
    }

    /// The time at which the last work of the list is done, which comes at `arrives`.
    fn finished(mut all: Vec<Work>, arrives: u64) -> u64 {
        let (mut shares, mut now, start) = (Shares::default(), 0, Instant::now());
        loop {
            let there = all.len() - usize::from(now < arrives);
            let keys: Vec<&str> =
                all[..there].iter().filter(|work| work.left > 0).map(|work| work.key).collect();
            shares.set_active(keys.iter().copied(), start + Duration::from_millis(now));
            let open = all[..there].iter_mut().filter(|work| work.left > 0);
            let Some(next) = open.min_by_key(|work| shares.used(work.key)) else { panic!("nothing to do") };
            let step = Duration::from_millis(next.step);
            if next.is_ingest {
                shares.charge_ingest(next.key, step);
            } else {
                shares.charge_prefill(next.key, step, next.took);
            }
            (next.left, next.took, now) = (next.left - 1, next.took + step, now + next.step);
            if all.last().is_some_and(|work| work.left == 0) {
                return now - arrives;
            }
        }
    }

    #[test]
    fn a_question_beside_another_keys_heavy_work_waits_less_than_twice_its_time() {
        // A prompt of 30 s in steps of 80 ms, under way for a while, and a question of 600 ms in steps of 20 ms.
        let long = work("heavy", 80, 375, false);
        let waited = finished(vec![long, work("light", 20, 30, false)], 2000);
        assert!((600..=1100).contains(&waited), "{waited}");
        // An ingest, and two heavy keys.
        let waited = finished(vec![work("heavy", 80, 400, true), work("light", 20, 30, false)], 2000);
        assert!((600..=1000).contains(&waited), "{waited}");
        let heavy = vec![work("a", 80, 400, true), work("b", 80, 400, false), work("light", 20, 30, false)];
        let waited = finished(heavy, 5000);
        assert!((600..=1400).contains(&waited), "{waited}");
    }

    #[test]
    fn an_ingest_gets_a_turn_in_four_beside_questions_of_its_key() {
        let mut shares = Shares::default();
        shares.set_active(["a"].into_iter(), Instant::now());
        let due = |_| {
            let due = shares.ingest_is_due("a");
            shares.charge_prefill("a", Duration::from_millis(1), Duration::ZERO);
            due
        };
        let turns: Vec<bool> = (0..12).map(due).collect();
        assert_eq!(turns.iter().filter(|due| **due).count(), 3);
    }

    #[test]
    fn a_key_that_comes_has_a_lead_once_and_no_other_credit() {
        let (mut shares, now) = (Shares::default(), Instant::now());
        let at = |ms: u64| now + Duration::from_millis(ms);
        let seconds = Duration::from_secs;
        shares.set_active(["a", "b"].into_iter(), at(0));
        shares.charge_prefill("a", seconds(5), Duration::ZERO);
        shares.charge_prefill("b", seconds(3), Duration::ZERO);
        shares.set_active(["a", "b", "c"].into_iter(), at(1));
        assert_eq!(shares.used("c"), seconds(3) - LEAD);
        shares.charge_prefill("c", seconds(4), Duration::ZERO);
        // It goes and comes back: what it used still counts.
        shares.set_active(["a", "b"].into_iter(), at(2));
        shares.set_active(["a", "b", "c"].into_iter(), at(3));
        assert_eq!(shares.used("c"), seconds(7) - LEAD);
        // After a while it comes as a new one.
        for ms in (4..20_000).step_by(1000) {
            shares.set_active(["a", "b"].into_iter(), at(ms));
        }
        shares.set_active(["a", "b", "c"].into_iter(), at(20_001));
        assert_eq!(shares.used("c"), seconds(3) - LEAD);
    }

    #[test]
    fn a_key_with_one_short_question_after_the_other_gets_half_of_the_time() {
        let (mut shares, now) = (Shares::default(), Instant::now());
        let (mut short, mut long) = (Duration::ZERO, Duration::ZERO);
        let step = Duration::from_millis(20);
        for turn in 0..1000u32 {
            // The short question is away in every fourth turn.
            let keys = if turn % 4 == 3 { vec!["long"] } else { vec!["long", "short"] };
            shares.set_active(keys.iter().copied(), now + step * turn);
            let next = keys.into_iter().min_by_key(|key| shares.used(key)).unwrap();
            shares.charge_prefill(next, step, Duration::ZERO);
            *(if next == "long" { &mut long } else { &mut short }) += step;
        }
        assert!(short <= long + LEAD + step * 2, "{short:?} {long:?}");
    }
}
