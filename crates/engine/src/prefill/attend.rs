//! Attention of one layer of a pass, over all tokens of the prompt or over selected ones.

use std::ops::Range;

use refrain_fusion::{Mask, PromptLayout};
use refrain_kernels::{GumbelNoise, copy_range};
use refrain_kv::LayerCache;

use super::capture::AttentionCapture;
use super::layers::{AnswerCache, AttendingLayer, PassLayers, Source};
use super::prefetch::PrefetchedLayer;
use super::reuse::Segment;
use super::selected::SelectedLayers;
use super::stats::count_within;
use crate::Result;
use crate::cache::{PromptLayer, PromptReport, RetrievingTokens};
use crate::forward::{ActiveTokens, Flow, LayerAttention, attend_rows, attention, visible_keys};

impl PassLayers {
    /// Lets each token see its slots at `layer`. `before` holds the tokens before the last layer shrank them, or nothing.
    pub(super) fn set_mask(&self, layer: usize, tokens: &mut ActiveTokens, before: &[u32]) {
        match self.plan.mask {
            Mask::Absolute => tokens.set_causal_mask(layer),
            Mask::BottomRight => {
                let computed = if before.is_empty() { &tokens.positions } else { before };
                let hidden = self.context.inputs.layout.len() - computed.len();
                let window =
                    tokens.decoder.config().layers[layer].window.map_or(u32::MAX, |window| window as u32);
                let seen = |token: &u32| {
                    let end = (hidden + computed.partition_point(|t| t <= token)) as u32;
                    ((token + 1).saturating_sub(window), end)
                };
                tokens.visible = tokens.positions.iter().map(seen).collect();
            }
        }
    }

    /// A layer at which every token of the prompt has its slot.
    pub(super) fn prepare_all(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        let PrefetchedLayer { mut cache, cached } = match self.ready.take() {
            Some(ready) => ready,
            None => unreachable!("a layer is computed when its keys and values are there"),
        };
        let context = self.context.clone();
        let layout: &PromptLayout = &context.inputs.layout;
        let last = layer + 1 == self.depth();
        let needs = self.plan.checks.get(&layer).copied();
        let mean_query = self.mean_query(needs.as_ref(), tokens);
        if self.retrieval.is_some() {
            let q = &tokens.work.q;
            copy_range(tokens.device(), q, 0..q.len(), &mut self.q_pre_rope);
        }
        let projected = tokens.positions.len();
        self.correct(layer, tokens, &mut cache);
        tokens.rope_and_write_kv(layer, &mut cache, 0..projected);
        let final_pass = self.plan.probe.is_none();
        if final_pass {
            self.count_rows(tokens);
            let maps = self.retrieval.is_none() || context.capture != AttentionCapture::Maps;
            if maps && context.capture != AttentionCapture::Nothing {
                let spans = (layout.documents(), layout.question);
                self.capture(layer, tokens, (&cache, self.prompt_capacity()), spans, None);
            }
        }
        if let Some(needs) = needs.filter(|_| !(final_pass && last)) {
            let continuing = self.observe(layer, needs, tokens, (Some(&cache), &cached), &mean_query)?;
            tokens.keep(continuing, &context.tables);
        }
        if !final_pass {
            self.stats.probe_rows += projected;
        }
        if last && !final_pass {
            self.stats.count_layer(tokens.decoder.config(), projected, 0, 0);
            self.carry(cache);
            return Ok(Flow::Stop);
        }
        let capacity = self.prompt_capacity();
        if final_pass && last {
            self.stats.final_rows.clone_from(&tokens.positions);
            self.set_mask(layer, tokens, &[]);
            self.observe_prompt(layer, tokens, &cache, false);
            if self.retrieval.is_none() {
                tokens.keep_last(&context.tables);
            }
        }
        let before = std::mem::take(&mut self.stats.final_rows);
        self.set_mask(layer, tokens, &before);
        self.stats.final_rows = before;
        let mut report = PromptReport::Nothing;
        if final_pass && !last {
            if let Some(answer) = self.answer.as_mut().filter(|_| self.retrieval.is_none()) {
                report = answer.as_cache().wanted_report(layer);
            }
            if report == PromptReport::Nothing {
                self.observe_prompt(layer, tokens, &cache, false);
            }
            if let PromptReport::Mass { .. } = report {
                self.mass.resize(tokens.decoder.shape().kv_heads * layout.len(), 0.0);
            }
        }
        let attending = AttendingLayer { cache, report, projected };
        let Some(retrieval) = &mut self.retrieval else {
            self.attending = Some(attending);
            return Ok(Flow::Attend);
        };
        tokens.resize_attended();
        let decoder = tokens.decoder.clone();
        let retrieving = RetrievingTokens {
            decoder: &decoder,
            cache: &attending.cache,
            capacity,
            positions: &tokens.positions,
            visible: &tokens.visible,
            q: &tokens.work.q,
            q_pre_rope: &self.q_pre_rope,
        };
        retrieval.attend(layer, &retrieving, &mut tokens.work.attended);
        let keys = retrieval.take_keys();
        if last {
            // Blocks are weighed by the attention of all tokens; the output of the last one is all that is needed.
            let (device, row) = (decoder.device(), tokens.positions.len() as u32 - 1);
            let mut attended = device.floats(0);
            device.gather_rows(&tokens.work.attended, tokens.q_width(), &[row], &mut attended);
            tokens.work.attended = attended;
            tokens.keep_last(&context.tables);
        }
        self.leave(layer, tokens, attending, keys);
        Ok(Flow::Finish)
    }

