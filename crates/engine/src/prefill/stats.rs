//! Counts and times of a prefill, taken while it runs.

use std::time::Duration;

use refrain_kv::Span;
use refrain_model::Config;

use super::capture::AttentionMap;

/// Work of a prefill.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillStats {
    /// Document tokens whose keys and values were computed, by layer of the last pass.
    pub(crate) document_rows: Vec<usize>,
    /// Rows that probes projected, summed over their layers.
    pub(crate) probe_rows: usize,
    /// Positions computed at the last layer, before it shrinks to the last token; ascending.
    pub(crate) final_rows: Vec<u32>,
    /// Positions that were read from the cache at one layer at least.
    pub(crate) cached_tokens: usize,
    /// First tokens of the prompt that came out of the prefix cache.
    pub(crate) prefix_tokens: usize,
    /// Floating point operations of products and attention, probes included.
    pub(crate) operations: f64,
    /// The most bytes of keys and values that were allocated at a time.
    pub(crate) kv_bytes_peak: usize,
    /// Time that the method took to choose tokens: probes, reports and decisions.
    pub(crate) selecting: Duration,
    /// Tokens of the prompt that attention has before it when the first token is chosen.
    pub(crate) kept_tokens: usize,
    /// The order in which the method has put the prompt's chunks, where it is another.
    pub(crate) order: Option<Vec<usize>>,
    /// Times that the method met a case that its paper leaves open.
    pub(crate) ambiguous_cases: usize,
    /// Attention of the question to every document token at layer 1, if it was asked for.
    pub(crate) attention: Option<Vec<f32>>,
    /// The question's attention maps by layer, if they were asked for.
    pub(crate) maps: Vec<AttentionMap>,
    /// Time that these took, which is no part of the prefill.
    pub(crate) capturing: Duration,
}

impl PrefillStats {
    /// Statistics of the pass after a probe: those of the probe that count for the whole prefill.
    pub(crate) fn after_probe(probe: PrefillStats) -> PrefillStats {
        PrefillStats {
            probe_rows: probe.probe_rows,
            operations: probe.operations,
            selecting: probe.selecting,
            capturing: probe.capturing,
            ..PrefillStats::default()
        }
    }

    /// Counts a layer at which `projected` tokens were projected and `continuing` ones went on, seeing `keys` keys together.
    pub(crate) fn count_layer(&mut self, config: &Config, projected: usize, continuing: usize, keys: usize) {
        self.operations += operations(config, projected, continuing, keys);
    }
}

/// Bytes brought in from the store, and the time that it took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadStats {
    pub(crate) bytes: u64,
    /// Summed over threads.
    pub(crate) busy: Duration,
}

/// Floating point operations of a layer: queries, keys and values of `projected` tokens, and all the rest for `continuing` ones
/// that see `keys` keys together (`2P` a token and `4·H·d` a key).
fn operations(config: &Config, projected: usize, continuing: usize, keys: usize) -> f64 {
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let rest = config.hidden * (q + 3 * config.intermediate);
    2.0 * (projected * config.hidden * (q + 2 * kv) + continuing * rest + 2 * q * keys) as f64
}

/// Number of ascending `positions` within `span`.
pub(crate) fn count_within(positions: &[u32], span: Span) -> usize {
    let before = |bound: u32| positions.partition_point(|p| *p < bound);
    before(span.end) - before(span.start)
}
