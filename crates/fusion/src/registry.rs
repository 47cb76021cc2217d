//! The explicit list of fusion methods with their options.

use std::sync::Arc;

use refrain_kv::stats::Softmax;
use refrain_registry::{Entry, Kind, OptionSpec, Options, Registry};

use crate::{
    A3, CacheBlend, Cosine, Extremes, FullReuse, FusionMethod, InfLlm, LegoLink, Mask, Metric, MultiInfLlm,
    Pie, Quota, Recompute, Retrieval, Rotation, Rounding, SamKv, Theta, Update, Vanilla,
};

/// All fusion methods, in the order in which they are shown.
pub static METHODS: Registry<Arc<dyn FusionMethod>> = Registry { what: "fusion method", entries: ENTRIES };

const RATIO: OptionSpec = OptionSpec {
    name: "ratio",
    help: "share of the tokens before the question that is recomputed",
    kind: Kind::Ratio,
    default: "0.15",
};

const ENTRIES: &[Entry<Arc<dyn FusionMethod>>] = &[
    Entry {
        name: "vanilla",
        summary: "full prefill, nothing reused; what the others are measured against",
        paper: "",
        options: &[],
        build: |_| Ok(Arc::new(Vanilla)),
    },
    Entry {
        name: "full_reuse",
        summary: "reuse every chunk as it was cached, positions included",
        paper: "https://arxiv.org/abs/2511.17560",
        options: &[],
        build: |_| Ok(Arc::new(FullReuse)),
    },
    Entry {
        name: "pie",
        summary: "reuse every chunk, keys rotated to their places in the prompt",
        paper: "https://arxiv.org/abs/2407.03157",
        options: &[],
        build: |_| Ok(Arc::new(Pie)),
    },
    Entry {
        name: "lego_link",
        summary: "recompute both ends of every chunk",
        paper: "https://arxiv.org/abs/2410.15332",
        options: &[
            OptionSpec {
                name: "window",
                help: "tokens recomputed at each end of a chunk",
                kind: Kind::Count,
                default: "20",
            },
            OptionSpec {
                name: "head_only",
                help: "recompute only the first tokens of a chunk",
                kind: Kind::Switch,
                default: "false",
            },
        ],
        build: |options| {
            Ok(Arc::new(LegoLink { window: options.get("window")?, head_only: options.get("head_only")? }))
        },
    },
    Entry {
        name: "cache_blend",
        summary: "recompute the tokens whose values at layer 1 deviate most from the cache",
        paper: "https://arxiv.org/abs/2405.16444",
        options: &[
            RATIO,
            OptionSpec {
                name: "metric",
                help: "what deviation is measured on",
                kind: Kind::Choice(&["v_l2", "k_l2", "k_l1"]),
                default: "v_l2",
            },
            OptionSpec {
                name: "gradual",
                help: "shrink the recomputed set with depth, from 1.25 to 0.75 of the ratio",
                kind: Kind::Switch,
                default: "false",
            },
            OptionSpec {
                name: "mask",
                help: "causal mask; bottom_right lets rows see later keys, only to compare with published code",
                kind: Kind::Choice(&["absolute", "bottom_right"]),
                default: "absolute",
            },
        ],
        build: |options| {
            Ok(Arc::new(CacheBlend {
                ratio: options.get("ratio")?,
                metric: options.pick("metric", &[Metric::ValueL2, Metric::KeyL2, Metric::KeyL1]),
                gradual: options.get("gradual")?,
                mask: options.pick("mask", &[Mask::Absolute, Mask::BottomRight]),
            }))
        },
    },
    Entry {
        name: "a3",
        summary: "recompute the tokens that the question attends to at layer 1",
        paper: "https://arxiv.org/abs/2511.17560",
        options: &[
            RATIO,
            OptionSpec {
                name: "smoothing",
                help: "tokens of the moving average over scores (odd; 1 for none)",
                kind: Kind::Count,
                default: "5",
            },
            OptionSpec {
                name: "softmax",
                help: "one softmax over concatenated heads, or one a head",
                kind: Kind::Choice(&["concatenated", "per_head"]),
                default: "concatenated",
            },
            OptionSpec {
                name: "check_layer",
                help: "the layer whose attention is scored, from 0",
                kind: Kind::Count,
                default: "1",
            },
        ],
        build: |options| {
            let smoothing: usize = options.get("smoothing")?;
            if smoothing.is_multiple_of(2) || smoothing > 1023 {
                return Err(options.bad("smoothing", "an odd number of tokens, 1023 at most"));
            }
            Ok(Arc::new(A3 {
                ratio: options.get("ratio")?,
                smoothing,
                softmax: options.pick("softmax", &[Softmax::Concatenated, Softmax::PerHead]),
                check_layer: options.get("check_layer")?,
            }))
        },
    },
    Entry {
        name: "sam_kv",
        summary: "keep and recompute the ends of every document and the blocks that the question points at",
        paper: "https://arxiv.org/abs/2508.11661",
        options: SAM_KV,
        build: sam_kv,
    },
    Entry {
        name: "inf_llm",
        summary: "compute everything; rows see the first tokens, those near them, and blocks that they retrieve",
        paper: "https://arxiv.org/abs/2402.04617",
        options: &[
            count("block", "tokens of a block", "128"),
            count("initial", "tokens at the beginning that every row sees", "128"),
            count("local", "tokens near a row that it sees", "4096"),
            count("topk", "blocks that are retrieved", "16"),
            REPRESENTATIVES,
            count("rows", "rows that retrieve together", "512"),
        ],
        build: |options| {
            Ok(Arc::new(InfLlm {
                sizes: Retrieval {
                    initial: options.get("initial")?,
                    local: at_least_1(options, "local")?,
                    block: at_least_1(options, "block")?,
                    blocks: Some(options.get("topk")?),
                    representatives: at_least_1(options, "representatives")?,
                    rows: at_least_1(options, "rows")?,
                },
            }))
        },
    },
    Entry {
        name: "multi_inf_llm",
        summary: "recompute nothing; the question and the answer see blocks of all documents that they retrieve",
        paper: "https://arxiv.org/abs/2508.11661",
        options: &[
            count("block", "tokens of a block", "64"),
            count("initial", "tokens at the beginning that are always seen", "64"),
            count("local", "tokens near a row that it sees, at least the question's", "128"),
            count("topk", "blocks that are retrieved; 0 for as many as SamKV's sequence ratio allows", "0"),
            REPRESENTATIVES,
        ],
        build: |options| {
            Ok(Arc::new(MultiInfLlm {
                block: at_least_1(options, "block")?,
                initial: options.get("initial")?,
                local: at_least_1(options, "local")?,
                topk: options.get("topk")?,
                representatives: at_least_1(options, "representatives")?,
                like: SamKv::default(),
            }))
        },
    },
];

