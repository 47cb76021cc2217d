//! Which queries are taken together, and how they are packed.
//!
//! The queries of a KV head in a block of rows count as *query rows*, row after row and in it head after head
//! of the group; twelve of them make a strip.

use std::ops::Range;

use super::Attention;
use crate::simd::{KEYS, STRIP, strip_width};

/// Keys of one segment. Every row's result is merged from the same segments, so that they can be computed by
/// different threads without changing it. A multiple of [`KEYS`].
pub(super) const SEGMENT: usize = 8 * KEYS;
/// Query rows that share a converted tile of keys.
const QUERY_ROWS: usize = 16 * STRIP;
/// Floats of a strip's maxima or sums.
pub(super) const STATS: usize = 16;

/// Sizes of an attention.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Query heads of a KV head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// `head_dim` up to a multiple of 16.
    pub(super) padded: usize,
    pub(super) capacity: usize,
}

impl Shape {
    pub(super) fn new(heads: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> Shape {
        let padded = head_dim.next_multiple_of(16);
        Shape { heads, kv_heads, group: heads / kv_heads, head_dim, padded, capacity }
    }

    /// Rows of one block: whole strips if possible, fewer rows if that gives each thread something to do.
    pub(super) fn block_rows(&self, rows: usize, threads: usize) -> usize {
        // The fewest rows whose queries fill whole strips.
        let unit = (1..=STRIP).find(|u| (u * self.group).is_multiple_of(STRIP)).unwrap_or(STRIP);
        let mut units = (QUERY_ROWS / (unit * self.group)).max(1);
        while units > 1
            && units * unit * self.group > QUERY_ROWS / 4
            && self.kv_heads * rows.div_ceil(units * unit) < 2 * threads
        {
            units /= 2;
        }
        units * unit
    }

    /// Floats of the partial result of `n` query rows: weighted values, maxima, sums.
    pub(super) fn part_len(&self, n: usize) -> usize {
        let strips = n.div_ceil(STRIP);
        strips * (STRIP * self.padded + 2 * STATS)
    }

    /// The head's part of kv_heads × capacity × head_dim.
    pub(super) fn head<'a, E>(&self, stored: &'a [E], g: usize) -> &'a [E] {
        let n = self.capacity * self.head_dim;
        &stored[g * n..(g + 1) * n]
    }
}

/// The queries of KV head `g` in `rows`.
#[derive(Clone)]
pub(super) struct Block {
    pub(super) shape: Shape,
    pub(super) g: usize,
    pub(super) rows: Range<usize>,
}

impl Block {
    /// Number of query rows.
    pub(super) fn queries(&self) -> usize {
        self.rows.len() * self.shape.group
    }

    pub(super) fn strips(&self) -> usize {
        self.queries().div_ceil(STRIP)
    }

    /// Query rows of strip `s`.
    pub(super) fn strip(&self, s: usize) -> Range<usize> {
        s * STRIP..((s + 1) * STRIP).min(self.queries())
    }

    /// The row that query row `i` belongs to.
    pub(super) fn row(&self, i: usize) -> usize {
        self.rows.start + i / self.shape.group
    }

    /// Where query row `i` is in rows × heads.
    pub(super) fn index(&self, i: usize) -> usize {
        self.row(i) * self.shape.heads + self.g * self.shape.group + i % self.shape.group
    }

    /// Where query row `i` begins in rows × heads × head_dim.
    pub(super) fn at(&self, i: usize) -> usize {
        self.index(i) * self.shape.head_dim
    }

    /// The slots that query rows `queries` see, all together; rows that see nothing do not count.
    pub(super) fn span(&self, visible: &[(u32, u32)], queries: Range<usize>) -> Range<usize> {
        let rows = &visible[self.row(queries.start)..=self.row(queries.end - 1)];
        let seeing = || rows.iter().filter(|v| v.0 < v.1);
        let start = seeing().map(|v| v.0).min().unwrap_or(0);
        let end = seeing().map(|v| v.1).max().unwrap_or(0);
        start as usize..end as usize
    }

    /// Writes the queries, times `scale`, strip after strip: element `e` of strip row `r` at `e · width + r`.
    /// Rows that only fill a strip up are zero.
    pub(super) fn pack(&self, a: &Attention, scale: f32, packed: &mut [f32]) {
        let d = self.shape.head_dim;
        for (s, packed) in packed.chunks_mut(STRIP * d).enumerate().take(self.strips()) {
            let queries = self.strip(s);
            let width = strip_width(queries.len());
            if queries.len() < width {
                packed.fill(0.0);
            }
            for (r, i) in queries.enumerate() {
                let q = &a.q[self.at(i)..][..d];
                for (e, q) in q.iter().enumerate() {
                    packed[e * width + r] = q * scale;
                }
            }
        }
    }
}

/// Cuts the first `n` off `rest`.
pub(super) fn cut<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}
