//! Attention to blocks that are retrieved, over a cache that holds every token; slot = position.

use refrain_fusion::{Retrieval, RetrievalBudget, RetrievalPlan, representative};
use refrain_kernels::{AttentionOutputs, Buffer, Cpu, Dtype};
use refrain_kv::{KvBufferPool, LayerCache, Rope, RopeTables, Ropes, Shape, Span, stats, top_k};
use refrain_model::Decoder;

use super::decode_cache::{DecodeCache, DecodeToken};
use super::full::FullCache;
use super::slots::SlotMap;
use crate::forward::{attention, visible_keys};

/// The blocks of one request.
#[derive(Clone, Debug)]
pub(crate) struct BlockRetrieval {
    sizes: Retrieval,
    budget: RetrievalBudget,
    /// Tokens from this position on retrieve; those before see everything.
    from: u32,
    ropes: Ropes,
    layers: Vec<Blocks>,
    /// Tokens that the last token has seen at most at a layer.
    pub(crate) seen: usize,
    /// Keys that tokens have seen together since [`BlockRetrieval::take_keys`].
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

impl BlockRetrieval {
    /// Blocks of a request of `room` tokens in all.
    pub(crate) fn new(plan: &RetrievalPlan, ropes: Ropes, shape: Shape, room: usize) -> BlockRetrieval {
        let RetrievalPlan { sizes, budget, known, from } = plan;
        let width = shape.width();
        let layer = |layer: usize| {
            let known = known.iter().filter(|block| block.span.start as usize >= sizes.initial);
            let (spans, keys): (Vec<Span>, Vec<&[f32]>) =
                known.map(|block| (block.span, &block.keys[layer * width..(layer + 1) * width])).unzip();
            let received = vec![0.0; shape.kv_heads * room];
            Blocks { spans, keys: keys.concat(), next: sizes.initial.max(*from as usize), received }
        };
        let layers = (0..shape.layers).map(layer).collect();
        BlockRetrieval { sizes: *sizes, budget: *budget, from: *from, ropes, layers, seen: 0, keys: 0 }
    }

    /// Keys that tokens have seen together since the last call.
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
        self.layers.iter().map(layer).sum()
    }
}

/// Projected tokens at a layer, with the cache that holds their keys and values; slot = position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetrievingTokens<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) cache: &'a LayerCache,
    pub(crate) capacity: usize,
    pub(crate) positions: &'a [u32],
    /// Slots that tokens before the retrieving ones see.
    pub(crate) visible: &'a [(u32, u32)],
    /// Rotated queries, and the same before RoPE, `m × H × d` each.
    pub(crate) q: &'a [f32],
    pub(crate) q_pre_rope: &'a [f32],
}

/// Tokens that retrieve together at a layer.
struct Part<'a> {
    layer: usize,
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

impl BlockRetrieval {
    /// Attention of projected tokens, each to the tokens near it and to the blocks that are retrieved for it, into `out`
    /// (`m × H × d`).
    pub(crate) fn attend(&mut self, layer: usize, tokens: &RetrievingTokens<'_>, out: &mut [f32]) {
        let RetrievingTokens { decoder, cache, capacity, positions, visible, q, q_pre_rope } = *tokens;
        let config = decoder.config();
        let width = config.heads * config.head_dim;
        let local = config.layers[layer].window.map_or(self.sizes.local, |w| w.min(self.sizes.local));
        let before = positions.partition_point(|p| *p < self.from);
        let seen = &visible[..before];
        let plain = attention(decoder, layer, (cache, capacity), &q[..before * width], seen);
        decoder.backend().attention(&plain, &mut out[..before * width]);
        self.keys += visible_keys(seen);
        let mut last = 0;
        for from in (before..positions.len()).step_by(self.sizes.rows) {
            let to = (from + self.sizes.rows).min(positions.len());
            let elements = from * width..to * width;
            let part = Part {
                layer,
                decoder,
                cache,
                capacity,
                positions: &positions[from..to],
                q: &q[elements.clone()],
                raw: &q_pre_rope[elements.clone()],
                local,
            };
            let BlockRetrieval { sizes, budget, ropes, layers, .. } = self;
            let (all, of_last) =
                layers[layer].attend(&part, (sizes, *budget), ropes.layer(layer), &mut out[elements]);
            self.keys += all;
            last = of_last;
        }
        self.seen = self.seen.max(last);
    }
}

impl Blocks {
    /// Attention of rows that retrieve together; returns the keys that they see in all, and those that the last one sees.
    fn attend(
        &mut self,
        part: &Part<'_>,
        (sizes, budget): (&Retrieval, RetrievalBudget),
        rope: &Rope,
        out: &mut [f32],
    ) -> (usize, usize) {
        let (config, cpu) = (part.decoder.config(), part.decoder.backend());
        let first_local = |p: u32| (p as usize + 1).saturating_sub(part.local) as u32;
        let near: Vec<(u32, u32)> = part.positions.iter().map(|p| (first_local(*p), p + 1)).collect();
        let (left, last) = (near[0].0 as usize, near[near.len() - 1].0 as usize);
        self.seal_blocks(part, sizes, rope, left);
        let local = attention(part.decoder, part.layer, (part.cache, part.capacity), part.q, &near);
        let mut lse = vec![0.0; near.len() * config.heads];
        cpu.attention_with_outputs(
            &local,
            out,
            AttentionOutputs { lse: Some(&mut lse), ..AttentionOutputs::default() },
        );
        let mut far = (0, 0);
        if last > 0 {
            let places = self.remote(part, (sizes, budget), rope, left, last);
            far = self.attend_remote(part, rope, &places, &near, (out, &mut lse));
        }
        // The weight that local tokens received, of the softmax over all tokens.
        let slots = left..part.positions[part.positions.len() - 1] as usize + 1;
        let mut sums = vec![0.0; config.kv_heads * slots.len()];
        cpu.attention_mass_from_lse(&local, &lse, slots.clone(), &mut sums);
        let room = self.received.len() / config.kv_heads;
        for (received, sums) in self.received.chunks_exact_mut(room).zip(sums.chunks_exact(slots.len())) {
            received[slots.clone()].iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
        }
        (far.0 + visible_keys(&near), far.1 + visible_keys(&near[near.len() - 1..]))
    }

