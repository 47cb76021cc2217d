//! Chunks that are prefilled behind a prefix.

use std::sync::Arc;

use refrain_eviction::Eviction;
use refrain_fusion::{
    A3, CacheBlend, Drift, FusionMethod, LegoLink, METHODS, Pie, ProphetKv, SamKv, Vanilla,
};
use refrain_kernels::Dtype;
use refrain_store::Scope;

use super::{everywhere, exact, max_difference, prefill, random_prompt, shared, tiny_engine};
use crate::{Error, Instructions, Prefix};

#[test]
fn behind_the_system_part_one_chunk_alone_is_vanilla_to_the_bit_without_a_recomputed_token() {
    everywhere(|engine| {
        for question in [1, 9, 40] {
            let prompt = random_prompt(engine, 7, &[90], question, 3);
            let engine = engine.behind(&prompt.system).unwrap();
            let vanilla = prefill(&engine, &prompt, &Vanilla, prompt.len());
            let methods: Vec<Arc<dyn FusionMethod>> = vec![
                shared(Pie),
                shared(LegoLink::default()),
                shared(CacheBlend::default()),
                shared(A3::default()),
                shared(ProphetKv::default()),
                shared(Drift::default()),
            ];
            for method in methods {
                let reused = prefill(&engine, &prompt, &method, prompt.len());
                assert_eq!(
                    reused.stats.document_rows,
                    vec![0; reused.stats.document_rows.len()],
                    "{method:?}"
                );
                assert_eq!(reused.logits, vanilla.logits, "{method:?}");
            }
            let alone = prefill(&engine.behind(&[]).unwrap(), &prompt, &Pie, prompt.len());
            assert!(max_difference(&alone.logits, &vanilla.logits) > 1e-3, "the prefix makes no difference");
        }
    });
}

/// The first of several chunks is exact at every layer, and no method chooses a token of it.
#[test]
fn no_token_of_the_exact_chunk_is_recomputed() {
    let engine = tiny_engine("llama", exact(Dtype::F16));
    let prompt = random_prompt(&engine, 7, &[60, 80, 40], 9, 3);
    let behind = engine.behind(&prompt.system).unwrap();
    let first = prompt.chunk_spans()[0];
    for entry in METHODS.entries {
        let method = entry.with([]).unwrap();
        if !method.reuses() || !method.statistics().is_empty() {
            continue;
        }
        let got = prefill(&behind, &prompt, &method, prompt.len());
        assert!(!got.stats.final_rows.iter().any(|row| first.contains(*row)), "{}", entry.name);
    }
    let chosen = |engine| prefill(engine, &prompt, &A3 { ratio: 1.0, ..A3::default() }, prompt.len());
    assert!(chosen(&engine).stats.final_rows.contains(&first.start), "without the prefix it is chosen");
}

/// Layers that a method computes in full leave an exact chunk out, and are full all the same.
#[test]
fn full_layers_do_not_compute_an_exact_chunk() {
    let engine = tiny_engine("llama", exact(Dtype::F16));
    let prompt = random_prompt(&engine, 7, &[60, 80, 40], 9, 3);
    let behind = engine.behind(&prompt.system).unwrap();
    for method in [shared(A3::default()), shared(CacheBlend::default())] {
        let rows = |engine| {
            let stats = prefill(engine, &prompt, &method, prompt.len()).stats;
            (stats.document_rows[..2].to_vec(), stats.exact_tokens)
        };
        assert_eq!(rows(&engine), (vec![180, 180], 0), "{method:?}");
        assert_eq!(rows(&behind), (vec![120, 120], 60), "{method:?}");
        let account = behind.measure(&prompt, &method, Eviction::full()).unwrap();
        assert_eq!(account.full_layers, 2, "{method:?}");
    }
    assert_eq!(behind.measure(&prompt, &shared(Pie), Eviction::full()).unwrap().full_layers, 0);
}

