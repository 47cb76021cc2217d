//! Extractors of requests: the tenant, and a body within the server's limits, of JSON or as it is.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;

use crate::api_error::{ApiError, Result};
use crate::app::App;
use crate::body;
pub(super) use crate::body::HeldBytes;
use crate::tenant::Tenant;

/// Most bytes of a body that is parsed on the thread that received it.
const SMALL_BODY: usize = 64 << 10;

impl FromRequestParts<App> for Tenant {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Tenant> {
        app.tenant(&parts.headers)
    }
}

/// The text in the path of a route.
pub(super) struct PathText(pub(super) String);

impl FromRequestParts<App> for PathText {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<PathText> {
        // A path may hold bytes that are no UTF-8.
        let text = Path::<String>::from_request_parts(parts, app).await;
        text.map(|Path(text)| PathText(text))
            .map_err(|error| ApiError::new(error.status(), error.body_text()))
    }
}

/// A body of JSON, within the server's limits on bytes and time. The bytes that it takes, its values included, count among those in flight until the
/// request is preprocessed: they go with its work.
pub(super) struct Json<T>(pub(super) T, pub(super) HeldBytes);

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request<Body>, app: &App) -> Result<Json<T>> {
        // A browser lets pages of other origins send other content types without a preflight.
        if !has_type(request.headers(), "application/json") {
            let message = "the body must be application/json, and its content-type say so";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let tenant = app.tenant(request.headers())?;
        let (bytes, mut held) = receive(request, app, &tenant).await?;
        let (is_small, deadline) = (bytes.len() <= SMALL_BODY, app.deadline(held.since()));
        // The parsed value may take many times the bytes of the body.
        let parse = move || {
            held.resize_to_parsed(&bytes)?;
            Ok(Json(parse(&bytes)?, held))
        };
        if is_small { parse() } else { app.preprocess(tenant.namespace(), deadline, parse).await }
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let field = Some(error.path().to_string()).filter(|path| path != ".");
        refused(field.as_deref(), &error.into_inner())
    })?;
    json.end().map_err(|error| refused(None, &error))?;
    Ok(value)
}

/// The error of a body that is no JSON, or whose `field` does not take its value.
fn refused(field: Option<&str>, error: &serde_json::Error) -> ApiError {
    if !error.is_data() {
        let message = format!("the body is no JSON: {error}");
        return ApiError::new(StatusCode::BAD_REQUEST, message).with_code("invalid_json");
    }
    // Clients that write the body themselves know its fields and not its columns.
    let (reason, place) = (error.to_string(), format!(" at line {} column {}", error.line(), error.column()));
    let reason = reason.strip_suffix(&place).unwrap_or(&reason);
    let reason = match reason.rsplit_once(", expected ") {
        Some((found, expected)) => format!("{found}, expected {}", in_words_of_json(expected)),
        None => reason.to_owned(),
    };
    match field {
        Some(field) if reason.starts_with(field) => ApiError::field(field, reason),
        Some(field) => ApiError::field(field, format!("{field}: {reason}")),
        None => {
            let message = format!("the body is not what this route takes: {reason}");
            ApiError::new(StatusCode::BAD_REQUEST, message)
        }
    }
}

/// The type that an error expects, by its name in JSON.
fn in_words_of_json(expected: &str) -> &str {
    match expected {
        "f32" => "a number",
        "u32" => "a whole number of at least 0",
        "a map" => "an object",
        "a sequence" => "a list",
        of if of.starts_with("struct ") || of.starts_with("internally tagged enum ") => "an object",
        other => other,
    }
}

/// Whether the content type is this one, whatever its parameters.
pub(super) fn has_type(headers: &HeaderMap, wanted: &str) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    given.is_some_and(|given| given.to_ascii_lowercase().starts_with(wanted))
}

/// The bytes of a tenant's body, within the server's limits on bytes and time. They count among those in flight.
///
/// # Errors
/// If the body is too large, breaks off or arrives too slowly, or too many bytes are arriving.
pub(super) async fn receive(
    request: Request<Body>,
    app: &App,
    tenant: &Tenant,
) -> Result<(Vec<u8>, HeldBytes)> {
    let held = app.state.bytes_in_flight.held_by(tenant.namespace());
    body::receive(request, &app.state.options, held).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::request::CompletionRequest;

    #[test]
    fn values_of_a_wrong_type_name_their_field() {
        for (body, field, message) in [
            (
                r#"{"temperature": "hot"}"#,
                "temperature",
                r#"temperature: invalid type: string "hot", expected a number"#,
            ),
            (
                r#"{"max_tokens": "5"}"#,
                "max_tokens",
                r#"max_tokens: invalid type: string "5", expected a JSON number"#,
            ),
            (r#"{"n": 1.5}"#, "n", "n: invalid value: 1.5, expected a whole number"),
            (
                r#"{"logit_bias": [1]}"#,
                "logit_bias",
                "logit_bias: invalid type: sequence, expected an object",
            ),
            (
                r#"{"stream_options": true}"#,
                "stream_options",
                "stream_options: invalid type: boolean `true`, expected an object",
            ),
            (r#"{"response_format": "json"}"#, "response_format", "expected an object"),
            (
                r#"{"response_format": {"type": "xml"}}"#,
                "response_format.type",
                "unknown variant `xml`, expected one of `text`",
            ),
            (r#"{"messages": "hi"}"#, "messages", r#"messages: invalid type: string "hi", expected a list"#),
            (
                r#"{"messages": [{"role": "user"}, {"content": "x"}]}"#,
                "messages[1]",
                "messages[1]: missing field `role`",
            ),
            (r#"{"messages": [{"role": 1}]}"#, "messages[0].role", "expected a string"),
            (r#"{"stop": 1}"#, "stop", "stop takes a text or a list of texts"),
        ] {
            let error = parse::<CompletionRequest>(body.as_bytes()).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(field), None), "{body} {error}");
            assert!(
                error.message.contains(message) && !error.message.contains(" at line "),
                "{body} {error}"
            );
        }
    }

    #[test]
    fn bodies_that_are_no_json_are_told_from_those_of_a_wrong_type() {
        for body in ["", "{", "{\"n\": 1}}", "{\"n\" 1}", "hello"] {
            let error = parse::<CompletionRequest>(body.as_bytes()).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (None, Some("invalid_json")), "{body} {error}");
        }
        for body in ["[]", "\"x\"", "null"] {
            let error = parse::<CompletionRequest>(body.as_bytes()).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (None, None), "{body} {error}");
            assert!(error.message.ends_with("expected an object"), "{body} {error}");
        }
    }
}
