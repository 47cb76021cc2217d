//! Prompt lookup decoding on questions whose answers copy from their documents: time a token with and without, in turns.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use refrain_engine::{Answer, Document, Engine, GenerateRequest, Instructions, Prompt, Sampling, Settings};
use refrain_fusion::METHODS;
use refrain_store::Store;
use serde::Deserialize;

use crate::numbers::median;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GGUF file or Hugging Face folder
    model: PathBuf,
    /// Questions with their documents, a JSON object a line: {"question", "docs": [{"title", "text"}]}
    questions: PathBuf,
    /// Fusion method
    #[arg(long, value_name = "METHOD", default_value = "pie")]
    method: String,
    /// Questions that are asked
    #[arg(long, value_name = "N", default_value_t = 12)]
    samples: usize,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 96)]
    tokens: usize,
    /// Tokens before which no answer ends
    #[arg(long, value_name = "N", default_value_t = 64)]
    min_tokens: usize,
    /// Most tokens that are proposed at a time
    #[arg(long, value_name = "N", default_value_t = 10)]
    num_speculative_tokens: usize,
    /// Text before the question
    #[arg(long, value_name = "TEXT", default_value = QUOTE)]
    instruction: String,
}

/// Asks for an answer that copies.
const QUOTE: &str =
    "Quote the sentences of the documents above that answer the question, word for word.\nQuestion: ";

#[derive(Debug, Deserialize)]
struct Question {
    question: String,
    docs: Vec<Document>,
}

/// Prints a Markdown table of a row a question, and medians.
pub(crate) fn run(options: &Options) -> Result<()> {
    let engine = Engine::open(&options.model, Store::in_memory(4 << 30), Settings::default(), |_, _| ())?;
    let text = fs::read_to_string(&options.questions)
        .with_context(|| format!("cannot read {}", options.questions.display()))?;
    let around = Instructions { before_question: options.instruction.clone(), ..Instructions::default() };
    println!("| question | tokens | ms a token, without | with | ratio | proposed | right |");
    println!("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    let mut ratios = Vec::new();
    for (index, line) in text.lines().take(options.samples).enumerate() {
        let Question { question, docs } = serde_json::from_str(line)?;
        let prompt = engine.prompt(&docs, &question, &around)?;
        answer(&engine, &prompt, options, 0)?;
        // In turns, so that a change of the machine's speed meets both.
        let mut times = [Vec::new(), Vec::new()];
        let mut last = Vec::new();
        for _ in 0..3 {
            last.clear();
            for (times, most) in times.iter_mut().zip([0, options.num_speculative_tokens]) {
                let answer = answer(&engine, &prompt, options, most)?;
                times.push(answer.stats.tpot.unwrap_or_default());
                last.push(answer);
            }
        }
        let [without, with] = times.map(median);
        let [plain, proposed] = last.as_slice() else { unreachable!("two answers a round") };
        anyhow::ensure!(plain.tokens == proposed.tokens, "question {index}: the answers differ");
        ratios.push(with / without);
        println!(
            "| {} | {} | {:.2} | {:.2} | {:.2} | {} | {} |",
            index + 1,
            plain.tokens.len(),
            without * 1e3,
            with * 1e3,
            with / without,
            proposed.stats.draft_tokens,
            proposed.stats.accepted_draft_tokens,
        );
    }
    let most = ratios.iter().copied().fold(0.0, f64::max);
    println!("\n{} questions: median ratio {:.2}, highest {most:.2}", ratios.len(), median(ratios.clone()));
    Ok(())
}

fn answer(engine: &Engine, prompt: &Prompt, options: &Options, speculative_tokens: usize) -> Result<Answer> {
    let sampling =
        Sampling { max_tokens: options.tokens, min_tokens: options.min_tokens, ..Sampling::default() };
    let request = GenerateRequest::new(METHODS.parse(&options.method)?, sampling);
    let request = GenerateRequest { speculative_tokens, ..request };
    Ok(engine.answer(prompt, &request, |_| true)?)
}
