//! Attention weights summed over all rows so far, for policies that keep heavy hitters.

use refrain_kernels::argmin_before;

use crate::{AttentionReport, LayerView, Sizes, TokenScorer};

/// Scores `acc[t] += Σ_rows softmax`, with a window of recent tokens that stay.
#[derive(Clone, Debug)]
pub(crate) struct AccumulatedAttention {
    /// `heads × capacity`
    sums: Vec<f32>,
    /// Rows that could see each of these tokens, if sums are divided by them: `heads × capacity`.
    rows: Option<Vec<f32>>,
    capacity: usize,
    recent: usize,
}

impl AccumulatedAttention {
    pub(crate) fn new(heads: usize, capacity: usize, recent: usize, normalise: bool) -> AccumulatedAttention {
        let zeros = vec![0.0; heads * capacity];
        AccumulatedAttention { rows: normalise.then(|| zeros.clone()), sums: zeros, capacity, recent }
    }

    /// Bytes of the sums of one layer, and of the rows that they are divided by.
    pub(crate) fn bytes_of(Sizes { heads, capacity, .. }: Sizes, normalise: bool) -> usize {
        (1 + usize::from(normalise)) * heads * capacity * size_of::<f32>()
    }
}

impl TokenScorer for AccumulatedAttention {
    fn observe(&mut self, seen: &AttentionReport<'_>, layer: &LayerView<'_>) {
        let len = layer.len;
        let newest = seen.rows[seen.rows.len() - 1];
        for (head, weights) in seen.weights.chunks_exact(len).enumerate() {
            let (first, positions) = (head * self.capacity, layer.head(head));
            // The slot of a token that is seen for the first time held another one.
            if positions[len - 1] == newest {
                self.sums[first + len - 1] = 0.0;
                self.rows.iter_mut().for_each(|rows| rows[first + len - 1] = 0.0);
            }
            self.sums[first..].iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
            let Some(rows) = &mut self.rows else { continue };
            for (rows, position) in rows[first..].iter_mut().zip(positions) {
                *rows += (seen.rows.len() - seen.rows.partition_point(|row| row < position)) as f32;
            }
        }
    }

    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        let first = head * self.capacity;
        scores.copy_from_slice(&self.sums[first..][..layer.len]);
        if let Some(rows) = &self.rows {
            // A token that no row could see has no sum either.
            scores.iter_mut().zip(&rows[first..]).for_each(|(score, rows)| *score /= rows.max(1.0));
        }
        for (score, position) in scores.iter_mut().zip(layer.head(head)) {
            if layer.is_recent(*position, self.recent) {
                *score = f32::INFINITY;
            }
        }
    }

    fn weakest(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) -> Option<usize> {
        let before = layer.next.saturating_sub(self.recent as u32);
        let lowest =
            || argmin_before(&self.sums[head * self.capacity..][..layer.len], layer.head(head), before);
        self.rows.is_none().then(lowest).flatten().or_else(|| {
            self.score(layer, head, scores);
            refrain_kv::weakest(scores, layer.head(head))
        })
    }

    fn moved(&mut self, head: usize, from: usize, to: usize, _: u32) {
        for of in [Some(&mut self.sums), self.rows.as_mut()].into_iter().flatten() {
            of[head * self.capacity + to] = of[head * self.capacity + from];
        }
    }

    fn gather(&self, kept: &[u32], capacity: usize) -> Box<dyn TokenScorer> {
        let heads = self.sums.len() / self.capacity;
        let gather = |all: &Vec<f32>| {
            let mut gathered = vec![0.0; heads * capacity];
            for (head, kept) in kept.chunks_exact(kept.len() / heads).enumerate() {
                let to = gathered[head * capacity..].iter_mut().zip(kept);
                to.for_each(|(to, slot)| *to = all[head * self.capacity + *slot as usize]);
            }
            gathered
        };
        let (sums, rows) = (gather(&self.sums), self.rows.as_ref().map(gather));
        Box::new(AccumulatedAttention { sums, rows, capacity, recent: self.recent })
    }

    fn bytes(&self) -> usize {
        size_of_val(self.sums.as_slice()) + self.rows.as_ref().map_or(0, |rows| size_of_val(rows.as_slice()))
    }
}
