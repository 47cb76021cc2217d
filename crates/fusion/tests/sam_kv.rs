//! SamKV against a plain f64 evaluation of its equations on random numbers.

use std::sync::Arc;

use refrain_fusion::{
    Below, ChunkSpan, ChunkStatistics, ContextLayer, ContextTensors, Cosine, Extremes, FusionMethod,
    ModelFacts, PrefillInputs, PromptLayout, Quota, Recompute, Rotation, Rounding, SamKv, Theta,
};
use refrain_kernels::{Buffer, CachedAttention, Cpu, Device, Dtype, Precision, upload};
use refrain_kv::{AuxTensors, Rope, Ropes, Span};

const LAYERS: usize = 6;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const D: usize = 16;
const WIDTH: usize = KV_HEADS * D;

/// A request over documents with these statistics.
fn inputs(layout: &PromptLayout, statistics: Vec<AuxTensors>, rope: &Rope) -> PrefillInputs {
    let model = ModelFacts {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: D,
        ropes: Ropes::shared(rope.clone(), LAYERS),
        windows: vec![None; LAYERS],
        stable_layers: None,
    };
    let statistics = statistics.into_iter().map(|of| vec![Arc::new(of)]).collect();
    PrefillInputs {
        layout: layout.clone(),
        model,
        max_tokens: layout.len() + 8,
        statistics,
        reordered: false,
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn many(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) / 2.0 * n as f32) as usize % n
    }
}

fn buffer(values: &[f32]) -> Buffer {
    let mut buffer = Buffer::zeros(Dtype::F32, values.len());
    buffer.write_f32(0, values);
    buffer
}

/// A document's summary of random numbers.
struct Numbers {
    blocks: usize,
    means: Vec<f32>,
    local: Vec<f32>,
    representative: Vec<f32>,
    marked: Vec<f32>,
    extremes: Vec<f32>,
}

impl Numbers {
    fn new(random: &mut Random, method: &SamKv, tokens: usize) -> Numbers {
        let blocks = tokens.div_ceil(method.block);
        let middle = method.initial.min(blocks)..blocks.saturating_sub(method.local).max(method.initial);
        let tie = |random: &mut Random| match middle.len() {
            0 => -1.0,
            n => (middle.start + random.below(n)) as f32,
        };
        Numbers {
            blocks,
            means: random.many(LAYERS * blocks * WIDTH),
            local: random.many(LAYERS * HEADS * D),
            representative: (0..LAYERS * blocks).map(|i| (i % blocks * method.block) as f32 + 1.0).collect(),
            marked: (0..LAYERS * blocks).map(|_| f32::from(random.next() > 0.3)).collect(),
            extremes: (0..2 * LAYERS).map(|_| tie(random)).collect(),
        }
    }

