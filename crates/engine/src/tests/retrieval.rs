//! Attention to retrieved blocks: oracle 14, and a plain evaluation of the definition.

use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{FusionMethod, InfLlm, METHODS, MultiInfLlm, Pie, SamKv, Vanilla};
use refrain_kernels::{Dtype, Rotary, download, upload};
use refrain_model::Workspace;

use super::{
    STEPS, download_kv, engine, everywhere, exact, forced, max_difference, prefill, random_prompt, small,
    tiny,
};
use crate::{Engine, GenerateRequest, Prompt, Sampling};

fn sizes(initial: usize, local: usize, block: usize, blocks: usize, rows: usize) -> InfLlm {
    InfLlm { initial, local, block, topk: blocks, representatives: 4, rows }
}

#[test]
fn oracle_14_a_window_of_all_tokens_is_full_attention_to_the_bit() {
    everywhere(|engine| {
        let prompt = random_prompt(engine, 5, &[70, 90], 9, 3);
        let full = forced(engine, &prompt, &Vanilla, Eviction::full());
        let all = prompt.len() + 40;
        assert_eq!(full, forced(engine, &prompt, &sizes(16, all, 16, 2, 64), Eviction::full()));
        assert_ne!(full, forced(engine, &prompt, &sizes(16, 48, 16, 2, 64), Eviction::full()));
        let pie = forced(engine, &prompt, &Pie, Eviction::full());
        let multi = MultiInfLlm { local: all, topk: 1, ..MultiInfLlm::default() };
        assert_eq!(pie, forced(engine, &prompt, &multi, Eviction::full()));
        let multi = MultiInfLlm { local: 20, block: 16, topk: 1, ..MultiInfLlm::default() };
        assert_ne!(pie, forced(engine, &prompt, &multi, Eviction::full()));
    });
}

/// InfLLM by its definition: rows one block after the other, attention in f64, keys before RoPE kept as they are.
fn reference(engine: &Engine, prompt: &Prompt, sizes: &InfLlm, steps: &[u32]) -> Vec<f32> {
    let (decoder, config) = (engine.decoder(), engine.decoder().config());
    let (d, heads, kv_heads) = (config.head_dim, config.heads, config.kv_heads);
    let (group, width) = (heads / kv_heads, kv_heads * d);
    let ids = [prompt.ids(), steps.to_vec()].concat();
    let (n, m) = (prompt.len(), ids.len());
    let table = decoder.ropes(n + 40).layer(0).table(0..(m + sizes.local) as u32);
    let turn = |row: &[f32], t: usize| -> Vec<f64> {
        let Rotary { cos, sin, .. } = table.slice(t, t + 1);
        let mut out: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        for (out, row) in out.chunks_mut(d).zip(row.chunks(d)) {
            for i in 0..cos.len() {
                let (a, b) = (f64::from(row[i]), f64::from(row[i + cos.len()]));
                let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                (out[i], out[i + cos.len()]) = (a * c - b * s, b * c + a * s);
            }
        }
        out
    };
    let device = &**decoder.device();
    let (mut x, mut work) = (device.floats(0), Workspace::new(device, Dtype::F32));
    decoder.embed(ids.len(), |row| ids[row], &mut x).unwrap();
    for layer in 0..config.num_layers() {
        decoder.project(layer, &x, 0..m, &mut work);
        let (q, k, v) =
            (download(device, &work.q), download_kv(device, &work.k), download_kv(device, &work.v));
        let mut received = vec![vec![0.0f64; m]; kv_heads];
        // Blocks with their representatives, `Hkv × d`.
        let mut blocks: Vec<(usize, Vec<f64>)> = Vec::new();
        let mut attended = vec![0.0f32; q.len()];
        let ends: Vec<usize> = (0..n).step_by(sizes.rows).skip(1).chain(n..=m).collect();
        let mut start = 0usize;
        for end in ends {
            let left = (start + 1).saturating_sub(sizes.local);
            let mut next = sizes.initial + blocks.len() * sizes.block;
            while next + sizes.block <= left {
                let mut mean = vec![0.0; width];
                for g in 0..kv_heads {
                    let mut order: Vec<usize> = (next..next + sizes.block).collect();
                    order.sort_by(|a, b| received[g][*b].total_cmp(&received[g][*a]).then(a.cmp(b)));
                    for t in &order[..4] {
                        for e in 0..d {
                            mean[g * d + e] += f64::from(k[t * width + g * d + e]) / 4.0;
                        }
                    }
                }
                blocks.push((next, mean));
                next += sizes.block;
            }
            let mut asked = vec![0.0f64; heads * d];
            for row in start..end {
                let turned = turn(&q[row * heads * d..(row + 1) * heads * d], sizes.local - 1);
                asked.iter_mut().zip(turned).for_each(|(sum, x)| *sum += x / (end - start) as f64);
            }
            let score = |rep: &[f64]| -> f64 {
                (0..heads)
                    .map(|h| (0..d).map(|e| asked[h * d + e] * rep[h / group * d + e]).sum::<f64>())
                    .sum()
            };
            let mut order: Vec<usize> = (0..blocks.len()).collect();
            order.sort_by(|a, b| score(&blocks[*b].1).total_cmp(&score(&blocks[*a].1)).then(a.cmp(b)));
            order.truncate(sizes.topk);
            for row in start..end {
                let seen = |t: usize| {
                    let block = (t >= sizes.initial).then(|| (t - sizes.initial) / sizes.block);
                    t > row.saturating_sub(sizes.local)
                        || row < sizes.local
                        || block.is_none_or(|b| b >= blocks.len() || order.contains(&b))
                };
                for h in 0..heads {
                    let query = &q[(row * heads + h) * d..(row * heads + h + 1) * d];
                    let (near, far) = (turn(query, row), turn(query, sizes.local - 1));
                    let weights: Vec<(usize, f64)> = (0..=row)
                        .filter(|t| seen(*t))
                        .map(|t| {
                            let key = &k[t * width + h / group * d..][..d];
                            let dot: f64 = if t + sizes.local > row {
                                near.iter().zip(turn(key, t)).map(|(a, b)| a * b).sum()
                            } else {
                                far.iter().zip(key).map(|(a, b)| a * f64::from(*b)).sum()
                            };
                            (t, (dot / (d as f64).sqrt()).exp())
                        })
                        .collect();
                    let total: f64 = weights.iter().map(|w| w.1).sum();
                    for (t, w) in &weights {
                        if t + sizes.local > row {
                            received[h / group][*t] += w / total;
                        }
                        for e in 0..d {
                            attended[(row * heads + h) * d + e] +=
                                (w / total * f64::from(v[t * width + h / group * d + e])) as f32;
                        }
                    }
                }
            }
            start = end;
        }
        work.attended = upload(device, &attended);
        decoder.finish(layer, &mut x, 0..m, (&work, 0));
    }
    decoder.logits(&x, &mut work);
    work.logits[(n - 1) * config.vocab..].to_vec()
}

