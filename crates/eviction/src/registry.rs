//! The explicit list of eviction policies with their options.

use std::sync::{Arc, LazyLock};

use refrain_registry::{Entry, Kind, OptionSpec, Options, Registry, Result};

use crate::{
    A3Ex, EvictionPolicy, Full, Fuse, H2o, Keyformer, MorphKv, Pool, Profile, Scissorhands, SnapKv,
    StreamingLlm, Tau,
};

/// A policy, and which heads have a cache of their own.
#[derive(Clone, Debug)]
pub struct Eviction {
    /// The policy.
    pub policy: Arc<dyn EvictionPolicy>,
    /// Whether each query head has a cache of its own, as in the papers' code and figures of memory, and not each KV head.
    pub expanded: bool,
}

impl Eviction {
    /// Full attention.
    pub fn full() -> &'static Eviction {
        static FULL: LazyLock<Eviction> = LazyLock::new(Eviction::default);
        &FULL
    }

    /// Whether this is full attention, one cache a KV head.
    pub fn is_full(&self) -> bool {
        !self.expanded && self.policy.is_full()
    }
}

impl Default for Eviction {
    fn default() -> Self {
        Eviction { policy: Arc::new(Full), expanded: false }
    }
}

/// All eviction policies, in the order in which they are shown.
pub static POLICIES: Registry<Eviction> = Registry { what: "eviction policy", entries: ENTRIES };

const EXPANDED: OptionSpec = OptionSpec {
    name: "expanded",
    help: "a cache for every query head, as the papers' figures of memory count, and not for every KV head",
    kind: Kind::Switch,
    default: "false",
};

const CAPACITY: OptionSpec = OptionSpec {
    name: "capacity",
    help: "tokens that stay in the cache",
    kind: Kind::Count,
    default: "1024",
};

/// Most neighbours over which scores are pooled.
const MOST_POOLED: usize = 1023;

const KERNEL: OptionSpec = OptionSpec {
    name: "kernel",
    help: "neighbours over which scores are pooled (odd; 1 for none)",
    kind: Kind::Count,
    default: "5",
};

const POOL: OptionSpec = OptionSpec {
    name: "pool",
    help: "whether scores are pooled by mean or maximum",
    kind: Kind::Choice(&["avg", "max"]),
    default: "avg",
};

const fn count(name: &'static str, help: &'static str, default: &'static str) -> OptionSpec {
    OptionSpec { name, help, kind: Kind::Count, default }
}

const fn ratio(name: &'static str, help: &'static str, default: &'static str) -> OptionSpec {
    OptionSpec { name, help, kind: Kind::Ratio, default }
}

const fn number(name: &'static str, help: &'static str, default: &'static str) -> OptionSpec {
    OptionSpec { name, help, kind: Kind::Number, default }
}

