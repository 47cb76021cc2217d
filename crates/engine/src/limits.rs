//! The room that a request takes: positions and bytes.

use refrain_eviction::{Eviction, PromptSpans, Sizes};

use crate::cache::EvictingCache;
use crate::engine::Engine;
use crate::prompt::Prompt;
use crate::{Error, Result};

impl Engine {
    /// Positions for the prompt and `max_tokens` more, within the context. Where keys are rotated by their places in a bounded
    /// cache, it is these that must fit.
    ///
    /// # Errors
    /// If the question is empty, they do not fit, or the eviction policy refuses the prompt.
    pub fn max_seq_len(&self, prompt: &Prompt, max_tokens: usize, eviction: &Eviction) -> Result<usize> {
        let context = self.decoder().config().context;
        if prompt.question.is_empty() {
            return Err(Error::EmptyQuestion);
        }
        let refused = Error::PromptTooLong { prompt: prompt.len(), answer: max_tokens, context };
        let Some(room) = prompt.len().checked_add(max_tokens).filter(|room| *room < u32::MAX as usize) else {
            return Err(refused);
        };
        if self.max_rope_position(prompt, eviction, room, true)? <= context { Ok(room) } else { Err(refused) }
    }

    /// The farthest that a key of a request of `max_seq_len` tokens is from a query, plus one: rotary scaling depends on it, and
    /// it must be within the context. Where keys are rotated by their places in a bounded cache, these count; keys of tokens
    /// that a method keeps nothing of still lie between.
    pub(crate) fn max_rope_position(
        &self,
        prompt: &Prompt,
        eviction: &Eviction,
        max_seq_len: usize,
        keeps_all_tokens: bool,
    ) -> Result<usize> {
        let budget = eviction.policy.budget(&spans(prompt))?;
        let reindexed = budget.filter(|budget| budget.decoding && eviction.policy.sinks().is_some());
        let most = reindexed
            .map_or(max_seq_len, |budget| max_seq_len.min(prompt.len().max(budget.most.saturating_add(1))));
        if keeps_all_tokens {
            return Ok(most);
        }
        let most = max_seq_len.min(most + prompt.len());
        let context = self.decoder().config().context;
        if most > context {
            let answer = max_seq_len - prompt.len();
            return Err(Error::PromptTooLong { prompt: prompt.len(), answer, context });
        }
        Ok(most)
    }

    /// Bytes that an answer will hold at most, once its prompt is computed: keys and values, and what the eviction policy keeps
    /// beside them.
    ///
    /// # Errors
    /// As for [`Engine::max_seq_len`].
    pub fn max_kv_bytes(&self, prompt: &Prompt, max_tokens: usize, eviction: &Eviction) -> Result<usize> {
        self.kv_bytes(prompt, self.max_seq_len(prompt, max_tokens, eviction)?, eviction)
    }

    /// [`Engine::max_kv_bytes`] of a prompt and its answer, of at most `room` tokens together.
    pub(crate) fn kv_bytes(&self, prompt: &Prompt, room: usize, eviction: &Eviction) -> Result<usize> {
        let held = match eviction.policy.budget(&spans(prompt))? {
            Some(budget) if budget.decoding => budget.most.saturating_add(1).min(room),
            Some(budget) => budget.keep.min(prompt.len()) + room - prompt.len(),
            None => room,
        };
        let config = self.decoder().config();
        let (heads, _) = EvictingCache::heads(config, eviction);
        let copies = heads / config.kv_heads;
        let side_bytes = self.side_bytes(prompt, eviction, (held, room));
        let token_bytes = copies * self.decoder().shape().token_bytes(self.settings().kv);
        // Sinks that are turned as the answer grows have a second copy of their keys.
        let sinks = eviction.policy.sinks().unwrap_or(0).min(held) * token_bytes / 2;
        let positions =
            if eviction.is_full() && !eviction.per_query_head { 0 } else { held * heads * size_of::<u32>() };
        let beside = side_bytes.saturating_add(positions).saturating_mul(config.num_layers());
        Ok(beside.saturating_add(held * token_bytes + sinks))
    }

    /// Bytes that an eviction policy keeps beside one layer of a prompt, all of whose tokens are there, while it chooses among them. Layers come one
    /// after the other.
    pub(crate) fn prompt_side_bytes(&self, prompt: &Prompt, eviction: &Eviction) -> usize {
        // How long the answer may be is not known here.
        self.side_bytes(prompt, eviction, (prompt.len(), self.decoder().config().context))
    }

    /// Bytes that an eviction policy keeps beside one layer of `capacity` slots a head, of a request of `rows` tokens.
    fn side_bytes(&self, prompt: &Prompt, eviction: &Eviction, (capacity, rows): (usize, usize)) -> usize {
        let config = self.decoder().config();
        let (heads, group) = EvictingCache::heads(config, eviction);
        let sizes = Sizes { heads, group, head_dim: config.head_dim, capacity, rows };
        eviction.policy.side_bytes(&spans(prompt), sizes)
    }
}

fn spans(prompt: &Prompt) -> PromptSpans {
    PromptSpans { system: prompt.system_span(), question: prompt.question_span() }
}
