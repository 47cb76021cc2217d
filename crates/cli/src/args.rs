//! The command line: what clap derives, and what is added to it from the registry of methods.

mod bench;

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::BoolishValueParser;
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Args, CommandFactory, Parser, Subcommand, ValueHint};
use refrain_engine::{Instructions, Sampling};
use refrain_fusion::{Kind, OptionSpec};
use refrain_kernels::{Dtype, Precision, UnknownPrecision};

pub(crate) use bench::{Bench, Group, Kernels, Precisions, Ttft};

use crate::examples;
use crate::output::parse_size;

/// Every option with a value, of whatever command, has an environment variable of this prefix.
const ENVIRONMENT: &str = "REFRAIN_";

/// Answers questions over documents whose chunks were prefilled once.
///
/// Every document chunk is prefilled once and kept; its keys and values are reused at any position of any later
/// prompt, and a fusion method decides which few tokens are computed again for the question at hand.
#[derive(Debug, Parser)]
#[command(name = "refrain", version, after_help = examples::REFRAIN)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A precision, or none: what the model's files come nearest to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compute(pub(crate) Option<Precision>);

impl FromStr for Compute {
    type Err = String;

    fn from_str(s: &str) -> Result<Compute, String> {
        if s == "auto" {
            return Ok(Compute(None));
        }
        s.parse()
            .map(|precision| Compute(Some(precision)))
            .map_err(|error: UnknownPrecision| format!("{error}, or auto"))
    }
}

/// Options of every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Model: a known name (`refrain pull --list`), a GGUF file, a Hugging Face folder, or `hf:ORG/NAME[@REVISION][:FILE]`
    #[arg(long, global = true, value_name = "MODEL", default_value = "smollm2-135m", value_hint = ValueHint::AnyPath)]
    pub(crate) model: String,
    /// Folder of the models that `refrain pull` fetches by name [default: ~/.cache/refrain/models]
    #[arg(long, global = true, value_name = "FOLDER", hide_short_help = true, value_hint = ValueHint::DirPath)]
    pub(crate) models: Option<PathBuf>,
    /// Folder of the chunk store [default: refrain/chunks in the user's data folder]
    #[arg(long, global = true, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) store: Option<PathBuf>,
    /// Most bytes of chunks held in memory
    #[arg(long, global = true, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size,
          hide_short_help = true)]
    pub(crate) memory: u64,
    /// Threads; 0 for one a core
    #[arg(long, global = true, value_name = "N", default_value_t = 0, hide_short_help = true)]
    pub(crate) threads: usize,
    /// How weights are kept and multiplied: bf16, q8 (blocks of 8 or 4 bits), f32, or auto (q8 for quantised files, else
    /// bf16)
    #[arg(long, global = true, value_name = "TYPE", default_value = "auto", hide_short_help = true)]
    pub(crate) compute: Compute,
    /// Type of cached keys and values: f16, bf16 or f32
    #[arg(long, global = true, value_name = "TYPE", default_value = "f16", hide_short_help = true)]
    pub(crate) kv: Dtype,
    /// Most tokens of a chunk
    #[arg(long, global = true, value_name = "N", default_value_t = 512, hide_short_help = true)]
    pub(crate) chunk_tokens: usize,
    /// Namespace: chunks of one are invisible to another
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true,
        hide_short_help = true
    )]
    pub(crate) namespace: String,
    /// Print JSON for machines
    #[arg(long, global = true, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, value_parser = BoolishValueParser::new())]
    pub(crate) json: bool,
    /// No progress and no account, only what was asked for and errors
    #[arg(long, global = true, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, value_parser = BoolishValueParser::new())]
    pub(crate) quiet: bool,
    /// Configuration file [default: refrain/config.toml in the user's configuration folder]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true, value_hint = ValueHint::FilePath)]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Fetch a model
    #[command(after_help = examples::PULL)]
    Pull(Pull),
    /// Prefill documents once and keep their chunks
    #[command(after_help = examples::INGEST)]
    Ingest(Ingest),
    /// Answer a question, from documents if there are any
    #[command(after_help = examples::ASK)]
    Ask(Ask),
    /// Talk, turn by turn
    #[command(after_help = examples::CHAT)]
    Chat(Chat),
    /// Look after the chunk store
    #[command(subcommand, after_help = examples::CHUNKS)]
    Chunks(Chunks),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Show the fusion methods and their options
    #[command(after_help = examples::METHODS)]
    Methods(Methods),
    /// Print a completion script for a shell
    #[command(after_help = examples::COMPLETIONS)]
    Completions(Completions),
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// A known name, or `hf:ORG/NAME[@REVISION][:FILE]`
    #[arg(required_unless_present = "list")]
    pub(crate) name: Option<String>,
    /// List the known names
    #[arg(long)]
    pub(crate) list: bool,
    /// Branch, tag or commit of a model of the hub [default: main]
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Ingest {
    /// Text, Markdown or JSONL (title, text) files, or folders of them
    #[arg(required = true, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Ask {
    /// The question; - reads it from standard input
    pub(crate) question: String,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Fusion method, with options if wanted: a3, pie, a3:ratio=0.2:softmax=per_head [default: a3]
    #[arg(long, value_name = "METHOD")]
    pub(crate) method: Option<String>,
    /// Compare methods with vanilla, side by side
    #[arg(long, value_name = "METHODS", value_delimiter = ',')]
    pub(crate) compare: Vec<String>,
    /// Tokens of vanilla's answer over which methods are compared
    #[arg(long, value_name = "N", default_value_t = 32, hide_short_help = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) compare_tokens: u32,
    /// Show what the question attends to most, and which of it was recomputed
    #[arg(long)]
    pub(crate) explain: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Fusion method, with options if wanted
    #[arg(long, value_name = "METHOD", default_value = "a3")]
    pub(crate) method: String,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// What stands around the question.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Text, Markdown or JSONL file, or folder of them; may be given several times
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// System message [default: the model's own]
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub(crate) system: Option<String>,
    /// What is said between the documents and the question
    #[arg(long, value_name = "TEXT", default_value = Instructions::default().before_question,
          hide_default_value = true, hide_short_help = true)]
    pub(crate) instruction: String,
}

