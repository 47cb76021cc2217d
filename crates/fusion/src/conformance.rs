//! What every fusion method must keep to, whatever it selects by. A new method runs it in one line.

use refrain_kernels::{Buffer, Cpu, Dtype};
use refrain_kv::Span;

use crate::{CachedSegment, ChunkPlace, Error, FusionMethod, LayerView, PromptView};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const LAYERS: usize = 6;

/// Checks a method on prompts with several layouts; panics with what is broken.
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

fn subset(method: &dyn FusionMethod, prompt: &PromptView<'_>, rows: &[u32], of: &[u32]) {
    assert!(rows.is_sorted_by(|a, b| a < b), "{method:?}: rows must ascend: {rows:?}");
    assert!(rows.iter().all(|row| of.contains(row)), "{method:?}: a row is new: {rows:?} of {of:?}");
    let missing = prompt.always().into_iter().find(|row| !rows.contains(row));
    assert_eq!(missing, None, "{method:?}: a token that is not cached is left out");
}

/// Asks a method over random queries, keys and values.
fn narrow(method: &dyn FusionMethod, prompt: &PromptView<'_>, layer: usize, rows: &[u32]) -> Vec<u32> {
    let random = |count: usize, seed: u32| -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    };
    let width = KV_HEADS * HEAD_DIM;
    let buffer = |count: usize, seed: u32| {
        let mut buffer = Buffer::zeros(Dtype::F16, count);
        buffer.write_f32(0, &random(count, seed));
        buffer
    };
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
        cpu: &Cpu::new(1),
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
    };
    method.narrow(&view).unwrap_or_else(|error| panic!("{method:?} refuses a layer: {error}"))
}
