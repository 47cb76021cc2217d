//! Blocks of queries, and how their queries are packed.
//!
//! The queries of a KV head in a block of rows count as *query rows*: row after row, and in a row head after head of the
//! group. Twelve query rows make a strip.

use std::ops::Range;

use super::input::Attention;
use super::shape::AttentionShape;
use crate::simd::{KEYS, STRIP, strip_width};

/// Keys of one segment. Every row's result is merged from the same segments, so that they can be computed by
/// different threads without changing it. A multiple of [`KEYS`].
pub(super) const SEGMENT: usize = 8 * KEYS;
/// The queries of KV head `g` in `rows`.
#[derive(Clone)]
pub(super) struct QueryBlock {
    pub(super) shape: AttentionShape,
    pub(super) g: usize,
    pub(super) rows: Range<usize>,
}

impl QueryBlock {
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

    /// The row of query row `i`.
    pub(super) fn row(&self, i: usize) -> usize {
        self.rows.start + i / self.shape.group
    }

    /// Index of query row `i` in rows × heads.
    pub(super) fn index(&self, i: usize) -> usize {
        self.row(i) * self.shape.heads + self.g * self.shape.group + i % self.shape.group
    }

    /// Index of the first element of query row `i` in rows × heads × head_dim.
    pub(super) fn at(&self, i: usize) -> usize {
        self.index(i) * self.shape.head_dim
    }

    /// The smallest range of slots that holds all slots seen by the query rows `queries`; rows that see no slot do not
    /// count.
    pub(super) fn span(&self, visible: &[(u32, u32)], queries: Range<usize>) -> Range<usize> {
        let rows = &visible[self.row(queries.start)..=self.row(queries.end - 1)];
        let seeing = || rows.iter().filter(|v| v.0 < v.1);
        let start = seeing().map(|v| v.0).min().unwrap_or(0);
        let end = seeing().map(|v| v.1).max().unwrap_or(0);
        start as usize..end as usize
    }

    /// Writes the queries, times `scale`, strip after strip: element `e` of strip row `r` at `e · width + r`.
    /// Rows past the last query row are zero.
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
