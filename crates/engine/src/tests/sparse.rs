//! Prefill over parts of documents: against a plain evaluation of its rules, and what SamKV must reproduce exactly.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{
    CachedTokens, ChunkStatistics, ContextLayer, FusionMethod, LayerSelection, LegoLink, METHODS, Pass,
    PassPlan, PrefillInputs, Recompute, SamKv, Selection, SelectionPlan, Update, Vanilla,
};
use refrain_kernels::{Buffer, Dtype, Rotary, download, upload};
use refrain_kv::{AuxTensors, Span};
use refrain_model::Workspace;
use refrain_store::{Scope, Store};

use super::{
    KINDS, download_kv, engine, everywhere, exact, forced, max_difference, prefill, prefill_with,
    random_prompt, small, tiny, tiny_engine, tiny_engine_with,
};
use crate::prefill::Prefilled;
use crate::{Engine, GenerateRequest, Prompt, Sampling, Settings};

/// A sparse method whose selection is given.
#[derive(Clone, Debug)]
struct Fixed {
    selection: Selection,
    /// How fresh and cached keys and values are merged, if they are.
    merging: Option<SamKv>,
}

impl FusionMethod for Fixed {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> refrain_fusion::Result<Box<dyn Pass>> {
        let plan = PassPlan::new(inputs.layout.required_tokens());
        if inputs.layout.reusable() == 0 {
            return Ok(Box::new(FixedPass { plan, merging: self.merging }));
        }
        let SelectionPlan { tokens, layers } = self.selection.plan();
        let mut tokens = [plan.tokens, tokens].concat();
        tokens.sort_unstable();
        let cached = CachedTokens::Selected(layers);
        let plan = PassPlan { cached, merges: self.merging.is_some(), ..PassPlan::new(tokens) };
        Ok(Box::new(FixedPass { plan, merging: self.merging }))
    }

    fn keeps_all_tokens(&self) -> bool {
        false
    }

    fn statistics(&self) -> Vec<&dyn ChunkStatistics> {
        vec![self]
    }
}

impl ChunkStatistics for Fixed {
    fn kind(&self) -> String {
        "fixed".to_owned()
    }

    fn last_queries(&self) -> usize {
        1
    }

    fn observe(&self, layer: &ContextLayer<'_>, summary: &mut AuxTensors) {
        if layer.layer == 0 {
            summary.push("tokens", [1], Buffer::F32(vec![layer.tokens() as f32]));
        }
    }
}

/// The pass of a [`Fixed`] method.
#[derive(Debug)]
struct FixedPass {
    plan: PassPlan,
    merging: Option<SamKv>,
}

impl Pass for FixedPass {
    fn plan(&self) -> &PassPlan {
        &self.plan
    }

    fn merge(&self, fresh: &mut [f32], cached: &[f32], head_dim: usize) {
        if let Some(method) = &self.merging {
            method.merge(fresh, cached, head_dim);
        }
    }
}

/// A token's key and value.
type Row = (Vec<f32>, Vec<f32>);
type Rows = BTreeMap<u32, Row>;

