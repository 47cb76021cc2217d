//! The command line: what clap derives, and an environment variable for each option with a value.

mod answers;
mod bench;
mod errors;
mod eval;
mod install;
#[cfg(feature = "remote")]
mod job;
mod relations;
mod serve;
mod store;
mod tune;

use std::any::TypeId;
use std::convert::Infallible;
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{
    BoolishValueParser, NonEmptyStringValueParser, PathBufValueParser, RangedU64ValueParser,
    TypedValueParser as _,
};
use clap::{Arg, ArgAction, ArgMatches, Args, CommandFactory, Parser, Subcommand, ValueEnum, ValueHint};
use refrain::engine::{DeviceChoice, Instructions, Prefix};
use refrain::kernels::{Dtype, Precision, UnknownPrecision};
use refrain::store::KvQuantization;

pub(crate) use answers::{Ask, Chat, Generate, SEARCHABLE};
pub(crate) use bench::{Bench, Decode, Feature, Memory, Policies, Scenario, ServeBench, StoreBench, Ttft};
pub(crate) use errors::with_expected;
pub(crate) use eval::{Eval, Report as EvalReport, Run as EvalRun, Selection};
pub(crate) use install::{Completions, Health, Man};
#[cfg(feature = "remote")]
pub(crate) use job::{
    Job, JobUrl, Plan as JobPlan, PlanEval, PlanIngest, Results as JobResults, Run as JobRun,
    Status as JobStatus,
};
pub(crate) use relations::{FileOptions, parsed};
pub(crate) use serve::{Key, Serve};
#[cfg(feature = "remote")]
pub(crate) use store::Prune;
pub(crate) use store::{Keep, Kept, Store};
pub(crate) use tune::Tune;

use crate::examples;
use refrain::AUTO;
use refrain::folders::expand_tilde;
#[cfg(feature = "remote")]
use refrain::quantities::SyncInterval;
use refrain::quantities::{Quota, parse_duration, parse_size, parse_tokens};

/// Every option with a value, of whatever command, has an environment variable of this prefix.
const ENVIRONMENT: &str = "REFRAIN_";

/// Most tokens whose share of a layer is computed in one step.
pub(crate) const UBATCH_SIZE: u32 = 2048;

/// Most tokens that `generate` writes.
pub(crate) const LONG_ANSWER: &str = "4096";

