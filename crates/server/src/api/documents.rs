//! `/v1/documents`: brought once, prefilled once, asked about ever after.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use refrain_engine::{Document, IngestReport};
use refrain_store::ChunkKey;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::answer::{data, done};
use super::{Json, aside, json as answer_json};
use crate::app::{App, Caller, Method, title};
use crate::error::{Problem, Result};
use crate::library::Kept;
use crate::work::{Event, Work};

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
    method: Option<Value>,
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
    let method = app.method("method", method.as_ref())?;
    app.0.scheduler.has_room()?;
    let ingest = Ingest::submit(app, caller, documents, method.built, false).await?;
    if !stream {
        return ingest.kept().await.map(answer_json);
    }
    let events = stream::unfold(Some(ingest), |state| async move {
        let mut ingest = state?;
        match ingest.received.recv().await {
            Some(Event::Ingested(progress)) => {
                let value =
                    json!({ "object": "document.progress", "done": progress.done, "total": progress.total });
                Some((vec![data(&value)], Some(ingest)))
            }
            Some(Event::Kept(report)) => {
                let kept = ingest.enter(*report).await.unwrap_or_else(|problem| problem.json());
                Some((vec![data(&kept), done()], None))
            }
            Some(Event::Failed(problem)) => Some((vec![data(&problem.json()), done()], None)),
            Some(Event::Token(_) | Event::Done(_)) | None => {
                Some((vec![data(&Problem::internal(&"documents were lost").json()), done()], None))
            }
        }
    });
    let events = futures_util::StreamExt::flat_map(events, |sent| {
        stream::iter(sent.into_iter().map(Ok::<_, Infallible>))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

/// Longer than anything takes.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Documents on their way into the store, and then into library and search.
pub(crate) struct Ingest {
    app: App,
    caller: Caller,
    cut: Vec<Cut>,
    received: UnboundedReceiver<Event>,
}

/// A document as it is cut into chunks.
struct Cut {
    document: Document,
    tokens: usize,
    /// The chunks' names in the store.
    keys: Vec<String>,
    texts: Vec<String>,
}

impl Ingest {
    /// Has documents prefilled. The server's `own` may be as many as they are, and take as long as it takes.
    pub(crate) async fn submit(
        app: App,
        caller: Caller,
        documents: Vec<Document>,
        method: Method,
        own: bool,
    ) -> Result<Ingest> {
        let (events, received) = unbounded_channel();
        let of = app.clone();
        let work = move || {
            let mut cut = Vec::with_capacity(documents.len());
            for document in &documents {
                let chunks = caller.engine.chunks(std::slice::from_ref(document))?;
                let keys = caller.engine.keys_of(&chunks, !method.summarizes().is_empty());
                cut.push(Cut {
                    document: document.clone(),
                    tokens: chunks.iter().map(|chunk| chunk.tokens.len()).sum(),
                    keys: keys.iter().map(ToString::to_string).collect(),
                    texts: chunks.iter().map(|chunk| app.text(chunk)).collect(),
                });
            }
            let (scheduler, engine) = (&app.0.scheduler, caller.engine.clone());
            if !own {
                scheduler.bound_tokens(cut.iter().map(|cut| cut.tokens).sum())?;
            }
            let deadline = own.then_some(FOREVER);
            scheduler.submit(engine, Work::Ingest { documents, method }, events, deadline)?;
            Ok(Ingest { app, caller, cut, received })
        };
        of.prepared(work).await
    }

    /// Waits until they are prefilled, and keeps them.
    pub(crate) async fn kept(mut self) -> Result<Value> {
        while let Some(event) = self.received.recv().await {
            match event {
                Event::Kept(report) => return self.enter(*report).await,
                Event::Failed(problem) => return Err(problem),
                _ => {}
            }
        }
        Err(Problem::internal(&"documents were lost"))
    }

    /// Enters documents that are prefilled into library and search.
    async fn enter(self, report: IngestReport) -> Result<Value> {
        let work = move || {
            let (shared, namespace) = (&self.app.0, self.caller.namespace());
            let (mut all, mut texts) = (Vec::new(), Vec::new());
            let mut enter = |cut: Cut| {
                let kept = shared.library.put(namespace, &cut.document, (cut.tokens, cut.keys))?;
                texts.push((kept.id.clone(), cut.texts));
                all.push(told(&kept));
                if kept.pinned { pin_chunks(&self.caller, &kept, true) } else { Ok(()) }
            };
            let entered = self.cut.into_iter().try_for_each(&mut enter);
            // What there was room for is found as well.
            shared.search.add(namespace, texts)?;
            entered?;
            // What happened to others' chunks, and where files are, is nobody's business.
            let mut told = json!(report);
            for name in ["evicted", "repaired"] {
                told.as_object_mut().map(|told| told.remove(name));
            }
            told["not_stored"] = json!(report.not_stored.is_some());
            Ok(json!({ "object": "list", "data": all, "ingest": told }))
        };
        aside(work).await
    }
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
    let (after, most) = (page.after.unwrap_or_default(), page.limit.unwrap_or(PAGE).clamp(1, PAGE));
    let work = move || {
        let mut shown = Vec::with_capacity(most);
        let more = app.0.library.each(caller.namespace(), &after, |kept| {
            let room = shown.len() < most;
            shown.extend(room.then(|| told(&kept)));
            room
        });
        more.map(|all| (shown, !all))
    };
    let (shown, more) = aside(work).await?;
    let last = shown.last().map(|kept| kept["id"].clone());
    Ok(answer_json(json!({ "object": "list", "data": shown, "has_more": more, "last_id": last })))
}

/// `GET /v1/documents/{id}`
pub(super) async fn show(State(app): State<App>, caller: Caller, Path(id): Path<String>) -> Result<Response> {
    let kept = aside(move || app.0.library.get(caller.namespace(), &id)).await?;
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
        let kept = app.0.library.get(caller.namespace(), &id)?;
        // What it is called now, and what it was called whenever it was brought.
        let chunks = caller.engine.chunks(std::slice::from_ref(&kept.document))?;
        let now = caller.engine.keys_of(&chunks, true).iter().map(ToString::to_string).collect();
        let own = app.0.library.remove(caller.namespace(), kept.clone(), now)?;
        app.0.search.remove(caller.namespace(), &id)?;
        for key in keys(&own) {
            caller.engine.store().remove(&key).map_err(|error| Problem::internal(&error))?;
        }
        Ok(answer_json(json!({ "id": kept.id, "object": "document.deleted", "deleted": true })))
    };
    aside(work).await
}

/// `POST /v1/documents/{id}/pin`
pub(super) async fn pin(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Json(Pin { pinned }): Json<Pin>,
) -> Result<Response> {
    let work = move || {
        let mut kept = app.0.library.get(caller.namespace(), &id)?;
        if !pinned {
            // Chunks that a pinned document has as well stay pinned.
            app.0.library.each(caller.namespace(), "", |other| {
                kept.chunks.retain(|chunk| !other.pinned || other.id == id || !other.chunks.contains(chunk));
                true
            })?;
        }
        pin_chunks(&caller, &kept, pinned)?;
        let kept = app.0.library.pin(caller.namespace(), &id, pinned)?;
        Ok(answer_json(told(&kept)))
    };
    aside(work).await
}

/// Pins the chunks of a document that are in the store, or lets them go as others do.
fn pin_chunks(caller: &Caller, kept: &Kept, pinned: bool) -> Result<()> {
    let store = caller.engine.store();
    let keys: Vec<ChunkKey> = keys(&kept.chunks).collect();
    store.pin(&keys, pinned).map(drop).map_err(|error| {
        tracing::error!(%error, "chunks cannot be pinned");
        Problem::new(
            StatusCode::INSUFFICIENT_STORAGE,
            "the chunks cannot be pinned: the server's log says why",
        )
    })
}

fn keys(names: &[String]) -> impl Iterator<Item = ChunkKey> {
    names.iter().filter_map(|name| name.parse().ok())
}
