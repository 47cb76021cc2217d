//! The one primitive of every method: a layer over some rows, with the keys and values of all others in the cache.

use std::sync::{Arc, Mutex, PoisonError};

use refrain_kernels::{Attention, AttentionOutputs, Dtype, Floats, Slice};
use refrain_kv::{CachePool, KvCache, LayerCache, Lender, RopeTables};
use refrain_model::{Decoder, Workspace};

use crate::Result;
use crate::bounded::{Bounded, PromptRows};
use crate::retrieval::Retrieving;

/// The KV cache of one request with the rotary tables of its positions; slot = position, until it is bounded.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) decoder: Arc<Decoder>,
    pub(crate) cache: KvCache,
    /// What takes the cache's place after prefill, where tokens are evicted.
    pub(crate) bounded: Option<Bounded>,
    pub(crate) tables: Arc<RopeTables>,
    pub(crate) work: Workspace,
    /// Tokens whose keys and values are in place.
    pub(crate) len: usize,
    /// What is known of blocks, where rows see those that they retrieve.
    pub(crate) retrieving: Option<Retrieving>,
    /// Tokens of the prompt that a method kept nothing of: a bounded cache counts its own tokens only.
    pub(crate) left_out: u32,
    /// Room for rows that are gathered.
    spare: Floats,
    /// Where the memory goes in the end.
    pool: Option<Arc<Pool>>,
    /// Rows whose memory the next ones use again.
    pub(crate) next: Rows,
}

/// Memory of requests that are over, for the next one.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub(crate) caches: CachePool,
    buffers: Mutex<Option<(Workspace, Floats, Rows)>>,
}

/// Rows of hidden states on their way through the layers.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Their positions, ascending.
    pub(crate) positions: Vec<u32>,
    /// Hidden states, `m × D`.
    pub(crate) x: Floats,
    /// What each sees at the present layer: a half-open range of slots.
    pub(crate) visible: Vec<(u32, u32)>,
    /// Cosines and sines of the positions, one after the other.
    pub(crate) rotary: RopeTables,
}

/// Tokens up to which a row's attention is not worth being shared among threads.
const ALONE: usize = 512;

impl State {
    /// Room for `capacity` tokens; rotary scaling is frozen for `total` tokens.
    pub(crate) fn new(decoder: &Arc<Decoder>, dtype: Dtype, capacity: usize, total: usize) -> State {
        State::over(decoder, KvCache::new(decoder.shape(), dtype, capacity), total)
    }

    /// The same over a cache whose layers may be installed later.
    pub(crate) fn over(decoder: &Arc<Decoder>, cache: KvCache, total: usize) -> State {
        State {
            decoder: decoder.clone(),
            bounded: None,
            retrieving: None,
            tables: decoder.rope_tables(total, cache.capacity()),
            work: Workspace::new(cache.dtype()),
            cache,
            len: 0,
            left_out: 0,
            spare: Floats::new(),
            pool: None,
            next: Rows::default(),
        }
    }

    /// The same in the memory of a request before, which is given to `pool` again in the end.
    pub(crate) fn giving_to(mut self, pool: &Arc<Pool>) -> State {
        let used = pool.buffers.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((work, spare, next)) = used.filter(|used| used.0.k.dtype() == self.cache.dtype()) {
            (self.work, self.spare, self.next) = (work, spare, next);
        }
        self.pool = Some(pool.clone());
        self
    }

    /// Another one that goes on from the same tokens.
    pub(crate) fn fork(&self) -> State {
        State {
            decoder: self.decoder.clone(),
            cache: self.cache.clone(),
            bounded: self.bounded.as_ref().map(Bounded::fork),
            tables: self.tables.clone(),
            work: Workspace::new(self.cache.dtype()),
            len: self.len,
            retrieving: self.retrieving.clone(),
            left_out: self.left_out,
            spare: Floats::new(),
            pool: None,
            next: Rows::default(),
        }
    }

    /// Embeds `ids` (of the whole prompt) at `positions`.
    pub(crate) fn embed(&mut self, ids: &[u32], positions: Vec<u32>) -> Result<Rows> {
        let mut rows = Rows { positions, ..std::mem::take(&mut self.next) };
        self.decoder.embed(rows.positions.iter().map(|p| ids[*p as usize]), &mut rows.x)?;
        self.tables.gather(&rows.positions, &mut rows.rotary);
        Ok(rows)
    }

