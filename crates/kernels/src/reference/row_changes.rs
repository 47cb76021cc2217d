//! Changes of a cache's rows, on elements of the host.

use std::ops::Range;

use super::layer::rotate;
use crate::device::{CacheHeads, Distance, Rotary};

/// Undoes [`rotate`] of one head, its scale included.
fn unrotate(head: &mut [f32], rotary: Rotary<'_>, half: usize, token: usize) {
    for i in 0..half {
        let (cos, sin) = (rotary.cos[token * half + i], rotary.sin[token * half + i]);
        let (a, b, square) = (head[i], head[i + half], cos * cos + sin * sin);
        head[i] = (a * cos + b * sin) / square;
        head[i + half] = (b * cos - a * sin) / square;
    }
}

pub(super) fn row_distances(
    fresh: &[f32],
    cached: &[f32],
    width: usize,
    pairs: &[(usize, usize)],
    distance: Distance,
) -> Vec<f32> {
    let between = |(new, old): &(usize, usize)| {
        let pairs = fresh[new * width..][..width].iter().zip(&cached[old * width..][..width]);
        match distance {
            Distance::L2 => pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f32>(),
            Distance::L1 => pairs.map(|(a, b)| (a - b).abs()).sum(),
        }
    };
    pairs.iter().map(between).collect()
}

pub(super) fn sum_changes(
    fresh: &[f32],
    cache: &[f32],
    heads: CacheHeads,
    pairs: &[(usize, u32)],
    rotary: Rotary<'_>,
) -> Vec<f32> {
    let (d, half) = (heads.head_dim, rotary.dim(pairs.len()) / 2);
    let capacity = cache.len() / heads.width();
    let mut sums = vec![0.0; heads.width()];
    for (i, (row, slot)) in pairs.iter().enumerate() {
        for head in 0..heads.kv_heads {
            let mut cached = cache[(head * capacity + *slot as usize) * d..][..d].to_vec();
            unrotate(&mut cached, rotary, half, i);
            for (at, cached) in (head * d..).zip(cached) {
                sums[at] += fresh[row * heads.width() + at] - cached;
            }
        }
    }
    sums
}

pub(super) fn add_row(
    row: &[f32],
    heads: CacheHeads,
    rotary: Rotary<'_>,
    slots: Range<usize>,
    cache: &mut [f32],
) {
    let (d, half) = (heads.head_dim, rotary.dim(slots.len()) / 2);
    let capacity = cache.len() / heads.width();
    for (i, slot) in slots.enumerate() {
        for head in 0..heads.kv_heads {
            let mut row = row[head * d..][..d].to_vec();
            rotate(&mut row, d, rotary, half, i);
            let at = (head * capacity + slot) * d;
            cache[at..at + d].iter_mut().zip(row).for_each(|(x, change)| *x += change);
        }
    }
}
