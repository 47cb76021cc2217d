//! The parameters of a simulation, as options and as TOML.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, ensure};
use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, ValueEnum};
use serde::{Serialize, Serializer};

/// A number of a fleet, or of each worker: `2000`, or `1.8/worker`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Amount {
    value: f64,
    per_worker: bool,
}

impl Amount {
    /// The number of a fleet.
    pub(crate) fn of(self, workers: usize) -> f64 {
        if self.per_worker { self.value * workers as f64 } else { self.value }
    }
}

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Amount, String> {
        let (number, per_worker) = match text.strip_suffix("/worker") {
            Some(number) => (number, true),
            None => (text, false),
        };
        let value = number.trim().parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0);
        let value = value.ok_or("give a number above zero, of all workers (2000) or of each (1.8/worker)")?;
        Ok(Amount { value, per_worker })
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.value, if self.per_worker { "/worker" } else { "" })
    }
}

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How often chunks are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Popularity {
    /// Chunk of rank r as often as r to the power of an exponent
    Zipf,
    /// The first chunks equally often, and the others equally often
    TwoLevel,
}

/// How a worker comes by the chunks that it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Missing {
    /// Fetched or prefilled, by the earlier first token of the request
    Quickest,
    /// Prefilled only if that gains more time than it takes from the requests that wait behind
    CountQueue,
}

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rule {
    /// Any worker
    Random,
    /// The worker with the fewest requests
    LeastLoaded,
    /// The holder of the request's first chunk with the fewest requests, unless it has five more than the least loaded worker: a router of
    /// prefixes sees no other chunk
    Prefix,
    /// Most tokens held, among workers that have at most --slack requests more than the least loaded one
    Tessera,
    /// The least expected time to the first token
    Cost,
}

impl Rule {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether the router itself chooses by it.
    pub(crate) fn is_of_the_router(self) -> bool {
        matches!(self, Rule::Tessera | Rule::Cost)
    }
}

/// A fleet, its requests, and how they are distributed.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct Scenario {
    /// Workers; each number of them is simulated
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "100", help_heading = "Fleet")]
    pub(crate) workers: Vec<usize>,
    /// Gateways, each of which chooses by itself
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Fleet")]
    pub(crate) gateways: usize,
    /// Rules by which gateways choose: random, least-loaded (fewest requests), prefix (the holder of the first chunk, since a router of
    /// prefixes sees no other), tessera (most tokens held, of nearly equally loaded workers), cost (least expected time to the first token)
    #[arg(
        long,
        value_name = "RULE",
        value_delimiter = ',',
        value_enum,
        hide_possible_values = true,
        help_heading = "Fleet",
        default_value = "random,least-loaded,prefix,tessera,cost"
    )]
    pub(crate) rules: Vec<Rule>,
    /// Requests by which a worker may be fuller than the least loaded one under the rule `tessera`
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Fleet")]
    pub(crate) slack: u32,

    /// Requests a second, of the fleet (20) or of each worker (1.8/worker); each rate is simulated
    #[arg(
        long,
        value_name = "NUMBER",
        value_delimiter = ',',
        default_value = "1.8/worker",
        help_heading = "Requests"
    )]
    pub(crate) rate: Vec<Amount>,
    /// Requests in all, a worker
    #[arg(long, value_name = "N", default_value_t = 2000, help_heading = "Requests")]
    pub(crate) requests: u64,
    /// Share of the requests, from the first, that fills the caches and is not measured
    #[arg(long, value_name = "SHARE", default_value_t = 0.6, help_heading = "Requests")]
    pub(crate) warmup: f64,
    /// Chunks a request, all different
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Requests")]
    pub(crate) chunks: usize,
    /// Tokens of a request that are computed wherever its chunks lie
    #[arg(long, value_name = "N", default_value_t = 90, help_heading = "Requests")]
    pub(crate) question: u32,
    /// Share of its chunks' rows that the method computes, over all layers and passes: 0 for pie, 0.15 for a3
    #[arg(long, value_name = "SHARE", default_value_t = 0.15, help_heading = "Requests")]
    pub(crate) charge: f64,
    /// Seed of everything that is left to chance
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Requests")]
    pub(crate) seed: u64,

    /// Chunks that are asked for, of the fleet (50000) or of each worker (1000/worker)
    #[arg(long, value_name = "NUMBER", default_value = "1000/worker", help_heading = "Corpus")]
    pub(crate) corpus: Amount,
    /// How often each is asked for: zipf (rank to the power of the exponent that --few and --hot give), or two-level (the few equally
    /// often, and the others equally often)
    #[arg(
        long,
        value_name = "LAW",
        default_value = "zipf",
        value_enum,
        hide_possible_values = true,
        help_heading = "Corpus"
    )]
    pub(crate) popularity: Popularity,
    /// Share of the chunks that is asked for most
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, help_heading = "Corpus")]
    pub(crate) few: f64,
    /// Share of the requests that asks for those
    #[arg(long, value_name = "SHARE", default_value_t = 0.6, help_heading = "Corpus")]
    pub(crate) hot: f64,
    /// Tokens of a chunk
    #[arg(long, value_name = "N", default_value_t = 512, help_heading = "Corpus")]
    pub(crate) tokens: u32,
    /// Bytes of keys and values of a token, over all layers
    #[arg(long, value_name = "N", default_value_t = 23_040, help_heading = "Corpus")]
    pub(crate) bytes_per_token: u64,

    /// Chunks that a worker's memory has room for
    #[arg(long, value_name = "N", default_value_t = 200, help_heading = "Worker")]
    pub(crate) memory: usize,
    /// Chunks that a worker's disk has room for
    #[arg(long, value_name = "N", default_value_t = 2000, help_heading = "Worker")]
    pub(crate) disk: usize,
    /// Tokens a second that a worker computes
    #[arg(long, value_name = "RATE", default_value_t = 3000.0, help_heading = "Worker")]
    pub(crate) prefill: f64,
    /// GB a second out of memory
    #[arg(long, value_name = "RATE", default_value_t = 8.0, help_heading = "Worker")]
    pub(crate) memory_rate: f64,
    /// GB a second out of the disk
    #[arg(long, value_name = "RATE", default_value_t = 2.0, help_heading = "Worker")]
    pub(crate) disk_rate: f64,
    /// GB a second that each worker gets out of the object store
    #[arg(long, value_name = "RATE", default_value_t = 0.1, help_heading = "Worker")]
    pub(crate) remote_rate: f64,
    /// Seconds until the object store's first byte
    #[arg(long, value_name = "SECONDS", default_value_t = 0.03, help_heading = "Worker")]
    pub(crate) remote_latency: f64,
    /// Whether a request loads while another one computes, as a worker does; without, loading keeps the worker from all else
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "true",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), hide_possible_values = true, help_heading = "Worker")]
    pub(crate) overlap: bool,
    /// How a worker comes by missing chunks: quickest (fetched or prefilled, by the earlier first token of the request) or count-queue
    /// (prefilled only if that gains more time than it takes from the requests that wait behind)
    #[arg(
        long,
        value_name = "RULE",
        default_value = "quickest",
        value_enum,
        hide_possible_values = true,
        help_heading = "Worker"
    )]
    pub(crate) missing: Missing,
    /// Share by which a request takes longer or shorter than the rates say, at most
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, help_heading = "Worker")]
    pub(crate) jitter: f64,

    /// Seconds between a worker's states; 0 for one at every change
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, help_heading = "Index")]
    pub(crate) report: f64,
    /// Seconds that a state takes to the gateways; each is simulated
    #[arg(long, value_name = "SECONDS", value_delimiter = ',', default_value = "0", help_heading = "Index")]
    pub(crate) delay: Vec<f64>,
    /// Whether states tell each gateway how many of the worker's requests are its own, which those of real workers do not
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), hide_possible_values = true, help_heading = "Index")]
    pub(crate) own: bool,
}

