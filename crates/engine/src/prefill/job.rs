//! A prefill as resumable work: every step is at most one layer.

use std::sync::Arc;
use std::time::Duration;

use refrain_eviction::{Eviction, PromptSpans};
use refrain_fusion::{ChunkSpan, FusionMethod, ModelFacts, PrefillInputs, PromptLayout};
use refrain_kernels::DeviceFailure;
use refrain_kv::{KvAllocator, Span};
use refrain_store::{Fetched, KvQuantization};

use super::capture::AttentionCapture;
use super::context::PassContext;
use super::layers::Carried;
use super::pass::{AfterProbe, Finished, PassRun, Step};
use super::prefetch::LayerPrefetcher;
use super::reuse::{Opening, ReusedSegments, Segment};
use super::stats::PrefillStats;
use super::take_over::{PromptPrefix, rest_of};
use crate::Result;
use crate::advance::{Advance, PATIENCE};
use crate::background::Background;
use crate::cache::{EvictingCache, SequenceCache};
use crate::device_chunks::ClosedChunks;
use crate::engine::Engine;
use crate::ingest::{ChunkWriter, kinds_of};
use crate::prefix_cache::PrefixRoot;
use crate::prompt::{Prompt, PromptChunk};

/// The way in which a prompt is to be computed.
#[derive(Clone, Debug)]
pub(crate) struct PrefillRequest {
    pub(crate) method: Arc<dyn FusionMethod>,
    pub(crate) eviction: Eviction,
    /// Tokens of prompt and answer at most.
    pub(crate) max_seq_len: usize,
    pub(crate) capture: AttentionCapture,
}

/// A prompt after prefill.
#[derive(Debug)]
pub(crate) struct Prefilled {
    pub(crate) cache: SequenceCache,
    /// Logits of the prompt's last token.
    pub(crate) logits: Vec<f32>,
    pub(crate) stats: PrefillStats,
    pub(crate) load: BackgroundLoad,
    /// The chain of blocks of the prefix cache that the sequence belongs to.
    pub(crate) prefix: Option<PrefixRoot>,
}

/// The reused segments of a prefill with the loaders that may still read for the store's memory.
#[derive(Debug)]
pub(crate) struct BackgroundLoad {
    pub(crate) reused: ReusedSegments,
    prefetcher: Option<LayerPrefetcher>,
}

impl BackgroundLoad {
    /// Counts what was read since the prefill ended. Loaders that are not done go on by themselves.
    pub(crate) fn finish(self) -> ReusedSegments {
        let BackgroundLoad { mut reused, prefetcher } = self;
        if let Some(mut prefetcher) = prefetcher {
            reused.load = reused.load + prefetcher.count();
            prefetcher.pin();
        }
        reused
    }

    /// Waits until the loaders have ended, and counts all that they read.
    pub(crate) fn join(&mut self) {
        if let Some(mut prefetcher) = self.prefetcher.take() {
            prefetcher.join();
            self.reused.load = self.reused.load + prefetcher.count();
        }
    }
}

/// A prefill under way.
#[derive(Debug)]
pub(crate) struct PrefillJob {
    engine: Engine,
    /// The prompt; for a method with statistics its documents are in one piece.
    prompt: Prompt,
    request: PrefillRequest,
    prefix: PromptPrefix,
    max_rope_position: usize,
    reused: ReusedSegments,
    /// Parts that were computed, on their way to the store.
    writer: ChunkWriter,
    stage: Stage,
    /// Whether the segments were read whole into memory, after one of them had broken.
    materialized: bool,
    /// The order in which the method has put the prompt's chunks, and the work of the probe that it took.
    order: Option<Vec<usize>>,
    ordering: PrefillStats,
    prefilled: Option<Box<Prefilled>>,
    /// Keeps the memory that was promised to the prompt from chunks.
    _closed_chunks: Option<ClosedChunks>,
}

#[derive(Debug)]
enum Stage {
    /// The prefix cache is asked for the beginning of the prompt, and the object store for chunks.
    Start,
    /// The object store is asked for chunks.
    Fetch(Background<Fetched>, Opening),
    /// Parts of the prompt are opened, and repaired where they are missing or broken.
    Open(Opening),
    /// The method decides on its first pass.
    Plan,
    /// A pass goes through the layers.
    Pass(Box<PassRun>),
    Done,
}

