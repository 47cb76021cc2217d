//! Methods side by side over one prompt.

use std::sync::Arc;
use std::time::Instant;

use refrain_eviction::Eviction;
use refrain_fusion::{FusionMethod, Vanilla};
use serde::Serialize;

use super::agreement::Agreement;
use super::fidelity::Reference;
use crate::Result;
use crate::decode::{DecodeWorkspace, extend};
use crate::engine::Engine;
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest, Prefilled};
use crate::prompt::Prompt;
use crate::request::{Answer, RequestStats};
use crate::sampling::{Sampling, argmax};

/// One method beside vanilla.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The method as it was asked for.
    pub method: String,
    /// Counts and times of its prefill.
    pub stats: RequestStats,
    /// Vanilla's TTFT divided by its own.
    pub speedup: f64,
    /// Mean over positions of `KL(vanilla ‖ method)` of the next token's distribution, in nats.
    pub kl: f64,
    /// That of the answer's first token.
    pub kl_first: f64,
    /// Share of positions at which both have the same likeliest token.
    pub top1: f64,
    /// Positions compared: vanilla's own answer, fed to every method.
    pub positions: usize,
}

impl Engine {
    /// Compares methods, each with `eviction`, with vanilla at full attention, teacher-forced over vanilla's first `tokens`
    /// greedy answer tokens. A method that [reorders](FusionMethod::reorders) chunks is compared with vanilla in
    /// [its order](Engine::chunk_order); its speed-up is over vanilla in the prompt's own.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn compare(
        &self,
        prompt: &Prompt,
        methods: &[(String, Arc<dyn FusionMethod>)],
        eviction: &Eviction,
        tokens: usize,
    ) -> Result<Vec<Comparison>> {
        self.compare_while(prompt, methods, eviction, tokens, || true)
    }

    /// [`Engine::compare`] that goes on only while `goes_on` says so, which is asked before each method: the methods until then.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn compare_while(
        &self,
        prompt: &Prompt,
        methods: &[(String, Arc<dyn FusionMethod>)],
        eviction: &Eviction,
        tokens: usize,
        goes_on: impl FnMut() -> bool,
    ) -> Result<Vec<Comparison>> {
        self.to_measure().compare_here(prompt, methods, eviction, tokens, goes_on)
    }

    /// [`Engine::compare`] of methods that take over what this engine's prefix cache keeps of earlier prompts. Vanilla, which they are
    /// compared with, computes the whole prompt.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn compare_taking_over(
        &self,
        prompt: &Prompt,
        methods: &[(String, Arc<dyn FusionMethod>)],
        eviction: &Eviction,
        tokens: usize,
    ) -> Result<Vec<Comparison>> {
        self.compare_here(prompt, methods, eviction, tokens, || true)
    }

    /// [`Engine::compare_while`] whose methods run on this engine, with its prefix cache.
    fn compare_here(
        &self,
        prompt: &Prompt,
        methods: &[(String, Arc<dyn FusionMethod>)],
        eviction: &Eviction,
        tokens: usize,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Vec<Comparison>> {
        let max_seq_len = self.max_seq_len(prompt, tokens, Eviction::full())?;
        let sampling = Sampling { max_tokens: tokens, ..Sampling::default() };
        let vanilla = self.reference(prompt, &sampling, tokens, false)?;
        let mut rows = Vec::new();
        for (name, method) in methods {
            if !goes_on() {
                break;
            }
            let reordered = match self.chunk_order(prompt, method)? {
                Some(order) => Some(self.reference(&prompt.in_order(&order), &sampling, tokens, false)?),
                None => None,
            };
            let Reference { answer: Answer { stats, tokens: answer, .. }, logits: expected, .. } =
                reordered.as_ref().unwrap_or(&vanilla);
            let reference = name == "vanilla" && eviction.is_full() && !self.prefix_cache().is_on();
            let (stats, logits) = match reference {
                true => (stats.clone(), expected.clone()),
                false => self.teacher_forced(prompt, method, eviction, answer, max_seq_len)?,
            };
            let Agreement { kl, kl_first, top1, positions, .. } = self.agreement(expected, &logits);
            let speedup = vanilla.answer.stats.ttft / stats.ttft;
            rows.push(Comparison { method: name.clone(), speedup, stats, kl, kl_first, top1, positions });
        }
        Ok(rows)
    }

    /// Agreement with `exact`, an engine of the same model with another precision: both compute the whole prompt and then the
    /// first `tokens` greedy answer tokens of `exact`.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn agreement_with(&self, exact: &Engine, prompt: &Prompt, tokens: usize) -> Result<Agreement> {
        let max_seq_len = self.max_seq_len(prompt, tokens, Eviction::full())?;
        let sampling = Sampling { max_tokens: tokens, ..Sampling::default() };
        let expected = exact.reference(prompt, &sampling, tokens, false)?;
        let vanilla: Arc<dyn FusionMethod> = Arc::new(Vanilla);
        let answer = &expected.answer.tokens;
        let engine = self.to_measure();
        let (_, logits) = engine.teacher_forced(prompt, &vanilla, Eviction::full(), answer, max_seq_len)?;
        Ok(self.agreement(&expected.logits, &logits))
    }

    /// A method's statistics, and its logits where vanilla chose each token of `answer`.
    fn teacher_forced(
        &self,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        eviction: &Eviction,
        answer: &[u32],
        max_seq_len: usize,
    ) -> Result<(RequestStats, Vec<f32>)> {
        let (mut stats, Prefilled { mut cache, mut logits, .. }) =
            self.timed(prompt, method, eviction, max_seq_len)?;
        let mut workspace = DecodeWorkspace::default();
        // Step by step, as vanilla went: several tokens at once may be rounded otherwise.
        for token in &answer[..answer.len() - 1] {
            logits.extend_from_slice(extend(&mut [&mut cache], &[*token], &mut workspace)?);
        }
        stats.count_cache(self, &cache, eviction);
        Ok((stats, logits))
    }

    /// A prefill on this engine with its statistics: TTFT ends with the choice of the first token.
    pub(crate) fn timed(
        &self,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        eviction: &Eviction,
        max_seq_len: usize,
    ) -> Result<(RequestStats, Prefilled)> {
        let started = Instant::now();
        let (method, of) = (method.clone(), eviction.clone());
        let capture = AttentionCapture::Nothing;
        let request = PrefillRequest { method, eviction: of, max_seq_len, capture };
        let mut prefilled = PrefillJob::start(self, prompt, request)?.run()?;
        argmax(&prefilled.logits);
        let ttft = started.elapsed().as_secs_f64();
        prefilled.load.join();
        let mut stats = RequestStats::of_prefill(self, prompt, &prefilled.stats, &prefilled.load.reused);
        stats.ttft = ttft;
        stats.compute_ttft = ttft - prefilled.load.reused.waited.as_secs_f64();
        stats.count_cache(self, &prefilled.cache, eviction);
        Ok((stats, prefilled))
    }

    /// The statistics of one prefill up to its first token, for benchmarks.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn measure(
        &self,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        eviction: &Eviction,
    ) -> Result<RequestStats> {
        let max_seq_len = self.max_seq_len(prompt, 1, eviction)?;
        Ok(self.to_measure().timed(prompt, method, eviction, max_seq_len)?.0)
    }
}
