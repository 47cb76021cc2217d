//! A sequence: prompt and answer so far, ready for its next token.

use std::fmt;
use std::time::Instant;

use refrain_eviction::Eviction;

use super::generator::Generator;
use crate::cache::SequenceCache;
use crate::engine::Engine;
use crate::explanation::Explanation;
use crate::prefill::BackgroundLoad;
use crate::request::{Answer, FinishReason, RequestStats, TokenEvent};

/// An answer under way. Its next token is chosen, and not yet part of it.
pub struct Sequence {
    pub(crate) engine: Engine,
    pub(crate) cache: SequenceCache,
    pub(crate) generator: Generator,
    pub(crate) next_token: u32,
    pub(crate) stats: RequestStats,
    pub(crate) eviction: Eviction,
    pub(crate) explanation: Option<Explanation>,
    /// When the first token was chosen.
    pub(crate) first: Instant,
    /// Loaders that may still read for the store's memory.
    pub(crate) load: BackgroundLoad,
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

    /// Adds the chosen token to the answer and tells `stream` of it, which says whether to go on. Returns the reason why the
    /// answer ends with it, if it does.
    pub fn push_token(&mut self, stream: &mut dyn FnMut(TokenEvent<'_>) -> bool) -> Option<FinishReason> {
        self.generator.push(self.next_token, &self.cache, stream)
    }

    /// The answer at its end.
    pub fn finish(self, finish: FinishReason, stream: &mut dyn FnMut(TokenEvent<'_>) -> bool) -> Answer {
        let Sequence { engine, cache, generator, stats, eviction, explanation, first, load, .. } = self;
        let steps = generator.tokens.len().saturating_sub(1);
        let tpot = (steps > 0).then(|| first.elapsed().as_secs_f64() / steps as f64);
        let mut stats = RequestStats { tpot, ..stats.with_loading(&load.finish()) };
        stats.count_cache(&engine, &cache, &eviction);
        Answer { explanation, ..generator.finish(finish, stats, stream) }
    }
}
