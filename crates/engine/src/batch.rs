//! Several answers at once: each is begun alone, then all go on together, one token of each in a pass over the weights.

use std::time::Instant;

use refrain_eviction::Eviction;
use refrain_kernels::Floats;
use refrain_model::Workspace;

use crate::answer::{Account, Answer, Finish, Progress, Request};
use crate::forward::State;
use crate::prefill::Watch;
use crate::writing::Writing;
use crate::{Engine, Prompt, Result};

/// An answer under way. Its next token is chosen, and not yet written.
pub struct Ongoing {
    state: State,
    writing: Writing,
    token: u32,
    account: Account,
    eviction: Eviction,
    explanation: Option<crate::Explanation>,
    first: Instant,
}

impl std::fmt::Debug for Ongoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ongoing").field("tokens", &self.writing.tokens.len()).finish_non_exhaustive()
    }
}

/// Memory of a batch's steps.
#[derive(Debug, Default)]
pub struct Steps(Option<(Floats, Workspace)>);

impl Engine {
    /// Computes a prompt up to the first token of its answer.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn start(&self, prompt: &Prompt, request: &Request<'_>) -> Result<Ongoing> {
        let watch = if request.explain { Watch::Explain } else { Watch::Nothing };
        let begun = self.begin(prompt, request, watch, (request.sampling.max_tokens, 0))?;
        let explain = |attention: &Vec<f32>| self.explanation(prompt, attention, &begun.work.final_rows);
        let explanation = begun.work.attention.as_ref().map(explain);
        let (eviction, first) = (request.eviction.clone(), Instant::now());
        let crate::answer::Begun { mut state, writing, token, account, .. } = begun;
        state.lend();
        Ok(Ongoing { state, writing, token, account, eviction, explanation, first })
    }

    /// Bytes of keys and values that an answer will hold at most, once its prompt is computed.
    ///
    /// # Errors
    /// As for [`Engine::room`].
    pub fn kv_bytes(&self, prompt: &Prompt, max_tokens: usize, eviction: &Eviction) -> Result<usize> {
        let room = self.room(prompt, max_tokens, eviction)?;
        let spans =
            refrain_eviction::PromptSpans { system: prompt.system_span(), question: prompt.question_span() };
        let held = match eviction.policy.budget(&spans)? {
            Some(budget) if budget.decoding => budget.most.saturating_add(1).min(room),
            Some(budget) => budget.keep.min(prompt.len()) + room - prompt.len(),
            None => room,
        };
        let config = self.decoder.config();
        let copies = if eviction.per_query_head { config.heads / config.kv_heads } else { 1 };
        Ok(held * copies * self.decoder.shape().token_bytes(self.settings.kv))
    }
}

impl Ongoing {
    /// What is known so far of what it took.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Writes the token that is chosen, and says why the answer ends with it, if it does. `stream` is told of it, and
    /// says whether to go on.
    pub fn write(&mut self, stream: &mut dyn FnMut(Progress<'_>) -> bool) -> Option<Finish> {
        self.writing.write(self.token, &self.state, stream)
    }

    /// The answer, which has ended.
    pub fn finish(self, finish: Finish, stream: &mut dyn FnMut(Progress<'_>) -> bool) -> Answer {
        let Ongoing { state, writing, mut account, eviction, explanation, first, .. } = self;
        let steps = writing.tokens.len().saturating_sub(1);
        account.tpot = (steps > 0).then(|| first.elapsed().as_secs_f64() / steps as f64);
        account.count_cache(&state, &eviction);
        Answer { explanation, ..writing.answer(finish, account, stream) }
    }
}

/// Chooses the next token of each answer, whose last one is written. It is the same whatever others are there.
///
/// # Errors
/// If the model has no embedding of a token.
///
/// # Panics
/// If they are not of one model.
pub fn step(answers: &mut [&mut Ongoing], steps: &mut Steps) -> Result<()> {
    let Some(first) = answers.first() else { return Ok(()) };
    let decoder = first.state.decoder.clone();
    let same = |ongoing: &&mut Ongoing| std::sync::Arc::ptr_eq(&ongoing.state.decoder, &decoder);
    assert!(answers.iter().all(same), "answers of one model");
    let dtype = first.state.cache.dtype();
    let (x, work) = steps.0.get_or_insert_with(|| (Floats::new(), Workspace::new(dtype)));
    let tokens: Vec<u32> = answers.iter().map(|ongoing| ongoing.token).collect();
    let mut states: Vec<&mut State> = answers.iter_mut().map(|ongoing| &mut ongoing.state).collect();
    State::extend_each(&mut states, &tokens, x, work)?;
    let vocab = work.logits.len() / tokens.len();
    for (ongoing, logits) in answers.iter_mut().zip(work.logits.chunks_exact_mut(vocab)) {
        let at = ongoing.writing.tokens.len();
        ongoing.token = ongoing.writing.choose(logits, at);
    }
    Ok(())
}
