//! The weights of the last rows, slot by slot, with their sum or maximum kept up to date.

use refrain_kernels::{Buffer, Dtype};

use crate::{Fuse, LayerView};

/// A row that is not there yet.
const NONE: u32 = u32::MAX;

/// `heads × rows × capacity` weights in `f16`, the oldest row overwritten.
///
/// A weight counts only if its row is not older than the token in its slot: what the row gave to the token that was there
/// before is not wiped out but left unread.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    heads: usize,
    capacity: usize,
    cells: Buffer,
    /// Position of each row.
    rows: Vec<u32>,
    next: usize,
    fused: Fused,
    /// Old and new weights of a row; `capacity` each.
    scratch: [Vec<f32>; 2],
}

/// `heads × capacity`.
#[derive(Clone, Debug)]
enum Fused {
    /// Weights in `f16` are multiples of 2⁻²⁴, so that these sums are exact, however many are added and taken away.
    Sum(Vec<f64>),
    Max(Vec<f32>),
}

impl Ring {
    pub(crate) fn new(heads: usize, rows: usize, capacity: usize, fuse: Fuse) -> Ring {
        Ring {
            heads,
            capacity,
            cells: Buffer::zeros(Dtype::F16, heads * rows * capacity),
            rows: vec![NONE; rows],
            next: 0,
            fused: match fuse {
                Fuse::Sum => Fused::Sum(vec![0.0; heads * capacity]),
                Fuse::Max => Fused::Max(vec![0.0; heads * capacity]),
            },
            scratch: [vec![0.0; capacity], vec![0.0; capacity]],
        }
    }

    fn cell(&self, head: usize, row: usize) -> usize {
        (head * self.rows.len() + row) * self.capacity
    }

