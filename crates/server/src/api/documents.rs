//! `/v1/documents`: documents that are prefilled once and asked about later.

use std::convert::Infallible;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use refrain::corpus::{Corpus, StoredDocument};
use refrain::engine::IngestReport;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::events::{end_of_stream, event_stream, json_event};
use super::extract::{Json, PathText};
use super::files::{self, FileFailure, Read};
use super::request::read_from_objects;
use super::upload::{AddDocumentsRequest, FileForm, Upload};
use crate::api_error::{ApiError, ErrorResponse, Result};
use crate::app::App;
use crate::ingest::{Ingest, Ingested};
use crate::job::Event;
use crate::tenant::Tenant;

/// Most documents of a page, and their number by default.
const MAX_PAGE: usize = 1000;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PageQuery {
    /// Most documents of the page.
    #[param(minimum = 1, maximum = 1000, default = 1000)]
    limit: Option<usize>,
    /// Id of the document before the page: the `last_id` of the page before it.
    after: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct PinRequest {
    #[schema(default = true)]
    pinned: Option<bool>,
}

read_from_objects!(PinRequest);

/// A stored document.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DocumentResponse {
    id: String,
    /// `document`
    object: &'static str,
    /// The title, 1,000 characters of it at most, or 80 of the first line of a text without one.
    title: String,
    /// Seconds since 1970.
    created: u64,
    pinned: bool,
    /// Bytes of the text.
    bytes: u64,
    tokens: usize,
    /// Number of the chunks that it is cut into.
    chunks: usize,
    /// Whether the object store has the document, so that every server which shares it answers for the document. Absent on a server that
    /// shares no documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<bool>,
}

/// A stored document with its text.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DocumentTextResponse {
    #[serde(flatten)]
    document: DocumentResponse,
    text: String,
    /// Keys of its chunks in the chunk store.
    chunk_keys: Vec<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DocumentListResponse {
    /// `list`
    object: &'static str,
    data: Vec<DocumentResponse>,
    /// Whether further documents follow.
    has_more: bool,
    /// Id of the last document of the page.
    #[schema(required = true)]
    last_id: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AddDocumentsResponse {
    /// `list`
    object: &'static str,
    data: Vec<DocumentResponse>,
    ingest: IngestResponse,
    /// The files that could not be read.
    failures: Vec<FileFailure>,
}

/// Counts of an ingest.
#[derive(Debug, Serialize, ToSchema)]
struct IngestResponse {
    documents: usize,
    /// Chunks of the documents.
    chunks: usize,
    /// Chunks that were computed; the others were in the chunk store.
    computed: usize,
    /// Chunks among them that were in the store and lacked only a method's statistics.
    summarised: usize,
    /// Tokens of all chunks.
    tokens: usize,
    computed_tokens: usize,
    /// Bytes that were added to the chunk store.
    bytes: u64,
    seconds: f64,
    /// Whether chunks could not be written to disk.
    not_stored: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ProgressResponse {
    /// `document.progress`
    object: &'static str,
    /// Tokens that are computed.
    done: usize,
    /// Tokens to compute.
    total: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DeletedResponse {
    id: String,
    /// `document.deleted`
    object: &'static str,
    deleted: bool,
}

impl From<StoredDocument> for DocumentResponse {
    fn from(stored: StoredDocument) -> DocumentResponse {
        let StoredDocument { id, title, created, pinned, bytes, tokens, published, .. } = stored;
        let chunks = stored.chunks as usize;
        DocumentResponse { id, object: "document", title, created, pinned, bytes, tokens, chunks, published }
    }
}

impl AddDocumentsResponse {
    fn new(ingested: Ingested, failures: Vec<FileFailure>) -> AddDocumentsResponse {
        // Other tenants' chunks that were evicted or repaired, and paths of files, are not the tenant's business.
        let IngestReport { documents, chunks, computed, summarised, tokens, computed_tokens, .. } =
            ingested.report;
        let IngestReport { bytes, seconds, .. } = ingested.report;
        let not_stored = ingested.report.not_stored.is_some();
        AddDocumentsResponse {
            object: "list",
            data: ingested.documents.into_iter().map(DocumentResponse::from).collect(),
            ingest: IngestResponse {
                documents,
                chunks,
                computed,
                summarised,
                tokens,
                computed_tokens,
                bytes,
                seconds,
                not_stored,
            },
            failures,
        }
    }
}

/// Prefill documents and store them. Of several files, those that can be read are stored.
///
/// A form is taken from programs, and from pages of the server's own origin or an allowed one.
#[utoipa::path(
    post, path = "/v1/documents",
    request_body(content((AddDocumentsRequest = "application/json"), (FileForm = "multipart/form-data"))),
    responses(
        (status = 200, description = "The documents, or with `stream` server-sent events: progress, then the documents, then `[DONE]`", content(
            (AddDocumentsResponse = "application/json"), (ProgressResponse = "text/event-stream"),
        )),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, is shutting down, has no room, or took too long", body = ErrorResponse),
    ),
)]
pub(super) async fn add(
    State(app): State<App>,
    tenant: Tenant,
    Upload { given, held, stream, method }: Upload,
) -> Result<Response> {
    let method = app.method("method", method.as_ref())?;
    app.state.scheduler.check_queue()?;
    let Read { documents, held, failures } = files::read(&app, &tenant, (given, held)).await?;
    let ingest = Ingest::submit(app, tenant, (documents, Some(held)), method.built).await?;
    if !stream {
        let ingested = ingest.finish(|_| ()).await?;
        return Ok(axum::Json(AddDocumentsResponse::new(ingested, failures)).into_response());
    }
    let events = stream::unfold(Some((ingest, failures)), |state| async move {
        let (mut ingest, failures) = state?;
        let last = match ingest.events.recv().await {
            Some(Event::Progress(progress)) => {
                let (done, total) = (progress.done, progress.total);
                let response = ProgressResponse { object: "document.progress", done, total };
                return Some((vec![json_event(&response)], Some((ingest, failures))));
            }
            Some(Event::Ingested(report)) => match ingest.store(*report).await {
                Ok(ingested) => json_event(&AddDocumentsResponse::new(ingested, failures)),
                Err(error) => json_event(&error.body()),
            },
            Some(Event::Failed(error)) => json_event(&error.body()),
            Some(Event::Token(_) | Event::Finished(_)) | None => json_event(&ingest.lost().body()),
        };
        Some((vec![last, end_of_stream()], None))
    });
    let events = futures_util::StreamExt::flat_map(events, |events| {
        stream::iter(events.into_iter().map(Ok::<_, Infallible>))
    });
    Ok(event_stream(events))
}

/// List one's documents, ascending by id.
#[utoipa::path(
    get, path = "/v1/documents", params(PageQuery),
    responses(
        (status = 200, description = "A page of documents", body = DocumentListResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed", body = ErrorResponse),
    ),
)]
pub(super) async fn list(
    State(app): State<App>,
    tenant: Tenant,
    page: std::result::Result<Query<PageQuery>, QueryRejection>,
) -> Result<Response> {
    let Query(page) = page.map_err(|error| ApiError::field("limit", error.body_text()))?;
    let (after, limit) = (page.after.unwrap_or_default(), page.limit.unwrap_or(MAX_PAGE));
    if !(1..=MAX_PAGE).contains(&limit) {
        return Err(ApiError::field("limit", format!("limit is 1 to {MAX_PAGE}")));
    }
    let list = move |corpus: &Corpus, tenant: &Tenant| {
        Ok(corpus.documents().list(tenant.namespace(), &after, limit)?)
    };
    let (documents, has_more) = app.on_documents(tenant, list).await?;
    let data: Vec<DocumentResponse> = documents.into_iter().map(DocumentResponse::from).collect();
    let last_id = data.last().map(|document| document.id.clone());
    Ok(axum::Json(DocumentListResponse { object: "list", data, has_more, last_id }).into_response())
}

