//! Work that is done in steps, so that its caller can look after other work between them.

/// The end of one step of resumable work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// A step was done: at most one layer.
    Progress,
    /// The work waits for keys and values from a disk or an object store; the call has waited some milliseconds at most.
    Waiting,
    /// All of it is done.
    Done,
}
