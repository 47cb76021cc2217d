//! Correction of reused keys and values by the changes that recomputed tokens show.

use refrain_fusion::{ChunkChange, ChunkSpan, Correction};
use refrain_kv::LayerCache;

use super::layers::PassLayers;
use crate::forward::ActiveTokens;

impl PassLayers {
    /// Adds to the chunks in `cache` what the method says, by the fresh keys (before RoPE) and values of `tokens`. It comes before
    /// those are written, so that they stay exact.
    pub(super) fn correct(&self, layer: usize, tokens: &ActiveTokens, cache: &mut LayerCache) {
        let Some(Correction { skip }) = self.plan.corrects.filter(|_| layer > 0) else { return };
        let (device, heads) = (tokens.device(), tokens.decoder.shape().heads());
        let (layout, work) = (&self.context.inputs.layout, &tokens.work);
        let change = |chunk: &ChunkSpan| {
            let ChunkSpan { span, bare, .. } = *chunk;
            let skip = if bare { skip.min(span.len()) as u32 } else { 0 };
            let before = |bound: u32| tokens.positions.partition_point(|position| *position < bound);
            let rows = before(span.start + skip)..before(span.end);
            let pairs: Vec<(usize, u32)> = rows.clone().map(|row| (row, tokens.positions[row])).collect();
            let rotary = tokens.rotary.layer(layer).slice(rows.start, rows.end);
            ChunkChange {
                tokens: rows.len(),
                keys: device.sum_changes(&work.k, &cache.k, heads, &pairs, rotary),
                values: device.sum_changes(&work.v, &cache.v, heads, &pairs, Default::default()),
            }
        };
        let mut changes: Vec<ChunkChange> = layout.reused_chunks().map(change).collect();
        self.pass.correct(layer, &mut changes);
        for (chunk, change) in layout.inexact_chunks().zip(&changes) {
            let rotary = self.context.tables.layer(layer).slice(chunk.start as usize, chunk.end as usize);
            device.add_row(&change.keys, heads, rotary, chunk.range(), &mut cache.k);
            device.add_row(&change.values, heads, Default::default(), chunk.range(), &mut cache.v);
        }
    }
}
