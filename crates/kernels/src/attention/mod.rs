//! Attention over cached keys.

#[cfg(target_arch = "x86_64")]
mod amx;
mod columns;
mod few;
mod flash;
mod given;
#[cfg(target_arch = "x86_64")]
mod given_tiles;
mod keys;
mod noise;
mod queries;
mod scores;

use half::{bf16, f16};

use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::simd::Elem;
use crate::{Cpu, Precision, Slice};
#[cfg(target_arch = "x86_64")]
use crate::{Isa, simd::KEYS};
use flash::{Merge, Piece, Whole};
pub use noise::Noise;
use queries::{Block, SEGMENT, Shape};

thread_local! {
    /// Buffers of a task.
    static WORK: std::cell::Cell<Words> = const { std::cell::Cell::new(Words::new()) };
    /// What a call hands from one round of tasks to the next.
    static ROUNDS: std::cell::Cell<Words> = const { std::cell::Cell::new(Words::new()) };
}

/// Attention of rows over cached keys.
///
/// Row `i` sees the slots `visible[i].0 .. visible[i].1`; head `h` uses KV head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Rotated queries, rows × heads × head_dim.
    pub q: &'a [f32],
    /// Rotated keys, kv_heads × capacity × head_dim.
    pub k: Slice<'a>,
    /// Values, kv_heads × capacity × head_dim, of the keys' type.
    pub v: Slice<'a>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Slots of a KV head.
    pub capacity: usize,
    /// Half-open range of slots that each row sees: 1 <= end − start, end <= capacity. Fastest where the ends
    /// ascend, right in any order.
    pub visible: &'a [(u32, u32)],
    /// Factor of the dot products before softmax.
    pub scale: f32,
    /// With [`Precision::F32`] a row's result does not depend on the others. With another one queries, keys, values and
    /// probabilities may be rounded to `bf16` (they are where AMX multiplies), and fewer than 16 rows may be computed
    /// in another way than more. Sums are in `f32` in any case.
    pub precision: Precision,
}

impl Attention<'_> {
    /// # Panics
    /// If lengths do not fit.
    fn check(&self) {
        self.check_lengths();
        let something = self.visible.iter().all(|(start, end)| start < end);
        assert!(something, "each row sees at least one slot");
    }

    /// The same, but rows may see nothing.
    ///
    /// # Panics
    /// If lengths do not fit.
    fn check_lengths(&self) {
        let Attention { q, heads, kv_heads, head_dim, capacity, visible, .. } = *self;
        check_heads(heads, kv_heads, head_dim);
        assert_eq!(q.len(), visible.len() * heads * head_dim, "q is rows × heads × head_dim");
        let stored = kv_heads * capacity * head_dim;
        assert!(
            self.k.len() == stored && self.v.len() == stored,
            "k and v are kv_heads × capacity × head_dim"
        );
        let within = |(start, end): &(u32, u32)| start <= end && *end as usize <= capacity;
        assert!(visible.iter().all(within), "rows see slots below the capacity");
    }

    fn shape(&self) -> Shape {
        let Attention { heads, kv_heads, head_dim, capacity, .. } = *self;
        Shape::new(heads, kv_heads, head_dim, capacity)
    }
}

fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) {
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads) && head_dim > 0, "KV heads divide the heads");
}