/// Answers questions over documents whose chunks were prefilled once.
///
/// Every document chunk is prefilled once and kept; its keys and values are reused at any position of any later
/// prompt, and a fusion method decides which few tokens are computed again for the question at hand. An eviction policy
/// bounds the KV cache in which the answer is decoded.
#[derive(Debug, Parser)]
#[command(name = "refrain", version, after_help = examples::REFRAIN)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A precision, or none for the nearest to the model's files.
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
    /// Model: a known name (`refrain models`), a GGUF file, a Hugging Face folder, or `hf:ORG/NAME[@REVISION][:FILE]`
    #[arg(long, global = true, value_name = "MODEL", default_value = "smollm2-135m", value_hint = ValueHint::AnyPath,
          value_parser = parse_model)]
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
    /// Most bytes of the store's folder: the least recently used chunks go, also where the disk is full earlier, and pinned ones stay
    #[arg(long, global = true, value_name = "SIZE", default_value = "32GiB", value_parser = parse_size,
          hide_short_help = true)]
    pub(crate) disk: u64,
    /// Most bytes of each namespace in the store's folder, or of one: 2GiB,shared=20GiB (`refrain store stats` names them)
    /// [default: no bound of their own]
    #[arg(
        long,
        global = true,
        value_name = "[NAMESPACE=]SIZE",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(crate) quota: Vec<Quota>,
    /// Object store that machines share chunks and documents through: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER;
    /// its credentials are read from the environment (AWS_…, GOOGLE_…, AZURE_…)
    #[cfg(feature = "remote")]
    #[arg(long, global = true, value_name = "URL", hide_short_help = true)]
    pub(crate) remote: Option<String>,
    /// How long the object store may be silent before it is left alone for a while
    #[cfg(feature = "remote")]
    #[arg(long, global = true, value_name = "TIME", default_value = "2s", value_parser = parse_duration,
          hide_short_help = true)]
    pub(crate) remote_timeout: Duration,
    /// Whether chunks that the object store may have are fetched or computed: auto takes what is expected to be faster by measured
    /// rates, and computes a chunk that comes late
    #[cfg(feature = "remote")]
    #[arg(long, global = true, value_name = "POLICY", default_value = "auto", hide_short_help = true)]
    pub(crate) remote_policy: refrain::store::FetchPolicy,
    /// How often a server looks for documents that other machines have added to the object store, changed or removed; off
    /// keeps documents on this machine, so that chunks alone are shared
    #[cfg(feature = "remote")]
    #[arg(long, global = true, value_name = "TIME", default_value = "5s", hide_short_help = true)]
    pub(crate) sync_interval: SyncInterval,
    /// How long stored chunks stay, such as 12h or 30d [default: as long as there is room]
    #[arg(long, global = true, value_name = "TIME", value_parser = parse_duration, hide_short_help = true)]
    pub(crate) ttl: Option<Duration>,
    /// Device that computes: cpu, cuda (an NVIDIA GPU, by its index where it is not the first: cuda:1), or auto (the first GPU where it can compute
    /// the model, else the CPU). cuda is experimental: tested under emulation, on an H200 and an H100
    #[arg(long, global = true, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu, hide_short_help = true)]
    pub(crate) device: DeviceChoice,
    /// Most bytes of chunks kept in the memory of a GPU, so that those which many prompts use are copied there once; at most an eighth of what is
    /// free there is taken, and 0 keeps none
    #[arg(long, global = true, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size,
          hide_short_help = true)]
    pub(crate) device_cache: u64,
    /// Threads; 0 for one a core
    #[arg(long, global = true, value_name = "N", default_value_t = 0, hide_short_help = true)]
    pub(crate) threads: usize,
    /// How weights are kept and multiplied: bf16, q8 (blocks of 8 or 4 bits), f32, or auto (q8 for quantised files, else
    /// bf16). Commands that share chunks need the same
    #[arg(long, global = true, value_name = "TYPE", default_value = "auto", hide_short_help = true)]
    pub(crate) compute: Compute,
    /// Keep packed weights in a file beside the model, as large as they are in memory, from which later starts read them: `false` packs
    /// them at each start
    #[arg(long, global = true, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "true", default_missing_value = "true",
          hide_possible_values = true, hide_short_help = true, value_parser = BoolishValueParser::new())]
    pub(crate) keep_packed: bool,
    /// Use only chunks that were computed with the same precision and kernels (AVX2, AVX-512, AMX, …), where answers must not differ in a bit
    /// by which machine computed a chunk first. Commands that share chunks need the same
    #[arg(long, global = true, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, hide_short_help = true, value_parser = BoolishValueParser::new())]
    pub(crate) strict_numerics: bool,
    /// Type of cached keys and values: f16, bf16 or f32. Commands that share chunks need the same
    #[arg(long, global = true, value_name = "TYPE", default_value = "f16", hide_short_help = true)]
    pub(crate) kv: Dtype,
    /// Type of stored keys and values: exact (as computed), q8 (8 bits an element) or q4 (4 bits, KIVI). Commands that share chunks
    /// need the same
    #[arg(long, global = true, value_name = "TYPE", default_value = "exact", hide_short_help = true)]
    pub(crate) store_dtype: KvQuantization,
    /// Most tokens of a chunk. Commands that share chunks need the same
    #[arg(long, global = true, value_name = "N", default_value_t = 512, hide_short_help = true,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) chunk_tokens: usize,
    /// Tokens right before a chunk in its document that it is prefilled behind, at most, or `all` of them: documents in one piece.
    /// Commands that share chunks need the same
    #[arg(long, global = true, value_name = "N", default_value = "0", value_parser = parse_tokens, hide_short_help = true)]
    pub(crate) left_tokens: usize,
    /// Tokens that stand before every chunk while it is prefilled, and are dropped: none (BOS alone, where the model has one), bos (for
    /// a model without, the first token of its template), system (the prompts' part before the documents), averaged (system and, behind
    /// it, each of two texts: chunks are the mean, and take twice as long to ingest), text:FILE, or auto (the choice of `refrain tune`,
    /// or the one built in for the model). Commands that share chunks need the same
    #[arg(long, global = true, value_name = "PREFIX", default_value = AUTO, hide_short_help = true)]
    pub(crate) prefix: PrefixArg,
    /// Most tokens whose share of a layer is computed in one step: in the server, others get their turn between steps
    #[arg(long, global = true, value_name = "N", default_value_t = UBATCH_SIZE, hide_short_help = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ubatch_size: u32,
    /// Secret that determines the namespace: chunks of one namespace are invisible to the others. Give it by
    /// environment variable or configuration file, since other users can see command lines
    #[arg(long, global = true, value_name = "SECRET", value_parser = NonEmptyStringValueParser::new(), hide_short_help = true)]
    pub(crate) credential: Option<String>,
    /// Key that namespaces are derived with, 64 hexadecimal digits: the same on all machines that share chunks of a namespace. Give it by
    /// environment variable or file, since other users can see command lines [default: the store's own, made at random]
    #[arg(long, global = true, value_name = "KEY", hide_short_help = true)]
    pub(crate) namespace_key: Option<String>,
    /// File with the key that namespaces are derived with, where --namespace-key does not give it
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true, value_hint = ValueHint::FilePath)]
    pub(crate) namespace_key_file: Option<PathBuf>,
    /// The shared namespace: off, read (its chunks are used where the own namespace lacks them), or own (chunks are
    /// stored there)
    #[arg(long, global = true, value_name = "USE", default_value = "off", hide_short_help = true)]
    pub(crate) shared: Shared,
    /// File that `refrain calibrate` wrote [default: the model's, in refrain/calibration in the user's data folder]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true, value_hint = ValueHint::FilePath)]
    pub(crate) calibration: Option<PathBuf>,
    /// Print JSON for machines
    #[arg(long, global = true, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, value_parser = BoolishValueParser::new())]
    pub(crate) json: bool,
    /// Print no progress and no statistics, only answers and errors
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
    /// List the models that are known by name: size, context, licence, and the method that is safe for each
    Models,
    /// Prefill documents once and keep their chunks
    #[command(after_help = examples::INGEST)]
    Ingest(Ingest),
    /// Answer a question, from documents if there are any
    #[command(after_help = examples::ASK)]
    Ask(Ask),
    /// Talk, turn by turn
    #[command(after_help = examples::CHAT)]
    Chat(Chat),
    /// Write something long, in a KV cache of constant size
    #[command(after_help = examples::GENERATE)]
    Generate(Generate),
    /// Find the cheapest method that stays near vanilla on your model and documents: what --method auto stands for
    #[command(after_help = examples::TUNE)]
    Tune(Tune),
    /// Find the layers over which SamKV averages, for a model, from documents
    #[command(after_help = examples::CALIBRATE)]
    Calibrate(Calibrate),
    /// Look after the chunk store
    #[command(subcommand, after_help = examples::STORE)]
    Store(Store),
    /// Look after the documents that `ask --search` finds
    #[command(subcommand, after_help = examples::DOCUMENTS)]
    Documents(Kept),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Benchmark the quality of methods and policies
    #[command(subcommand)]
    Eval(Eval),
    /// Ingest and evaluate on many machines: shards in an object store, started by Kubernetes, Slurm or ssh
    #[cfg(feature = "remote")]
    #[command(subcommand, after_help = examples::JOB)]
    Job(Job),
    /// Serve answers and documents by HTTP, with OpenAI's interface
    #[command(after_help = examples::SERVE)]
    Serve(Box<Serve>),
    /// Make API keys for the server
    #[command(subcommand)]
    Key(Key),
    /// Show the fusion methods, the eviction policies and their options
    #[command(after_help = examples::METHODS)]
    Methods(Methods),
    /// Print a completion script for a shell
    #[command(after_help = examples::COMPLETIONS)]
    Completions(Completions),
    /// Write the manual pages, one a command
    #[command(after_help = examples::MAN)]
    Man(Man),
    /// Ask a server whether it takes requests
    #[command(after_help = examples::HEALTH)]
    Health(Health),
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
    /// Text, Markdown, HTML, PDF, DOCX or JSONL (title, text) files, or folders of them
    #[arg(required = true, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    /// Fusion method to prepare for, with options if wanted: sam_kv and multi_inf_llm have documents prefilled whole, with a
    /// summary of each
    #[arg(long, value_name = "METHOD", default_value = AUTO)]
    pub(crate) method: String,
    /// System message of the prompts to come, for `--prefix system` [default: the model's own]
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub(crate) system: Option<String>,
}

