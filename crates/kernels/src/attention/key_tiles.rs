//! Tiles of stored keys and values as `f32`, and their products with queries.

use std::ops::Range;

use crate::simd::{Elem, KEYS, Simd, Tile, load_part};

/// Converts the stored vectors of `slots` (at most [`KEYS`] from `first` on) of one head to rows `padded` apart;
/// rows without a slot and elements past `head_dim` become zero.
///
/// stored: capacity × head_dim; out: KEYS × padded.
#[inline(always)]
pub(super) fn rows<S: Simd, E: Elem>(
    simd: S,
    stored: &[E],
    head_dim: usize,
    first: usize,
    slots: Range<usize>,
    padded: usize,
    out: &mut [f32],
) {
    let (before, end) = (slots.start - first, slots.end - first);
    out[..before * padded].fill(0.0);
    out[end * padded..KEYS * padded].fill(0.0);
    let stored = &stored[slots.start * head_dim..slots.end * head_dim];
    for (stored, out) in stored.chunks_exact(head_dim).zip(out[before * padded..].chunks_exact_mut(padded)) {
        row(simd, stored, out);
    }
}

/// Transposes rows (KEYS × padded) to head_dim × KEYS.
#[inline(always)]
pub(super) fn transpose<S: Simd>(simd: S, rows: &[f32], padded: usize, head_dim: usize, out: &mut [f32]) {
    assert!(rows.len() >= KEYS * padded && out.len() >= head_dim * KEYS && padded >= head_dim);
    for t in (0..KEYS).step_by(S::LANES) {
        for e in (0..head_dim).step_by(S::LANES) {
            // SAFETY: a block of LANES × LANES lies within the rows, `padded` being a multiple of the lanes; of
            // its transpose only rows below `head_dim` are written.
            unsafe {
                let to = out.as_mut_ptr().add(e * KEYS + t);
                simd.transpose(
                    rows.as_ptr().add(t * padded + e),
                    padded,
                    to,
                    KEYS,
                    (head_dim - e).min(S::LANES),
                );
            }
        }
    }
}

/// Converts the stored vectors of single `slots` (at most [`KEYS`]) of one head; rows without a slot become zero.
///
/// stored: capacity × head_dim; out: KEYS × padded.
#[inline(always)]
pub(super) fn gather<S: Simd, E: Elem>(
    simd: S,
    stored: &[E],
    head_dim: usize,
    slots: &[u32],
    padded: usize,
    out: &mut [f32],
) {
    for (slot, out) in slots.iter().zip(out.chunks_exact_mut(padded)) {
        row(simd, &stored[*slot as usize * head_dim..][..head_dim], out);
    }
    out[slots.len() * padded..KEYS * padded].fill(0.0);
}

/// Converts one vector. `out` is a multiple of the lanes long; its elements past the vector become zero.
#[inline(always)]
fn row<S: Simd, E: Elem>(simd: S, stored: &[E], out: &mut [f32]) {
    for i in (0..out.len()).step_by(S::LANES) {
        // SAFETY: `i` stays below the length, a multiple of the lanes, and the count within the vector.
        unsafe {
            let v = if i < stored.len() {
                load_part(simd, stored.as_ptr().add(i), stored.len() - i)
            } else {
                simd.splat(0.0)
            };
            simd.store(out.as_mut_ptr().add(i), v);
        }
    }
}

/// p (12 × 64) = scores of a packed strip of queries (k × width) with a tile of keys (k × 64).
#[inline(always)]
pub(super) fn scores<S: Simd>(simd: S, k: usize, keys: &[f32], strip: &[f32], width: usize, p: &mut [f32]) {
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
    unsafe { simd.strip::<1>(width, &tile) };
}
