//! The list of eviction policies.

use std::sync::{Arc, LazyLock};

use refrain_registry::{Entry, Options, Registry, option_specs, read_options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{A3Ex, EvictionPolicy, Full, H2o, Keyformer, MorphKv, Scissorhands, SnapKv, StreamingLlm};

/// A policy, and which heads have a cache of their own.
#[derive(Clone, Debug)]
pub struct Eviction {
    /// The policy.
    pub policy: Arc<dyn EvictionPolicy>,
    /// Whether each query head has a cache of its own, as in the papers' code and figures of memory, and not each KV head.
    pub per_query_head: bool,
}

impl Eviction {
    /// Full attention, with one cache a KV head.
    pub fn full() -> &'static Eviction {
        static FULL: LazyLock<Eviction> = LazyLock::new(Eviction::default);
        &FULL
    }

    /// Whether nothing is ever evicted and each KV head has one cache.
    pub fn is_full(&self) -> bool {
        !self.per_query_head && self.policy.is_full()
    }
}

impl Default for Eviction {
    fn default() -> Self {
        Eviction { policy: Arc::new(Full), per_query_head: false }
    }
}

/// All eviction policies, in the order in which they are shown.
pub static POLICIES: Registry<Eviction> = Registry { what: "eviction policy", entries: ENTRIES };

const ENTRIES: &[Entry<Eviction>] = &[
    policy::<Full>("keep every token; what the others are measured against", ""),
    policy::<SnapKv>(
        "once, keep what the prompt's last tokens attend to",
        "https://arxiv.org/abs/2404.14469",
    ),
    policy::<A3Ex>(
        "once, keep system part, question, and what the question attends to",
        "https://arxiv.org/abs/2511.17560",
    ),
    policy::<H2o>(
        "keep the tokens that received most attention so far, and the most recent",
        "https://arxiv.org/abs/2306.14048",
    ),
    policy::<StreamingLlm>("keep the first and the most recent tokens", "https://arxiv.org/abs/2309.17453"),
    policy::<Scissorhands>(
        "drop, many at a time, what was most often unimportant to recent tokens",
        "https://arxiv.org/abs/2305.17118",
    ),
    policy::<Keyformer>(
        "keep key tokens by attention with Gumbel noise, and the most recent",
        "https://arxiv.org/abs/2403.09054",
    ),
    policy::<MorphKv>(
        "keep, at every step, the most recent tokens and what they attend to",
        "https://arxiv.org/abs/2503.00979",
    ),
];

/// The option that every policy takes beside its own.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct CacheHeads {
    /// Give every query head a cache of its own, as the papers' figures of memory count, and not every KV head.
    per_query_head: bool,
}

impl Options for CacheHeads {
    const NAME: &'static str = "eviction policy";
}

/// The entry of a policy: a line on what it does, and where it is published.
const fn policy<P: EvictionPolicy + Options + 'static>(
    description: &'static str,
    source: &'static str,
) -> Entry<Eviction> {
    let options = || [option_specs::<P>(), option_specs::<CacheHeads>()].concat();
    Entry::new(P::NAME, description, source, options, |values| {
        let policy = Arc::new(read_options::<P>(values)?);
        Ok(Eviction { policy, per_query_head: read_options::<CacheHeads>(values)?.per_query_head })
    })
}

#[cfg(test)]
mod tests {
    use refrain_kv::Span;

    use super::*;
    use crate::PromptSpans;

    #[test]
    fn text_gives_policy_and_options_and_what_clashes_is_named() {
        let eviction = POLICIES.parse("morph-kv:capacity=40,window=8,fuse=max,per-query-head").unwrap();
        assert!(eviction.per_query_head);
        let policy = format!("{:?}", eviction.policy);
        assert!(policy.contains("capacity: 40, window: 8, fuse: Max"), "{policy}");
        for (wrong, first, second) in [
            ("morph_kv:capacity=30", "capacity 30", "window of 30"),
            ("snap_kv:capacity=16", "capacity 16", "window of 32"),
            ("h2o:capacity=4,recent=5", "capacity 4", "5 recent"),
            ("streaming_llm:capacity=3", "capacity 3", "4 sinks"),
            ("scissorhands:capacity=12", "capacity 12", "10 recent"),
            ("morph_kv:evict_after=0.5", "evict_after", "from 1"),
            ("snap_kv:window=0", "window of 0", "larger"),
            ("scissorhands:history=0", "history of 0", "longer"),
            ("h2o:capacity=2000000", "2000000", "1048576"),
            ("keyformer:tau=3", "from 3", "to 2"),
            ("snap_kv:kernel=4", "kernel", "odd"),
            ("snap_kv:kernel=1025", "kernel", "1023"),
            ("scissorhands:capacity=8000,history=4000", "4000 rows", "at most"),
            ("morph_kv:capacity=7950,window=7900", "7900 rows", "at most"),
        ] {
            let error = POLICIES.parse(wrong).unwrap_err().to_string();
            assert!(error.contains(first) && error.contains(second), "{wrong}: {error}");
        }
        assert!(POLICIES.parse("morph").unwrap_err().to_string().contains("morph_kv"));
    }

    /// A layer of a long prompt is looked at in one step, and its rows lie in memory beside it.
    #[test]
    fn a_policy_looks_back_at_so_many_rows_of_a_prompt() {
        let prompt = |n| PromptSpans { system: Span::new(0, 1), question: Span::new(n - 1, n) };
        let budget = |spec: &str, n| POLICIES.parse(spec).unwrap().policy.budget(&prompt(n));
        for (spec, option, at_most) in [
            ("scissorhands:capacity=16,recent=1,history=262144", "history of 262144 rows", "at most 4473"),
            ("morph_kv:capacity=2048,window=2047", "window of 2047 rows", "at most 1342"),
        ] {
            budget(spec, 1000).unwrap();
            let error = budget(spec, if spec.starts_with('m') { 100_000 } else { 30_000 });
            let error = error.unwrap_err().to_string();
            assert!(error.contains(option) && error.contains(at_most), "{spec}: {error}");
        }
        for spec in ["scissorhands", "morph_kv", "morph_kv:capacity=2048,window=2047,profile=code_llama"] {
            budget(spec, 262_144).unwrap();
        }
    }
}
