//! The explicit list of fusion methods with their options.

use std::sync::Arc;

use refrain_kv::stats::Softmax;
use refrain_registry::{Entry, Kind, OptionSpec, Registry};

use crate::{A3, CacheBlend, FullReuse, FusionMethod, LegoLink, Mask, Metric, Pie, Vanilla};

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
            if smoothing.is_multiple_of(2) {
                return Err(options.bad("smoothing", "an odd number of tokens"));
            }
            Ok(Arc::new(A3 {
                ratio: options.get("ratio")?,
                smoothing,
                softmax: options.pick("softmax", &[Softmax::Concatenated, Softmax::PerHead]),
                check_layer: options.get("check_layer")?,
            }))
        },
    },
];

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
