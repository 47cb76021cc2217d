//! Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the status that fits.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use refrain_engine::Error as EngineError;
use serde_json::{Value, json};

/// Result with [`Problem`].
pub(crate) type Result<T> = std::result::Result<T, Problem>;

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    /// Seconds after which it is worth trying again.
    pub(crate) retry_after: Option<u64>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Problem {
        Problem { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// The request is wrong; `param` names the field.
    pub(crate) fn field(param: &str, message: impl Into<String>) -> Problem {
        Problem { param: Some(param.to_owned()), ..Problem::new(StatusCode::BAD_REQUEST, message) }
    }

    /// More is asked for than is allowed.
    pub(crate) fn too_large(message: impl Into<String>) -> Problem {
        Problem { code: Some("too_large"), ..Problem::new(StatusCode::PAYLOAD_TOO_LARGE, message) }
    }

    /// The server takes no more work.
    pub(crate) fn stopping() -> Problem {
        let message = "the server is shutting down";
        Problem { retry_after: Some(5), ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    pub(crate) fn not_found(what: &str, name: &str) -> Problem {
        Problem {
            code: Some("not_found"),
            ..Problem::new(StatusCode::NOT_FOUND, format!("there is no {what} {name:?}"))
        }
    }

    /// Something failed here; what, is logged and not told.
    pub(crate) fn internal(error: &dyn std::fmt::Display) -> Problem {
        tracing::error!(%error, "a request failed");
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the server failed to answer; its log says why")
    }

    pub(crate) fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<EngineError> for Problem {
    fn from(error: EngineError) -> Problem {
        let message = error.to_string();
        match error {
            EngineError::PromptTooLong { prompt, answer, context } => Problem {
                code: Some("context_length_exceeded"),
                ..Problem::field(
                    "messages",
                    format!(
                        "the prompt has {prompt} tokens and the answer may take {answer}, but the model's context is \
                         {context} tokens: send fewer documents or messages, or a lower max_tokens"
                    ),
                )
            },
            EngineError::EmptyQuestion => {
                Problem::field("messages", "the last message is empty: ask something")
            }
            EngineError::Sampling { option, .. } => Problem::field(option, message),
            EngineError::Fusion(_) | EngineError::Eviction(_) => Problem::field("refrain", message),
            // The prompt is what it depends on: a template may refuse an order of roles.
            EngineError::Model(_) => Problem::field("messages", message),
            error => Problem::internal(&error),
        }
    }
}
