//! Options of the commands that answer.

use std::num::ParseIntError;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, ValueHint};
use refrain::engine::{Instructions, Sampling, StructuredOutput};

use crate::output::Console;
use refrain::AUTO;

/// Chunks that a search brings unless told.
const SEARCHED: &str = "5";
/// Numbers of chunks that a search may bring.
pub(crate) const SEARCHABLE: RangeInclusive<i64> = 1..=64;

#[derive(Debug, Args)]
pub(crate) struct Ask {
    /// The question; - reads it from standard input
    pub(crate) question: String,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Answer from the N chunks [default: 5] that match the question best: of --docs, or, without any, of all that was ingested
    /// into the store
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = SEARCHED,
          value_parser = clap::value_parser!(u32).range(SEARCHABLE))]
    pub(crate) search: Option<u32>,
    /// Fusion method, with options if wanted: drift:charge=0.1, a3, pie; auto is what `refrain tune` found for the model, or what
    /// is built in for it [default: auto]
    #[arg(long, value_name = "METHOD")]
    pub(crate) method: Option<String>,
    /// Eviction policy, with options if wanted: morph_kv, snap_kv:capacity=512 [default: full]
    #[arg(long, value_name = "POLICY", default_value = "full", hide_default_value = true)]
    pub(crate) evict: String,
    /// Compare methods with vanilla, side by side: 'pie;a3:ratio=0.3', or given several times
    #[arg(long, value_name = "METHODS", value_delimiter = ';')]
    pub(crate) compare: Vec<String>,
    /// Tokens of vanilla's answer over which methods are compared
    #[arg(long, value_name = "N", default_value_t = 32, hide_short_help = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) compare_tokens: u32,
    /// Show the tokens that the question attends to most, and which of them were recomputed
    #[arg(long)]
    pub(crate) explain: bool,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) structured: StructuredArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Answer each question from the N chunks [default: 5] that match it best: of --docs, or, without any, of all that was ingested into
    /// the store
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = SEARCHED,
          value_parser = clap::value_parser!(u32).range(SEARCHABLE))]
    pub(crate) search: Option<u32>,
    /// Fusion method, with options if wanted; auto is the model's own choice
    #[arg(long, value_name = "METHOD", default_value = AUTO)]
    pub(crate) method: String,
    /// Eviction policy, with options if wanted
    #[arg(long, value_name = "POLICY", default_value = "full")]
    pub(crate) evict: String,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Generate {
    /// The prompt; - reads it from standard input
    pub(crate) prompt: String,
    /// Text, Markdown, HTML, PDF, DOCX or JSONL file, or folder of them, to write from; may be given several times
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// System message [default: the model's own]
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) thinking: ThinkingArgs,
    /// Fusion method, with options if wanted; auto is the model's own choice
    #[arg(long, value_name = "METHOD", default_value = AUTO)]
    pub(crate) method: String,
    /// Eviction policy, with options if wanted
    #[arg(long, value_name = "POLICY", default_value = "morph_kv")]
    pub(crate) evict: String,
    /// Go on past the model's end token, up to --max-tokens
    #[arg(long, alias = "ignore-end", value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, value_parser = BoolishValueParser::new())]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) structured: StructuredArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// Documents, system message and instruction around the question.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Text, Markdown, HTML, PDF, DOCX or JSONL file, or folder of them; may be given several times
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) docs: Vec<PathBuf>,
    /// System message [default: the model's own]
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub(crate) system: Option<String>,
    /// Text between the documents and the question
    #[arg(long, value_name = "TEXT", default_value = Instructions::default().before_question,
          hide_default_value = true, hide_short_help = true)]
    pub(crate) instruction: String,
    #[command(flatten)]
    pub(crate) thinking: ThinkingArgs,
}

impl PromptArgs {
    pub(crate) fn instructions(&self) -> Instructions {
        Instructions {
            system: self.system.clone(),
            before_question: self.instruction.clone(),
            thinking: self.thinking.thinking,
            ..Instructions::default()
        }
    }
}

/// Whether the model thinks.
#[derive(Debug, Args)]
pub(crate) struct ThinkingArgs {
    /// Let a model that can do both think before it answers; its thoughts are text of the answer, before any form that it is held to
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true,
          hide_possible_values = true, hide_short_help = true, value_parser = BoolishValueParser::new())]
    pub(crate) thinking: bool,
}