/// The rules as they stand, over sets of positions, attention in f64: the last token's logits, and the keys (before RoPE)
/// and values that each layer keeps.
fn reference(engine: &Engine, prompt: &Prompt, method: &Fixed) -> (Vec<f32>, Vec<Rows>) {
    let (decoder, config) = (engine.decoder(), engine.decoder().config());
    let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
    let (width, n) = (kv_heads * d, prompt.len() as u32);
    let ids = prompt.ids();
    let tables = decoder.ropes(prompt.len()).tables(0..n);
    let device = &**decoder.device();
    let mut cached: Vec<Rows> = vec![Rows::new(); config.num_layers()];
    let mut add = |first: u32, kv: Vec<(Buffer, Buffer)>| {
        for (rows, (k, v)) in cached.iter_mut().zip(kv) {
            let (k, v) = (k.as_slice().floats(), v.as_slice().floats());
            for (i, (k, v)) in k.chunks(width).zip(v.chunks(width)).enumerate() {
                rows.insert(first + i as u32, (k.to_vec(), v.to_vec()));
            }
        }
    };
    add(0, engine.isolated(&prompt.system, 0, Dtype::F32));
    for (chunk, span) in prompt.chunks.iter().zip(prompt.chunk_spans()) {
        let bos: Vec<u32> = engine.tokenizer().bos().into_iter().collect();
        let ids = [&bos[..], &chunk.tokens].concat();
        add(span.start, engine.isolated(&ids, bos.len(), Dtype::F32));
    }
    let question = prompt.question_span();
    let always: BTreeSet<u32> = question.positions().collect();
    let layers = &method.selection.layers;
    let deepest = |t: u32| (0..config.num_layers()).rev().find(|l| layers[*l].recomputed.contains(&t));
    let mut x: BTreeMap<u32, Vec<f32>> = BTreeMap::new();
    let first: BTreeSet<u32> =
        always.iter().copied().chain((0..n).filter(|t| deepest(*t).is_some())).collect();
    let mut buffer = device.floats(0);
    let tokens: Vec<u32> = first.iter().copied().collect();
    decoder.embed(tokens.len(), |row| ids[tokens[row] as usize], &mut buffer).unwrap();
    for (t, row) in first.iter().zip(download(device, &buffer).chunks(config.hidden)) {
        x.insert(*t, row.to_vec());
    }
    let rotated = |layer: usize, row: &[f32], t: u32| -> Vec<f32> {
        let Rotary { cos, sin, .. } = tables.layer(layer).slice(t as usize, t as usize + 1);
        let mut out = row.to_vec();
        for (out, row) in out.chunks_mut(d).zip(row.chunks(d)) {
            for i in 0..cos.len() {
                out[i] = row[i] * cos[i] - row[i + cos.len()] * sin[i];
                out[i + cos.len()] = row[i + cos.len()] * cos[i] + row[i] * sin[i];
            }
        }
        out
    };
    let mut work = Workspace::new(device, Dtype::F32);
    let mut all_kept = Vec::new();
    for layer in 0..config.num_layers() {
        let rows: Vec<u32> = x.keys().copied().collect();
        buffer = upload(device, &x.values().flatten().copied().collect::<Vec<f32>>());
        decoder.project(layer, &buffer, 0..rows.len(), &mut work);
        let (k, v) = (download_kv(device, &work.k), download_kv(device, &work.v));
        let q = download(device, &work.q);
        let computed = |t: u32| {
            let i = rows.iter().position(|row| *row == t).unwrap();
            (k[i * width..(i + 1) * width].to_vec(), v[i * width..(i + 1) * width].to_vec())
        };
        // Tokens that this layer holds in the end: system part, question and missing documents, and the kept ones.
        let mut held: Rows =
            (0..prompt.system.len() as u32).map(|t| (t, cached[layer][&t].clone())).collect();
        held.extend(always.iter().map(|t| (*t, computed(*t))));
        for t in layers[layer].spans.iter().flat_map(|span| span.positions()) {
            let mut row = cached[layer][&t].clone();
            if layers[layer].recomputed.contains(&t) {
                let (mut k, mut v) = computed(t);
                if let Some(merging) = &method.merging {
                    merging.merge(&mut k, &row.0, d);
                    merging.merge(&mut v, &row.1, d);
                }
                row = (k, v);
            }
            held.insert(t, row);
        }
        let padding: Rows = rows
            .iter()
            .filter(|t| deepest(**t).is_some_and(|deep| deep > layer) && !held.contains_key(t))
            .map(|t| (*t, cached[layer][t].clone()))
            .collect();
        let last = layer + 1 == config.num_layers();
        let on: Vec<u32> = match last {
            true => vec![n - 1],
            false => rows
                .iter()
                .copied()
                .filter(|t| always.contains(t) || deepest(*t).is_some_and(|deep| deep > layer))
                .collect(),
        };
        let (mut hidden, mut attended) = (Vec::new(), Vec::new());
        for t in &on {
            let i = rows.iter().position(|row| row == t).unwrap();
            let q = rotated(layer, &q[i * heads * d..(i + 1) * heads * d], *t);
            let mut keys: Vec<(u32, &Row)> = held.iter().map(|(t, row)| (*t, row)).collect();
            if !question.contains(*t) {
                keys.extend(padding.iter().map(|(t, row)| (*t, row)));
            }
            keys.retain(|(s, _)| {
                s <= t && config.layers[layer].window.is_none_or(|w| *s as usize + w > *t as usize)
            });
            for head in 0..heads {
                let g = head / (heads / kv_heads) * d;
                let q = &q[head * d..(head + 1) * d];
                let logit = |(s, row): &(u32, &Row)| {
                    let key = rotated(layer, &row.0, *s);
                    let dot: f64 =
                        q.iter().zip(&key[g..g + d]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    (dot * f64::from(config.layers[layer].attention_scale)).exp()
                };
                let weights: Vec<f64> = keys.iter().map(logit).collect();
                let total: f64 = weights.iter().sum();
                attended.extend((0..d).map(|e| {
                    let sum = weights.iter().zip(&keys).map(|(w, (_, row))| w * f64::from(row.1[g + e]));
                    (sum.sum::<f64>() / total) as f32
                }));
            }
            hidden.extend_from_slice(&x[t]);
        }
        buffer = upload(device, &hidden);
        work.attended = upload(device, &attended);
        decoder.finish(layer, &mut buffer, 0..on.len(), (&work, 0));
        x = on
            .iter()
            .zip(download(device, &buffer).chunks(config.hidden))
            .map(|(t, row)| (*t, row.to_vec()))
            .collect();
        all_kept.push(held.into_iter().map(|(t, (k, v))| (t, (rotated(layer, &k, t), v))).collect());
    }
    decoder.logits(&buffer, &mut work);
    (work.logits.to_vec(), all_kept)
}

/// Positions and keys of each layer of the cache that decoding goes on in must be those of the reference.
fn same_cache(prefilled: &Prefilled, kept: &[Rows], d: usize) {
    let bounded = prefilled.evicting().unwrap();
    for (layer, kept) in kept.iter().enumerate() {
        // A layer with a window holds what that reaches.
        let windowed = prefilled.cache.decoder.config().layers[layer].window.is_some();
        for head in 0..if windowed { 0 } else { kept.values().next().unwrap().0.len() / d } {
            let keys = bounded.keys(layer, head);
            assert_eq!(bounded.positions(layer, head).len(), kept.len(), "layer {layer}");
            let expected: Vec<f32> =
                kept.values().flat_map(|(k, _)| k[head * d..(head + 1) * d].to_vec()).collect();
            assert!(max_difference(&keys, &expected) < 1e-4, "layer {layer} head {head}");
        }
    }
}

fn close(found: &[f32], expected: &[f32]) {
    let scale = expected.iter().map(|x| x.abs()).fold(1.0, f32::max);
    let difference = max_difference(found, expected);
    assert!(difference < 1e-4 * scale, "{difference} of {scale}");
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A random half of the documents' runs of four tokens at each layer, of whose tokens a third is computed anew.
fn random_selection(random: &mut Random, prompt: &Prompt, layers: usize) -> Selection {
    let runs_of = |span: Span| {
        let span = span.range();
        (span.start..span.end - 3).step_by(4).map(|start| Span::new(start, start + 4))
    };
    let runs: Vec<Span> = prompt.chunk_spans().into_iter().flat_map(runs_of).collect();
    let count = runs.len() / 2;
    let layer = |_| {
        let mut chosen = runs.clone();
        while chosen.len() > count {
            chosen.remove(random.below(chosen.len()));
        }
        let fresh = chosen.iter().flat_map(|run| run.positions()).collect::<Vec<_>>();
        let fresh = fresh.into_iter().filter(|_| random.below(3) == 0).collect();
        LayerSelection { spans: chosen, recomputed: fresh }
    };
    Selection { layers: (0..layers).map(layer).collect(), ambiguous_cases: 0 }
}

#[test]
fn any_selection_is_computed_by_its_rules() {
    let mut random = Random(5);
    for name in KINDS.into_iter().chain(["qwen2", "mistral_window"]) {
        eprintln!("on {name}");
        for merging in [None, Some(SamKv::default())] {
            let engine = tiny_engine(name, exact(Dtype::F32));
            let mut prompt = random_prompt(&engine, 5, &[24, 32, 19, 24], 9, 1);
            // Two documents may be the same.
            prompt.chunks[3].tokens = prompt.chunks[0].tokens.clone();
            for _ in 0..3 {
                let layers = engine.decoder().config().num_layers();
                let mut drawn = std::iter::repeat_with(|| random_selection(&mut random, &prompt, layers));
                let meets_every_rule = |selection: &Selection| {
                    let layers = selection.plan().layers;
                    let stands_in = layers.iter().any(|layer| layer.documents_see != layer.question_sees);
                    stands_in && layers.windows(2).any(|l| l[1].continuing.len() < l[0].continuing.len())
                };
                let selection = drawn.find(meets_every_rule).unwrap();
                let method = Fixed { selection, merging };
                let mut found = prefill(&engine, &prompt, &method, prompt.len() + 40);
                let (logits, kept) = reference(&engine, &prompt, &method);
                close(&found.logits, &logits);
                same_cache(&found, &kept, engine.decoder().config().head_dim);
                assert_eq!(found.stats.kept_tokens, kept[0].len());
                // Tokens of the answer see what the question saw, and one another, within the layers' windows.
                let mut longer = prompt.clone();
                for token in 0..30 {
                    longer.question.push(token * 3 % 50 + 1);
                    let last = longer.question[longer.question.len() - 1];
                    let logits = found.extend(last);
                    if [0, 9, 17, 29].contains(&token) {
                        close(&logits, &reference(&engine, &longer, &method).0);
                    }
                }
            }
        }
    }
}

/// The paper's four cases (figure 5): what becomes of a token at a layer.
mod figure_5 {
    use super::*;

    /// Document 0 is at 5..29. At every layer its first four tokens are kept and computed anew. Of the others 12..16 are kept
    /// everywhere, 20..24 at even layers and 24..28 at odd ones.
    fn selection(recomputed: impl Fn(usize) -> Vec<u32>, layers: usize) -> Selection {
        let layer = |l| {
            let turn = if l % 2 == 0 { Span::new(20, 24) } else { Span::new(24, 28) };
            let mut fresh: Vec<u32> = (5..9).chain(recomputed(l)).collect();
            fresh.sort_unstable();
            LayerSelection { spans: vec![Span::new(5, 9), Span::new(12, 16), turn], recomputed: fresh }
        };
        Selection { layers: (0..layers).map(layer).collect(), ambiguous_cases: 0 }
    }

    /// Keys of head 0 as they were cached, and what each layer holds of them: `(position, differs from the cached key)`.
    fn outcome(recomputed: impl Fn(usize) -> Vec<u32>) -> (Vec<Vec<(u32, bool)>>, Vec<usize>) {
        let engine = engine(&tiny("llama"), exact(Dtype::F32));
        let prompt = random_prompt(&engine, 5, &[24, 32], 9, 1);
        let layers = engine.decoder().config().num_layers();
        let cached = |selection: &Selection| {
            let unchanged =
                selection.layers.iter().map(|kept| LayerSelection { recomputed: Vec::new(), ..kept.clone() });
            Fixed { selection: Selection { layers: unchanged.collect(), ambiguous_cases: 0 }, merging: None }
        };
        let selection = selection(recomputed, layers);
        let before = prefill(&engine, &prompt, &cached(&selection), prompt.len() + 1);
        let method = Fixed { selection, merging: None };
        let after = prefill(&engine, &prompt, &method, prompt.len() + 1);
        let (logits, kept) = reference(&engine, &prompt, &method);
        close(&after.logits, &logits);
        let d = engine.decoder().config().head_dim;
        let of = |prefilled: &Prefilled, layer: usize| {
            prefilled.evicting().unwrap().keys(layer, 0).chunks(d).map(<[f32]>::to_vec).collect::<Vec<_>>()
        };
        let layer = |l: usize| {
            let pairs = kept[l].keys().zip(of(&before, l).into_iter().zip(of(&after, l)));
            let document = pairs.filter(|(position, _)| (5..29).contains(*position));
            document.map(|(position, (before, after))| (*position, before != after)).collect()
        };
        ((0..layers).map(layer).collect(), after.stats.document_rows.clone())
    }

    #[test]
    fn case_1_a_token_marked_at_every_layer_is_computed_anew_at_every_layer() {
        let (layers, rows) = outcome(|_| vec![13]);
        for (l, held) in layers.iter().enumerate() {
            // At layer 0 keys do not depend on what stands before, so a new key is the cached one.
            assert!(
                held.iter().all(|(position, new)| *new == (l > 0 && [5, 6, 7, 8, 13].contains(position)))
            );
        }
        assert!(rows.iter().all(|rows| *rows == 5));
    }

    #[test]
    fn case_2_at_its_deepest_layer_a_token_is_projected_and_goes_no_further() {
        let (layers, rows) = outcome(|l| if l == 1 { vec![13] } else { Vec::new() });
        for (l, held) in layers.iter().enumerate() {
            assert_eq!(held.iter().any(|(position, new)| *position == 13 && *new), l == 1);
        }
        assert_eq!(rows[..3], [5, 5, 4], "computed above, projected at layer 1, gone below");
    }

    #[test]
    fn case_3_kept_but_not_marked_here_its_cached_key_stays_while_it_goes_on() {
        let deep = |l: usize| if l == 2 { vec![14] } else { Vec::new() };
        let (layers, rows) = outcome(deep);
        for (l, held) in layers.iter().enumerate() {
            assert_eq!(held.iter().any(|(position, new)| *position == 14 && *new), l == 2);
            assert!(held.iter().any(|(position, _)| *position == 14), "kept at every layer");
        }
        assert_eq!(rows[..3], [5, 5, 5]);
    }

    #[test]
    fn case_4_absent_here_its_cached_key_stands_in_and_is_gone_afterwards() {
        let deep = |l: usize| if l == 2 { vec![21] } else { Vec::new() };
        let (layers, rows) = outcome(deep);
        assert!(layers[2].contains(&(21, true)), "computed anew where it is marked");
        assert!(layers[1].iter().all(|(position, _)| *position != 21), "not kept at layer 1, and gone again");
        assert!(layers[0].contains(&(21, false)));
        assert_eq!(rows[..3], [5, 5, 5], "and it was computed through layers 0 and 1");
    }
}

fn all_of_it() -> SamKv {
    SamKv {
        block: 8,
        share: 1.0,
        filter: false,
        recompute: Recompute::Kept,
        update: Update::Overwrite,
        ..SamKv::default()
    }
}

/// The same bits; with windows, whose tokens decoding finds at other slots and so adds in another order, the same but for rounding.
fn same(engine: &Engine, a: &[f32], b: &[f32]) {
    if engine.decoder().config().layers.iter().any(|layer| layer.window.is_some()) {
        return close(a, b);
    }
    assert!(a == b, "{}", max_difference(a, b));
}

#[test]
fn oracle_13_all_blocks_and_tokens_overwritten_are_vanilla_to_the_bit() {
    everywhere(|engine| {
        for documents in [&[70, 90, 64][..], &[100], &[16, 8]] {
            let prompt = random_prompt(engine, 5, documents, 9, 3);
            let vanilla = forced(engine, &prompt, &Vanilla, Eviction::full());
            same(engine, &vanilla, &forced(engine, &prompt, &all_of_it(), Eviction::full()));
            // A large model need not show all of it.
            if engine.decoder().config().num_layers() > 10 {
                return;
            }
            // Any of the switches back on must show, where documents are long enough for it.
            if documents == [70, 90, 64] {
                for other in [
                    SamKv { recompute: Recompute::Marked, ..all_of_it() },
                    SamKv { filter: true, ..all_of_it() },
                    SamKv { share: 0.5, ..all_of_it() },
                    SamKv { update: Update::Fusion, ..all_of_it() },
                ] {
                    assert_ne!(vanilla, forced(engine, &prompt, &other, Eviction::full()), "{other:?}");
                }
            }
        }
    });
}

#[test]
fn oracle_13_of_one_document_after_bos_fusion_is_overwriting() {
    everywhere(|engine| {
        let Some(bos) = engine.tokenizer().bos() else { return };
        let mut prompt = random_prompt(engine, 1, &[90], 9, 3);
        prompt.system = vec![bos];
        let fusion = SamKv { update: Update::Fusion, ..all_of_it() };
        let found = forced(engine, &prompt, &fusion, Eviction::full());
        close(&found, &forced(engine, &prompt, &all_of_it(), Eviction::full()));
        close(&found, &forced(engine, &prompt, &Vanilla, Eviction::full()));
    });
}

#[test]
fn the_same_rows_over_all_of_the_cache_are_lego_link() {
    everywhere(|engine| {
        let prompt = random_prompt(engine, 5, &[70, 90, 64], 9, 3);
        let lego = LegoLink::default();
        let ends = |span: Span| (span.start..span.start + 20).chain(span.end - 20..span.end);
        let kept = LayerSelection {
            spans: prompt.chunk_spans(),
            recomputed: prompt.chunk_spans().into_iter().flat_map(ends).collect(),
        };
        let layers = vec![kept; engine.decoder().config().num_layers()];
        let method = Fixed { selection: Selection { layers, ambiguous_cases: 0 }, merging: None };
        let found = forced(engine, &prompt, &method, Eviction::full());
        same(engine, &found, &forced(engine, &prompt, &lego, Eviction::full()));
    });
}

#[test]
fn a_selection_that_cannot_be_computed_is_refused() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[24, 32], 9, 1);
    let layers = engine.decoder().config().num_layers();
    let kept = |spans: &[(usize, usize)], recomputed: &[u32]| LayerSelection {
        spans: spans.iter().map(|(a, b)| Span::new(*a, *b)).collect(),
        recomputed: recomputed.to_vec(),
    };
    for (first, others, why) in [
        (kept(&[(5, 9)], &[]), kept(&[(5, 8)], &[]), "different numbers"),
        (kept(&[(27, 31)], &[]), kept(&[(27, 31)], &[]), "within a document"),
        (kept(&[(0, 4)], &[]), kept(&[(0, 4)], &[]), "within a document"),
        (kept(&[(9, 13), (5, 9)], &[]), kept(&[(5, 13)], &[]), "not ascending"),
        (kept(&[(5, 9)], &[9]), kept(&[(5, 9)], &[]), "among those kept"),
    ] {
        let mut all = vec![others; layers];
        all[0] = first;
        let method = Fixed { selection: Selection { layers: all, ambiguous_cases: 0 }, merging: None };
        let error = prefill_with(&engine, &prompt, &method, Eviction::full(), prompt.len()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

/// SamKV with blocks small enough to be at work in tiny contexts.
fn small_blocks() -> SamKv {
    SamKv { block: 8, share: 0.4, ..SamKv::default() }
}

#[test]
fn a_store_without_summaries_is_upgraded_on_first_use() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        Engine::open(&tiny("llama"), Store::open(folder.path(), 1 << 30).unwrap(), small(), |_, _| ())
            .unwrap()
    };
    let first = open();
    let prompt = random_prompt(&first, 5, &[70, 90], 9, 3);
    let ids: Vec<_> = prompt.chunks.iter().map(|chunk| first.chunk_id(chunk)).collect();
    for id in &ids {
        first.compute_chunk(id.clone(), "plain", &[]);
    }
    let kind = small_blocks().kind();
    assert!(ids.iter().all(|id| !first.store().has_aux_tensors(id, &kind)));
    let file = |key: String| folder.path().join(&key[..2]).join(format!("{key}.safetensors"));
    let bytes: Vec<_> = ids.iter().map(|id| std::fs::read(file(id.key().to_string())).unwrap()).collect();
    let upgraded = prefill(&first, &prompt, &small_blocks(), prompt.len() + 1);
    assert_eq!(upgraded.load.reused.prefilled, 2 + 1, "two summaries and the system part");
    assert!(ids.iter().all(|id| first.store().has_aux_tensors(id, &kind)));
    let now: Vec<_> = ids.iter().map(|id| std::fs::read(file(id.key().to_string())).unwrap()).collect();
    assert_eq!(now, bytes, "what was there stays as it was");
    let second = open();
    let again = prefill(&second, &prompt, &small_blocks(), prompt.len() + 1);
    assert_eq!((again.load.reused.prefilled, &again.logits), (0, &upgraded.logits));
}

#[test]
fn only_what_is_kept_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let store = Store::open(folder.path(), 1 << 30).unwrap();
        Engine::open(&tiny("llama"), store, small(), |_, _| ()).unwrap()
    };
    let prompt = random_prompt(&open(), 5, &[300, 150], 9, 3);
    // Blocks as large as those whose digests a file has.
    let method =
        SamKv { block: 64, initial: 1, local: 1, share: 0.3, recompute: Recompute::None, ..SamKv::default() };
    prefill(&open(), &prompt, &method, prompt.len() + 1);
    let engine = open();
    let found = prefill(&engine, &prompt, &method, prompt.len() + 1);
    let documents = prompt.document_tokens() * engine.decoder().shape().token_bytes(Dtype::F16);
    let kept = found.stats.kept_tokens - 5 - 9;
    let of_documents = kept * engine.decoder().shape().token_bytes(Dtype::F16);
    let system = 5 * engine.decoder().shape().token_bytes(Dtype::F16);
    let summaries: usize =
        found.load.reused.segments.iter().flat_map(|s| &s.statistics).map(|s| s.bytes()).sum();
    assert_eq!(found.load.reused.bytes_read() as usize, of_documents + system + summaries);
    assert_eq!(found.load.reused.load.bytes as usize, of_documents + system);
    assert!(of_documents < documents * 3 / 4, "{of_documents} of {documents}");
}

