//! Correction of reused keys and values by the changes that recomputed tokens show.

use std::ops::Range;

use refrain_fusion::{ChunkChange, ChunkSpan, Correction};
use refrain_kernels::Rotary;
use refrain_kv::{LayerCache, Span};

use super::layers::PassLayers;
use crate::forward::ActiveTokens;

impl PassLayers {
    /// Adds to the chunks in `cache` what the method says, by the fresh keys (before RoPE) and values of `tokens`. It comes before
    /// those are written, so that they stay exact.
    pub(super) fn correct(&self, layer: usize, tokens: &ActiveTokens, cache: &mut LayerCache) {
        let Some(Correction { skip }) = self.plan.corrects.filter(|_| layer > 0) else { return };
        let (device, heads) = (tokens.device(), tokens.decoder.shape().heads());
        let (layout, work) = (&self.context.inputs.layout, &tokens.work);
        let pairs = |chunk: &ChunkSpan| {
            let ChunkSpan { span, bare, .. } = *chunk;
            let skip = if bare { skip.min(span.len()) as u32 } else { 0 };
            let before = |bound: u32| tokens.positions.partition_point(|position| *position < bound);
            let rows = before(span.start + skip)..before(span.end);
            rows.map(|row| (row, tokens.positions[row])).collect()
        };
        let groups: Vec<Vec<(usize, u32)>> = layout.reused_chunks().map(pairs).collect();
        let rows = tokens.positions.len();
        let sums = |fresh, cache, rotary| device.sum_changes((fresh, rows), cache, heads, &groups, rotary);
        let keys = sums(&work.k, &cache.k, tokens.rotary.layer(layer).all());
        let values = sums(&work.v, &cache.v, Rotary::default());
        let own = |sums: &[f32], chunk: usize| sums[chunk * heads.width()..][..heads.width()].to_vec();
        let change = |(chunk, pairs): (usize, &Vec<(usize, u32)>)| ChunkChange {
            tokens: pairs.len(),
            keys: own(&keys, chunk),
            values: own(&values, chunk),
        };
        let mut changes: Vec<ChunkChange> = groups.iter().enumerate().map(change).collect();
        self.pass.correct(layer, &mut changes);
        let spans: Vec<Range<usize>> = layout.inexact_chunks().map(Span::range).collect();
        let end = spans.last().map_or(0, |span| span.end);
        let keys: Vec<f32> = changes.iter().flat_map(|change| &change.keys).copied().collect();
        let values: Vec<f32> = changes.iter().flat_map(|change| &change.values).copied().collect();
        let rotary = self.context.tables.layer(layer).slice(0, end);
        device.add_rows(&keys, heads, rotary, &spans, &mut cache.k);
        device.add_rows(&values, heads, Rotary::default(), &spans, &mut cache.v);
    }
}
