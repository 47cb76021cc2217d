//! Changes of a cache's rows: the sum of those that fresh rows show, and one change added to many slots.

use std::ops::Range;

use half::{bf16, f16};

use crate::buffer::{Buffer, Slice};
use crate::cpu::Cpu;
use crate::device::{CacheHeads, Rotary};
use crate::disjoint::DisjointMut;
use crate::simd::{Elem, Kernel, Simd, load_part, store_part};

/// Slots that one task takes.
const SLOTS: usize = 128;

/// sums += fresh − back(cached) of one head of one token; `back` undoes a rotation with any scale.
struct AddChange<'a, E> {
    fresh: &'a [E],
    cached: &'a [E],
    cos: &'a [f32],
    sin: &'a [f32],
    sums: &'a mut [f32],
}

impl<E: Elem> Kernel for AddChange<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (d, half) = (self.sums.len(), self.cos.len());
        assert!(2 * half <= d && self.sin.len() == half, "2 · half <= head_dim");
        assert!(self.fresh.len() == d && self.cached.len() == d, "one head");
        let (fresh, cached, sums) = (self.fresh.as_ptr(), self.cached.as_ptr(), self.sums.as_mut_ptr());
        // SAFETY: every access is to elements below `half` of the tables, and below `d`, asserted above, of the others.
        unsafe {
            for i in (0..half).step_by(S::LANES) {
                let n = half - i;
                let (c, s) = (
                    load_part(simd, self.cos.as_ptr().add(i), n),
                    load_part(simd, self.sin.as_ptr().add(i), n),
                );
                let (a, b) = (load_part(simd, cached.add(i), n), load_part(simd, cached.add(half + i), n));
                // Lanes past the end hold zeros: their quotients are never stored.
                let square = simd.add(simd.mul(c, c), simd.mul(s, s));
                let a_back = simd.div(simd.add(simd.mul(a, c), simd.mul(b, s)), square);
                let b_back = simd.div(simd.sub(simd.mul(b, c), simd.mul(a, s)), square);
                for (at, back) in [(i, a_back), (half + i, b_back)] {
                    let change = simd.sub(load_part(simd, fresh.add(at), n), back);
                    store_part(simd, sums.add(at), simd.add(load_part(simd, sums.add(at), n), change), n);
                }
            }
            for i in (2 * half..d).step_by(S::LANES) {
                let n = d - i;
                let change = simd.sub(load_part(simd, fresh.add(i), n), load_part(simd, cached.add(i), n));
                store_part(simd, sums.add(i), simd.add(load_part(simd, sums.add(i), n), change), n);
            }
        }
    }
}

/// Adds one head's row, rotated by each slot's entry, to neighbouring slots.
struct AddRow<'a, E> {
    row: &'a [f32],
    /// slots × half
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
    /// slots × d
    slots: &'a mut [E],
}

impl<E: Elem> Kernel for AddRow<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (d, half) = (self.row.len(), self.half);
        assert!(2 * half <= d, "2 · half <= head_dim");
        let row = self.row.as_ptr();
        for (t, slot) in self.slots.chunks_exact_mut(d).enumerate() {
            let (cos, sin) = (&self.cos[t * half..][..half], &self.sin[t * half..][..half]);
            let slot = slot.as_mut_ptr();
            // SAFETY: every access is to elements below `half` of the tables, and below `d` of the others.
            unsafe {
                for i in (0..half).step_by(S::LANES) {
                    let n = half - i;
                    let (c, s) =
                        (load_part(simd, cos.as_ptr().add(i), n), load_part(simd, sin.as_ptr().add(i), n));
                    let (a, b) = (load_part(simd, row.add(i), n), load_part(simd, row.add(half + i), n));
                    let turned = [
                        (i, simd.sub(simd.mul(a, c), simd.mul(b, s))),
                        (half + i, simd.add(simd.mul(b, c), simd.mul(a, s))),
                    ];
                    for (at, x) in turned {
                        store_part(simd, slot.add(at), simd.add(load_part(simd, slot.add(at), n), x), n);
                    }
                }
                for i in (2 * half..d).step_by(S::LANES) {
                    let n = d - i;
                    let x = simd.add(load_part(simd, slot.add(i), n), load_part(simd, row.add(i), n));
                    store_part(simd, slot.add(i), x, n);
                }
            }
        }
    }
}