#[test]
fn a_missing_document_is_prefilled_again() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[70, 90, 40], 9, 3);
    let expected = forced(&engine, &prompt, &small_blocks(), Eviction::full());
    let id = engine.chunk_id(&prompt.chunks[1]);
    engine.store().remove(&id.key()).unwrap();
    assert_eq!(expected, forced(&engine, &prompt, &small_blocks(), Eviction::full()));
}

#[test]
fn parts_of_a_document_are_one_context() {
    let engine = engine(&tiny("llama"), Settings { chunk_tokens: 32, ..exact(Dtype::F32) });
    let whole = random_prompt(&engine, 5, &[70, 90, 20], 9, 3);
    let mut cut = whole.clone();
    cut.chunks = Vec::new();
    for chunk in &whole.chunks {
        let parts = chunk.tokens.len().div_ceil(32);
        for (part, tokens) in chunk.tokens.chunks(32).enumerate() {
            let tokens = tokens.to_vec();
            cut.chunks.push(crate::PromptChunk { tokens, part: (part, parts), ..chunk.clone() });
        }
    }
    assert_eq!(cut.contexts(511).chunks, whole.chunks);
    assert_eq!(cut.contexts(64).chunks.len(), 2 + 2 + 1, "no longer than can be prefilled");
    let method = small_blocks();
    let found = forced(&engine, &cut, &method, Eviction::full());
    assert_eq!(found, forced(&engine, &whole, &method, Eviction::full()));
    assert_eq!(
        engine.store().list(Scope::All).unwrap().chunks.len(),
        3 + 1,
        "documents and the system part, no parts"
    );
}

