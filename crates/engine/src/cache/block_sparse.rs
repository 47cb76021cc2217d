//! Attention to blocks that are retrieved, over a cache that holds every token; slot = position.

use refrain_fusion::{Retrieval, RetrievalBudget, RetrievalPlan, representative};
use refrain_kernels::{Device, Dtype, Floats, KvBuffer, copy_range};
use refrain_kv::{KvBufferPool, LayerCache, Rope, RopeTables, Ropes, Shape, Span, top_k};
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
    pub(crate) q: &'a Floats,
    pub(crate) q_pre_rope: &'a Floats,
}

/// Tokens that retrieve together at a layer.
struct Part<'a> {
    layer: usize,
    decoder: &'a Decoder,
    cache: &'a LayerCache,
    capacity: usize,
    positions: &'a [u32],
    /// Rotated queries of all tokens, and the same before RoPE, `m × H × d`; those of the part begin at `first_row`.
    q: &'a Floats,
    raw: &'a Floats,
    first_row: usize,
    /// The model's own window, or that of the retrieval.
    local: usize,
}

impl Part<'_> {
    /// Mean query before RoPE.
    fn mean_query(&self, width: usize) -> Vec<f32> {
        self.decoder.device().mean_row(self.raw, width, self.first_row..self.first_row + self.positions.len())
    }
}

impl BlockRetrieval {
    /// Attention of projected tokens, each to the tokens near it and to the blocks that are retrieved for it, into `out`, which has
    /// the length of their queries (`m × H × d`).
    pub(crate) fn attend(&mut self, layer: usize, tokens: &RetrievingTokens<'_>, out: &mut Floats) {
        let RetrievingTokens { decoder, cache, capacity, positions, visible, q, q_pre_rope } = *tokens;
        let (config, device) = (decoder.config(), decoder.device());
        let local = config.layers[layer].window.map_or(self.sizes.local, |w| w.min(self.sizes.local));
        let before = positions.partition_point(|p| *p < self.from);
        let seen = &visible[..before];
        device.attention(&attention(decoder, layer, (cache, capacity), (q, 0), seen), out, None);
        self.keys += visible_keys(seen);
        let mut last = 0;
        for from in (before..positions.len()).step_by(self.sizes.rows) {
            let to = (from + self.sizes.rows).min(positions.len());
            let part = Part {
                layer,
                decoder,
                cache,
                capacity,
                positions: &positions[from..to],
                q,
                raw: q_pre_rope,
                first_row: from,
                local,
            };
            let BlockRetrieval { sizes, budget, ropes, layers, .. } = self;
            let (all, of_last) = layers[layer].attend(&part, (sizes, *budget), ropes.layer(layer), out);
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
        out: &mut Floats,
    ) -> (usize, usize) {
        let (config, device) = (part.decoder.config(), part.decoder.device());
        let first_local = |p: u32| (p as usize + 1).saturating_sub(part.local) as u32;
        let near: Vec<(u32, u32)> = part.positions.iter().map(|p| (first_local(*p), p + 1)).collect();
        let (left, last) = (near[0].0 as usize, near[near.len() - 1].0 as usize);
        self.seal_blocks(part, sizes, rope, left);
        let queries = (part.q, part.first_row);
        let local = attention(part.decoder, part.layer, (part.cache, part.capacity), queries, &near);
        let mut lse = device.floats(0);
        device.attention(&local, out, Some(&mut lse));
        let mut far = (0, 0);
        if last > 0 {
            let places = self.remote(part, (sizes, budget), rope, left, last);
            far = self.attend_remote(part, rope, &places, &near, (out, &mut lse));
        }
        // The weight that local tokens received, of the softmax over all tokens.
        let slots = left..part.positions[part.positions.len() - 1] as usize + 1;
        let mut sums = vec![0.0; config.kv_heads * slots.len()];
        device.attention_mass_from_lse(&local, &lse, slots.clone(), &mut sums);
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
            let slots: Vec<u32> = span.positions().collect();
            let keys = inverse_rope(part, rope, &slots);
            let all = part.decoder.device().download_kv(&keys, 0..keys.len()).as_slice().floats();
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
        let mut mean = part.mean_query(width);
        rope.rotate(&mut mean, d, part.local as u32 - 1);
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
        (out, lse): (&mut Floats, &mut Floats),
    ) -> (usize, usize) {
        let (config, device) = (part.decoder.config(), &**part.decoder.device());
        let (heads, width) = (config.heads, config.heads * config.head_dim);
        // Rows that see none of them come first.
        let none = near.partition_point(|near| far.before(near.0) == 0);
        let visible: Vec<(u32, u32)> = near[none..].iter().map(|near| (0, far.before(near.0))).collect();
        let Some((_, last)) = visible.last().copied() else { return (0, 0) };
        let d = config.head_dim;
        let slots: Vec<u32> = far.spans().iter().flat_map(|span| span.positions()).collect();
        let mut cache =
            part.cache.gather(device, d, part.capacity, &slots.repeat(config.kv_heads), 1, far.len());
        cache.k = inverse_rope(part, rope, &slots);
        let rows = part.first_row + none..part.first_row + part.positions.len();
        let mut q = device.floats(0);
        copy_range(device, part.raw, rows.start * width..rows.end * width, &mut q);
        // Keys are as before RoPE here: the scale that it would give them is the queries' to bear.
        rotate(part.decoder, &rope.squared(), part.local, &mut q);
        let attention = attention(part.decoder, part.layer, (&cache, far.len()), (&q, 0), &visible);
        let (mut other, mut other_lse) = (device.floats(q.len()), device.floats(0));
        device.attention(&attention, &mut other, Some(&mut other_lse));
        device.merge_attention(rows.start * heads, out, lse, &other, &other_lse);
        (visible_keys(&visible), last as usize)
    }
}

/// Rotates queries to the last place of a window of `local` tokens.
fn rotate(decoder: &Decoder, rope: &Rope, local: usize, q: &mut Floats) {
    let config = decoder.config();
    let rows = q.len() / (config.heads * config.head_dim);
    let table = rope.table(std::iter::repeat_n(local as u32 - 1, rows));
    decoder.device().rope(q, config.heads, config.head_dim, table.all());
}

/// The keys in some slots before RoPE, `Hkv × slots × d`.
fn inverse_rope(part: &Part<'_>, rope: &Rope, slots: &[u32]) -> KvBuffer {
    let (table, heads) = (rope.back(slots.iter().copied()), part.decoder.shape().heads());
    part.decoder.device().rotate_slots(&part.cache.k, heads, part.capacity, slots, table.all())
}

/// A cache that holds every token, and shows each token the blocks that it retrieves.
#[derive(Clone, Debug)]
pub(crate) struct BlockSparseCache {
    pub(crate) full: FullCache,
    pub(crate) retrieval: BlockRetrieval,
    q_pre_rope: Floats,
}

impl BlockSparseCache {
    pub(crate) fn new(device: &dyn Device, full: FullCache, retrieval: BlockRetrieval) -> BlockSparseCache {
        BlockSparseCache { full, retrieval, q_pre_rope: device.floats(0) }
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
        copy_range(token.device(), token.q, 0..token.q.len(), &mut self.q_pre_rope);
        self.full.append(layer, &mut token);
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
        self.retrieval.side_bytes() + self.q_pre_rope.len() * size_of::<f32>()
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
