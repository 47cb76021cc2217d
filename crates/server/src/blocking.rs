//! Work that would hold up the threads of the runtime.

use std::time::Instant;

use tokio::time::timeout_at;
use tracing::Span;

use crate::api_error::{ApiError, Result};
use crate::permits::{Permit, Permits};

/// Runs `work` on a thread that may block, within the current span.
///
/// # Errors
/// If `work` fails or panics.
pub(crate) async fn spawn_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let span = Span::current();
    let done = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    done.map_err(|error| ApiError::internal(&error))?
}

/// Runs `work` as [`spawn_blocking`] does once `key` has one of `permits`. Work whose client leaves before, or whose `deadline` has passed,
/// is not begun; work that has begun goes on, and has the permit until it drops it.
///
/// # Errors
/// If the work does not begin before the deadline, or `work` fails or panics.
pub(crate) async fn spawn_permitted<T: Send + 'static>(
    (permits, key): (&Permits, &str),
    deadline: Instant,
    work: impl FnOnce(Permit) -> Result<T> + Send + 'static,
) -> Result<T> {
    let permit =
        timeout_at(deadline.into(), permits.acquire(key)).await.map_err(|_| ApiError::timeout())??;
    let work = move || if Instant::now() >= deadline { Err(ApiError::timeout()) } else { work(permit) };
    spawn_blocking(work).await
}