#[test]
fn parts_with_others_missing_between_them_are_contexts_of_their_own() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let mut prompt = random_prompt(&engine, 5, &[30, 31, 32, 33, 34], 9, 3);
    // Of one document the parts 0, 1 and 3, of another the parts 4 and 2.
    for (chunk, (document, part)) in prompt.chunks.iter_mut().zip([(0, 0), (0, 1), (0, 3), (1, 4), (1, 2)]) {
        (chunk.document, chunk.part) = (document, (part, 5));
    }
    let contexts = prompt.contexts(511);
    let lengths: Vec<usize> = contexts.chunks.iter().map(|chunk| chunk.tokens.len()).collect();
    assert_eq!(lengths, [30 + 31, 32, 33, 34]);
    assert_eq!(contexts.ids(), prompt.ids());
}

#[test]
fn every_policy_goes_on_after_it() {
    for settings in [exact(Dtype::F32), small()] {
        let engine = engine(&tiny("llama"), settings);
        let prompt = random_prompt(&engine, 5, &[140, 150], 9, 3);
        let method = small_blocks();
        let full = forced(&engine, &prompt, &method, Eviction::full());
        let kept = prefill(&engine, &prompt, &method, prompt.len() + 1).stats.kept_tokens;
        assert!(kept > 60 && kept < prompt.len());
        for entry in POLICIES.entries.iter().filter(|entry| entry.name != "full") {
            let options = entry.options();
            let has = |name: &str| options.iter().any(|option| option.name == name);
            let (small, large) = match entry.name {
                "keyformer" => (vec![("keep", "0.5")], vec![("keep", "1")]),
                "a3_ex" => (vec![("capacity", "40")], vec![("capacity", "400")]),
                _ => (vec![("capacity", "40"), ("window", "6")], vec![("capacity", "400"), ("window", "6")]),
            };
            let known = |options: Vec<(&'static str, &'static str)>| {
                options.into_iter().filter(|(name, _)| has(name)).collect::<Vec<_>>()
            };
            let eviction = entry.with(known(small)).unwrap();
            let room = engine.max_seq_len(&prompt, 40, &eviction).unwrap();
            let mut prefilled = prefill_with(&engine, &prompt, &method, &eviction, room).unwrap();
            assert_eq!(prefilled.logits, full[..prefilled.logits.len()], "{}: the first token's", entry.name);
            for token in 0..20 {
                let logits = prefilled.extend(token);
                assert!(logits.iter().all(|x| x.is_finite()));
                let most = if entry.name == "keyformer" { kept / 2 + 1 } else { 41 };
                let grows = matches!(entry.name, "snap_kv" | "a3_ex");
                let most = if grows { most + token as usize } else { most };
                assert!(
                    prefilled.cache.cache.retained() <= most,
                    "{}: {}",
                    entry.name,
                    prefilled.cache.cache.retained()
                );
            }
            // Also where each query head has a cache of its own.
            let expanded = entry.with([("per_query_head", "true")]).unwrap();
            close(&forced(&engine, &prompt, &method, &expanded)[..full.len() / 7], &full[..full.len() / 7]);
            if entry.name != "keyformer" {
                let roomy = entry.with(known(large)).unwrap();
                let same = forced(&engine, &prompt, &method, &roomy);
                close(&same, &full);
            }
        }
    }
}