    fn summary(&self) -> AuxTensors {
        let mut summary = AuxTensors::default();
        summary.push("k_mean", [LAYERS, self.blocks, WIDTH], buffer(&self.means));
        summary.push("q_local", [LAYERS, HEADS * D], buffer(&self.local));
        summary.push("representative", [LAYERS, self.blocks], buffer(&self.representative));
        summary.push("marked", [LAYERS, self.blocks], buffer(&self.marked));
        summary.push("extremes", [LAYERS, 2], buffer(&self.extremes));
        summary
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

/// The equations as they stand: for each layer the kept middle blocks `(document, block)` and the smallest gap between two
/// scores that decided.
fn direct(
    method: &SamKv,
    of: &[Numbers],
    spans: &[Span],
    question: Span,
    queries: &[f32],
) -> (Vec<Vec<(usize, usize)>>, f64) {
    let frequencies: Vec<f64> = (0..D / 2).map(|i| 1.0 / (i + 1) as f64).collect();
    let turned = |x: &[f64], position: u32| -> Vec<f64> {
        if method.rotation == Rotation::None {
            return x.to_vec();
        }
        let mut out = x.to_vec();
        for (head, from) in out.chunks_mut(D).zip(x.chunks(D)) {
            for i in 0..D / 2 {
                let (sin, cos) = (f64::from(position) * frequencies[i]).sin_cos();
                head[i] = from[i] * cos - from[i + D / 2] * sin;
                head[i + D / 2] = from[i + D / 2] * cos + from[i] * sin;
            }
        }
        out
    };
    let centre = |span: Span| (span.start + span.end) / 2;
    let part = if method.cosine == Cosine::Head { D } else { HEADS * D };
    // ⟨Q̂_i, K̄[b]⟩ and what it is divided by, by layer, document and block.
    let scores: Vec<Vec<Vec<(f64, f64)>>> = (0..LAYERS)
        .map(|l| {
            let q = wide(&queries[l * HEADS * D..(l + 1) * HEADS * D]);
            let locals: Vec<Vec<f64>> =
                of.iter().map(|n| wide(&n.local[l * HEADS * D..(l + 1) * HEADS * D])).collect();
            (0..of.len())
                .map(|i| {
                    let mut biased = q.clone();
                    for (j, local) in locals.iter().enumerate().filter(|(j, _)| method.bias && *j != i) {
                        let _ = j;
                        for (e, x) in local.iter().enumerate() {
                            let p = e / part * part..(e / part + 1) * part;
                            let cos = cosine(&q[p.clone()], &local[p]).abs();
                            biased[e] += cos * x / (of.len() - 1) as f64;
                        }
                    }
                    let group = HEADS / KV_HEADS;
                    let mean = |e: usize| {
                        let (g, e) = (e / D, e % D);
                        (0..group).map(|h| biased[(g * group + h) * D + e]).sum::<f64>() / group as f64
                    };
                    let query = turned(&(0..WIDTH).map(mean).collect::<Vec<_>>(), centre(question));
                    (0..of[i].blocks)
                        .map(|b| {
                            let at = (l * of[i].blocks + b) * WIDTH;
                            let start = spans[i].start as usize + b * method.block;
                            let block = Span::new(start, (start + method.block).min(spans[i].end as usize));
                            let key = turned(&wide(&of[i].means[at..at + WIDTH]), centre(block));
                            (dot(&query, &key), (dot(&query, &query) * dot(&key, &key)).sqrt())
                        })
                        .collect()
                })
                .collect()
        })
        .collect();
    let round = |x: f64| match method.rounding {
        Rounding::Floor => x.floor(),
        Rounding::Nearest => x.round(),
        Rounding::Ceil => x.ceil(),
    } as usize;
    let mut gap = f64::INFINITY;
    let middle = |i: usize| method.initial..of[i].blocks.saturating_sub(method.local).max(method.initial);
    let counts: Vec<usize> = (0..of.len())
        .map(|i| {
            if middle(i).is_empty() {
                return 0;
            }
            let stable = LAYERS - method.stable_layers.max(4)..LAYERS;
            let p = stable.clone().map(|l| {
                let s: Vec<f64> = scores[l][i].iter().map(|s| s.0).collect();
                let (max, min) = match method.extremes {
                    Extremes::Offline => {
                        (s[of[i].extremes[2 * l] as usize], s[of[i].extremes[2 * l + 1] as usize])
                    }
                    Extremes::Online => (
                        s[middle(i)].iter().copied().fold(f64::MIN, f64::max),
                        s[middle(i)].iter().copied().fold(f64::MAX, f64::min),
                    ),
                };
                let kept: Vec<f64> = (0..s.len()).filter(|b| !middle(i).contains(b)).map(|b| s[b]).collect();
                let anchor = kept.iter().sum::<f64>() / kept.len() as f64;
                gap = gap.min((anchor - min).abs()).min((anchor - max).abs());
                if anchor <= min {
                    method.below.value()
                } else if anchor <= max {
                    (max - anchor) / (max - min)
                } else {
                    0.0
                }
            });
            let p = if method.share > 0.0 { method.share } else { p.sum::<f64>() / stable.len() as f64 };
            let exact = p * of[i].blocks as f64;
            if method.share == 0.0 {
                let cut = if method.rounding == Rounding::Nearest { exact + 0.5 } else { exact };
                gap = gap.min((cut - cut.round()).abs());
            }
            round(exact).min(middle(i).len())
        })
        .collect();
    let total: usize = match method.quota {
        Quota::Retrieved => counts.iter().sum(),
        Quota::All => of.iter().map(|n| n.blocks).sum(),
    };
    let quota = if method.filter { round(total as f64 / of.len() as f64) } else { usize::MAX };
    let best = |mut ranked: Vec<(f64, (usize, usize))>, count: usize, gap: &mut f64| {
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if count > 0 && count < ranked.len() {
            *gap = gap.min(ranked[count - 1].0 - ranked[count].0);
        }
        ranked.truncate(count);
        let mut kept: Vec<(usize, usize)> = ranked.into_iter().map(|r| r.1).collect();
        kept.sort_unstable();
        kept
    };
    let blocks = (0..LAYERS)
        .map(|l| {
            let mut pool = Vec::new();
            for i in 0..of.len() {
                let ranked = middle(i).map(|b| (scores[l][i][b].0, (i, b))).collect();
                for (i, b) in best(ranked, counts[i], &mut gap) {
                    let (score, length) = scores[l][i][b];
                    pool.push((if method.normalise { score / length } else { score }, (i, b)));
                }
            }
            best(pool, quota, &mut gap)
        })
        .collect();
    (blocks, gap)
}

fn methods() -> Vec<SamKv> {
    let base = SamKv { block: 8, ..SamKv::default() };
    vec![
        base,
        SamKv { bias: false, ..base },
        SamKv { filter: false, ..base },
        SamKv { quota: Quota::All, share: 0.5, ..base },
        SamKv { below: Below::One, ..base },
        SamKv { rounding: Rounding::Nearest, ..base },
        SamKv { rounding: Rounding::Ceil, ..base },
        SamKv { extremes: Extremes::Online, ..base },
        SamKv { rotation: Rotation::Centre, ..base },
        SamKv { cosine: Cosine::Layer, ..base },
        SamKv { normalise: false, ..base },
        SamKv { initial: 2, local: 1, ..base },
        SamKv { stable_layers: 5, ..base },
    ]
}

#[test]
fn selection_follows_equations_1_to_3_on_random_numbers() {
    let mut random = Random(77);
    let rope = Rope::new((0..D / 2).map(|i| 1.0 / (i + 1) as f32).collect(), 1.0);
    let (mut compared, mut retrieved) = (0, 0);
    for method in methods().into_iter().flat_map(|method| [method; 4]) {
        for documents in [vec![100], vec![70, 131], vec![90, 20, 160, 64], vec![200, 200, 200, 200, 200]] {
            let mut start = 3;
            let places: Vec<ChunkSpan> = documents
                .iter()
                .map(|tokens| {
                    let span = Span::new(start, start + tokens);
                    start += tokens;
                    ChunkSpan { span, ..ChunkSpan::default() }
                })
                .collect();
            let prompt = PromptLayout {
                layers: LAYERS,
                system: Span::new(0, 3),
                system_cached: true,
                chunks: places.clone(),
                question: Span::new(start, start + 7),
            };
            let of: Vec<Numbers> =
                documents.iter().map(|tokens| Numbers::new(&mut random, &method, *tokens)).collect();
            let summaries: Vec<AuxTensors> = of.iter().map(Numbers::summary).collect();
            let queries = random.many(LAYERS * HEADS * D);
            let selection = method.select(&inputs(&prompt, summaries, &rope), 0, &queries).unwrap();
            let spans: Vec<Span> = places.iter().map(|place| place.span).collect();
            let (expected, gap) = direct(&method, &of, &spans, prompt.question, &queries);
            if gap < 2e-5 {
                continue;
            }
            let base = method.base(&prompt);
            for (layer, (kept, expected)) in selection.layers.iter().zip(&expected).enumerate() {
                let found: Vec<Span> = kept.spans.iter().copied().filter(|s| !base.contains(s)).collect();
                let block = |(i, b): &(usize, usize)| {
                    let start = spans[*i].start as usize + b * method.block;
                    Span::new(start, start + method.block)
                };
                assert_eq!(found, expected.iter().map(block).collect::<Vec<_>>(), "{method:?} layer {layer}");
                let marked = expected.iter().filter_map(|(i, b)| {
                    let at = layer * of[*i].blocks + b;
                    let token = spans[*i].start + of[*i].representative[at] as u32;
                    (of[*i].marked[at] == 1.0).then_some(token)
                });
                let mut fresh: Vec<u32> = base.iter().flat_map(|s| s.positions()).chain(marked).collect();
                fresh.sort_unstable();
                assert_eq!(kept.recomputed, fresh, "ends and marked tokens are computed anew");
                retrieved += expected.len();
            }
            compared += 1;
        }
    }
    assert!(compared > 80 && retrieved > 2000, "{compared} compared, {retrieved} blocks retrieved");
}

#[test]
fn switches_take_out_selection_and_recomputation() {
    let places = vec![ChunkSpan { span: Span::new(0, 400), ..ChunkSpan::default() }];
    let prompt = PromptLayout {
        layers: LAYERS,
        system: Span::new(0, 0),
        system_cached: true,
        chunks: places.clone(),
        question: Span::new(400, 404),
    };
    let numbers = Numbers::new(&mut Random(5), &SamKv::default(), 400);
    let (summary, queries) = (numbers.summary(), Random(6).many(LAYERS * HEADS * D));
    let rope = Rope::new(vec![1.0; D / 2], 1.0);
    let select = |method: SamKv| {
        let queries = if method.asks(&prompt) { &queries[..] } else { &[] };
        method.select(&inputs(&prompt, vec![summary.clone()], &rope), 0, queries).unwrap()
    };
    // 400 tokens: six blocks of 64 and one of 16; the last two are local.
    let ends = [Span::new(0, 64), Span::new(320, 400)];
    let without = SamKv { selection: false, ..SamKv::default() };
    assert!(!without.asks(&prompt));
    assert!(select(without).layers.iter().all(|kept| kept.spans == ends && kept.recomputed.len() == 144));
    let all = SamKv { share: 1.0, recompute: Recompute::Kept, ..SamKv::default() };
    assert!(select(all).layers.iter().all(|kept| kept.len() == 400 && kept.recomputed.len() == 400));
    let none = SamKv { share: 1.0, recompute: Recompute::None, ..SamKv::default() };
    assert!(select(none).layers.iter().all(|kept| kept.len() == 400 && kept.recomputed.is_empty()));
}

#[test]
fn documents_of_192_tokens_are_kept_whole_and_nothing_is_asked() {
    let method = SamKv::default();
    let place = |start, end| ChunkSpan { span: Span::new(start, end), ..ChunkSpan::default() };
    let chunks = [place(2, 194), place(194, 204)];
    let view = |chunks: &[ChunkSpan]| PromptLayout {
        layers: LAYERS,
        system: Span::new(0, 2),
        system_cached: true,
        chunks: chunks.to_vec(),
        question: Span::new(204, 206),
    };
    assert!(!method.asks(&view(&chunks)));
    assert_eq!(method.base(&view(&chunks)), [Span::new(2, 194), Span::new(194, 204)]);
    let longer = [place(2, 195)];
    assert!(method.asks(&view(&longer)));
    assert_eq!(method.base(&view(&longer)), [Span::new(2, 66), Span::new(130, 195)]);
}

#[test]
fn what_is_kept_beside_a_document_follows_its_definition() {
    let mut random = Random(9);
    for (tokens, first, dtype) in [(150, 1, Dtype::F32), (61, 0, Dtype::F16), (9, 1, Dtype::F32)] {
        let method = SamKv { block: 16, ..SamKv::default() };
        let rows = tokens + first;
        let (q, raw) = (random.many(rows * HEADS * D), random.many(tokens * WIDTH));
        // Keys that are far from alike, so that α and the representative tokens are clear.
        let spread = random.many(KV_HEADS * rows * D).iter().map(|x| 3.0 * x).collect::<Vec<_>>();
        let mut k = Buffer::zeros(dtype, spread.len());
        k.write_f32(0, &spread);
        let mut keys = Buffer::zeros(dtype, raw.len());
        keys.write_f32(0, &raw);
        let (visible, given) = ((0..rows as u32).map(|row| (0, row + 1)).collect::<Vec<_>>(), &q);
        let cpu = Cpu::new(2).unwrap();
        let (queries_of_rows, cached) = (upload(&cpu, &q), cpu.upload_kv(k.as_slice()));
        let attention = CachedAttention {
            q: &queries_of_rows,
            first_row: 0,
            k: &cached,
            v: &cached,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: D,
            capacity: rows,
            visible: &visible,
            scale: (D as f32).sqrt().recip(),
            precision: Precision::F32,
        };
        let (mut out, mut lse) = (cpu.floats(q.len()), cpu.floats(0));
        Device::attention(&cpu, &attention, &mut out, Some(&mut lse));
        let local = method.last_queries().min(tokens);
        let queries = random.many(local * HEADS * D);
        let mut summary = AuxTensors::default();
        for layer in 0..2 {
            let queries = &upload(&cpu, &queries);
            let tensors =
                ContextTensors { device: &cpu, attention, lse: &lse, first, queries, k: keys.as_slice() };
            method.observe(&ContextLayer::new(layer, 2, tensors), &mut summary);
        }
        // Plain f64: softmax of every row, mean over heads.
        let mut weights = vec![vec![0.0; tokens]; tokens];
        for (row, weights) in weights.iter_mut().enumerate() {
            for head in 0..HEADS {
                let logit = |slot: usize| {
                    let (q, g) = ((row + first) * HEADS + head, head / (HEADS / KV_HEADS));
                    let key = |e| f64::from(k.as_slice().get((g * rows + slot) * D + e));
                    (0..D).map(|e| f64::from(given[q * D + e]) * key(e)).sum::<f64>() / (D as f64).sqrt()
                };
                let total: f64 = (0..=row + first).map(|slot| logit(slot).exp()).sum();
                for (token, weight) in weights.iter_mut().enumerate().take(row) {
                    *weight += logit(token + first).exp() / total / HEADS as f64;
                }
            }
        }
        let received = |t: usize| {
            (t + 1..tokens).map(|row| weights[row][t]).sum::<f64>() / (tokens - 1 - t).max(1) as f64
        };
        let blocks = tokens.div_ceil(16);
        let get = |name: &str, i: usize| summary.get(name).unwrap().data.as_slice().get(i);
        for layer in 0..2 {
            let mut alphas = Vec::new();
            for block in 0..blocks {
                let span = block * 16..((block + 1) * 16).min(tokens);
                let best =
                    span.clone().max_by(|a, b| received(*a).total_cmp(&received(*b)).then(b.cmp(a))).unwrap();
                let found = get("representative", layer * blocks + block) as usize;
                assert!((received(found) - received(best)).abs() < 1e-6, "block {block}: {found} {best}");
                let expected = received(found);
                assert!((f64::from(get("received", layer * blocks + block)) - expected).abs() < 1e-6);
                let points: Vec<(f64, f64)> = (found + 1..tokens)
                    .map(|row| (((row - found) as f64).ln(), weights[row][found].max(1e-8).ln()))
                    .collect();
                let n = points.len() as f64;
                let (mx, my) = (
                    points.iter().map(|p| p.0).sum::<f64>() / n,
                    points.iter().map(|p| p.1).sum::<f64>() / n,
                );
                let slope = points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum::<f64>()
                    / points.iter().map(|p| (p.0 - mx).powi(2)).sum::<f64>();
                let alpha = if points.len() < 8 { f64::INFINITY } else { -slope };
                let kept = f64::from(get("alpha", layer * blocks + block));
                assert!(
                    kept == alpha || (kept - alpha).abs() < 1e-4 * alpha.abs().max(1.0),
                    "{kept} {alpha}"
                );
                alphas.push(alpha);
                for e in 0..WIDTH {
                    let mean =
                        span.clone().map(|t| f64::from(keys.as_slice().get(t * WIDTH + e))).sum::<f64>()
                            / span.len() as f64;
                    let found = f64::from(get("k_mean", (layer * blocks + block) * WIDTH + e));
                    assert!((found - mean).abs() < 1e-3, "{found} {mean}");
                }
            }
            for e in 0..HEADS * D {
                let mean =
                    (0..local).map(|r| f64::from(queries[r * HEADS * D + e])).sum::<f64>() / local as f64;
                assert!((f64::from(get("q_local", layer * HEADS * D + e)) - mean).abs() < 1e-6);
            }
            let middle = 1..blocks.saturating_sub(2).max(1);
            if middle.is_empty() {
                assert_eq!(get("extremes", 2 * layer), -1.0);
                continue;
            }
            let smallest = middle.clone().min_by(|a, b| alphas[*a].total_cmp(&alphas[*b])).unwrap();
            assert_eq!(get("extremes", 2 * layer) as usize, smallest);
            let kept = |b: &usize| get("received", layer * blocks + b);
            let least = middle.min_by(|a, b| kept(a).total_cmp(&kept(b))).unwrap();
            assert_eq!(get("extremes", 2 * layer + 1) as usize, least);
        }
    }
}

#[test]
fn merging_follows_equation_4() {
    let mut random = Random(3);
    let (new, old) = (random.many(WIDTH), random.many(WIDTH));
    let merged = |theta| {
        let method = SamKv { theta, ..SamKv::default() };
        let mut merged = new.clone();
        method.merge(&mut merged, &old, D);
        merged
    };
    let expected = |part: usize, fixed: Option<f64>| -> Vec<f64> {
        (0..WIDTH)
            .map(|e| {
                let p = e / part * part..(e / part + 1) * part;
                let theta =
                    fixed.unwrap_or_else(|| cosine(&wide(&new[p.clone()]), &wide(&old[p])).clamp(0.0, 1.0));
                theta * f64::from(new[e]) + (1.0 - theta) * f64::from(old[e])
            })
            .collect()
    };
    for (theta, expected) in [
        (Theta::Token, expected(WIDTH, None)),
        (Theta::Head, expected(D, None)),
        (Theta::Constant, expected(WIDTH, Some(0.9))),
    ] {
        let merged = merged(theta);
        assert!(wide(&merged).iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{theta:?}");
    }
    // Opposite directions: θ is 0, and the cached one stays.
    let mut opposite: Vec<f32> = old.iter().map(|x| -x).collect();
    SamKv::default().merge(&mut opposite, &old, D);
    assert_eq!(opposite, old);
    let mut same = old.clone();
    SamKv::default().merge(&mut same, &old, D);
    assert!(same.iter().zip(&old).all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn a_summary_of_other_sizes_is_refused_by_name() {
    let method = SamKv::default();
    let places = vec![ChunkSpan { span: Span::new(0, 400), ..ChunkSpan::default() }];
    let prompt = PromptLayout {
        layers: LAYERS,
        system: Span::new(0, 0),
        system_cached: true,
        chunks: places.clone(),
        question: Span::new(400, 404),
    };
    let summary = Numbers::new(&mut Random(5), &method, 300).summary();
    let queries = vec![0.0; LAYERS * HEADS * D];
    let rope = Rope::new(vec![1.0; D / 2], 1.0);
    let error = method.select(&inputs(&prompt, vec![summary], &rope), 0, &queries).unwrap_err().to_string();
    assert!(error.contains("k_mean") && error.contains("0..400"), "{error}");
    assert!(!method.keeps_all_tokens());
}
