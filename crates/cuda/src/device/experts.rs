//! Mixtures of experts: the router's choice is made on the host; rows of each expert are gathered, so that its weights are read once.

use refrain_kernels::{Experts, LayerTail, Route, Routing};

use super::context::CudaDevice;
use super::launch::size;
use super::layers::Rows;
use super::linear::{Epilogue, Input, Linear};
use crate::driver::Driver;

/// For each row and each of its `top_k` experts, in ascending order: the index of the route among all, and its weight.
fn routes_by_row(routes: &[Route], rows: usize, top_k: usize) -> (Vec<u32>, Vec<f32>) {
    let (mut places, mut weights) = (vec![0; routes.len()], vec![0.0; routes.len()]);
    let mut taken = vec![0; rows];
    for (place, route) in (0..).zip(routes) {
        let row = route.row as usize;
        let at = row * top_k + taken[row];
        (places[at], weights[at]) = (place, route.weight);
        taken[row] += 1;
    }
    (places, weights)
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
        let mut routing = Routing { scores: self.read_floats(&logits), ..Routing::default() };
        routing.choose(experts.len(), top_k, normalised);
        let Routing { routes, starts, .. } = &routing;
        let (places, weights) = routes_by_row(routes, x.rows, top_k);
        let parts = self.block(4 * places.len() * hidden);
        for own in starts.windows(2) {
            let routes = &routes[own[0]..own[1]];
            let mlp = &experts[routes[0].expert as usize];
            let rows: Vec<u32> = routes.iter().map(|route| route.row).collect();
            let (indices, gathered) = (self.block_of(&rows), self.block(4 * rows.len() * hidden));
            self.gather([normed.arg(0), indices.arg(0), gathered.arg(0)], rows.len(), hidden, 4);
            let gathered = Rows { at: gathered.arg(0), rows: rows.len(), width: hidden };
            let gate_up = mlp.gate_up.storage::<Linear<D>>();
            let active = self.with_input(gathered, None, gate_up, |input| self.gated(mlp, tail, input));
            let input = Input { rows: rows.len(), at: active.arg(0) };
            self.product(mlp.down.storage(), &input, Epilogue::Store, parts.arg(4 * own[0] * hidden));
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
        let scores = vec![0.0, 2.0, 1.0, 3.0, 0.0, 3.0];
        let mut routing = Routing { scores, ..Routing::default() };
        routing.choose(3, 2, true);
        let rows_of =
            |expert| routing.routes.iter().filter(move |r| r.expert == expert).map(|r| r.row).collect();
        let rows: [Vec<u32>; 3] = [0, 1, 2].map(rows_of);
        assert_eq!(rows, [vec![1], vec![0], vec![0, 1]]);
        let (places, weights) = routes_by_row(&routing.routes, 2, 2);
        assert_eq!(places, [1, 2, 0, 3]);
        let expected = [1.0 / (1.0 + (-1f32).exp()), 1.0 / (1.0 + 1f32.exp()), 0.5, 0.5];
        assert!(weights.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
