//! Arguments of `refrain tune`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};

use refrain::quantities::parse_duration;

/// Methods that are tuned over, at the charges that they can have.
const TUNED: &str = "pie;lego_link:charge=0.1;cache_blend:charge=0.15;prophet_kv:charge=0.1;info_flow:charge=0.05;\
                     info_flow:charge=0.1;scout:charge=0.02;scout:charge=0.05;scout:charge=0.1;scout:charge=0.2;\
                     drift:charge=0.02;drift:charge=0.05;drift:charge=0.1;drift:charge=0.15;drift:charge=0.2;drift:charge=0.3";

/// Prefixes that are tuned over.
const PREFIXES: &str = "none,system,averaged";

#[derive(Debug, Args)]
pub(crate) struct Tune {
    /// Text, Markdown, HTML, PDF, DOCX or JSONL (title, text) files, or folders of them
    #[arg(required_unless_present = "forget", value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    /// Remove the model's choice, so that --method auto is what is built in; answers are kept, and the next tune goes on with them
    #[arg(long, conflicts_with = "paths")]
    pub(crate) forget: bool,
    /// Questions, a JSON object a line: {"question": …, "answers": […]}; without answers, vanilla's are to be kept [default: the model
    /// makes them of the documents]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) questions: Option<PathBuf>,
    /// Most questions
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) samples: u32,
    /// Most tokens of documents around a question
    #[arg(long, value_name = "N", default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tokens: u32,
    /// Most tokens of an answer; methods are held against vanilla over all of them
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Share of vanilla's tokens and of its score that a method has to keep
    #[arg(long, value_name = "SHARE", default_value_t = 0.98, value_parser = parse_share)]
    pub(crate) bound: f64,
    /// Methods to choose from, separated by `;`
    #[arg(long, value_name = "METHODS", default_value = TUNED, value_delimiter = ';', hide_short_help = true)]
    pub(crate) methods: Vec<String>,
    /// Prefixes to choose from
    #[arg(long, value_name = "PREFIXES", default_value = PREFIXES, value_delimiter = ',')]
    pub(crate) prefixes: Vec<String>,
    /// Most time for it, the making of the questions included; the same command makes them again and goes on with their answers
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) time_budget: Option<Duration>,
    /// Folder of the answers, which a stopped run goes on in [default: the model's, in refrain/tuned in the user's data folder]
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    /// File to write the choice to [default: the model's own, which --method auto reads]
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,
}

impl Tune {
    /// Whether all methods are measured, behind all prefixes.
    pub(crate) fn is_of_all(&self) -> bool {
        self.methods.iter().eq(TUNED.split(';')) && self.prefixes.iter().eq(PREFIXES.split(','))
    }
}

/// A number from 0 to 1.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("{text} is not a number from 0 to 1"))
}
