//! Ids of requests, by which logs and responses tell of them.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::random::random_id;

/// Header of a request's id, in logs and responses.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The id of a request: the one that its headers give, if that is short and harmless, or else a new one.
pub fn request_id(headers: &HeaderMap) -> HeaderValue {
    let is_valid = |id: &&HeaderValue| {
        let is_allowed = |b: &u8| b.is_ascii_alphanumeric() || b"-_.".contains(b);
        (1..=64).contains(&id.len()) && id.as_bytes().iter().all(is_allowed)
    };
    headers.get(REQUEST_ID).filter(is_valid).cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&random_id("req-")).unwrap_or(HeaderValue::from_static("req"))
    })
}
