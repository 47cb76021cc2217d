//! Sizes of parts of a text, counted as rarely as may be.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use super::blocks::trim;

/// By how much, as a part of the limit, the sum of sizes may differ from the size of the whole.
const TOLERANCE: usize = 10;

pub(super) struct Sizes<'t, S> {
    text: &'t str,
    max: usize,
    size: S,
    /// The size of no text: a mark that begins every text, for one.
    empty: usize,
    /// Sizes that were counted, by ranges.
    known: RefCell<HashMap<(usize, usize), usize>>,
}

impl<'t, S: Fn(Range<usize>) -> usize> Sizes<'t, S> {
    pub(super) fn new(text: &'t str, max: usize, size: S) -> Self {
        let empty = size(0..0);
        Sizes { text, max, size, empty, known: RefCell::default() }
    }

    /// The size that the parts of a piece may have together, below what stands above it.
    pub(super) fn max(&self, above: usize) -> usize {
        self.max.saturating_sub(above).saturating_sub(self.empty)
    }

    /// The size that a range adds to the text before it, with the space that parts it from the next.
    pub(super) fn of(&self, range: Range<usize>) -> usize {
        let start = trim(self.text, range.clone()).start;
        if start == range.end { 0 } else { self.count(start..range.end).saturating_sub(self.empty) }
    }

    /// Whether a range fits below what stands above it, whose parts have these sizes together: counted only where the sum leaves it open.
    pub(super) fn fits(&self, range: Range<usize>, sum: usize, above: usize) -> bool {
        let max = self.max(above);
        let slack = max / TOLERANCE;
        if sum.saturating_add(slack) <= max {
            return true;
        }
        sum <= max.saturating_add(slack).saturating_add(1) && self.fits_exactly(range, above)
    }

    pub(super) fn fits_exactly(&self, range: Range<usize>, above: usize) -> bool {
        self.count(trim(self.text, range)) <= self.max.saturating_sub(above)
    }

    /// The number of parts that fit into a piece which begins at `start`.
    pub(super) fn most(&self, start: usize, parts: &[Range<usize>], above: usize) -> usize {
        // The guess doubles until it is too much.
        let (mut fitting, mut beyond) = (0, parts.len() + 1);
        let mut guess = 1;
        while fitting + 1 < beyond {
            if self.fits_exactly(start..parts[guess - 1].end, above) {
                fitting = guess;
            } else {
                beyond = guess;
            }
            guess = if beyond > parts.len() {
                (guess * 2).min(parts.len())
            } else {
                fitting + (beyond - fitting) / 2
            };
            guess = guess.max(1);
        }
        fitting
    }

    fn count(&self, range: Range<usize>) -> usize {
        *self.known.borrow_mut().entry((range.start, range.end)).or_insert_with(|| (self.size)(range))
    }
}
