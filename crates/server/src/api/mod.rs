//! The routes, and what all of them do: let in or not, read bodies within bounds, note who asked what and how it went.

mod answer;
mod asked;
mod documents;
mod other;

pub(crate) use documents::Ingest;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tracing::{Instrument as _, Span};

use crate::app::{App, Caller};
use crate::error::Problem;

/// Header of a request's name, in logs and answers.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// All routes of a server.
pub fn router(app: App) -> Router {
    let router = Router::new()
        .route("/v1/chat/completions", post(answer::chat))
        .route("/v1/completions", post(answer::completions))
        .route("/v1/models", get(other::models))
        .route("/v1/models/{*model}", get(other::model))
        .route("/v1/documents", get(documents::list).post(documents::add))
        .route("/v1/documents/{id}", get(documents::show).delete(documents::remove))
        .route("/v1/documents/{id}/pin", post(documents::pin))
        .route("/v1/methods", get(other::methods))
        .route("/health", get(other::health))
        .route("/ready", get(other::ready))
        .route("/metrics", get(other::metrics))
        .route("/openapi.json", get(other::openapi))
        .route("/", get(other::page))
        .route("/page.css", get(other::style))
        .route("/page.js", get(other::script))
        .fallback(missing)
        .method_not_allowed_fallback(not_allowed);
    let router = match cors(&app.0.options.cors) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(from_fn_with_state(app.clone(), note)).with_state(app)
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    let allowed = match origins {
        [] => return None,
        origins if origins.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        origins => AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    let methods = [Method::GET, Method::POST, Method::DELETE];
    // Clients send headers of their own.
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods(methods);
    let layer = layer.allow_headers(AllowHeaders::mirror_request());
    Some(layer.expose_headers([REQUEST_ID, header::RETRY_AFTER]))
}

async fn missing(uri: Uri) -> Problem {
    Problem::not_found("path", uri.path())
}

async fn not_allowed(method: Method, uri: Uri) -> Problem {
    let message = format!("{} takes no {method}", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// Gives every request a name, and notes how it went: never what was said.
async fn note(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let is_id = |id: &HeaderValue| {
        id.len() <= 64 && id.as_bytes().iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
    };
    let id = request.headers().get(REQUEST_ID).filter(|id| !id.is_empty() && is_id(id)).cloned();
    let id = id.unwrap_or_else(|| {
        HeaderValue::from_str(&random_id("req")).unwrap_or(HeaderValue::from_static("req"))
    });
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let who = app.caller(request.headers()).map_or_else(|_| "?".to_owned(), |caller| caller.name);
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default(), who, %method, path);
    let mut response = match app.check_host(request.headers()) {
        Ok(()) => next.run(request).instrument(span.clone()).await,
        Err(problem) => problem.into_response(),
    };
    let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
    span.in_scope(|| tracing::info!(status, ms, "begun"));
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// A name that nobody else has: `KIND-` and 24 hexadecimal digits.
pub(crate) fn random_id(kind: &str) -> String {
    let mut bits = [0; 12];
    // Without random bits names are not unique, and nothing else is lost.
    let _ = getrandom::fill(&mut bits);
    format!("{kind}-{}", bits.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

impl FromRequestParts<App> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Caller, Problem> {
        app.caller(&parts.headers)
    }
}

/// Bytes of a body that is parsed where it arrives.
const SMALL: usize = 64 << 10;
/// Bytes of all bodies that are arriving, or twice the most of one if that is more.
const BODIES: usize = 256 << 20;

/// What has come of a body, counted among those of all others.
struct Arriving<'a> {
    all: &'a AtomicUsize,
    bytes: Vec<u8>,
}

impl Arriving<'_> {
    /// Takes a piece, and says how many bytes there are of all bodies.
    fn take(&mut self, piece: &[u8]) -> usize {
        self.bytes.extend_from_slice(piece);
        self.all.fetch_add(piece.len(), Relaxed) + piece.len()
    }

    /// All that has come, counted no longer.
    fn release(&mut self) -> Vec<u8> {
        self.all.fetch_sub(self.bytes.len(), Relaxed);
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// A body of JSON, within the server's bounds of bytes and time.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request<Body>, app: &App) -> Result<Json<T>, Problem> {
        let (most, time) = (app.0.options.body, app.0.options.arrival);
        let too_large = || Problem::too_large(format!("the body may have {most} bytes"));
        // Pages of other origins may send other types without asking.
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("application/json")) {
            let message = "the body must be application/json, and its content-type say so";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > most as u64) {
            return Err(too_large());
        }
        let mut arriving = Arriving { all: &app.0.arriving, bytes: Vec::new() };
        let most_of_all = BODIES.max(2 * most);
        let read = async {
            let mut body = request.into_body().into_data_stream();
            while let Some(piece) = body.next().await {
                let piece = piece.map_err(|error| {
                    Problem::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))
                })?;
                if arriving.bytes.len() + piece.len() > most {
                    return Err(too_large());
                }
                if arriving.take(&piece) > most_of_all {
                    let message = "too many large requests are arriving";
                    let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, message);
                    return Err(Problem { retry_after: Some(1), ..problem });
                }
            }
            Ok(())
        };
        let late =
            |_| Problem::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {time:?}"));
        tokio::time::timeout(time, read).await.map_err(late)??;
        let parse = |bytes: &[u8]| {
            serde_json::from_slice(bytes).map(Json).map_err(|error| Problem {
                code: Some("invalid_json"),
                ..Problem::new(
                    StatusCode::BAD_REQUEST,
                    format!("the body is not what is asked for here: {error}"),
                )
            })
        };
        if arriving.bytes.len() <= SMALL {
            return parse(&arriving.bytes);
        }
        // What is made of a body may take many times its bytes: few at a time.
        let bytes = arriving.release();
        app.prepared(move || parse(&bytes)).await
    }
}

/// Does what takes its time on a thread that may wait.
pub(crate) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let span = Span::current();
    let done = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    done.map_err(|error| Problem::internal(&error))?
}

/// As [`axum::Json`], for answers.
pub(crate) fn json(value: impl serde::Serialize) -> Response {
    axum::Json(value).into_response()
}