const REPRESENTATIVES: OptionSpec = count("representatives", "keys whose mean stands for a block", "4");

fn at_least_1(options: &Options<'_>, name: &str) -> refrain_registry::Result<usize> {
    let count = options.get(name)?;
    if count == 0 { Err(options.bad(name, "at least 1")) } else { Ok(count) }
}

const fn count(name: &'static str, help: &'static str, default: &'static str) -> OptionSpec {
    OptionSpec { name, help, kind: Kind::Count, default }
}

const fn switch(name: &'static str, help: &'static str, default: &'static str) -> OptionSpec {
    OptionSpec { name, help, kind: Kind::Switch, default }
}

/// The first of `words` is the default.
const fn choice(name: &'static str, help: &'static str, words: &'static [&'static str]) -> OptionSpec {
    OptionSpec { name, help, kind: Kind::Choice(words), default: words[0] }
}

const SAM_KV: &[OptionSpec] = &[
    count("block", "tokens of a block", "64"),
    count("initial_blocks", "blocks kept at a document's beginning", "1"),
    count("local_blocks", "blocks kept at a document's end", "2"),
    switch("selection", "select blocks in between", "true"),
    switch("bias", "let queries lean towards the other documents (eq. 1)", "true"),
    choice(
        "recompute",
        "what is recomputed: ends and marked tokens, all that is kept, or nothing",
        &["marked", "kept", "none"],
    ),
    switch("filter", "filter the selected blocks across documents", "true"),
    choice("quota", "what the filter divides by the number of documents", &["retrieved", "all"]),
    OptionSpec {
        name: "share",
        help: "share of a document's blocks that is selected, instead of eq. 2; 0 for eq. 2",
        kind: Kind::Ratio,
        default: "0",
    },
    choice("below", "eq. 2 where the kept blocks' score is not above the lowest", &["zero", "one"]),
    choice("rounding", "how fractions of blocks are rounded", &["floor", "nearest", "ceil"]),
    choice(
        "extremes",
        "highest and lowest block: by the document's own attention, or by score",
        &["offline", "online"],
    ),
    choice(
        "rotation",
        "compare queries and keys unrotated, or rotated to the centres of question and block",
        &["none", "centre"],
    ),
    choice("cosine", "what one cosine of eq. 1 is over", &["head", "layer"]),
    switch("normalise", "divide scores by the lengths of query and key before the filter", "true"),
    choice(
        "update",
        "merge recomputed with cached keys and values (eq. 4), or overwrite",
        &["fusion", "overwrite"],
    ),
    choice("theta", "one weight of eq. 4 a token, one a head, or 0.9", &["token", "head", "constant"]),
    count(
        "stable_layers",
        "layers at the end that eq. 3 averages over; 0 for calibrated ones, else the last max(4, L/8)",
        "0",
    ),
];

