//! Attention scores without values: logits with all heads concatenated, and probabilities summed over the rows.

use std::ops::Range;

use half::{bf16, f16};

use super::columns::{Columns, Softmax};
use super::queries::{Block, Shape, cut};
use super::{Attention, Noise, ROUNDS, WORK, check_heads, keys};
use crate::shared::Shared;
use crate::simd::{Elem, KEYS, Kernel, STRIP, Simd, Tile, strip_width};
use crate::{Cpu, Slice, scratch};

impl Cpu {
    /// z (rows × slots.len()): z\[r, t\] = scale · Σ_h q\[r, h\] · k\[h / group, slots.start + t\], the logits with all heads
    /// concatenated (A³, equation 3). q: rows × heads × head_dim; k: kv_heads × capacity × head_dim. No mask.
    ///
    /// The queries of a group are summed first: the same, and a product with `group` times less to do.
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
        let shape = Shape::new(heads, kv_heads, head_dim, capacity);
        match k {
            Slice::F32(k) => self.logits::<f32>(shape, q, k, slots, scale, z),
            Slice::F16(k) => self.logits::<f16>(shape, q, k, slots, scale, z),
            Slice::Bf16(k) => self.logits::<bf16>(shape, q, k, slots, scale, z),
        }
    }

    fn logits<E: Elem>(
        &self,
        shape: Shape,
        q: &[f32],
        k: &[E],
        slots: Range<usize>,
        scale: f32,
        z: &mut [f32],
    ) {
        let width = shape.kv_heads * shape.head_dim;
        let rows = q.len() / (shape.heads * shape.head_dim);
        let mut scratch = scratch::lend(&ROUNDS, rows.next_multiple_of(STRIP) * width);
        let sums = &mut scratch.words.floats_mut()[..rows.next_multiple_of(STRIP) * width];
        let shared = Shared::new(sums);
        let worth = rows * slots.len() * width > 1 << 18;
        self.parallel_if(worth, rows.div_ceil(STRIP), &|s| {
            // SAFETY: strip `s` belongs to task `s`.
            let sums = unsafe { shared.part(s * STRIP * width..(s + 1) * STRIP * width) };
            sum_groups(shape, &q[s * STRIP * shape.heads * shape.head_dim..], sums);
        });
        let z = &Shared::new(z);
        self.parallel_if(worth, slots.len().div_ceil(KEYS), &|t| {
            let first = slots.start + t * KEYS;
            let tile = first..(first + KEYS).min(slots.end);
            self.isa().run(Logits { shape, rows, sums, k, slots: slots.clone(), tile, scale, z });
        });
    }

    /// s (kv_heads × slots.len()): s\[g, t\] = Σ_r Σ_h softmax_t(scale · q\[r, h\] · k\[g, t\]) over the heads h of KV head
    /// g: what the rows give to each slot, the softmax of a row taken over the slots that it sees from `slots.start` on.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn column_sums(&self, a: &Attention, slots: Range<usize>, s: &mut [f32]) {
        a.check();
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(s.len(), a.kv_heads * slots.len(), "one sum for each KV head and slot");
        match a.k {
            Slice::F32(k) => self.columns::<f32>(a, k, slots, Softmax::Own(None), s),
            Slice::F16(k) => self.columns::<f16>(a, k, slots, Softmax::Own(None), s),
            Slice::Bf16(k) => self.columns::<bf16>(a, k, slots, Softmax::Own(None), s),
        }
    }

    /// The same of softmax((scale · q · k + g) / τ) with Gumbel noise `g`.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn noisy_column_sums(&self, a: &Attention, slots: Range<usize>, noise: &Noise<'_>, s: &mut [f32]) {
        a.check();
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(s.len(), a.kv_heads * slots.len(), "one sum for each KV head and slot");
        noise.check(a);
        match a.k {
            Slice::F32(k) => self.columns::<f32>(a, k, slots, Softmax::Own(Some(noise)), s),
            Slice::F16(k) => self.columns::<f16>(a, k, slots, Softmax::Own(Some(noise)), s),
            Slice::Bf16(k) => self.columns::<bf16>(a, k, slots, Softmax::Own(Some(noise)), s),
        }
    }

    /// w (kv_heads × rows × slots.len()): w\[g, r, t\] = Σ_h softmax_t(scale · q\[r, h\] · k\[g, t\]) over the heads h of
    /// KV head g: what each row gives to each slot, the softmax taken over the slots that it sees from `slots.start` on.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn row_weights(&self, a: &Attention, slots: Range<usize>, w: &mut [f32]) {
        a.check();
        assert!(slots.start <= slots.end && slots.end <= a.capacity, "slots are below the capacity");
        assert_eq!(w.len(), a.kv_heads * a.visible.len() * slots.len(), "one for each KV head, row and slot");
        match a.k {
            Slice::F32(k) => self.weights::<f32>(a, k, slots, w),
            Slice::F16(k) => self.weights::<f16>(a, k, slots, w),
            Slice::Bf16(k) => self.weights::<bf16>(a, k, slots, w),
        }
    }

    fn weights<E: Elem>(&self, a: &Attention, k: &[E], slots: Range<usize>, w: &mut [f32]) {
        let (shape, rows, n) = (a.shape(), a.visible.len(), slots.len());
        let each = shape.block_rows(rows, self.threads());
        let blocks = rows.div_ceil(each);
        w.fill(0.0);
        let shared = Shared::new(w);
        let worth = rows * n * shape.heads * shape.head_dim > 1 << 18;
        self.parallel_if(worth, shape.kv_heads * blocks, &|t| {
            let (g, b) = (t / blocks, t % blocks);
            let block = Block { shape, g, rows: b * each..((b + 1) * each).min(rows) };
            let range = (g * rows + block.rows.start) * n..(g * rows + block.rows.end) * n;
            // SAFETY: the rows of a block belong to one task.
            let sums = unsafe { shared.part(range) };
            self.isa().run(Columns {
                a,
                k,
                block,
                slots: slots.clone(),
                softmax: Softmax::Own(None),
                apart: true,
                sums,
            });
        });
    }
}

