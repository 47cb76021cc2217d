//! Ingest as a job: the chunks of each document are prefilled and brought to the object store, and then the documents are kept there.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use refrain::corpus::{check_shareable, document_id, open_documents};
use refrain::engine::{Advance, DeviceFailure, Error as EngineError, IngestReport};
use refrain::fusion::FusionMethod;
use refrain::{Document, Engine, Library};
use serde_json::{Value, json};

use crate::item::Item;
use crate::patience::{Failed, repeat};
use crate::work::{Control, RunnerError, Undone, Work};

/// Chunks that may wait for the object store before further ones are prefilled: what waits must not go to make room.
const MOST_PENDING: u64 = 64;
/// The pause between two looks at what waits.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest wait for chunks that are on their way, before the object store is asked which of them are there.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How often chunks are prefilled again that went to make room before they were in the object store.
const ROUNDS: usize = 3;
/// Most characters of a text that stand for a title.
const TITLE: usize = 60;

/// Ingest by an engine whose store is shared.
pub struct IngestWork<'a> {
    engine: &'a Engine,
    method: Arc<dyn FusionMethod>,
    /// Whether the documents are kept in the object store, to be found by searches.
    keep: bool,
    /// How long it waits for an object store that does not answer.
    patience: Duration,
    warn: Box<dyn FnMut(&str) + 'a>,
    /// By this runner, of the shard.
    computed: Computed,
}

/// Lays an error of a document's prefill on the machine, or else on the document. Too little memory is the machine's fault unless what is
/// prefilled at once `grows` with the document: a document that is too long for all machines must not end every runner.
pub(crate) fn at_fault(error: EngineError, grows: bool) -> Undone {
    match error {
        EngineError::DeviceMemory { .. } | EngineError::DeviceFailure(DeviceFailure::OutOfMemory { .. })
            if grows =>
        {
            Undone::Item(error.to_string())
        }
        EngineError::Store(_)
        | EngineError::Thread(_)
        | EngineError::Device { .. }
        | EngineError::DeviceFailure(_)
        | EngineError::DeviceMemory { .. } => Undone::from(error),
        error => Undone::Item(error.to_string()),
    }
}

/// What was computed for a shard.
#[derive(Debug, Default)]
struct Computed {
    chunks: usize,
    tokens: usize,
    bytes: u64,
}

impl Item<Document> {
    /// The item of a document, which has so many tokens. Its id is the document's in the library.
    pub fn of_document(document: Document, tokens: u64) -> Item<Document> {
        Item { id: document_id(&document), weight: tokens, body: document }
    }
}