#[test]
fn a_prefix_is_prefilled_for_the_first_chunk_that_is_computed_behind_it() {
    let engine = tiny_engine("llama", exact(Dtype::F16));
    let prompt = random_prompt(&engine, 7, &[50, 30], 9, 3);
    let behind = engine.behind(&prompt.system).unwrap();
    assert!(!behind.prefix().unwrap().is_prefilled());
    behind.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
    assert!(behind.prefix().unwrap().is_prefilled());
    let later = engine.behind(&prompt.system).unwrap();
    later.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
    assert!(!later.prefix().unwrap().is_prefilled(), "all chunks were stored");
}

#[test]
fn chunks_behind_different_prefixes_are_different_chunks_and_the_account_counts_foreign_ones() {
    let engine = tiny_engine("llama", exact(Dtype::F16));
    let prompt = random_prompt(&engine, 7, &[50, 30], 9, 3);
    let other = random_prompt(&engine, 5, &[], 1, 8).system;
    let (own, foreign) = (engine.behind(&prompt.system).unwrap(), engine.behind(&other).unwrap());
    let mut chunks = 0;
    for engine in [&engine, &own, &foreign] {
        engine.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
        let stored = engine.store().list(Scope::All).unwrap().chunks;
        let new = stored.iter().filter(|info| info.prefix == engine.prefix().map(|prefix| prefix.digest));
        assert_eq!(new.filter(|info| info.tokens != prompt.system.len()).count(), 2);
        assert!(stored.len() > chunks, "they share nothing");
        chunks = stored.len();
    }
    let mismatches = |engine: &crate::Engine| {
        let request = crate::GenerateRequest::new(shared(Pie), crate::Sampling::default());
        engine.answer(&prompt, &request, |_| false).unwrap().stats.other_prefix_chunks
    };
    assert_eq!((mismatches(&engine), mismatches(&own), mismatches(&foreign)), (0, 0, 2));
    assert_eq!(engine.before_chunks(), engine.tokenizer().bos().into_iter().collect::<Vec<_>>());
}

/// Methods that keep statistics of a context see it from its first token on, also behind a prefix.
#[test]
fn statistics_are_made_behind_a_prefix_too() {
    let engine = tiny_engine("llama", exact(Dtype::F32));
    let prompt = random_prompt(&engine, 7, &[64, 96], 9, 3);
    let behind = engine.behind(&prompt.system).unwrap();
    behind.ingest_prompt(&prompt, &[shared(SamKv::default())]).unwrap();
    let sam = prefill(&behind, &prompt, &SamKv::default(), prompt.len());
    assert_eq!(sam.load.reused.prefilled, 0, "the ingest has made all that is needed");
    let pie = prefill(&behind, &prompt, &Pie, prompt.len());
    let rows = prefill(&engine.behind(&prompt.system).unwrap(), &prompt, &Pie, prompt.len());
    assert!(max_difference(&pie.logits, &rows.logits) < 1e-4);
}

#[test]
fn prefixes_are_read_and_refused() {
    for text in ["none", "bos", "system", "averaged", "text:notes/head.txt"] {
        assert_eq!(text.parse::<Prefix>().unwrap().to_string(), text);
    }
    for text in ["", "text:", "systems"] {
        assert!(
            text.parse::<Prefix>().unwrap_err().contains("none, bos, system, averaged or text:FILE"),
            "{text}"
        );
    }
    let engine = tiny_engine("llama", exact(Dtype::F16));
    let context = engine.decoder().config().context;
    let error = engine.behind(&vec![5; context / 2 + 1]).unwrap_err();
    assert!(matches!(error, Error::PrefixTooLong { .. }), "{error}");
    let missing = Prefix::Text("no/such/file.txt".into());
    let error = engine.with_prefix(&missing, || Ok(Vec::new())).unwrap_err().to_string();
    assert!(error.contains("no/such/file.txt"), "{error}");
    let system = engine.system_part(&Instructions::default()).unwrap();
    let prompt = engine.prompt(
        &[crate::Document { title: String::new(), text: "A text.".into() }],
        "What is it?",
        &Instructions::default(),
    );
    assert_eq!(system, prompt.unwrap().system);
}
