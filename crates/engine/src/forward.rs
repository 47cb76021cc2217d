//! One layer over the active tokens: the only place where a layer is computed. Prefill passes, ingest and decoding differ in
//! their attention, which they bring along.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use refrain_kernels::{CachedAttention, Device, Dtype, Floats, KvRows};
use refrain_kv::{KvBufferPool, LayerCache, RopeTables};
use refrain_model::{Decoder, Workspace};

use crate::Result;

/// Tokens on their way through the layers, with the buffers of their computation.
#[derive(Debug)]
pub(crate) struct ActiveTokens {
    pub(crate) decoder: Arc<Decoder>,
    /// Positions, ascending.
    pub(crate) positions: Vec<u32>,
    /// Half-open range of slots that each token sees at the present layer.
    pub(crate) visible: Vec<(u32, u32)>,
    /// Cosines and sines of the positions, one after the other.
    pub(crate) rotary: RopeTables,
    /// Hidden states, `m × D`.
    pub(crate) hidden: Floats,
    /// Projections, attention output and logits.
    pub(crate) work: Workspace,
    /// Room for hidden states that are gathered.
    spare: Floats,
}

/// The steps of a layer that follow once its attention is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Attention of the tokens that go on, some rows at a time; then the output projection and the feed-forward network.
    Attend,
    /// The output projection and the feed-forward network: attention was computed at once.
    Finish,
    /// None: no later layer needs the layer's output.
    Stop,
}

/// Attention of one layer: it takes projected queries, keys and values, none of them rotated, and leaves the attention's output
/// of the tokens that go on.
pub(crate) trait LayerAttention {
    /// Whether rows may go through all steps of a layer before those behind them are projected: nothing looks at all queries, keys or values
    /// at once. [`LayerAttention::attend_part`] is called then, and no other method.
    fn goes_by_parts(&self, _layer: usize) -> bool {
        false
    }

    /// Puts keys and values of `tokens.work`, which has those of the rows `rows` alone, in their places, and computes the rows' attention into
    /// `tokens.work.attended`, from its first row on. Calls come in ascending order. Returns the rows that go on, none where no later layer
    /// needs them. It may drop rows before, at the layer's end.
    fn attend_part(&mut self, _layer: usize, _tokens: &mut ActiveTokens, rows: Range<usize>) -> Range<usize> {
        rows
    }

    /// Puts keys and values of `tokens.work` in their places. It may drop tokens that do not go on.
    fn prepare(&mut self, layer: usize, tokens: &mut ActiveTokens) -> Result<Flow>;

    /// Computes some rows of `tokens.work.attended`, which has the length of `tokens.work.q`. Called where
    /// [`LayerAttention::prepare`] has said [`Flow::Attend`], until all rows are computed, in ascending order.
    fn attend(&mut self, _layer: usize, _tokens: &mut ActiveTokens, _rows: Range<usize>) {}

    /// Takes note that all rows are computed.
    fn attended(&mut self, _layer: usize, _tokens: &ActiveTokens) {}
}

/// A layer under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LayerRun {
    #[default]
    Project,
    /// All steps of the rows from this one on are due, some rows at a time.
    Parts(usize),
    /// Attention of the rows from this one on is due.
    Attend(usize),
    /// The output projection and the feed-forward network of the rows from this one on are due.
    Finish(usize),
}

