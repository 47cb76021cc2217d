//! How near an answer comes to vanilla's: what is known of vanilla's, and others held against it.

use std::time::{Duration, Instant};

use refrain_kernels::Cpu;
use refrain_kv::{LayerCache, Span, stats, top_k};
use serde::Serialize;

use crate::answer::{Begun, Finished};
use crate::forward::State;
use crate::prefill::Watch;
use crate::{Agreement, Answer, Engine, Prompt, Request, Result, Sampling};

/// Last rows of the question whose attention makes a map.
const MAP_ROWS: usize = 64;
/// The most attended tokens that [`Hits::best`] asks for.
const BEST: usize = 40;

/// Vanilla's greedy answer to a prompt, with full attention.
#[derive(Clone, Debug)]
pub struct Reference {
    /// The answer.
    pub answer: Answer,
    /// Logits that its first tokens were chosen from, one after the other.
    pub(crate) logits: Vec<f32>,
    maps: Vec<AttentionMap>,
}

/// How near an answer comes to a [`Reference`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Closeness {
    /// Teacher-forced over the reference's first tokens.
    pub agreement: Agreement,
    /// By layer, mean over the question's last rows: L2 distance of their attention to document tokens (mean over heads)
    /// to the reference's (A³, figure 3). Empty where there are no maps.
    pub attention_l2: Vec<f64>,
    /// Which of the most attended tokens were recomputed; none where there are no maps, or no such tokens.
    pub hits: Option<Hits>,
}

/// Shares of the document tokens that vanilla's question attends to most (mean over heads, layers and the question's last
/// rows, at most 64) that a method computed at its deepest layer (A³, figure 2).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Hits {
    /// Of the best 40.
    pub best: f64,
    /// Of as many as it computed.
    pub as_many: f64,
}

/// Attention of the question's last rows to document tokens at one layer, mean over heads: `rows × documents`. What rows
/// give to the system part and the question is left out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AttentionMap {
    rows: usize,
    weights: Vec<f32>,
}

/// What the question's rows, the last `rows` of those projected, see at `layer`.
pub(crate) fn question_keys<'a>(
    state: &'a State,
    cache: &'a LayerCache,
    capacity: usize,
    (layer, rows): (usize, usize),
) -> stats::QuestionKeys<'a> {
    let config = state.decoder.config();
    stats::QuestionKeys {
        q: &state.work.q[state.work.q.len() - rows * config.heads * config.head_dim..],
        k: cache.k.as_slice(),
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        capacity,
        window: config.layers[layer].window,
        scale: config.layers[layer].attention_scale,
    }
}

impl AttentionMap {
    /// Of the last rows of `keys.q`, which are the question's; `documents` and `question` are slots.
    pub(crate) fn of(
        cpu: &Cpu,
        keys: &stats::QuestionKeys<'_>,
        (documents, question): (Span, Span),
    ) -> AttentionMap {
        let rows = question.len().min(MAP_ROWS);
        let last = Span::new(question.range().end - rows, question.range().end);
        let q = &keys.q[keys.q.len() - rows * keys.heads * keys.head_dim..];
        let keys = stats::QuestionKeys { q, ..*keys };
        AttentionMap { rows, weights: stats::question_map(cpu, &keys, documents, last) }
    }

    /// The same where its columns are the tokens `kept` of `documents`; the others receive nothing.
    pub(crate) fn spread(&self, kept: &[usize], documents: usize) -> AttentionMap {
        let mut weights = vec![0.0; self.rows * documents];
        for (row, all) in self.rows().zip(weights.chunks_mut(documents.max(1))) {
            kept.iter().zip(row).for_each(|(token, weight)| all[*token] = *weight);
        }
        AttentionMap { rows: self.rows, weights }
    }

    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.weights.chunks((self.weights.len() / self.rows.max(1)).max(1))
    }

    /// Mean over rows of their L2 distance.
    fn distance(&self, other: &AttentionMap) -> f64 {
        let row = |(a, b): (&[f32], &[f32])| {
            a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
        };
        self.rows().zip(other.rows()).map(row).sum::<f64>() / self.rows.max(1) as f64
    }
}

impl Reference {
    /// Vanilla's tokens that others are forced to.
    fn forced(&self, engine: &Engine) -> &[u32] {
        &self.answer.tokens[..self.positions(engine)]
    }

