//! SamKV's selection for one question.

use refrain_kv::stats::mean;
use refrain_kv::{Span, Tensor, top_k};

use super::offline::{EXTREMES, MARKED, MEANS, QUERIES, REPRESENTATIVE};
use super::options::{Cosine, Extremes, Quota, Rotation, Rounding, SamKv, cosine, dot};
use crate::{Error, ModelFacts, PrefillInputs, Result};

/// A block that was retrieved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) span: Span,
    /// The position of its representative token, if that is marked for recomputation.
    pub(super) marked: Option<u32>,
}

/// One document's summary.
#[derive(Debug)]
struct Context<'a> {
    span: Span,
    blocks: usize,
    /// `layers × blocks × Hkv·d`
    means: &'a Tensor,
    /// `layers × H·d`
    local: Vec<f32>,
    /// `layers × blocks`
    representative: Vec<f32>,
    marked: Vec<f32>,
    /// `layers × 2`
    extremes: Vec<f32>,
}

/// Scores of one document's blocks at one layer.
#[derive(Clone, Debug, Default)]
struct Scores {
    /// `⟨Q̂_i, K̄[b]⟩`
    raw: Vec<f32>,
    /// Scores scaled so that blocks of different documents compare.
    normal: Vec<f32>,
}

/// All cached documents of a prompt, and the question.
pub(super) struct Contexts<'a> {
    method: &'a SamKv,
    inputs: &'a PrefillInputs,
    model: &'a ModelFacts,
    /// The question's mean query before RoPE, `layers × H × d`.
    queries: &'a [f32],
    of: Vec<Context<'a>>,
}

