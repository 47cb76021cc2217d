//! Columns of a page: stripes without text between them, with prose on both sides.

use super::line::{Span, rows};

/// Columns inside columns, and parts of a page above each other.
const MAX_DEPTH: usize = 6;

/// Places at which a stripe is looked for.
const MAX_CANDIDATES: usize = 16;

/// Lines that a column has at least.
const MIN_LINES: usize = 4;

/// Width of a stripe, and least width of a column, in parts of the size of the text.
const STRIPE: f64 = 0.8;
const MIN_WIDTH: f64 = 9.0;

/// Characters that a column's lines have on average, at least: those of a table's cells have fewer.
const MIN_CHARACTERS: usize = 18;

/// The texts of a page in the order of reading, by column.
pub(super) fn split(spans: Vec<Span>) -> Vec<Vec<Span>> {
    let mut found = Vec::new();
    divide(spans, 0, &mut found);
    found
}

fn divide(spans: Vec<Span>, depth: usize, found: &mut Vec<Vec<Span>>) {
    if spans.is_empty() {
        return;
    }
    let rows = rows(spans);
    let best = if depth < MAX_DEPTH { best(&rows) } else { None };
    let Some(stripe) = best else {
        found.push(rows.into_iter().flatten().collect());
        return;
    };
    let mut rows = rows.into_iter();
    let above = rows.by_ref().take(stripe.start).flatten().collect();
    let (left, right) =
        rows.by_ref().take(stripe.end - stripe.start).flatten().partition(|span: &Span| span.x0 < stripe.x);
    let below = rows.flatten().collect();
    for part in [above, left, right, below] {
        divide(part, depth + 1, found);
    }
}

/// A stripe at `x` between the texts of some rows.
struct Stripe {
    x: f64,
    start: usize,
    end: usize,
    characters: usize,
}

fn best(rows: &[Vec<Span>]) -> Option<Stripe> {
    let mut sizes: Vec<f64> = rows.iter().flatten().map(|span| span.size).collect();
    sizes.sort_by(f64::total_cmp);
    let size = *sizes.get(sizes.len() / 2)?;
    let stripes = candidates(rows, size).into_iter().flat_map(|x| stripes(rows, x, size));
    stripes.max_by_key(|stripe| stripe.characters)
}

/// Places at which several rows have a gap, those of most rows first.
fn candidates(rows: &[Vec<Span>], size: f64) -> Vec<f64> {
    let mut counts: std::collections::BTreeMap<i64, usize> = std::collections::BTreeMap::new();
    for pair in rows.iter().flat_map(|row| row.windows(2)) {
        if pair[1].x0 - pair[0].x1 >= STRIPE * size {
            // Texts right of a stripe begin at one place.
            *counts.entry((pair[1].x0 * 2.0 / size) as i64).or_default() += 1;
        }
    }
    let mut counts: Vec<(i64, usize)> = counts.into_iter().filter(|(_, count)| *count >= 2).collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts
        .into_iter()
        .take(MAX_CANDIDATES)
        .map(|(place, _)| (place as f64 / 2.0 - STRIPE / 2.0) * size)
        .collect()
}

/// The runs of rows that a stripe at `x` divides into columns.
fn stripes(rows: &[Vec<Span>], x: f64, size: f64) -> Vec<Stripe> {
    let mut found = Vec::new();
    let mut start = 0;
    let (mut left, mut right) = (f64::NEG_INFINITY, f64::INFINITY);
    for (index, row) in rows.iter().enumerate() {
        let row_left =
            row.iter().filter(|span| span.x0 < x).map(|span| span.x1).fold(f64::NEG_INFINITY, f64::max);
        let row_right =
            row.iter().filter(|span| span.x0 >= x).map(|span| span.x0).fold(f64::INFINITY, f64::min);
        if right.min(row_right) - left.max(row_left) < STRIPE * size || row_left > x {
            found.extend(columns(rows, start, index, x, size));
            start = index + usize::from(row_left > x);
            (left, right) =
                if row_left > x { (f64::NEG_INFINITY, f64::INFINITY) } else { (row_left, row_right) };
        } else {
            (left, right) = (left.max(row_left), right.min(row_right));
        }
    }
    found.extend(columns(rows, start, rows.len(), x, size));
    found
}

/// Whether the rows hold prose on both sides of a stripe.
fn columns(rows: &[Vec<Span>], start: usize, end: usize, x: f64, size: f64) -> Option<Stripe> {
    let rows = rows.get(start..end)?;
    let sides = [true, false].map(|left| {
        let lines: Vec<(f64, f64, f64, usize)> = rows
            .iter()
            .filter_map(|row| {
                let spans = || row.iter().filter(|span| (span.x0 < x) == left);
                let x0 = spans().map(|span| span.x0).reduce(f64::min)?;
                let x1 = spans().map(|span| span.x1).reduce(f64::max)?;
                Some((x0, x1, spans().next()?.y, spans().map(|span| span.text.chars().count()).sum()))
            })
            .collect();
        let width = lines.iter().map(|l| l.1).fold(f64::NEG_INFINITY, f64::max)
            - lines.iter().map(|l| l.0).fold(f64::INFINITY, f64::min);
        let characters: usize = lines.iter().map(|l| l.3).sum();
        let filled: f64 = lines.iter().map(|l| l.1 - l.0).sum::<f64>() / lines.len().max(1) as f64;
        let prose = lines.len() >= MIN_LINES
            && characters >= MIN_CHARACTERS * lines.len()
            && width >= MIN_WIDTH * size
            && filled >= 0.6 * width;
        let range = lines.first().zip(lines.last()).map(|(first, last)| (first.2, last.2));
        (prose, characters, range)
    });
    let [(true, a, Some(left)), (true, b, Some(right))] = sides else { return None };
    // Columns stand beside each other, not above.
    let beside = left.1.min(right.1) - left.0.max(right.0);
    let shorter = (left.1 - left.0).min(right.1 - right.0);
    (beside >= 0.5 * shorter).then_some(Stripe { x, start, end, characters: a + b })
}
