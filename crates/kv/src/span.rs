//! Half-open ranges of prompt positions.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Half-open range `start..end` of prompt positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Span {
    /// First position.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
}

impl Span {
    /// The span `start..end`; empty if `end <= start`.
    pub fn new(start: usize, end: usize) -> Span {
        Span { start: start as u32, end: end.max(start) as u32 }
    }

    /// Number of positions.
    pub fn len(self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether there is no position in it.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether `position` lies in it.
    pub fn contains(self, position: u32) -> bool {
        (self.start..self.end).contains(&position)
    }

    /// As a range of indices.
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    /// Its positions, ascending.
    pub fn positions(self) -> Range<u32> {
        self.start..self.end
    }
}