    /// Takes in a row: `weights(head)` are `layer.len` numbers.
    pub(crate) fn push<'a>(
        &mut self,
        position: u32,
        weights: impl Fn(usize) -> &'a [f32],
        layer: &LayerView<'_>,
    ) {
        let (row, len) = (self.next, layer.len);
        self.next = (row + 1) % self.rows.len();
        let gone = std::mem::replace(&mut self.rows[row], position);
        let mut scratch = std::mem::take(&mut self.scratch);
        let [old, new] = &mut scratch;
        for head in 0..self.heads {
            let (at, base) = (self.cell(head, row), head * self.capacity);
            let (old, new) = (&mut old[..len], &mut new[..len]);
            self.cells.as_slice().range(at..at + len).to_f32(old);
            self.cells.write_f32(at, weights(head));
            self.cells.as_slice().range(at..at + len).to_f32(new);
            let positions = layer.head(head);
            // The newest token took the place of another.
            let fresh = if positions[len - 1] == position { len - 1 } else { len };
            match &mut self.fused {
                Fused::Sum(sums) => {
                    let sums = &mut sums[base..base + len];
                    if fresh < len {
                        sums[fresh] = 0.0;
                    }
                    for (((sum, old), new), of) in sums.iter_mut().zip(old).zip(new).zip(positions) {
                        let taken = if gone != NONE && *of <= gone { *old } else { 0.0 };
                        *sum += f64::from(*new) - f64::from(taken);
                    }
                }
                Fused::Max(_) => self.push_max(head, (gone, fresh), (old, new), positions),
            }
        }
        self.scratch = scratch;
    }

    /// Maxima with a new row. Only where the row that left held the maximum the others are looked at.
    fn push_max(
        &mut self,
        head: usize,
        (gone, fresh): (u32, usize),
        (old, new): (&[f32], &[f32]),
        positions: &[u32],
    ) {
        for t in 0..positions.len() {
            let at = head * self.capacity + t;
            let Fused::Max(maxima) = &self.fused else { return };
            let had = if t == fresh { 0.0 } else { maxima[at] };
            let lost = gone != NONE && positions[t] <= gone && old[t] == had && t != fresh;
            let max =
                if lost { self.column(head, t, positions[t]).fold(0.0, f32::max) } else { had.max(new[t]) };
            let Fused::Max(maxima) = &mut self.fused else { return };
            maxima[at] = max;
        }
    }

    /// The weights of a slot's token.
    fn column(&self, head: usize, slot: usize, position: u32) -> impl Iterator<Item = f32> {
        let counts = move |row: &usize| self.rows[*row] != NONE && self.rows[*row] >= position;
        (0..self.rows.len())
            .filter(counts)
            .map(move |row| self.cells.as_slice().get(self.cell(head, row) + slot))
    }

    /// Sum or maximum of a head's first `scores.len()` slots.
    pub(crate) fn fused(&self, head: usize, scores: &mut [f32]) {
        let range = head * self.capacity..head * self.capacity + scores.len();
        match &self.fused {
            Fused::Sum(sums) => {
                scores.iter_mut().zip(&sums[range]).for_each(|(score, sum)| *score = *sum as f32);
            }
            Fused::Max(maxima) => scores.copy_from_slice(&maxima[range]),
        }
    }

    pub(crate) fn moved(&mut self, head: usize, from: usize, to: usize, position: u32) {
        for row in 0..self.rows.len() {
            if self.rows[row] != NONE && self.rows[row] >= position {
                let at = self.cell(head, row);
                let weight = self.cells.as_slice().get(at + from);
                self.cells.write_f32(at + to, &[weight]);
            }
        }
        let base = head * self.capacity;
        match &mut self.fused {
            Fused::Sum(sums) => sums[base + to] = sums[base + from],
            Fused::Max(maxima) => maxima[base + to] = maxima[base + from],
        }
    }

    /// The same for other slots: see [`crate::Statistics::gather`].
    pub(crate) fn gather(&self, kept: &[u32], capacity: usize) -> Ring {
        let fuse = if matches!(self.fused, Fused::Sum(_)) { Fuse::Sum } else { Fuse::Max };
        let mut ring = Ring::new(self.heads, self.rows.len(), capacity, fuse);
        ring.rows.clone_from(&self.rows);
        ring.next = self.next;
        let each = kept.len() / self.heads;
        let mut row_weights = vec![0.0; each];
        for (head, kept) in kept.chunks_exact(each).enumerate() {
            for row in 0..self.rows.len() {
                let cells = self.cells.as_slice();
                let from = self.cell(head, row);
                row_weights.iter_mut().zip(kept).for_each(|(w, slot)| *w = cells.get(from + *slot as usize));
                ring.cells.write_f32(ring.cell(head, row), &row_weights);
            }
            let slots = kept.iter().map(|slot| head * self.capacity + *slot as usize).enumerate();
            match (&self.fused, &mut ring.fused) {
                (Fused::Sum(from), Fused::Sum(to)) => {
                    slots.for_each(|(i, s)| to[head * capacity + i] = from[s])
                }
                (Fused::Max(from), Fused::Max(to)) => {
                    slots.for_each(|(i, s)| to[head * capacity + i] = from[s])
                }
                _ => {}
            }
        }
        ring
    }

    pub(crate) fn bytes(&self) -> usize {
        let fused = match &self.fused {
            Fused::Sum(sums) => size_of_val(sums.as_slice()),
            Fused::Max(maxima) => size_of_val(maxima.as_slice()),
        };
        let scratch: usize = self.scratch.iter().map(|s| size_of_val(s.as_slice())).sum();
        self.cells.bytes() + fused + scratch + size_of_val(self.rows.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use refrain_kernels::{Cpu, Slice};

    use super::*;

    const CAPACITY: usize = 6;

    proptest! {
        /// Sums and maxima kept up to date are those of the rows that are left, to the bit, whatever was evicted.
        #[test]
        fn what_is_kept_up_to_date_is_what_the_rows_say(
            steps in prop::collection::vec((prop::collection::vec(0.0f32..2.0, CAPACITY), 0..CAPACITY), 1..40),
            rows in 1usize..5,
            sum in any::<bool>(),
        ) {
            let cpu = Cpu::new(1);
            let mut ring = Ring::new(1, rows, CAPACITY, if sum { Fuse::Sum } else { Fuse::Max });
            let (mut positions, mut len) = (vec![0u32; CAPACITY], 0);
            // What each row gave to each position.
            let mut given: Vec<(u32, Vec<(u32, f32)>)> = Vec::new();
            for (step, (weights, victim)) in steps.iter().enumerate() {
                if len == CAPACITY {
                    let victim = *victim;
                    if victim < len - 1 {
                        ring.moved(0, len - 1, victim, positions[len - 1]);
                        positions[victim] = positions[len - 1];
                    }
                    len -= 1;
                }
                positions[len] = step as u32;
                len += 1;
                let layer = LayerView {
                    cpu: &cpu, heads: 1, group: 1, head_dim: 1, capacity: CAPACITY, len,
                    positions: &positions, keys: Slice::F32(&[]), next: step as u32 + 1,
                };
                ring.push(step as u32, |_| &weights[..len], &layer);
                let weights = weights.iter().map(|w| refrain_kernels::f16::from_f32(*w).to_f32());
                given.push((step as u32, positions.iter().copied().zip(weights).take(len).collect()));
                let last = &given[given.len().saturating_sub(rows)..];
                let mut scores = vec![0.0; len];
                ring.fused(0, &mut scores);
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
