//! Patience with an object store, or another service: what fails may succeed once it answers again.

use std::time::{Duration, Instant};

/// The pause before something is tried again. It costs nothing while the service is left alone.
const PAUSE: Duration = Duration::from_millis(200);

/// A try that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed<E> {
    /// The next try would fail as well.
    Lasting(E),
    /// A later one may succeed.
    Passing(E),
}

impl<E> From<E> for Failed<E> {
    fn from(error: E) -> Failed<E> {
        Failed::Lasting(error)
    }
}

/// Repeats a try until it succeeds, fails for good, or has failed for longer than `patience`; then its last error is given.
///
/// # Errors
/// The last error of the try.
pub fn repeat<T, E>(patience: Duration, mut attempt: impl FnMut() -> Result<T, Failed<E>>) -> Result<T, E> {
    let began = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return Ok(done),
            Err(Failed::Passing(_)) if began.elapsed() < patience => std::thread::sleep(PAUSE),
            Err(Failed::Lasting(error) | Failed::Passing(error)) => return Err(error),
        }
    }
}
