//! Work that would hold up the threads of the runtime.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::Span;

use crate::api_error::{ApiError, Result};

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

/// Runs `work` as [`spawn_blocking`] does once `permits` has one left, for which it waits for `limit` at most. The permit is the work's, which goes
/// on where its client has left.
///
/// # Errors
/// If no permit is left in time, or `work` fails or panics.
pub(crate) async fn spawn_permitted<T: Send + 'static>(
    (permits, limit): (&Arc<Semaphore>, Duration),
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let permit = timeout(limit, permits.clone().acquire_owned()).await.map_err(|_| ApiError::timeout())?;
    // The semaphores are never closed.
    let permit = permit.map_err(|error| ApiError::internal(&error))?;
    spawn_blocking(move || {
        let _permit = permit;
        work()
    })
    .await
}
