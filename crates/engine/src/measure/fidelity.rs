//! Fidelity of an answer: vanilla's answer as the reference, and others held against it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_fusion::Vanilla;
use refrain_kv::top_k;
use serde::Serialize;

use super::agreement::Agreement;
use crate::Result;
use crate::decode::{DecodeWorkspace, extend};
use crate::engine::Engine;
use crate::generate::{FirstToken, Prefill};
use crate::prefill::{AttentionCapture, AttentionMap};
use crate::prompt::Prompt;
use crate::request::{Answer, GenerateRequest};
use crate::sampling::Sampling;

/// The most attended tokens that [`Hits::best`] asks for.
const BEST: usize = 40;

/// Vanilla's greedy answer to a prompt, with full attention.
#[derive(Clone, Debug)]
pub struct Reference {
    /// The answer.
    pub answer: Answer,
    /// Logits that its first tokens were chosen from, one after the other.
    pub(crate) logits: Vec<f32>,
    pub(crate) maps: Vec<AttentionMap>,
}

/// Fidelity of an answer to a [`Reference`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fidelity {
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

impl Reference {
    /// Vanilla's tokens that others are forced to.
    pub(super) fn forced(&self, engine: &Engine) -> &[u32] {
        &self.answer.tokens[..self.positions(engine)]
    }

    /// Tokens of the answer that others are forced to.
    pub fn positions(&self, engine: &Engine) -> usize {
        self.logits.len() / engine.decoder().config().vocab
    }

    /// The attention that each document token receives from the question at all layers.
    fn received(&self) -> Vec<f32> {
        let documents = self.maps.first().map_or(0, AttentionMap::documents);
        let mut sums = vec![0.0; documents];
        for row in self.maps.iter().flat_map(AttentionMap::rows) {
            sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += weight);
        }
        sums
    }

    /// Shares of the most attended tokens among the document tokens (from 0) that were computed.
    pub(super) fn hits(&self, computed: &[u32]) -> Option<Hits> {
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
        let steps = (sampling.max_tokens, forced);
        let request = GenerateRequest::new(Arc::new(Vanilla), sampling);
        let capture = if maps { AttentionCapture::Maps } else { AttentionCapture::Nothing };
        let FirstToken { mut sequence, prefilled, .. } =
            Prefill::start(&self.to_measure(), prompt, request, capture, steps)?.run()?;
        let (mut workspace, mut stepping, mut steps) = (DecodeWorkspace::default(), Duration::ZERO, 0);
        loop {
            if let Some(finish) = sequence.push_tokens(&mut |_| true) {
                if let Some(failure) = sequence.take_failure() {
                    return Err(failure);
                }
                let logits = std::mem::take(&mut sequence.generator.logits);
                let mut answer = sequence.finish(finish, &mut |_| true);
                // The time a token is that of answers beside the reference: without choosing, text and the logits that are kept.
                answer.stats.tpot = (steps > 0).then(|| stepping.as_secs_f64() / f64::from(steps));
                return Ok(Reference { answer, logits, maps: prefilled.maps });
            }
            let step = Instant::now();
            let logits = extend(&mut [&mut sequence.cache], &[sequence.next_token], &mut workspace)?;
            stepping += step.elapsed();
            steps += 1;
            let at = sequence.generator.tokens.len();
            sequence.next_token = sequence.generator.choose(logits, at);
        }
    }
}

/// Document tokens, from 0, among the rows of the last layer.
pub(super) fn computed(prompt: &Prompt, rows: &[u32]) -> Vec<u32> {
    let (start, end) = (prompt.system.len() as u32, (prompt.len() - prompt.question.len()) as u32);
    rows.iter().filter(|row| (start..end).contains(*row)).map(|row| row - start).collect()
}