    /// Counts the rows that the last pass computes of a layer, and those that it reads.
    fn count_rows(&mut self, tokens: &ActiveTokens) {
        let documents = count_within(&tokens.positions, self.context.inputs.layout.documents());
        self.stats.document_rows.push(documents);
        // Active tokens only shrink, so what the last layer reads from the cache is what any layer does.
        let read = |s: &Segment| s.span.len() - count_within(&tokens.positions, s.span);
        let layout = &self.context.inputs.layout;
        let exact = layout.chunks.iter().filter(|chunk| chunk.exact);
        self.stats.exact_tokens = exact.map(|chunk| chunk.span.len()).sum();
        let segments = &self.context.segments;
        self.stats.cached_tokens = segments.iter().map(read).sum();
        self.stats.reused_tokens = self.stats.cached_tokens;
        self.stats.prefilled_tokens = segments.iter().filter(|s| s.computed).map(read).sum();
    }

    /// Counts a layer whose tokens have attended to `keys` keys, and hands its cache on.
    fn leave(&mut self, layer: usize, tokens: &ActiveTokens, attending: AttendingLayer, keys: usize) {
        let AttendingLayer { cache, report, projected } = attending;
        if report != PromptReport::Nothing {
            self.observe_prompt(layer, tokens, &cache, true);
            self.mass.clear();
        }
        self.stats.count_layer(tokens.decoder.config(), projected, tokens.positions.len(), keys);
        match &mut self.answer {
            Some(answer) if self.plan.probe.is_none() => {
                if let Some(unused) = answer.as_cache().store_prompt(layer, cache) {
                    self.context.allocator.release(unused);
                }
            }
            _ => self.carry(cache),
        }
    }

    /// Keeps a layer of a probe for the next pass. Where the answer's cache is bounded, so is the prompt's memory: the next pass
    /// loads the layer again.
    fn carry(&mut self, cache: LayerCache) {
        match &self.answer {
            Some(AnswerCache::Full(_)) => self.carried.push(cache),
            _ => self.context.allocator.release(cache),
        }
    }

    /// Shows the answer's cache the prompt's keys and values of a layer, and the tokens that were computed there, before or after they have
    /// attended.
    fn observe_prompt(&mut self, layer: usize, tokens: &ActiveTokens, cache: &LayerCache, attended: bool) {
        let prompt = PromptLayer {
            whole: cache,
            q: &tokens.work.q,
            first_row: 0,
            rows: &tokens.positions,
            visible: &tokens.visible,
            origins: None,
            precision: tokens.decoder.precision(),
            lse: attended.then_some(&self.lse),
            mass: (attended && !self.mass.is_empty()).then_some(&self.mass),
        };
        if let Some(answer) = &mut self.answer {
            answer.as_cache().observe_prompt(layer, &prompt, self.context.allocator.meter());
        }
    }

    /// A layer that holds a part of the prompt's tokens.
    pub(super) fn attend_selected(
        &mut self,
        selected: &mut SelectedLayers,
        layer: usize,
        tokens: &mut ActiveTokens,
    ) -> Result<Flow> {
        let context = self.context.clone();
        let layout: &PromptLayout = &context.inputs.layout;
        let decoder = tokens.decoder.clone();
        let (config, projected) = (decoder.config(), tokens.positions.len());
        let last = layer + 1 == self.depth();
        let final_pass = self.plan.probe.is_none();
        if let Some(needs) = self.plan.checks.get(&layer).copied() {
            let mean_query = self.mean_query(Some(&needs), tokens);
            self.observe(layer, needs, tokens, (None, &[]), &mean_query)?;
        }
        if !final_pass {
            self.stats.probe_rows += projected;
        }
        if last && !final_pass {
            self.stats.count_layer(config, projected, 0, 0);
            return Ok(Flow::Stop);
        }
        tokens.apply_rope(layer, 0..projected);
        let merge = self.plan.merges.then_some(self.pass.as_ref());
        let cache = selected.layer_cache(&context, layer, tokens, merge);
        if final_pass {
            self.stats.document_rows.push(count_within(&tokens.positions, layout.documents()));
            selected.free(&context, layer);
            if last {
                self.stats.final_rows.clone_from(&tokens.positions);
            }
        }
        tokens.keep(selected.continuing(&context, layer), &context.tables);
        tokens.resize_attended();
        let kept = selected.attend_documents(&context, layer, tokens, cache, &mut self.stats);
        selected.set_question_mask(layer, tokens);
        if final_pass {
            if context.capture != AttentionCapture::Nothing {
                let (slots, spans, positions) = selected.capture_spans(layout, layer);
                self.capture(layer, tokens, (&kept.cache, kept.slots), spans, Some((slots, &positions)));
            }
            if let Some(answer) = &mut self.answer {
                selected.show_answer_cache(&context, layer, tokens, &kept, answer.as_cache());
            }
        }
        let mut first = kept.attended;
        if last {
            tokens.keep_last(&context.tables);
            tokens.resize_attended();
            selected.set_question_mask(layer, tokens);
            first = 0;
        }
        selected.attend_question(layer, tokens, &kept, first, &mut self.stats);
        self.stats.count_layer(config, projected, tokens.positions.len(), 0);
        if last {
            self.stats.cached_tokens = selected.cached_tokens(&context);
            self.stats.reused_tokens = selected.reused_tokens(&self.stats.final_rows);
            self.stats.left_out_tokens = selected.left_out_tokens(layout);
            self.stats.prefilled_tokens = selected.prefilled_tokens(&context);
        }
        kept.release(&context);
        Ok(Flow::Finish)
    }
}

