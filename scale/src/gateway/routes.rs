//! The gateway's routes: its own health, metrics and workers, and all of Refrain's, which workers answer.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse as _;
use axum::routing::get;
use futures_util::StreamExt as _;
use percent_encoding::percent_decode_str;
use refrain_server::{ApiError, REQUEST_ID, RequestSpan, TENANT_HEADER, receive, request_id, sign_tenant};
use serde_json::json;
use tracing::Instrument as _;

use super::Gateway;
use super::broadcast::is_for_all;
use super::peek::{self, Peek};
use super::plan::{Planned, route as plan_route};
use super::proxy::{Asked, DOCUMENTS, Outgoing, end_to_end};

/// Paths that are answered without an API key, besides `/` and those that the page loads.
const PUBLIC: [&str; 2] = ["/v1/methods", "/openapi.json"];

/// Routes of a model that answer no prompt, whose bodies name it all the same.
const OF_A_MODEL: [&str; 3] = ["/tokenize", "/detokenize", DOCUMENTS];

/// Bytes of a body that are taken for a token of the prompt where no worker has counted them: those of English text.
const BYTES_PER_TOKEN: usize = 4;

/// The beginning of a form's type.
const FORM: &[u8] = b"multipart/";

/// All routes of a gateway.
pub(crate) fn router(gateway: Gateway) -> Router {
    let router = Router::new()
        .route("/health", get(async || axum::Json(json!({ "status": "ok" }))))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/workers", get(workers))
        .fallback(pass_on);
    let router = match gateway.0.options.cors() {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(from_fn_with_state(gateway.clone(), trace_request)).with_state(gateway)
}

/// Gives a request on any route an id and a span, counts and logs its status, and refuses one to a name that is not this gateway's.
async fn trace_request(
    State(gateway): State<Gateway>,
    mut request: Request<Body>,
    next: Next,
) -> Response<Body> {
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let (target, requests) = ((request.method(), request.uri().path()), gateway.0.metrics.requests.clone());
    let under_way = RequestSpan::new(id.to_str().unwrap_or_default(), "", target, requests);
    let mut response = match gateway.0.options.check_host(request.headers()) {
        Ok(()) => next.run(request).instrument(under_way.span.clone()).await,
        Err(error) => error.into_response(),
    };
    under_way.respond(response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Whether the body is a form of files. Types are compared without regard to case, as browsers and workers do.
fn is_form(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).map_or(&[][..], HeaderValue::as_bytes);
    kind.get(..FORM.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(FORM))
}

/// Whether there is a worker that takes requests.
async fn ready(State(gateway): State<Gateway>) -> Response<Body> {
    if gateway.0.fleet.ids().is_empty() {
        return (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({ "status": "no worker" })))
            .into_response();
    }
    axum::Json(json!({ "status": "ready" })).into_response()
}

async fn metrics(State(gateway): State<Gateway>) -> Response<Body> {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], gateway.0.metrics.text(&gateway.0.fleet)).into_response()
}