    /// Makes blocks of the tokens that have left the window of all rows to come: those below `left`.
    fn seal_blocks(&mut self, part: &Part<'_>, sizes: &Retrieval, rope: &Rope, left: usize) {
        let config = part.decoder.config();
        let d = config.head_dim;
        let room = self.received.len() / config.kv_heads;
        while self.next + sizes.block <= left {
            let span = Span::new(self.next, self.next + sizes.block);
            let keys = inverse_rope(part, rope, &SlotMap::new([span]));
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
    fn remote(
        &self,
        part: &Part<'_>,
        (sizes, budget): (&Retrieval, RetrievalBudget),
        rope: &Rope,
        left: usize,
        last: usize,
    ) -> SlotMap {
        let initial = Span::new(0, sizes.initial.min(last));
        let whole = self.spans.iter().take_while(|span| span.end as usize <= left).count();
        let mut spans = vec![initial];
        spans
            .extend(self.best(part, rope, whole, budget).into_iter().map(|block| self.spans[block as usize]));
        let in_blocks = self.spans[..whole].iter().copied().chain([initial]);
        spans.extend(SlotMap::new(in_blocks).lacks(Span::new(0, last)));
        SlotMap::new(spans)
    }

    /// The best of the first `whole` blocks: by the rows' mean query, rotated to the window's end.
    fn best(&self, part: &Part<'_>, rope: &Rope, whole: usize, budget: RetrievalBudget) -> Vec<u32> {
        let all: usize = self.spans[..whole].iter().map(|span| span.len()).sum();
        let enough = match budget {
            RetrievalBudget::Blocks(count) => whole <= count,
            RetrievalBudget::Tokens(tokens) => all <= tokens,
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
            RetrievalBudget::Blocks(count) => return top_k(&scores, count),
            RetrievalBudget::Tokens(tokens) => tokens,
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
    fn attend_remote(
        &self,
        part: &Part<'_>,
        rope: &Rope,
        far: &SlotMap,
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
        cache.k = inverse_rope(part, rope, far);
        let mut q = part.raw[none * width..].to_vec();
        // Keys are as before RoPE here: the scale that it would give them is the queries' to bear.
        rotate(part.decoder, &rope.squared(), part.local, &mut q);
        let attention = attention(part.decoder, part.layer, (&cache, far.len()), &q, &visible);
        let (mut other, mut other_lse) = (vec![0.0; q.len()], vec![0.0; visible.len() * heads]);
        let report = AttentionOutputs { lse: Some(&mut other_lse), ..AttentionOutputs::default() };
        cpu.attention_with_outputs(&attention, &mut other, report);
        stats::merge_attention(&mut out[none * width..], &mut lse[none * heads..], &other, &other_lse);
        (visible_keys(&visible), last as usize)
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
fn inverse_rope(part: &Part<'_>, rope: &Rope, places: &SlotMap) -> Buffer {
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

/// A cache that holds every token, and shows each token the blocks that it retrieves.
#[derive(Clone, Debug)]
pub(crate) struct BlockSparseCache {
    pub(crate) full: FullCache,
    pub(crate) retrieval: BlockRetrieval,
    q_pre_rope: Vec<f32>,
}

impl BlockSparseCache {
    pub(crate) fn new(full: FullCache, retrieval: BlockRetrieval) -> BlockSparseCache {
        BlockSparseCache { full, retrieval, q_pre_rope: Vec::new() }
    }
}

impl DecodeCache for BlockSparseCache {
    fn prompt_capacity(&self) -> usize {
        self.full.prompt_capacity()
    }

    fn store_prompt(&mut self, layer: usize, whole: LayerCache) -> Option<LayerCache> {
        self.full.store_prompt(layer, whole)
    }

    fn rotary(&self, position: u32, tables: &mut RopeTables) {
        self.full.rotary(position, tables);
    }

    fn append_and_attend(&mut self, layer: usize, mut token: DecodeToken<'_>) {
        self.q_pre_rope.clear();
        self.q_pre_rope.extend_from_slice(token.q);
        token.apply_rope();
        self.full.append(layer, &token);
        let tokens = RetrievingTokens {
            decoder: token.decoder,
            cache: self.full.kv.layer(layer),
            capacity: self.full.kv.capacity(),
            positions: &[token.position],
            visible: &[(0, token.position + 1)],
            q: token.q,
            q_pre_rope: &self.q_pre_rope,
        };
        self.retrieval.attend(layer, &tokens, token.out);
    }

    fn dtype(&self) -> Dtype {
        self.full.dtype()
    }

    fn retained(&self) -> usize {
        self.full.retained()
    }

    fn kv_bytes(&self) -> usize {
        self.full.kv_bytes()
    }

    fn kv_bytes_held(&self) -> usize {
        self.full.kv_bytes_held()
    }

    fn side_bytes(&self) -> usize {
        self.retrieval.side_bytes() + size_of_val(self.q_pre_rope.as_slice())
    }

    fn fork(&self) -> Box<dyn DecodeCache> {
        Box::new(self.clone())
    }

    fn release(&mut self, pool: &KvBufferPool) {
        self.full.release(pool);
    }

    #[cfg(test)]
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
