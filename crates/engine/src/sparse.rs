//! Prefill over a part of the documents: what a sparse method does not keep is neither read nor computed.
//!
//! The question is computed over the method's base first, for its queries. Then all layers again, over what the method
//! selected: rows of tokens that are computed anew and of the question side by side, each layer's cache made of what is
//! kept there and handed to the cache that decoding goes on in.

mod pieces;
mod select;

use std::ops::Range;
use std::time::{Duration, Instant};

use refrain_eviction::{Eviction, PromptSpans};
use refrain_fusion::{Kept, PromptView, Selection, SparseMethod};
use refrain_kernels::Buffer;
use refrain_kv::{AuxTensors, KvCache, LayerCache, Lender, RopeTable, Span, stats};

use crate::bounded::{Bounded, PromptRows};
use crate::closeness::{AttentionMap, question_keys};
use crate::forward::{Rows, State, attention};
use crate::load::Segment;
use crate::places::Places;
use crate::prefill::{EXPLAIN_LAYER, Watch, Work, count_within, operations, seen};
use crate::prompt::Prompt;
use crate::{Engine, Result};
use pieces::Pieces;

/// A prompt whose documents are contexts, with its cached segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a, 'e> {
    pub(crate) prompt: &'a Prompt,
    pub(crate) view: PromptView<'a>,
    pub(crate) segments: &'a [Segment],
    pub(crate) eviction: &'e Eviction,
    /// Tokens of prompt and answer, and the farthest that a key is from a query.
    pub(crate) room: usize,
    pub(crate) reach: usize,
}

/// What is asked of a sparse method.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a, 'e> {
    pub(crate) asked: Asked<'a, 'e>,
    pub(crate) sparse: &'a dyn SparseMethod,
    /// Which of each segment's summaries are its own.
    pub(crate) kind: usize,
    pub(crate) watch: Watch,
}

/// What was brought in from the store.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Loading {
    pub(crate) bytes: u64,
    /// Time that it took; nothing is computed meanwhile.
    pub(crate) busy: Duration,
}

/// One prefill.
struct Run<'a, 'e> {
    request: Request<'a, 'e>,
    engine: &'e Engine,
    /// Positions computed at every layer: the question, and what is not cached.
    always: &'a [u32],
    /// Spans that every layer holds whole: the same, and the system part.
    fixed: Vec<Span>,
    lender: &'a Lender<'a>,
    load: &'a mut Loading,
    /// What was read of each layer.
    pieces: Vec<Pieces>,
    work: Work,
}

impl Engine {
    /// Computes the prompt; nothing if a segment turned out broken.
    pub(crate) fn prefill_sparse<'e>(
        &'e self,
        request: Request<'_, 'e>,
        always: &[u32],
        lender: &Lender<'_>,
        load: &mut Loading,
    ) -> Result<Option<(State, Vec<f32>, Work)>> {
        let vacant = KvCache::vacant(self.decoder.shape(), self.settings.kv, request.asked.prompt.len());
        let mut state = State::over(&self.decoder, vacant, request.asked.reach).giving_to(&self.pool);
        let Some((mut run, selection)) = self.select_sparse(request, always, lender, load, &mut state)?
        else {
            return Ok(None);
        };
        let logits = run.compute(&mut state, &selection)?;
        let work = run.work;
        Ok(logits.map(|logits| (state, logits, work)))
    }
}

/// What is kept beside each of a prompt's contexts, of one kind.
pub(crate) fn summaries(segments: &[Segment], contexts: usize, kind: usize) -> Vec<Option<&AuxTensors>> {
    let of = |index: usize| segments.iter().find(|segment| segment.chunk == Some(index));
    (0..contexts).map(|index| of(index)?.summaries.get(kind).map(AsRef::as_ref)).collect()
}

