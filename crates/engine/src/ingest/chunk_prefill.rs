//! Prefill of one chunk alone, from position 0.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_fusion::{ChunkStatistics, ContextLayer, ContextTensors};
use refrain_kernels::{Dtype, Floats, KvBuffer, KvRows, copy_range};
use refrain_kv::{AuxTensors, LayerCache, RopeTables};
use refrain_store::{BosPolicy, Chunk, ChunkId, PutOutcome, Store};

use super::prefilled_prefix::{LayerKv, PrefilledPrefix, mean};
use crate::engine::Engine;
use crate::forward::{ActiveTokens, Flow, LayerAttention, LayerRun, attend_rows, attention};
use crate::{Result, finite};

/// A chunk in memory, its statistics in the order of those asked for, and whether it was stored.
pub(crate) type ComputedChunk = (Chunk, Vec<Arc<AuxTensors>>, PutOutcome);

/// A chunk whose layers are computed one by one.
#[derive(Debug)]
pub(crate) struct ChunkPrefill {
    engine: Engine,
    id: ChunkId,
    label: String,
    run: IsolatedRun,
    /// Prefills that are done, and prefixes of those to come, of a chunk that is the mean of several.
    done: Vec<(Vec<LayerKv>, Vec<AuxTensors>)>,
    further: VecDeque<Arc<PrefilledPrefix>>,
    /// Whether methods that keep statistics see the chunk: they see a context from its first token.
    observed: bool,
}

impl ChunkPrefill {
    /// Begins the prefill of a chunk, or of a system part. A document chunk comes after the engine's prefix, or after BOS where the
    /// model uses one, and after what stands `left` of it in its document; their rows are dropped. Rows of the prefix are computed
    /// again only where the chunk is `observed`. Statistics are those of the first prefill.
    pub(crate) fn start(
        engine: &Engine,
        id: ChunkId,
        left: &[u32],
        label: String,
        observed: bool,
    ) -> Result<ChunkPrefill> {
        let Some((first, further)) = engine.averaged_for(&id).split_first() else {
            let prefix = engine.prefix().filter(|_| id.prefix.is_some() && !observed).cloned();
            return ChunkPrefill::behind(engine, id, left, label, prefix);
        };
        let run = prefill(engine, &id, &first.tokens, (!observed).then(|| first.clone()))?;
        let further = further.iter().cloned().collect();
        Ok(ChunkPrefill { engine: engine.clone(), id, label, run, done: Vec::new(), further, observed })
    }

    /// [`start`](Self::start) behind tokens that are prefilled already: the first of those before the chunk.
    pub(crate) fn behind(
        engine: &Engine,
        id: ChunkId,
        left: &[u32],
        label: String,
        prefix: Option<Arc<PrefilledPrefix>>,
    ) -> Result<ChunkPrefill> {
        let before = if id.bos == BosPolicy::Kept { Vec::new() } else { engine.before_chunks() };
        let run = prefill(engine, &id, &[&before, left].concat(), prefix)?;
        let (done, further) = (Vec::new(), VecDeque::new());
        Ok(ChunkPrefill { engine: engine.clone(), id, label, run, done, further, observed: false })
    }

    /// Identity of the chunk.
    pub(crate) fn id(&self) -> &ChunkId {
        &self.id
    }

    /// The prefilled tokens that the chunk goes on behind.
    pub(crate) fn prefix(&self) -> Option<Arc<PrefilledPrefix>> {
        self.run.layers.prefix.clone()
    }

    /// Share of the layers of all prefills that are computed, from 0 to 1.
    pub(crate) fn computed(&self) -> f64 {
        let prefills = self.done.len() + 1 + self.further.len();
        (self.done.len() as f64 + self.run.computed()) / prefills as f64
    }

    /// Computes a layer; true once there is none left.
    pub(crate) fn advance(&mut self, statistics: &[&dyn ChunkStatistics]) -> Result<bool> {
        let statistics = if self.done.is_empty() { statistics } else { &[] };
        if !self.run.advance(statistics)? {
            return Ok(false);
        }
        let Some(prefix) = self.further.pop_front() else { return Ok(true) };
        let prefilled = (!self.observed).then(|| prefix.clone());
        let next = prefill(&self.engine, &self.id, &prefix.tokens, prefilled)?;
        self.done.push(std::mem::replace(&mut self.run, next).finish(&self.engine));
        Ok(false)
    }

    /// The computed rows; the prefill's buffers are free again.
    pub(crate) fn finish(self) -> PrefilledChunk {
        let ChunkPrefill { engine, id, label, run, mut done, .. } = self;
        done.push(run.finish(&engine));
        PrefilledChunk { engine, id, label, done }
    }
}

/// A chunk whose layers have all been computed.
#[derive(Debug)]
pub(crate) struct PrefilledChunk {
    engine: Engine,
    id: ChunkId,
    label: String,
    /// Layers and statistics of each prefill that the chunk is the mean of.
    done: Vec<(Vec<LayerKv>, Vec<AuxTensors>)>,
}

