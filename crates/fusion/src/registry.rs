//! The list of fusion methods.

use std::sync::Arc;

use refrain_registry::{Entry, Options, Registry, option_specs, read_options};

use crate::{
    A3, CacheBlend, Drift, FullReuse, FusionMethod, InfLlm, InfoFlow, LegoLink, MultiInfLlm, Pie, ProphetKv,
    RelaxKv, SamKv, Scout, Vanilla,
};

/// All fusion methods, in the order in which they are shown.
pub static METHODS: Registry<Arc<dyn FusionMethod>> = Registry { what: "fusion method", entries: ENTRIES };

const ENTRIES: &[Entry<Arc<dyn FusionMethod>>] = &[
    method::<Vanilla>("full prefill, nothing reused; what the others are measured against", ""),
    method::<FullReuse>(
        "reuse every chunk as it was cached, positions included",
        "https://arxiv.org/abs/2511.17560",
    ),
    method::<Pie>(
        "reuse every chunk, keys rotated to their places in the prompt",
        "https://arxiv.org/abs/2407.03157",
    ),
    method::<LegoLink>("recompute both ends of every chunk", "https://arxiv.org/abs/2410.15332"),
    method::<CacheBlend>(
        "recompute the tokens whose values at layer 1 deviate most from the cache",
        "https://arxiv.org/abs/2405.16444",
    ),
    method::<A3>(
        "recompute the tokens that the question attends to at layer 1",
        "https://arxiv.org/abs/2511.17560",
    ),
    method::<ProphetKv>(
        "run the question over the reused keys and values first, and recompute the tokens that it attends to",
        "https://arxiv.org/abs/2602.02579",
    ),
    method::<RelaxKv>(
        "recompute each token up to the highest layer at which the question, run over the reused keys and values, attends to it",
        "https://arxiv.org/abs/2609.33503",
    ),
    method::<InfoFlow>(
        "run the question over the reused keys and values up to middle layers, and recompute the tokens that it attends to there",
        "https://arxiv.org/abs/2603.05353",
    ),
    method::<Scout>(
        "run the question over the reused keys and values first, and recompute the tokens that its last row attends to",
        "",
    ),
    method::<Drift>(
        "scout, and correct the tokens that are not recomputed by what the recomputed ones of their chunk show",
        "",
    ),
    method::<SamKv>(
        "keep and recompute the ends of every document and the blocks that the question points at",
        "https://arxiv.org/abs/2508.11661",
    ),
    method::<InfLlm>(
        "compute everything; rows see the first tokens, those near them, and blocks that they retrieve",
        "https://arxiv.org/abs/2402.04617",
    ),
    method::<MultiInfLlm>(
        "recompute nothing; the question and the answer see blocks of all documents that they retrieve",
        "https://arxiv.org/abs/2508.11661",
    ),
];

/// The entry of a method: a line on what it does, and where it is published.
const fn method<M: FusionMethod + Options + 'static>(
    description: &'static str,
    source: &'static str,
) -> Entry<Arc<dyn FusionMethod>> {
    Entry::new(M::NAME, description, source, option_specs::<M>, |values| {
        Ok(Arc::new(read_options::<M>(values)?))
    })
}

#[cfg(test)]
mod tests {
    use refrain_registry::value_text;

    use super::*;

    #[test]
    fn every_entry_builds_with_its_defaults_and_refuses_what_is_not_its_own() {
        for entry in METHODS.entries {
            entry.with([]).unwrap();
            let error = entry.with([("colour", "red")]).unwrap_err().to_string();
            assert!(error.contains(entry.name) && error.contains("colour"), "{error}");
            for option in entry.options() {
                entry.with([(option.name.as_str(), value_text(&option.default).as_str())]).unwrap();
                assert!(entry.with([(option.name.as_str(), "-1")]).is_err(), "{}", option.name);
                assert!(!option.help.is_empty(), "{}", option.name);
            }
        }
    }

    #[test]
    fn text_gives_method_and_options() {
        let method = METHODS.parse("a3:ratio=0.3,softmax=per_head,smoothing=1").unwrap();
        assert!(
            format!("{method:?}").contains("ratio: 0.3, charge: 0.0, smoothing: 1, softmax: PerHead"),
            "{method:?}"
        );
        assert!(format!("{:?}", METHODS.parse("lego-link:head-only").unwrap()).contains("head_only: true"));
        assert!(METHODS.parse("a4").unwrap_err().to_string().contains("cache_blend"));
        assert!(METHODS.parse("a3:smoothing=4").unwrap_err().to_string().contains("odd"));
        assert!(METHODS.parse("a3:ratio=1.5").unwrap_err().to_string().contains("from 0 to 1"));
    }
}
