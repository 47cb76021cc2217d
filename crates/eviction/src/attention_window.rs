//! Attention weights of the last rows, slot by slot, with a running sum or maximum over the rows.

use refrain_kernels::{argmin_before, f16, max_assign, replace_row_in_sums, round_to_f16};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LayerView, Sizes};

/// How the attention rows of recent tokens become one score a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fuse {
    /// The sum of the rows.
    Sum,
    /// The maximum over the rows.
    Max,
}

/// `heads × rows × capacity` weights in `f16`, the oldest row overwritten.
#[derive(Clone, Debug)]
pub(crate) struct AttentionWindow {
    heads: usize,
    rows: usize,
    capacity: usize,
    cells: Vec<f16>,
    /// Rows that were written, `rows` at most.
    filled: usize,
    /// The row that is written next: the oldest one once all rows were written.
    next: usize,
    fused: Fused,
}

#[derive(Clone, Debug)]
enum Fused {
    /// `heads × capacity`. Weights in `f16` are multiples of 2⁻²⁴, so that these sums are exact, however many are added and
    /// taken away.
    Sum(Vec<f64>),
    /// A queue with its maximum: the oldest `front` rows hold the maximum of themselves and all later ones of the front;
    /// `back` is the maximum of the rows after it, `heads × capacity`.
    Max { back: Vec<f16>, front: usize },
}

impl AttentionWindow {
    pub(crate) fn new(heads: usize, rows: usize, capacity: usize, fuse: Fuse) -> AttentionWindow {
        let fused = match fuse {
            Fuse::Sum => Fused::Sum(vec![0.0; heads * capacity]),
            Fuse::Max => Fused::Max { back: vec![f16::ZERO; heads * capacity], front: 0 },
        };
        let cells = vec![f16::ZERO; heads * rows * capacity];
        AttentionWindow { heads, rows, capacity, cells, filled: 0, next: 0, fused }
    }

    /// Bytes of one layer's weights and of their sums or maxima.
    pub(crate) fn bytes_of(rows: usize, fuse: Fuse, Sizes { heads, capacity, .. }: Sizes) -> usize {
        let fused = match fuse {
            Fuse::Sum => size_of::<f64>(),
            Fuse::Max => size_of::<f16>(),
        };
        heads * capacity * (rows * size_of::<f16>() + fused)
    }

    fn cell(&self, head: usize, row: usize) -> usize {
        (head * self.rows + row) * self.capacity
    }