fn sam_kv(options: &Options<'_>) -> refrain_registry::Result<Arc<dyn FusionMethod>> {
    Ok(Arc::new(SamKv {
        block: at_least_1(options, "block")?,
        initial: options.get("initial_blocks")?,
        local: at_least_1(options, "local_blocks")?,
        selection: options.get("selection")?,
        bias: options.get("bias")?,
        recompute: options.pick("recompute", &[Recompute::Marked, Recompute::Kept, Recompute::None]),
        filter: options.get("filter")?,
        quota: options.pick("quota", &[Quota::Retrieved, Quota::All]),
        share: options.get("share")?,
        below: options.pick("below", &[0.0, 1.0]),
        rounding: options.pick("rounding", &[Rounding::Floor, Rounding::Nearest, Rounding::Ceil]),
        extremes: options.pick("extremes", &[Extremes::Offline, Extremes::Online]),
        rotation: options.pick("rotation", &[Rotation::None, Rotation::Centre]),
        cosine: options.pick("cosine", &[Cosine::Head, Cosine::Layer]),
        normalise: options.get("normalise")?,
        update: options.pick("update", &[Update::Fusion, Update::Overwrite]),
        theta: options.pick("theta", &[Theta::Token, Theta::Head, Theta::Constant]),
        stable_layers: options.get("stable_layers")?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_builds_with_its_defaults_and_refuses_what_is_not_its_own() {
        for entry in METHODS.entries {
            entry.with([]).unwrap();
            let error = entry.with([("colour", "red")]).unwrap_err().to_string();
            assert!(error.contains(entry.name) && error.contains("colour"), "{error}");
            for option in entry.options {
                entry.with([(option.name, option.default)]).unwrap();
                assert!(entry.with([(option.name, "-1")]).is_err(), "{}", option.name);
            }
        }
    }

    #[test]
    fn text_gives_method_and_options() {
        let method = METHODS.parse("a3:ratio=0.3:softmax=per_head:smoothing=1").unwrap();
        assert!(format!("{method:?}").contains("ratio: 0.3, smoothing: 1, softmax: PerHead"), "{method:?}");
        assert!(format!("{:?}", METHODS.parse("lego-link:head-only").unwrap()).contains("head_only: true"));
        assert!(METHODS.parse("a4").unwrap_err().to_string().contains("cache_blend"));
        assert!(METHODS.parse("a3:smoothing=4").unwrap_err().to_string().contains("odd"));
        assert!(METHODS.parse("a3:ratio=1.5").unwrap_err().to_string().contains("from 0 to 1"));
    }
}
