//! What of a prompt comes from the store, and what is done about a chunk that is not there or turns out broken.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_eviction::{Eviction, PromptSpans};
use refrain_fusion::{FusionMethod, PromptView, Summarize};
use refrain_kv::{AuxTensors, KvCache, Lender, Span};
use refrain_store::{Chunk, ChunkId, ChunkReader};

use crate::bounded::Bounded;
use crate::feed::{Feed, Load};
use crate::forward::State;
use crate::prefill::{Prefill, Watch, Work};
use crate::sparse::{Asked, Loading, Request};
use crate::{Engine, Error, Prompt, Result};

/// A part of the prompt whose keys and values are in the store, or were computed for it just now.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Its chunk in the prompt; none is the system part.
    pub(crate) chunk: Option<usize>,
    pub(crate) span: Span,
    pub(crate) reader: Arc<ChunkReader>,
    /// What the method keeps beside it, of each kind, and bytes of these that were read from the folder.
    pub(crate) summaries: Vec<Arc<AuxTensors>>,
    pub(crate) summary_read: u64,
    /// Whether it was computed for this request.
    pub(crate) computed: bool,
    /// Position of its first token when it was precomputed.
    pub(crate) first_position: u32,
}

/// Cached parts of a prompt, brought in for one answer.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) segments: Vec<Segment>,
    pub(crate) chunk_cached: Vec<bool>,
    pub(crate) system_cached: bool,
    pub(crate) repaired: usize,
    /// Bytes of keys and values brought in from the store.
    pub(crate) bytes: u64,
    /// Those of them, and of summaries, that came from its folder.
    pub(crate) read: u64,
    /// The same of attempts that failed.
    read_before: u64,
    /// Time that the computing thread spent waiting for them.
    pub(crate) waited: Duration,
    /// Time that all threads spent bringing them in.
    pub(crate) busy: Duration,
}

/// A chunk as it is found in the store, with the summaries that are wanted and the bytes of these that were read.
type Found = (ChunkReader, Vec<Arc<AuxTensors>>, u64);

/// The summaries that a method wants of a document; it wants none of the system part.
fn wanted(method: &dyn FusionMethod, chunk: Option<usize>) -> Vec<&dyn Summarize> {
    if chunk.is_some() { method.summarizes() } else { Vec::new() }
}

/// A prompt after prefill: the logits of its last token and the cache to decode in.
pub(crate) struct Prefilled {
    pub(crate) state: State,
    pub(crate) logits: Vec<f32>,
    pub(crate) work: Work,
    pub(crate) loaded: Loaded,
}

impl Engine {
    /// Brings in the cached parts of a prompt and computes the rest, for `room` tokens in all.
    pub(crate) fn prefill(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        eviction: &Eviction,
        room: usize,
        watch: Watch,
    ) -> Result<Prefilled> {
        let mut reach = self.reach(prompt, eviction, room)?;
        if method.sparse().is_some() {
            // Where keys are turned by their places, those of what was left out still lie between.
            reach = room.min(reach + prompt.len());
            let context = self.decoder.config().context;
            if reach > context {
                let answer = room - prompt.len();
                return Err(Error::PromptTooLong { prompt: prompt.len(), answer, context });
            }
        }
        let contexts;
        let prompt = match method.summarizes().is_empty() {
            true => prompt,
            false => {
                contexts = prompt.contexts(self.longest_context());
                &contexts
            }
        };
        let mut loaded = self.open_parts(prompt, method, reach)?;
        loop {
            if let Some((state, logits, work)) =
                self.attempt(prompt, method, eviction, (room, reach), watch, &mut loaded)?
            {
                let mut prefilled = Prefilled { state, logits, work, loaded };
                if prefilled.state.bounded.is_some() {
                    // It decides from now on.
                    prefilled.state.retrieving = None;
                    // Whoever bounds the cache wants the memory that the prompt took.
                    self.pool.caches.keep(0);
                    prefilled.state.slim();
                }
                return Ok(prefilled);
            }
            // All of it is in memory then: the next attempt cannot break.
            self.settle(prompt, method, &mut loaded)?;
        }
    }

