//! Calls that a device could not do.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A call that a device could not do.
///
/// Calls of [`Device`](super::Device) return no errors: nearly each of them may fail on a GPU and none on a CPU. They unwind with this value,
/// without a message of the panic hook, to the [`DeviceFailure::catch`] around the step that they belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceFailure {
    /// Memory that is not there. The device goes on, and what was computed before is whole.
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that are free, not all of them in one piece.
        free: u64,
    },
    /// An operation that failed. Those queued with it may not have been done, so that all later calls fail too.
    Broken {
        /// Name of the device.
        device: String,
        /// The call that was told, and the operation that failed.
        reason: String,
    },
}

impl DeviceFailure {
    /// Unwinds to the nearest [`DeviceFailure::catch`].
    pub fn unwind(self) -> ! {
        resume_unwind(Box::new(self))
    }

    /// The result of `step`, or the failure that a device's call in it unwound with. Panics go on.
    ///
    /// Changes that `step` makes may be half done after a failure: the caller drops them, or sets them back.
    ///
    /// # Errors
    /// If a device could not do a call.
    pub fn catch<T>(step: impl FnOnce() -> T) -> Result<T, DeviceFailure> {
        catch_unwind(AssertUnwindSafe(step)).map_err(|payload| match payload.downcast() {
            Ok(failure) => *failure,
            Err(panic) => resume_unwind(panic),
        })
    }
}

impl fmt::Display for DeviceFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceFailure::OutOfMemory { device, bytes, free } => write!(
                f,
                "{device} is out of memory: {bytes} bytes were asked for, and {free} are free; other programs may have taken them, \
                 or a shorter prompt may fit"
            ),
            DeviceFailure::Broken { device, reason } => {
                write!(f, "{device} has failed, and computes again after a restart: {reason}")
            }
        }
    }
}

impl std::error::Error for DeviceFailure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_caught_and_panics_go_on() {
        let failure = DeviceFailure::OutOfMemory { device: "a GPU".to_owned(), bytes: 5, free: 3 };
        assert_eq!(DeviceFailure::catch(|| 7), Ok(7));
        let thrown = failure.clone();
        assert_eq!(DeviceFailure::catch(|| thrown.unwind()), Err::<(), _>(failure));
        let panic = catch_unwind(|| DeviceFailure::catch(|| panic!("a fault"))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"a fault"));
    }
}
