//! Oracles 1 to 8: what each method must reproduce exactly, on a tiny random model and on SmolLM2.
//!
//! Each oracle is shown to catch the fault it is there for where one is known: the bottom-right mask.

use refrain_fusion::{
    A3, CacheBlend, FullReuse, FusionMethod, InfoFlow, LayerView, LegoLink, METHODS, Mask, Pass, PassPlan,
    Pie, PrefillInputs, ProphetKv, RelaxKv, Vanilla,
};
use refrain_kernels::{Distance, Dtype, Slice};
use refrain_kv::{Span, stats};

use std::sync::Arc;

use super::{engine, everywhere, exact, max_difference, prefill, random_prompt, shared, tiny, without_bos};
use crate::prefill::Prefilled;
use crate::{Engine, Prompt, Result};

fn prompt(engine: &Engine) -> Prompt {
    random_prompt(engine, 5, &[24, 32, 19], 9, 1)
}

fn run(engine: &Engine, prompt: &Prompt, method: &(impl FusionMethod + Clone + 'static)) -> Prefilled {
    prefill(engine, prompt, method, prompt.len())
}

/// Rotated keys and values of `positions` at a layer.
fn kv(prefilled: &Prefilled, layer: usize, positions: impl IntoIterator<Item = u32>) -> Vec<f32> {
    let cache = prefilled.full();
    let (shape, capacity) = (cache.shape(), cache.capacity());
    let (device, mut out) = (prefilled.cache.decoder.device(), Vec::new());
    for position in positions {
        for buffer in [&cache.layer(layer).k, &cache.layer(layer).v] {
            for head in 0..shape.kv_heads {
                let at = (head * capacity + position as usize) * shape.head_dim;
                out.extend(device.download_kv(buffer, at..at + shape.head_dim).as_slice().floats());
            }
        }
    }
    out
}

/// A method with its choice of tokens overruled.
#[derive(Clone, Debug)]
struct Forced {
    method: Arc<dyn FusionMethod>,
    tokens: Vec<u32>,
    mask: Mask,
}

impl FusionMethod for Forced {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> refrain_fusion::Result<Box<dyn Pass>> {
        let pass = self.method.start(inputs)?;
        let plan = PassPlan { mask: self.mask, ..pass.plan().clone() };
        let plan = match plan.checks.is_empty() {
            true => PassPlan { tokens: self.tokens.clone(), ..plan },
            false => plan,
        };
        Ok(Box::new(ForcedPass { plan, tokens: self.tokens.clone() }))
    }
}

#[derive(Debug)]
struct ForcedPass {
    plan: PassPlan,
    tokens: Vec<u32>,
}

impl Pass for ForcedPass {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn observe(&mut self, _: &LayerView<'_>) -> refrain_fusion::Result<Vec<u32>> {
        Ok(self.tokens.clone())
    }
}

/// Every method that recomputes document tokens.
fn recomputing() -> Vec<Arc<dyn FusionMethod>> {
    vec![
        shared(LegoLink::default()),
        shared(CacheBlend::default()),
        shared(A3::default()),
        shared(CacheBlend { gradual: true, ..CacheBlend::default() }),
    ]
}

fn with_question(prompt: &Prompt, rows: impl IntoIterator<Item = u32>) -> Vec<u32> {
    rows.into_iter().chain(prompt.question_span().positions()).collect()
}

#[test]
fn oracle_1_layer_0_and_the_system_part_are_exact_from_the_cache() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let (vanilla, pie) = (run(engine, &prompt, &Vanilla), run(engine, &prompt, &Pie));
        let reused = 0..prompt.question_span().start;
        assert_eq!(kv(&vanilla, 0, reused.clone()), kv(&pie, 0, reused));
        for layer in 0..engine.decoder().config().num_layers() {
            let system = || prompt.system_span().positions();
            let error = max_difference(&kv(&vanilla, layer, system()), &kv(&pie, layer, system()));
            assert!(error <= 1e-5, "layer {layer}: {error}");
        }
    });
}

