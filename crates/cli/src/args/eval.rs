//! Options of `refrain eval`.

use std::convert::Infallible;
use std::num::ParseIntError;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use crate::examples;
use refrain::quantities::parse_duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Eval {
    /// Answer benchmarks with methods and policies, and keep every answer with its scores; continues a stopped run
    #[command(after_help = examples::EVAL_RUN)]
    Run(Box<Run>),
    /// Make tables and pictures of a run: HTML, Markdown and CSV
    #[command(after_help = examples::EVAL_REPORT)]
    Report(Report),
    /// List the tasks and suites
    Tasks,
    /// Say where the benchmarks' data comes from, and how it is laid out
    Fetch,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Folder of the run, new or to go on with [default: eval-NAME for the matrix NAME.toml, else eval-run]
    #[arg(long, short, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    /// Begin no sample after this time (90s, 45m, 2h), shared out among the models; the same command continues later
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) time_budget: Option<Duration>,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
}

/// What is answered by what.
#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// The matrix of models, methods, policies and tasks (TOML); options given here go before it
    #[arg(value_name = "MATRIX", value_hint = ValueHint::FilePath)]
    pub(crate) matrix: Option<PathBuf>,
    /// Models [default: the matrix's, else --model]
    #[arg(long, value_name = "MODELS", value_delimiter = ',', value_parser = parse_name)]
    pub(crate) on: Vec<String>,
    /// Tasks and suites (`refrain eval tasks`), separated by `,`
    #[arg(long, value_name = "TASKS", value_delimiter = ',', value_parser = parse_name)]
    pub(crate) tasks: Vec<String>,
    /// Fusion methods, with options if wanted; vanilla is always among them
    #[arg(long, value_name = "METHODS", value_delimiter = ';')]
    pub(crate) methods: Vec<String>,
    /// Eviction policies, with options if wanted; full is always among them
    #[arg(long, value_name = "POLICIES", value_delimiter = ';')]
    pub(crate) policies: Vec<String>,
    /// Folder of the benchmarks' data; generated tasks need none
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) data: Option<PathBuf>,
    /// Most samples of a task
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Most new tokens of an answer [default: the benchmark's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
    /// Tokens that a LongBench prompt is cut to, in its middle [default: by the model's context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..))]
    pub(crate) max_prompt_tokens: Option<u32>,
    /// Tokens of the contexts that are generated (needle, ruler)
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse_length)]
    pub(crate) lengths: Vec<usize>,
    /// Seed of everything drawn [default: 42]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
}

/// The judge of long outputs.
#[derive(Debug, Args)]
pub(crate) struct JudgeArgs {
    /// OpenAI-compatible endpoint of a judge, as http://127.0.0.1:8080/v1; its key is read from OPENAI_API_KEY
    #[arg(long, value_name = "URL", value_parser = judge_url)]
    pub(crate) judge: Option<String>,
    /// The judge's model
    #[arg(long, value_name = "NAME", default_value = "gpt-4o-2024-05-13")]
    pub(crate) judge_model: String,
}

#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Folder of the run
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Folder to write report.html, report.md and report.csv to [default: the run's]
    #[arg(long, short, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
}

/// A name of a list, around which spaces may stand.
fn parse_name(text: &str) -> Result<String, Infallible> {
    Ok(text.trim().to_owned())
}

/// A number of a list, around which spaces may stand.
fn parse_length(text: &str) -> Result<usize, ParseIntError> {
    text.trim().parse()
}

/// A URL without a user in it: it is written to the run's folder.
fn judge_url(url: &str) -> Result<String, String> {
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let host = host.ok_or("give a URL that begins with http:// or https://")?.split('/').next();
    match host {
        Some(host) if host.contains('@') => Err("give the key as OPENAI_API_KEY, not in the URL".to_owned()),
        _ => Ok(url.to_owned()),
    }
}