fn close(found: &[f32], expected: &[f32], what: &str) {
    let scale = expected.iter().map(|x| x.abs()).fold(1.0, f32::max);
    let difference = max_difference(found, expected);
    assert!(difference < 2e-4 * scale, "{what}: {difference} of {scale}");
}

#[test]
fn rows_see_what_the_definition_says_in_the_prompt_and_in_the_answer() {
    for name in ["llama", "phi3"] {
        let engine = engine(&tiny(name), exact(Dtype::F32));
        for (method, seed) in [
            (sizes(8, 24, 8, 2, 16), 1),
            (sizes(4, 17, 6, 1, 9), 2),
            (sizes(0, 30, 5, 3, 64), 3),
            (sizes(10, 20, 4, 0, 7), 4),
            // More blocks than there are: all are seen.
            (sizes(8, 24, 8, 50, 16), 5),
        ] {
            let prompt = random_prompt(&engine, 5, &[60, 45], 9, seed);
            let found = forced(&engine, &prompt, &method, Eviction::full());
            let expected = reference(&engine, &prompt, &method, &STEPS);
            close(&found, &expected, &format!("{name} {method:?}"));
        }
    }
}

#[test]
fn several_contexts_see_as_many_tokens_as_sam_kv_keeps() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[120, 150, 90], 9, 3);
    let like = SamKv { block: 8, share: 0.3, ..SamKv::default() };
    let kept = prefill(&engine, &prompt, &like, prompt.len() + 8).stats.kept_tokens;
    let multi = MultiInfLlm { block: 8, initial: 8, local: 16, like, ..MultiInfLlm::default() };
    let found = prefill(&engine, &prompt, &multi, prompt.len() + 8);
    let seen = found.stats.kept_tokens;
    // Up to a block, and the tokens between the window and the last block before it.
    assert!(seen.abs_diff(kept) <= 16, "{seen} of {kept}");
    assert!(found.stats.document_rows.iter().all(|rows| *rows == 0), "nothing is recomputed");
    // All blocks: what is far is seen at one distance, but nothing is left out.
    let all = prefill(&engine, &prompt, &MultiInfLlm { topk: 1000, ..multi }, prompt.len() + 8);
    assert_eq!(all.stats.kept_tokens, prompt.len());
    let one = prefill(&engine, &prompt, &MultiInfLlm { topk: 1, ..multi }, prompt.len() + 8);
    assert!(one.stats.kept_tokens < seen);
}

#[test]
fn a_system_part_that_is_not_cached_is_computed() {
    let multi = MultiInfLlm { block: 8, initial: 8, local: 16, topk: 2, ..MultiInfLlm::default() };
    // Earlier turns of a conversation make a system part that is not kept.
    let talking = engine(&tiny("llama"), exact(Dtype::F32));
    let mut prompt = random_prompt(&talking, 40, &[120, 150], 9, 3);
    let cached = prefill(&talking, &prompt, &multi, prompt.len() + 8);
    prompt.system_reusable = false;
    let computed = prefill(&talking, &prompt, &multi, prompt.len() + 8);
    assert_eq!(computed.stats.kept_tokens, cached.stats.kept_tokens);
    assert!(max_difference(&computed.logits, &cached.logits) < 1e-3);
}

