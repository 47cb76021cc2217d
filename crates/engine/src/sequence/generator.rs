//! An answer as it is written: tokens chosen one after the other, and the text that they make.

use refrain_kernels::Slice;
use refrain_model::Detokenizer;

use super::answer_grammar::AnswerGrammar;
use super::stop::StopFilter;
use crate::cache::SequenceCache;
use crate::engine::Engine;
use crate::logprobs::{TokenLogprobs, VocabLogprobs};
use crate::prompt::Prompt;
use crate::request::{Answer, FinishReason, GenerateRequest, RequestStats, TokenEvent};
use crate::sampling::{Sampler, Sampling, ban};
use crate::{Error, finite};

/// Chooses an answer's tokens and makes text of them.
pub(crate) struct Generator {
    engine: Engine,
    ignore_eos: bool,
    sampling: Sampling,
    sampler: Sampler,
    grammar: Option<AnswerGrammar>,
    /// Why no further token can be chosen.
    pub(crate) failure: Option<Error>,
    text: Text,
    pub(crate) tokens: Vec<u32>,
    /// Number of first tokens whose logits are kept, and these logits.
    recorded: usize,
    pub(crate) logits: Vec<f32>,
    /// Log probabilities of the token that was chosen last, where they are asked for.
    pub(crate) logprobs: Option<TokenLogprobs>,
    /// Tokens that are a stop text each, control tokens too.
    stops: Vec<u32>,
}

impl Generator {
    /// A generator for one answer, which keeps the logits of the first `recorded` tokens.
    pub(crate) fn new(
        engine: &Engine,
        request: &GenerateRequest,
        prompt: &Prompt,
        recorded: usize,
    ) -> Generator {
        let GenerateRequest { sampling, grammar, ignore_eos, .. } = request;
        Generator {
            engine: engine.clone(),
            ignore_eos: *ignore_eos,
            sampling: sampling.clone(),
            sampler: Sampler::new(sampling.clone(), prompt.ids()),
            grammar: grammar.clone().map(|grammar| AnswerGrammar::new(grammar, prompt.thinking, engine)),
            failure: None,
            text: Text::new(sampling, prompt.continues_text),
            tokens: Vec::new(),
            recorded,
            logits: Vec::new(),
            logprobs: None,
            stops: stops(engine, sampling),
        }
    }

