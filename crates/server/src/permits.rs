//! Permits for work of which only few pieces run at a time. API keys that wait for one get it in turns.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot::{Sender, channel};

use crate::api_error::{ApiError, Result};

/// The permits for one kind of work. A clone shares them.
#[derive(Clone)]
pub(crate) struct Permits(Arc<Shared>);

struct Shared {
    /// Permits that there are.
    limit: usize,
    /// Most permits that one key may hold.
    limit_of_key: usize,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    /// The key of each permit that is held.
    held: Vec<String>,
    /// The keys that wait, each with its waiters, in the order of their turns.
    waiting: VecDeque<(String, VecDeque<Sender<Permit>>)>,
}

/// A permit, which goes to the next waiter when it is dropped.
pub(crate) struct Permit {
    permits: Permits,
    key: String,
}

impl Permits {
    /// `limit` permits, of which one key may hold `limit_of_key`.
    pub(crate) fn new(limit: usize, limit_of_key: usize) -> Permits {
        Permits(Arc::new(Shared { limit, limit_of_key, turns: Mutex::default() }))
    }

    /// A permit, when the turn of `key` has come. A waiter whose future is dropped is passed over.
    ///
    /// # Errors
    /// Never, while the permits exist.
    pub(crate) async fn acquire(&self, key: &str) -> Result<Permit> {
        let (sender, receiver) = channel();
        {
            let mut turns = self.turns();
            match turns.waiting.iter_mut().find(|(waiting, _)| waiting == key) {
                Some((_, waiters)) => waiters.push_back(sender),
                None => turns.waiting.push_back((key.to_owned(), [sender].into())),
            }
        }
        self.grant();
        receiver.await.map_err(|error| ApiError::internal(&error))
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.0.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the permits that are free to the waiters whose turn it is.
    fn grant(&self) {
        while let Some((waiter, permit)) = self.next() {
            // The permit of a waiter that has left in this moment is dropped, and goes to the next one.
            let _ = waiter.send(permit);
        }
    }

    /// The next waiter with its permit, if one is free. A key that gets a permit waits behind the other keys for its next one.
    fn next(&self) -> Option<(Sender<Permit>, Permit)> {
        let mut turns = self.turns();
        let Turns { held, waiting } = &mut *turns;
        if held.len() >= self.0.limit {
            return None;
        }
        waiting.iter_mut().for_each(|(_, waiters)| waiters.retain(|waiter| !waiter.is_closed()));
        waiting.retain(|(_, waiters)| !waiters.is_empty());
        let of_key = |key: &str| held.iter().filter(|held| *held == key).count();
        let turn = waiting.iter().position(|(key, _)| of_key(key) < self.0.limit_of_key)?;
        let (key, mut waiters) = waiting.remove(turn)?;
        let waiter = waiters.pop_front()?;
        if !waiters.is_empty() {
            waiting.push_back((key.clone(), waiters));
        }
        held.push(key.clone());
        Some((waiter, Permit { permits: self.clone(), key }))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut turns = self.permits.turns();
        if let Some(index) = turns.held.iter().position(|held| *held == self.key) {
            turns.held.swap_remove(index);
        }
        drop(turns);
        self.permits.grant();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use futures_util::FutureExt as _;

    use super::*;

    type Waiting = Pin<Box<dyn Future<Output = Result<Permit>>>>;

    /// A waiter of `key`, which stands in the queue.
    fn waiter(permits: &Permits, key: &'static str) -> Waiting {
        let permits = permits.clone();
        let mut waiting: Waiting = Box::pin(async move { permits.acquire(key).await });
        assert!(waiting.as_mut().now_or_never().is_none(), "{key} has a permit at once");
        waiting
    }

    fn acquired(permits: &Permits, key: &str) -> Permit {
        permits.acquire(key).now_or_never().expect("a permit is free").unwrap()
    }

    /// The index and the permit of the only waiter that has got one.
    fn next(waiting: &mut Vec<(&'static str, Waiting)>) -> (&'static str, Permit) {
        let of = |(_, waiter): &mut (&'static str, Waiting)| waiter.as_mut().now_or_never();
        let index_and_permit =
            waiting.iter_mut().enumerate().find_map(|(index, waiter)| Some((index, of(waiter)?)));
        let (index, permit) = index_and_permit.expect("a waiter has got a permit");
        let (key, _) = waiting.remove(index);
        assert!(waiting.iter_mut().all(|waiter| of(waiter).is_none()), "a second waiter has got one");
        (key, permit.unwrap())
    }

    #[test]
    fn one_keys_crowd_leaves_a_permit_to_another_key() {
        let permits = Permits::new(2, 1);
        let held = acquired(&permits, "crowd");
        let mut crowd: Vec<_> = (0..10).map(|_| ("crowd", waiter(&permits, "crowd"))).collect();
        drop(acquired(&permits, "other"));
        drop(held);
        assert_eq!(next(&mut crowd).0, "crowd");
    }

    #[test]
    fn keys_get_permits_in_turns() {
        let permits = Permits::new(2, 1);
        let (_long, mut held) = (acquired(&permits, "long"), acquired(&permits, "a"));
        let keys = ["a", "a", "a", "b", "b", "long", "c"];
        let mut waiting: Vec<_> = keys.into_iter().map(|key| (key, waiter(&permits, key))).collect();
        let mut turns = Vec::new();
        while waiting.len() > 1 {
            drop(held);
            let (key, permit) = next(&mut waiting);
            turns.push(key);
            held = permit;
        }
        assert_eq!(turns, ["a", "b", "c", "a", "b", "a"]);
        assert_eq!(waiting[0].0, "long", "it has its share already");
    }

    #[test]
    fn waiters_that_have_left_are_passed_over() {
        let permits = Permits::new(1, 1);
        let held = acquired(&permits, "a");
        let (left, stays) = (waiter(&permits, "a"), waiter(&permits, "b"));
        let got_and_left = waiter(&permits, "a");
        drop(left);
        drop(held);
        // The permit has gone to the other waiter of `a`, which leaves without taking it.
        drop(got_and_left);
        let permit = stays.now_or_never().expect("the permit has gone on").unwrap();
        drop(permit);
        let turns = permits.turns();
        assert!(turns.held.is_empty() && turns.waiting.is_empty());
    }
}