/// Layers see their windows by positions, also where those reach beyond the kept tokens, while no policy evicts any.
#[test]
fn a_policy_with_room_leaves_windows_as_they_are() {
    let window = ("\"sliding_window\": 16", "\"sliding_window\": 200");
    let engine = tiny_engine_with("mistral_window", window, exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[140, 150], 9, 3);
    let method = small_blocks();
    let kept = prefill(&engine, &prompt, &method, prompt.len() + 1).stats.kept_tokens;
    assert!(engine.decoder().config().layers.iter().all(|layer| layer.window == Some(200)));
    assert!(kept + 40 < 200 && prompt.len() > 200, "{kept}");
    let full = forced(&engine, &prompt, &method, Eviction::full());
    let roomy = POLICIES.parse("snap_kv:capacity=400,window=6").unwrap();
    close(&forced(&engine, &prompt, &method, &roomy), &full);
    // The question's first row, at 295, sees from 96 on.
    let sampling = Sampling { max_tokens: 1, ..Sampling::default() };
    let request = GenerateRequest { explain: true, ..GenerateRequest::new(Arc::new(method), sampling) };
    let explanation = engine.answer(&prompt, &request, |_| true).unwrap().explanation.unwrap();
    let shares: Vec<f32> = explanation.chunks.iter().flat_map(|chunk| chunk.shares.clone()).collect();
    let (beyond, within) = shares.split_at(96 - 5);
    assert!(beyond.iter().all(|share| *share == 0.0) && within.iter().any(|share| *share > 0.0));
}

