//! The origin of a file.

use std::time::Duration;

use crate::limits::{MAX_SENT_TIME, MAX_TIME};

/// The origin of a file. A file that others have sent may be made to harm its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The user's own, read by its path.
    Own,
    /// Sent by others.
    Sent,
}

impl Origin {
    /// Time for a PDF or a DOCX.
    pub(crate) fn time(self) -> Duration {
        match self {
            Origin::Own => MAX_TIME,
            Origin::Sent => MAX_SENT_TIME,
        }
    }
}
