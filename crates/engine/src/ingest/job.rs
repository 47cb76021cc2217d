//! Ingest: every chunk that the store does not have is prefilled alone, and kept.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_fusion::{ChunkStatistics, FusionMethod};
use refrain_kernels::DeviceFailure;
use refrain_store::{ChunkId, Fetched, KvQuantization, PutOutcome};
use serde::Serialize;

use super::chunk_prefill::{ChunkPrefill, ComputedChunk, PrefilledChunk};
use super::prefilled_prefix::PrefilledPrefix;
use crate::Result;
use crate::advance::{Advance, PATIENCE};
use crate::background::Background;
use crate::engine::Engine;
use crate::prompt::PromptChunk;

/// Result of an ingest.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct IngestReport {
    /// Documents given.
    pub documents: usize,
    /// Chunks that they are cut into.
    pub chunks: usize,
    /// Chunks that had to be computed; the others were in the store.
    pub computed: usize,
    /// Computed chunks that were in the store and lacked a method's summary alone.
    pub summarised: usize,
    /// Chunk files that were broken, and are computed again.
    pub repaired: usize,
    /// Tokens of all chunks.
    pub tokens: usize,
    /// Tokens that were computed.
    pub computed_tokens: usize,
    /// Bytes of keys and values that were added, and of summaries.
    pub bytes: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Chunks that went to make room, of these documents or others, or whose time was over.
    pub evicted: usize,
    /// Why chunks could not be written to disk (they serve from memory while there is room), if so.
    pub not_stored: Option<String>,
}

/// Progress of an ingest.
#[derive(Clone, Copy, Debug)]
pub struct IngestProgress {
    /// Tokens to compute in all.
    pub total: usize,
    /// Tokens computed.
    pub done: usize,
}

/// An ingest under way, done layer by layer.
#[derive(Debug)]
pub struct Ingest {
    engine: Engine,
    chunks: Vec<(ChunkId, PromptChunk)>,
    /// Methods whose statistics are kept beside the chunks.
    methods: Vec<Arc<dyn FusionMethod>>,
    stage: Stage,
    missing: VecDeque<MissingChunk>,
    /// Renewal of the chunks that are stored, which waits for the disk.
    renewing: Option<Background<()>>,
    /// The chunk that was computed last, while it is stored.
    storing: Option<StoringChunk>,
    /// All that stands before the next missing chunk, prefilled: the document's chunks before it were computed just now.
    carried: Option<Arc<PrefilledPrefix>>,
    progress: IngestProgress,
    /// Computed tokens that the caller was told of.
    told: Option<usize>,
    report: IngestReport,
    started: Instant,
    /// Broken and evicted chunks that the store had counted before.
    removed_before: u64,
    evicted_before: u64,
}

/// A chunk to be computed.
#[derive(Debug)]
struct MissingChunk {
    id: ChunkId,
    left: Vec<u32>,
    label: String,
    /// Whether the chunk is stored and lacks statistics only.
    stored: bool,
}

/// A chunk on its way to the store, which hashes and writes it while the next one is computed.
#[derive(Debug)]
struct StoringChunk {
    work: Background<Result<ComputedChunk>>,
    /// Whether it is stored and lacked statistics only.
    stored: bool,
    /// Whether the next chunk goes on behind it, and what it went on behind itself.
    follows: bool,
    prefix: Option<Arc<PrefilledPrefix>>,
}

#[derive(Debug)]
enum Stage {
    /// The object store is asked for chunks.
    Fetch(Background<Fetched>),
    /// The store is asked which chunks it has.
    Look,
    /// A chunk is computed.
    Compute(Box<ChunkPrefill>, bool),
    /// A chunk was computed, behind a prefix, and is stored once the one before it is.
    Store(Box<PrefilledChunk>, Option<Arc<PrefilledPrefix>>, bool),
    /// The next chunk is due.
    Next,
}