#[test]
fn the_first_tokens_are_whole_blocks_of_documents() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[21, 150], 9, 3);
    let seen = |initial| {
        let multi = MultiInfLlm { block: 8, initial, local: 16, topk: 1, ..MultiInfLlm::default() };
        prefill(&engine, &prompt, &multi, prompt.len() + 8).stats.kept_tokens
    };
    assert_eq!(seen(8) - seen(5), 8);
    // 5 + 21 of the first document, then two blocks of the second.
    assert_eq!(seen(40) - seen(5), 21 + 16);
}

#[test]
fn blocks_of_documents_follow_what_their_own_attention_says() {
    // One document: a block's representative is the mean of the keys that later tokens of the document look at most.
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 5, &[50], 9, 3);
    let multi = MultiInfLlm { block: 8, initial: 1, local: 12, topk: 2, ..MultiInfLlm::default() };
    prefill(&engine, &prompt, &multi, prompt.len() + 8);
    let id = engine.chunk_id(&prompt.chunks[0]);
    let kind = multi.statistics()[0].kind();
    let summary = engine.store().aux_tensors(&id, &kind).unwrap().unwrap();
    let config = engine.decoder().config();
    let (d, kv_heads, heads) = (config.head_dim, config.kv_heads, config.heads);
    let found = summary.get("k_representative").unwrap().data.as_slice().floats();
    // At layer 0 queries and keys are those of the tokens alone.
    let bos: Vec<u32> = engine.tokenizer().bos().into_iter().collect();
    let ids = [&bos[..], &prompt.chunks[0].tokens].concat();
    let device = &**engine.decoder().device();
    let (mut x, mut work) = (device.floats(0), Workspace::new(device, Dtype::F32));
    engine.decoder().embed(ids.len(), |row| ids[row], &mut x).unwrap();
    engine.decoder().project(0, &x, 0..ids.len(), &mut work);
    let rope = engine.decoder().ropes(ids.len()).layer(0).clone();
    let raw = download_kv(device, &work.k);
    let (mut q, mut k) = (download(device, &work.q), raw.clone());
    for (position, row) in q.chunks_mut(heads * d).enumerate() {
        rope.rotate(row, d, position as u32);
    }
    for (position, row) in k.chunks_mut(kv_heads * d).enumerate() {
        rope.rotate(row, d, position as u32);
    }
    for g in 0..kv_heads {
        let mut received = vec![0.0f64; ids.len()];
        for row in 0..ids.len() {
            for h in g * heads / kv_heads..(g + 1) * heads / kv_heads {
                let weight = |t: usize| {
                    let (q, k) = (&q[(row * heads + h) * d..][..d], &k[(t * kv_heads + g) * d..][..d]);
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    (dot / (d as f64).sqrt()).exp()
                };
                let total: f64 = (0..=row).map(weight).sum();
                (0..row).for_each(|t| received[t] += weight(t) / total);
            }
        }
        for block in 0..7usize {
            let (from, to) = (bos.len() + block * 8, (bos.len() + block * 8 + 8).min(ids.len()));
            let mut order: Vec<usize> = (from..to).collect();
            order.sort_by(|a, b| received[*b].total_cmp(&received[*a]).then(a.cmp(b)));
            order.truncate(4);
            for e in 0..d {
                let sum: f32 = order.iter().map(|t| raw[(t * kv_heads + g) * d + e]).sum();
                let mean = sum / order.len() as f32;
                assert!((found[block * kv_heads * d + g * d + e] - mean).abs() < 1e-4, "block {block}");
            }
        }
    }
}

#[test]
fn policies_go_on_after_it_and_answers_say_what_was_seen() {
    let engine = engine(&tiny("llama"), small());
    let prompt = random_prompt(&engine, 5, &[120, 150], 9, 3);
    for spec in
        ["inf_llm:local=40,block=16,initial=8,topk=2,rows=32", "multi_inf_llm:block=16,local=20,topk=2"]
    {
        let method = METHODS.parse(spec).unwrap();
        let sampling = Sampling { max_tokens: 8, ..Sampling::default() };
        let request =
            GenerateRequest { ignore_eos: true, ..GenerateRequest::new(method.clone(), sampling.clone()) };
        let answer = engine.answer(&prompt, &request, |_| true).unwrap();
        assert_eq!(answer.tokens.len(), 8);
        assert!(answer.stats.sequence_ratio < 0.6, "{spec}: {}", answer.stats.sequence_ratio);
        assert_eq!(answer.stats.retained_tokens, prompt.len() + 7, "everything is held");
        assert!(answer.stats.side_bytes > 0);
        let policy = POLICIES.parse("morph_kv:capacity=60,window=8").unwrap();
        let bounded = engine
            .answer(&prompt, &GenerateRequest { eviction: policy.clone(), ..request }, |_| true)
            .unwrap();
        assert_eq!(bounded.tokens[0], answer.tokens[0], "the first token is the same");
        assert!(bounded.stats.retained_tokens <= 61);
    }
}