impl LayerAttention for PassLayers {
    fn goes_by_parts(&self, layer: usize) -> bool {
        !matches!(self.source, Source::Selected(_))
            && matches!(self.answer, Some(AnswerCache::Full(_)))
            && self.context.capture == AttentionCapture::Nothing
            && self.retrieval.is_none()
            && self.plan.probe.is_none()
            && self.plan.corrects.is_none()
            // Rows see keys of rows after them under the other mask.
            && self.plan.mask == Mask::Absolute
            && !self.plan.checks.contains_key(&layer)
    }

    fn attend_part(
        &mut self,
        layer: usize,
        tokens: &mut ActiveTokens,
        mut rows: Range<usize>,
    ) -> Range<usize> {
        if let Some(ready) = self.ready.take() {
            let (cache, projected) = (ready.cache, tokens.positions.len());
            self.attending = Some(AttendingLayer { cache, report: PromptReport::Nothing, projected });
            self.count_rows(tokens);
            self.set_mask(layer, tokens, &[]);
        }
        let Some(mut attending) = self.attending.take() else {
            unreachable!("a layer is computed when its keys and values are there")
        };
        tokens.rope_and_write_kv(layer, &mut attending.cache, rows.clone());
        let (at_end, last) = (rows.end == attending.projected, layer + 1 == self.depth());
        if last && !at_end {
            self.attending = Some(attending);
            return rows.end..rows.end;
        }
        if last {
            self.stats.final_rows.clone_from(&tokens.positions);
            tokens.visible.drain(..rows.end - 1);
            tokens.keep_last(&self.context.tables);
            rows = 0..1;
        }
        tokens.resize_attended();
        let (decoder, visible) = (tokens.decoder.clone(), &tokens.visible[rows.clone()]);
        let cache = (&attending.cache, self.prompt_capacity());
        let of_part = attention(&decoder, layer, cache, (&tokens.work.q, 0), visible);
        decoder.device().attention(&of_part, &mut tokens.work.attended, None);
        if at_end {
            self.leave(layer, tokens, attending, visible_keys(&tokens.visible));
        } else {
            self.attending = Some(attending);
        }
        rows
    }

    fn prepare(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        match std::mem::replace(&mut self.source, Source::Empty) {
            Source::Selected(mut selected) => {
                let flow = self.attend_selected(&mut selected, layer, tokens);
                self.source = Source::Selected(selected);
                flow
            }
            source => {
                self.source = source;
                self.prepare_all(layer, tokens)
            }
        }
    }

    fn attend(&mut self, layer: usize, tokens: &mut ActiveTokens, rows: Range<usize>) {
        let capacity = self.prompt_capacity();
        let Some(AttendingLayer { cache, report, .. }) = &self.attending else { return };
        let PromptReport::Mass { seed } = *report else {
            let lse = (*report == PromptReport::LogSumExps).then_some(&mut self.lse);
            return attend_rows(layer, tokens, (cache, capacity), rows, lse);
        };
        let (decoder, visible) = (tokens.decoder.clone(), &tokens.visible[rows.clone()]);
        let a = attention(&decoder, layer, (cache, capacity), (&tokens.work.q, rows.start), visible);
        let (out, lse) = (&mut tokens.work.attended, &mut self.lse);
        let query_positions = &tokens.positions[rows];
        let noise = GumbelNoise { seed, temperature: 1.0, query_positions, key_positions: None };
        decoder.device().attention_with_mass(&a, out, lse, seed.map(|_| &noise), &mut self.mass);
    }

    fn attended(&mut self, layer: usize, tokens: &ActiveTokens) {
        if let Some(attending) = self.attending.take() {
            self.leave(layer, tokens, attending, visible_keys(&tokens.visible));
        }
    }
}
