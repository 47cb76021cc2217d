//! Sizes of an attention and of its blocks.

use crate::simd::STRIP;

/// Query rows that share a converted tile of keys.
const QUERY_ROWS: usize = 16 * STRIP;
/// Floats of a strip's maxima or sums.
pub(super) const STATS: usize = 16;

/// Sizes of an attention.
#[derive(Clone, Copy)]
pub(super) struct AttentionShape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Query heads of a KV head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// `head_dim` up to a multiple of 16.
    pub(super) padded: usize,
    pub(super) capacity: usize,
}

impl AttentionShape {
    pub(super) fn new(heads: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> AttentionShape {
        let padded = head_dim.next_multiple_of(16);
        AttentionShape { heads, kv_heads, group: heads / kv_heads, head_dim, padded, capacity }
    }

    /// Rows of one block: whole strips if possible, fewer rows if there would be too few blocks for the threads.
    pub(super) fn block_rows(&self, rows: usize, threads: usize) -> usize {
        let unit = self.whole_rows(STRIP);
        let mut units = (QUERY_ROWS / (unit * self.group)).max(1);
        while units > 1
            && units * unit * self.group > QUERY_ROWS / 4
            && self.kv_heads * rows.div_ceil(units * unit) < 2 * threads
        {
            units /= 2;
        }
        units * unit
    }

    /// The fewest rows whose queries of a KV head fill groups of `width`.
    pub(super) fn whole_rows(&self, width: usize) -> usize {
        (1..=width).find(|rows| (rows * self.group).is_multiple_of(width)).unwrap_or(width)
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