impl Ingest {
    /// An ingest of chunks of `documents` documents, with their identities. Where it is not to have chunks `whole`, those that come
    /// from an object store are not waited for: they are read while they come.
    pub(super) fn start(
        engine: &Engine,
        chunks: Vec<(ChunkId, PromptChunk)>,
        documents: usize,
        methods: Vec<Arc<dyn FusionMethod>>,
        whole: bool,
    ) -> Result<Ingest> {
        let report = IngestReport {
            documents,
            chunks: chunks.len(),
            tokens: chunks.iter().map(|(_, chunk)| chunk.tokens.len()).sum(),
            ..IngestReport::default()
        };
        let wanted = chunks.iter().map(|(id, chunk)| engine.wanted(id.clone(), &chunk.left)).collect();
        let kinds = kinds_of(&statistics_of(&methods));
        let stage = engine.prefetch_chunks(wanted, kinds, whole)?.map_or(Stage::Look, Stage::Fetch);
        Ok(Ingest {
            removed_before: engine.store().removed(),
            evicted_before: engine.store().evicted(),
            engine: engine.clone(),
            chunks,
            methods,
            stage,
            missing: VecDeque::new(),
            renewing: None,
            storing: None,
            carried: None,
            progress: IngestProgress { total: 0, done: 0 },
            told: None,
            report,
            started: Instant::now(),
        })
    }

    /// Tokens to be computed and tokens computed, once the store was asked what it has, and then after every chunk, and within a chunk
    /// after every hundredth of the whole.
    pub fn new_progress(&mut self) -> Option<IngestProgress> {
        let IngestProgress { total, done } = self.progress;
        let now = match &self.stage {
            Stage::Fetch(_) | Stage::Look => return None,
            Stage::Compute(chunk, _) => {
                done + (chunk.computed() * self.engine.prefilled_tokens(chunk.id()) as f64) as usize
            }
            Stage::Store(..) | Stage::Next => done,
        };
        let within = now > done;
        let is_news = match self.told {
            None => true,
            Some(told) if within => now >= told + total.div_ceil(100),
            Some(told) => now > told,
        };
        is_news.then(|| {
            self.told = Some(now);
            IngestProgress { total, done: now }
        })
    }

    /// Does one step, which waits a moment for what is fetched or stored.
    ///
    /// # Errors
    /// If the store cannot be read, a token has no embedding, or the device cannot do the step. A full disk is no error: the report says so.
    pub fn advance(&mut self) -> Result<Advance> {
        self.advance_within(PATIENCE)
    }

    /// Does one step, which waits for `patience` at most, for callers that have other work to do.
    ///
    /// # Errors
    /// If the step fails in one of the ways that [`Ingest::advance`] names.
    pub fn advance_within(&mut self, patience: Duration) -> Result<Advance> {
        DeviceFailure::catch(|| self.step(patience))?
    }