impl PrefilledChunk {
    /// Identity of the chunk.
    pub(crate) fn id(&self) -> &ChunkId {
        &self.id
    }

    /// Puts the chunk into the store, with its statistics, which are of these kinds. A chunk that is not finite is an error.
    pub(crate) fn store(self, kinds: &[String]) -> Result<ComputedChunk> {
        let unstored = self.into_unstored(kinds)?;
        let outcome = unstored.store()?;
        Ok((unstored.chunk, unstored.statistics, outcome))
    }

    /// The chunk in memory, with its statistics, which are of these kinds. A chunk that is not finite is an error.
    pub(crate) fn into_unstored(self, kinds: &[String]) -> Result<UnstoredChunk> {
        let PrefilledChunk { engine, id, label, done } = self;
        let (prefills, mut made): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        let (made, prefilled) = (made.swap_remove(0), mean(prefills));
        let bytes = prefilled.first().map_or(0, |(k, v)| k.bytes() + v.bytes());
        let mut layers = engine.store().new_layers(bytes, prefilled.len());
        for (k, v) in prefilled {
            for values in [&k, &v] {
                finite::check(engine.decoder(), "keys and values", values.as_slice())?;
            }
            layers.push(k.as_slice(), v.as_slice());
        }
        let chunk = Chunk::new(id, &label, layers.finish())?.with_numerics(engine.numerics());
        let statistics = made.into_iter().map(Arc::new).collect();
        Ok(UnstoredChunk { store: engine.store().clone(), chunk, kinds: kinds.to_vec(), statistics })
    }
}

/// A computed chunk in memory, with its statistics of each kind.
#[derive(Clone, Debug)]
pub(crate) struct UnstoredChunk {
    store: Store,
    pub(crate) chunk: Chunk,
    kinds: Vec<String>,
    pub(crate) statistics: Vec<Arc<AuxTensors>>,
}

impl UnstoredChunk {
    /// Puts the chunk and its statistics into the store.
    pub(crate) fn store(&self) -> Result<PutOutcome> {
        let UnstoredChunk { store, chunk, kinds, statistics } = self;
        let mut outcome = store.put(chunk.clone())?;
        for (kind, statistics) in kinds.iter().zip(statistics) {
            let put = store.put_aux_tensors(chunk.id(), kind, (**statistics).clone())?;
            if let failed @ PutOutcome::NotStored { .. } = put {
                outcome = failed;
            }
        }
        Ok(outcome)
    }
}

/// A prefill of the chunk of this identity with all tokens that stand `before` it, the first of which may be prefilled already.
fn prefill(
    engine: &Engine,
    id: &ChunkId,
    before: &[u32],
    prefilled: Option<Arc<PrefilledPrefix>>,
) -> Result<IsolatedRun> {
    let tokens = [before, &id.tokens].concat();
    // Rows of a shorter context are rotated otherwise where the rotation depends on the length (LongRoPE).
    let ropes = |tokens: usize| engine.decoder().ropes(tokens);
    let prefilled = prefilled.filter(|prefix| ropes(prefix.tokens.len()) == ropes(tokens.len()));
    let dropped = before.len() - prefilled.as_ref().map_or(0, |prefix| prefix.tokens.len());
    IsolatedRun::start(engine, &tokens, dropped, prefilled, id.dtype)
}

/// One causal prefill from position 0 whose keys and values are kept as they are before RoPE.
#[derive(Debug)]
pub(crate) struct IsolatedRun {
    tokens: ActiveTokens,
    layer: usize,
    /// Progress of the layer.
    run: LayerRun,
    /// Rows of a layer that one step computes at most.
    most: usize,
    /// Time that computing has taken.
    took: Duration,
    layers: IsolatedLayers,
}

#[derive(Debug)]
struct IsolatedLayers {
    /// Prefilled tokens before the rows.
    prefix: Option<Arc<PrefilledPrefix>>,
    /// Cosines and sines of all positions.
    tables: Arc<RopeTables>,
    /// Slots of a head in `cache`: one for each token of the prefix and each row.
    slots: usize,
    /// Keys and values of the layer that is computed.
    cache: LayerCache,
    /// Rows at the beginning that are not kept.
    dropped: usize,
    /// Elements of the kept rows.
    kept: Range<usize>,
    /// Keys before RoPE and values of the kept rows.
    kv: Vec<LayerKv>,
    made: Vec<AuxTensors>,
    lse: Floats,
    /// Queries before RoPE of the last rows.
    queries: Floats,
}