    /// Projects the rows at `layer`, rotates their queries, and writes their keys and values into the cache
    /// **before** attention. Unrotated keys and values stay in `self.work`.
    pub(crate) fn project(&mut self, layer: usize, rows: &Rows) {
        self.project_queries(layer, rows);
        self.place(layer, rows);
    }

    /// Writes the keys and values of projected rows into the cache.
    pub(crate) fn place(&mut self, layer: usize, rows: &Rows) {
        let (config, cpu) = (self.decoder.config(), self.decoder.backend());
        let (cos, sin) = rows.rotary.layer(layer).all();
        let width = rows.positions.len() * config.kv_heads * config.head_dim;
        let (k, v) = (self.work.k.as_slice().range(0..width), self.work.v.as_slice().range(0..width));
        self.cache.place(cpu, layer, k, v, (cos, sin), &rows.positions);
    }

    /// Projects the rows at `layer` and rotates their queries. Keys and values stay in `self.work`.
    pub(crate) fn project_queries(&mut self, layer: usize, rows: &Rows) {
        self.decoder.project(layer, &rows.x, &mut self.work);
        self.turn(layer, rows);
    }

    /// Rotates projected queries, of which retrieval wants the unrotated ones as well.
    fn turn(&mut self, layer: usize, rows: &Rows) {
        if let Some(retrieving) = &mut self.retrieving {
            retrieving.raw.clear();
            retrieving.raw.extend_from_slice(&self.work.q);
        }
        self.rotate_queries(layer, rows);
    }

    /// Rotates projected queries to the rows' positions.
    pub(crate) fn rotate_queries(&mut self, layer: usize, rows: &Rows) {
        let config = self.decoder.config();
        let table = rows.rotary.layer(layer);
        let ((cos, sin), rotary_dim) = (table.all(), table.rotary_dim());
        self.decoder.backend().rope(&mut self.work.q, config.heads, config.head_dim, cos, sin, rotary_dim);
    }

    /// Keeps only the rows at `kept` positions, in hidden states and projected queries alike.
    pub(crate) fn narrow(&mut self, rows: &mut Rows, kept: Vec<u32>) {
        if kept.len() == rows.positions.len() {
            return;
        }
        let mut next = 0;
        let indices: Vec<u32> = kept
            .iter()
            .map(|position| {
                next += rows.positions[next..].partition_point(|p| p < position);
                next as u32
            })
            .collect();
        for x in [&mut rows.x, &mut self.work.q] {
            let width = x.len() / rows.positions.len();
            self.spare.resize(kept.len() * width);
            self.decoder.backend().gather_rows(x, width, &indices, &mut self.spare);
            std::mem::swap(x, &mut self.spare);
        }
        rows.positions = kept;
        self.tables.gather(&rows.positions, &mut rows.rotary);
    }

    /// Attention of the projected rows over the cache, then the rest of the layer. Row `i` sees `rows.visible[i]`.
    pub(crate) fn attend(&mut self, layer: usize, rows: &mut Rows) {
        self.look(layer, rows);
        self.finish(layer, rows);
    }

    fn look(&mut self, layer: usize, rows: &Rows) {
        match self.retrieving {
            Some(_) => self.retrieve(layer, rows),
            None => self.attention(layer, rows, AttentionOutputs::default()),
        }
    }

    /// The same for the last layer of a prompt, of which nobody needs but the last row's output.
    pub(crate) fn attend_last(&mut self, layer: usize, rows: &mut Rows) {
        let last = rows.positions[rows.positions.len() - 1];
        if self.retrieving.is_none() {
            return self.attend(layer, rows);
        }
        // What tokens receive is known from all rows.
        self.retrieve(layer, rows);
        let width = self.work.attended.len() / rows.positions.len();
        let all = self.work.attended.len();
        self.work.attended.copy_within(all - width..all, 0);
        self.narrow(rows, vec![last]);
        self.work.attended.resize(width);
        self.finish(layer, rows);
    }

    /// Attention alone, and the logarithm of the softmax's sum of every row and head, `rows × H`.
    pub(crate) fn attend_reporting(&mut self, layer: usize, rows: &Rows, lse: &mut [f32]) {
        self.attention(layer, rows, AttentionOutputs { lse: Some(lse), ..AttentionOutputs::default() });
    }