impl Cpu {
    pub(crate) fn sum_changes(
        &self,
        (fresh, cache): (Slice<'_>, Slice<'_>),
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32> {
        match (fresh, cache) {
            (Slice::F32(fresh), Slice::F32(cache)) => {
                self.changes::<f32>(fresh, cache, heads, groups, rotary)
            }
            (Slice::F16(fresh), Slice::F16(cache)) => {
                self.changes::<f16>(fresh, cache, heads, groups, rotary)
            }
            (Slice::Bf16(fresh), Slice::Bf16(cache)) => {
                self.changes::<bf16>(fresh, cache, heads, groups, rotary)
            }
            (fresh, cache) => panic!("{} rows are compared with {}", fresh.dtype(), cache.dtype()),
        }
    }

    fn changes<E: Elem>(
        &self,
        fresh: &[E],
        cache: &[E],
        heads: CacheHeads,
        groups: &[Vec<(usize, u32)>],
        rotary: Rotary<'_>,
    ) -> Vec<f32> {
        let (CacheHeads { kv_heads, head_dim: d }, width) = (heads, heads.width());
        let (half, capacity) = (rotary.dim(fresh.len() / width.max(1)) / 2, cache.len() / width.max(1));
        let mut all = vec![0.0; groups.len() * width];
        let pairs = groups.iter().enumerate().flat_map(|(i, pairs)| pairs.iter().map(move |pair| (i, pair)));
        for (group, (row, slot)) in pairs {
            assert!((*slot as usize) < capacity, "slots are below {capacity}");
            let (sums, table) = (&mut all[group * width..][..width], row * half..(row + 1) * half);
            for head in 0..kv_heads {
                self.run(AddChange {
                    fresh: &fresh[(row * kv_heads + head) * d..][..d],
                    cached: &cache[(head * capacity + *slot as usize) * d..][..d],
                    cos: &rotary.cos[table.clone()],
                    sin: &rotary.sin[table.clone()],
                    sums: &mut sums[head * d..(head + 1) * d],
                });
            }
        }
        all
    }

    pub(crate) fn add_rows(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut Buffer,
    ) {
        match cache {
            Buffer::F32(cache) => self.add::<f32>(rows, heads, rotary, spans, cache),
            Buffer::F16(cache) => self.add::<f16>(rows, heads, rotary, spans, cache),
            Buffer::Bf16(cache) => self.add::<bf16>(rows, heads, rotary, spans, cache),
        }
    }

    fn add<E: Elem + Send>(
        &self,
        rows: &[f32],
        heads: CacheHeads,
        rotary: Rotary<'_>,
        spans: &[Range<usize>],
        cache: &mut [E],
    ) {
        let (CacheHeads { kv_heads, head_dim: d }, width) = (heads, heads.width());
        let (end, capacity) = (spans.last().map_or(0, |span| span.end), cache.len() / width.max(1));
        assert!(
            rows.len() == spans.len() * width && end <= capacity,
            "one row a span, and slots below {capacity}"
        );
        assert!(spans.is_sorted_by(|a, b| a.end <= b.start), "spans ascend and are apart");
        let (half, cache) = (rotary.dim(end) / 2, DisjointMut::new(cache));
        let parts: Vec<(usize, Range<usize>)> =
            spans.iter().enumerate().flat_map(|(row, span)| parts(row, span)).collect();
        self.parallel_if(parts.len() > 2, parts.len(), &|part| {
            let (row, slots) = &parts[part];
            let (row, table) = (&rows[row * width..][..width], slots.start * half..slots.end * half);
            let (cos, sin) = (&rotary.cos[table.clone()], &rotary.sin[table]);
            for head in 0..kv_heads {
                let first = head * capacity;
                // SAFETY: spans are apart, and these slots belong to this task.
                let slots = unsafe { cache.part((first + slots.start) * d..(first + slots.end) * d) };
                self.run(AddRow { row: &row[head * d..(head + 1) * d], cos, sin, half, slots });
            }
        });
    }
}

/// The slots that each task takes of a span, with the span's row.
fn parts(row: usize, span: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let end = span.end;
    span.clone().step_by(SLOTS).map(move |start| (row, start..end.min(start + SLOTS)))
}
