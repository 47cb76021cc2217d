//! Attention to blocks that are retrieved, over a cache that holds every token; slot = position.

use refrain_fusion::{FusionMethod, KnownBlock, Retrieval, representative};
use refrain_kernels::{AttentionOutputs, Buffer, Cpu};
use refrain_kv::{LayerCache, Lender, Rope, Ropes, Shape, Span, stats, top_k};
use refrain_model::Decoder;

use crate::forward::{Rows, State, attention};
use crate::places::Places;
use crate::prefill::{Watch, Work, seen};
use crate::sparse::{Asked, Loading, Request, summaries};
use crate::{Engine, Result};

/// What one request knows of its blocks.
#[derive(Clone, Debug)]
pub(crate) struct Retrieving {
    sizes: Retrieval,
    budget: Budget,
    /// Rows from this position on retrieve; those before see everything.
    asked: u32,
    ropes: Ropes,
    layers: Vec<Blocks>,
    /// Queries before RoPE of the projected rows, `rows × H × d`.
    pub(crate) raw: Vec<f32>,
    /// Tokens that the last row has seen at most at a layer.
    pub(crate) seen: usize,
    /// Keys that rows have seen together since this was last asked.
    keys: usize,
}

/// What is seen of the blocks out of the window: the best of them.
#[derive(Clone, Copy, Debug)]
enum Budget {
    Blocks(usize),
    /// Blocks of so many tokens together.
    Tokens(usize),
}

/// The blocks of one layer.
#[derive(Clone, Debug, Default)]
struct Blocks {
    spans: Vec<Span>,
    /// Representatives before RoPE, `blocks × Hkv·d`.
    keys: Vec<f32>,
    /// The first token that is in none yet; those before it are in a block, initial, or in none for good.
    next: usize,
    /// Attention that each token received while it was local, `Hkv × tokens`.
    received: Vec<f32>,
}

impl Retrieving {
    /// `room` tokens in all. From `asked` on rows retrieve, and tokens that leave the window become blocks; `known` ones are
    /// before.
    fn new(
        (sizes, budget): (Retrieval, Budget),
        ropes: Ropes,
        shape: Shape,
        known: &[KnownBlock],
        (asked, room): (u32, usize),
    ) -> Retrieving {
        let width = shape.width();
        let layer = |layer: usize| {
            let known = known.iter().filter(|block| block.span.start as usize >= sizes.initial);
            let (spans, keys): (Vec<Span>, Vec<&[f32]>) =
                known.map(|block| (block.span, &block.keys[layer * width..(layer + 1) * width])).unzip();
            let received = vec![0.0; shape.kv_heads * room];
            Blocks { spans, keys: keys.concat(), next: sizes.initial.max(asked as usize), received }
        };
        let layers = (0..shape.layers).map(layer).collect();
        Retrieving { sizes, budget, asked, ropes, layers, raw: Vec::new(), seen: 0, keys: 0 }
    }

    /// Keys that rows have seen together since this was last asked.
    pub(crate) fn take_keys(&mut self) -> usize {
        std::mem::take(&mut self.keys)
    }

    /// Bytes kept beside keys and values.
    pub(crate) fn side_bytes(&self) -> usize {
        let layer = |blocks: &Blocks| {
            size_of_val(blocks.spans.as_slice())
                + size_of_val(blocks.keys.as_slice())
                + size_of_val(blocks.received.as_slice())
        };
        self.layers.iter().map(layer).sum::<usize>() + size_of_val(self.raw.as_slice())
    }
}

