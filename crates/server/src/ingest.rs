//! Ingest of documents: prefilled by the scheduler, then stored and indexed.

use std::time::{Duration, Instant};

use refrain::corpus::{NewDocument, StoredDocument};
use refrain::engine::{Document, Engine, IngestProgress, IngestReport};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tracing::{Instrument as _, Span};

use crate::api_error::{ApiError, Result};
use crate::app::{App, Method};
use crate::blocking::spawn_blocking;
use crate::body::HeldBytes;
use crate::job::{Event, Job};
use crate::request_span::tell_failure;
use crate::tenant::Tenant;

/// Timeout of the server's own documents: longer than any ingest.
const NO_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Documents that are being prefilled, to be stored and indexed afterwards.
pub(crate) struct Ingest {
    app: App,
    tenant: Tenant,
    documents: Vec<NewDocument>,
    /// The bytes of the documents, but for the server's own.
    _held: Option<HeldBytes>,
    /// The span of the request: the events of a stream are awaited outside of it.
    span: Span,
    /// Events of the job.
    pub(crate) events: UnboundedReceiver<Event>,
}

/// Documents that were ingested.
#[derive(Debug)]
pub(crate) struct Ingested {
    pub(crate) documents: Vec<StoredDocument>,
    pub(crate) report: IngestReport,
}

impl Ingest {
    /// Cuts documents into chunks, and submits a job that prefills them. The bytes of the documents are held until these are stored; of the
    /// server's own documents none are, and neither their tokens nor their time are bounded.
    ///
    /// # Errors
    /// If a text cannot be tokenised, the request exceeds a limit, the quota has no room for all of it, or the queue is full.
    pub(crate) async fn submit(
        app: App,
        tenant: Tenant,
        (documents, held): (Vec<Document>, Option<HeldBytes>),
        method: Method,
    ) -> Result<Ingest> {
        let (sender, events) = unbounded_channel();
        let (preprocessing, namespace) = (app.clone(), tenant.namespace().to_owned());
        if let Some(held) = &held {
            app.state.scheduler.check_text(held.bytes())?;
        }
        let arrived = held.as_ref().map_or_else(Instant::now, HeldBytes::since);
        let deadline = if held.is_some() { app.deadline(arrived) } else { arrived + NO_TIMEOUT };
        let work = move || {
            let with_contexts = !method.statistics().is_empty();
            let cut = |document: &Document| NewDocument::cut(&tenant.engine, document.clone(), with_contexts);
            let new = documents.iter().map(cut).collect::<refrain::corpus::Result<Vec<_>>>()?;
            app.state.corpus.documents().check_room(tenant.namespace(), &new)?;
            let (scheduler, engine) = (&app.state.scheduler, tenant.engine.clone());
            admit(&engine, || new.iter().map(|new| new.chunks.clone()).collect());
            if held.is_some() {
                let tokens = new.iter().flat_map(|new| &new.chunks).map(Vec::len).sum();
                scheduler.check_tokens(tokens)?;
            }
            let timeout = held.is_none().then_some(NO_TIMEOUT);
            let ingest = engine.start_ingest(&documents, &method)?;
            let jobs = vec![(Job::Ingest(Box::new(ingest)), sender)];
            scheduler.submit(&engine, jobs, arrived, timeout)?;
            let span = Span::current();
            Ok(Ingest { app, tenant, documents: new, _held: held, span, events })
        };
        preprocessing.preprocess(&namespace, deadline, work).await
    }

    /// Waits until the documents are prefilled, of which `on_progress` is told, then stores and indexes them.
    ///
    /// # Errors
    /// If the job fails, or the documents cannot be stored.
    pub(crate) async fn finish(mut self, on_progress: impl Fn(IngestProgress)) -> Result<Ingested> {
        while let Some(event) = self.events.recv().await {
            match event {
                Event::Ingested(report) => return self.store(*report).await,
                Event::Failed(error) => return Err(error),
                Event::Progress(progress) => on_progress(progress),
                Event::Token(_) | Event::Finished(_) => {}
            }
        }
        Err(self.lost())
    }

    /// The error of a job that has ended without a report, which is counted and logged.
    pub(crate) fn lost(&self) -> ApiError {
        let error = self.span.in_scope(|| ApiError::internal(&"an ingest ended without a report"));
        tell_failure(&self.span, &self.app.state.metrics, &error);
        error
    }

    /// Stores and indexes the documents after their prefill. A failure is counted, and logged within the request's span.
    ///
    /// # Errors
    /// If the quota has no room for them, or they cannot be stored.
    pub(crate) async fn store(self, report: IngestReport) -> Result<Ingested> {
        let (span, metrics) = (self.span.clone(), self.app.state.metrics.clone());
        let work = move || {
            let (corpus, namespace) = (&self.app.state.corpus, self.tenant.namespace());
            let documents = corpus.put(&self.tenant.engine, self.documents)?;
            // They may have been removed during the prefill.
            let chunks = |document: &StoredDocument| corpus.documents().chunks(namespace, &document.id);
            admit(&self.tenant.engine, || {
                documents.iter().filter_map(|document| chunks(document).ok()).collect()
            });
            for document in documents.iter().filter(|document| document.pinned) {
                corpus.settle_pins(&self.tenant.engine, &document.id)?;
            }
            Ok(Ingested { documents, report })
        };
        let stored = spawn_blocking(work).instrument(span.clone()).await;
        stored.inspect_err(|error| tell_failure(&span, &metrics, error))
    }
}

/// Has the chunks of documents stored again, by questions with any method, though the same documents may have been removed before.
/// A document is the token ids of its chunks.
fn admit(engine: &Engine, documents: impl FnOnce() -> Vec<Vec<Vec<u32>>>) {
    engine.store().admit(|| {
        let chunks = documents().into_iter().flat_map(|chunks| engine.whole_document(chunks));
        engine.keys_of(&chunks.collect::<Vec<_>>(), true)
    });
}

impl App {
    /// Ingests documents for requests without an API key, and gives their number. `on_progress` is told how far it is. Chunks that are stored stay
    /// where the future is dropped before its end.
    ///
    /// # Errors
    /// If the documents cannot be prefilled or stored.
    pub async fn ingest(
        &self,
        documents: Vec<Document>,
        on_progress: impl Fn(IngestProgress),
    ) -> std::result::Result<usize, ApiError> {
        let tenant = Tenant { engine: self.state.engine.clone(), name: String::new() };
        let method = self.method("method", None)?;
        let ingest = Ingest::submit(self.clone(), tenant, (documents, None), method.built).await?;
        Ok(ingest.finish(on_progress).await?.documents.len())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::options::Options;
    use crate::testing::tiny_engine;

    #[tokio::test]
    async fn an_ingest_tells_its_progress() {
        let app = App::new(tiny_engine(), Options::new("tiny")).unwrap();
        let document = Document { title: "Torque".to_owned(), text: "A bolt is tight. ".repeat(40) };
        let last = Cell::new((0, 0));
        let ingested = app.ingest(vec![document], |progress| last.set((progress.done, progress.total)));
        assert_eq!(ingested.await.unwrap(), 1);
        let (done, total) = last.get();
        assert!(done > 0 && done <= total, "{done} of {total}");
    }
}
