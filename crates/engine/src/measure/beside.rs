//! Answers to one prompt, held against vanilla's while they are made.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_eviction::Eviction;
use refrain_fusion::FusionMethod;

use super::fidelity::{Fidelity, Reference, computed};
use crate::Result;
use crate::cache::SequenceCache;
use crate::decode::{DecodeWorkspace, extend};
use crate::engine::Engine;
use crate::generate::{FirstToken, Prefill};
use crate::prefill::{AttentionCapture, PrefillStats};
use crate::prompt::Prompt;
use crate::request::{Answer, FinishReason, GenerateRequest};
use crate::sequence::Sequence;

/// One answer beside the reference: its first tokens are forced to the reference's, and where the answer's own ones leave these, the
/// cache is kept, from which the answer goes on by itself afterwards.
struct AnswerBeside<'a> {
    sequence: Sequence,
    prefilled: PrefillStats,
    forced: &'a [u32],
    /// Logits of the forced tokens.
    found: Vec<f32>,
    /// The answer's own tokens as far as they are those that are forced, and the first that is another.
    own: Vec<u32>,
    /// The cache where the answer leaves the forced tokens.
    branch: Option<SequenceCache>,
    /// Forced tokens that the cache has.
    at: usize,
    finish: Option<FinishReason>,
}

impl<'a> AnswerBeside<'a> {
    fn start(
        engine: &Engine,
        prompt: &Prompt,
        request: &GenerateRequest,
        reference: &'a Reference,
    ) -> Result<AnswerBeside<'a>> {
        let maps = !reference.maps.is_empty();
        let capture = if maps { AttentionCapture::Maps } else { AttentionCapture::Nothing };
        let forced = reference.forced(engine);
        let steps = request.sampling.max_tokens.max(forced.len());
        let FirstToken { sequence, logits, prefilled } =
            Prefill::start(&engine.to_measure(), prompt, request.clone(), capture, (steps, 0))?.run()?;
        let (own, branch) = (vec![sequence.next_token], None);
        let mut answer =
            AnswerBeside { sequence, prefilled, forced, found: logits, own, branch, at: 0, finish: None };
        answer.compare();
        Ok(answer)
    }

    /// Whether the next token is a forced one.
    fn is_forced(&self) -> bool {
        self.at + 1 < self.forced.len()
    }

    /// The token whose logits are wanted next.
    fn next_token(&self) -> u32 {
        if self.is_forced() { self.forced[self.at] } else { self.sequence.next_token }
    }

    /// Takes the logits after [`next_token`](Self::next_token).
    fn take(&mut self, logits: &mut [f32]) {
        if self.is_forced() {
            self.at += 1;
            self.found.extend_from_slice(logits);
            if self.branch.is_none() {
                self.own.push(self.sequence.generator.choose(logits, self.at));
            }
            self.compare();
        } else {
            let at = self.sequence.generator.tokens.len();
            self.sequence.next_token = self.sequence.generator.choose(logits, at);
            self.finish = self.sequence.push_tokens(&mut |_| true);
        }
    }

    /// Keeps the cache where the answer's own token is not the forced one, and goes over to the answer itself after the last.
    fn compare(&mut self) {
        if self.is_forced() {
            if self.branch.is_none() && self.own.get(self.at) != self.forced.get(self.at) {
                self.branch = Some(self.sequence.cache.fork());
            }
            return;
        }
        if let Some(branch) = self.branch.take() {
            self.sequence.cache = branch;
        }
        for token in std::mem::take(&mut self.own) {
            self.sequence.next_token = token;
            self.finish = self.sequence.push_tokens(&mut |_| true);
            if self.finish.is_some() {
                break;
            }
        }
    }

    fn finish(
        self,
        engine: &Engine,
        prompt: &Prompt,
        reference: &Reference,
        tpot: Option<f64>,
    ) -> Result<(Answer, Fidelity)> {
        let AnswerBeside { mut sequence, prefilled, found, finish, .. } = self;
        if let Some(failure) = sequence.take_failure() {
            return Err(failure);
        }
        let mut answer = sequence.finish(finish.unwrap_or(FinishReason::Length), &mut |_| true);
        answer.stats.tpot = tpot;
        let agreement = engine.agreement(&reference.logits, &found);
        let pairs = reference.maps.iter().zip(&prefilled.maps);
        let attention_l2 = pairs.map(|(exact, map)| map.distance(exact)).collect();
        // The reference has the same order, in which all chunks together take the same positions.
        let hits = reference.hits(&computed(prompt, &prefilled.final_rows));
        Ok((answer, Fidelity { agreement, attention_l2, hits }))
    }
}

impl Engine {
    /// The order in which a method puts the prompt's chunks, where it is another.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn chunk_order(&self, prompt: &Prompt, method: &Arc<dyn FusionMethod>) -> Result<Option<Vec<usize>>> {
        if !method.reorders() {
            return Ok(None);
        }
        let order = self.measure(prompt, method, Eviction::full())?.chunk_order;
        Ok((!order.is_empty()).then_some(order))
    }

    /// Answers a prompt as [`Engine::answer`] does, once for each request and the engine that is asked (one with another
    /// [prefix](Engine::behind), for instance), and holds the way there against `reference`: the first tokens are forced to its own,
    /// and where an answer leaves these it goes on by itself. The answers are prefilled one after the other and decoded together, so
    /// that weights are read once a step; only an answer that is alone has a time a token. The reference to a method that
    /// [reorders](refrain_fusion::FusionMethod::reorders) chunks is that of the prompt in [its order](Engine::chunk_order).
    ///
    /// # Errors
    /// If the model has no embedding of a token. Each answer has its own errors, as for [`Engine::answer`].
    pub fn answers_beside(
        prompt: &Prompt,
        requests: &[(&Engine, GenerateRequest)],
        reference: &Reference,
    ) -> Result<Vec<Result<(Answer, Fidelity)>>> {
        let start = |(engine, request): &(&Engine, GenerateRequest)| {
            AnswerBeside::start(engine, prompt, request, reference)
        };
        let mut answers: Vec<Result<AnswerBeside<'_>>> = requests.iter().map(start).collect();
        let (mut workspace, mut stepping, mut steps) = (DecodeWorkspace::default(), Duration::ZERO, 0);
        loop {
            let mut under_way: Vec<&mut AnswerBeside<'_>> = Vec::new();
            under_way.extend(answers.iter_mut().flatten().filter(|answer| answer.finish.is_none()));
            if under_way.is_empty() {
                break;
            }
            let step = Instant::now();
            let tokens: Vec<u32> = under_way.iter().map(|answer| answer.next_token()).collect();
            let mut caches: Vec<_> = under_way.iter_mut().map(|answer| &mut answer.sequence.cache).collect();
            let logits = extend(&mut caches, &tokens, &mut workspace)?;
            stepping += step.elapsed();
            steps += 1;
            let vocab = logits.len() / tokens.len();
            under_way.iter_mut().zip(logits.chunks_exact_mut(vocab)).for_each(|(a, logits)| a.take(logits));
        }
        let alone = requests.len() == 1 && steps > 0;
        let tpot = alone.then(|| stepping.as_secs_f64() / f64::from(steps));
        let finish = |(answer, (engine, _)): (Result<AnswerBeside<'_>>, &(&Engine, _))| {
            answer?.finish(engine, prompt, reference, tpot)
        };
        Ok(answers.into_iter().zip(requests).map(finish).collect())
    }
}
