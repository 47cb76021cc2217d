//! The experts of rows, chosen by a router's logits.

/// One row's way through one expert.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The expert.
    pub expert: u32,
    /// The row.
    pub row: u32,
    /// Factor of the expert's result.
    pub weight: f32,
}

/// The ways of some rows through their experts.
#[derive(Debug, Default)]
pub struct Routing {
    /// By expert, then by row.
    pub routes: Vec<Route>,
    /// Index of the first route of each expert in use, and the number of all.
    pub starts: Vec<usize>,
    /// The router's logits of the rows; [`Routing::choose`] overwrites them.
    pub scores: Vec<f32>,
}

impl Routing {
    /// Chooses `top_k` experts for each row of `scores`, which holds the logits of `experts` experts a row.
    pub fn choose(&mut self, experts: usize, top_k: usize, normalised: bool) {
        let Routing { routes, starts, scores } = self;
        routes.clear();
        for (row, scores) in (0..).zip(scores.chunks_exact_mut(experts)) {
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|score| *score = (*score - most).exp());
            let sum: f32 = scores.iter().sum();
            let first = routes.len();
            for _ in 0..top_k {
                // A chosen expert's score is below all others. Of equal ones, and of none that is a number, the first is taken.
                let mut best = scores.iter().position(|score| *score != -1.0).unwrap_or_default();
                for (expert, score) in scores.iter().enumerate() {
                    if *score > scores[best] {
                        best = expert;
                    }
                }
                routes.push(Route { expert: best as u32, row, weight: scores[best] / sum });
                scores[best] = -1.0;
            }
            if normalised {
                let whole: f32 = routes[first..].iter().map(|route| route.weight).sum();
                routes[first..].iter_mut().for_each(|route| route.weight /= whole);
            }
        }
        routes.sort_unstable_by_key(|route| (route.expert, route.row));
        starts.clear();
        starts.extend((0..routes.len()).filter(|i| *i == 0 || routes[i - 1].expert != routes[*i].expert));
        starts.push(routes.len());
    }
}