#[test]
fn oracle_2_recomputing_everything_is_vanilla() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let expected = run(engine, &prompt, &Vanilla).logits;
        let all: Vec<Arc<dyn FusionMethod>> = vec![
            shared(A3 { ratio: 1.0, ..A3::default() }),
            shared(A3 { ratio: 1.0, softmax: stats::Softmax::PerHead, check_layer: 0, ..A3::default() }),
            shared(CacheBlend { ratio: 1.0, ..CacheBlend::default() }),
            shared(ProphetKv { ratio: 1.0, charge: 0.0 }),
            shared(RelaxKv { ratio: 1.0, charge: 0.0 }),
            shared(InfoFlow { ratio: 1.0, ..InfoFlow::default() }),
        ];
        for method in all {
            let got = run(engine, &prompt, &method);
            assert!(max_difference(&got.logits, &expected) <= 1e-4, "{method:?}");
            assert_eq!(got.stats.final_rows.len(), prompt.len() - prompt.system.len(), "{method:?}");
        }
        let less = run(engine, &prompt, &A3::default()).logits;
        assert!(max_difference(&less, &expected) > 1e-2, "r = 0.15 should differ on random text");
    });
}

#[test]
fn oracle_3_one_chunk_after_bos_alone_is_exact_and_after_more_is_not() {
    everywhere(|engine| {
        let bos = usize::from(engine.tokenizer().bos().is_some());
        let prompt = random_prompt(engine, bos, &[30], 7, 2);
        let expected = run(engine, &prompt, &Vanilla).logits;
        for method in [shared(Pie), shared(FullReuse)] {
            let error = max_difference(&run(engine, &prompt, &method).logits, &expected);
            assert!(error <= 1e-4, "{method:?}: {error}");
        }
        let longer = random_prompt(engine, bos + 4, &[30], 7, 2);
        let expected = run(engine, &longer, &Vanilla).logits;
        assert!(max_difference(&run(engine, &longer, &Pie).logits, &expected) > 1e-2);
    });
}

/// Without BOS and system part the first chunk stands where it was prefilled, so that nothing of it is corrected.
#[test]
fn oracle_3_the_first_chunk_behind_nothing_is_exact() {
    let engine = without_bos("llama", exact(Dtype::F32));
    let prompt = random_prompt(&engine, 0, &[90, 40], 7, 2);
    let first = prompt.chunk_spans()[0];
    let vanilla = run(&engine, &prompt, &Vanilla);
    for method in ["pie", "drift:charge=0.1", "scout:charge=0.1"] {
        let method = METHODS.parse(method).unwrap();
        let got = run(&engine, &prompt, &method);
        for layer in 0..engine.decoder().config().num_layers() {
            let [vanilla, got] = [&vanilla, &got].map(|of| kv(of, layer, 0..first.end));
            let error = max_difference(&vanilla, &got);
            assert!(error <= 1e-4, "{method:?}, layer {layer}: {error}");
        }
        let tokens = prompt.len() - prompt.question.len();
        let chosen = got.stats.final_rows.iter().filter(|row| **row < tokens as u32);
        assert!(chosen.clone().all(|row| *row >= first.end), "{method:?} computes exact tokens");
    }
}

#[test]
fn oracle_4_lego_link_with_windows_that_meet_is_vanilla() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let expected = run(engine, &prompt, &Vanilla).logits;
        let error = |window, head_only| {
            let method = LegoLink { window, head_only, charge: 0.0 };
            max_difference(&run(engine, &prompt, &method).logits, &expected)
        };
        assert!(error(16, false) <= 1e-4);
        assert!(error(32, true) <= 1e-4);
        assert!(error(2, false) > 1e-2);
    });
}

#[test]
fn oracle_5_a_wholly_recomputed_first_chunk_is_vanilla_at_every_layer() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let vanilla = run(engine, &prompt, &Vanilla);
        let first = prompt.chunk_spans()[0];
        let rows = with_question(&prompt, first.positions());
        for method in recomputing() {
            let error = |mask| {
                let forced = Forced { method: method.clone(), tokens: rows.clone(), mask };
                let got = run(engine, &prompt, &forced);
                let layers = 0..engine.decoder().config().num_layers();
                let at = |layer| {
                    max_difference(&kv(&vanilla, layer, 0..first.end), &kv(&got, layer, 0..first.end))
                };
                layers.map(at).fold(0.0, f32::max)
            };
            assert!(error(Mask::Absolute) <= 1e-4, "{method:?}: {}", error(Mask::Absolute));
            assert!(error(Mask::BottomRight) > 1e-2, "{method:?}: the bottom-right mask went unnoticed");
        }
    });
}

