//! Which workers are being asked for reports, and when those that gave none are asked again.

use std::collections::HashMap;

use tokio::time::Instant;

use super::LOOK_EVERY;
use crate::cluster::WorkerId;
use crate::complaints::Complaints;

/// Most doublings of the time until a worker that gave no report is asked again: 8 seconds.
const MAX_DOUBLINGS: u32 = 5;

/// The workers that were asked, while the discovery has them.
#[derive(Default)]
pub(super) struct Asks(HashMap<WorkerId, Ask>);

#[derive(Default)]
struct Ask {
    is_under_way: bool,
    /// Times in a row that the worker gave no report.
    failures: u32,
    /// When the worker may be asked again.
    next: Option<Instant>,
    complaints: Complaints,
}

impl Asks {
    /// Forgets workers that the discovery does not have.
    pub(super) fn retain(&mut self, there: &[WorkerId]) {
        self.0.retain(|worker, _| there.contains(worker));
    }

    /// Whether a worker is to be asked now. If so, its answer has to be told by [`Asks::answered`] or [`Asks::failed`].
    pub(super) fn begin(&mut self, worker: WorkerId) -> bool {
        let ask = self.0.entry(worker).or_default();
        if ask.is_under_way || ask.next.is_some_and(|next| Instant::now() < next) {
            return false;
        }
        ask.is_under_way = true;
        true
    }

    /// A worker that was given up is there: it need not be waited for.
    pub(super) fn hurry(&mut self, worker: WorkerId) {
        if let Some(ask) = self.0.get_mut(&worker) {
            ask.next = None;
        }
    }

    /// Takes note that a worker gave a report. False where the discovery has it no more.
    pub(super) fn answered(&mut self, worker: WorkerId) -> bool {
        let Some(ask) = self.0.get_mut(&worker) else { return false };
        *ask = Ask::default();
        true
    }

    /// Takes note that a worker gave no report. Whether the reason is to be logged.
    pub(super) fn failed(&mut self, worker: WorkerId, reason: &str) -> bool {
        let Some(ask) = self.0.get_mut(&worker) else { return false };
        ask.is_under_way = false;
        ask.failures += 1;
        ask.next = Some(Instant::now() + LOOK_EVERY * (1 << ask.failures.min(MAX_DOUBLINGS)));
        ask.complaints.is_due(reason)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_worker_is_asked_once_at_a_time_and_seldom_where_it_does_not_answer() {
        let (mut asks, worker) = (Asks::default(), WorkerId(7));
        assert!(asks.begin(worker));
        assert!(!asks.begin(worker), "an ask is under way");
        assert!(asks.begin(WorkerId(8)), "another worker does not wait for it");
        for doublings in [1, 2, 3, 4, 5, 5] {
            assert_eq!(asks.failed(worker, "refused"), doublings == 1);
            let wait = LOOK_EVERY * (1 << doublings);
            tokio::time::advance(wait - Duration::from_millis(1)).await;
            assert!(!asks.begin(worker), "{doublings}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(asks.begin(worker), "{doublings}");
        }
        asks.failed(worker, "refused");
        asks.hurry(worker);
        assert!(asks.begin(worker), "the worker is there again");
        assert!(asks.answered(worker));
        assert!(asks.begin(worker));
        asks.retain(&[]);
        assert!(!asks.answered(worker), "the discovery has dropped the worker");
    }
}
