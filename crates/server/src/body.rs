//! Bodies of requests as they arrive.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use futures_util::StreamExt as _;

use crate::api_error::{ApiError, Result};
use crate::options::Options;

/// Most bytes of all bodies that are being received, wait to be preprocessed, or are needed until their answer ends; twice the limit of one body
/// where that is more.
const MAX_BYTES_IN_FLIGHT: usize = 256 << 20;

/// The received part of a body, which counts among the bytes in flight until it is released or dropped.
struct PartialBody<'a> {
    bytes_in_flight: &'a AtomicUsize,
    bytes: Vec<u8>,
}

impl PartialBody<'_> {
    /// Appends a piece, and gives the bytes of all bodies in flight.
    fn push(&mut self, piece: &[u8]) -> usize {
        self.bytes.extend_from_slice(piece);
        self.bytes_in_flight.fetch_add(piece.len(), Relaxed) + piece.len()
    }

    /// The bytes, which are no longer counted.
    fn release(&mut self) -> Vec<u8> {
        self.bytes_in_flight.fetch_sub(self.bytes.len(), Relaxed);
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for PartialBody<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// Bytes of a received body that count among those in flight until this is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    bytes_in_flight: Arc<AtomicUsize>,
    bytes: usize,
    since: Instant,
}

impl HeldBytes {
    /// Counts so many bytes.
    ///
    /// # Errors
    /// If there are too many bytes in flight.
    pub fn new(bytes_in_flight: &Arc<AtomicUsize>, options: &Options, bytes: usize) -> Result<HeldBytes> {
        let mut held =
            HeldBytes { bytes_in_flight: bytes_in_flight.clone(), bytes: 0, since: Instant::now() };
        held.resize(options, bytes)?;
        Ok(held)
    }

    /// Counts so many bytes in place of those before.
    ///
    /// # Errors
    /// If they are more, and there are too many bytes in flight.
    pub(crate) fn resize(&mut self, options: &Options, bytes: usize) -> Result<()> {
        let before = std::mem::replace(&mut self.bytes, bytes);
        self.bytes_in_flight.fetch_sub(before, Relaxed);
        let all = self.bytes_in_flight.fetch_add(bytes, Relaxed) + bytes;
        if bytes > before && all > max_in_flight(options) { Err(busy()) } else { Ok(()) }
    }

    /// The number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The time from which they are held: that of the request's arrival.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.bytes_in_flight.fetch_sub(self.bytes, Relaxed);
    }
}

fn max_in_flight(options: &Options) -> usize {
    MAX_BYTES_IN_FLIGHT.max(2 * options.max_body)
}

fn busy() -> ApiError {
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too many large requests are under way");
    ApiError { retry_after: Some(1), ..error }
}

/// The bytes of a body, within the limits of `options` on bytes and time. `bytes_in_flight` counts those of all bodies that are being
/// received.
///
/// # Errors
/// If the body is too large, breaks off or arrives too slowly, or too many bytes are arriving.
pub async fn receive(
    request: Request<Body>,
    options: &Options,
    bytes_in_flight: &AtomicUsize,
) -> Result<Vec<u8>> {
    let (limit, timeout) = (options.max_body, options.body_timeout);
    let too_large = || ApiError::too_large(format!("the body may have {limit} bytes"));
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let mut received = PartialBody { bytes_in_flight, bytes: Vec::new() };
    let max_in_flight = max_in_flight(options);
    let receive = async {
        let mut body = request.into_body().into_data_stream();
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|error| {
                ApiError::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))
            })?;
            if received.bytes.len() + piece.len() > limit {
                return Err(too_large());
            }
            if received.push(&piece) > max_in_flight {
                return Err(busy());
            }
        }
        Ok(())
    };
    let late =
        |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {timeout:?}"));
    tokio::time::timeout(timeout, receive).await.map_err(late)??;
    Ok(received.release())
}
