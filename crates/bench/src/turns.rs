//! Fidelity of a conversation's second turn, whose documents were repaired for the first: taken over from the prefix cache, and anew.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use refrain_engine::{
    Comparison, Document, Engine, GenerateRequest, Instructions, Prefix, Prompt, Sampling, Settings,
};
use refrain_eviction::Eviction;
use refrain_fusion::METHODS;
use refrain_model::Message;
use refrain_store::Store;
use serde::Deserialize;

use crate::numbers::median;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GGUF file or Hugging Face folder
    model: PathBuf,
    /// Questions with their documents, a JSON object a line: {"question", "docs": [{"title", "text"}]}
    questions: PathBuf,
    /// Fusion methods
    #[arg(long, value_name = "METHODS", value_delimiter = ';', default_value = "drift:charge=0.15;pie")]
    methods: Vec<String>,
    /// Tokens that stand before every chunk while it is prefilled
    #[arg(long, value_name = "PREFIX", default_value = "averaged")]
    prefix: Prefix,
    /// Conversations
    #[arg(long, value_name = "N", default_value_t = 30)]
    samples: usize,
    /// Tokens of the first answer
    #[arg(long, value_name = "N", default_value_t = 24)]
    tokens: usize,
    /// Tokens of vanilla's second answer over which methods are compared
    #[arg(long, value_name = "N", default_value_t = 24)]
    compare_tokens: usize,
    /// The question of the first turn; that of the second is a question of the file
    #[arg(long, value_name = "TEXT", default_value = "Which people and places do the documents name?")]
    first: String,
}

#[derive(Debug, Deserialize)]
struct Question {
    question: String,
    docs: Vec<Document>,
}

/// The comparisons of a method with vanilla, one a conversation.
#[derive(Debug, Default)]
struct Found {
    anew: Vec<Comparison>,
    taken: Vec<Comparison>,
}

/// Prints a Markdown table of a row a method and way.
pub(crate) fn run(options: &Options) -> Result<()> {
    let engine = Engine::open(&options.model, Store::in_memory(4 << 30), Settings::default(), |_, _| ())?;
    let around = Instructions::default();
    let engine = engine.with_prefix(&options.prefix, || engine.system_part(&around))?;
    let text = fs::read_to_string(&options.questions)
        .with_context(|| format!("cannot read {}", options.questions.display()))?;
    println!(
        "| method | second turn | KL | KL, median | KL of the first token | top-1 | tokens not taken over |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
    for method in &options.methods {
        let (methods, mut found) = ([(method.clone(), METHODS.parse(method)?)], Found::default());
        for line in text.lines().take(options.samples) {
            let Question { question, docs } = serde_json::from_str(line)?;
            let prompt = |turns: &[Message]| engine.prompt_of_turns(engine.chunks(&docs)?, turns, &around);
            let mut turns = vec![Message::text("user", &options.first)];
            // The documents are repaired for the first question, and kept.
            let keeping = engine.with_prefix_cache(1 << 30);
            let said = first_turn(&keeping, &prompt(&turns)?, method, options.tokens)?;
            turns.extend([Message::text("assistant", &said), Message::text("user", &question)]);
            let second = prompt(&turns)?;
            let (full, tokens) = (Eviction::full(), options.compare_tokens);
            found.anew.push(only(engine.compare(&second, &methods, full, tokens)?)?);
            let taken = only(keeping.compare_taking_over(&second, &methods, full, tokens)?)?;
            anyhow::ensure!(taken.stats.prefix_tokens > 0, "the second turn took nothing over");
            found.taken.push(taken);
        }
        print(method, "anew", &found.anew);
        print(method, "taken over", &found.taken);
        let nearer = found.taken.iter().zip(&found.anew).filter(|(taken, anew)| taken.kl < anew.kl).count();
        println!("| | nearer taken over | {nearer} of {} | | | | |", found.anew.len());
    }
    Ok(())
}

fn first_turn(engine: &Engine, prompt: &Prompt, method: &str, tokens: usize) -> Result<String> {
    let sampling = Sampling { max_tokens: tokens, ..Sampling::default() };
    let request = GenerateRequest::new(METHODS.parse(method)?, sampling);
    Ok(engine.answer(prompt, &request, |_| true)?.text)
}

fn only(compared: Vec<Comparison>) -> Result<Comparison> {
    compared.into_iter().next().context("a method has a comparison")
}

fn print(method: &str, way: &str, of: &[Comparison]) {
    let mean = |value: fn(&Comparison) -> f64| of.iter().map(value).sum::<f64>() / of.len().max(1) as f64;
    println!(
        "| {method} | {way} | {:.4} | {:.4} | {:.4} | {:.3} | {:.0} |",
        mean(|of| of.kl),
        median(of.iter().map(|compared| compared.kl).collect()),
        mean(|of| of.kl_first),
        mean(|of| of.top1),
        mean(|of| of.stats.prompt_tokens.saturating_sub(of.stats.prefix_tokens) as f64),
    );
}
