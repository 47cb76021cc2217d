//! Reports of a layer: scores that a method decides by, and attention that is captured beside a prefill.

use std::time::Instant;

use refrain_fusion::{CachedTensor, LayerView, Needs};
use refrain_kernels::Slice;
use refrain_kv::{LayerCache, Span, stats};
use refrain_store::Layer;

use super::capture::{AttentionCapture, AttentionMap, EXPLAIN_LAYER, question_keys};
use super::layers::PassLayers;
use crate::Result;
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
            (Some(softmax), Some(cache)) => {
                let keys =
                    question_keys(tokens, cache, self.prompt_capacity(), (layer, layout.question.len()));
                let cpu = tokens.decoder.backend();
                stats::question_attention(cpu, &keys, layout.documents(), layout.question, softmax)
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

    /// Distance of each active cached token's fresh row from its cached one, in the order of positions.
    pub(super) fn deviation(
        &self,
        tokens: &ActiveTokens,
        cached: &[Layer],
        (tensor, distance): (CachedTensor, stats::Distance),
    ) -> Vec<f32> {
        let width = tokens.decoder.shape().width();
        let fresh = match tensor {
            CachedTensor::Keys => tokens.work.k.as_slice(),
            CachedTensor::Values => tokens.work.v.as_slice(),
        };
        fn row(slice: Slice<'_>, i: usize, width: usize) -> Slice<'_> {
            slice.range(i * width..(i + 1) * width)
        }
        let mut distances = Vec::new();
        let chunks = self.context.segments.iter().zip(cached).filter(|(segment, _)| segment.chunk.is_some());
        for (segment, layer) in chunks {
            let cached = match tensor {
                CachedTensor::Keys => layer.k(),
                CachedTensor::Values => layer.v(),
            };
            let span = segment.span;
            let from = tokens.positions.partition_point(|token| *token < span.start);
            let own = tokens.positions[from..].iter().take_while(|token| **token < span.end);
            for (i, position) in own.enumerate() {
                let cached = row(cached, (position - span.start) as usize, width);
                distances.extend(stats::deviation(row(fresh, from + i, width), cached, width, distance));
            }
        }
        distances
    }

    /// The question's mean query before RoPE, if `needs` asks for it.
    pub(super) fn mean_query(&self, needs: Option<&Needs>, tokens: &ActiveTokens) -> Vec<f32> {
        if !needs.is_some_and(|needs| needs.mean_query) {
            return Vec::new();
        }
        let (question, width) = (self.context.inputs.layout.question.len(), tokens.q_width());
        stats::mean(&tokens.work.q[(tokens.positions.len() - question) * width..], width)
    }

    /// Reports the question's attention to the tokens of `kept`, as far as it was asked for. `spans` are the documents' and the
    /// question's slots in `cache`.
    pub(super) fn capture(
        &mut self,
        layer: usize,
        tokens: &ActiveTokens,
        (cache, capacity): (&LayerCache, usize),
        (documents, question): (Span, Span),
        kept: Option<&[usize]>,
    ) {
        let layout = &self.context.inputs.layout;
        let started = Instant::now();
        let cpu = tokens.decoder.backend();
        let all = layout.documents().len();
        match self.context.capture {
            AttentionCapture::Explain if layer == EXPLAIN_LAYER.min(layout.layers - 1) => {
                let keys = question_keys(tokens, cache, capacity, (layer, question.len()));
                let found =
                    stats::question_attention(cpu, &keys, documents, question, stats::Softmax::PerHead);
                let spread = |kept: &[usize]| {
                    let mut attention = vec![0.0; all];
                    kept.iter().zip(&found).for_each(|(token, weight)| attention[*token] = *weight);
                    attention
                };
                self.stats.attention = Some(kept.map(spread).unwrap_or(found));
            }
            AttentionCapture::Maps if all > 0 => {
                let keys = question_keys(tokens, cache, capacity, (layer, question.len()));
                let map = AttentionMap::of(cpu, &keys, (documents, question));
                self.stats.maps.push(kept.map_or(map.clone(), |kept| map.spread(kept, all)));
                self.stats.capturing += started.elapsed();
            }
            _ => {}
        }
    }
}