/// Prompt lookup decoding.
#[derive(Debug, Args)]
pub(crate) struct SpeculationArgs {
    /// Most tokens that are proposed at a time from prompt and answer, and verified in one step; 0 proposes none. The answer is the
    /// same, and a cache that an eviction policy bounds gets none
    #[arg(long, value_name = "N", default_value_t = 10, hide_short_help = true)]
    pub(crate) num_speculative_tokens: usize,
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
    /// Lower the logit of a token by this for each time that it stands in the answer
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_short_help = true)]
    frequency_penalty: f32,
    /// Lower the logits of tokens that stand in the answer by this
    #[arg(long, value_name = "X", default_value_t = 0.0, hide_short_help = true)]
    presence_penalty: f32,
    /// Add X to the logit of the token ID; may be given several times
    #[arg(long, value_name = "ID=X", value_parser = token_bias, allow_hyphen_values = true, hide_short_help = true)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers; -1 draws one, and tells it
    #[arg(long, value_name = "N", default_value = "0")]
    seed: Seed,
    /// Text that ends the answer; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Tokens before which nothing ends the answer
    #[arg(long, value_name = "N", default_value_t = 0, hide_short_help = true)]
    min_tokens: usize,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = Sampling::default().max_tokens)]
    max_tokens: usize,
}

impl SamplingArgs {
    /// # Errors
    /// If the system has no random numbers for a seed.
    pub(crate) fn sampling(&self, console: Console) -> anyhow::Result<Sampling> {
        let seed = match self.seed.0 {
            Some(seed) => seed,
            None => {
                let seed = random_seed()?;
                if self.temperature > 0.0 {
                    console.say(&format!("--seed {seed} draws the same tokens again"));
                }
                seed
            }
        };
        Ok(Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.iter().copied().collect(),
            seed,
            stop: self.stop.clone(),
            min_tokens: self.min_tokens,
            max_tokens: self.max_tokens,
            ..Sampling::default()
        })
    }
}

/// A seed, or none for one that is drawn.
#[derive(Clone, Copy, Debug)]
struct Seed(Option<u64>);

impl FromStr for Seed {
    type Err = ParseIntError;

    /// Reads what the server takes: a negative seed other than -1 is one of the upper half.
    fn from_str(text: &str) -> Result<Seed, ParseIntError> {
        match text.parse() {
            Ok(-1) => Ok(Seed(None)),
            Ok(seed) => Ok(Seed(Some(i64::cast_unsigned(seed)))),
            Err(_) => Ok(Seed(Some(text.parse()?))),
        }
    }
}

/// A seed of 32 bits, which every language and file can hold.
fn random_seed() -> anyhow::Result<u64> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).context("no seed can be drawn: give one with --seed")?;
    Ok(u32::from_le_bytes(bytes).into())
}

/// Reads `ID=X`.
fn token_bias(text: &str) -> Result<(u32, f32), String> {
    let read = |(id, bias): (&str, &str)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?));
    text.split_once('=').and_then(read).ok_or_else(|| format!("{text:?} is no ID=X, as in 42=-5"))
}

/// The form that the answer is held to.
#[derive(Debug, Args)]
#[command(next_help_heading = "Structured output")]
pub(crate) struct StructuredArgs {
    /// Answer with a JSON object
    #[arg(long)]
    json_object: bool,
    /// Answer with JSON of the schema in this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json_schema: Option<PathBuf>,
    /// Answer with a text that this expression matches as a whole
    #[arg(long, value_name = "REGEX")]
    regex: Option<String>,
    /// Answer with one of these texts; given once for each
    #[arg(long, value_name = "TEXT")]
    choice: Vec<String>,
    /// Answer with a text of the grammar in this file, in llguidance's dialect of Lark
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    grammar: Option<PathBuf>,
}

impl StructuredArgs {
    /// # Errors
    /// If a file cannot be read, or a schema is no JSON.
    pub(crate) fn output(&self) -> anyhow::Result<Option<StructuredOutput>> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(if self.json_object {
            Some(StructuredOutput::JsonObject)
        } else if let Some(path) = &self.json_schema {
            let schema = serde_json::from_str(&read(path)?);
            let schema = schema.with_context(|| format!("{} is no JSON schema", path.display()))?;
            Some(StructuredOutput::JsonSchema(schema))
        } else if let Some(path) = &self.grammar {
            Some(StructuredOutput::Lark(read(path)?))
        } else if !self.choice.is_empty() {
            Some(StructuredOutput::Choice(self.choice.clone()))
        } else {
            self.regex.clone().map(StructuredOutput::Regex)
        })
    }
}
