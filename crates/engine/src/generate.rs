//! Generation: prefill with a method, then decoding, token by token.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::Result;
use crate::advance::{Advance, PATIENCE};
use crate::decode::{DecodeWorkspace, decode_step};
use crate::engine::Engine;
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest, PrefillStats, Prefilled};
use crate::prompt::Prompt;
use crate::request::{Answer, GenerateRequest, RequestStats, TokenEvent};
use crate::sequence::{Generator, PromptLookup, Sequence, StepState};

/// A prompt on its way to the first token of its answer, layer by layer. Dropping it ends the work.
#[derive(Debug)]
pub struct Prefill {
    engine: Engine,
    prompt: Prompt,
    request: GenerateRequest,
    /// Number of first tokens whose logits are kept.
    recorded: usize,
    started: Instant,
    job: PrefillJob,
}

/// A sequence at its first token, with the pieces that only comparisons look at.
pub(crate) struct FirstToken {
    pub(crate) sequence: Sequence,
    /// Logits that the first token was chosen from.
    pub(crate) logits: Vec<f32>,
    pub(crate) prefilled: PrefillStats,
}

impl Prefill {
    /// Begins with room for `steps` tokens. The logits of the first `recorded` tokens are kept.
    pub(crate) fn start(
        engine: &Engine,
        prompt: &Prompt,
        request: GenerateRequest,
        capture: AttentionCapture,
        (steps, recorded): (usize, usize),
    ) -> Result<Prefill> {
        request.sampling.check()?;
        let started = Instant::now();
        let max_seq_len = engine.max_seq_len(prompt, steps, &request.eviction)?;
        let GenerateRequest { method, eviction, .. } = request.clone();
        let job =
            PrefillJob::start(engine, prompt, PrefillRequest { method, eviction, max_seq_len, capture })?;
        let (engine, prompt) = (engine.clone(), prompt.clone());
        Ok(Prefill { engine, prompt, request, recorded, started, job })
    }

    /// Does one step, which waits a moment for keys and values that are on their way.
    ///
    /// # Errors
    /// If the store cannot be read, the method or policy refuses the prompt, or the device cannot do the step. The prefill is over then.
    pub fn advance(&mut self) -> Result<Advance> {
        self.advance_within(PATIENCE)
    }

    /// Does one step, which waits for `patience` at most, for callers that have other work to do.
    ///
    /// # Errors
    /// If the step fails in one of the ways that [`Prefill::advance`] names.
    pub fn advance_within(&mut self, patience: Duration) -> Result<Advance> {
        self.job.advance(patience)
    }

    /// Time for which steps have only waited for keys and values so far.
    pub fn waited(&self) -> Duration {
        self.job.waited()
    }

    /// The sequence at its first token, once [`Prefill::advance`] has said that all is done; none before.
    pub fn finish(self) -> Option<Sequence> {
        self.first_token().map(|first| first.sequence)
    }

    /// Does what is left, and decodes the answer to its end. `stream` is told of every token and returns whether to go on.
    ///
    /// # Errors
    /// As of [`Prefill::advance`], or if a step of decoding fails.
    pub fn answer(self, mut stream: impl FnMut(TokenEvent<'_>) -> bool) -> Result<Answer> {
        generate(self.run()?.sequence, &mut stream)
    }

    /// Leaves a time out of the time to the first token.
    pub(crate) fn leave_out(&mut self, pause: Duration) {
        self.started += pause;
    }

    /// Does all of it.
    pub(crate) fn run(mut self) -> Result<FirstToken> {
        while self.advance()? != Advance::Done {}
        Ok(self.first_token().unwrap_or_else(|| unreachable!("a prefill ends with a first token")))
    }

    fn first_token(self) -> Option<FirstToken> {
        let Prefill { engine, prompt, request, recorded, started, job } = self;
        let Prefilled { cache, logits, stats: prefilled, load, prefix } = job.finish()?;
        let prompt = prefilled.order.as_ref().map_or(prompt.clone(), |order| prompt.in_order(order));
        let mut generator = Generator::new(&engine, &request, &prompt, recorded);
        let next_token = generator.choose(&mut logits.clone(), 0);
        let mut stats = RequestStats::of_prefill(&engine, &prompt, &prefilled, &load.reused);
        stats.ttft = (started.elapsed() - prefilled.capturing).as_secs_f64();
        stats.compute_ttft = stats.ttft - load.reused.waited.as_secs_f64();
        let attention = prefilled.attention.as_ref();
        let explanation =
            attention.map(|attention| engine.explanation(&prompt, attention, &prefilled.final_rows));
        let (eviction, first) = (request.eviction, Instant::now());
        let sequence = Sequence {
            engine,
            cache,
            generator,
            next_token,
            state: StepState::Chosen,
            further: VecDeque::new(),
            lookup: PromptLookup::new(prompt.ids()),
            speculative_tokens: request.speculative_tokens,
            stats,
            eviction,
            explanation,
            first,
            load,
            prefix,
        };
        Some(FirstToken { sequence, logits, prefilled })
    }
}

impl Engine {
    /// Begins an answer: its prompt is computed step by step.
    ///
    /// # Errors
    /// If the question is empty, the prompt does not fit the context or the device's memory, or the policy refuses it.
    pub fn prefill(&self, prompt: &Prompt, request: GenerateRequest) -> Result<Prefill> {
        let capture = if request.explain { AttentionCapture::Explain } else { AttentionCapture::Nothing };
        let steps = request.sampling.max_tokens;
        Prefill::start(self, prompt, request, capture, (steps, 0))
    }

    /// Answers a prompt. `stream` is told of every token and returns whether to go on.
    ///
    /// # Errors
    /// If the question is empty, the prompt does not fit the context, or the method or policy refuses it.
    pub fn answer(
        &self,
        prompt: &Prompt,
        request: &GenerateRequest,
        stream: impl FnMut(TokenEvent<'_>) -> bool,
    ) -> Result<Answer> {
        self.prefill(prompt, request.clone())?.answer(stream)
    }
}

/// Decodes a sequence to its end.
pub(crate) fn generate(
    mut sequence: Sequence,
    stream: &mut dyn FnMut(TokenEvent<'_>) -> bool,
) -> Result<Answer> {
    let mut workspace = DecodeWorkspace::default();
    loop {
        if let Some(finish) = sequence.push_tokens(stream) {
            return match sequence.take_failure() {
                Some(failure) => Err(failure),
                None => Ok(sequence.finish(finish, stream)),
            };
        }
        decode_step(&mut [&mut sequence], &mut workspace)?;
    }
}
