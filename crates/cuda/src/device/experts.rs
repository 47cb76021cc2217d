//! Mixtures of experts: the router's choice is made on the host; rows of each expert are gathered, so that its weights are read once.

use refrain_kernels::{Experts, LayerTail};

use super::context::CudaDevice;
use super::launch::{narrow, size};
use super::layers::Rows;
use super::linear::{Epilogue, Input, Linear};
use crate::driver::Driver;

/// The ways of rows through experts.
#[derive(Debug, PartialEq)]
struct Routes {
    /// Rows of each expert.
    rows: Vec<Vec<u32>>,
    /// For each row and each of its experts, in ascending order: the place of the route among all, expert after expert, and its weight.
    places: Vec<u32>,
    weights: Vec<f32>,
}

/// Chooses `top_k` experts for each row of logits. Of equal ones the first is taken.
fn choose(logits: &[f32], experts: usize, top_k: usize, normalised: bool) -> Routes {
    let mut chosen = Vec::with_capacity(logits.len() / experts * top_k);
    let mut rows: Vec<Vec<u32>> = vec![Vec::new(); experts];
    for (row, logits) in (0..).zip(logits.chunks_exact(experts)) {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scores: Vec<f32> = logits.iter().map(|logit| (logit - most).exp()).collect();
        let sum: f32 = scores.iter().sum();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(top_k);
        let whole: f32 = if normalised { order.iter().map(|e| scores[*e] / sum).sum() } else { 1.0 };
        order.sort_unstable();
        for expert in order {
            chosen.push((expert, rows[expert].len(), scores[expert] / sum / whole));
            rows[expert].push(row);
        }
    }
    let mut starts = vec![0; experts];
    for expert in 1..experts {
        starts[expert] = starts[expert - 1] + rows[expert - 1].len();
    }
    let places = chosen.iter().map(|(expert, at, _)| narrow(starts[*expert] + at)).collect();
    Routes { rows, places, weights: chosen.iter().map(|(_, _, weight)| *weight).collect() }
}

impl<D: Driver> CudaDevice<D> {
    /// x += post(experts(norm(x))), with the norms and the activation of `tail`.
    pub(super) fn add_experts(&self, mixture: Experts<'_>, tail: &LayerTail<'_>, x: Rows<'_, D::Memory>) {
        let Experts { router, experts, top_k, normalised } = mixture;
        let (router, hidden) = (router.storage::<Linear<D>>(), x.width);
        let normed = self.normed_rows(x, tail.mlp_norm);
        let logits = self.with_input(Rows { at: normed.arg(0), ..x }, None, router, |input| {
            self.stored_product(router, input)
        });
        let mut scores = vec![0.0; x.rows * experts.len()];
        self.read(&logits, 0, &mut scores);
        let Routes { rows, places, weights } = choose(&scores, experts.len(), top_k, normalised);
        let parts = self.block(4 * places.len() * hidden);
        let mut first = 0;
        for (mlp, rows) in experts.iter().zip(&rows).filter(|(_, rows)| !rows.is_empty()) {
            let (indices, gathered) = (self.block_of(rows), self.block(4 * rows.len() * hidden));
            let args = [normed.arg(0), indices.arg(0), gathered.arg(0), size(rows.len()), size(hidden)];
            self.launch_each("gather_rows_32", rows.len() * hidden, &args);
            let gathered = Rows { at: gathered.arg(0), rows: rows.len(), width: hidden };
            let gate_up = mlp.gate_up.storage::<Linear<D>>();
            let active = self.with_input(gathered, None, gate_up, |input| self.gated(mlp, tail, input));
            let input = Input { rows: rows.len(), at: active.arg(0) };
            self.product(mlp.down.storage(), &input, Epilogue::Store, parts.arg(4 * first * hidden));
            first += rows.len();
        }
        let (mixed, places, weights) =
            (self.block(4 * x.rows * hidden), self.block_of(&places), self.block_of(&weights));
        let (parts, places, weights) = (parts.arg(0), places.arg(0), weights.arg(0));
        let args = [parts, places, weights, mixed.arg(0), size(x.rows), size(top_k), size(hidden)];
        self.launch_each("mix_routes", x.rows * hidden, &args);
        self.add_normed(&mixed, tail.mlp_post_norm, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_the_most_probable_experts_by_expert_then_by_row() {
        let routes = choose(&[0.0, 2.0, 1.0, 3.0, 0.0, 3.0], 3, 2, true);
        assert_eq!(routes.rows, [vec![1], vec![0], vec![0, 1]]);
        assert_eq!(routes.places, [1, 2, 0, 3]);
        let expected = [1.0 / (1.0 + (-1f32).exp()), 1.0 / (1.0 + 1f32.exp()), 0.5, 0.5];
        assert!(routes.weights.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