    /// Takes in the row at `position`: `weights(head)` are `layer.len` numbers. If the token at `position` is cached, it is in
    /// the last slot, whose older weights belong to another token and are forgotten.
    pub(crate) fn push<'a>(
        &mut self,
        position: u32,
        weights: impl Fn(usize) -> &'a [f32],
        layer: &LayerView<'_>,
    ) {
        let (row, last) = (self.next, layer.len - 1);
        self.leave_oldest();
        for head in 0..self.heads {
            if layer.head(head)[last] == position {
                self.forget(head, last);
            }
            let (at, base) = (self.cell(head, row), head * self.capacity);
            let (cells, range) = (&mut self.cells[at..at + layer.len], base..base + layer.len);
            match &mut self.fused {
                Fused::Sum(sums) => replace_row_in_sums(cells, weights(head), &mut sums[range]),
                Fused::Max { back, .. } => {
                    round_to_f16(cells, weights(head));
                    max_assign(&mut back[range], cells);
                }
            }
        }
        self.next = (row + 1) % self.rows;
        self.filled = (self.filled + 1).min(self.rows);
    }

    /// Takes the oldest row out of the maximum, so that it can be overwritten.
    fn leave_oldest(&mut self) {
        let (rows, capacity) = (self.rows, self.capacity);
        let Fused::Max { back, front } = &mut self.fused else { return };
        if self.filled < rows {
            return;
        }
        if *front == 0 {
            back.fill(f16::ZERO);
            *front = rows;
            for head in self.cells.chunks_exact_mut(rows * capacity) {
                // From the newest row to the oldest.
                for later in (1..rows).rev().map(|i| (self.next + i) % rows) {
                    let earlier = (later + rows - 1) % rows;
                    let (a, b) = head.split_at_mut(earlier.max(later) * capacity);
                    let (a, b) = (&mut a[earlier.min(later) * capacity..][..capacity], &mut b[..capacity]);
                    if earlier < later { max_assign(a, b) } else { max_assign(b, a) }
                }
            }
        }
        *front -= 1;
    }

    /// Sets all weights of a slot to zero.
    fn forget(&mut self, head: usize, slot: usize) {
        for row in 0..self.filled {
            let at = self.cell(head, row) + slot;
            self.cells[at] = f16::ZERO;
        }
        let at = head * self.capacity + slot;
        match &mut self.fused {
            Fused::Sum(sums) => sums[at] = 0.0,
            Fused::Max { back, .. } => back[at] = f16::ZERO,
        }
    }

    /// Sum or maximum of a head's first `scores.len()` slots.
    pub(crate) fn fused(&self, head: usize, scores: &mut [f32]) {
        let range = head * self.capacity..head * self.capacity + scores.len();
        match &self.fused {
            Fused::Sum(sums) => {
                scores.iter_mut().zip(&sums[range]).for_each(|(score, sum)| *score = *sum as f32);
            }
            Fused::Max { back, front } => {
                // The oldest row of the front, if there is one, holds the front's maximum.
                let oldest = self.cell(head, self.next);
                let front = (*front > 0).then(|| &self.cells[oldest..oldest + scores.len()]);
                for (i, (score, back)) in scores.iter_mut().zip(&back[range]).enumerate() {
                    let bits = front.map_or(back.to_bits(), |front| front[i].to_bits().max(back.to_bits()));
                    *score = f16::from_bits(bits).to_f32();
                }
            }
        }
    }

    /// The slot with the lowest sum among the tokens before a position; none where maxima are kept.
    pub(crate) fn lowest(&self, head: usize, layer: &LayerView<'_>, before: u32) -> Option<usize> {
        let Fused::Sum(sums) = &self.fused else { return None };
        argmin_before(&sums[head * self.capacity..][..layer.len], layer.head(head), before)
    }

    pub(crate) fn moved(&mut self, head: usize, from: usize, to: usize) {
        for row in 0..self.filled {
            let at = self.cell(head, row);
            self.cells[at + to] = self.cells[at + from];
        }
        let base = head * self.capacity;
        match &mut self.fused {
            Fused::Sum(sums) => sums[base + to] = sums[base + from],
            Fused::Max { back, .. } => back[base + to] = back[base + from],
        }
    }

    /// A window with the weights of the slots `kept`; see [`crate::TokenScorer::gather`].
    pub(crate) fn gather(&self, kept: &[u32], capacity: usize) -> AttentionWindow {
        fn heads<T: Copy + Default>(from: &[T], of: usize, kept: &[&[u32]], to: usize) -> Vec<T> {
            let rows = from.len() / of;
            let mut gathered = vec![T::default(); rows * to];
            for (row, (from, to)) in from.chunks_exact(of).zip(gathered.chunks_exact_mut(to)).enumerate() {
                let kept = kept[row * kept.len() / rows];
                to.iter_mut().zip(kept).for_each(|(to, slot)| *to = from[*slot as usize]);
            }
            gathered
        }
        let kept: Vec<&[u32]> = kept.chunks_exact(kept.len() / self.heads).collect();
        let fused = match &self.fused {
            Fused::Sum(sums) => Fused::Sum(heads(sums, self.capacity, &kept, capacity)),
            Fused::Max { back, front } => {
                Fused::Max { back: heads(back, self.capacity, &kept, capacity), front: *front }
            }
        };
        AttentionWindow {
            capacity,
            cells: heads(&self.cells, self.capacity, &kept, capacity),
            fused,
            ..*self
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let fused = match &self.fused {
            Fused::Sum(sums) => size_of_val(sums.as_slice()),
            Fused::Max { back, .. } => size_of_val(back.as_slice()),
        };
        size_of_val(self.cells.as_slice()) + fused
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use refrain_kernels::{Cpu, Dtype};

    use super::*;
    use crate::CachedKeys;

    const CAPACITY: usize = 6;

    proptest! {
        /// Running sums and maxima equal those of the rows that are left, to the bit, after any evictions.
        #[test]
        fn running_sums_and_maxima_are_those_of_the_rows(
            steps in prop::collection::vec((prop::collection::vec(0.0f32..2.0, CAPACITY), 0..CAPACITY), 1..40),
            rows in 1usize..5,
            sum in any::<bool>(),
        ) {
            let cpu = Cpu::new(1).unwrap();
            let keys = refrain_kernels::Device::kv(&cpu, Dtype::F32, 0);
            let mut window = AttentionWindow::new(1, rows, CAPACITY, if sum { Fuse::Sum } else { Fuse::Max });
            let (mut positions, mut len) = (vec![0u32; CAPACITY], 0);
            // Weights by row and position.
            let mut given: Vec<(u32, Vec<(u32, f32)>)> = Vec::new();
            for (step, (weights, victim)) in steps.iter().enumerate() {
                if len == CAPACITY {
                    let victim = *victim;
                    if victim < len - 1 {
                        window.moved(0, len - 1, victim);
                        positions[victim] = positions[len - 1];
                    }
                    len -= 1;
                }
                positions[len] = step as u32;
                len += 1;
                let layer = LayerView {
                    heads: 1, group: 1, head_dim: 1, scale: 1.0, capacity: CAPACITY, len,
                    positions: &positions, keys: CachedKeys::new(&cpu, &keys), next: step as u32 + 1,
                };
                window.push(step as u32, |_| &weights[..len], &layer);
                let weights = weights.iter().map(|w| refrain_kernels::f16::from_f32(*w).to_f32());
                given.push((step as u32, positions.iter().copied().zip(weights).take(len).collect()));
                let last = &given[given.len().saturating_sub(rows)..];
                let mut scores = vec![0.0; len];
                window.fused(0, &mut scores);
                for (t, score) in scores.iter().enumerate() {
                    let of = |row: &(u32, Vec<(u32, f32)>)| {
                        row.1.iter().find(|(p, _)| *p == positions[t]).map(|(_, w)| *w)
                    };
                    let all: Vec<f32> = last.iter().filter_map(of).collect();
                    let expected = match sum {
                        true => all.iter().map(|w| f64::from(*w)).sum::<f64>() as f32,
                        false => all.iter().copied().fold(0.0, f32::max),
                    };
                    prop_assert_eq!(*score, expected);
                }
            }
        }
    }
}
