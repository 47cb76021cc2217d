//! Attention logits with all heads concatenated.

use std::ops::Range;

use half::{bf16, f16};

use super::input::check_heads;
use super::key_tiles;
use super::shape::AttentionShape;
use super::workspace::{BUFFERS, ROUNDS, split_off_front};
use crate::buffer::Slice;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::scratch;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, strip_width};

impl Cpu {
    /// z (rows × slots.len()): z\[r, t\] = scale · Σ_h q\[r, h\] · k\[h / group, slots.start + t\], the logits with all heads
    /// concatenated (A³, equation 3). q: rows × heads × head_dim; k: kv_heads × capacity × head_dim. No mask.
    ///
    /// The queries of a group are summed first, which gives the same logits by a product of `group` times fewer rows.
    ///
    /// # Panics
    /// If lengths do not fit.
    #[allow(clippy::too_many_arguments)]
    pub fn concat_logits(
        &self,
        q: &[f32],
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        k: Slice,
        capacity: usize,
        slots: Range<usize>,
        scale: f32,
        z: &mut [f32],
    ) {
        check_heads(heads, kv_heads, head_dim);
        let rows = q.len() / (heads * head_dim);
        assert_eq!(q.len(), rows * heads * head_dim, "q is rows × heads × head_dim");
        assert_eq!(k.len(), kv_heads * capacity * head_dim, "k is kv_heads × capacity × head_dim");
        assert!(slots.start <= slots.end && slots.end <= capacity, "slots are below the capacity");
        assert_eq!(z.len(), rows * slots.len(), "z is rows × slots");
        let shape = AttentionShape::new(heads, kv_heads, head_dim, capacity);
        match k {
            Slice::F32(k) => self.logits::<f32>(shape, q, k, slots, scale, z),
            Slice::F16(k) => self.logits::<f16>(shape, q, k, slots, scale, z),
            Slice::Bf16(k) => self.logits::<bf16>(shape, q, k, slots, scale, z),
        }
    }

    fn logits<E: Elem>(
        &self,
        shape: AttentionShape,
        q: &[f32],
        k: &[E],
        slots: Range<usize>,
        scale: f32,
        z: &mut [f32],
    ) {
        let width = shape.kv_heads * shape.head_dim;
        let rows = q.len() / (shape.heads * shape.head_dim);
        let mut scratch = scratch::borrow(&ROUNDS, rows.next_multiple_of(STRIP) * width);
        let sums = &mut scratch.as_f32_mut()[..rows.next_multiple_of(STRIP) * width];
        let shared = DisjointMut::new(sums);
        let worth = rows * slots.len() * width > 1 << 18;
        self.parallel_if(worth, rows.div_ceil(STRIP), &|s| {
            // SAFETY: strip `s` belongs to task `s`.
            let sums = unsafe { shared.part(s * STRIP * width..(s + 1) * STRIP * width) };
            sum_groups(shape, &q[s * STRIP * shape.heads * shape.head_dim..], sums);
        });
        let z = &DisjointMut::new(z);
        self.parallel_if(worth, slots.len().div_ceil(KEYS), &|t| {
            let first = slots.start + t * KEYS;
            let tile = first..(first + KEYS).min(slots.end);
            self.run(Logits { shape, rows, sums, k, slots: slots.clone(), tile, scale, z });
        });
    }
}

/// Sums the queries of each group for up to 12 rows: element `e` of KV head `g` of row `r` at
/// (g · head_dim + e) · width + r.
fn sum_groups(shape: AttentionShape, q: &[f32], sums: &mut [f32]) {
    let AttentionShape { heads, kv_heads, group, head_dim: d, .. } = shape;
    let rows = (q.len() / (heads * d)).min(STRIP);
    let width = strip_width(rows);
    sums.fill(0.0);
    for (r, q) in q.chunks_exact(heads * d).take(rows).enumerate() {
        for g in 0..kv_heads {
            for q in q[g * group * d..(g + 1) * group * d].chunks_exact(d) {
                for (e, q) in q.iter().enumerate() {
                    sums[(g * d + e) * width + r] += q;
                }
            }
        }
    }
}

/// Logits of all rows for one tile of slots.
struct Logits<'a, E> {
    shape: AttentionShape,
    rows: usize,
    /// Packed sums of queries, strips × 12 × kv_heads · head_dim.
    sums: &'a [f32],
    k: &'a [E],
    slots: Range<usize>,
    tile: Range<usize>,
    scale: f32,
    z: &'a DisjointMut<'a, f32>,
}

impl<E: Elem> Kernel for Logits<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let AttentionShape { kv_heads, head_dim: d, padded, .. } = self.shape;
        let width = kv_heads * d;
        let mut scratch = scratch::borrow(&BUFFERS, KEYS * (STRIP + padded + width));
        let mut floats = scratch.as_f32_mut();
        let p = split_off_front(&mut floats, STRIP * KEYS);
        let rows = split_off_front(&mut floats, KEYS * padded);
        let keys = split_off_front(&mut floats, KEYS * width);
        for (g, keys) in keys.chunks_exact_mut(d * KEYS).enumerate() {
            let stored = self.shape.head(self.k, g);
            key_tiles::rows(simd, stored, d, self.tile.start, self.tile.clone(), padded, rows);
            key_tiles::transpose(simd, rows, padded, d, keys);
        }
        for (s, sums) in self.sums.chunks_exact(STRIP * width).enumerate() {
            let rows = s * STRIP..((s + 1) * STRIP).min(self.rows);
            key_tiles::scores(simd, width, keys, sums, strip_width(rows.len()), p);
            for (row, p) in rows.zip(p.chunks_exact(KEYS)) {
                let at = row * self.slots.len() + self.tile.start - self.slots.start;
                // SAFETY: these slots belong to this task.
                let z = unsafe { self.z.part(at..at + self.tile.len()) };
                z.iter_mut().zip(p).for_each(|(z, p)| *z = p * self.scale);
            }
        }
    }
}