const ENTRIES: &[Entry<Eviction>] = &[
    Entry {
        name: "full",
        summary: "keep every token; what the others are measured against",
        paper: "",
        options: &[EXPANDED],
        build: |options| built(options, Full),
    },
    Entry {
        name: "snap_kv",
        summary: "once, keep what the prompt's last tokens attend to",
        paper: "https://arxiv.org/abs/2404.14469",
        options: &[
            CAPACITY,
            count(
                "window",
                "tokens at the prompt's end whose attention scores the others, and that stay",
                "32",
            ),
            KERNEL,
            POOL,
            EXPANDED,
        ],
        build: |options| {
            let (kernel, pool) = pooling(options)?;
            let (capacity, window) = (options.get("capacity")?, options.get("window")?);
            built(options, SnapKv { capacity, window, kernel, pool })
        },
    },
    Entry {
        name: "a3_ex",
        summary: "once, keep system part, question, and what the question attends to",
        paper: "https://arxiv.org/abs/2511.17560",
        options: &[
            CAPACITY,
            count(
                "window",
                "tokens of the question whose attention scores (0: all, at most half the capacity)",
                "0",
            ),
            KERNEL,
            POOL,
            EXPANDED,
        ],
        build: |options| {
            let (kernel, pool) = pooling(options)?;
            built(
                options,
                A3Ex { capacity: options.get("capacity")?, window: given(options, "window")?, kernel, pool },
            )
        },
    },
    Entry {
        name: "h2o",
        summary: "keep the tokens that received most attention so far, and the most recent",
        paper: "https://arxiv.org/abs/2306.14048",
        options: &[
            CAPACITY,
            count("recent", "most recent tokens among those that stay (0: half of the capacity)", "0"),
            OptionSpec {
                name: "budget",
                help: "real_drop: numbers of tokens; hf: shares of the prompt, as in the published code",
                kind: Kind::Choice(&["real_drop", "hf"]),
                default: "real_drop",
            },
            ratio(
                "heavy_ratio",
                "share of the prompt's tokens that stay for their attention, with budget=hf",
                "0.1",
            ),
            ratio("recent_ratio", "share of the prompt's tokens that stay as recent, with budget=hf", "0.1"),
            OptionSpec {
                name: "normalise",
                help: "divide a token's sum by the rows that could see it, as kvpress does",
                kind: Kind::Switch,
                default: "false",
            },
            EXPANDED,
        ],
        build: |options| {
            let shares = (options.get("heavy_ratio")?, options.get("recent_ratio")?);
            let ratios = options.pick("budget", &[None, Some(shares)]);
            let normalise = options.get("normalise")?;
            let (capacity, recent) = (options.get("capacity")?, given(options, "recent")?);
            built(options, H2o { capacity, recent, ratios, normalise })
        },
    },
    Entry {
        name: "streaming_llm",
        summary: "keep the first and the most recent tokens",
        paper: "https://arxiv.org/abs/2309.17453",
        options: &[
            CAPACITY,
            count("sinks", "tokens at the start that stay", "4"),
            OptionSpec {
                name: "positions",
                help: "rotate keys by their places in the cache (the paper's), or by their original positions",
                kind: Kind::Choice(&["reindex", "original"]),
                default: "reindex",
            },
            EXPANDED,
        ],
        build: |options| {
            let reindex = options.pick("positions", &[true, false]);
            let (capacity, sinks) = (options.get("capacity")?, options.get("sinks")?);
            built(options, StreamingLlm { capacity, sinks, reindex })
        },
    },
    Entry {
        name: "scissorhands",
        summary: "drop, many at a time, what was most often unimportant to recent tokens",
        paper: "https://arxiv.org/abs/2305.17118",
        options: &[
            CAPACITY,
            count("history", "recent attention rows that are looked back at", "400"),
            count("recent", "most recent tokens that stay", "10"),
            ratio("drop", "share of the capacity that is dropped at a time", "0.5"),
            EXPANDED,
        ],
        build: |options| {
            let (capacity, history) = (options.get("capacity")?, options.get("history")?);
            let (recent, drop) = (options.get("recent")?, options.get("drop")?);
            built(options, Scissorhands { capacity, history, recent, drop })
        },
    },
    Entry {
        name: "keyformer",
        summary: "keep key tokens by attention with Gumbel noise, and the most recent",
        paper: "https://arxiv.org/abs/2403.09054",
        options: &[
            ratio("keep", "share of the prompt's tokens that stay in the cache", "0.6"),
            count("capacity", "tokens that stay in the cache, instead of a share (0: the share)", "0"),
            ratio("recent_share", "share of those that are the most recent", "0.3"),
            number("tau", "temperature of the scoring softmax for the prompt", "1"),
            number("tau_step", "what is added to it at each step", "0.01"),
            number("tau_end", "its highest value", "2"),
            OptionSpec {
                name: "noise",
                help: "add Gumbel noise to logits",
                kind: Kind::Switch,
                default: "true",
            },
            count("noise_seed", "seed of the noise", "0"),
            EXPANDED,
        ],
        build: |options| {
            let tau = Tau {
                start: options.get("tau")?,
                step: options.get("tau_step")?,
                end: options.get("tau_end")?,
            };
            let seed = options.get::<bool>("noise")?.then_some(options.get("noise_seed")?);
            let (ratio, recent) = (options.get("keep")?, options.get("recent_share")?);
            built(options, Keyformer { ratio, capacity: given(options, "capacity")?, recent, tau, seed })
        },
    },
    Entry {
        name: "morph_kv",
        summary: "keep, at every step, the most recent tokens and what they attend to",
        paper: "https://arxiv.org/abs/2503.00979",
        options: &[
            OptionSpec { default: "600", ..CAPACITY },
            count("window", "most recent tokens that stay and whose attention ranks the others", "30"),
            OptionSpec {
                name: "fuse",
                help: "how their attention is fused",
                kind: Kind::Choice(&["sum", "max"]),
                default: "sum",
            },
            OptionSpec {
                name: "profile",
                help: "what is fused: the paper's weights, or those of the code published for Llama, or for Mistral, Qwen and Phi",
                kind: Kind::Choice(&["paper", "code_llama", "code_mistral"]),
                default: "paper",
            },
            number("evict_after", "prune only when the cache is this many times its capacity", "1"),
            EXPANDED,
        ],
        build: |options| {
            let profiles = [Profile::Paper, Profile::CodeLlama, Profile::CodeMistral];
            built(
                options,
                MorphKv {
                    capacity: options.get("capacity")?,
                    window: options.get("window")?,
                    fuse: options.pick("fuse", &[Fuse::Sum, Fuse::Max]),
                    profile: options.pick("profile", &profiles),
                    evict_after: options.get("evict_after")?,
                },
            )
        },
    },
];