impl PrefillJob {
    /// Begins a prefill.
    ///
    /// # Errors
    /// If the prompt does not fit the context or the device's memory, or the eviction policy refuses it.
    pub(crate) fn start(engine: &Engine, prompt: &Prompt, request: PrefillRequest) -> Result<PrefillJob> {
        let method = request.method.as_ref();
        let max_rope_position = engine.max_rope_position(
            prompt,
            &request.eviction,
            request.max_seq_len,
            method.keeps_all_tokens(),
        )?;
        let closed_chunks =
            engine.check_prompt_memory(prompt, method, request.max_seq_len, &request.eviction)?;
        let prompt = engine.parts_of(prompt, method).into_owned();
        Ok(PrefillJob {
            engine: engine.clone(),
            reused: ReusedSegments::none(!method.reuses()),
            prompt,
            request,
            prefix: PromptPrefix::default(),
            max_rope_position,
            writer: ChunkWriter::default(),
            stage: Stage::Start,
            materialized: false,
            order: None,
            ordering: PrefillStats::default(),
            prefilled: None,
            _closed_chunks: closed_chunks,
        })
    }

    /// Takes over what the prefix cache has of the prompt, or begins to open the parts that the method reuses. Prompts that were computed
    /// while this one waited for its turn count.
    fn first_stage(&mut self) -> Result<Stage> {
        let (engine, method) = (&self.engine, &self.request.method);
        // An explanation wants all of the question's rows.
        let takes = self.request.capture == AttentionCapture::Nothing;
        let by = (method.as_ref(), &self.request.eviction);
        self.prefix = PromptPrefix::look_up(engine, &self.prompt, by, self.max_rope_position, takes);
        if let Some(found) = &self.prefix.found {
            let (rest, method) = rest_of(&self.prompt, found.len());
            (self.prompt, self.request.method) = (rest, method);
            self.reused = ReusedSegments::none(true);
            return Ok(Stage::Plan);
        }
        if !method.reuses() {
            return Ok(Stage::Plan);
        }
        let opening = Opening::new(engine, &self.prompt, self.max_rope_position);
        let kinds = kinds_of(&method.statistics());
        Ok(match engine.prefetch_chunks(opening.wanted(engine, &self.prompt), kinds, false)? {
            Some(fetch) => Stage::Fetch(fetch, opening),
            None => Stage::Open(opening),
        })
    }

    /// Does one step, which waits for `patience` at most. After an error the job is over.
    pub(crate) fn advance(&mut self, patience: Duration) -> Result<Advance> {
        DeviceFailure::catch(|| self.step(patience))?
    }

