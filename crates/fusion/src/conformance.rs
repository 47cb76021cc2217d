//! Conditions that every fusion method must keep to, whatever it selects by. A new method runs them in one line.

use std::sync::Arc;

use refrain_kernels::conformance::{random, stored};
use refrain_kernels::{CachedAttention, Cpu, Device, Dtype, Precision, upload};
use refrain_kv::{AuxTensors, Rope, Ropes, Span};

use crate::{
    CachedTokens, ChunkChange, ChunkSpan, ChunkStatistics, ContextLayer, ContextTensors, Error, FusionMethod,
    LayerTokens, LayerView, ModelFacts, Needs, Pass, PassAttention, PassPlan, PrefillInputs, PromptLayout,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const LAYERS: usize = 6;
/// More passes than any method makes.
const MAX_PASSES: usize = 8;

/// Checks a method on prompts with several layouts; panics with the condition that is broken.
///
/// A chain of passes ends with one pass that is no probe, and is the same when it is run twice. Active tokens ascend, hold every
/// token that is not cached, only shrink, and are no more than [`FusionMethod::max_rows`] says; a last pass that reads a part of the documents is one of a method that
/// [selects](FusionMethod::selects). Selected tokens lie within documents; those that are written are seen;
/// layers of a last pass keep equally many tokens. Corrections are numbers, and nothing where nothing changed. A prompt without documents is computed whole; an empty question is refused.
///
/// # Panics
/// If the method breaks one of these.
pub fn check(method: &dyn FusionMethod) {
    for (system, chunks, question) in [
        (5, vec![30, 41, 7], 9),
        (0, vec![64], 1),
        (3, vec![20], 4),
        (1, vec![1, 1], 1),
        (3, vec![400, 150, 333, 250], 5),
        (4, vec![], 6),
    ] {
        for (system_cached, exact) in [(true, false), (false, false), (true, true)] {
            let mut inputs = inputs(method, system, system_cached, &chunks, question);
            inputs.layout.chunks.iter_mut().take(1).for_each(|chunk| chunk.exact = exact);
            let inputs = Arc::new(inputs);
            let chain = run(method, &inputs);
            assert_eq!(chain, run(method, &inputs), "{method:?}: passes must be the same twice");
            let last = chain.last().map(|(plan, _)| plan);
            let unknown =
                inputs.layout.chunks.iter().map(|chunk| ChunkSpan { exact: false, ..*chunk }).collect();
            let most = method.max_rows(&PromptLayout { chunks: unknown, ..inputs.layout.clone() });
            let selects = last.is_some_and(|plan| matches!(plan.cached, CachedTokens::Selected(_)));
            assert!(!selects || method.selects(), "{method:?}: its last pass reads a part of the documents");
            let rows = chain.iter().map(|(plan, _)| plan.tokens.len()).max();
            assert!(rows <= Some(most), "{method:?}: {rows:?} rows of {most} are computed");
            if inputs.layout.reusable() == 0 && method.reuses() {
                let all = inputs.layout.required_tokens();
                assert_eq!(
                    last.map(|plan| &plan.tokens),
                    Some(&all),
                    "{method:?}: nothing to choose, no more than what is required is computed"
                );
            }
        }
    }
    let silent = Arc::new(PrefillInputs {
        layout: PromptLayout { question: Span::new(2, 2), ..inputs(method, 2, true, &[], 1).layout },
        ..inputs(method, 2, true, &[], 1)
    });
    let refused = method.start(&silent).err();
    assert_eq!(refused, Some(Error::EmptyQuestion), "{method:?}: an empty question must be refused");
}

/// A request over random statistics.
fn inputs(
    method: &dyn FusionMethod,
    system: usize,
    system_cached: bool,
    chunks: &[usize],
    question: usize,
) -> PrefillInputs {
    let mut start = system;
    let mut spans = Vec::new();
    for tokens in chunks {
        spans.push(ChunkSpan { span: Span::new(start, start + tokens), ..ChunkSpan::default() });
        start += tokens;
    }
    let of = |chunk: &ChunkSpan| {
        let all = method.statistics().into_iter();
        all.map(|of| Arc::new(statistics(of, chunk.span.len()))).collect()
    };
    let layout = PromptLayout {
        layers: LAYERS,
        system: Span::new(0, system),
        system_cached,
        chunks: spans.clone(),
        question: Span::new(start, start + question),
    };
    let model = ModelFacts {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        ropes: Ropes::shared(Rope::new(vec![0.5; HEAD_DIM / 2], 1.0), LAYERS),
        windows: vec![None; LAYERS],
        stable_layers: None,
    };
    let max_tokens = layout.len() + 8;
    PrefillInputs { layout, model, max_tokens, statistics: spans.iter().map(of).collect(), reordered: false }
}

/// The request with its chunks in another order.
fn in_order(inputs: &PrefillInputs, order: &[usize]) -> PrefillInputs {
    let mut inputs = PrefillInputs { reordered: true, ..inputs.clone() };
    let (chunks, statistics) = (inputs.layout.chunks.clone(), inputs.statistics.clone());
    let mut start = inputs.layout.system.end as usize;
    for (to, from) in order.iter().enumerate() {
        let end = start + chunks[*from].span.len();
        inputs.layout.chunks[to] = ChunkSpan { span: Span::new(start, end), ..chunks[*from] };
        inputs.statistics[to].clone_from(&statistics[*from]);
        start = end;
    }
    inputs
}

/// Runs the passes of a method over random reports. Returns each plan with the tokens that went on from its checks.
fn run(method: &dyn FusionMethod, inputs: &Arc<PrefillInputs>) -> Vec<(PassPlan, Vec<Vec<u32>>)> {
    let mut pass = method
        .start(inputs)
        .unwrap_or_else(|error| panic!("{method:?} refuses {:?}: {error}", inputs.layout));
    let mut chain = Vec::new();
    loop {
        let continuing = walk(method, inputs, pass.as_mut());
        let plan = pass.plan().clone();
        let probe = plan.probe;
        chain.push((plan, continuing));
        assert!(chain.len() <= MAX_PASSES, "{method:?}: the chain of passes does not end");
        if let Some(order) = pass.order() {
            assert!(method.reorders() && probe.is_some() && !inputs.reordered, "{method:?}: it orders once");
            let mut sorted = order.clone();
            sorted.sort_unstable();
            let all: Vec<usize> = (0..inputs.layout.chunks.len()).collect();
            assert_eq!(sorted, all, "{method:?}: an order names each chunk once");
            chain.extend(run(method, &Arc::new(in_order(inputs, &order))));
            return chain;
        }
        let next = pass.next().unwrap_or_else(|error| panic!("{method:?} refuses its next pass: {error}"));
        assert_eq!(
            next.is_some(),
            probe.is_some(),
            "{method:?}: a probe has a next pass, and the last pass has none"
        );
        let Some(next) = next else { return chain };
        pass = next;
    }
}

/// Takes one pass through its layers.
fn walk(method: &dyn FusionMethod, inputs: &PrefillInputs, pass: &mut dyn Pass) -> Vec<Vec<u32>> {
    let plan = pass.plan().clone();
    let layout = &inputs.layout;
    subset(method, layout, &plan.tokens, &(0..layout.len() as u32).collect::<Vec<_>>());
    let depth = plan.probe.unwrap_or(LAYERS);
    assert!((1..=LAYERS).contains(&depth), "{method:?}: a pass goes through 1 to {LAYERS} layers");
    assert!(plan.checks.keys().all(|layer| *layer < depth), "{method:?}: a check lies past the last layer");
    if let PassAttention::BlockRetrieval(_) = plan.attention {
        assert!(plan.checks.is_empty(), "{method:?}: a pass that retrieves blocks checks no layer");
    }
    if let CachedTokens::Selected(layers) = &plan.cached {
        selected(method, layout, layers, plan.probe.is_some());
    }
    if plan.corrects.is_some() {
        corrected(method, layout, pass);
    }
    let (mut tokens, mut all) = (plan.tokens, Vec::new());
    for (layer, needs) in plan.checks {
        let continuing = observe(method, layout, pass, layer, needs, &tokens);
        subset(method, layout, &continuing, &tokens);
        all.push(continuing.clone());
        tokens = continuing;
    }
    all
}

/// Asks a pass for corrections of random changes, and of none.
fn corrected(method: &dyn FusionMethod, layout: &PromptLayout, pass: &dyn Pass) {
    let width = KV_HEADS * HEAD_DIM;
    for tokens in [3, 0] {
        let change = |(i, _)| {
            let side = |seed: u32| if tokens == 0 { vec![0.0; width] } else { random(width, seed) };
            ChunkChange { tokens: tokens * (i % 2), keys: side(4), values: side(5) }
        };
        let before: Vec<ChunkChange> = layout.inexact_chunks().enumerate().map(change).collect();
        let mut after = before.clone();
        pass.correct(1, &mut after);
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(after.tokens, before.tokens, "{method:?}: the number of recomputed tokens stays");
            for side in [&after.keys, &after.values] {
                assert_eq!(side.len(), width, "{method:?}: a correction is as wide as a token");
                assert!(side.iter().all(|x| x.is_finite()), "{method:?}: a correction is a number");
                assert!(tokens > 0 || side.iter().all(|x| *x == 0.0), "{method:?}: no change, no correction");
            }
        }
    }
}

