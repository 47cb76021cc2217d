//! The span of a request, and what log and metrics tell of its response.

use std::time::Instant;

use axum::http::Method;
use tracing::Span;
use tracing::field::Empty;

use crate::api_error::ApiError;
use crate::metrics::{ByStatus, Metrics};

/// Paths by which others learn how a server is.
pub(crate) const PROBES: [&str; 4] = ["/health", "/ready", "/metrics", "/internal/report"];

/// The status that nginx gives a request whose client leaves before its response.
const CLIENT_LEFT: u16 = 499;

/// Marks a request as failed, for OpenTelemetry.
pub(crate) fn mark_failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
}

/// Counts a request whose work fails, also behind the head of a stream, and logs it within its span.
pub(crate) fn tell_failure(span: &Span, metrics: &Metrics, error: &ApiError) {
    metrics.failed(error.word());
    span.in_scope(|| tracing::info!(status = error.status.as_u16(), code = error.word(), "failed"));
    if error.status.is_server_error() {
        mark_failed(span);
    }
}

/// The span of a request up to its response. The request is counted and logged when this is dropped, as the future that it belongs to is where the
/// client leaves.
#[derive(Debug)]
pub struct RequestSpan {
    /// The span.
    pub span: Span,
    path: String,
    /// Whether the request comes from a program that sends several a minute: it is logged only where it fails, and its span is of level debug.
    is_quiet: bool,
    started: Instant,
    status: u16,
    responses: ByStatus,
}

impl RequestSpan {
    /// The span of a request that has just arrived, and the numbers of responses that it is to be counted among.
    pub fn new(id: &str, tenant: &str, (method, path): (&Method, &str), responses: ByStatus) -> Self {
        let is_quiet = path.starts_with("/internal/") || PROBES.contains(&path);
        macro_rules! request {
            ($span:ident) => {
                tracing::$span!(
                    "request",
                    id,
                    tenant,
                    %method,
                    path,
                    otel.kind = "server",
                    otel.status_code = Empty,
                    http.response.status_code = Empty,
                )
            };
        }
        let span = if is_quiet { request!(debug_span) } else { request!(info_span) };
        let path = path.to_owned();
        RequestSpan { span, path, is_quiet, started: Instant::now(), status: CLIENT_LEFT, responses }
    }

    /// Ends the request with the status of its response. The body of a stream is still to come.
    pub fn respond(mut self, status: u16) {
        self.status = status;
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let RequestSpan { span, path, is_quiet, started, status, responses } = self;
        let (status, ms) = (*status, started.elapsed().as_millis() as u64);
        let is_over = if status == CLIENT_LEFT { "the client left" } else { "responded" };
        // The log of level info lacks the span of a quiet request, which has its path.
        let path = is_quiet.then_some(path.as_str());
        span.in_scope(|| match *is_quiet && (status < 400 || status == CLIENT_LEFT) {
            true => tracing::debug!(status, ms, "{is_over}"),
            false => tracing::info!(path, status, ms, "{is_over}"),
        });
        span.record("http.response.status_code", status);
        if status >= 500 {
            mark_failed(span);
        }
        if !*is_quiet {
            responses.get_or_create(&[("status", status)]).inc();
        }
    }
}