impl<'a> IngestWork<'a> {
    /// Prepares documents for a method. `warn` is told of an object store that does not take chunks now.
    pub fn new(
        engine: &'a Engine,
        method: Arc<dyn FusionMethod>,
        keep: bool,
        patience: Duration,
        warn: impl FnMut(&str) + 'a,
    ) -> IngestWork<'a> {
        let computed = Computed::default();
        IngestWork { engine, method, keep, patience, warn: Box::new(warn), computed }
    }

    /// Why a document cannot be kept, if it has more text than machines share.
    fn too_large(&self, document: &Document) -> Option<String> {
        let checked = if self.keep { check_shareable(document) } else { Ok(()) };
        checked.err().map(|error| error.to_string())
    }

    /// Prefills what is missing of a document, until the work is to end.
    fn ingest(&mut self, document: &Document, control: &Control<'_>) -> Result<(), Undone> {
        // Methods with statistics see a document whole, and chunks may be prefilled behind all that stands left of them.
        let grows = !self.method.statistics().is_empty() || self.engine.settings().left_tokens > 0;
        let at_fault = |error| at_fault(error, grows);
        let mut ingest =
            self.engine.start_ingest(std::slice::from_ref(document), &self.method).map_err(at_fault)?;
        while ingest.advance().map_err(at_fault)? != Advance::Done {
            control.check()?;
        }
        let IngestReport { computed, computed_tokens, bytes, not_stored, .. } = ingest.finish();
        self.computed.chunks += computed;
        self.computed.tokens += computed_tokens;
        self.computed.bytes += bytes;
        match not_stored {
            Some(reason) => Err(format!("chunks cannot be stored here: {reason}").into()),
            None => Ok(()),
        }
    }

    /// Waits until the object store has taken all but so many chunks, so long at most while it takes some.
    fn wait_for_pending(
        &mut self,
        most: u64,
        longest: Duration,
        control: &Control<'_>,
    ) -> Result<(), Undone> {
        let (began, mut has_warned) = (Instant::now(), false);
        loop {
            let is_waiting = repeat(self.patience, || {
                control.check()?;
                let stats = self.engine.store().remote_stats().filter(|stats| stats.pending > most);
                let Some(stats) = stats else { return Ok(false) };
                let Some(why) = stats.down.or(stats.stuck) else { return Ok(true) };
                if !std::mem::replace(&mut has_warned, true) {
                    (self.warn)(&format!("the object store takes no chunks now, waiting: {why}"));
                }
                Err(Failed::Passing(Undone::from(format!("the object store takes no chunks: {why}"))))
            })?;
            if !is_waiting || began.elapsed() >= longest {
                return Ok(());
            }
            sleep(PAUSE);
        }
    }

    /// Of each document, whether all of it is in the object store.
    fn are_shared(&self, documents: &[&Document], control: &Control<'_>) -> Result<Vec<bool>, Undone> {
        let is_down = || self.engine.store().remote_stats().is_some_and(|stats| stats.down.is_some());
        repeat(self.patience, || {
            control.check()?;
            let asked = self.engine.are_shared(documents, &self.method);
            asked.map_err(|error| match is_down() {
                true => Failed::Passing(error.into()),
                // An object store that answers and refuses will do so again.
                false => Failed::Lasting(error.into()),
            })
        })
    }

    /// Waits for chunks of the documents that are on their way to the object store, and gives the documents of which some are neither there nor on
    /// their way. Chunks that other programs add to the same folder are not waited for.
    pub(crate) fn lost<'d>(
        &mut self,
        documents: &[&'d Document],
        control: &Control<'_>,
    ) -> Result<Vec<&'d Document>, Undone> {
        let mut missing = documents.to_vec();
        loop {
            // Looked at before the object store is asked, so that what is not there then is not on its way either.
            let mut pending = self.engine.are_pending(&missing, &self.method)?;
            if pending.contains(&true) {
                self.wait_for_pending(0, LONGEST_WAIT, control)?;
                pending = self.engine.are_pending(&missing, &self.method)?;
            }
            let there = self.are_shared(&missing, control)?;
            let waits = there.iter().zip(pending).any(|(there, pending)| pending && !there);
            let mut there = there.into_iter();
            missing.retain(|_| there.next() == Some(false));
            if !waits {
                return Ok(missing);
            }
        }
    }

    /// Returns when all chunks of the documents are in the object store. Those that went to make room before are prefilled again.
    fn share(&mut self, documents: &[&Document], control: &Control<'_>) -> Result<(), Undone> {
        let mut lost = self.lost(documents, control)?;
        for _ in 0..ROUNDS {
            let mut again = Vec::new();
            for document in lost {
                self.ingest(document, control)?;
                again.extend(self.lost(&[document], control)?);
            }
            lost = again;
        }
        if lost.is_empty() {
            return Ok(());
        }
        let documents = lost.len();
        Err(format!(
            "chunks of {documents} documents go to make room before they are in the object store; give --disk more"
        )
        .into())
    }

    /// Keeps documents in the object store.
    fn keep_documents(&self, documents: &[Document], control: &Control<'_>) -> Result<(), Undone> {
        repeat(self.patience, || {
            control.check()?;
            // A replica in memory: what is kept is read from the object store by those that search.
            let store = open_documents(self.engine.store(), None, u64::MAX).map_err(Undone::from)?;
            let kept = Library::keep(self.engine, store, documents).map_err(Undone::from)?;
            if kept.iter().all(|document| document.published != Some(false)) {
                return Ok(());
            }
            Err(Failed::Passing(Undone::from("the object store takes no documents")))
        })
    }
}

impl Work for IngestWork<'_> {
    type Body = Document;

    fn name(&self, item: &Item<Document>) -> String {
        let Document { title, text } = &item.body;
        if title.is_empty() { text.chars().take(TITLE).collect() } else { title.clone() }
    }

    fn begin(&mut self) -> Result<(), Undone> {
        self.computed = Computed::default();
        Ok(())
    }

    fn are_done(&mut self, items: &[Item<Document>], control: &Control<'_>) -> Result<Vec<bool>, Undone> {
        // One that is too large is not even cut.
        let may_be = |item: &&Item<Document>| self.too_large(&item.body).is_none();
        let documents: Vec<&Document> = items.iter().filter(may_be).map(|item| &item.body).collect();
        let mut there = self.are_shared(&documents, control)?.into_iter();
        Ok(items.iter().map(|item| may_be(&item) && there.next() == Some(true)).collect())
    }

    fn item(&mut self, item: &Item<Document>, control: &Control<'_>) -> Result<(), Undone> {
        if let Some(reason) = self.too_large(&item.body) {
            return Err(Undone::Item(reason));
        }
        self.wait_for_pending(MOST_PENDING, Duration::MAX, control)?;
        self.ingest(&item.body, control)
    }

    fn failure(&self) -> Option<RunnerError> {
        self.engine.decoder().device().failure().map(RunnerError::from)
    }

    fn keep(&mut self, items: &[&Item<Document>], control: &Control<'_>) -> Result<bool, Undone> {
        let documents: Vec<&Document> = items.iter().map(|item| &item.body).collect();
        self.share(&documents, control)?;
        if self.keep && !documents.is_empty() {
            self.keep_documents(&documents.into_iter().cloned().collect::<Vec<_>>(), control)?;
        }
        Ok(true)
    }

    fn finish(&mut self) -> Result<Value, Undone> {
        let Computed { chunks, tokens, bytes } = self.computed;
        Ok(json!({ "computed_chunks": chunks, "computed_tokens": tokens, "bytes": bytes }))
    }
}
