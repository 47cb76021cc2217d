//! Measures of fidelity and cost.

use super::table::Unit;
use crate::{Cost, Fidelity, VanillaCost};

/// A quantity of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    /// In the comma-separated values.
    pub name: &'static str,
    /// Over a column.
    pub title: &'static str,
    pub unit: Unit,
    pub of: Aggregate,
}

/// Where it comes from, and how samples become one number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Aggregate {
    /// The unweighted mean over tasks of the mean over samples.
    Mean(fn(&Fidelity) -> Option<f64>),
    /// The median over samples of a fidelity: a few samples with another answer do not hide the others.
    MedianFidelity(fn(&Fidelity) -> Option<f64>),
    /// The median over samples.
    Median(fn(&Cost) -> Option<f64>),
    /// The median over samples, each against vanilla's cost of that sample.
    Against(fn(&Cost, &VanillaCost) -> Option<f64>),
    /// The mean of task scores over vanilla's.
    Relative,
    /// The share of vanilla's wholly right answers that the variant gets wholly right too.
    RightKept,
}

const fn measure(name: &'static str, title: &'static str, unit: Unit, of: Aggregate) -> Measure {
    Measure { name, title, unit, of }
}

pub(super) const RELATIVE: Measure =
    measure("score_of_vanilla", "Score, share of Vanilla's", Unit::Percent, Aggregate::Relative);
pub(super) const RIGHT_KEPT: Measure =
    measure("right_kept", "Right answers kept", Unit::Percent, Aggregate::RightKept);
pub(super) const KL: Measure = measure("kl", "KL (nats)", Unit::Nats, Aggregate::Mean(|f| Some(f.kl)));
pub(super) const TOP1: Measure =
    measure("top1", "Same likeliest token", Unit::Percent, Aggregate::Mean(|f| Some(f.top1)));
pub(super) const HIT_RATE_40: Measure =
    measure("hit_rate_40", "Hit rate, 40 tokens", Unit::Percent, Aggregate::Mean(|f| f.hit_rate_40));
pub(super) const HIT_RATE: Measure =
    measure("hit_rate", "Hit rate, as many as recomputed", Unit::Percent, Aggregate::Mean(|f| f.hit_rate));
pub(super) const TTFT: Measure =
    measure("ttft", "TTFT", Unit::Seconds, Aggregate::Median(|c| c.timed(c.ttft)));
pub(super) const TTFT_SPEEDUP: Measure = measure(
    "ttft_speedup",
    "TTFT speed-up",
    Unit::Times,
    Aggregate::Against(|c, vanilla| Some(vanilla.ttft / c.timed(c.ttft)?)),
);
pub(super) const TPOT_SPEEDUP: Measure = measure(
    "tpot_speedup",
    "TPOT speed-up",
    Unit::Times,
    Aggregate::Against(|c, vanilla| Some(vanilla.tpot? / c.tpot?)),
);
pub(super) const RECOMPUTED: Measure = measure(
    "recompute_ratio",
    "Recompute ratio",
    Unit::Percent,
    Aggregate::Median(|c| of_documents(c, c.recompute_ratio)),
);
/// Records of earlier programs have no charge: their share of recomputed rows stands for it.
pub(super) const CHARGED: Measure = measure(
    "charged_ratio",
    "Charged",
    Unit::Percent,
    Aggregate::Median(|c| {
        of_documents(c, if c.charged_ratio > 0.0 { c.charged_ratio } else { c.recompute_ratio })
    }),
);
pub(super) const KL_FIRST: Measure =
    measure("kl_first", "KL of the first token", Unit::Nats, Aggregate::Mean(|f| Some(f.kl_first)));
pub(super) const KL_MEDIAN: Measure =
    measure("kl_median", "KL, median", Unit::Nats, Aggregate::MedianFidelity(|f| Some(f.kl)));
pub(super) const KEPT: Measure =
    measure("sequence_ratio", "Sequence ratio", Unit::Percent, Aggregate::Median(|c| Some(c.sequence_ratio)));
pub(super) const KV: Measure =
    measure("kv_bytes", "KV bytes", Unit::Bytes, Aggregate::Median(|c| Some(c.kv_bytes as f64)));
pub(super) const KV_SHARE: Measure = measure(
    "kv_of_full",
    "KV, share of full",
    Unit::Percent,
    Aggregate::Median(|c| share(c.kv_bytes, c.kv_bytes_full)),
);
pub(super) const KV_SHARE_QUERY: Measure = measure(
    "kv_query_heads_of_full",
    "KV with a cache a query head, share of full",
    Unit::Percent,
    Aggregate::Median(|c| share(c.kv_bytes_query_heads, c.kv_bytes_full)),
);

pub(super) const AT_REST: Measure = measure(
    "rest_bytes_per_token",
    "At rest, a token",
    Unit::Bytes,
    Aggregate::Median(|c| {
        (c.bytes_loaded > 0 && c.document_bytes > 0)
            .then(|| c.document_bytes as f64 / c.document_tokens as f64)
    }),
);

/// The measure of a name.
pub(super) fn named(name: &str) -> Option<Measure> {
    ALL.iter().chain([&RELATIVE]).find(|measure| measure.name == name).copied()
}

/// All measures of the comma-separated values.
pub(super) const ALL: &[Measure] = &[
    RIGHT_KEPT,
    KL,
    KL_MEDIAN,
    KL_FIRST,
    TOP1,
    HIT_RATE_40,
    HIT_RATE,
    TTFT,
    TTFT_SPEEDUP,
    measure("compute_ttft", "", Unit::Seconds, Aggregate::Median(|c| c.timed(c.compute_ttft))),
    measure(
        "compute_ttft_speedup",
        "",
        Unit::Times,
        Aggregate::Against(|c, v| Some(v.compute_ttft / c.timed(c.compute_ttft)?)),
    ),
    measure("tpot", "", Unit::Seconds, Aggregate::Median(|c| c.tpot)),
    TPOT_SPEEDUP,
    RECOMPUTED,
    CHARGED,
    KEPT,
    measure(
        "operations_of_vanilla",
        "",
        Unit::Percent,
        Aggregate::Against(|c, v| Some(c.operations / v.operations)),
    ),
    KV,
    measure(
        "kv_bytes_query_heads",
        "",
        Unit::Bytes,
        Aggregate::Median(|c| Some(c.kv_bytes_query_heads as f64)),
    ),
    measure("kv_bytes_peak", "", Unit::Bytes, Aggregate::Median(|c| Some(c.kv_bytes_peak as f64))),
    KV_SHARE,
    KV_SHARE_QUERY,
    measure("side_bytes", "", Unit::Bytes, Aggregate::Median(|c| Some(c.side_bytes as f64))),
    measure("bytes_loaded", "", Unit::Bytes, Aggregate::Median(|c| Some(c.bytes_loaded as f64))),
    AT_REST,
    measure("prompt_tokens", "", Unit::Count, Aggregate::Median(|c| Some(c.prompt_tokens as f64))),
    measure("answer_tokens", "", Unit::Count, Aggregate::Median(|c| Some(c.answer_tokens as f64))),
];

/// A share of document tokens; none of a prompt without documents.
fn of_documents(cost: &Cost, share: f64) -> Option<f64> {
    (cost.document_tokens > 0).then_some(share)
}

fn share(part: usize, whole: usize) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