impl PromptArgs {
    pub(crate) fn instructions(&self) -> Instructions {
        Instructions {
            system: self.system.clone(),
            before_question: self.instruction.clone(),
            ..Instructions::default()
        }
    }
}

/// How tokens are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling options")]
pub(crate) struct SamplingArgs {
    /// Softmax temperature; 0 takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = Sampling::default().temperature)]
    temperature: f32,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = Sampling::default().top_k)]
    top_k: usize,
    /// Keep the likeliest tokens until their probabilities sum to P
    #[arg(long, value_name = "P", default_value_t = Sampling::default().top_p)]
    top_p: f32,
    /// Keep tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", default_value_t = Sampling::default().min_p)]
    min_p: f32,
    /// Make tokens that were already seen less likely; 1 changes nothing
    #[arg(long, value_name = "X", default_value_t = Sampling::default().repetition_penalty)]
    repetition_penalty: f32,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = Sampling::default().seed)]
    seed: u64,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = Sampling::default().max_tokens)]
    max_tokens: usize,
}

impl SamplingArgs {
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            stop: self.stop.clone(),
            max_tokens: self.max_tokens,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Chunks {
    /// List all chunks
    Ls,
    /// Show a chunk and, when its model is at hand, its text
    Show {
        /// Key, or its first digits
        #[arg(value_name = "KEY")]
        key: String,
    },
    /// Remove chunks
    Rm {
        /// Keys, or their first digits
        #[arg(value_name = "KEY", required_unless_present = "all", conflicts_with = "all")]
        keys: Vec<String>,
        /// Remove all chunks, of whatever model
        #[arg(long)]
        all: bool,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Read every chunk file, verify all of it, and remove what is broken
    Verify,
}

#[derive(Debug, Args)]
pub(crate) struct Methods {
    /// Show only this method
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

/// The whole command line with the methods' options and the environment variables.
pub(crate) fn command() -> clap::Command {
    let mut command = Cli::command();
    for path in [&["ask"][..], &["chat"], &["bench", "ttft"]] {
        command = at(command, path, add_method_options);
    }
    with_environment(command)
}

fn at(
    command: clap::Command,
    path: &[&'static str],
    change: fn(clap::Command) -> clap::Command,
) -> clap::Command {
    match path {
        [] => change(command),
        [first, rest @ ..] => command.mut_subcommand(first, |sub| at(sub, rest, change)),
    }
}

fn add_method_options(command: clap::Command) -> clap::Command {
    refrain_fusion::options().iter().fold(command, |command, (spec, methods)| {
        command.arg(method_option(spec, methods).help_heading("Method options"))
    })
}

fn method_option(spec: &OptionSpec, methods: &[&str]) -> Arg {
    let flag = spec.name.replace('_', "-");
    let (first, rest) = spec.help.split_at(spec.help.chars().next().map_or(0, char::len_utf8));
    let help = format!("{}{rest} [{}; default: {}]", first.to_uppercase(), methods.join(", "), spec.default);
    let arg = Arg::new(spec.name).long(flag).help(help);
    match spec.kind {
        Kind::Ratio => arg.value_name("RATIO"),
        Kind::Count => arg.value_name("N"),
        Kind::Switch => {
            arg.value_name("BOOL").num_args(0..=1).require_equals(true).default_missing_value("true")
        }
        Kind::Choice(words) => arg.value_name("CHOICE").value_parser(PossibleValuesParser::new(words)),
    }
}

/// Options that take a value can be given by environment variable and configuration file as well.
pub(crate) fn is_setting(arg: &Arg) -> bool {
    arg.get_long().is_some() && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

fn with_environment(command: clap::Command) -> clap::Command {
    let name = |arg: &Arg| arg.get_long().unwrap_or_default().replace('-', "_").to_uppercase();
    let command = command.mut_args(|arg| {
        if is_setting(&arg) {
            let variable = format!("{ENVIRONMENT}{}", name(&arg));
            arg.env(variable).hide_env(true)
        } else {
            arg
        }
    });
    command.mut_subcommands(with_environment)
}

/// The matches of the command that was given, below all subcommands.
pub(crate) fn innermost(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, sub)| innermost(sub))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent_and_every_method_option_is_a_flag() {
        super::command().debug_assert();
        let command = super::command();
        let ask = command.find_subcommand("ask").unwrap();
        for (spec, _) in refrain_fusion::options() {
            let flag = spec.name.replace('_', "-");
            assert!(ask.get_arguments().any(|arg| arg.get_long() == Some(&flag)), "{flag}");
        }
    }
}