impl<'e> Run<'_, 'e> {
    /// What a layer holds that keeps `spans` of the documents.
    fn places(&self, spans: impl IntoIterator<Item = Span>) -> Places {
        Places::new(spans.into_iter().chain(self.fixed.iter().copied()))
    }

    /// Reads what is not there yet of what a layer holds; false if a segment is broken.
    fn read(&mut self, layer: usize, places: &Places) -> bool {
        let (cpu, segments) = (self.engine.decoder.backend(), self.request.asked.segments);
        let pieces = &mut self.pieces[layer];
        let before = pieces.bytes();
        let read = pieces.read(cpu, segments, layer, places, self.load);
        self.lender.count(pieces.bytes() - before);
        read.is_some()
    }

    /// A cache of these places, filled with what was read.
    fn cache(&self, state: &State, layer: usize, places: &Places) -> LayerCache {
        let shape = state.cache.shape();
        let mut cache = self.lender.take(shape, state.cache.dtype(), places.len());
        for piece in self.pieces[layer].iter() {
            let rotary = state.tables.layer(layer).slice(piece.span.range().start, piece.span.range().end);
            let first = places.before(piece.span.start);
            let slots: Vec<u32> = (first..first + piece.span.len() as u32).collect();
            cache.place(state.decoder.backend(), shape, piece.kv(shape.width()), rotary, &slots);
        }
        cache
    }

    /// All layers over what was selected. Returns the logits of the last token; nothing if a segment is broken.
    fn compute(&mut self, state: &mut State, selection: &Selection) -> Result<Option<Vec<f32>>> {
        let (prompt, layers) = (self.request.asked.prompt, selection.layers.len());
        let passes = selection.passes();
        self.bound(state, self.places(selection.layers[0].spans.iter().copied()).len())?;
        let always = self.always;
        let with_always = |rows: &[u32]| {
            let mut all = [always, rows].concat();
            all.sort_unstable();
            all
        };
        let mut rows = state.embed(&prompt.ids(), with_always(&passes[0].rows))?;
        let mut read = Places::default();
        for (layer, (kept, pass)) in selection.layers.iter().zip(&passes).enumerate() {
            self.engine.pause()?;
            let padded = pass.padded.iter().map(|p| Span { start: *p, end: p + 1 });
            let spans = kept.spans.iter().copied().chain(padded);
            let (held, all) = (self.places(kept.spans.iter().copied()), self.places(spans));
            if !self.read(layer, &all) {
                return Ok(None);
            }
            read = Places::new(read.spans().iter().chain(all.spans()).copied());
            state.project_queries(layer, &rows);
            let projected = rows.positions.len();
            self.work.document_rows.push(count_within(&rows.positions, self.request.asked.view.documents()));
            let mut cache = self.cache(state, layer, &all);
            self.place(state, layer, &rows, (kept, &all), &mut cache);
            self.free(layer);
            if layer + 1 == layers {
                self.work.final_rows.clone_from(&rows.positions);
            }
            state.narrow(&mut rows, with_always(&pass.on));
            self.attend(state, layer, &mut rows, (&held, &all), cache);
            self.work.operations += operations(state.decoder.config(), projected, rows.positions.len(), 0);
            state.finish(layer, &mut rows);
        }
        let cached =
            |span: Span| self.request.asked.segments.iter().any(|s| s.chunk.is_none() && s.span == span);
        let fixed = self.fixed.iter().filter(|span| !cached(**span)).map(|span| span.len()).sum::<usize>();
        self.work.cached_tokens = read.len() - fixed;
        self.work.kv_bytes_peak = self.lender.peak();
        state.len = prompt.len();
        state.decoder.logits(&rows.x, &mut state.work);
        state.next = rows;
        Ok(Some(state.work.logits.to_vec()))
    }

    /// Makes the cache that decoding goes on in: `held` tokens of the prompt, and room for the answer.
    fn bound(&mut self, state: &mut State, held: usize) -> Result<()> {
        let Asked { view, eviction, room, reach, .. } = self.request.asked;
        let left_out = view.len() - held;
        let asked = held - view.question.len();
        let spans = PromptSpans { system: view.system, question: Span::new(asked, held) };
        let decoder = state.decoder.clone();
        let (config, dtype) = (decoder.config(), state.cache.dtype());
        let ropes = state.decoder.ropes(reach);
        state.bounded = Bounded::new(config, ropes, eviction, spans, dtype, room - left_out, true)?;
        state.left_out = left_out as u32;
        self.work.kept_tokens = held;
        Ok(())
    }

    /// Places the keys and values of projected rows, merged with the cached ones where the method does that. Those of
    /// tokens that are not computed anew at this layer stay as they were cached.
    fn place(
        &self,
        state: &State,
        layer: usize,
        rows: &Rows,
        (kept, all): (&Kept, &Places),
        cache: &mut LayerCache,
    ) {
        let (shape, dtype) = (state.cache.shape(), state.cache.dtype());
        let width = shape.width();
        let is_fresh = |p: &u32| self.always.binary_search(p).is_ok() || kept.fresh.binary_search(p).is_ok();
        let chosen: Vec<usize> =
            (0..rows.positions.len()).filter(|i| is_fresh(&rows.positions[*i])).collect();
        let positions: Vec<u32> = chosen.iter().map(|i| rows.positions[*i]).collect();
        let (mut k, mut v) =
            (Buffer::zeros(dtype, chosen.len() * width), Buffer::zeros(dtype, chosen.len() * width));
        let sparse = self.request.sparse;
        let (mut new, mut old) = (vec![0.0; width], vec![0.0; width]);
        for (to, i) in chosen.iter().enumerate() {
            let cached = match sparse.overwrites() {
                true => None,
                false => self.pieces[layer].at(positions[to], width),
            };
            let sides =
                [(&mut k, &state.work.k, cached.map(|c| c.0)), (&mut v, &state.work.v, cached.map(|c| c.1))];
            for (out, computed, cached) in sides {
                let computed = computed.as_slice().range(i * width..(i + 1) * width);
                let Some(cached) = cached else {
                    out.write(to * width, computed);
                    continue;
                };
                computed.to_f32(&mut new);
                cached.to_f32(&mut old);
                sparse.merge(&mut new, &old, shape.head_dim);
                out.write_f32(to * width, &new);
            }
        }
        let mut rotary = RopeTable::default();
        state.tables.layer(layer).gather(&positions, &mut rotary);
        let slots: Vec<u32> = positions.iter().map(|p| all.before(*p)).collect();
        let turned = rotary.all();
        cache.place(state.decoder.backend(), shape, (k.as_slice(), v.as_slice()), turned, &slots);
    }

    /// Gives up what was read of a layer.
    fn free(&mut self, layer: usize) {
        self.lender.discount(std::mem::take(&mut self.pieces[layer]).bytes());
    }

    /// Attention of all rows: those of documents see what stands in for tokens that are not kept (`all`), the question
    /// only what is (`held`). What is kept goes over to the cache that decoding goes on in.
    fn attend(
        &mut self,
        state: &mut State,
        layer: usize,
        rows: &mut Rows,
        (held, all): (&Places, &Places),
        cache: LayerCache,
    ) {
        let decoder = state.decoder.clone();
        let config = decoder.config();
        let (shape, window) = (state.cache.shape(), config.layers[layer].window);
        let (mut done, mut copied) = (0, 0);
        let mut cache = cache;
        if held.len() < all.len() {
            done = rows.positions.partition_point(|p| *p < self.request.asked.view.question.start);
            see(rows, all, window);
            attend(state, layer, (&cache, all.len()), 0..done, &rows.visible);
            let slots: Vec<u32> =
                held.spans().iter().flat_map(|s| all.before(s.start)..all.before(s.end)).collect();
            let kept = cache.gather(shape.head_dim, all.len(), &slots.repeat(shape.kv_heads), 1, held.len());
            self.lender.count(kept.bytes());
            copied = kept.bytes();
            self.lender.give(std::mem::replace(&mut cache, kept));
            self.work.operations += operations(config, 0, 0, seen(&rows.visible[..done]));
        }
        see(rows, held, window);
        self.watch(state, layer, &cache, held);
        if let Some(bounded) = &mut state.bounded {
            let width = state.work.q.len() / rows.positions.len();
            let places: Vec<u32> = rows.positions[done..].iter().map(|p| held.before(*p)).collect();
            let prompt = PromptRows {
                q: &state.work.q[done * width..],
                positions: &places,
                visible: &rows.visible[done..],
            };
            let origins = window.map(|_| held.spans().iter().flat_map(|span| span.positions()).collect());
            bounded.take_in(state.decoder.backend(), &cache, prompt, origins, self.lender);
        }
        if layer + 1 == config.num_layers() {
            // Nobody needs the others' output.
            state.narrow(rows, vec![self.request.asked.view.len() as u32 - 1]);
            see(rows, held, window);
            done = 0;
        }
        attend(state, layer, (&cache, held.len()), done..rows.positions.len(), &rows.visible);
        self.work.operations += operations(config, 0, 0, seen(&rows.visible[done..]));
        match copied {
            0 => self.lender.give(cache),
            copied => self.lender.discount(copied),
        }
    }

    /// Reports attention of the question to the documents' tokens that are kept; there is none to the others.
    fn watch(&mut self, state: &State, layer: usize, cache: &LayerCache, held: &Places) {
        let watch = self.request.watch;
        let explained = EXPLAIN_LAYER.min(state.decoder.config().num_layers() - 1);
        if watch == Watch::Nothing || (watch == Watch::Explain && layer != explained) {
            return;
        }
        let started = Instant::now();
        let PromptView { system, question, .. } = self.request.asked.view;
        let documents = self.request.asked.view.documents();
        let cpu = state.decoder.backend();
        let keys = question_keys(state, cache, held.len(), (layer, question.len()));
        let asked = held.len() - question.len();
        let spans = (Span::new(system.len(), asked), Span::new(asked, held.len()));
        let positions = held.spans().iter().flat_map(|span| span.positions()).skip(system.len());
        let kept: Vec<usize> =
            positions.take(spans.0.len()).map(|position| (position - system.end) as usize).collect();
        if watch == Watch::Maps {
            let map = AttentionMap::of(cpu, &keys, spans).spread(&kept, documents.len());
            self.work.maps.push(map);
            self.work.watching += started.elapsed();
            return;
        }
        let found = stats::question_attention(cpu, &keys, spans.0, spans.1, stats::Softmax::PerHead);
        let mut attention = vec![0.0; documents.len()];
        kept.iter().zip(found).for_each(|(token, weight)| attention[*token] = weight);
        self.work.attention = Some(attention);
    }
}

/// Lets each row see what is held up to its own place, within the window.
fn see(rows: &mut Rows, places: &Places, window: Option<usize>) {
    rows.visible.clear();
    rows.visible.extend(rows.positions.iter().map(|p| places.visible(*p, window)));
}

/// Attention of some of the projected rows.
fn attend(
    state: &mut State,
    layer: usize,
    (cache, capacity): (&LayerCache, usize),
    rows: Range<usize>,
    visible: &[(u32, u32)],
) {
    let width = state.work.q.len() / visible.len();
    state.work.attended.resize(state.work.q.len());
    if rows.is_empty() {
        return;
    }
    let elements = rows.start * width..rows.end * width;
    let attention =
        attention(&state.decoder, layer, (cache, capacity), &state.work.q[elements.clone()], &visible[rows]);
    state.decoder.backend().attention(&attention, &mut state.work.attended[elements]);
}
