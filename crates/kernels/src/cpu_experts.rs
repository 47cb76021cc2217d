//! Mixtures of experts on the CPU: rows are grouped by the experts that they go through, so that the weights of an expert are read
//! once for all of its rows, and those of an expert that no row chose are not read at all.

use std::cell::{Cell, RefCell};

use crate::cpu::Cpu;
use crate::cpu_layer::even_parts;
use crate::device::{Experts, GatedMlp, LayerTail};
use crate::disjoint::DisjointMut;
use crate::linear::{Input, Linear, Output};
use crate::routing::Routing;
use crate::scratch::{self, AlignedVec};

/// Rows at a time, which bounds the memory of what experts give.
const ROWS: usize = 1024;

thread_local! {
    /// The rows of one expert, gathered.
    static GATHERED: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// What each route gives.
    static RESULTS: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// What the experts of each row give together.
    static MIXED: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    static ROUTING: RefCell<Routing> = RefCell::new(Routing::default());
}

impl Cpu {
    /// x += post(experts(norm(x))), with the norms and the activation of `tail`.
    pub(crate) fn add_experts(&self, experts: Experts<'_>, tail: &LayerTail<'_>, x: &mut [f32]) {
        let hidden = tail.output.storage::<Linear>().outputs();
        for rows in even_parts(x.len() / hidden, ROWS) {
            let x = &mut x[rows.start * hidden..rows.end * hidden];
            let mut mixed = scratch::borrow(&MIXED, x.len());
            let mixed = &mut mixed.as_f32_mut()[..x.len()];
            self.normed(x, tail.mlp_norm, |normed| self.mix(experts, tail, normed, mixed));
            self.add_normed(mixed, tail.mlp_post_norm, hidden, x);
        }
    }

    /// y = experts(x)
    fn mix(&self, mixture: Experts<'_>, tail: &LayerTail<'_>, x: &[f32], y: &mut [f32]) {
        let Experts { router, experts, top_k, normalised } = mixture;
        let router = router.storage::<Linear>();
        let hidden = router.inputs();
        // The routing is this thread's until its end: tasks on this thread see it only through the borrow below.
        let mut routing = ROUTING.take();
        routing.scores.resize(x.len() / hidden * experts.len(), 0.0);
        self.linear(router, x, &mut routing.scores);
        routing.choose(experts.len(), top_k, normalised);
        let Routing { routes, starts, .. } = &routing;
        let mut results = scratch::borrow(&RESULTS, routes.len() * hidden);
        let results = &mut results.as_f32_mut()[..routes.len() * hidden];
        let used = starts.len() - 1;
        let parts = DisjointMut::new(results);
        // Threads take an expert each where there are enough of them, and share the work of one where there are not.
        self.parallel_if(used >= 2 * self.threads(), used, &|e| {
            let own = starts[e]..starts[e + 1];
            let routes = &routes[own.clone()];
            let GatedMlp { gate_up, down } = &experts[routes[0].expert as usize];
            let (gate_up, down) = (gate_up.storage::<Linear>(), down.storage::<Linear>());
            let mut gathered = scratch::borrow(&GATHERED, routes.len() * hidden);
            let gathered = &mut gathered.as_f32_mut()[..routes.len() * hidden];
            for (to, route) in gathered.chunks_exact_mut(hidden).zip(routes) {
                to.copy_from_slice(&x[route.row as usize * hidden..][..hidden]);
            }
            let active = self.gated(gate_up, tail.activation, Input::Rows(gathered, None), down);
            // SAFETY: these routes belong to this task.
            let results = unsafe { parts.part(own.start * hidden..own.end * hidden) };
            self.project(down, active.input(), Output::Rows(results));
        });
        y.fill(0.0);
        // A row's experts are added in ascending order, whatever rows there are beside it.
        for (part, route) in results.chunks_exact(hidden).zip(routes) {
            let y = &mut y[route.row as usize * hidden..][..hidden];
            y.iter_mut().zip(part).for_each(|(y, part)| *y += route.weight * part);
        }
        ROUTING.set(routing);
    }
}