    /// Prefill with the segments as they are; nothing if one of them turns out broken.
    fn attempt(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        eviction: &Eviction,
        (room, reach): (usize, usize),
        watch: Watch,
        loaded: &mut Loaded,
    ) -> Result<Option<(State, Vec<f32>, Work)>> {
        let places = prompt.places(|i| loaded.chunk_cached[i]);
        let view = self.view(prompt, loaded.system_cached, &places);
        let plan = method.plan(&view)?;
        let segments = &loaded.segments;
        let lender = Lender::new(&self.pool.caches);
        if let Some(sparse) = method.sparse().filter(|_| view.reusable() > 0) {
            let asked = Asked { prompt, view, segments, eviction, room, reach };
            let request = Request { asked, sparse, kind: 0, watch };
            let mut load = Loading::default();
            // Layers are made to measure, a few at a time.
            self.pool.caches.keep(2);
            let outcome = self.prefill_sparse(request, &plan.rows, &lender, &mut load);
            loaded.bytes += load.bytes;
            loaded.busy += load.busy;
            loaded.waited += load.busy;
            loaded.count_read();
            return outcome;
        }
        let prefill = Prefill { engine: self, prompt, view, segments, method, plan: &plan, watch };
        let (shape, dtype) = (self.decoder.shape(), self.settings.kv);
        let spans = PromptSpans { system: prompt.system_span(), question: prompt.question_span() };
        let (config, ropes) = (self.decoder.config(), self.decoder.ropes(reach));
        let bounded = Bounded::new(config, ropes, eviction, spans, dtype, room, false)?;
        let capacity = if bounded.is_some() { prompt.len() } else { room };
        // A layer that waits is the request's own cache, or, where that is bounded, more than it.
        let ahead = if bounded.is_some() { self.decoder.backend().threads() } else { shape.layers };
        if bounded.is_some() {
            self.pool.caches.keep(ahead + 1);
        }
        let cache = KvCache::vacant(shape, dtype, capacity);
        let mut state = State::over(&self.decoder, cache, reach).giving_to(&self.pool);
        let mut loading = Loading::default();
        let request = Asked { prompt, view, segments, eviction, room, reach };
        let Some((retrieving, before)) =
            self.retrieving(method, request, &plan.rows, capacity, (&lender, &mut loading))?
        else {
            return Ok(None);
        };
        state.retrieving = retrieving;
        loaded.bytes += loading.bytes;
        loaded.busy += loading.busy;
        loaded.waited += loading.busy;
        state.bounded = bounded;
        if segments.is_empty() {
            let outcome = prefill.run(&mut state, None, &lender)?;
            return Ok(outcome.map(|(logits, work)| (state, logits, work.after(&before))));
        }
        let tables = state.tables.clone();
        let load = Load::new(segments, &plan, &tables, &state.cache, &lender, ahead, self.decoder.backend());
        let (outcome, mut waited, computed) = std::thread::scope(|scope| {
            let mut feed = Feed::start(scope, &load, self.decoder.backend().threads());
            let outcome = prefill.run(&mut state, Some(&mut feed), &lender);
            (outcome, feed.waited(), Instant::now())
        });
        waited += computed.elapsed();
        let (bytes, busy, broken) = load.finish();
        loaded.bytes += bytes;
        loaded.count_read();
        loaded.busy += busy;
        loaded.waited += waited;
        let whole = outcome?.filter(|_| !broken);
        Ok(whole.map(|(logits, work)| (state, logits, work.after(&before))))
    }

