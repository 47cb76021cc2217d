//! Calls of the driver's library, whose results become errors that say what was done.

use cudarc::driver::result;
use cudarc::driver::sys::CUresult;

use crate::driver::DriverError;

/// The error of a call: what it was to do, the driver's name of the error, and its text.
pub(super) fn error(what: &str, failed: result::DriverError) -> DriverError {
    let text = failed.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    DriverError(format!("{what}: {text} ({:?})", failed.0))
}

/// Adds to a failed call what it was to do.
pub(super) trait Describe<T> {
    fn describe(self, what: &str) -> Result<T, DriverError>;
}

impl<T> Describe<T> for Result<T, result::DriverError> {
    fn describe(self, what: &str) -> Result<T, DriverError> {
        self.map_err(|failed| error(what, failed))
    }
}

impl Describe<()> for CUresult {
    fn describe(self, what: &str) -> Result<(), DriverError> {
        self.result().describe(what)
    }
}