fn built(options: &Options<'_>, policy: impl EvictionPolicy + 'static) -> Result<Eviction> {
    // What contradicts itself does so for any prompt that is long enough.
    let prompt =
        crate::PromptSpans { system: Default::default(), question: refrain_kv::Span::new(0, 1 << 24) };
    policy.budget(&prompt)?;
    Ok(Eviction { policy: Arc::new(policy), expanded: options.get("expanded")? })
}

/// A count, none if it is 0.
fn given(options: &Options<'_>, name: &str) -> Result<Option<usize>> {
    options.get(name).map(|count: usize| (count > 0).then_some(count))
}

fn pooling(options: &Options<'_>) -> Result<(usize, Pool)> {
    let kernel: usize = options.get("kernel")?;
    if kernel.is_multiple_of(2) || kernel > MOST_POOLED {
        return Err(options.bad("kernel", "an odd number of tokens, 1023 at most"));
    }
    Ok((kernel, options.pick("pool", &[Pool::Avg, Pool::Max])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_gives_policy_and_options_and_what_clashes_is_named() {
        let eviction = POLICIES.parse("morph-kv:capacity=40:window=8:fuse=max:expanded").unwrap();
        assert!(eviction.expanded);
        let policy = format!("{:?}", eviction.policy);
        assert!(policy.contains("capacity: 40, window: 8, fuse: Max"), "{policy}");
        for (wrong, first, second) in [
            ("morph_kv:capacity=30", "capacity 30", "window of 30"),
            ("snap_kv:capacity=16", "capacity 16", "window of 32"),
            ("h2o:capacity=4:recent=5", "capacity 4", "5 recent"),
            ("streaming_llm:capacity=3", "capacity 3", "4 sinks"),
            ("scissorhands:capacity=12", "capacity 12", "10 recent"),
            ("morph_kv:evict_after=0.5", "evict_after 0.5", "from 1"),
            ("snap_kv:window=0", "window of 0", "larger"),
            ("scissorhands:history=0", "history of 0", "longer"),
            ("h2o:capacity=2000000", "2000000", "1048576"),
            ("keyformer:tau=3", "from 3", "to 2"),
            ("snap_kv:kernel=4", "kernel", "odd"),
            ("snap_kv:kernel=1025", "kernel", "1023"),
            ("scissorhands:capacity=8000:history=4000", "4000 rows", "at most"),
        ] {
            let error = POLICIES.parse(wrong).unwrap_err().to_string();
            assert!(error.contains(first) && error.contains(second), "{wrong}: {error}");
        }
        assert!(POLICIES.parse("morph").unwrap_err().to_string().contains("morph_kv"));
    }
}
