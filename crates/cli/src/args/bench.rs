//! Options of `refrain bench`.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand, ValueEnum, ValueHint};
use serde::Serialize;

use crate::examples;
use refrain::quantities::parse_duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Time to first token of methods over prompt lengths, beside the bound by arithmetic alone
    #[command(after_help = examples::BENCH_TTFT)]
    Ttft(Ttft),
    /// Time a token over the length of the answer, for eviction policies; TTFT and TPOT of short answers
    #[command(after_help = examples::BENCH_DECODE)]
    Decode(Decode),
    /// Memory over the length of answer and prompt, for eviction policies
    #[command(after_help = examples::BENCH_MEMORY)]
    Memory(Memory),
    /// Loss of quantised chunks, and speed of loading
    #[command(after_help = examples::BENCH_STORE)]
    Store(StoreBench),
    /// Many clients of the server at once: time to first token, tokens a second, and the highest rate within a limit
    #[command(after_help = examples::BENCH_SERVE)]
    Serve(ServeBench),
}

#[derive(Debug, Args)]
pub(crate) struct Ttft {
    /// File or folder that prompts are cut from; may be given several times [default: a built-in text]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// Methods, measured in turn
    #[arg(
        long,
        value_name = "METHODS",
        value_delimiter = ';',
        default_value = "vanilla;pie;lego_link;cache_blend;a3"
    )]
    pub(crate) methods: Vec<String>,
    /// Eviction policy, which acts on the prompt's cache before the first token
    #[arg(long, value_name = "POLICY", default_value = "full")]
    pub(crate) evict: String,
    /// Tokens of the prompts
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "512,1024,2048,4096")]
    pub(crate) lengths: Vec<usize>,
    /// Tokens of each document of a prompt; methods that select parts of documents prefill each in one piece
    /// [default: the tokens of a chunk]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) document_tokens: Option<u32>,
    /// Rounds that are measured, after one that is not
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) runs: u32,
    /// The question that ends every prompt
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "What are these documents about?",
        hide_short_help = true
    )]
    pub(crate) question: String,
    /// Print the table as Markdown
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// Options that the benchmarks of eviction policies share.
#[derive(Debug, Args)]
pub(crate) struct Policies {
    /// File or folder that prompts are cut from; may be given several times [default: a built-in text]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// Eviction policies, measured in turn
    #[arg(
        long,
        value_name = "POLICIES",
        value_delimiter = ';',
        default_value = "full;morph_kv;snap_kv;h2o;streaming_llm;scissorhands"
    )]
    pub(crate) policies: Vec<String>,
    /// Fusion method
    #[arg(long, value_name = "METHOD", default_value = "vanilla")]
    pub(crate) method: String,
    /// The question that ends every prompt
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "Tell the whole story of these documents, in as many words as you can.",
        hide_short_help = true
    )]
    pub(crate) question: String,
    /// Tokens of the prompt, while the answer grows
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub(crate) prompt: usize,
    /// Tokens of the answer
    #[arg(long, value_name = "TOKENS", default_value_t = 2000)]
    pub(crate) tokens: usize,
    /// Write the curves as comma-separated values, which tools/plot.py draws
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) csv: Option<PathBuf>,
    /// Print the table as Markdown
    #[arg(long)]
    pub(crate) markdown: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Decode {
    #[command(flatten)]
    pub(crate) policies: Policies,
    /// Answer lengths at which the whole time, TTFT and TPOT are compared
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "10,100,300")]
    pub(crate) short: Vec<usize>,
    /// Rounds that are measured
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) runs: u32,
}

#[derive(Debug, Args)]
pub(crate) struct Memory {
    #[command(flatten)]
    pub(crate) policies: Policies,
    /// Lengths of prompts whose memory is compared
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "1024,2048,4096")]
    pub(crate) lengths: Vec<usize>,
    /// Measure this policy alone and print the result: the program starts itself with this option, once a policy
    #[arg(long, value_name = "POLICY", hide = true)]
    pub(crate) alone: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct StoreBench {
    /// File or folder that the questions are asked of; may be given several times [default: a built-in text]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// File of questions, one a line [default: 20 about the built-in text]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) questions: Option<PathBuf>,
    /// Methods that reuse the chunks
    #[arg(long, value_name = "METHODS", value_delimiter = ';', default_value = "pie;a3")]
    pub(crate) methods: Vec<String>,
    /// Most tokens of each answer that are compared
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) tokens: usize,
    /// Rounds of loading that are measured
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) runs: u32,
}