/// One simulation of a scenario, which may list several workers, rates, delays and rules.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Case {
    pub(crate) workers: usize,
    pub(crate) rate: Amount,
    /// Seconds.
    pub(crate) delay: f64,
    pub(crate) rule: Rule,
}

impl Scenario {
    /// All simulations with a number of workers.
    pub(crate) fn cases(&self, workers: usize) -> impl Iterator<Item = Case> {
        self.rate.iter().flat_map(move |rate| {
            self.delay.iter().flat_map(move |delay| {
                self.rules.iter().map(move |rule| Case { workers, rate: *rate, delay: *delay, rule: *rule })
            })
        })
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(&self) -> f64 {
        f64::from(self.tokens) * self.bytes_per_token as f64
    }

    /// # Errors
    /// If a value makes no sense alone or beside the others.
    pub(crate) fn validate(&self) -> Result<()> {
        let lists = [
            ("workers", self.workers.len()),
            ("rate", self.rate.len()),
            ("rules", self.rules.len()),
            ("delay", self.delay.len()),
        ];
        for (name, values) in lists {
            ensure!(values > 0, "--{name}: give one at least");
        }
        for workers in &self.workers {
            ensure!((1..=65_536).contains(workers), "--workers: give 1 to 65536");
            let corpus = self.corpus.of(*workers);
            ensure!(
                corpus <= 1e8,
                "--corpus: at most 100,000,000 chunks, and {workers} workers make {corpus:.0}"
            );
            ensure!(
                corpus >= self.chunks as f64,
                "--corpus: {corpus:.0} chunks cannot give a request {} different ones",
                self.chunks
            );
        }
        let counts = [("gateways", self.gateways), ("chunks", self.chunks), ("tokens", self.tokens as usize)];
        for (name, value) in counts {
            ensure!((1..=1_000_000).contains(&value), "--{name}: give 1 to 1000000");
        }
        ensure!(self.requests > 0, "--requests: give 1 at least");
        ensure!(self.bytes_per_token > 0, "--bytes-per-token: give 1 at least");
        ensure!(self.memory >= self.chunks, "--memory: a request's {} chunks have to find room", self.chunks);
        let shares = [("warmup", self.warmup), ("few", self.few), ("hot", self.hot), ("jitter", self.jitter)];
        for (name, value) in shares {
            ensure!((0.0..1.0).contains(&value), "--{name}: give a share from 0 to below 1");
        }
        ensure!(self.few > 0.0 && self.hot > 0.0, "--few, --hot: give shares above 0");
        ensure!((0.0..=10.0).contains(&self.charge), "--charge: give 0 to 10");
        let positive = [
            ("prefill", self.prefill),
            ("memory-rate", self.memory_rate),
            ("disk-rate", self.disk_rate),
            ("remote-rate", self.remote_rate),
        ];
        for (name, value) in positive {
            ensure!(value.is_finite() && value > 0.0, "--{name}: give a number above 0");
        }
        let times = self.delay.iter().map(|delay| ("delay", *delay));
        for (name, value) in times.chain([("remote-latency", self.remote_latency), ("report", self.report)]) {
            ensure!((0.0..=1e6).contains(&value), "--{name}: give seconds, 0 to 1000000");
        }
        Ok(())
    }
}
