//! Work that would hold up the threads of the runtime.

use std::sync::Arc;

use tokio::sync::Semaphore;
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

/// Runs `work` as [`spawn_blocking`] does once `permits` has one left. The permit is the work's, which goes on where its client has left.
///
/// # Errors
/// If `work` fails or panics.
pub(crate) async fn spawn_permitted<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // The semaphores are never closed.
    let permit = permits.clone().acquire_owned().await;
    let permit = permit.map_err(|error| ApiError::internal(&error))?;
    spawn_blocking(move || {
        let _permit = permit;
        work()
    })
    .await
}
