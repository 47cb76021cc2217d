//! An answer as an iterator over its tokens.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::decode::{DecodeWorkspace, decode_step};
use crate::engine::Engine;
use crate::logprobs::TokenLogprobs;
use crate::prompt::Prompt;
use crate::request::{Answer, GenerateRequest, TokenEvent};
use crate::sequence::Sequence;
use crate::{Advance, Prefill, Result};

/// A token of an answer's stream, or the text that was held back until the end. The token that ends an answer is only in [`Answer::tokens`].
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Text that can be shown now; often empty, where characters or stop strings are not complete.
    pub text: String,
    /// The token; none with the text that was held back until the end.
    pub id: Option<u32>,
    /// Log probabilities of the token and of the likeliest ones, where they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

impl From<TokenEvent<'_>> for Token {
    fn from(event: TokenEvent<'_>) -> Token {
        Token { text: event.text.to_owned(), id: event.token, logprobs: event.logprobs.cloned() }
    }
}

/// An answer on its way: an iterator over its tokens, each computed when it is asked for. The first call computes the prompt.
/// [`TokenStream::answer`] is there when the iterator has ended; dropping it earlier ends the work. The times of its statistics leave out
/// the time between two calls, which is the caller's.
#[derive(Debug)]
pub struct TokenStream {
    state: State,
    workspace: DecodeWorkspace,
    /// Tokens that were chosen and not asked for yet.
    ready: VecDeque<Token>,
    /// When the stream last computed something.
    left: Instant,
}

#[derive(Debug)]
enum State {
    Prefill(Box<Prefill>),
    Decode(Box<Sequence>),
    Done(Box<Answer>),
    /// An error was told.
    Failed,
}

impl TokenStream {
    pub(crate) fn new(prefill: Prefill) -> TokenStream {
        let state = State::Prefill(Box::new(prefill));
        let (workspace, ready) = (DecodeWorkspace::default(), VecDeque::new());
        TokenStream { state, workspace, ready, left: Instant::now() }
    }

    /// The answer, once the iterator has ended without an error.
    pub fn answer(&self) -> Option<&Answer> {
        match &self.state {
            State::Done(answer) if self.ready.is_empty() => Some(answer),
            _ => None,
        }
    }

    /// Does one step towards the next token, at most a layer of the prompt or a step of decoding, for callers that look after other
    /// work between steps. All is done once the next call of the iterator computes nothing.
    ///
    /// # Errors
    /// As of [`Prefill::advance`], or if a step of decoding fails. The stream is over then.
    pub fn advance(&mut self) -> Result<Advance> {
        if !self.ready.is_empty() {
            return Ok(Advance::Done);
        }
        let advance = self.step(self.left.elapsed());
        self.left = Instant::now();
        advance
    }

    /// Does one step, `pause` after the last one.
    fn step(&mut self, pause: Duration) -> Result<Advance> {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Prefill(mut prefill) => {
                prefill.leave_out(pause);
                let advance = prefill.advance()?;
                if advance != Advance::Done {
                    self.state = State::Prefill(prefill);
                    return Ok(advance);
                }
                if let Some(sequence) = prefill.finish() {
                    self.push(Box::new(sequence))?;
                }
            }
            State::Decode(mut sequence) => {
                sequence.first += pause;
                decode_step(&mut [&mut sequence], &mut self.workspace)?;
                self.push(sequence)?;
            }
            ended => {
                self.state = ended;
                return Ok(Advance::Done);
            }
        }
        Ok(Advance::Progress)
    }

    /// Adds the tokens that a step chose.
    fn push(&mut self, mut sequence: Box<Sequence>) -> Result<()> {
        let ready = &mut self.ready;
        let mut stream = |event: TokenEvent<'_>| {
            ready.push_back(event.into());
            true
        };
        self.state = match sequence.push_tokens(&mut stream) {
            None => State::Decode(sequence),
            Some(finish) => match sequence.take_failure() {
                Some(failure) => return Err(failure),
                None => State::Done(Box::new(sequence.finish(finish, &mut stream))),
            },
        };
        Ok(())
    }
}

impl Iterator for TokenStream {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            match self.advance() {
                Ok(Advance::Done) => return self.ready.pop_front().map(Ok),
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Engine {
    /// Begins an answer whose tokens are computed as they are asked for.
    ///
    /// # Errors
    /// If the question is empty, the prompt does not fit the context, or the policy refuses it.
    pub fn stream(&self, prompt: &Prompt, request: GenerateRequest) -> Result<TokenStream> {
        Ok(TokenStream::new(self.prefill(prompt, request)?))
    }
}
