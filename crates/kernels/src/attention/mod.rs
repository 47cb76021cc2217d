//! Attention over cached keys.

mod flash;
mod keys;
mod queries;
mod scores;

use half::{bf16, f16};

use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::simd::Elem;
use crate::{Cpu, Slice};
use flash::{Merge, Piece, Whole};
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
}

impl Attention<'_> {
    /// # Panics
    /// If lengths do not fit.
    fn check(&self) {
        let Attention { q, heads, kv_heads, head_dim, capacity, visible, .. } = *self;
        check_heads(heads, kv_heads, head_dim);
        assert_eq!(q.len(), visible.len() * heads * head_dim, "q is rows × heads × head_dim");
        let stored = kv_heads * capacity * head_dim;
        assert!(
            self.k.len() == stored && self.v.len() == stored,
            "k and v are kv_heads × capacity × head_dim"
        );
        let within = |(start, end): &(u32, u32)| start < end && *end as usize <= capacity;
        assert!(visible.iter().all(within), "each row sees at least one slot, all below the capacity");
    }

    fn shape(&self) -> Shape {
        let Attention { heads, kv_heads, head_dim, capacity, .. } = *self;
        Shape::new(heads, kv_heads, head_dim, capacity)
    }
}

fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) {
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads) && head_dim > 0, "KV heads divide the heads");
}

impl Cpu {
    /// out: rows × heads × head_dim.
    ///
    /// # Panics
    /// If lengths do not fit, or keys and values have different types.
    pub fn attention(&self, a: &Attention, out: &mut [f32]) {
        a.check();
        assert_eq!(out.len(), a.q.len(), "out is rows × heads × head_dim");
        match (a.k, a.v) {
            (Slice::F32(k), Slice::F32(v)) => self.attend::<f32>(a, k, v, out),
            (Slice::F16(k), Slice::F16(v)) => self.attend::<f16>(a, k, v, out),
            (Slice::Bf16(k), Slice::Bf16(v)) => self.attend::<bf16>(a, k, v, out),
            (k, v) => panic!("keys are {}, values {}", k.dtype(), v.dtype()),
        }
    }

    fn attend<E: Elem>(&self, a: &Attention, k: &[E], v: &[E], out: &mut [f32]) {
        let (shape, rows) = (a.shape(), a.visible.len());
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
        if !worth || tasks >= 2 * self.threads() || segments == 1 {
            self.parallel_if(worth, tasks, &|t| self.isa().run(Whole { a, k, v, block: block(t), out }));
            return;
        }
        // Too few blocks for the threads: one task for each segment of the keys, then their union.
        let size = shape.part_len(each * shape.group);
        let mut parts = scratch::lend(&ROUNDS, tasks * segments * size);
        let parts = &mut parts.words.floats_mut()[..tasks * segments * size];
        let shared = Shared::new(parts);
        self.parallel(tasks * segments, &|i| {
            // SAFETY: part `i` belongs to task `i`.
            let part = unsafe { shared.part(i * size..(i + 1) * size) };
            self.isa().run(Piece { a, k, v, block: block(i / segments), segment: i % segments, part });
        });
        self.parallel_if(rows * segments * shape.heads * shape.head_dim > 1 << 18, tasks, &|t| {
            let parts = &parts[t * segments * size..(t + 1) * segments * size];
            self.isa().run(Merge { parts, size, block: block(t), out });
        });
    }
}