impl Engine {
    /// What a method's rows retrieve by, and what it took to know; no retrieval where all is seen anyway. Nothing if a
    /// segment turned out broken.
    pub(crate) fn retrieving<'e>(
        &'e self,
        method: &dyn FusionMethod,
        asked: Asked<'_, 'e>,
        always: &[u32],
        room: usize,
        (lender, load): (&Lender<'_>, &mut Loading),
    ) -> Result<Option<(Option<Retrieving>, Work)>> {
        let Asked { view, segments, reach, .. } = asked;
        // What is not cached is computed and seen whole.
        let retrieval = method.retrieval().filter(|_| !method.reuses() || view.reusable() > 0);
        let sized = retrieval.map(|retrieval| (retrieval, retrieval.retrieval(&view)));
        let Some((retrieval, sizes)) = sized.filter(|(_, sizes)| room > sizes.local) else {
            return Ok(Some((None, Work::default())));
        };
        let (mut budget, mut work) = (Budget::Blocks(sizes.blocks.unwrap_or(0)), Work::default());
        if let Some(sparse) = retrieval.like() {
            let request = Request { asked, sparse, kind: 1, watch: Watch::Nothing };
            let Some((kept, before)) = self.kept_by(request, always, lender, load)? else { return Ok(None) };
            (budget, work) = (Budget::Tokens(kept.saturating_sub(sizes.initial + sizes.local)), before);
        }
        let shape = self.decoder.shape();
        let known = retrieval.known(&view, &summaries(segments, view.chunks.len(), 0), shape.width())?;
        let asked = if method.reuses() { view.question.start } else { 0 };
        let ropes = self.decoder.ropes(reach);
        let retrieving = Retrieving::new((sizes, budget), ropes, shape, &known, (asked, room));
        Ok(Some((Some(retrieving), work)))
    }
}

/// Rows that retrieve together at a layer.
struct Part<'a> {
    decoder: &'a Decoder,
    layer: usize,
    cache: &'a LayerCache,
    capacity: usize,
    positions: &'a [u32],
    /// Rotated queries, and the same before RoPE, `rows × H × d`.
    q: &'a [f32],
    raw: &'a [f32],
    /// The model's own window, or that of the retrieval.
    local: usize,
}

impl State {
    /// Attention of the projected rows alone, each to what is near it and what is retrieved for it.
    pub(crate) fn retrieve(&mut self, layer: usize, rows: &Rows) {
        let Some(retrieving) = &mut self.retrieving else { return };
        let config = self.decoder.config();
        let width = config.heads * config.head_dim;
        self.work.attended.resize(self.work.q.len());
        let local =
            config.layers[layer].window.map_or(retrieving.sizes.local, |w| w.min(retrieving.sizes.local));
        let before = rows.positions.partition_point(|p| *p < retrieving.asked);
        let (q, visible) = (&self.work.q[..before * width], &rows.visible[..before]);
        let (cached, capacity) = (self.cache.layer(layer), self.cache.capacity());
        let plain = attention(&self.decoder, layer, (cached, capacity), q, visible);
        self.decoder.backend().attention(&plain, &mut self.work.attended[..before * width]);
        retrieving.keys += seen(visible);
        let mut last = 0;
        for from in (before..rows.positions.len()).step_by(retrieving.sizes.rows) {
            let to = (from + retrieving.sizes.rows).min(rows.positions.len());
            let Retrieving { sizes, budget, ropes, layers, keys, raw, .. } = &mut *retrieving;
            let part = Part {
                decoder: &self.decoder,
                layer,
                cache: self.cache.layer(layer),
                capacity: self.cache.capacity(),
                positions: &rows.positions[from..to],
                q: &self.work.q[from * width..to * width],
                raw: &raw[from * width..to * width],
                local,
            };
            let out = &mut self.work.attended[from * width..to * width];
            let all = layers[layer].attend(&part, (sizes, *budget), ropes.layer(layer), out);
            *keys += all.0;
            last = all.1;
        }
        retrieving.seen = retrieving.seen.max(last);
    }
}