    /// Tokens of the answer that others are forced to.
    pub fn positions(&self, engine: &Engine) -> usize {
        self.logits.len() / engine.decoder().config().vocab
    }

    /// What each document token receives from the question at all layers.
    fn received(&self) -> Vec<f32> {
        let documents = self.maps.first().map_or(0, |map| map.weights.len() / map.rows.max(1));
        let mut sums = vec![0.0; documents];
        for row in self.maps.iter().flat_map(AttentionMap::rows) {
            sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += weight);
        }
        sums
    }

    /// Shares of the most attended tokens among the document tokens (from 0) that were computed.
    fn hits(&self, computed: &[u32]) -> Option<Hits> {
        let received = self.received();
        if received.is_empty() || computed.is_empty() {
            return None;
        }
        let share = |count: usize| {
            let best = top_k(&received, count);
            let hit = best.iter().filter(|token| computed.binary_search(token).is_ok()).count();
            hit as f64 / best.len() as f64
        };
        Some(Hits { best: share(BEST), as_many: share(computed.len()) })
    }
}

impl Engine {
    /// Vanilla's greedy answer, and what is needed to hold others against its first `forced` tokens; with `maps`, also
    /// against its attention.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn reference(
        &self,
        prompt: &Prompt,
        sampling: &Sampling,
        forced: usize,
        maps: bool,
    ) -> Result<Reference> {
        let sampling = Sampling { temperature: 0.0, ..sampling.clone() };
        let request = Request::new(&refrain_fusion::Vanilla, &sampling);
        let watch = if maps { Watch::Maps } else { Watch::Nothing };
        let begun = self.begin(prompt, &request, watch, (sampling.max_tokens, forced))?;
        let Finished { answer, work, logits } = begun.finish(request.eviction, &mut |_| true)?;
        Ok(Reference { answer, logits, maps: work.maps })
    }

    /// Answers a prompt as [`Engine::answer`] does, and holds the way there against `reference`: the first tokens are
    /// forced to its own, and where the answer leaves these it goes on by itself.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn answer_beside(
        &self,
        prompt: &Prompt,
        request: &Request<'_>,
        reference: &Reference,
    ) -> Result<(Answer, Closeness)> {
        let watch = if reference.maps.is_empty() { Watch::Nothing } else { Watch::Maps };
        let tokens = reference.forced(self);
        let steps = request.sampling.max_tokens.max(tokens.len());
        let Begun { mut state, mut logits, mut writing, token, mut account, work } =
            self.begin(prompt, request, watch, (steps, 0))?;
        let mut stepping = Duration::ZERO;
        let (mut chosen, mut found, mut branch) = (vec![token], Vec::new(), None);
        for (at, token) in tokens.iter().enumerate() {
            found.append(&mut logits);
            if branch.is_none() && chosen[at] != *token {
                branch = Some(state.fork());
            }
            if at + 1 < tokens.len() {
                let step = Instant::now();
                let next = state.extend(&[*token])?;
                stepping += step.elapsed();
                logits = next.to_vec();
                if branch.is_none() {
                    chosen.push(writing.choose(&mut logits.clone(), at + 1));
                }
            }
        }
        let known = chosen.len();
        let mut state = branch.unwrap_or(state);
        let step = Instant::now();
        let finish = writing.go_on(&mut state, &chosen, &mut |_| true)?;
        stepping += step.elapsed();
        let steps = tokens.len() - 1 + writing.tokens.len().saturating_sub(known);
        account.tpot = (steps > 0).then(|| stepping.as_secs_f64() / steps as f64);
        account.count_cache(&state, request.eviction);
        let answer = writing.answer(finish, account, &mut |_| true);
        let agreement = self.agreement(&reference.logits, &found);
        let pairs = reference.maps.iter().zip(&work.maps);
        let attention_l2 = pairs.map(|(exact, map)| map.distance(exact)).collect();
        let hits = reference.hits(&computed(prompt, &work.final_rows));
        Ok((answer, Closeness { agreement, attention_l2, hits }))
    }
}

/// Document tokens, from 0, among the rows of the last layer.
fn computed(prompt: &Prompt, rows: &[u32]) -> Vec<u32> {
    let (start, end) = (prompt.system.len() as u32, (prompt.len() - prompt.question.len()) as u32);
    rows.iter().filter(|row| (start..end).contains(*row)).map(|row| row - start).collect()
}
