//! What is measured beside scores.

use super::table::Unit;
use crate::{Cost, Fidelity};

/// A quantity of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    /// In the comma-separated values.
    pub name: &'static str,
    /// Over a column.
    pub title: &'static str,
    pub unit: Unit,
    pub of: Of,
}

/// Where it comes from, and how samples become one number.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    /// The unweighted mean over tasks of the mean over samples.
    Mean(fn(&Fidelity) -> Option<f64>),
    /// The median over samples.
    Median(fn(&Cost) -> Option<f64>),
    /// The median over samples, against vanilla's cost of the same sample.
    Against(fn(&Cost, &Cost) -> Option<f64>),
    /// The mean of task scores over vanilla's.
    Relative,
}

const fn measure(name: &'static str, title: &'static str, unit: Unit, of: Of) -> Measure {
    Measure { name, title, unit, of }
}

pub(super) const RELATIVE: Measure =
    measure("score_of_vanilla", "Score, share of Vanilla's", Unit::Percent, Of::Relative);
pub(super) const KL: Measure = measure("kl", "KL (nats)", Unit::Nats, Of::Mean(|f| Some(f.kl)));
pub(super) const TOP1: Measure =
    measure("top1", "Same likeliest token", Unit::Percent, Of::Mean(|f| Some(f.top1)));
pub(super) const HIT_RATE_40: Measure =
    measure("hit_rate_40", "Hit rate, 40 tokens", Unit::Percent, Of::Mean(|f| f.hit_rate_40));
pub(super) const HIT_RATE: Measure =
    measure("hit_rate", "Hit rate, as many as recomputed", Unit::Percent, Of::Mean(|f| f.hit_rate));
pub(super) const TTFT: Measure = measure("ttft", "TTFT", Unit::Seconds, Of::Median(|c| Some(c.ttft)));
pub(super) const TTFT_SPEEDUP: Measure = measure(
    "ttft_speedup",
    "TTFT speed-up",
    Unit::Times,
    Of::Against(|c, vanilla| Some(vanilla.ttft / c.ttft)),
);
pub(super) const TPOT_SPEEDUP: Measure = measure(
    "tpot_speedup",
    "TPOT speed-up",
    Unit::Times,
    Of::Against(|c, vanilla| Some(vanilla.tpot? / c.tpot?)),
);
pub(super) const RECOMPUTED: Measure =
    measure("recompute_ratio", "Recompute ratio", Unit::Percent, Of::Median(|c| Some(c.recompute_ratio)));
pub(super) const KEPT: Measure =
    measure("sequence_ratio", "Sequence ratio", Unit::Percent, Of::Median(|c| Some(c.sequence_ratio)));
pub(super) const KV: Measure =
    measure("kv_bytes", "KV bytes", Unit::Bytes, Of::Median(|c| Some(c.kv_bytes as f64)));
pub(super) const KV_SHARE: Measure = measure(
    "kv_of_full",
    "KV, share of full",
    Unit::Percent,
    Of::Median(|c| share(c.kv_bytes, c.kv_bytes_full)),
);
pub(super) const KV_SHARE_QUERY: Measure = measure(
    "kv_query_heads_of_full",
    "KV with a cache a query head, share of full",
    Unit::Percent,
    Of::Median(|c| share(c.kv_bytes_query_heads, c.kv_bytes_full)),
);

pub(super) const STORED: Measure = measure(
    "rest_bytes_per_token",
    "Stored, a token",
    Unit::Bytes,
    Of::Median(|c| {
        (c.bytes_loaded > 0 && c.document_bytes > 0)
            .then(|| c.document_bytes as f64 / c.document_tokens as f64)
    }),
);

/// Everything, as the comma-separated values have it.
pub(super) const ALL: &[Measure] = &[
    KL,
    TOP1,
    HIT_RATE_40,
    HIT_RATE,
    TTFT,
    TTFT_SPEEDUP,
    measure("compute_ttft", "", Unit::Seconds, Of::Median(|c| Some(c.compute_ttft))),
    measure(
        "compute_ttft_speedup",
        "",
        Unit::Times,
        Of::Against(|c, v| Some(v.compute_ttft / c.compute_ttft)),
    ),
    measure("tpot", "", Unit::Seconds, Of::Median(|c| c.tpot)),
    TPOT_SPEEDUP,
    RECOMPUTED,
    KEPT,
    measure(
        "operations_of_vanilla",
        "",
        Unit::Percent,
        Of::Against(|c, v| Some(c.operations / v.operations)),
    ),
    KV,
    measure("kv_bytes_query_heads", "", Unit::Bytes, Of::Median(|c| Some(c.kv_bytes_query_heads as f64))),
    measure("kv_bytes_peak", "", Unit::Bytes, Of::Median(|c| Some(c.kv_bytes_peak as f64))),
    KV_SHARE,
    KV_SHARE_QUERY,
    measure("side_bytes", "", Unit::Bytes, Of::Median(|c| Some(c.side_bytes as f64))),
    measure("bytes_loaded", "", Unit::Bytes, Of::Median(|c| Some(c.bytes_loaded as f64))),
    STORED,
    measure("prompt_tokens", "", Unit::Count, Of::Median(|c| Some(c.prompt_tokens as f64))),
    measure("answer_tokens", "", Unit::Count, Of::Median(|c| Some(c.answer_tokens as f64))),
];

fn share(part: usize, whole: usize) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