impl Blocks {
    /// Attention of rows that retrieve together; returns the keys that they see in all, and those that the last one sees.
    fn attend(
        &mut self,
        part: &Part<'_>,
        (sizes, budget): (&Retrieval, Budget),
        rope: &Rope,
        out: &mut [f32],
    ) -> (usize, usize) {
        let (config, cpu) = (part.decoder.config(), part.decoder.backend());
        let first_local = |p: u32| (p as usize + 1).saturating_sub(part.local) as u32;
        let near: Vec<(u32, u32)> = part.positions.iter().map(|p| (first_local(*p), p + 1)).collect();
        let (left, last) = (near[0].0 as usize, near[near.len() - 1].0 as usize);
        self.close(part, sizes, rope, left);
        let local = attention(part.decoder, part.layer, (part.cache, part.capacity), part.q, &near);
        let mut lse = vec![0.0; near.len() * config.heads];
        cpu.attention_with_outputs(
            &local,
            out,
            AttentionOutputs { lse: Some(&mut lse), ..AttentionOutputs::default() },
        );
        let mut far = (0, 0);
        if last > 0 {
            let places = self.far(part, (sizes, budget), rope, left, last);
            far = self.attend_far(part, rope, &places, &near, (out, &mut lse));
        }
        // What local tokens received, of the softmax over everything.
        let slots = left..part.positions[part.positions.len() - 1] as usize + 1;
        let mut sums = vec![0.0; config.kv_heads * slots.len()];
        cpu.attention_mass_from_lse(&local, &lse, slots.clone(), &mut sums);
        let room = self.received.len() / config.kv_heads;
        for (received, sums) in self.received.chunks_exact_mut(room).zip(sums.chunks_exact(slots.len())) {
            received[slots.clone()].iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
        }
        (far.0 + seen(&near), far.1 + seen(&near[near.len() - 1..]))
    }

    /// Makes blocks of the tokens that have left the window of all rows to come: those below `left`.
    fn close(&mut self, part: &Part<'_>, sizes: &Retrieval, rope: &Rope, left: usize) {
        let config = part.decoder.config();
        let d = config.head_dim;
        let room = self.received.len() / config.kv_heads;
        while self.next + sizes.block <= left {
            let span = Span::new(self.next, self.next + sizes.block);
            let keys = turned_back(part, rope, &Places::new([span]));
            let mut all = vec![0.0; keys.len()];
            keys.as_slice().to_f32(&mut all);
            for (head, keys) in all.chunks_exact(sizes.block * d).enumerate() {
                let received = &self.received[head * room..][span.range()];
                self.keys.extend(representative(keys, received, sizes.representatives));
            }
            self.spans.push(span);
            self.next += sizes.block;
        }
    }

    /// Positions below `last` that are seen though they are not near: the first ones, the blocks retrieved of those below
    /// `left`, and what is in no such block.
    fn far(
        &self,
        part: &Part<'_>,
        (sizes, budget): (&Retrieval, Budget),
        rope: &Rope,
        left: usize,
        last: usize,
    ) -> Places {
        let initial = Span::new(0, sizes.initial.min(last));
        let whole = self.spans.iter().take_while(|span| span.end as usize <= left).count();
        let mut spans = vec![initial];
        spans
            .extend(self.best(part, rope, whole, budget).into_iter().map(|block| self.spans[block as usize]));
        let in_blocks = self.spans[..whole].iter().copied().chain([initial]);
        spans.extend(Places::new(in_blocks).lacks(Span::new(0, last)));
        Places::new(spans)
    }

    /// The best of the first `whole` blocks: by the rows' mean query, rotated to the window's end.
    fn best(&self, part: &Part<'_>, rope: &Rope, whole: usize, budget: Budget) -> Vec<u32> {
        let all: usize = self.spans[..whole].iter().map(|span| span.len()).sum();
        let enough = match budget {
            Budget::Blocks(count) => whole <= count,
            Budget::Tokens(tokens) => all <= tokens,
        };
        if enough {
            return (0..whole as u32).collect();
        }
        let config = part.decoder.config();
        let (d, width) = (config.head_dim, config.heads * config.head_dim);
        let mut mean = stats::mean(part.raw, width);
        rotate(part.decoder, rope, part.local, &mut mean);
        let group = config.heads / config.kv_heads * d;
        let summed: Vec<f32> = mean
            .chunks_exact(group)
            .flat_map(|heads| (0..d).map(|e| heads[e..].iter().step_by(d).sum::<f32>()))
            .collect();
        let score = |key: &[f32]| summed.iter().zip(key).map(|(a, b)| a * b).sum();
        let scores: Vec<f32> = self.keys.chunks_exact(summed.len()).take(whole).map(score).collect();
        let tokens = match budget {
            Budget::Blocks(count) => return top_k(&scores, count),
            Budget::Tokens(tokens) => tokens,
        };
        // Best first; of equal ones the first.
        let mut order: Vec<u32> = (0..whole as u32).collect();
        order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
        let mut left = tokens;
        order.retain(|block| {
            let len = self.spans[*block as usize].len();
            let fits = len <= left;
            left -= if fits { len } else { 0 };
            fits
        });
        order.sort_unstable();
        order
    }

