//! Bodies of requests as they arrive.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use futures_util::StreamExt as _;

use crate::api_error::{ApiError, Result};
use crate::options::{Limits, Options};

/// Most bytes of all bodies that are being received, wait to be preprocessed, or are needed until their answer ends; twice the limit of one body
/// where that is more.
const MAX_BYTES_IN_FLIGHT: usize = 256 << 20;

/// Bytes that a value of JSON takes beside its text: those of `serde_json::Value`.
const VALUE_BYTES: usize = 72;

/// Bytes in flight, of all requests and of those of each key.
#[derive(Debug)]
pub struct BytesInFlight {
    all: Counter,
    /// Most bytes of a key.
    most_of_key: usize,
    keys: Mutex<HashMap<String, Weak<AtomicUsize>>>,
}

/// A count of bytes, and the most that it may come to.
#[derive(Clone, Debug)]
struct Counter {
    bytes: Arc<AtomicUsize>,
    most: usize,
}

impl BytesInFlight {
    /// No bytes yet, within the limits of a server, or of a gateway.
    pub fn new(options: &Options, limits: &Limits) -> BytesInFlight {
        let all = Counter { bytes: Arc::default(), most: max_in_flight(options) };
        BytesInFlight { most_of_key: limits.of_key(all.most), all, keys: Mutex::default() }
    }

    /// No bytes yet of a request of the key with this namespace.
    pub fn held_by(&self, key: &str) -> HeldBytes {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.retain(|_, bytes| bytes.strong_count() > 0);
        let bytes = keys.get(key).and_then(Weak::upgrade).unwrap_or_default();
        keys.insert(key.to_owned(), Arc::downgrade(&bytes));
        HeldBytes::none(vec![self.all.clone(), Counter { bytes, most: self.most_of_key }])
    }

    /// Bytes of all requests.
    pub fn all(&self) -> usize {
        self.all.bytes.load(Relaxed)
    }
}

/// Bytes of a body that count among those in flight until this is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    counters: Vec<Counter>,
    bytes: usize,
    since: Instant,
}

impl HeldBytes {
    fn none(counters: Vec<Counter>) -> HeldBytes {
        HeldBytes { counters, bytes: 0, since: Instant::now() }
    }

    /// Counts so many further bytes of the same request.
    ///
    /// # Errors
    /// If there are too many bytes in flight.
    pub(crate) fn beside(&self, bytes: usize) -> Result<HeldBytes> {
        let mut held = HeldBytes::none(self.counters.clone());
        held.resize(bytes)?;
        Ok(held)
    }

    /// Counts so many bytes in place of those before.
    ///
    /// # Errors
    /// If they are more, and there are too many bytes in flight.
    pub fn resize(&mut self, bytes: usize) -> Result<()> {
        let before = std::mem::replace(&mut self.bytes, bytes);
        // Modulo the numbers of bytes that there are, as the counters count: it may be below nothing.
        let added = bytes.wrapping_sub(before);
        let mut fits = true;
        for Counter { bytes, most } in &self.counters {
            fits &= bytes.fetch_add(added, Relaxed).wrapping_add(added) <= *most;
        }
        if fits || bytes <= before { Ok(()) } else { Err(busy()) }
    }

    /// Counts what a body of JSON takes once it is parsed, in place of its bytes.
    ///
    /// # Errors
    /// If that is more than one request may have, or there are too many bytes in flight.
    pub(crate) fn resize_to_parsed(&mut self, json: &[u8]) -> Result<()> {
        let (bytes, most) = (parsed_bytes(json), self.counters.iter().map(|counter| counter.most).min());
        if let Some(most) = most.filter(|most| bytes > *most) {
            let message = format!(
                "the body takes {bytes} bytes of memory with {VALUE_BYTES} for each of its values, and may take {most}: send fewer values"
            );
            return Err(ApiError::too_large(message));
        }
        self.resize(bytes)
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
        self.counters.iter().for_each(|counter| _ = counter.bytes.fetch_sub(self.bytes, Relaxed));
    }
}

/// Most bytes that JSON takes once it is parsed: its texts, and its values, of which each follows a mark outside of texts. The name of a field counts as
/// a value.
pub(crate) fn parsed_bytes(json: &[u8]) -> usize {
    let (mut values, mut rest) = (1, json.iter());
    while let Some(byte) = rest.next() {
        match byte {
            b'[' | b'{' | b',' | b':' => values += 1,
            b'"' => {
                while let Some(byte) = rest.next().filter(|byte| **byte != b'"') {
                    if *byte == b'\\' {
                        rest.next();
                    }
                }
            }
            _ => {}
        }
    }
    json.len() + values * VALUE_BYTES
}

fn max_in_flight(options: &Options) -> usize {
    MAX_BYTES_IN_FLIGHT.max(2 * options.max_body)
}

fn busy() -> ApiError {
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too many large requests are under way");
    ApiError { retry_after: Some(1), ..error }
}

/// The bytes of a body, within the limits of `options` on bytes and time, counted by `held` from their arrival on.
///
/// # Errors
/// If the body is too large, breaks off or arrives too slowly, or too many bytes are arriving.
pub async fn receive(
    request: Request<Body>,
    options: &Options,
    mut held: HeldBytes,
) -> Result<(Vec<u8>, HeldBytes)> {
    let (limit, timeout) = (options.max_body, options.body_timeout);
    let too_large = || ApiError::too_large(format!("the body may have {limit} bytes"));
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let mut received = Vec::new();
    let receive = async {
        let mut body = request.into_body().into_data_stream();
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|error| {
                ApiError::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))
            })?;
            if received.len() + piece.len() > limit {
                return Err(too_large());
            }
            held.resize(received.len() + piece.len())?;
            received.extend_from_slice(&piece);
        }
        Ok(())
    };
    let late =
        |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {timeout:?}"));
    tokio::time::timeout(timeout, receive).await.map_err(late)??;
    held.since = Instant::now();
    Ok((received, held))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_json_count_and_texts_do_not() {
        let values = |json: &str| (parsed_bytes(json.as_bytes()) - json.len()) / VALUE_BYTES;
        for (json, number) in [
            ("1", 1),
            (r#""a, [b]: {c}""#, 1),
            (r#""\", [""#, 1),
            (r#""\\",1"#, 2),
            ("[0,0,0]", 4),
            (r#"{"a":{"b":"c,d"},"e":[]}"#, 8),
            ("\"", 1),
        ] {
            assert_eq!(values(json), number, "{json}");
        }
    }

    #[test]
    fn a_key_leaves_a_quarter_of_the_bytes_in_flight_to_others() {
        let options = Options { max_body: 100, ..Options::new("tiny") };
        let limits = Limits { has_keys: true, ..Limits::default() };
        let in_flight = BytesInFlight::new(&options, &limits);
        let quarter = MAX_BYTES_IN_FLIGHT / 4;
        let crowd: Vec<HeldBytes> =
            (0..3).map(|_| in_flight.held_by("crowd").beside(quarter).unwrap()).collect();
        let refused = in_flight.held_by("crowd").beside(1).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (503, Some(1)));
        let mut other = in_flight.held_by("other").beside(quarter).unwrap();
        assert!(other.resize(quarter + 1).is_err(), "all of them are taken");
        drop((crowd, other));
        assert_eq!(in_flight.all(), 0);
        in_flight.held_by("crowd").beside(3 * quarter).unwrap();
        let values = vec![b','; 3 * quarter / VALUE_BYTES + 1];
        let refused = in_flight.held_by("crowd").resize_to_parsed(&values).unwrap_err();
        assert_eq!(refused.status.as_u16(), 413, "it would never have room");
    }
}
