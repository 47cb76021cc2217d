//! Bare times of the model, on token ids as they are given: what a comparison with other engines measures.

use std::sync::Arc;
use std::time::Instant;

use refrain_eviction::Eviction;
use refrain_fusion::{FusionMethod, Vanilla};
use serde::Serialize;

use crate::Result;
use crate::cache::{FullCache, SequenceCache};
use crate::decode::{DecodeWorkspace, extend};
use crate::engine::Engine;
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest};
use crate::prompt::Prompt;
use crate::request::RequestStats;
use crate::sampling::argmax;

/// Times of decoding after a context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DecodeTimes {
    /// Seconds of the context's prefill; none if it was empty.
    pub prefill_seconds: Option<f64>,
    /// Seconds a token, mean of all steps.
    pub seconds_per_token: f64,
}

/// Times of one answer.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerTimes {
    /// Seconds of each token after the first.
    pub steps: Vec<f64>,
    /// Statistics without the time a token, which [`Engine::answer`] adds.
    pub stats: RequestStats,
}

/// Tokens of a turn.
const TURN: usize = 32;

impl Engine {
    /// Seconds from an empty KV cache to the logits of the last of `ids`, all of them computed. Making the cache is
    /// part of it.
    ///
    /// # Errors
    /// If there is no id, they do not fit the context, or one has no embedding.
    pub fn time_prefill(&self, ids: &[u32]) -> Result<f64> {
        Ok(self.timed_prefill(ids, 0)?.0)
    }

    /// Times of `tokens` greedy steps of one token each after `context`. An empty context starts from one token.
    ///
    /// # Errors
    /// If they do not fit the model's context, or an id has no embedding.
    pub fn time_decode(&self, context: &[u32], tokens: usize) -> Result<DecodeTimes> {
        let (prefill_seconds, mut cache, mut token) = if context.is_empty() {
            let start = self.tokenizer().bos().or(self.tokenizer().eos_ids().first().copied()).unwrap_or(0);
            self.max_seq_len(&of_ids(&[start]), tokens, Eviction::full())?;
            let decoder = self.decoder_arc();
            let tables = decoder.rope_tables(tokens, tokens);
            let cache =
                FullCache::empty(&**decoder.device(), decoder.shape(), self.settings().kv, tokens, tables);
            (None, SequenceCache::new(decoder, Box::new(cache), 0, self.buffers().kv.clone()), start)
        } else {
            let (seconds, cache, first) = self.timed_prefill(context, tokens)?;
            (Some(seconds), cache, first)
        };
        let mut workspace = DecodeWorkspace::default();
        let started = Instant::now();
        for _ in 0..tokens {
            token = argmax(extend(&mut [&mut cache], &[token], &mut workspace)?);
        }
        let seconds_per_token = started.elapsed().as_secs_f64() / tokens.max(1) as f64;
        Ok(DecodeTimes { prefill_seconds, seconds_per_token })
    }

    /// Times of greedy answers of `tokens` tokens, past any end token, one for each eviction policy. They take turns, some
    /// tokens at a time, so that whatever slows the machine for a while slows all of them. `progress(tokens)` is told of
    /// tokens that are done.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn time_policies(
        &self,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        evictions: &[&Eviction],
        tokens: usize,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<AnswerTimes>> {
        let (engine, mut answers) = (self.to_measure(), Vec::new());
        for eviction in evictions {
            let max_seq_len = self.max_seq_len(prompt, tokens, eviction)?;
            let (stats, prefilled) = engine.timed(prompt, method, eviction, max_seq_len)?;
            let token = argmax(&prefilled.logits);
            answers.push((prefilled.cache, token, AnswerTimes { steps: Vec::new(), stats }));
            progress(1);
        }
        let mut workspace = DecodeWorkspace::default();
        for _ in (1..tokens).step_by(TURN) {
            for (cache, token, times) in &mut answers {
                for _ in 0..TURN.min(tokens - 1 - times.steps.len()) {
                    let started = Instant::now();
                    *token = argmax(extend(&mut [cache], &[*token], &mut workspace)?);
                    times.steps.push(started.elapsed().as_secs_f64());
                    progress(1);
                }
            }
        }
        let finish = |((cache, _, mut times), eviction): ((SequenceCache, _, AnswerTimes), &&Eviction)| {
            times.stats.count_cache(self, &cache, eviction);
            times
        };
        Ok(answers.into_iter().zip(evictions).map(finish).collect())
    }

    /// Seconds of a prefill with room for `tokens` more, the cache to decode in, and the likeliest next token.
    fn timed_prefill(&self, ids: &[u32], tokens: usize) -> Result<(f64, SequenceCache, u32)> {
        let prompt = of_ids(ids);
        let eviction = Eviction::full().clone();
        let max_seq_len = self.max_seq_len(&prompt, tokens, &eviction)?;
        let engine = self.to_measure();
        let started = Instant::now();
        let (method, capture) = (Arc::new(Vanilla), AttentionCapture::Nothing);
        let request = PrefillRequest { method, eviction, max_seq_len, capture };
        let prefilled = PrefillJob::start(&engine, &prompt, request)?.run()?;
        let token = argmax(&prefilled.logits);
        Ok((started.elapsed().as_secs_f64(), prefilled.cache, token))
    }
}

/// A prompt of exactly these ids, none of them reusable.
fn of_ids(ids: &[u32]) -> Prompt {
    Prompt { question: ids.to_vec(), ..Prompt::default() }
}