    fn step(&mut self, patience: Duration) -> Result<Advance> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Start => self.stage = self.first_stage()?,
            Stage::Fetch(mut fetch, opening) => {
                let Some(fetched) = fetch.poll(patience) else {
                    self.stage = Stage::Fetch(fetch, opening);
                    return Ok(Advance::Waiting);
                };
                self.reused.unfetched += fetched.passed_over;
                self.stage = Stage::Open(opening);
            }
            Stage::Open(mut opening) => {
                let method = &self.request.method;
                let (reused, writer) = (&mut self.reused, &mut self.writer);
                let advance =
                    opening.advance(&self.engine, &self.prompt, method, (reused, writer), patience)?;
                let done = advance == Advance::Done;
                self.stage = if done { Stage::Plan } else { Stage::Open(opening) };
                return Ok(if done { Advance::Progress } else { advance });
            }
            Stage::Plan => {
                let context = Arc::new(self.context()?);
                let pass = self.request.method.start(&context.inputs)?;
                let run = PassRun::start(&context, pass, Carried::Nothing, self.ordering.clone())?;
                self.stage = Stage::Pass(Box::new(run));
            }
            Stage::Pass(mut run) => match run.advance(patience)? {
                Step::Layer => self.stage = Stage::Pass(run),
                Step::Waiting => {
                    self.stage = Stage::Pass(run);
                    return Ok(Advance::Waiting);
                }
                Step::Broken if self.materialized => return Err(crate::Error::Loading),
                Step::Broken => {
                    self.count(&mut run);
                    self.materialized = true;
                    // All of it is in memory then: the next attempt cannot break.
                    self.stage = Stage::Open(Opening::materialize(&mut self.reused));
                }
                Step::Done => {
                    self.end_pass(*run)?;
                    // A step that computes does not wait as well.
                    let is_over = matches!(self.stage, Stage::Done) && self.writer.is_done(Duration::ZERO)?;
                    return Ok(if is_over { Advance::Done } else { Advance::Progress });
                }
            },
            Stage::Done if !self.writer.is_done(patience)? => return Ok(Advance::Waiting),
            Stage::Done => return Ok(Advance::Done),
        }
        Ok(Advance::Progress)
    }

    /// The prefilled prompt, once [`PrefillJob::advance`] has said that all is done.
    pub(crate) fn finish(self) -> Option<Prefilled> {
        self.prefilled.map(|prefilled| *prefilled)
    }

    /// Time for which steps have only waited for keys and values so far.
    pub(crate) fn waited(&self) -> Duration {
        let pass = match &self.stage {
            Stage::Pass(run) => run.layers.total_waited(),
            _ => Duration::ZERO,
        };
        let ended = self.prefilled.as_ref().map(|prefilled| prefilled.load.reused.waited);
        ended.unwrap_or(self.reused.waited + pass)
    }

    /// Does all of it.
    pub(crate) fn run(mut self) -> Result<Prefilled> {
        while self.advance(PATIENCE)? != Advance::Done {}
        Ok(self.finish().unwrap_or_else(|| unreachable!("a prefill ends with a prefilled prompt")))
    }

    /// Counts the loading of a pass.
    fn count(&mut self, run: &mut PassRun) {
        self.reused.load = self.reused.load + run.layers.count_load();
        self.reused.waited += run.layers.total_waited();
    }

    /// Goes on with the next pass, or ends after the last.
    fn end_pass(&mut self, mut run: PassRun) -> Result<()> {
        self.count(&mut run);
        if run.layers.plan.probe.is_some() {
            let context = run.layers.context.clone();
            if let Some(order) = run.layers.pass.order() {
                let AfterProbe { carried, stats, .. } = run.next()?;
                carried.release(&context);
                self.ordering = stats;
                return self.put_in_order(order);
            }
            let AfterProbe { next, carried, stats } = run.next()?;
            let Some(next) = next else {
                let method = format!("{:?}", self.request.method);
                return Err(crate::Error::Tokens { method, why: "no pass follows its probe" });
            };
            self.stage = Stage::Pass(Box::new(PassRun::start(&context, next, carried, stats)?));
            return Ok(());
        }
        let Finished { cache, logits, stats, prefetcher, tokens, evicting } = run.finish();
        let engine = &self.engine;
        if evicting {
            // A bounded cache is asked for where memory is short: what the prompt took goes back.
            engine.buffers().kv.trim(0);
        } else {
            engine.buffers().release(tokens);
        }
        let cache =
            SequenceCache::new(engine.decoder_arc(), cache, self.prompt.len(), engine.buffers().kv.clone());
        let reused = std::mem::replace(&mut self.reused, ReusedSegments::none(false));
        let load = BackgroundLoad { reused, prefetcher };
        let mut stats = PrefillStats { order: self.order.take(), ..stats };
        if let Some(found) = &self.prefix.found {
            (stats.prefix_tokens, stats.cached_tokens) = (found.len(), found.len());
            (stats.reused_tokens, stats.prefilled_tokens) = (0, 0);
        }
        // In another order the tokens are not those that a later prompt begins with.
        let prefix = self.prefix.root.filter(|_| stats.order.is_none());
        self.prefilled = Some(Box::new(Prefilled { cache, logits, stats, load, prefix }));
        Ok(())
    }

    /// Puts the prompt's chunks in another order, over which the method begins anew.
    fn put_in_order(&mut self, order: Vec<usize>) -> Result<()> {
        let mut places = vec![None; self.prompt.chunks.len()];
        order
            .iter()
            .enumerate()
            .for_each(|(to, from)| _ = places.get_mut(*from).map(|place| *place = Some(to)));
        if self.order.is_some() || order.len() != places.len() || places.contains(&None) {
            let method = format!("{:?}", self.request.method);
            return Err(crate::Error::Tokens {
                method,
                why: "an order names each chunk once, and is given once",
            });
        }
        self.prompt = self.prompt.in_order(&order);
        let spans = self.prompt.chunk_spans();
        let mut segments: Vec<Segment> = self.reused.segments.to_vec();
        for segment in &mut segments {
            segment.chunk = segment.chunk.and_then(|chunk| places[chunk]);
            segment.span = segment.chunk.map_or(segment.span, |chunk| spans[chunk]);
        }
        segments.sort_by_key(|segment| segment.span.start);
        self.reused.segments = segments.into();
        self.order = Some(order);
        self.stage = Stage::Plan;
        Ok(())
    }

    /// Tells of each chunk whether its keys and values are those of a full prefill: the same tokens stand before it in this prompt as
    /// when it was prefilled, it lies in the store as computed, and keys are rotated as they were then. Methods with statistics
    /// select parts of chunks all the same.
    fn exact_chunks(&self) -> Vec<bool> {
        let (engine, prompt) = (&self.engine, &self.prompt);
        let decoder = engine.decoder();
        let possible = engine.before_chunks() == prompt.system
            && engine.settings().store_dtype == KvQuantization::Exact
            && self.request.method.statistics().is_empty();
        let mean = |index| {
            let of = |segment: &&Segment| segment.chunk == Some(index);
            let segment = self.reused.segments.iter().find(of);
            segment.is_some_and(|segment| !engine.averaged_for(segment.reader.id()).is_empty())
        };
        let mut before: Vec<u32> = Vec::new();
        let is_exact = |(index, chunk): (usize, &PromptChunk)| {
            let behind = possible && chunk.left == before && !mean(index);
            before.extend_from_slice(&chunk.tokens);
            behind
                && decoder.ropes(prompt.system.len() + before.len()) == decoder.ropes(self.max_rope_position)
        };
        prompt.chunks.iter().enumerate().map(is_exact).collect()
    }

    /// The request as the method's passes see it.
    fn context(&self) -> Result<PassContext> {
        let (engine, prompt, request) = (&self.engine, &self.prompt, &self.request);
        let (decoder, reused) = (engine.decoder_arc(), &self.reused);
        let config = decoder.config();
        let (exact, alone) = (self.exact_chunks(), engine.before_chunks().is_empty());
        let chunk = |(i, span): (usize, Span)| ChunkSpan {
            span,
            exact: exact[i],
            bare: alone && prompt.chunks[i].left.is_empty(),
        };
        let layout = PromptLayout {
            layers: config.num_layers(),
            system: prompt.system_span(),
            system_cached: reused.system_cached,
            chunks: prompt.chunk_spans().into_iter().enumerate().map(chunk).collect(),
            question: prompt.question_span(),
        };
        let ropes = decoder.ropes(self.max_rope_position);
        let spans = PromptSpans { system: layout.system, question: layout.question };
        // A cache whose tokens are evicted holds the prompt alone while it is computed.
        let budget = EvictingCache::budget(&request.eviction, &spans, request.max_seq_len, false)?;
        let max_tokens = if budget.is_some() { layout.len() } else { request.max_seq_len };
        // Keys of a chunk may keep the positions that they were prefilled at, which can lie behind the prompt's end.
        let last =
            reused.segments.iter().map(|segment| segment.first_position as usize + segment.span.len()).max();
        let positions = max_tokens.max(layout.len()).max(last.unwrap_or(0));
        let mut statistics = vec![Vec::new(); prompt.chunks.len()];
        for segment in reused.segments.iter() {
            if let Some(index) = segment.chunk {
                statistics[index].clone_from(&segment.statistics);
            }
        }
        let model = ModelFacts {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            ropes,
            windows: config.layers.iter().map(|layer| layer.window).collect(),
            stable_layers: engine.stable_layers(),
        };
        Ok(PassContext {
            engine: engine.clone(),
            method: format!("{:?}", request.method),
            ids: prompt.ids(),
            segments: reused.segments.clone(),
            taken: self.prefix.found.clone(),
            eviction: request.eviction.clone(),
            capture: request.capture,
            allocator: KvAllocator::new(decoder.device().clone(), engine.buffers().kv.clone()),
            max_seq_len: request.max_seq_len,
            max_rope_position: self.max_rope_position,
            tables: decoder.rope_tables(self.max_rope_position, positions),
            inputs: Arc::new(PrefillInputs {
                layout,
                model,
                max_tokens,
                statistics,
                reordered: self.order.is_some(),
            }),
        })
    }
}