impl<'a> Contexts<'a> {
    pub(super) fn new(
        method: &'a SamKv,
        inputs: &'a PrefillInputs,
        kind: usize,
        queries: &'a [f32],
    ) -> Result<Contexts<'a>> {
        let model = &inputs.model;
        let mut of = Vec::new();
        for (place, summary) in inputs.layout.chunks.iter().zip(inputs.statistics_of(kind)) {
            let (layers, blocks) = (inputs.layout.layers, method.blocks(place.span));
            let tensor = |name: &'static str, shape: &[usize]| {
                let found = summary.get(name).filter(|tensor| tensor.shape == shape);
                found.ok_or(Error::AuxTensors { tensor: name, start: place.span.start, end: place.span.end })
            };
            let floats = |name, shape: &[usize]| Ok(tensor(name, shape)?.data.as_slice().floats());
            of.push(Context {
                span: place.span,
                blocks,
                means: tensor(MEANS, &[layers, blocks, model.kv_heads * model.head_dim])?,
                local: floats(QUERIES, &[layers, model.heads * model.head_dim])?,
                representative: floats(REPRESENTATIVE, &[layers, blocks])?,
                marked: floats(MARKED, &[layers, blocks])?,
                extremes: floats(EXTREMES, &[layers, 2])?,
            });
        }
        Ok(Contexts { method, inputs, model, queries, of })
    }

    /// The blocks that are kept beside the base at each layer, and how often eq. 2's first case was left open.
    pub(super) fn retrieve(&self) -> (Vec<Vec<Block>>, usize) {
        let layers = self.inputs.layout.layers;
        let scores: Vec<Vec<Scores>> = (0..layers).map(|layer| self.scores(layer)).collect();
        let mut undecided = 0;
        let counts: Vec<usize> = (0..self.of.len())
            .map(|i| {
                let (count, open) = self.count(i, &scores);
                undecided += open;
                count
            })
            .collect();
        let blocks: usize = self.of.iter().map(|context| context.blocks).sum();
        let total = match self.method.quota {
            Quota::Retrieved => counts.iter().sum(),
            Quota::All => blocks,
        };
        let quota = match self.method.filter {
            true => self.round(total as f64 / self.of.len().max(1) as f64),
            false => usize::MAX,
        };
        (
            scores.iter().enumerate().map(|(l, scores)| self.blocks(l, scores, &counts, quota)).collect(),
            undecided,
        )
    }

    /// The best `counts[i]` middle blocks of each document at a layer, and of these all the best `quota`.
    fn blocks(&self, layer: usize, scores: &[Scores], counts: &[usize], quota: usize) -> Vec<Block> {
        let (mut found, mut normal) = (Vec::new(), Vec::new());
        for (i, (context, scores)) in self.of.iter().zip(scores).enumerate() {
            let middle = self.method.middle(context.blocks);
            for block in top_k(&scores.raw[middle.clone()], counts[i]) {
                let block = middle.start + block as usize;
                let at = layer * context.blocks + block;
                let marked = (context.marked[at] != 0.0)
                    .then(|| context.span.start.saturating_add(context.representative[at] as u32))
                    .filter(|position| self.method.span(context.span, block).contains(*position));
                found.push(Block { span: self.method.span(context.span, block), marked });
                normal.push(scores.normal[block]);
            }
        }
        top_k(&normal, quota).into_iter().map(|i| found[i as usize]).collect()
    }

    /// Blocks to retrieve of document `i` (eq. 2 and 3), and how often the kept blocks' score was not above the lowest.
    fn count(&self, i: usize, scores: &[Vec<Scores>]) -> (usize, usize) {
        let context = &self.of[i];
        let middle = self.method.middle(context.blocks);
        if middle.is_empty() {
            return (0, 0);
        }
        if self.method.share > 0.0 {
            return (self.round(self.method.share * context.blocks as f64).min(middle.len()), 0);
        }
        let layers = scores.len();
        let stable = match self.method.stable_layers {
            0 => match self.model.stable_layers {
                Some(stable) if stable.start < stable.end && stable.end as usize <= layers => stable.range(),
                _ => layers.saturating_sub((layers / 8).max(4))..layers,
            },
            stable => layers.saturating_sub(stable)..layers,
        };
        let (mut sum, mut undecided) = (0.0, 0);
        for layer in stable.clone() {
            let raw = &scores[layer][i].raw;
            let (max, min) = self.extremes(context, layer, raw);
            let kept = || raw[..middle.start].iter().chain(&raw[middle.end..]);
            let anchor = kept().map(|s| f64::from(*s)).sum::<f64>() / kept().count().max(1) as f64;
            sum += match (anchor <= min, anchor <= max) {
                (true, _) => {
                    undecided += 1;
                    self.method.below.value()
                }
                (false, true) => (max - anchor) / (max - min),
                (false, false) => 0.0,
            };
        }
        let share = sum / stable.len() as f64;
        (self.round(share * context.blocks as f64).min(middle.len()), undecided)
    }

    /// The highest and the lowest score of a document's middle blocks.
    fn extremes(&self, context: &Context<'_>, layer: usize, raw: &[f32]) -> (f64, f64) {
        let middle = &raw[self.method.middle(context.blocks)];
        let fold = |start: f32, f: fn(f32, f32) -> f32| f64::from(middle.iter().copied().fold(start, f));
        let (max, min) = (fold(f32::NEG_INFINITY, f32::max), fold(f32::INFINITY, f32::min));
        if self.method.extremes == Extremes::Online {
            return (max, min);
        }
        let of = |which: usize, else_: f64| {
            let block = context.extremes[2 * layer + which];
            let known = block >= 0.0 && (block as usize) < raw.len();
            if known { f64::from(raw[block as usize]) } else { else_ }
        };
        (of(0, max), of(1, min))
    }

    /// Scores of all documents' blocks at a layer.
    fn scores(&self, layer: usize) -> Vec<Scores> {
        let ModelFacts { kv_heads, head_dim, .. } = *self.model;
        let width = kv_heads * head_dim;
        let mut key = vec![0.0; width];
        let biased = self.biased(layer);
        let score = |(context, query): (&Context<'_>, Vec<f32>)| {
            let mut query = self.grouped(&query);
            let asked = self.inputs.layout.question;
            self.turn(layer, &mut query, (asked.start + asked.end) / 2);
            let mut scores = Scores::default();
            for block in 0..context.blocks {
                let at = (layer * context.blocks + block) * width;
                context.means.data.as_slice().range(at..at + width).to_f32(&mut key);
                let span = self.method.span(context.span, block);
                self.turn(layer, &mut key, (span.start + span.end) / 2);
                scores.raw.push(dot(&query, &key));
                let normal = if self.method.normalise { cosine(&query, &key) } else { dot(&query, &key) };
                scores.normal.push(normal);
            }
            scores
        };
        self.of.iter().zip(biased).map(score).collect()
    }

    /// `Q̂_i` of every document at a layer (eq. 1), `H·d`.
    fn biased(&self, layer: usize) -> Vec<Vec<f32>> {
        let ModelFacts { heads, head_dim, .. } = *self.model;
        let width = heads * head_dim;
        let query = &self.queries[layer * width..(layer + 1) * width];
        let documents = self.of.len();
        if !self.method.bias || documents < 2 {
            return vec![query.to_vec(); documents];
        }
        let part = if self.method.cosine == Cosine::Head { head_dim } else { width };
        let weighted = |context: &Context<'_>| -> Vec<f32> {
            let local = &context.local[layer * width..(layer + 1) * width];
            let parts = query.chunks_exact(part).zip(local.chunks_exact(part));
            let scaled = |(q, local): (&[f32], &[f32])| {
                let cosine = cosine(q, local).abs();
                local.iter().map(|x| cosine * x).collect::<Vec<_>>()
            };
            parts.flat_map(scaled).collect()
        };
        let weighted: Vec<Vec<f32>> = self.of.iter().map(weighted).collect();
        let others = (documents - 1) as f32;
        let biased = |i: usize| {
            let others_of = |e: usize| {
                let all = weighted.iter().enumerate().filter(|(j, _)| *j != i);
                all.map(|(_, w)| w[e]).sum::<f32>() / others
            };
            (0..width).map(|e| query[e] + others_of(e)).collect()
        };
        (0..documents).map(biased).collect()
    }

    /// Mean of the query heads of each KV head, `Hkv·d`.
    fn grouped(&self, query: &[f32]) -> Vec<f32> {
        let ModelFacts { heads, kv_heads, head_dim, .. } = *self.model;
        let group = heads / kv_heads;
        query.chunks_exact(group * head_dim).flat_map(|heads| mean(heads, head_dim)).collect()
    }

    /// Rotates a vector of heads to `position`, if they are compared there.
    fn turn(&self, layer: usize, x: &mut [f32], position: u32) {
        if self.method.rotation == Rotation::None {
            return;
        }
        self.model.ropes.layer(layer).rotate(x, self.model.head_dim, position);
    }

    fn round(&self, blocks: f64) -> usize {
        // As in `top_count`: a product that should be whole counts as whole.
        let rounded = match self.method.rounding {
            Rounding::Floor => (blocks + 1e-9).floor(),
            Rounding::Nearest => blocks.round(),
            Rounding::Ceil => (blocks - 1e-9).ceil(),
        };
        rounded.max(0.0) as usize
    }
}