/// Sums the queries of each group for up to 12 rows: element `e` of KV head `g` of row `r` at
/// (g · head_dim + e) · width + r.
fn sum_groups(shape: Shape, q: &[f32], sums: &mut [f32]) {
    let Shape { heads, kv_heads, group, head_dim: d, .. } = shape;
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
    shape: Shape,
    rows: usize,
    /// Packed sums of queries, strips × 12 × kv_heads · head_dim.
    sums: &'a [f32],
    k: &'a [E],
    slots: Range<usize>,
    tile: Range<usize>,
    scale: f32,
    z: &'a Shared<'a, f32>,
}

impl<E: Elem> Kernel for Logits<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Shape { kv_heads, head_dim: d, padded, .. } = self.shape;
        let width = kv_heads * d;
        let mut scratch = scratch::lend(&WORK, KEYS * (STRIP + padded + width));
        let mut floats = scratch.words.floats_mut();
        let p = cut(&mut floats, STRIP * KEYS);
        let rows = cut(&mut floats, KEYS * padded);
        let keys = cut(&mut floats, KEYS * width);
        for (g, keys) in keys.chunks_exact_mut(d * KEYS).enumerate() {
            let stored = self.shape.head(self.k, g);
            keys::rows::<S, E>(stored, d, self.tile.start, self.tile.clone(), padded, rows);
            keys::transpose::<S>(rows, padded, d, keys);
        }
        for (s, sums) in self.sums.chunks_exact(STRIP * width).enumerate() {
            let rows = s * STRIP..((s + 1) * STRIP).min(self.rows);
            multiply::<S>(width, keys, sums, strip_width(rows.len()), p);
            for (row, p) in rows.zip(p.chunks_exact(KEYS)) {
                let at = row * self.slots.len() + self.tile.start - self.slots.start;
                // SAFETY: these slots belong to this task.
                let z = unsafe { self.z.part(at..at + self.tile.len()) };
                z.iter_mut().zip(p).for_each(|(z, p)| *z = p * self.scale);
            }
        }
    }
}

/// p (12 × 64) = a packed strip times k × 64 keys.
#[inline(always)]
pub(super) fn multiply<S: Simd>(k: usize, keys: &[f32], strip: &[f32], width: usize, p: &mut [f32]) {
    let tile = Tile {
        k,
        w: keys[..k * KEYS].as_ptr().cast(),
        ws: KEYS,
        ps: 32,
        x: strip[..k * width].as_ptr().cast(),
        ks: width,
        c: p[..width * KEYS].as_mut_ptr(),
        cs: KEYS,
        cps: 32,
        cols: KEYS,
        add: false,
    };
    // SAFETY: the slices above have the lengths the tile needs.
    unsafe { S::strip::<1>(width, &tile) };
}