/// Show a document with its text.
#[utoipa::path(
    get, path = "/v1/documents/{id}", params(("id" = String, Path)),
    responses(
        (status = 200, description = "The document", body = DocumentTextResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed", body = ErrorResponse),
    ),
)]
pub(super) async fn show(State(app): State<App>, tenant: Tenant, PathText(id): PathText) -> Result<Response> {
    let show = move |corpus: &Corpus, tenant: &Tenant| {
        let (documents, namespace) = (corpus.documents(), tenant.namespace());
        Ok(DocumentTextResponse {
            document: corpus.get(&tenant.engine, &id)?.into(),
            text: documents.document(namespace, &id)?.text,
            chunk_keys: documents.chunk_keys(namespace, &id)?.iter().map(ToString::to_string).collect(),
        })
    };
    Ok(axum::Json(app.on_documents(tenant, show).await?).into_response())
}

/// Remove a document and its chunks, from memory, disk and the object store.
///
/// Where a tier fails, the error's code is `removal_incomplete`, and the same request sent again deletes what is left.
#[utoipa::path(
    delete, path = "/v1/documents/{id}", params(("id" = String, Path)),
    responses(
        (status = 200, description = "The document is removed, and nothing of it is left in any tier", body = DeletedResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, or a tier still has bytes of the document", body = ErrorResponse),
    ),
)]
pub(super) async fn remove(
    State(app): State<App>,
    tenant: Tenant,
    PathText(id): PathText,
) -> Result<Response> {
    let remove = move |corpus: &Corpus, tenant: &Tenant| {
        corpus.remove(&tenant.engine, &id)?;
        Ok(DeletedResponse { id, object: "document.deleted", deleted: true })
    };
    Ok(axum::Json(app.on_documents(tenant, remove).await?).into_response())
}

/// Keep a document's chunks in the chunk store whatever room is needed, or let them be evicted again.
#[utoipa::path(
    post, path = "/v1/documents/{id}/pin", params(("id" = String, Path)), request_body = PinRequest,
    responses(
        (status = 200, description = "The document", body = DocumentResponse),
        (status = "4XX", description = "The request is refused", body = ErrorResponse),
        (status = "5XX", description = "The server failed, or the chunks cannot be pinned", body = ErrorResponse),
    ),
)]
pub(super) async fn pin(
    State(app): State<App>,
    tenant: Tenant,
    PathText(id): PathText,
    Json(PinRequest { pinned }, _held): Json<PinRequest>,
) -> Result<Response> {
    let pin = move |corpus: &Corpus, tenant: &Tenant| {
        corpus.get(&tenant.engine, &id)?;
        Ok(DocumentResponse::from(corpus.set_pinned(&tenant.engine, &id, pinned.unwrap_or(true))?))
    };
    Ok(axum::Json(app.on_documents(tenant, pin).await?).into_response())
}