#[test]
fn answers_say_what_was_kept_read_and_recomputed() {
    let engine = engine(&tiny("llama"), small());
    let prompt = random_prompt(&engine, 5, &[140, 150], 9, 3);
    let sampling = Sampling { max_tokens: 5, ..Sampling::default() };
    let method = METHODS.parse("sam_kv:block=8,share=0.4").unwrap();
    let request = GenerateRequest { explain: true, ..GenerateRequest::new(method.clone(), sampling.clone()) };
    engine.answer(&prompt, &request, |_| true).unwrap();
    let answer = engine.answer(&prompt, &request, |_| true).unwrap();
    let account = &answer.stats;
    assert_eq!(account.retained_tokens, account.kept_tokens + account.answer_tokens - 1);
    assert!((account.sequence_ratio - account.kept_tokens as f64 / prompt.len() as f64).abs() < 1e-12);
    assert!(account.sequence_ratio < 0.6 && account.recompute_ratio < 0.3);
    assert!(account.recomputed_tokens > 0 && account.cached_tokens > 0);
    assert!(account.kv_bytes < account.kv_bytes_full);
    assert!(account.select_seconds > 0.0 && account.operations > 0.0);
    assert!(account.bytes_loaded > 0 && account.bytes_loaded < account.document_bytes);
    let explanation = answer.explanation.unwrap();
    assert!(!explanation.tokens.is_empty() && explanation.recomputed_share > 0.0);
}

/// A token that one layer reads and the last one computes counts once.
#[test]
fn each_token_counts_once() {
    let engine = engine(&tiny("llama"), small());
    let prompt = random_prompt(&engine, 5, &[140, 150], 60, 3);
    for (name, overlaps, leaves_out) in [
        ("pie", false, false),
        ("a3", false, false),
        ("relax_kv", true, false),
        ("sam_kv:block=8,share=0.4", true, true),
    ] {
        let method = METHODS.parse(name).unwrap();
        let account = engine.measure(&prompt, &method, Eviction::full()).unwrap();
        let once = account.reused_tokens + account.recomputed_tokens + account.left_out_tokens;
        assert_eq!(once, 5 + 290, "{name}");
        assert_eq!(account.cached_tokens > account.reused_tokens, overlaps, "{name}");
        assert_eq!(account.left_out_tokens > 0, leaves_out, "{name}");
    }
}