/// What the clients of a benchmark ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Scenario {
    /// Questions that stand alone, with ingests, tools and clients that leave where they are asked for
    Mixed,
    /// Conversations of several questions over the same documents; first and later turns are told apart
    MultiTurn,
    /// Answers that copy passages of the documents
    Extractive,
}

/// A feature of the server that a benchmark can do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Feature {
    /// As with --prefix-cache-memory-bytes 0
    PrefixCaching,
    /// As with --num-speculative-tokens 0
    Speculation,
}

#[derive(Debug, Args)]
pub(crate) struct ServeBench {
    /// A server that runs already, in place of one in this process; its prefix cache is not emptied between measurements
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) url: Option<String>,
    /// API keys of that server, which the clients have in turn
    #[arg(long, value_name = "KEY", value_delimiter = ',')]
    pub(crate) api_key: Vec<String>,
    /// What clients ask
    #[arg(long, value_enum, default_value_t = Scenario::Mixed)]
    pub(crate) scenario: Scenario,
    /// Measures servers without these features beside the default one, in turn, and reports medians of --rounds
    #[arg(long, value_name = "FEATURES", value_enum, value_delimiter = ',')]
    pub(crate) compare: Vec<Feature>,
    /// Rounds in which everything is measured [default: 3 with --compare, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Questions of a conversation, in multi-turn
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) turns: u32,
    /// File or folder of the documents that requests draw from; may be given several times [default: a built-in text]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// File of questions, one a line [default: 20 about the built-in text]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) questions: Option<PathBuf>,
    /// Methods, one after the other
    #[arg(long, value_name = "METHODS", value_delimiter = ';', default_value = "vanilla;a3")]
    pub(crate) methods: Vec<String>,
    /// Eviction policy
    #[arg(long, value_name = "POLICY", default_value = "full")]
    pub(crate) evict: String,
    /// Clients at once, each asking again as soon as it is answered
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8",
          value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) clients: Vec<usize>,
    /// How long each number of clients is kept up
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub(crate) seconds: Duration,
    /// Finds the highest rate at which 95 % of first tokens come within this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) limit: Option<Duration>,
    /// Requests at each rate; they are equal for all rates, but with --url others each time
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub(crate) requests: usize,
    /// Documents of a request, or from how many to how many (0-10): 3 % of them get 60 % of all requests
    #[arg(long, value_name = "N", default_value = "3", value_parser = parse_range)]
    pub(crate) per_request: RangeInclusive<usize>,
    /// Tokens of each answer; of extracts, the most, and at least 64 of them [default: 32, and 128 in extractive]
    #[arg(long, value_name = "N")]
    pub(crate) tokens: Option<usize>,
    /// Share of the requests that bring a new document, which is removed afterwards
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) ingest: f64,
    /// Share of the requests that have a tool called
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) tools: f64,
    /// Share of the requests whose client goes away before the answer ends
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) leave: f64,
    /// API keys of the server in this process, which the clients have in turn; 1 needs none
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) keys: usize,
    /// Most sequences decoded together
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) max_num_seqs: usize,
    /// Seed of what is drawn
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
}

impl ServeBench {
    /// Rounds in which everything is measured.
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.compare.is_empty() { 1 } else { 3 })
    }
}

/// `3`, or `0-10`.
fn parse_range(text: &str) -> Result<RangeInclusive<usize>, String> {
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    match (least.trim().parse(), most.trim().parse()) {
        (Ok(least), Ok(most)) if least <= most => Ok(least..=most),
        _ => Err("a number, or two as in 0-10".to_owned()),
    }
}