/// Checks the tokens of a pass over a part of the documents.
fn selected(method: &dyn FusionMethod, layout: &PromptLayout, layers: &[LayerTokens], probe: bool) {
    assert_eq!(layers.len(), LAYERS, "{method:?}: one entry a layer");
    let within = |span: &Span| layout.chunk_spans().any(|c| c.start <= span.start && span.end <= c.end);
    let count = |spans: &[Span]| spans.iter().map(|span| span.len()).sum::<usize>();
    for layer in layers {
        for spans in [&layer.question_sees, &layer.documents_see] {
            assert!(spans.is_sorted_by(|a, b| a.end <= b.start), "{method:?}: spans ascend, apart");
            assert!(spans.iter().all(within), "{method:?}: selected tokens lie within cached documents");
        }
        let seen = |p: &u32| layer.question_sees.iter().chain(&layer.documents_see).any(|s| s.contains(*p));
        assert!(layer.written.iter().all(seen), "{method:?}: a token that is written is seen");
        for positions in [&layer.written, &layer.continuing] {
            assert!(positions.is_sorted_by(|a, b| a < b), "{method:?}: tokens ascend");
        }
        let kept = count(&layer.question_sees);
        assert!(
            probe || kept == count(&layers[0].question_sees),
            "{method:?}: layers keep equally many tokens"
        );
    }
}

