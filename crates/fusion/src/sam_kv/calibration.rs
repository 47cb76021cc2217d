//! Which layers eq. 3 averages over: those at which a document's blocks keep their order from layer to layer.
//!
//! The paper finds them by looking at a model's layers (its appendix A.2) and reports the last four or five of three
//! models. Here: `ρ_l`, the rank correlation (Spearman) of the attention that a document's middle blocks receive at layers
//! `l` and `l + 1`, mean over documents; stable are the layers of the longest run whose `ρ` are no lower than the mean over
//! all layers, of equal runs the later.

use std::ops::Range;

use refrain_kv::AuxTensors;

use super::offline::RECEIVED;
use super::options::SamKv;

/// Fewer blocks than this have no order to speak of.
const BLOCKS: usize = 3;

/// The calibration of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// The stable layers, from 0; at least two.
    pub stable_layers: Range<usize>,
    /// Agreement of each layer with the next, −1 to 1, one fewer than there are layers.
    pub agreement: Vec<f64>,
    /// Documents that were long enough to tell.
    pub documents: usize,
}

impl SamKv {
    /// Finds the stable layers from documents' summaries; nothing if none is long enough.
    pub fn calibrate(&self, summaries: &[&AuxTensors]) -> Option<Calibration> {
        let mut sums: Vec<f64> = Vec::new();
        let mut documents = 0;
        for summary in summaries {
            let Some(received) = summary.get(RECEIVED).filter(|t| t.shape.len() == 2) else { continue };
            let (layers, blocks) = (received.shape[0], received.shape[1]);
            let middle = self.middle(blocks);
            if middle.len() < BLOCKS || layers < 2 || !(sums.is_empty() || sums.len() == layers - 1) {
                continue;
            }
            let all = received.data.as_slice().floats();
            let ranks: Vec<Vec<f64>> =
                all.chunks_exact(blocks).map(|layer| ranks(&layer[middle.clone()])).collect();
            sums.resize(layers - 1, 0.0);
            sums.iter_mut()
                .zip(ranks.windows(2))
                .for_each(|(sum, pair)| *sum += correlation(&pair[0], &pair[1]));
            documents += 1;
        }
        let agreement: Vec<f64> = sums.iter().map(|sum| sum / documents as f64).collect();
        let mean = agreement.iter().sum::<f64>() / agreement.len() as f64;
        let (mut longest, mut start) = (0..0, 0);
        for (layer, agreement) in agreement.iter().enumerate() {
            if *agreement < mean {
                start = layer + 1;
            } else if layer + 2 - start >= longest.len() {
                longest = start..layer + 2;
            }
        }
        (documents > 0).then_some(Calibration { stable_layers: longest, agreement, documents })
    }
}

/// Ranks from 0; equal values share the mean of theirs.
fn ranks(values: &[f32]) -> Vec<f64> {
    let below = |x: f32| values.iter().filter(|y| **y < x).count() as f64;
    let equal = |x: f32| values.iter().filter(|y| **y == x).count() as f64;
    values.iter().map(|x| below(*x) + (equal(*x) - 1.0) / 2.0).collect()
}

/// Pearson's correlation; 0 where one side does not vary.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let (ma, mb) = (mean(a), mean(b));
    let sum = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(a, b)| f(a - ma, b - mb)).sum::<f64>();
    let (ab, aa, bb) = (sum(&|a, b| a * b), sum(&|a, _| a * a), sum(&|_, b| b * b));
    if aa * bb > 0.0 { ab / (aa * bb).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use refrain_kernels::Buffer;

    use super::*;

    fn summary(layers: &[[f32; 7]]) -> AuxTensors {
        let mut summary = AuxTensors::default();
        summary.push(RECEIVED, [layers.len(), 7], Buffer::F32(layers.concat()));
        summary
    }

    #[test]
    fn stable_are_the_layers_that_order_the_middle_blocks_alike() {
        // Of seven blocks the first and the last two are no candidates.
        let up = [9.0, 1.0, 2.0, 3.0, 4.0, 0.0, 5.0];
        let also_up = [-9.0, 10.0, 20.0, 21.0, 90.0, 7.0, -5.0];
        let down = [0.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0];
        let found = SamKv::default().calibrate(&[&summary(&[up, down, up, down, up, also_up, up])]).unwrap();
        assert_eq!(found.agreement, [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0]);
        assert_eq!((found.stable_layers, found.documents), (4..7, 1));
        let first = SamKv::default().calibrate(&[&summary(&[up, also_up, down])]).unwrap();
        assert_eq!((first.agreement, first.stable_layers), (vec![1.0, -1.0], 0..2));
        let both = SamKv::default().calibrate(&[&summary(&[up, also_up, down, down])]).unwrap();
        assert_eq!(both.stable_layers, 2..4, "of equal runs the later");
    }

    #[test]
    fn documents_without_middle_blocks_tell_nothing() {
        let mut short = AuxTensors::default();
        short.push(RECEIVED, [4, 5], Buffer::F32(vec![1.0; 20]));
        assert_eq!(SamKv::default().calibrate(&[&short, &AuxTensors::default()]), None);
    }

    #[test]
    fn equal_values_share_their_rank() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [2.5, 0.0, 2.5, 1.0]);
        assert_eq!(correlation(&[1.0, 1.0], &[0.0, 1.0]), 0.0);
    }
}