    fn attention(&mut self, layer: usize, rows: &Rows, report: AttentionOutputs<'_>) {
        self.work.attended.resize(self.work.q.len());
        let (cached, capacity) = (self.cache.layer(layer), self.cache.capacity());
        let attention = attention(&self.decoder, layer, (cached, capacity), &self.work.q, &rows.visible);
        self.decoder.backend().attention_with_outputs(&attention, &mut self.work.attended, report);
    }

    /// The rest of a layer after attention.
    pub(crate) fn finish(&mut self, layer: usize, rows: &mut Rows) {
        self.decoder.finish(layer, &mut rows.x, &mut self.work);
    }

    /// Lets each row see all positions up to its own, within the sliding window of `layer`.
    pub(crate) fn see_causally(&self, layer: usize, rows: &mut Rows) {
        let window = self.decoder.config().layers[layer].window.map_or(u32::MAX, |window| window as u32);
        let seen = rows.positions.iter().map(|p| ((p + 1).saturating_sub(window), p + 1));
        rows.visible.clear();
        rows.visible.extend(seen);
    }

    /// Computes `ids` after all tokens so far and returns their logits, `ids.len() × vocab`. A bounded cache takes one at
    /// a time.
    pub(crate) fn extend(&mut self, ids: &[u32]) -> Result<&mut [f32]> {
        debug_assert!(self.bounded.is_none() || ids.len() == 1, "a bounded cache takes one token at a time");
        let mut rows = std::mem::take(&mut self.next);
        rows.positions.clear();
        rows.positions.extend(self.len as u32..(self.len + ids.len()) as u32);
        self.decoder.embed(ids.iter().copied(), &mut rows.x)?;
        match &self.bounded {
            // The table ends with the prompt: an answer may be long.
            Some(bounded) => bounded.rotary(rows.positions[0], &mut rows.rotary),
            None => self.tables.gather(&rows.positions, &mut rows.rotary),
        }
        for layer in 0..self.decoder.config().num_layers() {
            if self.bounded.is_some() {
                self.project_queries(layer, &rows);
                self.attend_one(layer, &mut rows);
                self.finish(layer, &mut rows);
                continue;
            }
            self.project(layer, &rows);
            self.see_causally(layer, &mut rows);
            self.attend(layer, &mut rows);
        }
        self.len += ids.len();
        self.decoder.logits(&rows.x, &mut self.work);
        self.next = rows;
        Ok(&mut self.work.logits)
    }

