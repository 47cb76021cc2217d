//! Attention weights summed over all rows so far, for policies that keep heavy hitters.

use crate::{AttentionReport, LayerView, Sizes, TokenScorer};

/// Scores `acc[t] += Σ_rows softmax`, with a window of recent tokens that stay.
#[derive(Clone, Debug)]
pub(crate) struct AccumulatedAttention {
    /// `heads × capacity`
    sums: Vec<f32>,
    capacity: usize,
    recent: usize,
    /// Whether a sum is divided by the rows that could see its token.
    normalise: bool,
}

impl AccumulatedAttention {
    pub(crate) fn new(heads: usize, capacity: usize, recent: usize, normalise: bool) -> AccumulatedAttention {
        AccumulatedAttention { sums: vec![0.0; heads * capacity], capacity, recent, normalise }
    }

    /// Bytes of the sums of one layer.
    pub(crate) fn bytes_of(Sizes { heads, capacity, .. }: Sizes) -> usize {
        heads * capacity * size_of::<f32>()
    }
}

impl TokenScorer for AccumulatedAttention {
    fn observe(&mut self, seen: &AttentionReport<'_>, layer: &LayerView<'_>) {
        let len = layer.len;
        let newest = seen.rows[seen.rows.len() - 1];
        for (head, weights) in seen.weights.chunks_exact(len).enumerate() {
            let sums = &mut self.sums[head * self.capacity..][..len];
            // The slot of a token that is seen for the first time held another one.
            if layer.head(head)[len - 1] == newest {
                sums[len - 1] = 0.0;
            }
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
        }
    }

    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        let sums = &self.sums[head * self.capacity..][..layer.len];
        for ((score, sum), position) in scores.iter_mut().zip(sums).zip(layer.head(head)) {
            *score = match layer.is_recent(*position, self.recent) {
                true => f32::INFINITY,
                false if self.normalise => sum / (layer.next - position) as f32,
                false => *sum,
            };
        }
    }

    fn moved(&mut self, head: usize, from: usize, to: usize, _: u32) {
        let sums = &mut self.sums[head * self.capacity..];
        sums[to] = sums[from];
    }

    fn gather(&self, kept: &[u32], capacity: usize) -> Box<dyn TokenScorer> {
        let heads = self.sums.len() / self.capacity;
        let mut gathered = AccumulatedAttention::new(heads, capacity, self.recent, self.normalise);
        for (head, kept) in kept.chunks_exact(kept.len() / heads).enumerate() {
            let sums = &self.sums[head * self.capacity..][..self.capacity];
            let to = &mut gathered.sums[head * capacity..];
            to.iter_mut().zip(kept).for_each(|(to, slot)| *to = sums[*slot as usize]);
        }
        Box::new(gathered)
    }

    fn bytes(&self) -> usize {
        size_of_val(self.sums.as_slice())
    }
}