/// What attention tells besides its output; all of it is optional.
#[derive(Debug, Default)]
pub struct Report<'a> {
    /// ln Σ_t exp(score) of each row and head over the slots that it sees; rows × heads.
    pub lse: Option<&'a mut [f32]>,
    /// What the last `w` rows give to each slot, `(w, sums)`: see [`Cpu::column_sums`]; kv_heads × capacity.
    pub columns: Option<(usize, &'a mut [f32])>,
    /// Logits of the last `w` rows with all heads concatenated, `(w, z)`: see [`Cpu::concat_logits`]; w × capacity.
    pub logits: Option<(usize, &'a mut [f32])>,
}

impl Cpu {
    /// out: rows × heads × head_dim.
    ///
    /// # Panics
    /// If lengths do not fit, or keys and values have different types.
    pub fn attention(&self, a: &Attention, out: &mut [f32]) {
        self.attention_reporting(a, out, Report::default());
    }

    /// The same with a report.
    ///
    /// # Panics
    /// As [`Cpu::attention`], and if the report asks for more rows than there are.
    pub fn attention_reporting(&self, a: &Attention, out: &mut [f32], report: Report) {
        a.check();
        assert_eq!(out.len(), a.q.len(), "out is rows × heads × head_dim");
        let Report { lse, columns, logits } = report;
        assert!(lse.as_ref().is_none_or(|lse| lse.len() == a.visible.len() * a.heads), "lse is rows × heads");
        let lse = lse.map(Shared::new);
        match (a.k, a.v) {
            (Slice::F32(k), Slice::F32(v)) => self.attend::<f32>(a, k, v, out, lse.as_ref(), None),
            (Slice::F16(k), Slice::F16(v)) => self.attend::<f16>(a, k, v, out, lse.as_ref(), None),
            (Slice::Bf16(k), Slice::Bf16(v)) => self.attend::<bf16>(a, k, v, out, lse.as_ref(), None),
            (k, v) => panic!("keys are {}, values {}", k.dtype(), v.dtype()),
        }
        let last = |w: usize| {
            let first = a.visible.len() - w;
            let q = &a.q[first * a.heads * a.head_dim..];
            Attention { q, visible: &a.visible[first..], ..*a }
        };
        if let Some((w, sums)) = columns {
            self.column_sums(&last(w), 0..a.capacity, sums);
        }
        if let Some((w, z)) = logits {
            let Attention { q, heads, kv_heads, head_dim, k, capacity, scale, .. } = last(w);
            self.concat_logits(q, heads, kv_heads, head_dim, k, capacity, 0..capacity, scale, z);
        }
    }

    /// Attention of a single row, and the weights that it gives to each slot, summed over the heads of a group:
    /// kv_heads × the end of what it sees. Keys are read once where a step of decoding would read them.
    ///
    /// # Panics
    /// As [`Cpu::attention`], and if there is not one row.
    pub fn attention_weighing(&self, a: &Attention, out: &mut [f32], weights: &mut [f32]) {
        a.check();
        assert_eq!(a.visible.len(), 1, "one row is weighed");
        let end = a.visible[0].1 as usize;
        assert_eq!(weights.len(), a.kv_heads * end, "one weight for each KV head and slot");
        if a.precision == Precision::F32 || a.heads / a.kv_heads > few::QUERIES {
            self.attention(a, out);
            return self.row_weights(a, 0..end, weights);
        }
        assert_eq!(out.len(), a.q.len(), "out is rows × heads × head_dim");
        match (a.k, a.v) {
            (Slice::F32(k), Slice::F32(v)) => self.attend::<f32>(a, k, v, out, None, Some(weights)),
            (Slice::F16(k), Slice::F16(v)) => self.attend::<f16>(a, k, v, out, None, Some(weights)),
            (Slice::Bf16(k), Slice::Bf16(v)) => self.attend::<bf16>(a, k, v, out, None, Some(weights)),
            (k, v) => panic!("keys are {}, values {}", k.dtype(), v.dtype()),
        }
    }

    /// `weights` are those of [`Cpu::attention_weighing`], where a single row is attended to by [`few`].
    fn attend<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        v: &[E],
        out: &mut [f32],
        lse: Option<&Shared<f32>>,
        weights: Option<&mut [f32]>,
    ) {
        let (shape, rows) = (a.shape(), a.visible.len());
        #[cfg(target_arch = "x86_64")]
        if self.isa() == Isa::Amx
            && a.precision != Precision::F32
            && rows >= TILE_ROWS
            && shape.group <= amx::MOST_HEADS
        {
            return self.attend_tiles(a, k, v, out, lse);
        }
        let each = shape.block_rows(rows, self.threads());
        let blocks = rows.div_ceil(each);
        let tasks = shape.kv_heads * blocks;
        let last = a.visible.iter().map(|v| v.1 as usize).max().unwrap_or(0);
        let worth = rows * last * shape.heads * shape.head_dim > 1 << 18;
        // Rows ascend, so the last blocks have most to do: they go first.
        let block = |t: usize| {
            let b = blocks - 1 - t / shape.kv_heads;
            Block { shape, g: t % shape.kv_heads, rows: b * each..((b + 1) * each).min(rows) }
        };
        let out = &Shared::new(out);
        let segments = last.div_ceil(SEGMENT);
        let few = a.precision != Precision::F32 && blocks == 1 && rows * shape.group <= few::QUERIES;
        if !few && (!worth || tasks >= 2 * self.threads() || segments == 1) {
            self.parallel_if(worth, tasks, &|t| self.isa().run(Whole { a, k, v, block: block(t), out, lse }));
            return;
        }
        // Too few blocks for the threads: one task for each segment of the keys, then their union.
        let size = shape.part_len(each * shape.group);
        let kept = if weights.is_some() { few::QUERIES * SEGMENT } else { 0 };
        let pieces = tasks * segments;
        let mut scratch = scratch::lend(&ROUNDS, pieces * (size + kept));
        let (parts, all_kept) =
            scratch.words.floats_mut()[..pieces * (size + kept)].split_at_mut(pieces * size);
        let (shared, shared_kept) = (Shared::new(parts), Shared::new(all_kept));
        self.parallel_if(worth, pieces, &|i| {
            // SAFETY: part `i` belongs to task `i`.
            let part = unsafe { shared.part(i * size..(i + 1) * size) };
            let (block, segment) = (block(i / segments), i % segments);
            if few {
                // SAFETY: as above.
                let kept = (kept > 0).then(|| unsafe { shared_kept.part(i * kept..(i + 1) * kept) });
                return self.isa().run(few::Piece { a, k, v, block, segment, part, kept });
            }
            self.isa().run(Piece { a, k, v, block, segment, part });
        });
        self.parallel_if(rows * segments * shape.heads * shape.head_dim > 1 << 18, tasks, &|t| {
            let parts = &parts[t * segments * size..(t + 1) * segments * size];
            self.isa().run(Merge { parts, size, block: block(t), out, lse });
        });
        if let Some(weights) = weights {
            self.weigh(a, (parts, size), all_kept, weights);
        }
    }

    /// The weights of a single row: `parts` (`size` floats apart) and `kept` are what [`few::Piece`] found of each KV head and
    /// segment.
    fn weigh(&self, a: &Attention, (parts, size): (&[f32], usize), kept: &[f32], weights: &mut [f32]) {
        const KEPT: usize = few::QUERIES * SEGMENT;
        let (first, last) = (a.visible[0].0 as usize, a.visible[0].1 as usize);
        let segments = last.div_ceil(SEGMENT);
        let weights = Shared::new(weights);
        self.parallel_if(last * a.heads > 1 << 15, a.kv_heads * segments, &|i| {
            let (g, segment) = (i / segments, i % segments);
            let slots = segment * SEGMENT..((segment + 1) * SEGMENT).min(last);
            // SAFETY: a head's slots of a segment belong to one task.
            let weights = unsafe { weights.part(g * last + slots.start..g * last + slots.end) };
            let (unseen, weights) = weights.split_at_mut(first.clamp(slots.start, slots.end) - slots.start);
            unseen.fill(0.0);
            if !weights.is_empty() {
                let block = Block { shape: a.shape(), g, rows: 0..1 };
                let parts = &parts[g * segments * size..(g + 1) * segments * size];
                let kept = &kept[i * KEPT..(i + 1) * KEPT];
                self.isa().run(few::Weigh { block, parts, size, segment, kept, weights });
            }
        });
    }

    /// The same with AMX: first keys and values become tiles, then the blocks of rows go over them.
    #[cfg(target_arch = "x86_64")]
    fn attend_tiles<E: Elem>(
        &self,
        a: &Attention,
        k: &[E],
        v: &[E],
        out: &mut [f32],
        lse: Option<&Shared<f32>>,
    ) {
        let (shape, rows) = (a.shape(), a.visible.len());
        let start = a.visible.iter().map(|v| v.0 as usize).min().unwrap_or(0) / KEYS * KEYS;
        let end = a.visible.iter().map(|v| v.1 as usize).max().unwrap_or(0);
        let (tiles, words) = ((end - start).div_ceil(KEYS), shape.tile_words());
        let mut scratch = scratch::lend(&ROUNDS, shape.kv_heads * tiles * words);
        let prepared = &mut scratch.words.words_mut()[..shape.kv_heads * tiles * words];
        let shared = Shared::new(prepared);
        self.parallel(shape.kv_heads * tiles, &|t| {
            let (g, first) = (t / tiles, start + t % tiles * KEYS);
            // SAFETY: tile `t` belongs to task `t`.
            let out = unsafe { shared.part(t * words..(t + 1) * words) };
            let slots = first..(first + KEYS).min(end);
            self.isa().run(amx::Prepare { shape, k: shape.head(k, g), v: shape.head(v, g), slots, out });
        });
        let each = amx::block_rows(&shape, rows, self.threads());
        let blocks = rows.div_ceil(each);
        let out = &Shared::new(out);
        // A head's blocks follow one another, while its keys are in the cache; the last have most to do.
        self.parallel(shape.kv_heads * blocks, &|t| {
            let (g, b) = (t / blocks, blocks - 1 - t % blocks);
            let block = Block { shape, g, rows: b * each..((b + 1) * each).min(rows) };
            let prepared = &prepared[g * tiles * words..(g + 1) * tiles * words];
            self.isa().run(amx::Whole { a, prepared, first: start, block, out, lse });
        });
    }
}

/// Rows from which on making tiles of keys and values is worth it.
#[cfg(target_arch = "x86_64")]
const TILE_ROWS: usize = 16;
