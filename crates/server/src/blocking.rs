//! Work that would hold up the threads of the runtime.

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