    /// One more token of each of several requests, in one pass over the weights; `work.logits` are `states × vocab` then.
    /// A token comes to the same whatever others come with it.
    pub(crate) fn extend_each(
        states: &mut [&mut State],
        tokens: &[u32],
        x: &mut Floats,
        work: &mut Workspace,
    ) -> Result<()> {
        let Some(decoder) = states.first().map(|state| state.decoder.clone()) else { return Ok(()) };
        let config = decoder.config();
        let (q_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let cpu = decoder.backend();
        let seen = || states.iter().map(|state| state.retained());
        let longest = seen().max().unwrap_or(0);
        let apart = longest <= ALONE || longest * cpu.threads() <= seen().sum();
        work.each = true;
        decoder.embed(tokens.iter().copied(), x)?;
        for state in states.iter_mut() {
            let position = state.len as u32;
            state.next.positions.clear();
            state.next.positions.push(position);
            match &state.bounded {
                Some(bounded) => bounded.rotary(position, &mut state.next.rotary),
                None => state.tables.gather(&[position], &mut state.next.rotary),
            }
        }
        for layer in 0..config.num_layers() {
            decoder.project(layer, x, work);
            work.attended.resize(work.q.len());
            let Workspace { q, k, v, attended, .. } = &mut *work;
            let (q, k, v) = (&**q, k.as_slice(), v.as_slice());
            let one = |i: usize, state: &mut State, attended: &mut [f32]| {
                let (own, kv) = (i * q_width..(i + 1) * q_width, i * kv_width..(i + 1) * kv_width);
                let mut rows = std::mem::take(&mut state.next);
                state.take_row(&q[own], k.range(kv.clone()), v.range(kv));
                state.turn(layer, &rows);
                state.attend_one(layer, &mut rows);
                attended.copy_from_slice(&state.work.attended);
                state.next = rows;
            };
            let mut each: Vec<_> = states.iter_mut().zip(attended.chunks_exact_mut(q_width)).collect();
            if apart {
                cpu.parallel_each(&mut each, &|i, (state, attended)| one(i, state, attended));
            } else {
                each.iter_mut().enumerate().for_each(|(i, (state, attended))| one(i, state, attended));
            }
            decoder.finish(layer, x, work);
        }
        states.iter_mut().for_each(|state| state.len += 1);
        decoder.logits(x, work);
        Ok(())
    }

    /// Takes over a projected row, none of it rotated.
    fn take_row(&mut self, q: &[f32], k: Slice<'_>, v: Slice<'_>) {
        self.work.q.resize(q.len());
        self.work.q.copy_from_slice(q);
        for (own, row) in [(&mut self.work.k, k), (&mut self.work.v, v)] {
            if own.len() < row.len() {
                own.resize(row.len());
            }
            own.write(0, row);
        }
    }

    /// Attention of one token over the cache, which takes its key and value.
    fn attend_one(&mut self, layer: usize, rows: &mut Rows) {
        if let Some(bounded) = &mut self.bounded {
            let (rotary, place) = (rows.rotary.layer(layer).all(), rows.positions[0] - self.left_out);
            let (cpu, precision) = (self.decoder.backend(), self.decoder.precision());
            bounded.attend(cpu, precision, layer, place, rotary, &mut self.work);
            return;
        }
        self.place(layer, rows);
        self.see_causally(layer, rows);
        self.look(layer, rows);
    }

    /// Hands what stays of the prompt at `layer` over to the bounded cache, if there is one. `rows` are all that were
    /// computed there, with what each sees.
    pub(crate) fn bound(&mut self, rows: &Rows, lender: &Lender<'_>) {
        if let Some(bounded) = &mut self.bounded {
            let prompt = PromptRows { q: &self.work.q, positions: &rows.positions, visible: &rows.visible };
            let whole = self.cache.layer(bounded.layers_held());
            bounded.take_in(self.decoder.backend(), whole, prompt, None, lender);
        }
    }

    /// Leaves memory that only many rows need to the next request.
    pub(crate) fn lend(&mut self) {
        let Some(pool) = &self.pool else { return self.slim() };
        let work = std::mem::replace(&mut self.work, Workspace::new(self.cache.dtype()));
        let (spare, next) = (std::mem::take(&mut self.spare), std::mem::take(&mut self.next));
        *pool.buffers.lock().unwrap_or_else(PoisonError::into_inner) = Some((work, spare, next));
    }

    /// Gives up memory that only many rows need.
    pub(crate) fn slim(&mut self) {
        self.work = Workspace::new(self.cache.dtype());
        (self.spare, self.next) = (Floats::new(), Rows::default());
    }

    /// Tokens that each head's cache holds.
    pub(crate) fn retained(&self) -> usize {
        self.bounded.as_ref().map_or(self.len, Bounded::retained)
    }

    /// Bytes that the tokens held take.
    pub(crate) fn kv_bytes_held(&self) -> usize {
        let token = self.decoder.shape().token_bytes(self.cache.dtype());
        self.bounded.as_ref().map_or(self.len * token, Bounded::bytes_held)
    }

    /// Bytes of the KV cache that decoding goes on in.
    pub(crate) fn kv_bytes(&self) -> usize {
        self.bounded.as_ref().map_or(self.cache.bytes(), Bounded::bytes)
    }
}

/// Attention of rows with queries `q` over the cache of `layer`, of `capacity` slots.
pub(crate) fn attention<'a>(
    decoder: &Decoder,
    layer: usize,
    (cache, capacity): (&'a LayerCache, usize),
    q: &'a [f32],
    visible: &'a [(u32, u32)],
) -> Attention<'a> {
    let config = decoder.config();
    Attention {
        q,
        k: cache.k.as_slice(),
        v: cache.v.as_slice(),
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        capacity,
        visible,
        scale: config.layers[layer].attention_scale,
        precision: decoder.precision(),
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            if self.bounded.is_none() {
                pool.caches.give(&mut self.cache);
            }
            let work = std::mem::replace(&mut self.work, Workspace::new(self.cache.dtype()));
            let (spare, next) = (std::mem::take(&mut self.spare), std::mem::take(&mut self.next));
            // What has been lent may be larger.
            let mut kept = pool.buffers.lock().unwrap_or_else(PoisonError::into_inner);
            kept.get_or_insert((work, spare, next));
        }
    }
}