impl IsolatedRun {
    /// Begins the prefill of `ids`, which begin with the tokens of `prefix`. Of the rows that follow it the first `dropped` ones
    /// are not kept.
    pub(crate) fn start(
        engine: &Engine,
        ids: &[u32],
        dropped: usize,
        prefix: Option<Arc<PrefilledPrefix>>,
        dtype: Dtype,
    ) -> Result<IsolatedRun> {
        if let Some(prefix) = &prefix {
            prefix.prefill(|tokens| engine.prefilled(tokens))?;
        }
        let first = prefix.as_ref().map_or(0, |prefix| prefix.tokens.len());
        engine.check_chunk_memory(ids.len() - first, ids.len())?;
        let decoder = engine.decoder_arc();
        let (shape, tables) = (decoder.shape(), decoder.rope_tables(ids.len(), ids.len()));
        let mut tokens = engine.buffers().acquire(decoder, dtype);
        tokens.embed(ids, (first as u32..ids.len() as u32).collect(), &tables)?;
        let layers = IsolatedLayers {
            prefix,
            tables,
            slots: ids.len(),
            cache: LayerCache::new(tokens.device(), shape, dtype, ids.len()),
            dropped,
            kept: dropped * shape.width()..(ids.len() - first) * shape.width(),
            kv: Vec::with_capacity(shape.layers),
            made: Vec::new(),
            lse: tokens.device().floats(0),
            queries: tokens.device().floats(0),
        };
        let most = engine.settings().ubatch;
        Ok(IsolatedRun { tokens, layer: 0, run: LayerRun::default(), most, took: Duration::ZERO, layers })
    }

    /// Computes a layer, or a part of a long one; true once there is none left.
    pub(crate) fn advance(&mut self, statistics: &[&dyn ChunkStatistics]) -> Result<bool> {
        let (layers, started) = (self.tokens.decoder.shape().layers, Instant::now());
        if self.layer < layers {
            self.layers.made.resize(statistics.len(), AuxTensors::default());
            let mut observed = ObservedLayers { layers: &mut self.layers, statistics };
            let done = self.run.advance(self.layer, &mut self.tokens, &mut observed, self.most)?;
            self.layer += usize::from(done);
        }
        self.took += started.elapsed();
        Ok(self.layer == layers)
    }

    /// Share of the layers that are computed.
    fn computed(&self) -> f64 {
        self.layer as f64 / self.tokens.decoder.shape().layers as f64
    }

    /// Keys before RoPE and values of each layer, and the statistics.
    pub(crate) fn finish(self, engine: &Engine) -> (Vec<LayerKv>, Vec<AuxTensors>) {
        engine.prefill_rate().learn(self.tokens.positions.len(), self.took);
        engine.buffers().release(self.tokens);
        (self.layers.kv, self.layers.made)
    }
}

/// The layers of an isolated prefill under the eyes of methods that keep statistics.
struct ObservedLayers<'a> {
    layers: &'a mut IsolatedLayers,
    statistics: &'a [&'a dyn ChunkStatistics],
}

impl LayerAttention for ObservedLayers<'_> {
    fn prepare(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow> {
        let IsolatedLayers { prefix, tables, slots, cache, dropped, kept, kv, made, lse, queries } =
            &mut *self.layers;
        let decoder = tokens.decoder.clone();
        let device = &**decoder.device();
        let (rows, width) = (tokens.positions.len(), tokens.q_width());
        let own = |of: &&dyn ChunkStatistics| of.last_queries().min(rows - *dropped);
        let most = self.statistics.iter().map(own).max().unwrap_or(0);
        copy_range(device, &tokens.work.q, (rows - most) * width..rows * width, queries);
        if let Some(prefix) = prefix {
            let (of_prefix, (k, v)) = (prefix.tokens.len(), prefix.layer(layer));
            let rows = (KvRows::Host(k.as_slice()), KvRows::Host(v.as_slice()));
            let rotary = tables.layer(layer).slice(0, of_prefix);
            let own: Vec<u32> = (0..of_prefix as u32).collect();
            cache.place(device, decoder.shape(), rows, rotary, &own);
        }
        tokens.rope_and_write_kv(layer, cache, 0..rows);
        let copy = |rows: &KvBuffer| device.download_kv(rows, kept.clone()).into_buffer();
        kv.push((copy(&tokens.work.k), copy(&tokens.work.v)));
        tokens.set_causal_mask(layer);
        // No later layer needs the output of the last one.
        let last = layer + 1 == tokens.decoder.shape().layers;
        if self.statistics.is_empty() {
            return Ok(if last { Flow::Stop } else { Flow::Attend });
        }
        tokens.resize_attended();
        let queries_of_rows = (&tokens.work.q, 0);
        let attention = attention(&decoder, layer, (cache, *slots), queries_of_rows, &tokens.visible);
        device.attention(&attention, &mut tokens.work.attended, Some(lse));
        let k = kv[layer].0.as_slice();
        let tensors = ContextTensors { device, attention, lse, first: *dropped, queries, k };
        let view = ContextLayer::new(layer, decoder.shape().layers, tensors);
        self.statistics.iter().zip(made).for_each(|(of, statistics)| of.observe(&view, statistics));
        Ok(if last { Flow::Stop } else { Flow::Finish })
    }

    fn attend(&mut self, layer: usize, tokens: &mut ActiveTokens, rows: Range<usize>) {
        attend_rows(layer, tokens, (&self.layers.cache, self.layers.slots), rows, None);
    }
}
