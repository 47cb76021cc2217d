//! The one primitive of every method: a layer over some rows, with the keys and values of all others in the cache.

use std::sync::Arc;

use refrain_kernels::{Attention, Dtype};
use refrain_kv::{KvCache, RopeTable};
use refrain_model::{Decoder, Workspace};

use crate::Result;

/// The KV cache of one request with the rotary table of its positions; slot = position.
#[derive(Debug)]
pub(crate) struct State<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) cache: KvCache,
    pub(crate) table: Arc<RopeTable>,
    pub(crate) work: Workspace,
    /// Tokens whose keys and values are in place.
    pub(crate) len: usize,
}

/// Rows of hidden states on their way through the layers.
#[derive(Debug)]
pub(crate) struct Rows {
    /// Their positions, ascending.
    pub(crate) positions: Vec<u32>,
    /// Hidden states, `m × D`.
    pub(crate) x: Vec<f32>,
}

impl<'a> State<'a> {
    /// Room for `capacity` tokens; rotary scaling is frozen for `total` tokens.
    pub(crate) fn new(decoder: &'a Decoder, dtype: Dtype, capacity: usize, total: usize) -> State<'a> {
        State::over(decoder, KvCache::new(decoder.shape(), dtype, capacity), total)
    }

    /// The same over a cache whose layers may be installed later.
    pub(crate) fn over(decoder: &'a Decoder, cache: KvCache, total: usize) -> State<'a> {
        State {
            decoder,
            table: Arc::new(decoder.rope(total).table(0..cache.capacity() as u32)),
            work: Workspace::new(cache.dtype()),
            cache,
            len: 0,
        }
    }

    /// Embeds `ids` (of the whole prompt) at `positions`.
    pub(crate) fn embed(&self, ids: &[u32], positions: Vec<u32>) -> Result<Rows> {
        let ids: Vec<u32> = positions.iter().map(|p| ids[*p as usize]).collect();
        Ok(Rows { x: self.decoder.embed(&ids)?, positions })
    }

    /// Projects the rows at `layer`, rotates their queries, and writes their keys and values into the cache
    /// **before** attention. Unrotated keys and values stay in `self.work`.
    pub(crate) fn project(&mut self, layer: usize, rows: &Rows) {
        let config = self.decoder.config();
        self.decoder.project(layer, &rows.x, &mut self.work);
        let table = self.table.gather(&rows.positions);
        let rotary = table.slice(0, table.len());
        let cpu = self.decoder.cpu();
        let rotary_dim = config.rope.rotary_dim;
        cpu.rope(&mut self.work.q, config.heads, config.head_dim, rotary.0, rotary.1, rotary_dim);
        let width = rows.positions.len() * config.kv_heads * config.head_dim;
        let (k, v) = (self.work.k.as_slice().range(0..width), self.work.v.as_slice().range(0..width));
        self.cache.place(cpu, layer, k, v, rotary, &rows.positions);
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
        let gather = |x: &[f32]| {
            let width = x.len() / rows.positions.len();
            let mut out = vec![0.0; kept.len() * width];
            self.decoder.cpu().gather_rows(x, width, &indices, &mut out);
            out
        };
        (rows.x, self.work.q) = (gather(&rows.x), gather(&self.work.q));
        rows.positions = kept;
    }

    /// Attention of the projected rows over the cache, then the rest of the layer. Row `i` sees `visible[i]`.
    pub(crate) fn attend(&mut self, layer: usize, rows: &mut Rows, visible: &[(u32, u32)]) {
        let config = self.decoder.config();
        let cached = self.cache.layer(layer);
        let attention = Attention {
            q: &self.work.q,
            k: cached.k.as_slice(),
            v: cached.v.as_slice(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            capacity: self.cache.capacity(),
            visible,
            scale: (config.head_dim as f32).sqrt().recip(),
        };
        self.work.attended.resize(self.work.q.len(), 0.0);
        self.decoder.cpu().attention(&attention, &mut self.work.attended);
        self.decoder.finish(layer, &mut rows.x, &mut self.work);
    }

    /// What each row sees at `layer`: all positions up to its own, within the sliding window.
    pub(crate) fn causal(&self, layer: usize, positions: &[u32]) -> Vec<(u32, u32)> {
        let window = self.decoder.config().window(layer).map_or(u32::MAX, |window| window as u32);
        positions.iter().map(|p| ((p + 1).saturating_sub(window), p + 1)).collect()
    }

    /// Computes `ids` after all tokens so far and returns their logits, `ids.len() × vocab`.
    pub(crate) fn extend(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let positions = (self.len as u32..(self.len + ids.len()) as u32).collect();
        let mut rows = Rows { x: self.decoder.embed(ids)?, positions };
        for layer in 0..self.decoder.config().layers {
            self.project(layer, &rows);
            let visible = self.causal(layer, &rows.positions);
            self.attend(layer, &mut rows, &visible);
        }
        self.len += ids.len();
        Ok(self.decoder.logits(&rows.x))
    }
}