    /// Attention to far positions, merged into that to near ones. Returns how many rows see in all, and how many the last one.
    fn attend_far(
        &self,
        part: &Part<'_>,
        rope: &Rope,
        far: &Places,
        near: &[(u32, u32)],
        (out, lse): (&mut [f32], &mut [f32]),
    ) -> (usize, usize) {
        let (config, cpu) = (part.decoder.config(), part.decoder.backend());
        let (heads, width) = (config.heads, config.heads * config.head_dim);
        // Rows that see none of them come first.
        let none = near.partition_point(|near| far.before(near.0) == 0);
        let visible: Vec<(u32, u32)> = near[none..].iter().map(|near| (0, far.before(near.0))).collect();
        let Some((_, last)) = visible.last().copied() else { return (0, 0) };
        let d = config.head_dim;
        let slots: Vec<u32> = far.spans().iter().flat_map(|span| span.positions()).collect();
        let mut cache = part.cache.gather(d, part.capacity, &slots.repeat(config.kv_heads), 1, far.len());
        cache.k = turned_back(part, rope, far);
        let mut q = part.raw[none * width..].to_vec();
        // Keys are as before RoPE here: the scale that it would give them is the queries' to bear.
        rotate(part.decoder, &rope.squared(), part.local, &mut q);
        let attention = attention(part.decoder, part.layer, (&cache, far.len()), &q, &visible);
        let (mut other, mut other_lse) = (vec![0.0; q.len()], vec![0.0; visible.len() * heads]);
        let report = AttentionOutputs { lse: Some(&mut other_lse), ..AttentionOutputs::default() };
        cpu.attention_with_outputs(&attention, &mut other, report);
        stats::merge_attention(&mut out[none * width..], &mut lse[none * heads..], &other, &other_lse);
        (seen(&visible), last as usize)
    }
}

/// Rotates queries to the last place of a window of `local` tokens.
fn rotate(decoder: &Decoder, rope: &Rope, local: usize, q: &mut [f32]) {
    let config = decoder.config();
    let rows = q.len() / (config.heads * config.head_dim);
    let table = rope.table(std::iter::repeat_n(local as u32 - 1, rows));
    let (cos, sin) = table.slice(0, rows);
    decoder.backend().rope(q, config.heads, config.head_dim, cos, sin, table.rotary_dim());
}

/// The keys of some positions before RoPE, `Hkv × positions × d`.
fn turned_back(part: &Part<'_>, rope: &Rope, places: &Places) -> Buffer {
    let config = part.decoder.config();
    let (d, cpu): (usize, &Cpu) = (config.head_dim, part.decoder.backend());
    let keys = part.cache.k.as_slice();
    let table = rope.back(places.spans().iter().flat_map(|span| span.positions()));
    let mut all = Buffer::zeros(keys.dtype(), config.kv_heads * places.len() * d);
    let mut one = Buffer::zeros(keys.dtype(), places.len() * d);
    for head in 0..config.kv_heads {
        for span in places.spans() {
            let first = places.before(span.start);
            let slots: Vec<u32> = (first..first + span.len() as u32).collect();
            let (cos, sin) = table.slice(first as usize, first as usize + span.len());
            let from = (head * part.capacity + span.start as usize) * d;
            let keys = keys.range(from..from + span.len() * d);
            cpu.place_keys(keys, 1, d, cos, sin, table.rotary_dim(), &slots, &mut one);
        }
        all.write(head * places.len() * d, one.as_slice());
    }
    all
}
