//! Attention to blocks that are retrieved, over a cache that holds every token; slot = position.

use refrain_fusion::{KnownBlock, Retrieval, representative};
use refrain_kernels::{Buffer, Cpu, Report};
use refrain_kv::{LayerCache, Rope, Shape, Span, stats, top_k};
use refrain_model::Decoder;

use crate::forward::{Rows, State, attention};
use crate::places::Places;

/// What one request knows of its blocks.
#[derive(Debug)]
pub(crate) struct Retrieving {
    sizes: Retrieval,
    /// Blocks that are seen of those out of the window.
    blocks: usize,
    rope: Rope,
    layers: Vec<Blocks>,
    /// Queries before RoPE of the projected rows, `rows × H × d`.
    pub(crate) raw: Vec<f32>,
    /// Tokens that the last row has seen at most at a layer.
    pub(crate) seen: usize,
    /// Keys that rows have seen together since this was last asked.
    keys: usize,
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
    /// `room` tokens in all; `known` blocks end at `from`, where those begin that are made as tokens leave the window.
    pub(crate) fn new(
        sizes: Retrieval,
        blocks: usize,
        rope: Rope,
        shape: Shape,
        known: Vec<KnownBlock>,
        (from, room): (usize, usize),
    ) -> Retrieving {
        let width = shape.width();
        let layer = |layer: usize| {
            let known = known.iter().filter(|block| block.span.start as usize >= sizes.initial);
            let (spans, keys): (Vec<Span>, Vec<&[f32]>) =
                known.map(|block| (block.span, &block.keys[layer * width..(layer + 1) * width])).unzip();
            let received = vec![0.0; shape.kv_heads * room];
            Blocks { spans, keys: keys.concat(), next: from.max(sizes.initial), received }
        };
        let layers = (0..shape.layers).map(layer).collect();
        Retrieving { sizes, blocks, rope, layers, raw: Vec::new(), seen: 0, keys: 0 }
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

/// Rows that retrieve together at a layer.
struct Part<'a> {
    decoder: &'a Decoder,
    cache: &'a LayerCache,
    capacity: usize,
    positions: &'a [u32],
    /// Rotated queries, and the same before RoPE, `rows × H × d`.
    q: &'a [f32],
    raw: &'a [f32],
    /// The model's own window, or that of the retrieval.
    local: usize,
}

impl State<'_> {
    /// Attention of the projected rows alone, each to what is near it and what is retrieved for it.
    pub(crate) fn retrieve(&mut self, layer: usize, rows: &Rows) {
        let Some(retrieving) = &mut self.retrieving else { return };
        let config = self.decoder.config();
        let width = config.heads * config.head_dim;
        self.work.attended.resize(self.work.q.len());
        let local = config.window(layer).map_or(retrieving.sizes.local, |w| w.min(retrieving.sizes.local));
        let mut seen = 0;
        for from in (0..rows.positions.len()).step_by(retrieving.sizes.rows) {
            let to = (from + retrieving.sizes.rows).min(rows.positions.len());
            let part = Part {
                decoder: self.decoder,
                cache: self.cache.layer(layer),
                capacity: self.cache.capacity(),
                positions: &rows.positions[from..to],
                q: &self.work.q[from * width..to * width],
                raw: &retrieving.raw[from * width..to * width],
                local,
            };
            let out = &mut self.work.attended[from * width..to * width];
            seen = retrieving.layers[layer].attend(
                &part,
                &retrieving.sizes,
                retrieving.blocks,
                &retrieving.rope,
                out,
            );
            // Nearly: the first rows of a part see fewer.
            retrieving.keys += seen * part.positions.len();
        }
        retrieving.seen = retrieving.seen.max(seen);
    }
}