impl LayerRun {
    /// Computes the layer, or a part of it where more than `most` rows are active; true at its end. The parts of a step are nearly
    /// equal, so that none is so small that other kernels would compute it.
    pub(crate) fn advance(
        &mut self,
        layer: usize,
        tokens: &mut ActiveTokens,
        attention: &mut dyn LayerAttention,
        most: usize,
    ) -> Result<bool> {
        let (decoder, most) = (tokens.decoder.clone(), most.max(1));
        loop {
            let rows = tokens.hidden.len() / decoder.config().hidden;
            let part_of = |from: usize, most: usize| {
                let each = rows.div_ceil(rows.div_ceil(most).max(1));
                from..(from + each).min(rows)
            };
            let part = |from: usize| part_of(from, most);
            let together = decoder.device().rows_together(tokens.q_width()).min(most);
            match *self {
                LayerRun::Project if rows > together && attention.goes_by_parts(layer) => {
                    *self = LayerRun::Parts(0);
                    continue;
                }
                LayerRun::Parts(from) => {
                    let part = part_of(from, together);
                    decoder.project(layer, &tokens.hidden, part.clone(), &mut tokens.work);
                    let going_on = attention.attend_part(layer, tokens, part.clone());
                    decoder.finish(layer, &mut tokens.hidden, going_on, (&tokens.work, 0));
                    if part.end == rows {
                        *self = LayerRun::Project;
                        return Ok(true);
                    }
                    *self = LayerRun::Parts(part.end);
                    if part.start / most == part.end / most {
                        continue;
                    }
                }
                LayerRun::Project => {
                    decoder.project(layer, &tokens.hidden, 0..rows, &mut tokens.work);
                    *self = match attention.prepare(layer, tokens)? {
                        Flow::Attend => {
                            tokens.resize_attended();
                            LayerRun::Attend(0)
                        }
                        Flow::Finish => LayerRun::Finish(0),
                        Flow::Stop => return Ok(true),
                    };
                }
                LayerRun::Attend(from) => {
                    let part = part(from);
                    attention.attend(layer, tokens, part.clone());
                    *self = if part.end == rows {
                        attention.attended(layer, tokens);
                        LayerRun::Finish(0)
                    } else {
                        LayerRun::Attend(part.end)
                    };
                }
                LayerRun::Finish(from) => {
                    let part = part(from);
                    decoder.finish(layer, &mut tokens.hidden, part.clone(), (&tokens.work, part.start));
                    let done = part.end == rows;
                    *self = if done { LayerRun::Project } else { LayerRun::Finish(part.end) };
                    if done {
                        return Ok(true);
                    }
                }
            }
            if rows > most {
                return Ok(false);
            }
        }
    }
}

/// Computes one layer, all rows at once.
pub(crate) fn forward(
    layer: usize,
    tokens: &mut ActiveTokens,
    attention: &mut dyn LayerAttention,
) -> Result<()> {
    LayerRun::default().advance(layer, tokens, attention, usize::MAX).map(drop)
}

impl ActiveTokens {
    /// No tokens yet; keys and values will be of type `dtype`.
    pub(crate) fn new(decoder: &Arc<Decoder>, dtype: Dtype) -> ActiveTokens {
        ActiveTokens {
            decoder: decoder.clone(),
            positions: Vec::new(),
            visible: Vec::new(),
            rotary: RopeTables::default(),
            hidden: decoder.device().floats(0),
            work: Workspace::new(&**decoder.device(), dtype),
            spare: decoder.device().floats(0),
        }
    }

    /// The device that the tokens are computed on.
    pub(crate) fn device(&self) -> &dyn Device {
        &**self.decoder.device()
    }

    /// Makes the tokens at `positions` of the prompt `ids` the active ones. `table` has an entry for each position of the
    /// prompt.
    pub(crate) fn embed(&mut self, ids: &[u32], positions: Vec<u32>, table: &RopeTables) -> Result<()> {
        self.positions = positions;
        // The rows of a pass that has ended with fewer of them lie in `spare`.
        if self.spare.len() > self.hidden.len() {
            std::mem::swap(&mut self.hidden, &mut self.spare);
        }
        let id = |row: usize| ids[self.positions[row] as usize];
        self.decoder.embed(self.positions.len(), id, &mut self.hidden)?;
        table.gather(&self.positions, &mut self.rotary);
        Ok(())
    }

    /// Elements of one token's queries, `H·d`.
    pub(crate) fn q_width(&self) -> usize {
        let config = self.decoder.config();
        config.heads * config.head_dim
    }

