//! An answer as it is written: tokens chosen one after the other, and the text that they make.

use refrain_model::Detokenizer;

use crate::answer::{Account, Answer, Finish, Progress, Request};
use crate::forward::State;
use crate::sampling::Sampler;
use crate::stop::StopFilter;
use crate::{Engine, Prompt, Result, Sampling};

/// An answer as it is written.
pub(crate) struct Writing<'a> {
    engine: &'a Engine,
    /// Whether an end token ends it.
    ends: bool,
    sampling: &'a Sampling,
    sampler: Sampler,
    text: Text,
    pub(crate) tokens: Vec<u32>,
    /// Tokens whose logits are kept, and these.
    recorded: usize,
    pub(crate) logits: Vec<f32>,
}

impl<'a> Writing<'a> {
    pub(crate) fn new(
        engine: &'a Engine,
        request: &Request<'a>,
        prompt: &Prompt,
        recorded: usize,
    ) -> Writing<'a> {
        let Request { sampling, ends, .. } = *request;
        Writing {
            engine,
            ends,
            sampling,
            sampler: Sampler::new(sampling.clone(), prompt.ids()),
            text: Text::new(sampling),
            tokens: Vec::new(),
            recorded,
            logits: Vec::new(),
        }
    }

    /// The token at place `at` of the answer; `logits` (vocab) are overwritten.
    pub(crate) fn choose(&mut self, logits: &mut [f32], at: usize) -> u32 {
        if at < self.recorded {
            self.logits.extend_from_slice(logits);
        }
        if at < self.sampling.min_tokens {
            let ends = (0..logits.len() as u32).filter(|token| self.engine.is_end(*token));
            ends.chain(self.stops()).for_each(|token| logits[token as usize] = f32::NEG_INFINITY);
        }
        self.sampler.sample(logits)
    }

    /// Tokens that are a stop text each.
    fn stops(&self) -> Vec<u32> {
        let ids = self.sampling.stop.iter().filter_map(|stop| self.engine.tokenize(stop).ok());
        ids.filter(|ids| ids.len() == 1).map(|ids| ids[0]).collect()
    }

    /// Writes tokens that are `chosen` already, of which `state` lacks the last, and goes on from there to the end.
    pub(crate) fn go_on(
        &mut self,
        state: &mut State<'_>,
        chosen: &[u32],
        stream: &mut impl FnMut(Progress<'_>) -> bool,
    ) -> Result<Finish> {
        let mut chosen = chosen.iter().copied();
        let mut next = chosen.next();
        while let Some(token) = next {
            self.tokens.push(token);
            let tokens = self.tokens.len();
            let (retained, kv_bytes) = (state.retained(), state.kv_bytes());
            let progress = Progress { text: "", tokens, retained, kv_bytes };
            let ends = self.ends && self.engine.is_end(token);
            let early = tokens <= self.sampling.min_tokens;
            if let Some(finish) = self.text.push(self.engine, token, (ends, early), progress, stream) {
                return Ok(finish);
            }
            if tokens == self.sampling.max_tokens {
                break;
            }
            next = match chosen.next() {
                Some(token) => Some(token),
                None => Some(self.choose(state.extend(&[token])?, tokens)),
            };
        }
        Ok(Finish::Length)
    }

    /// The answer at its end, with its account.
    pub(crate) fn answer(
        mut self,
        finish: Finish,
        mut account: Account,
        stream: &mut impl FnMut(Progress<'_>) -> bool,
    ) -> Answer {
        account.answer_tokens = self.tokens.len();
        let (tokens, retained, kv_bytes) = (self.tokens.len(), account.retained_tokens, account.kv_bytes);
        self.text.finish(finish, Progress { text: "", tokens, retained, kv_bytes }, stream);
        Answer { text: self.text.shown, tokens: self.tokens, finish, account, explanation: None }
    }
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
        stream: &mut impl FnMut(Progress<'_>) -> bool,
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
        stream: &mut impl FnMut(Progress<'_>) -> bool,
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