    fn step(&mut self, patience: Duration) -> Result<Advance> {
        match std::mem::replace(&mut self.stage, Stage::Next) {
            Stage::Fetch(mut fetch) => {
                if fetch.poll(patience).is_none() {
                    self.stage = Stage::Fetch(fetch);
                    return Ok(Advance::Waiting);
                }
                self.stage = Stage::Look;
                Ok(Advance::Progress)
            }
            Stage::Look => {
                let ids = self.chunks.iter().map(|(id, _)| id);
                if self.engine.awaits_header(ids, Some(Instant::now() + patience)) {
                    self.stage = Stage::Look;
                    return Ok(Advance::Waiting);
                }
                self.look()?;
                Ok(Advance::Progress)
            }
            Stage::Next => {
                let awaited =
                    self.storing.as_ref().is_some_and(|last| last.follows || self.missing.is_empty());
                if awaited {
                    return Ok(if self.poll_storing(patience)? {
                        Advance::Progress
                    } else {
                        Advance::Waiting
                    });
                }
                let Some(chunk) = self.missing.pop_front() else {
                    return Ok(if self.is_renewed(patience) { Advance::Done } else { Advance::Waiting });
                };
                let prefix = self.prefix_of(&chunk);
                let MissingChunk { id, left, label, stored } = chunk;
                let chunk = match prefix {
                    Some(_) => ChunkPrefill::behind(&self.engine, id, &left, label, prefix)?,
                    None => {
                        let observed = !statistics_of(&self.methods).is_empty();
                        ChunkPrefill::start(&self.engine, id, &left, label, observed)?
                    }
                };
                self.stage = Stage::Compute(Box::new(chunk), stored);
                Ok(Advance::Progress)
            }
            Stage::Compute(mut chunk, stored) => {
                let statistics = statistics_of(&self.methods);
                if !chunk.advance(&statistics)? {
                    self.stage = Stage::Compute(chunk, stored);
                    return Ok(Advance::Progress);
                }
                let prefix = chunk.prefix();
                self.progress.done += self.engine.prefilled_tokens(chunk.id());
                self.stage = Stage::Store(Box::new(chunk.finish()), prefix, stored);
                Ok(Advance::Progress)
            }
            Stage::Store(chunk, prefix, stored) => {
                if !self.poll_storing(patience)? {
                    self.stage = Stage::Store(chunk, prefix, stored);
                    return Ok(Advance::Waiting);
                }
                let before = prefix.as_ref().map_or(&[][..], |prefix| prefix.tokens.as_slice());
                let follows = self.carries()
                    && self.missing.front().is_some_and(|next| {
                        let wanted = [&self.engine.before_chunks(), next.left.as_slice()].concat();
                        !next.left.is_empty() && wanted == [before, &chunk.id().tokens].concat()
                    });
                let kinds = kinds_of(&statistics_of(&self.methods));
                let work = Background::spawn("store", move || chunk.store(&kinds))?;
                self.storing = Some(StoringChunk { work, stored, follows, prefix });
                Ok(Advance::Progress)
            }
        }
    }

    /// Whether no chunk is being stored any more, within `patience`. One that has been is counted.
    fn poll_storing(&mut self, patience: Duration) -> Result<bool> {
        let Some(mut storing) = self.storing.take() else { return Ok(true) };
        let Some(done) = storing.work.poll(patience) else {
            self.storing = Some(storing);
            return Ok(false);
        };
        let (chunk, made, outcome) = done?;
        let StoringChunk { stored, follows, prefix, .. } = storing;
        self.carried = follows.then(|| Arc::new(PrefilledPrefix::with(prefix.as_deref(), &chunk)));
        self.report.bytes += if stored { 0 } else { chunk.bytes() as u64 };
        self.report.bytes += made.iter().map(|statistics| statistics.bytes() as u64).sum::<u64>();
        if let PutOutcome::NotStored { error } = outcome {
            self.report.not_stored.get_or_insert(error.to_string());
        }
        Ok(true)
    }

    fn wait_for_storing(&mut self) -> Result<()> {
        DeviceFailure::catch(|| {
            while !self.poll_storing(PATIENCE)? {}
            Ok(())
        })?
    }

    /// The prefix that a chunk goes on behind, where it is more than the engine's prefix: all of its document before it,
    /// or, at the beginning of a document in one piece, BOS.
    fn prefix_of(&mut self, chunk: &MissingChunk) -> Option<Arc<PrefilledPrefix>> {
        if let Some(carried) = self.carried.take() {
            return Some(carried);
        }
        let goes_on = self.missing.front().is_some_and(|next| !next.left.is_empty());
        let bos = self.engine.before_chunks();
        if !goes_on
            || !chunk.left.is_empty()
            || !self.carries()
            || self.engine.prefix().is_some()
            || bos.is_empty()
        {
            return None;
        }
        Some(Arc::new(PrefilledPrefix::new(bos)))
    }