    /// Gives `work.attended` the length of `work.q`.
    pub(crate) fn resize_attended(&mut self) {
        self.decoder.device().resize(&mut self.work.attended, self.work.q.len());
    }

    /// Rotates the projected queries of the tokens `rows` to their positions.
    pub(crate) fn apply_rope(&mut self, layer: usize, rows: Range<usize>) {
        let config = self.decoder.config();
        let rotary = self.rotary.layer(layer).slice(rows.start, rows.end);
        self.decoder.device().rope(&mut self.work.q, config.heads, config.head_dim, rotary);
    }

    /// Rotates the projected queries and keys of the tokens `rows` to their positions, and writes keys and values into `cache`, where
    /// slot = position.
    pub(crate) fn rope_and_write_kv(&mut self, layer: usize, cache: &mut LayerCache, rows: Range<usize>) {
        let ActiveTokens { decoder, positions, rotary, work, .. } = self;
        let Workspace { q, k, v, .. } = work;
        let fresh = (KvRows::Device(k, 0), KvRows::Device(v, 0));
        let rotary = rotary.layer(layer).slice(rows.start, rows.end);
        let queries = (q, decoder.config().heads);
        cache.place_with_queries(
            &**decoder.device(),
            decoder.shape(),
            queries,
            fresh,
            rotary,
            &positions[rows],
        );
    }

    /// Keeps the tokens at `kept` positions, a subset of the active ones, in hidden states and projected queries alike. `table`
    /// has an entry for each position.
    pub(crate) fn keep(&mut self, kept: Vec<u32>, table: &RopeTables) {
        if kept.len() == self.positions.len() {
            return;
        }
        let mut next = 0;
        let indices: Vec<u32> = kept
            .iter()
            .map(|position| {
                next += self.positions[next..].iter().take_while(|p| *p < position).count();
                next as u32
            })
            .collect();
        for x in [&mut self.hidden, &mut self.work.q] {
            let width = x.len() / self.positions.len();
            self.decoder.device().gather_rows(x, width, &indices, &mut self.spare);
            std::mem::swap(x, &mut self.spare);
        }
        self.positions = kept;
        table.gather(&self.positions, &mut self.rotary);
    }

    /// Keeps the last token alone, in hidden states and projected queries, which may be those of the last tokens. Either stays in its
    /// memory: the next prompt's hidden states need as much of it again, and its queries less.
    pub(crate) fn keep_last(&mut self, table: &RopeTables) {
        let widths = [self.q_width(), self.decoder.config().hidden];
        let device = self.decoder.device();
        for (x, width) in [&mut self.work.q, &mut self.hidden].into_iter().zip(widths) {
            let last = (x.len() / width - 1) as u32;
            device.gather_rows(x, width, &[last], &mut self.spare);
            device.resize(x, width);
            device.copy(&self.spare, 0..width, x, 0);
        }
        self.positions = self.positions.split_off(self.positions.len() - 1);
        table.gather(&self.positions, &mut self.rotary);
    }

    /// Lets each token see all positions up to its own, within the sliding window of `layer`; slot = position.
    pub(crate) fn set_causal_mask(&mut self, layer: usize) {
        let window = self.decoder.config().layers[layer].window.map_or(u32::MAX, |window| window as u32);
        let seen = self.positions.iter().map(|p| ((p + 1).saturating_sub(window), p + 1));
        self.visible.clear();
        self.visible.extend(seen);
    }

    /// Logits of the active tokens after the last layer, `m × vocab`.
    pub(crate) fn logits(&mut self) -> &mut [f32] {
        self.decoder.logits(&self.hidden, &mut self.work);
        &mut self.work.logits
    }
}

/// Attention of rows of `q` from `first_row` on, one for each of `visible`, at `layer`, over its cache of `capacity` slots a head.
pub(crate) fn attention<'a>(
    decoder: &Decoder,
    layer: usize,
    (cache, capacity): (&'a LayerCache, usize),
    (q, first_row): (&'a Floats, usize),
    visible: &'a [(u32, u32)],
) -> CachedAttention<'a> {
    let config = decoder.config();
    CachedAttention {
        q,
        first_row,
        k: &cache.k,
        v: &cache.v,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        capacity,
        visible,
        scale: config.layers[layer].attention_scale,
        precision: decoder.precision(),
    }
}

