//! SamKV's statistics beside a document, made of its own attention when it is prefilled.

use refrain_kernels::{Buffer, Dtype};
use refrain_kv::AuxTensors;

use super::options::SamKv;
use crate::{ChunkStatistics, ContextLayer};

/// Fewer weights than this give no slope.
const POINTS: usize = 8;
/// Representative tokens whose weights are held at once.
const TOGETHER: usize = 32;
/// Weights below this count as this.
const FLOOR: f64 = 1e-8;

/// Block means of keys before RoPE, `layers × blocks × Hkv·d`.
pub(super) const MEANS: &str = "k_mean";
/// Mean query before RoPE of the last tokens, `layers × H·d`.
pub(super) const QUERIES: &str = "q_local";
/// Slope with which attention to a block's representative token falls with distance, `layers × blocks`.
pub(super) const ALPHA: &str = "alpha";
/// Mean attention that it receives from later tokens, `layers × blocks`.
pub(super) const RECEIVED: &str = "received";
/// Its place in the document, `layers × blocks`.
pub(super) const REPRESENTATIVE: &str = "representative";
/// 1 where it is marked for recomputation, else 0, `layers × blocks`.
pub(super) const MARKED: &str = "marked";
/// The middle block of smallest α and that of least attention, `layers × 2`; −1 where there is none.
pub(super) const EXTREMES: &str = "extremes";

impl SamKv {
    /// One layer of a document.
    pub(super) fn observe_layer(&self, layer: &ContextLayer<'_>, summary: &mut AuxTensors) {
        let (tokens, width) = (layer.tokens(), layer.width());
        let blocks = tokens.div_ceil(self.block);
        if layer.layer == 0 {
            let (layers, heads) = (layer.layers, layer.query_width());
            let zeros = |shape: &[usize]| Buffer::zeros(Dtype::F32, shape.iter().product());
            let means = Buffer::zeros(layer.dtype(), layers * blocks * width);
            summary.push(MEANS, [layers, blocks, width], means);
            summary.push(QUERIES, [layers, heads], zeros(&[layers, heads]));
            for name in [ALPHA, RECEIVED, REPRESENTATIVE, MARKED] {
                summary.push(name, [layers, blocks], zeros(&[layers, blocks]));
            }
            summary.push(EXTREMES, [layers, 2], zeros(&[layers, 2]));
        }
        let mut put = |name: &str, values: &[f32]| {
            if let Some(tensor) = summary.get_mut(name) {
                tensor.data.write_f32(layer.layer * values.len(), values);
            }
        };
        put(MEANS, &layer.key_means(self.block));
        put(QUERIES, &layer.mean_query(self.last_queries()));
        let received: Vec<f64> =
            layer.received().into_iter().map(|(sum, rows)| f64::from(sum) / rows.max(1) as f64).collect();
        let representatives: Vec<u32> = received
            .chunks(self.block)
            .enumerate()
            .map(|(block, received)| (block * self.block + highest(received)) as u32)
            .collect();
        // So many at a time that a long document's weights fit memory.
        let slopes =
            |some: &[u32]| layer.decay(some).iter().map(|weights| slope(weights)).collect::<Vec<_>>();
        let alphas: Vec<f64> = representatives.chunks(TOGETHER).flat_map(slopes).collect();
        let of_block: Vec<f64> = representatives.iter().map(|t| received[*t as usize]).collect();
        let middle = self.middle(blocks);
        let extremes = [lowest(&alphas[middle.clone()]), lowest(&of_block[middle.clone()])];
        let floats = |values: &[f64]| values.iter().map(|value| *value as f32).collect::<Vec<_>>();
        put(ALPHA, &floats(&alphas));
        put(RECEIVED, &floats(&of_block));
        put(REPRESENTATIVE, &representatives.iter().map(|t| *t as f32).collect::<Vec<_>>());
        put(MARKED, &marked(&alphas));
        put(EXTREMES, &extremes.map(|block| block.map_or(-1.0, |block| (block + middle.start) as f32)));
    }
}

/// Index of the highest; of equal ones the first.
fn highest(values: &[f64]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best
}

/// Index of the lowest; of equal ones the first; none if there is none.
fn lowest(values: &[f64]) -> Option<usize> {
    let mut best = None;
    for (i, value) in values.iter().enumerate() {
        if best.is_none_or(|best: usize| *value < values[best]) {
            best = Some(i);
        }
    }
    best
}

/// `α` of `a(x) ≈ c · x^−α`: the least-squares slope of `ln a` over `ln x`, `x` = 1, 2, …; +∞ of too few points.
fn slope(weights: &[f32]) -> f64 {
    if weights.len() < POINTS {
        return f64::INFINITY;
    }
    let n = weights.len() as f64;
    let (mut x, mut y, mut xx, mut xy) = (0.0, 0.0, 0.0, 0.0);
    for (i, weight) in weights.iter().enumerate() {
        let (a, b) = (((i + 1) as f64).ln(), f64::from(*weight).max(FLOOR).ln());
        x += a;
        y += b;
        xx += a * a;
        xy += a * b;
    }
    -(n * xy - x * y) / (n * xx - x * x)
}

/// The PauTa criterion: 1 where `α < μ − 3σ` over a document's blocks.
fn marked(alphas: &[f64]) -> Vec<f32> {
    let finite: Vec<f64> = alphas.iter().copied().filter(|alpha| alpha.is_finite()).collect();
    let n = finite.len().max(1) as f64;
    let mean = finite.iter().sum::<f64>() / n;
    let deviation = (finite.iter().map(|alpha| (alpha - mean).powi(2)).sum::<f64>() / n).sqrt();
    alphas.iter().map(|alpha| f32::from(*alpha < mean - 3.0 * deviation)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slope_is_the_exponent_of_a_power_law() {
        let weights: Vec<f32> = (1..200).map(|x| 0.3 * (x as f32).powf(-1.25)).collect();
        assert!((slope(&weights) - 1.25).abs() < 1e-5);
        assert_eq!(slope(&weights[..7]), f64::INFINITY);
        assert!(slope(&[0.0; 20]).abs() < 1e-9, "zeros are floored, not logarithms of nothing");
    }

    #[test]
    fn only_an_alpha_three_deviations_below_the_mean_is_marked() {
        let mut alphas = vec![1.0; 20];
        alphas[7] = -5.0;
        alphas[9] = f64::INFINITY;
        let found: Vec<usize> = (0..20).filter(|i| marked(&alphas)[*i] == 1.0).collect();
        assert_eq!(found, [7]);
        // No value is more than √(n−1) deviations from the mean: of ten blocks none can be marked.
        assert!(marked(&[&[-100.0][..], &[1.0; 9]].concat()).iter().all(|mark| *mark == 0.0));
    }
}
