//! Reports of a layer: scores that a method decides by, and attention that is captured beside a prefill.

use std::time::Instant;

use refrain_fusion::{CachedTensor, LayerView, Needs};
use refrain_kv::{LayerCache, Span, stats};
use refrain_store::Layer;

use super::capture::{AttentionCapture, AttentionMap, EXPLAIN_LAYER, question_keys};
use super::layers::PassLayers;
use super::reuse::Segment;
use crate::Result;
use crate::cache::SlotMap;
use crate::forward::ActiveTokens;

impl PassLayers {
    /// Asks the method which tokens go on. `mean_query` is the question's mean query before RoPE, if it is needed.
    pub(super) fn observe(
        &mut self,
        layer: usize,
        needs: Needs,
        tokens: &ActiveTokens,
        (cache, cached): (Option<&LayerCache>, &[Layer]),
        mean_query: &[f32],
    ) -> Result<Vec<u32>> {
        let started = Instant::now();
        let layout = &self.context.inputs.layout;
        let question_attention = match (needs.question_attention, cache) {
            (Some(score), Some(cache)) => {
                let keys = question_keys(tokens, (cache, self.prompt_capacity()), layer, |position| position);
                stats::question_attention(tokens.device(), &keys, layout.documents(), layout.question, score)
            }
            _ => Vec::new(),
        };
        let deviation = match needs.deviation {
            Some(needed) => self.deviation(tokens, cached, needed),
            None => Vec::new(),
        };
        let view = LayerView {
            layer,
            layout,
            tokens: &tokens.positions,
            question_attention: &question_attention,
            deviation: &deviation,
            mean_query,
        };
        let continuing = self.pass.observe(&view)?;
        if self.plan.probe.is_none() {
            self.stats.selecting += started.elapsed();
        }
        self.context.check_tokens(&continuing, Some(&tokens.positions))?;
        Ok(continuing)
    }

    /// Distance of each active token of an inexact chunk's fresh row from its cached one, in the order of positions.
    pub(super) fn deviation(
        &self,
        tokens: &ActiveTokens,
        cached: &[Layer],
        (tensor, distance): (CachedTensor, stats::Distance),
    ) -> Vec<f32> {
        let width = tokens.decoder.shape().width();
        let fresh = match tensor {
            CachedTensor::Keys => &tokens.work.k,
            CachedTensor::Values => &tokens.work.v,
        };
        let mut distances = Vec::new();
        let inexact = |segment: &Segment| {
            segment.chunk.is_some_and(|index| !self.context.inputs.layout.chunks[index].exact)
        };
        let chunks = self.context.segments.iter().zip(cached).filter(|(segment, _)| inexact(segment));
        for (segment, layer) in chunks {
            let cached = match tensor {
                CachedTensor::Keys => layer.k(),
                CachedTensor::Values => layer.v(),
            };
            let span = segment.span;
            let from = tokens.positions.partition_point(|token| *token < span.start);
            let own = tokens.positions[from..].iter().take_while(|token| **token < span.end);
            let pairs: Vec<(usize, usize)> =
                own.enumerate().map(|(i, position)| (from + i, (position - span.start) as usize)).collect();
            distances.extend(tokens.device().row_distances(fresh, cached, width, &pairs, distance));
        }
        distances
    }

    /// The question's mean query before RoPE, if `needs` asks for it.
    pub(super) fn mean_query(&self, needs: Option<&Needs>, tokens: &ActiveTokens) -> Vec<f32> {
        if !needs.is_some_and(|needs| needs.mean_query) {
            return Vec::new();
        }
        let (question, rows) = (self.context.inputs.layout.question.len(), tokens.positions.len());
        tokens.device().mean_row(&tokens.work.q, tokens.q_width(), rows - question..rows)
    }

    /// Reports the question's attention to the tokens of `kept`, as far as it was asked for. `spans` are the documents' and the
    /// question's slots in `cache`.
    pub(super) fn capture(
        &mut self,
        layer: usize,
        tokens: &ActiveTokens,
        cache: (&LayerCache, usize),
        (documents, question): (Span, Span),
        kept: Option<(&SlotMap, &[usize])>,
    ) {
        let layout = &self.context.inputs.layout;
        let started = Instant::now();
        let device = tokens.device();
        let all = layout.documents().len();
        let (slots, kept) = kept.unzip();
        let slot = |position| slots.map_or(position, |slots| slots.before(position));
        match self.context.capture {
            AttentionCapture::Explain if layer == EXPLAIN_LAYER.min(layout.layers - 1) => {
                let keys = question_keys(tokens, cache, layer, slot);
                let found = stats::question_attention(
                    device,
                    &keys,
                    documents,
                    question,
                    stats::Softmax::PerHead.into(),
                );
                let spread = |kept: &[usize]| {
                    let mut attention = vec![0.0; all];
                    kept.iter().zip(&found).for_each(|(token, weight)| attention[*token] = *weight);
                    attention
                };
                self.stats.attention = Some(kept.map(spread).unwrap_or(found));
            }
            AttentionCapture::Maps if all > 0 => {
                let keys = question_keys(tokens, cache, layer, slot);
                let map = AttentionMap::of(device, &keys, (documents, question));
                self.stats.maps.push(kept.map_or(map.clone(), |kept| map.spread(kept, all)));
                self.stats.capturing += started.elapsed();
            }
            _ => {}
        }
    }
}