/// The workers with what is known of each. Keys of chunks are not told, but a digest of them.
async fn workers(State(gateway): State<Gateway>, headers: HeaderMap) -> Response<Body> {
    match gateway.tenant("/workers", &headers) {
        Ok(_) => axum::Json(gateway.0.fleet.status()).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn pass_on(State(gateway): State<Gateway>, request: Request<Body>) -> Response<Body> {
    let (started, under_way) = (Instant::now(), gateway.0.metrics.begin());
    let handled = tokio::select! {
        biased;
        handled = gateway.handle(request) => handled,
        // A response that has begun is a stream, which says so by itself.
        () = gateway.0.stopping.cancelled() => Err(ApiError::shutting_down()),
    };
    let mut response = handled.unwrap_or_else(|error| error.into_response());
    gateway.0.metrics.responded(started.elapsed());
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.map(|body| {
        // The request is under way until its body was sent.
        let pieces = body.into_data_stream().map(move |piece| {
            let _ = &under_way;
            piece
        });
        Body::from_stream(pieces)
    })
}

/// A seed for a request that gives none: like those that workers draw.
fn random_seed() -> u32 {
    let mut bits = [0; 4];
    // Without random bits, requests that give no seed are answered alike.
    let _ = getrandom::fill(&mut bits);
    u32::from_le_bytes(bits)
}

impl Gateway {
    async fn handle(&self, request: Request<Body>) -> Result<Response<Body>, ApiError> {
        let options = &self.0.options;
        let (path, headers) = (request.uri().path().to_owned(), request.headers());
        if is_form(headers) {
            // A browser sends a form of another origin without asking first.
            options.check_origin(headers)?;
        }
        if path.starts_with("/internal/") {
            let message = format!("there is no path {path:?}");
            return Err(ApiError::new(StatusCode::NOT_FOUND, message).with_code("not_found"));
        }
        let (tenant, namespace) = self.tenant(&path, headers)?;
        let mut request = self.outgoing(request, (&tenant, &namespace)).await?;
        if is_for_all(&request.method, &path) {
            return self.broadcast(&request).await;
        }
        if request.method == Method::GET && path == "/v1/models" {
            return self.models(&request).await;
        }
        let (mut planned, mut chat, mut is_repeatable) = (Planned::default(), None, false);
        let mut model = path
            .strip_prefix("/v1/models/")
            .map(|name| percent_decode_str(name).decode_utf8_lossy().into_owned());
        let is_post = request.method == Method::POST;
        if is_post && OF_A_MODEL.contains(&path.as_str()) {
            model = Peek::of(&request.body).model().map(str::to_owned);
        }
        if request.is_ingest() {
            planned.plan.prompt_tokens = request.body.len() / BYTES_PER_TOKEN;
        }
        if let Some(route) = plan_route(&path).filter(|_| is_post) {
            let peek = Peek::of(&request.body);
            model = peek.model().map(str::to_owned);
            chat = peek::chat(&request.body, &tenant);
            if peek.has_documents() {
                planned = self.plan(route, &tenant, (peek.model(), &request.body)).await;
            }
            if planned.plan.prompt_tokens == 0 {
                planned.plan.prompt_tokens = request.body.len() / BYTES_PER_TOKEN;
            }
            if let Some(body) = peek.seeded(&request.body, random_seed).filter(|_| peek.streams()) {
                (request.body, is_repeatable) = (body, true);
            }
        }
        self.answer(&Arc::new(Asked { request, model, chat, planned, is_repeatable })).await
    }

    /// The signed tenant of a request, which holds the API key that it shows, and the namespace of that key.
    ///
    /// # Errors
    /// If a key is needed, and the request shows none that is accepted.
    fn tenant(&self, path: &str, headers: &HeaderMap) -> Result<(HeaderValue, String), ApiError> {
        let options = &self.0.options;
        let is_public = path == "/" || path.starts_with("/page/") || PUBLIC.contains(&path);
        let (name, namespace) = match is_public || options.api_keys.is_empty() {
            true => (String::new(), String::new()),
            false => {
                let (name, key) = options.api_keys.shown(headers)?;
                (name.to_owned(), self.0.key.namespace(Some(key)))
            }
        };
        let signed = sign_tenant(&self.0.key, &name, &namespace);
        let signed = HeaderValue::from_str(&signed).map_err(|_| {
            let message = format!("the name of API key {name:?} has characters that no header may have");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
        })?;
        Ok((signed, namespace))
    }

    /// The request as workers get it: with the signed tenant instead of the API key.
    ///
    /// # Errors
    /// If the body is too large, breaks off or arrives too slowly, or there are too many bytes of bodies, of the tenant or of all.
    async fn outgoing(
        &self,
        request: Request<Body>,
        (tenant, namespace): (&HeaderValue, &str),
    ) -> Result<Outgoing, ApiError> {
        let (method, mut headers) = (request.method().clone(), end_to_end(request.headers().clone()));
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let held = self.0.bytes_in_flight.held_by(namespace);
        let (body, held) = receive(request, &self.0.options, held).await?;
        for name in [header::AUTHORIZATION, header::ORIGIN, header::EXPECT, header::HOST] {
            headers.remove(name);
        }
        // A client's own value is no signature.
        headers.insert(TENANT_HEADER, tenant.clone());
        Ok(Outgoing { method, target, headers, body: body.into(), _held: Arc::new(held) })
    }
}
