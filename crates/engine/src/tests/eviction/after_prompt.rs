//! The tokens that stay after a prompt, at every layer, where two ways lead to the same choice.

use std::collections::BTreeSet;

use refrain_fusion::{FusionMethod, LegoLink, Vanilla};
use refrain_kernels::Dtype;

use super::oracles::{everywhere, forced, prompt};
use super::policy;
use crate::Engine;
use crate::cache::{DecodeCache, PromptReport};
use crate::tests::{exact, shared, tiny_engine};

/// The tokens that each layer's heads keep of the prompt, and whether attention sums its weights beside its output.
fn kept(
    engine: &Engine,
    method: &(impl FusionMethod + Clone + 'static),
    spec: &str,
) -> (Vec<BTreeSet<u32>>, bool) {
    let (mut sets, mut beside) = (Vec::<BTreeSet<u32>>::new(), false);
    forced(engine, &prompt(engine), method, &policy(spec), 0, |prefilled| {
        let (bounded, config) = (prefilled.evicting().unwrap(), engine.decoder().config());
        beside = matches!(bounded.wanted_report(0), PromptReport::Mass { .. });
        for layer in 0..config.num_layers() {
            let heads = 0..config.kv_heads;
            sets.extend(heads.map(|head| bounded.positions(layer, head).iter().copied().collect()));
        }
    });
    (sets, beside)
}

/// Asserts that two choices are the same but for neighbours in rank.
fn assert_alike(one: &[BTreeSet<u32>], other: &[BTreeSet<u32>], what: &str) {
    let differ: usize = one.iter().zip(other).map(|(a, b)| a.symmetric_difference(b).count()).sum();
    assert!(differ * 200 <= one.len() * 40, "{what}: {differ} of {}", one.len() * 40);
}

#[test]
fn oracle_9_snap_kv_without_pooling_keeps_what_morph_kv_first_keeps() {
    everywhere(|engine| {
        if engine.decoder().config().layers.iter().any(|layer| layer.window.is_some()) {
            return;
        }
        let kept = |spec: &str| kept(engine, &Vanilla, spec).0;
        let morph = kept("morph_kv:capacity=40,window=10");
        // Weights in MorphKV's ring are rounded to f16.
        assert_alike(&kept("snap_kv:capacity=40,window=10,kernel=1"), &morph, "snap_kv");
        assert_ne!(kept("morph_kv:capacity=40,window=9"), morph, "other rows, other choice");
    });
}

/// `per_query_head` chooses between equal heads where each query head has a KV head of its own, from sums that are not made beside
/// attention.
#[test]
fn sums_beside_attention_are_those_of_a_pass_of_their_own() {
    let engine = tiny_engine("phi3", exact(Dtype::F32));
    assert_eq!(engine.decoder().config().heads, engine.decoder().config().kv_heads);
    for method in [shared(Vanilla), shared(LegoLink::default())] {
        for (spec, is_beside) in [
            ("h2o:capacity=40", true),
            ("keyformer:capacity=40,noise_seed=3", true),
            ("keyformer:capacity=40,noise_seed=3,tau=0.5,tau_step=0.5", false),
        ] {
            let (sets, beside) = kept(&engine, &method, spec);
            assert_eq!(beside, is_beside, "{spec}");
            let (apart, _) = kept(&engine, &method, &format!("{spec},per_query_head"));
            assert_alike(&sets, &apart, &format!("{spec} {method:?}"));
        }
    }
}
