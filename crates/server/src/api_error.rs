//! Errors of requests in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the status that fits.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use refrain::corpus::Error as CorpusError;
use refrain::engine::{DeviceFailure, Error as EngineError};
use refrain::model::ModelError;
use serde::Serialize;
use utoipa::ToSchema;

/// Seconds after which an incomplete removal, or a request for what only the object store can tell, can be sent again.
const RETRY_OBJECT_STORE: u64 = 10;

/// The code of requests that a server ends or refuses since it shuts down.
const SHUTTING_DOWN: &str = "shutting_down";
/// The code of requests that a server cannot answer since its device has failed for good.
const DEVICE_FAILED: &str = "device_failed";
/// Codes of errors that lie in the server alone: another server may answer the request.
pub const SERVER_FAILURES: [&str; 2] = [SHUTTING_DOWN, DEVICE_FAILED];

/// Seconds after which a request can be sent again that the device has no memory for.
const RETRY_DEVICE: u64 = 5;

/// Seconds after which a request can be sent again that the system has no thread for.
const RETRY_THREAD: u64 = 5;

/// Tells OpenAI's clients whether to repeat a request.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// Result with [`ApiError`].
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// The reason for which a request gets no answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// The field of the request that is wrong.
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    /// Seconds after which the request can be sent again.
    pub(crate) retry_after: Option<u64>,
}

/// The body of an error.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorResponse {
    error: ErrorBody,
}

#[derive(Debug, Serialize, ToSchema)]
struct ErrorBody {
    message: String,
    /// `invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error` or `server_error`.
    r#type: &'static str,
    /// The field of the request that is wrong.
    #[schema(required = true)]
    param: Option<String>,
    /// A word for programs, such as `context_length_exceeded`.
    #[schema(required = true)]
    code: Option<&'static str>,
}

