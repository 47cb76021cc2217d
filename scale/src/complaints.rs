//! Log lines about workers that give no reports.

use std::time::Duration;

use tokio::time::Instant;

/// Time after which the log tells again that a worker still gives no reports.
const REPEAT_AFTER: Duration = Duration::from_secs(60);

/// The last line that was logged about a worker without reports.
#[derive(Debug, Default)]
pub(crate) struct Complaints(Option<(String, Instant)>);

impl Complaints {
    /// Whether a line with this reason is to be logged: the reason is a new one, or a minute old.
    pub(crate) fn is_due(&mut self, reason: &str) -> bool {
        let is_known = |(last, at): &(String, Instant)| last == reason && at.elapsed() < REPEAT_AFTER;
        if self.0.as_ref().is_some_and(is_known) {
            return false;
        }
        self.0 = Some((reason.to_owned(), Instant::now()));
        true
    }

    /// The worker gave a report, so that the next failure is news.
    pub(crate) fn settle(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reason_is_told_once_a_minute() {
        let mut complaints = Complaints::default();
        assert!(complaints.is_due("refused"));
        assert!(!complaints.is_due("refused"));
        assert!(complaints.is_due("silent"));
        tokio::time::advance(REPEAT_AFTER).await;
        assert!(complaints.is_due("silent"));
        assert!(!complaints.is_due("silent"));
        complaints.settle();
        assert!(complaints.is_due("silent"));
    }
}
