//! `/v1/documents`: brought once, prefilled once, asked about ever after.

use std::convert::Infallible;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use refrain_engine::{Document, IngestReport};
use refrain_store::{ChunkKey, Scope};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::answer::{data, done};
use super::{Json, json as answer_json};
use crate::app::{App, Caller, Method, title};
use crate::error::{Problem, Result};
use crate::library::Kept;
use crate::schedule::{Event, Work};

/// One document, or several.
#[derive(Debug, Deserialize)]
pub(super) struct Brought {
    #[serde(default)]
    title: String,
    text: Option<String>,
    documents: Option<Vec<Document>>,
    /// Whether progress is told by server-sent events.
    #[serde(default)]
    stream: bool,
    /// The method that they are to be ready for; the server's own if it is not said.
    method: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Page {
    limit: Option<usize>,
    after: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Pin {
    #[serde(default = "yes")]
    pinned: bool,
}

fn yes() -> bool {
    true
}

/// Most documents of a page.
const PAGE: usize = 1000;

/// `POST /v1/documents`
pub(super) async fn add(
    State(app): State<App>,
    caller: Caller,
    Json(brought): Json<Brought>,
) -> Result<Response> {
    let Brought { title, text, documents, stream, method } = brought;
    let documents = match (text, documents) {
        (Some(text), None) => vec![Document { title, text }],
        (None, Some(documents)) => documents,
        _ => return Err(Problem::field("text", "give a text, or documents: a list of {title, text}")),
    };
    let most = app.0.options.documents;
    if documents.is_empty() || documents.len() > most {
        return Err(Problem::field("documents", format!("give 1 to {most} documents")));
    }
    if let Some(index) = documents.iter().position(|document| document.text.trim().is_empty()) {
        return Err(Problem::field(&format!("documents[{index}].text"), "a document has no text"));
    }
    let (method, _) = app.chosen(method.as_deref(), None, &[])?;
    let (events, received) = unbounded_channel();
    let work = Work::Ingest { documents: documents.clone(), method: method.built.clone() };
    app.0.scheduler.submit(caller.engine.clone(), work, events)?;
    if !stream {
        return keep(app, caller, (documents, method.built), received).await.map(answer_json);
    }
    let events = stream::unfold(
        Some((app, caller, (documents, method.built), received)),
        |state| async move {
            let (app, caller, documents, mut received) = state?;
            match received.recv().await {
                Some(Event::Ingested(progress)) => {
                    let value = json!({ "object": "document.progress", "done": progress.done, "total": progress.total });
                    Some((vec![data(&value)], Some((app, caller, documents, received))))
                }
                Some(Event::Kept(report)) => {
                    let kept =
                        kept(app, caller, documents, *report).await.unwrap_or_else(|problem| problem.json());
                    Some((vec![data(&kept), done()], None))
                }
                Some(Event::Failed(problem)) => Some((vec![data(&problem.json()), done()], None)),
                Some(Event::Token(_) | Event::Done(_)) | None => None,
            }
        },
    );
    let events = futures_util::StreamExt::flat_map(events, |sent| {
        stream::iter(sent.into_iter().map(Ok::<_, Infallible>))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

/// Waits until documents are prefilled, and keeps them.
pub(crate) async fn keep(
    app: App,
    caller: Caller,
    documents: (Vec<Document>, Method),
    mut received: UnboundedReceiver<Event>,
) -> Result<Value> {
    while let Some(event) = received.recv().await {
        match event {
            Event::Kept(report) => return kept(app, caller, documents, *report).await,
            Event::Failed(problem) => return Err(problem),
            _ => {}
        }
    }
    Err(Problem::internal(&"documents were lost"))
}

/// Enters documents that are prefilled into library and search.
async fn kept(
    app: App,
    caller: Caller,
    (documents, method): (Vec<Document>, Method),
    report: IngestReport,
) -> Result<Value> {
    let work = move || {
        let mut all = Vec::with_capacity(documents.len());
        for document in &documents {
            let chunks = caller.engine.chunks(std::slice::from_ref(document))?;
            let tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
            let keys = caller.engine.keys_of(document, method.as_ref())?;
            let keys = keys.iter().map(ToString::to_string).collect();
            all.push(app.0.library.put(caller.namespace(), document, (tokens, keys))?);
        }
        app.index(caller.namespace(), &all)?;
        let told: Vec<Value> = all.iter().map(told).collect();
        Ok(json!({ "object": "list", "data": told, "ingest": report }))
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| Problem::internal(&error))?
}

/// A document without its text.
fn told(kept: &Kept) -> Value {
    json!({
        "id": kept.id, "object": "document", "title": title(&kept.document), "created": kept.created,
        "pinned": kept.pinned, "bytes": kept.document.text.len(), "tokens": kept.tokens, "chunks": kept.chunks.len(),
    })
}

/// `GET /v1/documents`
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    page: std::result::Result<Query<Page>, QueryRejection>,
) -> Result<Response> {
    let Query(page) = page.map_err(|error| Problem::field("limit", error.body_text()))?;
    let all = tokio::task::spawn_blocking(move || app.0.library.list(caller.namespace()));
    let all = all.await.map_err(|error| Problem::internal(&error))??;
    let after = page.after.unwrap_or_default();
    let most = page.limit.unwrap_or(PAGE).clamp(1, PAGE);
    let left = all.iter().filter(|kept| kept.id > after);
    let shown: Vec<Value> = left.clone().take(most).map(told).collect();
    let more = left.count() > shown.len();
    let last = shown.last().map(|kept| kept["id"].clone());
    Ok(answer_json(json!({ "object": "list", "data": shown, "has_more": more, "last_id": last })))
}

/// `GET /v1/documents/{id}`
pub(super) async fn show(State(app): State<App>, caller: Caller, Path(id): Path<String>) -> Result<Response> {
    let kept = tokio::task::spawn_blocking(move || app.0.library.get(caller.namespace(), &id));
    let kept = kept.await.map_err(|error| Problem::internal(&error))??;
    let mut value = told(&kept);
    (value["text"], value["chunk_keys"]) = (json!(kept.document.text), json!(kept.chunks));
    Ok(answer_json(value))
}

/// `DELETE /v1/documents/{id}`
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Response> {
    let work = move || {
        let (kept, own) = app.0.library.remove(caller.namespace(), &id)?;
        app.0.search.remove(caller.namespace(), &id)?;
        for key in keys(&own) {
            caller.engine.store().remove(&key).map_err(|error| Problem::internal(&error))?;
        }
        Ok(answer_json(json!({ "id": kept.id, "object": "document.deleted", "deleted": true })))
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| Problem::internal(&error))?
}

/// `POST /v1/documents/{id}/pin`
pub(super) async fn pin(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Json(Pin { pinned }): Json<Pin>,
) -> Result<Response> {
    let work = move || {
        let kept = app.0.library.pin(caller.namespace(), &id, pinned)?;
        let store = caller.engine.store();
        let there =
            store.keys(Scope::Namespace(caller.namespace())).map_err(|error| Problem::internal(&error))?;
        for key in keys(&kept.chunks).filter(|key| there.contains(key)) {
            store.pin(&key, pinned).map_err(|error| {
                Problem::new(
                    StatusCode::INSUFFICIENT_STORAGE,
                    format!("the chunks cannot be pinned: {error}"),
                )
            })?;
        }
        Ok(answer_json(told(&kept)))
    };
    tokio::task::spawn_blocking(work).await.map_err(|error| Problem::internal(&error))?
}

fn keys(names: &[String]) -> impl Iterator<Item = ChunkKey> {
    names.iter().filter_map(|name| name.parse().ok())
}
