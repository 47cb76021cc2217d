//! Options of `refrain job`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};

use super::AUTO;
use super::eval::{JudgeArgs, Selection};
use crate::examples;
use refrain::quantities::parse_duration;

/// `refrain job`
#[derive(Debug, Subcommand)]
pub(crate) enum Job {
    /// Write the shards of a job to an object store; planning the same again changes nothing
    #[command(subcommand)]
    Plan(Plan),
    /// Work on a job's shards until all are done, by this program or others; goes on with a stopped job
    #[command(after_help = examples::JOB_RUN)]
    Run(Run),
    /// Show what is done, who works on what, how long it will take, and what failed
    #[command(after_help = examples::JOB_STATUS)]
    Status(Status),
    /// Write the answers of a job of evaluation to the folder of a run, for `refrain eval report`
    #[command(after_help = examples::JOB_RESULTS)]
    Results(Results),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Plan {
    /// Plan an ingest: documents are prefilled, and kept with their chunks in the object store of --remote
    #[command(after_help = examples::JOB_PLAN_INGEST)]
    Ingest(PlanIngest),
    /// Plan an evaluation: samples are answered with every method and policy
    #[command(after_help = examples::JOB_PLAN_EVAL)]
    Eval(Box<PlanEval>),
}

/// Where a job is.
#[derive(Debug, Args)]
pub(crate) struct JobUrl {
    /// Where the job is kept: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER, a prefix that holds nothing else
    #[arg(long = "job", value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) url: String,
}

#[derive(Debug, Args)]
pub(crate) struct PlanIngest {
    /// Text, Markdown, HTML, PDF, DOCX or JSONL (title, text) files, or folders of them
    #[arg(required = true, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub(crate) paths: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) job: JobUrl,
    /// Most documents of a shard
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shard_documents: u32,
    /// Most tokens of a shard; a longer document is a shard of its own
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) shard_tokens: u64,
    /// Fusion method to prepare for, with options if wanted: sam_kv and multi_inf_llm have documents prefilled whole, with a
    /// summary of each
    #[arg(long, value_name = "METHOD", default_value = AUTO)]
    pub(crate) method: String,
    /// System message of the prompts to come, for `--prefix system` [default: the model's own]
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub(crate) system: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct PlanEval {
    #[command(flatten)]
    pub(crate) selection: Selection,
    #[command(flatten)]
    pub(crate) job: JobUrl,
    /// Most samples of a shard
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shard_samples: u32,
    /// Most answers to each sample of a shard: methods and policies beyond are other shards, each of which computes vanilla's answer
    /// again to compare with [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shard_methods: Option<u32>,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) job: JobUrl,
    /// Number of this runner; runners of different numbers begin far from each other [default: the index of the Kubernetes job or the
    /// Slurm array that it is part of, else one that follows from host and process]
    #[arg(long, value_name = "N")]
    pub(crate) index: Option<u64>,
    /// Time after which the shard of a runner that died is taken over: that without a renewal of its claim, which happens five times in it
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_claim_timeout)]
    pub(crate) claim_timeout: Duration,
    /// Times that a document or sample is tried, and runners that may die on it, before it is listed as failed
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tries: u32,
    /// Longest time that the runner waits for an object store which does not answer
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub(crate) patience: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    pub(crate) job: JobUrl,
    /// Show it again every few seconds until the job is done
    #[arg(long)]
    pub(crate) watch: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Results {
    #[command(flatten)]
    pub(crate) job: JobUrl,
    /// Folder of the run; what it has already is not written again
    #[arg(long, short, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub(crate) out: PathBuf,
}

/// A time in which a claim can be renewed.
fn parse_claim_timeout(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if (Duration::from_secs(1)..=Duration::from_secs(24 * 3600)).contains(&time) {
        Ok(time)
    } else {
        Err("give a time from 1s to 24h".to_owned())
    }
}
