//! Several requests to the object store at once.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::{Builder, scope};

/// Requests at once.
const THREADS: usize = 8;

/// Works on all items, several at once where threads can be started. The outcomes are in no order.
pub(super) fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if let [item] = items {
        return vec![work(item)];
    }
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(items.len())));
    let work_on = || {
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            let outcome = work(item);
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
        }
    };
    scope(|scope| {
        // This thread works as well, and alone where the machine has no other for it.
        for _ in 1..items.len().min(THREADS) {
            if Builder::new().spawn_scoped(scope, work_on).is_err() {
                break;
            }
        }
        work_on();
    });
    outcomes.into_inner().unwrap_or_else(PoisonError::into_inner)
}
