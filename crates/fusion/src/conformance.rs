//! What every fusion method must keep to, whatever it selects by. A new method runs it in one line.

<<<<<<< HEAD
use refrain_kernels::{Attention, AttentionOutputs, Buffer, Cpu, Dtype, Precision};
use refrain_kv::{Rope, Ropes, Span, Summary};
=======
use refrain_kernels::{Attention, Buffer, Cpu, Dtype, Precision, Report};
use refrain_kv::{AuxTensors, Rope, Ropes, Span};
>>>>>>> 8c60746 (The store speaks the field's words, and its files import each other in one direction)

use crate::{
    CachedSegment, ChunkPlace, ContextLayer, Draft, Error, FusionMethod, LayerView, PromptView, SparseMethod,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const LAYERS: usize = 6;

/// Checks a method on prompts with several layouts; panics with what is broken.
///
/// What a sparse method selects is the same twice, lies within cached documents, holds the base, computes anew only what
/// is kept, and is as much at every layer.
///
/// Rows ascend, hold every token that is not cached, only shrink, and are the same when asked twice; a prompt without
/// documents is computed whole; an empty question is refused.
///
/// # Panics
/// If the method breaks one of these.
pub fn check(method: &dyn FusionMethod) {
    for (system, chunks, question) in [
        (5, vec![(30, true), (41, true), (7, true)], 9),
        (5, vec![(30, true), (41, false), (7, true)], 9),
        (0, vec![(64, true)], 1),
        (3, vec![(20, false)], 4),
        (1, vec![(1, true), (1, true)], 1),
        (4, vec![], 6),
    ] {
        for system_cached in [true, false] {
            layout(method, system, system_cached, &chunks, question);
        }
    }
    assert!(
        method.sparse().is_none() || !method.summarizes().is_empty(),
        "{method:?}: sparse methods summarise"
    );
    if let Some(sparse) = method.sparse() {
        select(method, sparse);
    }
    let silent = PromptView {
        layers: LAYERS,
        system: Span::new(0, 2),
        system_cached: true,
        chunks: &[],
        question: Span::new(2, 2),
    };
    assert_eq!(
        method.plan(&silent),
        Err(Error::EmptyQuestion),
        "{method:?}: an empty question must be refused"
    );
}

fn layout(
    method: &dyn FusionMethod,
    system: usize,
    system_cached: bool,
    chunks: &[(usize, bool)],
    question: usize,
) {
    let mut start = system;
    let mut places = Vec::new();
    for (tokens, cached) in chunks {
        places.push(ChunkPlace { span: Span::new(start, start + tokens), cached: *cached });
        start += tokens;
    }
    let prompt = PromptView {
        layers: LAYERS,
        system: Span::new(0, system),
        system_cached,
        chunks: &places,
        question: Span::new(start, start + question),
    };
    let plan = method.plan(&prompt).unwrap_or_else(|error| panic!("{method:?} refuses {prompt:?}: {error}"));
    assert_eq!(Ok(&plan), method.plan(&prompt).as_ref(), "{method:?}: a plan must be the same twice");
    subset(method, &prompt, &plan.rows, &(0..prompt.len() as u32).collect::<Vec<_>>());
    assert!(plan.narrows.is_sorted_by(|a, b| a < b), "{method:?}: layers to narrow at must ascend");
    assert!(plan.narrows.iter().all(|layer| *layer < LAYERS), "{method:?}: narrows past the last layer");
    let mut rows = plan.rows;
    for layer in plan.narrows {
        let kept = narrow(method, &prompt, layer, &rows);
        assert_eq!(kept, narrow(method, &prompt, layer, &rows), "{method:?}: rows must be the same twice");
        subset(method, &prompt, &kept, &rows);
        rows = kept;
    }
}

/// Asks a sparse method over contexts of random queries, keys and attention.
fn select(method: &dyn FusionMethod, sparse: &dyn SparseMethod) {
    let lengths = [400, 150, 333, 250];
    let mut start = 3;
    let mut places = Vec::new();
    for (i, tokens) in lengths.into_iter().enumerate() {
        places.push(ChunkPlace { span: Span::new(start, start + tokens), cached: i != 2 });
        start += tokens;
    }
    let prompt = PromptView {
        layers: LAYERS,
        system: Span::new(0, 3),
        system_cached: true,
        chunks: &places,
        question: Span::new(start, start + 5),
    };
    let summaries: Vec<Option<AuxTensors>> =
        places.iter().map(|place| place.cached.then(|| summarize(sparse, place.span.len()))).collect();
    let base = sparse.base(&prompt);
    let within =
        |span: &Span| places.iter().any(|p| p.cached && p.span.start <= span.start && span.end <= p.span.end);
    assert!(base.iter().all(within), "{method:?}: the base lies within cached documents");
    let queries = if sparse.asks(&prompt) { random(LAYERS * HEADS * HEAD_DIM, 11) } else { Vec::new() };
    let draft = Draft {
        prompt: &prompt,
        summaries: &summaries.iter().map(Option::as_ref).collect::<Vec<_>>(),
        queries: &queries,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        ropes: &Ropes::shared(Rope::new(vec![0.5; HEAD_DIM / 2], 1.0), LAYERS),
        stable_layers: None,
    };
    let selection =
        sparse.select(&draft).unwrap_or_else(|error| panic!("{method:?} refuses a draft: {error}"));
    assert_eq!(
        Ok(&selection),
        sparse.select(&draft).as_ref(),
        "{method:?}: a selection must be the same twice"
    );
    assert_eq!(selection.layers.len(), LAYERS, "{method:?}: one entry a layer");
    for kept in &selection.layers {
        assert!(kept.spans.is_sorted_by(|a, b| a.end <= b.start), "{method:?}: spans ascend, apart");
        assert!(kept.spans.iter().all(within), "{method:?}: what is kept lies within cached documents");
        let held = |position: u32| kept.contains(position);
        assert!(base.iter().flat_map(|span| span.positions()).all(held), "{method:?}: the base is kept");
        assert!(kept.fresh.is_sorted_by(|a, b| a < b), "{method:?}: tokens computed anew ascend");
        assert!(kept.fresh.iter().all(|p| held(*p)), "{method:?}: only what is kept is computed anew");
        assert_eq!(kept.len(), selection.layers[0].len(), "{method:?}: layers keep equally many tokens");
    }
}

/// What a method keeps beside a random context.
fn summarize(sparse: &dyn SparseMethod, tokens: usize) -> AuxTensors {
    let (q, keys) = (random(tokens * HEADS * HEAD_DIM, 7), buffer(tokens * KV_HEADS * HEAD_DIM, 8));
    let visible: Vec<(u32, u32)> = (0..tokens as u32).map(|row| (0, row + 1)).collect();
    let attention = Attention {
        q: &q,
        k: keys.as_slice(),
        v: keys.as_slice(),
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        capacity: tokens,
        visible: &visible,
        scale: 1.0,
        precision: Precision::F32,
    };
    let cpu = Cpu::new(1).unwrap();
    let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; tokens * HEADS]);
<<<<<<< HEAD
    cpu.attention_with_outputs(
        &attention,
        &mut out,
        AttentionOutputs { lse: Some(&mut lse), ..AttentionOutputs::default() },
    );
    let mut summary = Summary::default();
=======
    cpu.attention_reporting(&attention, &mut out, Report { lse: Some(&mut lse), ..Report::default() });
    let mut summary = AuxTensors::default();
>>>>>>> 8c60746 (The store speaks the field's words, and its files import each other in one direction)
    for layer in 0..LAYERS {
        sparse.summarize(
            &ContextLayer {
                cpu: &cpu,
                layer,
                layers: LAYERS,
                attention,
                lse: &lse,
                first: 0,
                queries: &random(sparse.local().min(tokens) * HEADS * HEAD_DIM, 9),
                k: keys.as_slice(),
            },
            &mut summary,
        );
    }
    summary
}

fn random(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn buffer(count: usize, seed: u32) -> Buffer {
    let mut buffer = Buffer::zeros(Dtype::F16, count);
    buffer.write_f32(0, &random(count, seed));
    buffer
}

fn subset(method: &dyn FusionMethod, prompt: &PromptView<'_>, rows: &[u32], of: &[u32]) {
    assert!(rows.is_sorted_by(|a, b| a < b), "{method:?}: rows must ascend: {rows:?}");
    assert!(rows.iter().all(|row| of.contains(row)), "{method:?}: a row is new: {rows:?} of {of:?}");
    let missing = prompt.always().into_iter().find(|row| !rows.contains(row));
    assert_eq!(missing, None, "{method:?}: a token that is not cached is left out");
}

/// Asks a method over random queries, keys and values.
fn narrow(method: &dyn FusionMethod, prompt: &PromptView<'_>, layer: usize, rows: &[u32]) -> Vec<u32> {
    let width = KV_HEADS * HEAD_DIM;
    let owned: Vec<(Span, Buffer, Buffer)> = prompt
        .chunks
        .iter()
        .filter(|chunk| chunk.cached)
        .map(|chunk| (chunk.span, buffer(chunk.span.len() * width, 1), buffer(chunk.span.len() * width, 2)))
        .collect();
    let cached: Vec<CachedSegment<'_>> = owned
        .iter()
        .map(|(span, k, v)| CachedSegment { span: *span, k: k.as_slice(), v: v.as_slice() })
        .collect();
    let (k, v) = (buffer(rows.len() * width, 3), buffer(rows.len() * width, 4));
    let keys = buffer(prompt.len() * width, 5);
    let view = LayerView {
        cpu: &Cpu::new(1).unwrap(),
        layer,
        prompt,
        rows,
        q: &random(rows.len() * HEADS * HEAD_DIM, 6),
        k: k.as_slice(),
        v: v.as_slice(),
        keys: keys.as_slice(),
        cached: &cached,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        capacity: prompt.len(),
        window: None,
        scale: (HEAD_DIM as f32).sqrt().recip(),
    };
    method.narrow(&view).unwrap_or_else(|error| panic!("{method:?} refuses a layer: {error}"))
}