    /// Whether a chunk's rows may stand before the next chunk of its document: a quantised store keeps other rows than those that were
    /// computed, and methods with statistics see a document whole.
    fn carries(&self) -> bool {
        self.engine.settings().store_dtype == KvQuantization::Exact && statistics_of(&self.methods).is_empty()
    }

    /// The report. Where [`Ingest::advance`] has not said that all is done, it waits for the chunk that is on its way to the store.
    pub fn finish(mut self) -> IngestReport {
        if let Err(error) = self.wait_for_storing() {
            self.report.not_stored.get_or_insert(error.to_string());
        }
        self.report.evicted = (self.engine.store().evicted() - self.evicted_before) as usize;
        self.report.seconds = self.started.elapsed().as_secs_f64();
        self.report
    }

    /// Whether the chunks that were stored are renewed, within `patience`.
    fn is_renewed(&mut self, patience: Duration) -> bool {
        let renewed = self.renewing.as_mut().is_none_or(|renewing| renewing.poll(patience).is_some());
        if renewed {
            self.renewing = None;
        }
        renewed
    }

    /// Finds the chunks that are to be computed, and begins to renew the others.
    fn look(&mut self) -> Result<()> {
        let statistics = statistics_of(&self.methods);
        let (engine, store) = (&self.engine, self.engine.store());
        let (mut seen, mut known) = (HashSet::new(), Vec::new());
        for (id, chunk) in &self.chunks {
            let has_statistics =
                |id: &ChunkId| statistics.iter().all(|of| store.has_aux_tensors(id, &of.kind()));
            let is_there = |id: &ChunkId| store.contains(id) || store.is_in_flight(id);
            let stored = is_there(id);
            let shared = || engine.shared(id).is_some_and(|id| is_there(&id) && has_statistics(&id));
            let complete = stored && has_statistics(id) || shared();
            known.extend(stored.then(|| id.key()));
            if !complete && seen.insert(id.key()) {
                if store.is_late(id) {
                    store.count_race(false);
                }
                self.report.summarised += usize::from(stored);
                self.progress.total += engine.prefilled_tokens(id);
                let (id, left) = (id.clone(), chunk.left.clone());
                self.missing.push_back(MissingChunk { id, left, label: chunk.label(), stored });
            }
        }
        self.report.computed = self.missing.len();
        self.report.repaired = (store.removed() - self.removed_before) as usize;
        self.report.computed_tokens = self.progress.total;
        if !known.is_empty() {
            let store = store.clone();
            // Without a thread they keep the time that they have.
            self.renewing = Background::spawn("renew", move || store.renew(&known)).ok();
        }
        Ok(())
    }

    /// Does all of it, and tells `progress` what [`new_progress`](Ingest::new_progress) has.
    pub(crate) fn run(mut self, mut progress: impl FnMut(IngestProgress)) -> Result<IngestReport> {
        loop {
            let advance = self.advance()?;
            if let Some(now) = self.new_progress() {
                progress(now);
            }
            if advance == Advance::Done {
                return Ok(self.finish());
            }
        }
    }
}

/// The statistics of methods, each kind once.
pub(crate) fn statistics_of(methods: &[Arc<dyn FusionMethod>]) -> Vec<&dyn ChunkStatistics> {
    let mut all: Vec<&dyn ChunkStatistics> = Vec::new();
    for statistics in methods.iter().flat_map(|method| method.statistics()) {
        if all.iter().all(|known| known.kind() != statistics.kind()) {
            all.push(statistics);
        }
    }
    all
}

/// Names of kinds of statistics.
pub(crate) fn kinds_of(statistics: &[&dyn ChunkStatistics]) -> Vec<String> {
    statistics.iter().map(|of| of.kind()).collect()
}

/// Label of a system part in the store.
pub(crate) const SYSTEM_LABEL: &str = "system part";

/// Tokens a second, 0 for no time.
pub fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}