/// Asks a pass over random reports.
fn observe(
    method: &dyn FusionMethod,
    layout: &PromptLayout,
    pass: &mut dyn Pass,
    layer: usize,
    needs: Needs,
    tokens: &[u32],
) -> Vec<u32> {
    let positive =
        |count: usize, seed: u32| random(count, seed).into_iter().map(f32::abs).collect::<Vec<f32>>();
    let report =
        |wanted: bool, count: usize, seed: u32| if wanted { positive(count, seed) } else { Vec::new() };
    let candidates = layout.candidates(tokens).len();
    let view = LayerView {
        layer,
        layout,
        tokens,
        question_attention: &report(needs.question_attention.is_some(), layout.documents().len(), 1),
        deviation: &report(needs.deviation.is_some(), candidates, 2),
        mean_query: &if needs.mean_query { random(HEADS * HEAD_DIM, 3) } else { Vec::new() },
    };
    pass.observe(&view).unwrap_or_else(|error| panic!("{method:?} refuses a layer: {error}"))
}

fn subset(method: &dyn FusionMethod, layout: &PromptLayout, tokens: &[u32], of: &[u32]) {
    assert!(tokens.is_sorted_by(|a, b| a < b), "{method:?}: tokens must ascend: {tokens:?}");
    assert!(
        tokens.iter().all(|token| of.contains(token)),
        "{method:?}: a token is new: {tokens:?} of {of:?}"
    );
    let missing = layout.required_tokens().into_iter().find(|token| !tokens.contains(token));
    assert_eq!(missing, None, "{method:?}: a token that is not cached is left out");
}

/// Statistics of a random context.
fn statistics(of: &dyn ChunkStatistics, tokens: usize) -> AuxTensors {
    let cpu = Cpu::new(1).unwrap();
    let keys = stored(Dtype::F16, tokens * KV_HEADS * HEAD_DIM, 8);
    let (q, cached) = (upload(&cpu, &random(tokens * HEADS * HEAD_DIM, 7)), cpu.upload_kv(keys.as_slice()));
    let visible: Vec<(u32, u32)> = (0..tokens as u32).map(|row| (0, row + 1)).collect();
    let attention = CachedAttention {
        q: &q,
        first_row: 0,
        k: &cached,
        v: &cached,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        capacity: tokens,
        visible: &visible,
        scale: 1.0,
        precision: Precision::F32,
    };
    let (mut out, mut lse) = (cpu.floats(q.len()), cpu.floats(0));
    Device::attention(&cpu, &attention, &mut out, Some(&mut lse));
    let queries = upload(&cpu, &random(of.last_queries().min(tokens) * HEADS * HEAD_DIM, 9));
    let tensors = ContextTensors {
        device: &cpu,
        attention,
        lse: &lse,
        first: 0,
        queries: &queries,
        k: keys.as_slice(),
    };
    let mut summary = AuxTensors::default();
    for layer in 0..LAYERS {
        of.observe(&ContextLayer::new(layer, LAYERS, tensors), &mut summary);
    }
    summary
}
