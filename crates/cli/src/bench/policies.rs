//! Prompts, answers and reports of the benchmarks of eviction policies.

use anyhow::{Context as _, Result};
use refrain::engine::{Engine, GenerateRequest, Prompt, Sampling, TokenEvent};
use serde::Serialize;

use super::curves::{self, Chart};
use super::measurement::ModelSetup;
use crate::args;
use crate::methods::{Method, Policy};
use crate::output::Fail;
use crate::settings::Context;
use crate::table::Table;

/// Name of a policy's curve: its specification, which tells policies of one name apart by their options.
pub(super) fn title(policy: &Policy) -> String {
    if policy.spec == "full" { "full attention".to_owned() } else { policy.spec.clone() }
}

/// Prompts of these lengths for answers of `tokens` tokens.
pub(super) fn prompts(
    engine: &Engine,
    args: &args::Policies,
    lengths: &[usize],
    tokens: usize,
) -> Result<Vec<Prompt>> {
    let context = engine.decoder().config().context;
    if let Some(length) = lengths.iter().find(|length| **length + tokens > context) {
        let message = format!(
            "a prompt of {length} tokens and an answer of {tokens} do not fit the context of {context}"
        );
        let hint = "give a shorter prompt, fewer --tokens, or a --model with a longer context";
        return Err(Fail::usage(message).hint(hint).into());
    }
    super::prompts::prompts(engine, &args.docs, &args.question, lengths, None)
}

/// Answers a prompt with a policy, past any end token, and calls `each` with every token.
pub(super) fn answer(
    engine: &Engine,
    prompt: &Prompt,
    (method, policy): (&Method, &Policy),
    tokens: usize,
    mut each: impl FnMut(TokenEvent<'_>),
) -> Result<refrain::engine::RequestStats> {
    let sampling = Sampling { max_tokens: tokens, ..Sampling::default() };
    let request = GenerateRequest {
        eviction: policy.built.clone(),
        ignore_eos: true,
        ..GenerateRequest::new(method.built.clone(), sampling.clone())
    };
    let answer = engine.answer(prompt, &request, |progress| {
        each(progress);
        true
    })?;
    Ok(answer.stats)
}

/// Model and settings of the measurement.
#[derive(Debug, Serialize)]
pub(super) struct PolicySetup {
    #[serde(flatten)]
    model: ModelSetup,
    method: String,
    prompt_tokens: usize,
    answer_tokens: usize,
    pub(super) weight_bytes: usize,
    /// Bytes of a token's keys and values over all layers, one cache a KV head.
    pub(super) token_bytes: usize,
}

impl PolicySetup {
    pub(super) fn new(
        context: &Context,
        engine: &Engine,
        method: &str,
        (prompt_tokens, answer_tokens): (usize, usize),
        runs: u32,
    ) -> PolicySetup {
        PolicySetup {
            model: ModelSetup::new(context, engine, runs),
            method: method.to_owned(),
            prompt_tokens,
            answer_tokens,
            weight_bytes: engine.decoder().weight_bytes(),
            token_bytes: engine.decoder().shape().token_bytes(context.global.kv),
        }
    }

    /// The report, with a note below its table.
    pub(super) fn page(&self, table: &Table, note: &str, markdown: bool) -> String {
        let what = format!(
            "{}, {}, a prompt of {} tokens and an answer of {}",
            self.model.model_line(),
            self.method,
            self.prompt_tokens,
            self.answer_tokens
        );
        self.model.page(&what, table, note, markdown)
    }
}

/// # Errors
/// If the file of --csv cannot be written: that is told before anything is measured.
pub(super) fn check_csv(args: &args::Policies) -> Result<()> {
    let Some(path) = &args.csv else { return Ok(()) };
    let opened = std::fs::File::options().create(true).append(true).open(path);
    opened.map(|_| ()).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the curves to the file of `--csv`, if one is given.
pub(super) fn write_csv(args: &args::Policies, charts: &[Chart]) -> Result<()> {
    let Some(path) = &args.csv else { return Ok(()) };
    std::fs::write(path, curves::csv(charts)).with_context(|| format!("cannot write {}", path.display()))
}
