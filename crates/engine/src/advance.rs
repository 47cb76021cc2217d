//! Work that is done in steps, so that its caller can look after other work between them.

use std::time::Duration;

/// The longest time that a step waits where its caller has nothing else to do.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// The end of one step of resumable work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// A step was done: at most one layer.
    Progress,
    /// The work waits for keys and values from a disk or an object store, and the step's patience is over.
    Waiting,
    /// All of it is done.
    Done,
}
