//! A sequence: prompt and answer so far, ready for its next token.

use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

use refrain_eviction::Eviction;
use refrain_kernels::DeviceFailure;

use super::generator::Generator;
use super::lookup::PromptLookup;
use crate::Error;
use crate::cache::SequenceCache;
use crate::engine::Engine;
use crate::explanation::Explanation;
use crate::logprobs::TokenLogprobs;
use crate::prefill::BackgroundLoad;
use crate::prefix_cache::PrefixRoot;
use crate::request::{Answer, FinishReason, RequestStats, TokenEvent};

/// An answer under way. Its next token is chosen, and not yet part of it.
pub struct Sequence {
    pub(crate) engine: Engine,
    pub(crate) cache: SequenceCache,
    pub(crate) generator: Generator,
    pub(crate) next_token: u32,
    pub(crate) state: StepState,
    /// Tokens that were chosen after it.
    pub(crate) further: VecDeque<ChosenToken>,
    pub(crate) lookup: PromptLookup,
    /// Most tokens that are proposed at a time.
    pub(crate) speculative_tokens: usize,
    pub(crate) stats: RequestStats,
    pub(crate) eviction: Eviction,
    pub(crate) explanation: Option<Explanation>,
    /// When the first token was chosen, later by the times that do not count for decoding.
    pub(crate) first: Instant,
    /// Loaders that may still read for the store's memory.
    pub(crate) load: BackgroundLoad,
    /// Its chain in the prefix cache; none if it is not kept there.
    pub(crate) prefix: Option<PrefixRoot>,
}

/// A token that a step has chosen.
#[derive(Debug)]
pub(crate) struct ChosenToken {
    token: u32,
    logprobs: Option<TokenLogprobs>,
    /// Why there is none. The tokens before it stand, and may end the answer first.
    failure: Option<Error>,
}

/// The state of a sequence between two tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepState {
    /// The next token is chosen, and not yet part of the answer.
    Chosen,
    /// The next token is part of the answer, and a step is to follow.
    Told,
    /// A step has begun to choose tokens.
    Choosing,
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence").field("tokens", &self.generator.tokens.len()).finish_non_exhaustive()
    }
}

impl Sequence {
    /// Statistics so far.
    pub fn stats(&self) -> &RequestStats {
        &self.stats
    }

    /// Tokens of the answer so far.
    pub fn answer_tokens(&self) -> usize {
        self.generator.tokens.len()
    }

    /// Why the answer cannot go on, once [`Sequence::push_tokens`] has said that it failed.
    pub fn take_failure(&mut self) -> Option<Error> {
        self.generator.failure.take()
    }

    /// Adds the chosen tokens to the answer and tells `stream` of each, which says whether to go on. Returns the reason why the
    /// answer ends with one, if it does.
    pub fn push_tokens(&mut self, stream: &mut dyn FnMut(TokenEvent<'_>) -> bool) -> Option<FinishReason> {
        loop {
            self.lookup.push(self.next_token);
            let behind = self.further.len();
            let finish = self.generator.push(self.next_token, (&self.cache, behind), stream);
            if self.generator.tokens.len() == 1 {
                self.keep_prefix();
            }
            if finish.is_some() {
                // An answer that ends among the tokens of a step leaves what one without proposals leaves.
                self.further.clear();
                self.cache.take_back(behind);
                return finish;
            }
            self.state = StepState::Told;
            let next = self.further.pop_front()?;
            self.set_next(next);
        }
    }

    /// Makes a chosen token the next one.
    fn set_next(&mut self, chosen: ChosenToken) {
        let ChosenToken { token, logprobs, failure } = chosen;
        (self.next_token, self.generator.logprobs, self.generator.failure) = (token, logprobs, failure);
    }

    /// Tokens that may follow the last one of the answer.
    pub(crate) fn propose(&mut self) -> &[u32] {
        if !self.cache.cache.takes_back() {
            return &[];
        }
        // A step chooses one token more than are proposed.
        let most = self.generator.tokens_left().saturating_sub(1);
        self.lookup.propose(most.min(self.speculative_tokens))
    }

    /// Chooses the next token by the first of `logits`, and further ones as long as they are those of the proposal, whose tokens are in the
    /// cache.
    pub(crate) fn verify<'l>(&mut self, proposal: &[u32], logits: impl Iterator<Item = &'l mut [f32]>) {
        self.state = StepState::Choosing;
        let (at, mut accepted) = (self.generator.tokens.len(), 0);
        let mut first = None;
        for (index, logits) in logits.enumerate() {
            let token = self.generator.choose(logits, at + index);
            let is_last = self.generator.is_over(token) || proposal.get(index) != Some(&token);
            let (logprobs, failure) = (self.generator.logprobs.take(), self.generator.failure.take());
            let chosen = ChosenToken { token, logprobs, failure };
            match first {
                None => first = Some(chosen),
                Some(_) => self.further.push_back(chosen),
            }
            if is_last {
                break;
            }
            accepted += 1;
        }
        self.cache.take_back(proposal.len() - accepted);
        self.lookup.learn(proposal.len(), accepted);
        if let Some(first) = first {
            self.set_next(first);
        }
        self.state = StepState::Chosen;
    }

    /// Whether the sequence has its next token, in spite of a step of several sequences that failed.
    pub fn has_next_token(&self) -> bool {
        self.state == StepState::Chosen
    }

    /// Goes back to where a step began that failed, so that it can be repeated; false if that is not possible, since its cache evicts
    /// tokens or it failed while tokens were chosen.
    pub fn undo_step(&mut self) -> bool {
        if self.state != StepState::Told || !self.cache.cache.takes_back() {
            return false;
        }
        // The last token of the answer is the one that the step computes.
        let before = self.lookup.tokens().len() - 1;
        self.cache.take_back(self.cache.len.saturating_sub(before));
        true
    }

    /// Leaves keys and values of prompt and answer so far to prompts that begin alike. It comes after the first token was told, which does
    /// not wait for it.
    fn keep_prefix(&self) {
        let (Some(root), Some(kv)) = (&self.prefix, self.cache.cache.whole()) else { return };
        let tokens = self.lookup.tokens();
        let ids = &tokens[..self.cache.len.min(tokens.len())];
        let device = &**self.cache.decoder.device();
        // The prefix cache keeps nothing if the device has no memory for it. The next step reports a device that has failed.
        let _ = DeviceFailure::catch(|| self.engine.prefix_cache().insert(device, root, ids, kv));
    }

    /// The answer at its end.
    pub fn finish(self, finish: FinishReason, stream: &mut dyn FnMut(TokenEvent<'_>) -> bool) -> Answer {
        let steps = self.generator.tokens.len().saturating_sub(1);
        let tpot = (steps > 0).then(|| self.first.elapsed().as_secs_f64() / steps as f64);
        self.keep_prefix();
        let Sequence { engine, cache, generator, lookup, stats, eviction, explanation, load, .. } = self;
        let (draft_tokens, accepted_draft_tokens) = (lookup.drafted, lookup.accepted);
        let stats = stats.with_loading(&load.finish());
        let mut stats = RequestStats { tpot, draft_tokens, accepted_draft_tokens, ..stats };
        stats.count_cache(&engine, &cache, &eviction);
        Answer { explanation, ..generator.finish(finish, stats, stream) }
    }
}
