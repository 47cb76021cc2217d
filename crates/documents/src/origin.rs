//! The origin of a file.

/// The origin of a file. A file that others have sent may be made to harm its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The user's own, read by its path.
    Own,
    /// Sent by others.
    Sent,
}
