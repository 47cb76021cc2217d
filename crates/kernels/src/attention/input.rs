//! The input of an attention.

use super::shape::AttentionShape;
use crate::buffer::Slice;
use crate::linear::Precision;

/// Rows from which on packing keys and values as tiles of pairs is worth its time.
#[cfg(target_arch = "x86_64")]
const TILE_ROWS: usize = 16;

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
    /// Half-open range of slots that each row sees: 1 <= end − start, end <= capacity. Ascending ends are the fastest
    /// order; every order is right.
    pub visible: &'a [(u32, u32)],
    /// Factor of the dot products before softmax.
    pub scale: f32,
    /// With [`Precision::F32`] a row's result does not depend on the other rows, as long as keys and values are finite. With another precision, queries, keys,
    /// values and probabilities may be rounded to `bf16` (AMX and `vdpbf16ps` round them) or to integers of 12 bits and more (AVX2), and the numbers of rows and of keys may choose the
    /// kernel: fewer than 16 rows, or some rows over many keys, are not computed as others are. Sums are in `f32` in any case.
    pub precision: Precision,
}

impl Attention<'_> {
    /// Checks lengths, and that each row sees something.
    ///
    /// # Panics
    /// If lengths do not fit, or a row sees no slot.
    pub(super) fn check(&self) {
        self.check_lengths();
        let something = self.visible.iter().all(|(start, end)| start < end);
        assert!(something, "each row sees at least one slot");
    }

    /// Checks lengths; rows may see no slot.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub(super) fn check_lengths(&self) {
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

    /// Whether keys and values may be rounded to `bf16`, and are worth packing as tiles of pairs.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn is_worth_tiles(&self) -> bool {
        self.precision != Precision::F32 && self.visible.len() >= TILE_ROWS
    }

    pub(super) fn shape(&self) -> AttentionShape {
        let Attention { heads, kv_heads, head_dim, capacity, .. } = *self;
        AttentionShape::new(heads, kv_heads, head_dim, capacity)
    }
}

pub(super) fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) {
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads) && head_dim > 0, "KV heads divide the heads");
}