#[test]
fn oracle_6_recomputed_rows_do_not_feel_what_comes_later() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let mut changed = prompt.clone();
        changed.chunks[2] = random_prompt(engine, 5, &[24, 32, 19], 9, 77).chunks[2].clone();
        assert_ne!(prompt, changed);
        let rows = vec![7, 11, 30, 45];
        for method in recomputing() {
            let moved = |mask| {
                let tokens = with_question(&prompt, rows.clone());
                let forced = Forced { method: method.clone(), tokens, mask };
                let (a, b) = (run(engine, &prompt, &forced), run(engine, &changed, &forced));
                (0..engine.decoder().config().num_layers())
                    .any(|l| kv(&a, l, rows.clone()) != kv(&b, l, rows.clone()))
            };
            assert!(!moved(Mask::Absolute), "{method:?}");
            assert!(moved(Mask::BottomRight), "{method:?}: the bottom-right mask went unnoticed");
        }
    });
}

#[test]
fn oracle_7_layers_0_and_1_are_true_and_deeper_ones_are_the_cache() {
    everywhere(|engine| {
        let prompt = prompt(engine);
        let (vanilla, pie) = (run(engine, &prompt, &Vanilla), run(engine, &prompt, &Pie));
        for method in [shared(A3::default()), shared(CacheBlend::default())] {
            let got = run(engine, &prompt, &method);
            let all = || 0..prompt.len() as u32;
            for layer in [0, 1] {
                assert!(max_difference(&kv(&got, layer, all()), &kv(&vanilla, layer, all())) <= 1e-5);
            }
            let untouched: Vec<u32> =
                all().filter(|p| got.stats.final_rows.binary_search(p).is_err()).collect();
            assert!(untouched.len() > prompt.document_tokens() / 2);
            for layer in 2..engine.decoder().config().num_layers() {
                assert_eq!(kv(&got, layer, untouched.clone()), kv(&pie, layer, untouched.clone()));
                let rows = got.stats.final_rows.clone();
                assert_ne!(kv(&got, layer, rows.clone()), kv(&pie, layer, rows));
            }
            assert_eq!(got.stats.document_rows[..2], [prompt.document_tokens(); 2]);
            let selected = (0.15 * (prompt.len() - prompt.question.len()) as f32) as usize;
            assert!(got.stats.document_rows[2..].iter().all(|rows| *rows == selected));
        }
    });
}

/// Squared distances of rows of keys or values.
fn distances(engine: &Engine, fresh: Slice<'_>, cached: Slice<'_>) -> Vec<f32> {
    let (device, width) = (&**engine.decoder().device(), engine.decoder().shape().width());
    let pairs: Vec<(usize, usize)> = (0..fresh.len() / width).map(|row| (row, row)).collect();
    device.row_distances(&device.upload_kv(fresh), cached, width, &pairs, Distance::L2)
}

#[test]
fn oracle_8_the_system_part_does_not_deviate_and_rotation_keeps_key_deviation() -> Result<()> {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = prompt(&engine);
    let (vanilla, pie) = (run(&engine, &prompt, &Vanilla), run(&engine, &prompt, &Pie));
    let shape = engine.decoder().shape();
    // Vanilla's keys and values before RoPE: the whole prompt as one isolated run.
    let fresh = engine.isolated(&prompt.ids(), 0, Dtype::F32);
    let system = engine.isolated(&prompt.system, 0, Dtype::F32);
    let rows = |span: Span| span.range().start * shape.width()..span.range().end * shape.width();
    for layer in 0..shape.layers {
        let value = fresh[layer].1.as_slice().range(rows(prompt.system_span()));
        let deviations = distances(&engine, value, system[layer].1.as_slice());
        assert!(deviations.iter().all(|d| *d <= 1e-10), "layer {layer}: {deviations:?}");
    }
    let span = prompt.chunk_spans()[1];
    let id = engine.chunk_id(&prompt.chunks[1]);
    let chunk = engine.store().get(&id)?.expect("the run above stored it");
    let key = fresh[1].0.as_slice().range(rows(span));
    let before = distances(&engine, key, chunk.layer(1).k());
    assert!(before.iter().sum::<f32>() > 1e-2);
    for (position, before) in span.positions().zip(before) {
        let width = shape.width();
        let (a, b) = (kv(&vanilla, 1, [position]), kv(&pie, 1, [position]));
        let rotated: f32 = a[..width].iter().zip(&b[..width]).map(|(a, b)| (a - b).powi(2)).sum();
        assert!((rotated - before).abs() <= 1e-4 * before.max(1.0), "{rotated} {before}");
    }
    Ok(())
}