impl Ingest {
    pub(crate) fn instructions(&self) -> Instructions {
        Instructions { system: self.system.clone(), ..Instructions::default() }
    }
}

/// The prefix of chunks: one, or the model's choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PrefixArg {
    Auto,
    Is(Prefix),
}

impl FromStr for PrefixArg {
    type Err = String;

    fn from_str(text: &str) -> Result<PrefixArg, String> {
        if text == AUTO {
            return Ok(PrefixArg::Auto);
        }
        text.parse().map(PrefixArg::Is).map_err(|error: String| format!("{error}, or auto"))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Calibrate {
    /// Text, Markdown, HTML, PDF, DOCX or JSONL (title, text) files, or folders of them
    #[arg(required = true, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    /// File to write [default: the model's own, in refrain/calibration in the user's data folder]
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

/// Use of the shared namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shared {
    Off,
    Read,
    Own,
}

#[derive(Debug, Args)]
pub(crate) struct Methods {
    /// Show only this method or policy
    pub(crate) name: Option<String>,
}

/// The whole command line with the environment variables.
pub(crate) fn command() -> clap::Command {
    let mut command = Cli::command();
    command = at(command, &["generate"], |generate| {
        generate.mut_arg("max_tokens", |arg| arg.default_value(LONG_ANSWER))
    });
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

/// Options that take a value can be given by environment variable and configuration file as well.
pub(crate) fn is_setting(arg: &Arg) -> bool {
    arg.get_long().is_some() && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

fn with_environment(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        if !is_setting(&arg) {
            return arg;
        }
        // A negative number is a value, and no option of an unknown name.
        let mut arg = arg.allow_negative_numbers(true);
        if arg.get_value_parser().type_id() == TypeId::of::<PathBuf>() {
            arg = arg.value_parser(PathBufValueParser::new().map(expand_tilde));
        }
        let variable = variable(arg.get_long().unwrap_or_default());
        // A variable that is empty is one that is not set.
        if is_set(&variable) { arg.env(variable).hide_env(true) } else { arg }
    });
    command.mut_subcommands(with_environment)
}

/// A model as it is given, with the home folder for a leading `~` of a path.
fn parse_model(text: &str) -> Result<String, Infallible> {
    Ok(expand_tilde(text.into()).to_string_lossy().into_owned())
}

/// The environment variable of an option.
fn variable(option: &str) -> String {
    format!("{ENVIRONMENT}{}", option.replace('-', "_").to_uppercase())
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

/// Whether the words of a command line ask for JSON, or, without such words, the environment does.
pub(crate) fn asks_json(given: &[OsString]) -> bool {
    let words = given.iter().skip(1).take_while(|word| *word != "--").filter_map(|word| word.to_str());
    let typed = words.filter_map(|word| match word {
        "--json" => Some(OsString::from("true")),
        word => word.strip_prefix("--json=").map(OsString::from),
    });
    let value = typed.last().or_else(|| std::env::var_os(variable("json")));
    let is_true = |value: OsString| BoolishValueParser::new().parse(&Cli::command(), None, value);
    value.is_some_and(|value| is_true(value).unwrap_or(false))
}

/// The matches of the command that was given, below all subcommands.
pub(crate) fn innermost(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, sub)| innermost(sub))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        super::command().debug_assert();
    }
}