    pub(crate) fn view<'a>(
        &self,
        prompt: &Prompt,
        system_cached: bool,
        chunks: &'a [refrain_fusion::ChunkPlace],
    ) -> PromptView<'a> {
        PromptView {
            layers: self.decoder.config().num_layers(),
            system: prompt.system_span(),
            system_cached,
            chunks,
            question: prompt.question_span(),
        }
    }

    /// Opens what the method will reuse. A chunk that is missing, or whose header is broken, is prefilled again (or,
    /// by setting, left to be computed within the prompt).
    pub(crate) fn open_parts(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        reach: usize,
    ) -> Result<Loaded> {
        let mut loaded = Loaded {
            segments: Vec::new(),
            chunk_cached: vec![false; prompt.chunks.len()],
            system_cached: false,
            repaired: 0,
            bytes: 0,
            read: 0,
            read_before: 0,
            waited: Duration::ZERO,
            busy: Duration::ZERO,
        };
        if !method.reuses() {
            loaded.chunk_cached.fill(true);
            loaded.system_cached = true;
            return Ok(loaded);
        }
        // A true prefix is exact only under the rotation that the whole request has.
        let same_rope = || self.decoder.ropes(prompt.system.len()) == self.decoder.ropes(reach);
        let keeps_system = self.keeps_system(prompt) && same_rope();
        if keeps_system {
            self.prefetch(&[self.system_id(&prompt.system)], &[], false)?;
        }
        let ids: Vec<ChunkId> = prompt.chunks.iter().map(|chunk| self.chunk_id(&chunk.tokens)).collect();
        self.prefetch(&ids, &method.summarizes(), false)?;
        if keeps_system {
            self.open_part(prompt, method, None, prompt.system_span(), &mut loaded)?;
        }
        for (index, span) in prompt.chunk_spans().into_iter().enumerate() {
            self.open_part(prompt, method, Some(index), span, &mut loaded)?;
        }
        Ok(loaded)
    }

    /// Adds the segment of a chunk, or of the system part, to `loaded`.
    fn open_part(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        chunk: Option<usize>,
        span: Span,
        loaded: &mut Loaded,
    ) -> Result<()> {
        let summaries = wanted(method, chunk);
        let (id, first_position) = match chunk {
            None => (self.system_id(&prompt.system), 0),
            Some(index) => {
                (self.chunk_id(&prompt.chunks[index].tokens), u32::from(self.tokenizer.bos().is_some()))
            }
        };
        let started = Instant::now();
        // A chunk that comes twice is read once.
        let known = loaded.segments.iter().find(|segment| *segment.reader.id() == id);
        let found = match known {
            Some(segment) => Some((segment.reader.clone(), segment.summaries.clone(), 0, segment.computed)),
            None => self
                .find(&id, &summaries)?
                .map(|(reader, found, read)| (Arc::new(reader), found, read, false)),
        };
        loaded.waited += started.elapsed();
        let (reader, summaries, summary_read, computed) = match found {
            Some(found) => found,
            None => match self.compute_part(prompt, &summaries, chunk, loaded)? {
                Some((chunk, summaries)) => (Arc::new(chunk.into()), summaries, 0, true),
                None => return Ok(()),
            },
        };
        loaded.mark(chunk, true);
        let segment = Segment { chunk, span, reader, summaries, summary_read, computed, first_position };
        loaded.segments.push(segment);
        Ok(())
    }

    /// A chunk in the store, with the summaries that a method wants. One without them is as if it were not there.
    fn find(&self, id: &ChunkId, summaries: &[&dyn Summarize]) -> Result<Option<Found>> {
        let found = self.find_exactly(id, summaries)?;
        match self.shared(id).filter(|_| found.is_none()) {
            Some(shared) => self.find_exactly(&shared, summaries),
            None => Ok(found),
        }
    }

    fn find_exactly(&self, id: &ChunkId, summaries: &[&dyn Summarize]) -> Result<Option<Found>> {
        let (mut found, mut read) = (Vec::new(), 0);
        for of in summaries {
            let held = self.store.has_aux_tensors_in_memory(id, &of.kind());
            let Some(summary) = self.store.aux_tensors(id, &of.kind())? else { return Ok(None) };
            read += if held { 0 } else { summary.bytes() as u64 };
            found.push(summary);
        }
        Ok(self.store.reader(id)?.map(|reader| (reader, found, read)))
    }

    /// Prefills a chunk, or the system part, alone and stores it; not if the chunk is to be left to the prompt.
    fn compute_part(
        &self,
        prompt: &Prompt,
        summaries: &[&dyn Summarize],
        chunk: Option<usize>,
        loaded: &mut Loaded,
    ) -> Result<Option<(Chunk, Vec<Arc<AuxTensors>>)>> {
        let computed = match chunk {
            None => (self.compute_system(prompt)?, Vec::new()),
            Some(index) if self.settings.repair => {
                let chunk = &prompt.chunks[index];
                let (chunk, made, _) =
                    self.compute_chunk(self.chunk_id(&chunk.tokens), &chunk.label(), summaries)?;
                (chunk, made)
            }
            Some(_) => return Ok(None),
        };
        loaded.repaired += 1;
        Ok(Some(computed))
    }

    /// Brings every segment whole into memory. Those that are broken are treated as if they had never been there.
    fn settle(&self, prompt: &Prompt, method: &dyn FusionMethod, loaded: &mut Loaded) -> Result<()> {
        loaded.read_before = loaded.read;
        for mut segment in std::mem::take(&mut loaded.segments) {
            let started = Instant::now();
            let mut found = self.patiently(|| segment.reader.chunk())?;
            if found.is_none() {
                // The same chunk further up may have been repaired just now.
                found = self.store.get(segment.reader.id())?;
            }
            loaded.waited += started.elapsed();
            if found.is_none() {
                let computed =
                    self.compute_part(prompt, &wanted(method, segment.chunk), segment.chunk, loaded)?;
                segment.computed = true;
                found = computed.map(|(chunk, summaries)| {
                    segment.summaries = summaries;
                    chunk
                });
            }
            loaded.mark(segment.chunk, found.is_some());
            if let Some(chunk) = found {
                segment.reader = Arc::new(chunk.into());
                segment.summary_read = 0;
                loaded.segments.push(segment);
            }
        }
        Ok(())
    }

    /// Reads what a method may reuse of a prompt into the store's memory, whole, as far as it is stored and there is room.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn load_into_memory(&self, prompt: &Prompt, method: &dyn FusionMethod) -> Result<()> {
        let contexts = match method.summarizes().is_empty() {
            true => prompt.clone(),
            false => prompt.contexts(self.longest_context()),
        };
        for chunk in &contexts.chunks {
            let id = self.chunk_id(&chunk.tokens);
            if self.store.get(&id)?.is_none()
                && let Some(shared) = self.shared(&id)
            {
                self.store.get(&shared)?;
            }
        }
        Ok(())
    }

    /// Prefills and stores the system part of a prompt, if it is to be kept and is not in the store. Answers do it
    /// themselves; done before, it is no part of the first answer's time.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn ingest_system(&self, prompt: &Prompt) -> Result<()> {
        if self.keeps_system(prompt) && !self.store.contains(&self.system_id(&prompt.system)) {
            self.compute_system(prompt)?;
        }
        Ok(())
    }

    fn keeps_system(&self, prompt: &Prompt) -> bool {
        prompt.system_reusable && !prompt.system.is_empty()
    }

    fn compute_system(&self, prompt: &Prompt) -> Result<Chunk> {
        Ok(self.compute_chunk(self.system_id(&prompt.system), "system part", &[])?.0)
    }
}

impl Loaded {
    /// Counts what came from the folder; a chunk that comes twice was read once.
    fn count_read(&mut self) {
        let mut seen = HashSet::new();
        self.read = self.read_before;
        for segment in &self.segments {
            let first = seen.insert(Arc::as_ptr(&segment.reader));
            self.read += segment.summary_read + if first { segment.reader.bytes_read() } else { 0 };
        }
    }

    /// Notes whether a chunk, or the system part, comes from the cache.
    fn mark(&mut self, chunk: Option<usize>, cached: bool) {
        match chunk {
            None => self.system_cached = cached,
            Some(index) => self.chunk_cached[index] = cached,
        }
    }
}