impl ApiError {
    /// An error with this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// The error with a word for programs.
    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// The request's field `param` is wrong.
    pub(crate) fn field(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.to_owned()), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
    }

    /// The error of a field under another of its names.
    pub(crate) fn renamed(self, name: &str) -> ApiError {
        let Some(param) = &self.param else { return self };
        let message = self.message.replacen(param.as_str(), name, 1);
        ApiError { message, param: Some(name.to_owned()), ..self }
    }

    /// The documents or messages need more tokens than the model's `context`, which `reason` tells. LangChain and LiteLLM know the error by the
    /// words that its message begins with.
    pub(crate) fn context_length(param: &str, context: usize, reason: &str) -> ApiError {
        let message = format!(
            "prompt is too long: this model's maximum context length is {context} tokens, but {reason}"
        );
        ApiError::field(param, message).with_code("context_length_exceeded")
    }

    /// The request exceeds one of the server's limits.
    pub(crate) fn too_large(message: impl Into<String>) -> ApiError {
        ApiError { code: Some("too_large"), ..ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message) }
    }

    /// The server takes no more requests.
    pub fn shutting_down() -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down");
        ApiError { retry_after: Some(5), ..error.with_code(SHUTTING_DOWN) }
    }

    /// The time of a request is over.
    pub(crate) fn timeout() -> ApiError {
        let message = "the request took too long";
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).with_code("timeout")
    }

    pub(crate) fn not_found(kind: &str, name: &str) -> ApiError {
        ApiError {
            code: Some("not_found"),
            ..ApiError::new(StatusCode::NOT_FOUND, format!("there is no {kind} {name:?}"))
        }
    }

    /// The server failed. The log has the reason; the client is not told it.
    pub(crate) fn internal(error: &dyn std::fmt::Display) -> ApiError {
        tracing::error!(%error, "a request failed");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the server failed to answer; its log says why")
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The word by which logs and metrics tell of the error: its code, or else its type.
    pub(crate) fn word(&self) -> &'static str {
        self.code.unwrap_or_else(|| self.kind())
    }

    pub(crate) fn body(&self) -> ErrorResponse {
        let (message, param, code) = (self.message.clone(), self.param.clone(), self.code);
        ErrorResponse { error: ErrorBody { message, r#type: self.kind(), param, code } }
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    /// The error as a response. OpenAI's clients repeat a request that failed with 5xx unless `x-should-retry` is false: one that took all of its
    /// time would do so again, and a device that has failed, or a disk that is full, stays so.
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if matches!(self.code, Some("timeout" | "device_failed" | "disk_full")) {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        let message = error.to_string();
        match error {
            // Clients that read of a prompt which is too long shorten the conversation.
            EngineError::PromptTooLong { prompt, answer, context } if prompt < context => {
                let message = format!(
                    "max_tokens is too large: {answer}, where the prompt has {prompt} of the context's {context} tokens: ask for {} or fewer",
                    context - prompt
                );
                ApiError::field("max_tokens", message)
            }
            EngineError::PromptTooLong { prompt, context, .. } => {
                let reason = format!(
                    "the prompt has {prompt}, and an answer takes at least 1: send fewer documents or messages"
                );
                ApiError::context_length("messages", context, &reason)
            }
            EngineError::EmptyQuestion => {
                ApiError::field("messages", "the messages are empty: ask something")
            }
            EngineError::Sampling { option, .. } => ApiError::field(option, message),
            EngineError::LogitBias { .. } => ApiError::field("logit_bias", message),
            EngineError::Grammar { .. } => ApiError::field("response_format", message),
            EngineError::Fusion(_) | EngineError::Eviction(_) => ApiError::field("refrain", message),
            // A chat template may refuse an order of roles.
            EngineError::Model(
                ModelError::ChatTemplate { .. }
                | ModelError::Encode { .. }
                | ModelError::ToolsIgnored
                | ModelError::UnknownTool { .. },
            ) => ApiError::field("messages", message),
            // Other requests that end leave threads.
            EngineError::Model(ModelError::TemplateThread(_)) | EngineError::Thread(_) => {
                tracing::error!(error = message, "a request has no thread");
                let message = "the server has no thread for the request: send it again in some seconds";
                ApiError {
                    code: Some("no_thread"),
                    retry_after: Some(RETRY_THREAD),
                    ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
                }
            }
            // Other requests, or other programs, may leave room in a while.
            error @ (EngineError::DeviceMemory { .. }
            | EngineError::DeviceFailure(DeviceFailure::OutOfMemory { .. })) => {
                tracing::warn!(error = message, "the device has too little memory for a request");
                // The engine's message names options of the program, which a client does not have.
                let message = match error {
                    EngineError::DeviceMemory { tokens, .. } => format!(
                        "{tokens} tokens need more memory than the server's device has free: send it again later, a shorter prompt or fewer \
                         documents, a lower max_tokens, or refrain.evict with a capacity"
                    ),
                    _ => message,
                };
                ApiError {
                    code: Some("device_out_of_memory"),
                    retry_after: Some(RETRY_DEVICE),
                    ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
                }
            }
            EngineError::DeviceFailure(_) => {
                tracing::error!(error = message, "the device has failed");
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(DEVICE_FAILED)
            }
            error => ApiError::internal(&error),
        }
    }
}

impl From<CorpusError> for ApiError {
    fn from(error: CorpusError) -> ApiError {
        let message = error.to_string();
        match error {
            CorpusError::NotFound(id) => ApiError::not_found("document", &id),
            CorpusError::NoParts(_) | CorpusError::NoPart { .. } => ApiError::field("documents", message),
            CorpusError::ContextExceeded { context } => {
                let reason = "the documents have more: send fewer, or let a search choose parts of them (\"documents\": \"search\"; \
                              a lower refrain.search finds fewer)";
                ApiError::context_length("documents", context, reason)
            }
            CorpusError::QuotaExceeded { .. } => ApiError {
                code: Some("document_quota_exceeded"),
                ..ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message)
            },
            CorpusError::DiskFull { .. } => {
                tracing::error!(
                    error = message,
                    "the disk is full, and no chunks can make room for documents"
                );
                let message = "the server's disk is full, and no chunks can make room for documents: remove documents or unpin some, or have \
                               the server's operator make room on the disk that its log names";
                ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message).with_code("disk_full")
            }
            CorpusError::RemovalIncomplete { tier, reason } => {
                tracing::error!(error = reason, "a removed document has left bytes in {tier}");
                let message = format!(
                    "the document is removed from answers and searches, and could not be deleted from {tier}: the server's log \
                     says why; send DELETE again, which is safe and deletes what is left"
                );
                ApiError {
                    code: Some("removal_incomplete"),
                    retry_after: Some(RETRY_OBJECT_STORE),
                    ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
                }
            }
            CorpusError::TooLarge { .. } => ApiError::too_large(message),
            CorpusError::ObjectStore(_) | CorpusError::Sharing(_) => {
                tracing::error!(error = message, "the object store could not be asked for a document");
                let message = "the object store cannot be asked, so whether the document is there is not known now: send the request again \
                               later; the server's log says why";
                ApiError {
                    code: Some("documents_unavailable"),
                    retry_after: Some(RETRY_OBJECT_STORE),
                    ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
                }
            }
            CorpusError::Pins(_) => {
                tracing::error!(error = message, "chunks of a document cannot be pinned or unpinned");
                let message = "the document's chunks cannot be pinned or unpinned: send the request again; the server's log says why";
                ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message)
            }
            CorpusError::Engine(error) => error.into(),
            error => ApiError::internal(&error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_blamed_for_their_own_faults_alone() {
        let failure = |message: &str| ModelError::TemplateFailed { message: message.to_owned() };
        let refusal = |message: &str| ModelError::ChatTemplate { message: message.to_owned() };
        let row = ModelError::Row { tensor: "embeddings".to_owned(), row: 9, len: 4, rows: 8, cols: 4 };
        let thread = || std::io::Error::from(std::io::ErrorKind::WouldBlock);
        for (error, status, param, retry_after) in [
            (EngineError::from(refusal("has no place for this role")), 400, Some("messages"), None),
            (ModelError::Encode { bytes: 1, message: String::new() }.into(), 400, Some("messages"), None),
            (ModelError::ToolsIgnored.into(), 400, Some("messages"), None),
            (failure("takes more than 30 seconds").into(), 500, None, None),
            (row.into(), 500, None, None),
            (ModelError::TemplateThread(thread()).into(), 503, None, Some(RETRY_THREAD)),
            (EngineError::Thread(thread()), 503, None, Some(RETRY_THREAD)),
        ] {
            let error = ApiError::from(error);
            let told = (error.status.as_u16(), error.param.as_deref(), error.retry_after);
            assert_eq!(told, (status, param, retry_after), "{error:?}");
        }
    }

    #[test]
    fn an_answer_that_is_too_long_is_no_prompt_that_is() {
        let refused = |prompt| ApiError::from(EngineError::PromptTooLong { prompt, answer: 64, context: 64 });
        let answer = refused(30).renamed("max_output_tokens");
        assert_eq!((answer.param.as_deref(), answer.code), (Some("max_output_tokens"), None));
        let message = "max_output_tokens is too large: 64, where the prompt has 30 of the context's 64 tokens: ask for 34 or fewer";
        assert_eq!(answer.message, message);
        let prompt = refused(64);
        assert_eq!(
            (prompt.param.as_deref(), prompt.code),
            (Some("messages"), Some("context_length_exceeded"))
        );
    }

    #[test]
    fn clients_are_told_of_no_options_of_the_program() {
        let device = "a GPU".to_owned();
        let error =
            ApiError::from(EngineError::DeviceMemory { device, tokens: 3, kv: 2, activations: 1, free: 1 });
        assert_eq!((error.code, error.retry_after), (Some("device_out_of_memory"), Some(RETRY_DEVICE)));
        assert!(error.message.starts_with("3 tokens need") && !error.message.contains("--"), "{error}");
    }

    #[test]
    fn an_object_store_that_cannot_be_asked_has_the_request_sent_again() {
        let error = ApiError::from(CorpusError::Sharing(String::new()));
        let message = "the object store cannot be asked, so whether the document is there is not known now: send the request again later; \
                       the server's log says why";
        assert_eq!((error.code, error.message.as_str()), (Some("documents_unavailable"), message));
        assert_eq!(error.retry_after, Some(RETRY_OBJECT_STORE));
    }

    /// The path is the operator's business alone.
    #[test]
    fn a_full_disk_is_told_with_its_remedy_and_no_request_is_sent_again() {
        let (path, source) = ("/srv/documents.redb".into(), std::io::ErrorKind::StorageFull.into());
        let error = ApiError::from(CorpusError::DiskFull { path, source });
        assert_eq!((error.status.as_u16(), error.code), (507, Some("disk_full")));
        assert!(error.message.contains("remove documents") && !error.message.contains("srv"), "{error}");
        assert_eq!(error.into_response().headers()[SHOULD_RETRY], "false");
    }
}
