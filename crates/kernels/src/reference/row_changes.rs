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
    groups: &[Vec<(usize, u32)>],
    rotary: Rotary<'_>,
) -> Vec<f32> {
    let (d, width) = (heads.head_dim, heads.width());
    let (half, capacity) = (rotary.dim(fresh.len() / width) / 2, cache.len() / width);
    let sums = |pairs: &Vec<(usize, u32)>| {
        let mut sums = vec![0.0; width];
        for (row, slot) in pairs {
            for head in 0..heads.kv_heads {
                let mut cached = cache[(head * capacity + *slot as usize) * d..][..d].to_vec();
                unrotate(&mut cached, rotary, half, *row);
                for (at, cached) in (head * d..).zip(cached) {
                    sums[at] += fresh[row * width + at] - cached;
                }
            }
        }
        sums
    };
    groups.iter().flat_map(sums).collect()
}

pub(super) fn add_rows(
    rows: &[f32],
    heads: CacheHeads,
    rotary: Rotary<'_>,
    spans: &[Range<usize>],
    cache: &mut [f32],
) {
    let (d, half) = (heads.head_dim, rotary.dim(spans.last().map_or(0, |span| span.end)) / 2);
    let capacity = cache.len() / heads.width();
    let slots = spans.iter().enumerate().flat_map(|(i, span)| span.clone().map(move |slot| (i, slot)));
    for (i, slot) in slots {
        for head in 0..heads.kv_heads {
            let mut row = rows[i * heads.width() + head * d..][..d].to_vec();
            rotate(&mut row, d, rotary, half, slot);
            let at = (head * capacity + slot) * d;
            cache[at..at + d].iter_mut().zip(row).for_each(|(x, change)| *x += change);
        }
    }
}
