//! An answer as it is written: tokens chosen one after the other, and the text that they make.

use refrain_model::Detokenizer;

use crate::answer::{Account, Answer, Finish, Progress, Request};
use crate::forward::State;
use crate::likely::{Likelihoods, Likely};
use crate::sampling::Sampler;
use crate::stop::StopFilter;
use crate::{Engine, Prompt, Result, Sampling};

/// An answer as it is written.
pub(crate) struct Writing {
    engine: Engine,
    /// Whether an end token ends it.
    ends: bool,
    sampling: Sampling,
    sampler: Sampler,
    text: Text,
    pub(crate) tokens: Vec<u32>,
    /// Tokens whose logits are kept, and these.
    recorded: usize,
    pub(crate) logits: Vec<f32>,
    /// Of the token that was chosen last, where they are asked for.
    likely: Option<Likely>,
    /// Tokens that are a stop text each.
    stops: Vec<u32>,
}

impl Writing {
    pub(crate) fn new(engine: &Engine, request: &Request<'_>, prompt: &Prompt, recorded: usize) -> Writing {
        let Request { sampling, ends, .. } = *request;
        Writing {
            engine: engine.clone(),
            ends,
            sampling: sampling.clone(),
            sampler: Sampler::new(sampling.clone(), prompt.ids()),
            text: Text::new(sampling),
            tokens: Vec::new(),
            recorded,
            logits: Vec::new(),
            likely: None,
            stops: stops(engine, sampling),
        }
    }

    /// The token at place `at` of the answer; `logits` (vocab) are overwritten.
    pub(crate) fn choose(&mut self, logits: &mut [f32], at: usize) -> u32 {
        if at < self.recorded {
            self.logits.extend_from_slice(logits);
        }
        if at < self.sampling.min_tokens {
            for token in self.engine.ends().chain(self.stops.iter().copied()) {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let likely = self.sampling.logprobs.map(|most| Likelihoods::of(logits, most));
        let token = self.sampler.sample(logits);
        self.likely = likely.map(|likely| likely.with(token));
        token
    }

    /// Writes tokens that are `chosen` already, of which `state` lacks the last, and goes on from there to the end.
    pub(crate) fn go_on(
        &mut self,
        state: &mut State,
        chosen: &[u32],
        stream: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Result<Finish> {
        let mut chosen = chosen.iter().copied();
        let mut next = chosen.next();
        while let Some(token) = next {
            if let Some(finish) = self.write(token, state, stream) {
                return Ok(finish);
            }
            next = match chosen.next() {
                Some(token) => Some(token),
                None => Some(self.choose(state.extend(&[token])?, self.tokens.len())),
            };
        }
        Ok(Finish::Length)
    }

    /// Writes a token that was chosen after those in `state`, and says why the answer ends with it, if it does.
    pub(crate) fn write(
        &mut self,
        token: u32,
        state: &State,
        stream: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Option<Finish> {
        self.tokens.push(token);
        let tokens = self.tokens.len();
        let (retained, kv_bytes) = (state.retained(), state.kv_bytes());
        let likely = self.likely.take();
        let progress =
            Progress { text: "", tokens, token: Some(token), likely: likely.as_ref(), retained, kv_bytes };
        let ends = self.ends && self.engine.is_end(token);
        let early = tokens <= self.sampling.min_tokens;
        let finish = self.text.push(&self.engine, token, (ends, early), progress, stream);
        finish.or((tokens == self.sampling.max_tokens).then_some(Finish::Length))
    }

    /// The answer at its end, with its account.
    pub(crate) fn answer(
        mut self,
        finish: Finish,
        mut account: Account,
        stream: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Answer {
        account.answer_tokens = self.tokens.len();
        let (tokens, retained, kv_bytes) = (self.tokens.len(), account.retained_tokens, account.kv_bytes);
        let progress = Progress { text: "", tokens, token: None, likely: None, retained, kv_bytes };
        self.text.finish(finish, progress, stream);
        Answer { text: self.text.shown, tokens: self.tokens, finish, account, explanation: None }
    }
}

/// Tokens that are a stop text each.
fn stops(engine: &Engine, sampling: &Sampling) -> Vec<u32> {
    let ids = sampling.stop.iter().filter_map(|stop| engine.tokenize(stop).ok());
    ids.filter(|ids| ids.len() == 1).map(|ids| ids[0]).collect()
}

/// The text of an answer as it grows.
struct Text {
    shown: String,
    filter: StopFilter,
    detokenizer: Detokenizer,
}

impl Text {
    fn new(sampling: &Sampling) -> Text {
        Text {
            shown: String::new(),
            filter: StopFilter::new(&sampling.stop),
            detokenizer: Detokenizer::default(),
        }
    }

    /// Adds a token; returns why the answer ends with it, if it does. It may be the end token, or come too early for
    /// stop texts to count.
    fn push(
        &mut self,
        engine: &Engine,
        token: u32,
        (ends, early): (bool, bool),
        progress: Progress<'_>,
        stream: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Option<Finish> {
        if ends {
            return Some(Finish::Stop);
        }
        let piece = self.detokenizer.push(&engine.tokenizer, token).unwrap_or_default();
        let (shown, stopped) = if early { (piece, false) } else { self.filter.push(&piece) };
        self.shown.push_str(&shown);
        let go_on = stream(Progress { text: &shown, ..progress });
        if stopped {
            return Some(Finish::Stop);
        }
        (!go_on).then_some(Finish::Cancelled)
    }

    /// Shows what was held back, unless a stop string was met.
    fn finish(
        &mut self,
        finish: Finish,
        progress: Progress<'_>,
        stream: &mut dyn FnMut(Progress<'_>) -> bool,
    ) {
        if finish != Finish::Cancelled {
            // A limit may fall within a character: what is there of it is no text.
            let rest = self.detokenizer.finish().filter(|_| finish != Finish::Length);
            let (mut text, stopped) = self.filter.push(&rest.unwrap_or_default());
            if !stopped {
                text.push_str(&self.filter.finish());
            }
            self.shown.push_str(&text);
            if !text.is_empty() {
                stream(Progress { text: &text, ..progress });
            }
        }
    }
}