    /// The token at index `at` of the answer; `logits` (vocab) are overwritten. Where none can be chosen, `failure` says why.
    pub(crate) fn choose(&mut self, logits: &mut [f32], at: usize) -> u32 {
        if at < self.recorded {
            self.logits.extend_from_slice(logits);
        }
        if let Err(error) = finite::check(self.engine.decoder(), "logits", Slice::F32(logits)) {
            self.failure.get_or_insert(error);
            return 0;
        }
        let logprobs = self.sampling.logprobs.map(|most| VocabLogprobs::new(logits, most));
        let masked = self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.mask(logits, &self.engine));
        self.failure = self.failure.take().or(masked.err());
        // A complete text of a grammar ends the answer before all else.
        let is_complete = self.grammar.as_ref().is_some_and(AnswerGrammar::is_complete);
        if at < self.sampling.min_tokens && !is_complete {
            ban(logits, self.engine.ends());
            // A grammar may allow nothing but stop texts, which end no answer this early.
            let is_left =
                |(token, logit): (u32, &f32)| *logit > f32::NEG_INFINITY && !self.stops.contains(&token);
            if self.grammar.is_none() || (0..).zip(&*logits).any(is_left) {
                ban(logits, self.stops.iter().copied());
            }
        }
        let token = self.sampler.sample(logits);
        if let Some(grammar) = &mut self.grammar
            && self.failure.is_none()
        {
            self.failure = grammar.push(token, &self.engine).err();
        }
        self.logprobs = logprobs.map(|logprobs| logprobs.of(token));
        token
    }

    /// Tokens that the answer may still have.
    pub(crate) fn tokens_left(&self) -> usize {
        self.sampling.max_tokens.saturating_sub(self.tokens.len())
    }

    /// Whether nothing is chosen after `token`: it ends the answer, or the choice has failed.
    pub(crate) fn is_over(&self, token: u32) -> bool {
        self.failure.is_some() || !self.ignore_eos && self.engine.is_end(token)
    }

    /// Adds a token that follows those in `cache`, but for so many that were chosen behind it. Returns the reason why the answer ends
    /// with it, if it does.
    pub(crate) fn push(
        &mut self,
        token: u32,
        (cache, behind): (&SequenceCache, usize),
        stream: &mut dyn FnMut(TokenEvent<'_>) -> bool,
    ) -> Option<FinishReason> {
        if self.failure.is_some() {
            return Some(FinishReason::Failed);
        }
        self.tokens.push(token);
        let tokens = self.tokens.len();
        let cache = &cache.cache;
        // Only a cache of all tokens has some that were chosen behind this one.
        let held_behind = behind * self.engine.decoder().shape().token_bytes(cache.dtype());
        let logprobs = self.logprobs.take();
        let event = TokenEvent {
            text: "",
            tokens,
            token: Some(token),
            logprobs: logprobs.as_ref(),
            retained: cache.retained() - behind,
            kv_bytes: cache.kv_bytes(),
            kv_bytes_held: cache.kv_bytes_held() - held_behind,
        };
        let early = tokens <= self.sampling.min_tokens;
        // A control token stands for no text, in which a stop text could be found.
        let stops = !early && self.stops.contains(&token) && self.engine.tokenizer().is_special(token);
        let ends = stops || !self.ignore_eos && self.engine.is_end(token);
        let finish = self.text.push(&self.engine, token, (ends, early), event, stream);
        finish.or((tokens == self.sampling.max_tokens).then_some(FinishReason::Length))
    }

    /// The answer at its end.
    pub(crate) fn finish(
        mut self,
        finish: FinishReason,
        mut stats: RequestStats,
        stream: &mut dyn FnMut(TokenEvent<'_>) -> bool,
    ) -> Answer {
        stats.answer_tokens = self.tokens.len();
        let event = TokenEvent {
            text: "",
            tokens: self.tokens.len(),
            token: None,
            logprobs: None,
            retained: stats.retained_tokens,
            kv_bytes: stats.kv_bytes,
            kv_bytes_held: stats.kv_bytes_held,
        };
        self.text.finish(finish, event, stream);
        Answer { text: self.text.shown, tokens: self.tokens, finish, stats, explanation: None }
    }
}

/// Tokens that are a stop text each, control tokens too.
fn stops(engine: &Engine, sampling: &Sampling) -> Vec<u32> {
    let token = |stop: &String| {
        let tokenizer = engine.tokenizer();
        let control = tokenizer.token_id(stop).filter(|id| tokenizer.is_special(*id));
        control.or_else(|| engine.tokenize(stop).ok().filter(|ids| ids.len() == 1).map(|ids| ids[0]))
    };
    sampling.stop.iter().filter_map(token).collect()
}

/// The text of an answer as it grows.
struct Text {
    shown: String,
    /// Whether a stop text was met: nothing is shown after it.
    stopped: bool,
    filter: StopFilter,
    detokenizer: Detokenizer,
}

impl Text {
    /// The text of an answer that is a text of its own, or continues the prompt's.
    fn new(sampling: &Sampling, continues: bool) -> Text {
        Text {
            shown: String::new(),
            stopped: false,
            filter: StopFilter::new(&sampling.stop),
            detokenizer: if continues { Detokenizer::continuing() } else { Detokenizer::default() },
        }
    }

    /// Adds a token; returns why the answer ends with it, if it does. It may be the end token, or come too early for
    /// stop texts to count.
    fn push(
        &mut self,
        engine: &Engine,
        token: u32,
        (ends, early): (bool, bool),
        event: TokenEvent<'_>,
        stream: &mut dyn FnMut(TokenEvent<'_>) -> bool,
    ) -> Option<FinishReason> {
        if ends {
            return Some(FinishReason::Stop);
        }
        let piece = self.detokenizer.push(engine.tokenizer(), token).unwrap_or_default();
        let (shown, stopped) = match early {
            true => {
                self.filter.pass(&piece);
                (piece, false)
            }
            false => self.filter.push(&piece),
        };
        self.stopped = stopped;
        self.shown.push_str(&shown);
        let go_on = stream(TokenEvent { text: &shown, ..event });
        if stopped {
            return Some(FinishReason::Stop);
        }
        (!go_on).then_some(FinishReason::Cancelled)
    }

    /// Shows what was held back, unless a stop string was met.
    fn finish(
        &mut self,
        finish: FinishReason,
        event: TokenEvent<'_>,
        stream: &mut dyn FnMut(TokenEvent<'_>) -> bool,
    ) {
        if finish != FinishReason::Cancelled && !self.stopped {
            // A limit may fall within a character: what is there of it is no text.
            let rest = self.detokenizer.finish().filter(|_| finish != FinishReason::Length);
            let (mut text, stopped) = self.filter.push(&rest.unwrap_or_default());
            if !stopped {
                text.push_str(&self.filter.finish());
            }
            self.shown.push_str(&text);
            if !text.is_empty() {
                stream(TokenEvent { text: &text, ..event });
            }
        }
    }
}
