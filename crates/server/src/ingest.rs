//! Ingest of documents: prefilled by the scheduler, then stored and indexed.

use std::time::{Duration, Instant};

use refrain::corpus::{NewDocument, StoredDocument};
use refrain::engine::{Document, Engine, IngestReport};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::api_error::{ApiError, Result};
use crate::app::{App, Method};
use crate::blocking::spawn_blocking;
use crate::body::HeldBytes;
use crate::job::{Event, Job};
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
            Ok(Ingest { app, tenant, documents: new, _held: held, events })
        };
        preprocessing.preprocess(&namespace, deadline, work).await
    }

    /// Waits until the documents are prefilled, then stores and indexes them.
    ///
    /// # Errors
    /// If the job fails, or the documents cannot be stored.
    pub(crate) async fn finish(mut self) -> Result<Ingested> {
        while let Some(event) = self.events.recv().await {
            match event {
                Event::Ingested(report) => return self.store(*report).await,
                Event::Failed(error) => return Err(error),
                Event::Progress(_) | Event::Token(_) | Event::Finished(_) => {}
            }
        }
        Err(ApiError::internal(&"an ingest ended without a report"))
    }

    /// Stores and indexes the documents after their prefill.
    ///
    /// # Errors
    /// If the quota has no room for them, or they cannot be stored.
    pub(crate) async fn store(self, report: IngestReport) -> Result<Ingested> {
        let work = move || {
            let (corpus, namespace) = (&self.app.state.corpus, self.tenant.namespace());
            let documents = corpus.put(namespace, self.documents)?;
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
        spawn_blocking(work).await
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
    /// Ingests documents for requests without an API key, and gives their number.
    ///
    /// # Errors
    /// If the documents cannot be prefilled or stored.
    pub async fn ingest(&self, documents: Vec<Document>) -> std::result::Result<usize, ApiError> {
        let tenant = Tenant { engine: self.state.engine.clone(), name: String::new() };
        let method = self.method("method", None)?;
        let ingest = Ingest::submit(self.clone(), tenant, (documents, None), method.built).await?;
        Ok(ingest.finish().await?.documents.len())
    }
}