impl Blocks {
    /// Attention of rows that retrieve together; returns the most tokens that one of them sees.
    fn attend(
        &mut self,
        part: &Part<'_>,
        sizes: &Retrieval,
        count: usize,
        rope: &Rope,
        out: &mut [f32],
    ) -> usize {
        let (config, cpu) = (part.decoder.config(), part.decoder.backend());
        let first_local = |p: u32| (p as usize + 1).saturating_sub(part.local) as u32;
        let near: Vec<(u32, u32)> = part.positions.iter().map(|p| (first_local(*p), p + 1)).collect();
        let (left, last) = (near[0].0 as usize, near[near.len() - 1].0 as usize);
        self.close(part, sizes, rope, left);
        let local = attention(part.decoder, part.cache, part.capacity, part.q, &near);
        let mut lse = vec![0.0; near.len() * config.heads];
        cpu.attention_reporting(&local, out, Report { lse: Some(&mut lse), ..Report::default() });
        let mut remote_seen = 0;
        if last > 0 {
            let far = self.far(part, sizes, count, rope, left, last);
            remote_seen = self.attend_far(part, rope, &far, &near, (out, &mut lse));
        }
        // What local tokens received, of the softmax over everything.
        let slots = left..part.positions[part.positions.len() - 1] as usize + 1;
        let mut sums = vec![0.0; config.kv_heads * slots.len()];
        cpu.received(&local, &lse, slots.clone(), &mut sums);
        let room = self.received.len() / config.kv_heads;
        for (received, sums) in self.received.chunks_exact_mut(room).zip(sums.chunks_exact(slots.len())) {
            received[slots.clone()].iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
        }
        let nearest = near[near.len() - 1];
        remote_seen + (nearest.1 - nearest.0) as usize
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
        sizes: &Retrieval,
        count: usize,
        rope: &Rope,
        left: usize,
        last: usize,
    ) -> Places {
        let initial = Span::new(0, sizes.initial.min(last));
        let whole = self.spans.iter().take_while(|span| span.end as usize <= left).count();
        let mut spans = vec![initial];
        spans.extend(self.best(part, rope, whole, count).into_iter().map(|block| self.spans[block as usize]));
        let in_blocks = self.spans[..whole].iter().copied().chain([initial]);
        spans.extend(Places::new(in_blocks).lacks(Span::new(0, last)));
        Places::new(spans)
    }

    /// The best of the first `whole` blocks: by the rows' mean query, rotated to the window's end.
    fn best(&self, part: &Part<'_>, rope: &Rope, whole: usize, count: usize) -> Vec<u32> {
        if whole <= count {
            return (0..whole as u32).collect();
        }
        let config = part.decoder.config();
        let (d, width) = (config.head_dim, config.heads * config.head_dim);
        let rows = part.positions.len() as f32;
        let mut mean: Vec<f32> =
            (0..width).map(|e| part.raw[e..].iter().step_by(width).sum::<f32>() / rows).collect();
        rotate(part.decoder, rope, part.local, &mut mean);
        let group = config.heads / config.kv_heads * d;
        let summed: Vec<f32> = mean
            .chunks_exact(group)
            .flat_map(|heads| (0..d).map(|e| heads[e..].iter().step_by(d).sum::<f32>()))
            .collect();
        let score = |key: &[f32]| summed.iter().zip(key).map(|(a, b)| a * b).sum();
        let scores: Vec<f32> = self.keys.chunks_exact(summed.len()).take(whole).map(score).collect();
        top_k(&scores, count)
    }

    /// Attention to far positions, merged into that to near ones. Returns how many the last row sees.
    fn attend_far(
        &self,
        part: &Part<'_>,
        rope: &Rope,
        far: &Places,
        near: &[(u32, u32)],
        (out, lse): (&mut [f32], &mut [f32]),
    ) -> usize {
        let (config, cpu) = (part.decoder.config(), part.decoder.backend());
        let (heads, width) = (config.heads, config.heads * config.head_dim);
        // Rows that see none of them come first.
        let none = near.partition_point(|near| far.before(near.0) == 0);
        let visible: Vec<(u32, u32)> = near[none..].iter().map(|near| (0, far.before(near.0))).collect();
        let Some((_, seen)) = visible.last().copied() else { return 0 };
        let d = config.head_dim;
        let slots: Vec<u32> = far.spans().iter().flat_map(|span| span.positions()).collect();
        let mut cache = part.cache.gather(d, part.capacity, &slots.repeat(config.kv_heads), 1, far.len());
        cache.k = turned_back(part, rope, far);
        let mut q = part.raw[none * width..].to_vec();
        rotate(part.decoder, rope, part.local, &mut q);
        let attention = attention(part.decoder, &cache, far.len(), &q, &visible);
        let (mut other, mut other_lse) = (vec![0.0; q.len()], vec![0.0; visible.len() * heads]);
        let report = Report { lse: Some(&mut other_lse), ..Report::default() };
        cpu.attention_reporting(&attention, &mut other, report);
        stats::merge_attention(&mut out[none * width..], &mut lse[none * heads..], &other, &other_lse);
        seen as usize
    }
}

/// Rotates queries to the last place of a window of `local` tokens.
fn rotate(decoder: &Decoder, rope: &Rope, local: usize, q: &mut [f32]) {
    let config = decoder.config();
    let rows = q.len() / (config.heads * config.head_dim);
    let table = rope.table(std::iter::repeat_n(local as u32 - 1, rows));
    let (cos, sin) = table.slice(0, rows);
    decoder.backend().rope(q, config.heads, config.head_dim, cos, sin, config.rope.rotary_dim);
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
            cpu.place_keys(keys, 1, d, cos, sin, config.rope.rotary_dim, &slots, &mut one);
        }
        all.write(head * places.len() * d, one.as_slice());
    }
    all
}
