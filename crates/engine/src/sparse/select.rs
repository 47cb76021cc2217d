//! What a sparse method selects: asked with the question's queries over its base.

use std::time::Instant;

use refrain_fusion::{Draft, Selection};
use refrain_kv::{KvCache, Lender, Span, stats};

use super::{Asked, Loading, Request, Run, attend, see, summaries};
use crate::forward::State;
use crate::prefill::{Work, operations, seen};
use crate::sparse::pieces::Pieces;
use crate::{Engine, Error, Result};

impl Engine {
    /// Tokens that a sparse method would keep of the prompt, and what it took to know; nothing if a segment turned out broken.
    pub(crate) fn kept_by<'e>(
        &'e self,
        request: Request<'_, 'e>,
        always: &[u32],
        lender: &Lender<'_>,
        load: &mut Loading,
    ) -> Result<Option<(usize, Work)>> {
        let vacant = KvCache::vacant(self.decoder.shape(), self.settings.kv, request.asked.prompt.len());
        let mut state = State::over(&self.decoder, vacant, request.asked.reach);
        let selected = self.select_sparse(request, always, lender, load, &mut state)?;
        let kept = |(mut run, selection): (Run<'_, '_>, Selection)| {
            (0..selection.layers.len()).for_each(|layer| run.free(layer));
            (run.places(selection.layers[0].spans.iter().copied()).len(), run.work)
        };
        Ok(selected.map(kept))
    }

    /// Asks a sparse method what it keeps, over its draft.
    pub(super) fn select_sparse<'a, 'e>(
        &'e self,
        request: Request<'a, 'e>,
        always: &'a [u32],
        lender: &'a Lender<'a>,
        load: &'a mut Loading,
        state: &mut State,
    ) -> Result<Option<(Run<'a, 'e>, Selection)>> {
        let Request { asked: Asked { view, segments, reach, .. }, sparse, .. } = request;
        let config = self.decoder.config();
        let missing = view.chunks.iter().filter(|context| !context.cached).map(|context| context.span);
        let fixed = [view.system, view.question].into_iter().chain(missing).collect();
        let pieces = vec![Pieces::default(); config.num_layers()];
        let mut run =
            Run { request, engine: self, always, fixed, lender, load, pieces, work: Work::default() };
        let queries = match sparse.asks(&view) {
            true => run.draft(state)?,
            false => Some(Vec::new()),
        };
        let Some(queries) = queries else { return Ok(None) };
        let started = Instant::now();
        let summaries = summaries(segments, view.chunks.len(), request.kind);
        let draft = Draft {
            prompt: &view,
            summaries: &summaries,
            queries: &queries,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            ropes: &self.decoder.ropes(reach),
            stable_layers: self.stable_layers,
        };
        let selection = sparse.select(&draft)?;
        run.check(&selection)?;
        run.work.selecting += started.elapsed();
        run.work.undecided = selection.undecided;
        Ok(Some((run, selection)))
    }
}

impl Run<'_, '_> {
    /// The question over the base: its mean query before RoPE at each layer; nothing if a segment is broken.
    fn draft(&mut self, state: &mut State) -> Result<Option<Vec<f32>>> {
        let (started, loading) = (Instant::now(), self.load.busy);
        let decoder = state.decoder.clone();
        let config = decoder.config();
        let places = self.places(self.request.sparse.base(&self.request.asked.view));
        let (question, width) = (self.request.asked.view.question.len(), config.heads * config.head_dim);
        let mut rows = state.embed(&self.request.asked.prompt.ids(), self.always.to_vec())?;
        let mut means = Vec::with_capacity(config.num_layers() * width);
        for layer in 0..config.num_layers() {
            self.engine.pause()?;
            if !self.read(layer, &places) {
                return Ok(None);
            }
            state.decoder.project(layer, &rows.x, &mut state.work);
            let asked = &state.work.q[(rows.positions.len() - question) * width..];
            means.extend(stats::mean(asked, width));
            if layer + 1 == config.num_layers() {
                self.work.operations += operations(config, rows.positions.len(), 0, 0);
                break;
            }
            state.rotate_queries(layer, &rows);
            let mut cache = self.cache(state, layer, &places);
            let slots: Vec<u32> = rows.positions.iter().map(|p| places.before(*p)).collect();
            let kv = rows.positions.len() * config.kv_heads * config.head_dim;
            let (k, v) = (state.work.k.as_slice().range(0..kv), state.work.v.as_slice().range(0..kv));
            let rotary = rows.rotary.layer(layer).all();
            cache.place(state.decoder.backend(), state.cache.shape(), (k, v), rotary, &slots);
            see(&mut rows, &places, config.layers[layer].window);
            self.work.operations += operations(config, slots.len(), slots.len(), seen(&rows.visible));
            attend(state, layer, (&cache, places.len()), 0..rows.positions.len(), &rows.visible);
            state.finish(layer, &mut rows);
            self.lender.give(cache);
        }
        state.next = rows;
        self.work.selecting += started.elapsed().saturating_sub(self.load.busy - loading);
        Ok(Some(means))
    }

    /// What a method selects must be computable: within the cached documents, base included, as much at every layer.
    fn check(&self, selection: &Selection) -> Result<()> {
        let fail = |why| Err(Error::Selection { method: format!("{:?}", self.request.sparse), why });
        let view = &self.request.asked.view;
        if selection.layers.len() != view.layers {
            return fail("it has not one entry a layer");
        }
        let ends = |span: &Span| {
            view.chunks.iter().any(|c| c.cached && c.span.start <= span.start && span.end <= c.span.end)
        };
        let base = self.request.sparse.base(view);
        for kept in &selection.layers {
            if !base.iter().flat_map(|span| span.positions()).all(|position| kept.contains(position)) {
                return fail("a layer does not keep the base");
            }
            if !kept.spans.is_sorted_by(|a, b| a.end <= b.start) || !kept.spans.iter().all(ends) {
                return fail("its spans are not ascending, each within a cached document");
            }
            let fresh = &kept.fresh;
            if !fresh.is_sorted_by(|a, b| a < b) || !fresh.iter().all(|p| kept.contains(*p)) {
                return fail("tokens computed anew are not ascending among those kept");
            }
            if kept.len() != selection.layers[0].len() {
                return fail("layers keep different numbers of tokens");
            }
        }
        Ok(())
    }
}