/// Attention of some rows of the active tokens over a layer's cache, as their masks say, with the rows' log-sum-exps if they are wanted.
pub(crate) fn attend_rows(
    layer: usize,
    tokens: &mut ActiveTokens,
    cache: (&LayerCache, usize),
    rows: Range<usize>,
    lse: Option<&mut Floats>,
) {
    let decoder = tokens.decoder.clone();
    let (queries, visible) = ((&tokens.work.q, rows.start), &tokens.visible[rows]);
    let attention = attention(&decoder, layer, cache, queries, visible);
    decoder.device().attention(&attention, &mut tokens.work.attended, lse);
}

/// Number of keys that tokens see together.
pub(crate) fn visible_keys(visible: &[(u32, u32)]) -> usize {
    visible.iter().map(|(from, to)| (to - from) as usize).sum()
}

/// Memory of requests that are over, for the next one.
#[derive(Debug)]
pub(crate) struct BufferPool {
    pub(crate) kv: Arc<KvBufferPool>,
    tokens: Mutex<Option<ActiveTokens>>,
    /// Whether nothing is kept, since the device has a pool of its own.
    is_off: bool,
}

impl BufferPool {
    /// A pool for `device`, as in [`KvBufferPool::of`].
    pub(crate) fn of(device: &dyn Device) -> BufferPool {
        let kv = Arc::new(KvBufferPool::of(device));
        BufferPool { kv, tokens: Mutex::default(), is_off: device.memory().is_some() }
    }

    /// Active tokens in pooled memory, if there is some.
    pub(crate) fn acquire(&self, decoder: &Arc<Decoder>, dtype: Dtype) -> ActiveTokens {
        let pooled = self.tokens.lock().unwrap_or_else(PoisonError::into_inner).take();
        let fits =
            |tokens: &ActiveTokens| tokens.work.k.dtype() == dtype && Arc::ptr_eq(&tokens.decoder, decoder);
        pooled.filter(fits).unwrap_or_else(|| ActiveTokens::new(decoder, dtype))
    }

    /// Leaves memory to the next request.
    pub(crate) fn release(&self, tokens: ActiveTokens) {
        if !self.is_off {
            *self.tokens.lock().unwrap_or_else(PoisonError::into_inner) = Some(tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use refrain_kernels::{Cpu, Precision};
    use refrain_model::ModelFiles;

    use super::*;

    #[test]
    fn the_last_token_stays_in_its_memory() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let device: Arc<dyn Device> = Arc::new(Cpu::new(1).unwrap());
        let files = ModelFiles::open(path).unwrap();
        let decoder = Arc::new(Decoder::load(files, &device, Precision::F32, None, |_, _| ()).unwrap());
        let (mut tokens, tables) = (ActiveTokens::new(&decoder, Dtype::F32), decoder.rope_tables(3, 3));
        tokens.embed(&[5, 6, 7], vec![0, 1, 2], &tables).unwrap();
        decoder.project(0, &tokens.hidden, 0..3, &mut tokens.work);
        let last_of = |x: &Floats, width: usize| {
            let mut row = vec![0.0; width];
            device.download(x, x.len() - width, &mut row);
            row
        };
        let widths = [tokens.q_width(), decoder.config().hidden];
        let before = [last_of(&tokens.work.q, widths[0]), last_of(&tokens.hidden, widths[1])];
        tokens.keep_last(&tables);
        assert_eq!(tokens.positions, [2]);
        for ((x, width), before) in [&tokens.work.q, &tokens.hidden].into_iter().zip(widths).zip(before) {
            assert_eq!((x.len(), last_of(x, width)), (width, before));
        }
        assert_eq!(tokens.spare.len(), widths[1], "the three rows are not in the room for gathered ones");
    }
}
