//! MorphKV (arXiv 2503.00979): a cache of constant size whose distant tokens are ranked, at every step, by the attention of
//! the most recent ones (algorithm 1).
//!
//! Of `cap` tokens the last `R` stay; their attention rows, summed over the heads of a group, are fused by sum or
//! maximum, and the `C = cap − R` distant tokens that they favour stay as well. The token being computed comes on top and
//! has no say.

use refrain_kernels::{Buffer, Dtype, softmax};
use refrain_registry::{Error, MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::attention_window::{AttentionWindow, Fuse};
use crate::{
    AttentionNeeds, AttentionReport, Budget, EvictionPolicy, LayerView, PromptSpans, Result, Sizes,
    TokenScorer,
};

/// How the rows of recent tokens are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    /// Softmax over all cached tokens when the row was computed, summed over the group (the paper's).
    Paper,
    /// Logits summed over the group, softmax over the distant tokens only, as in the code published for Llama.
    CodeLlama,
    /// Softmax over the distant tokens only, the maximum over the group, of one row less, as in the code published for
    /// Mistral, Qwen and Phi.
    CodeMistral,
}

/// Most rows of the window times tokens of the cache: each is a weight in f16, for every head.
const CELLS: usize = 1 << 22;

/// Options of MorphKV: keep recent tokens and the tokens that they attend to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MorphKv {
    /// Tokens that stay in the cache.
    #[schemars(range(max = MAX_COUNT))]
    pub capacity: usize,
    /// Most recent tokens that stay and whose attention ranks the others.
    #[schemars(range(max = MAX_COUNT))]
    pub window: usize,
    /// How the attention of recent tokens is fused.
    pub fuse: Fuse,
    /// The rows that are fused: the paper's weights, or those of the code published for Llama, or for Mistral, Qwen and Phi.
    pub profile: Profile,
    /// Prune only when the cache is this many times its capacity, at least 1.
    #[schemars(range(min = 1.0, max = 1e6))]
    pub evict_after: f64,
}

impl Default for MorphKv {
    fn default() -> Self {
        MorphKv { capacity: 600, window: 30, fuse: Fuse::Sum, profile: Profile::Paper, evict_after: 1.0 }
    }
}

impl Options for MorphKv {
    const NAME: &'static str = "morph_kv";

    fn validate(&self) -> Result<()> {
        let MorphKv { capacity, window, evict_after, .. } = *self;
        let conflict = |conflict| Err(Error::conflict(Self::NAME, conflict));
        if capacity <= window {
            return conflict(format!(
                "capacity {capacity} is not above the window of {window}: choose a larger capacity or a smaller window"
            ));
        }
        if window == 0 || (window == 1 && self.profile == Profile::CodeMistral) {
            return conflict(format!(
                "a window of {window} leaves no row to rank by: choose a larger window"
            ));
        }
        if self.profile == Profile::Paper && window.saturating_mul(capacity) > CELLS {
            return conflict(format!(
                "a window of {window} rows of {capacity} tokens is more than is kept beside the cache: {CELLS} weights a head at most; choose a smaller window or capacity"
            ));
        }
        if !(1.0..=1e6).contains(&evict_after) {
            return conflict(format!("evict_after {evict_after} is not from 1 to 1000000"));
        }
        Ok(())
    }
}

impl EvictionPolicy for MorphKv {
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>> {
        self.validate()?;
        let MorphKv { capacity, window, profile, evict_after, .. } = *self;
        if profile == Profile::Paper {
            prompt.check_rows(window, Self::NAME, "window")?;
        }
        // Pruned when the cache, the present token included, has come to (cap + 1) · evict_after.
        let at = (capacity.saturating_add(1) as f64 * evict_after - 1e-9).ceil() as usize;
        Ok(Some(Budget { keep: capacity, most: at.saturating_sub(2).max(capacity), decoding: true }))
    }

    fn needs(&self, _: &PromptSpans, _: usize) -> AttentionNeeds {
        match self.profile {
            Profile::Paper => AttentionNeeds::RowWeights { rows: self.window },
            Profile::CodeLlama | Profile::CodeMistral => AttentionNeeds::Queries { rows: self.rows() },
        }
    }

    fn scorer(&self, _: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer> {
        match self.profile {
            Profile::Paper => {
                let weights =
                    AttentionWindow::new(sizes.heads, self.window.min(sizes.rows), sizes.capacity, self.fuse);
                Box::new(WindowScorer { weights, window: self.window, last: None })
            }
            Profile::CodeLlama | Profile::CodeMistral => Box::new(QueryScorer::new(*self, sizes)),
        }
    }

    fn side_bytes(&self, _: &PromptSpans, sizes: Sizes) -> usize {
        match self.profile {
            Profile::Paper => AttentionWindow::bytes_of(self.window.min(sizes.rows), self.fuse, sizes),
            Profile::CodeLlama | Profile::CodeMistral => QueryScorer::bytes_of(self, sizes),
        }
    }
}

impl MorphKv {
    /// Rows that rank.
    fn rows(&self) -> usize {
        self.window - usize::from(self.profile == Profile::CodeMistral)
    }
}

/// Scores distant tokens by the paper's rows of weights.
#[derive(Clone, Debug)]
struct WindowScorer {
    weights: AttentionWindow,
    window: usize,
    /// Position of the last row.
    last: Option<u32>,
}

impl TokenScorer for WindowScorer {
    fn observe(&mut self, seen: &AttentionReport<'_>, layer: &LayerView<'_>) {
        let rows = seen.rows.len();
        for (row, position) in seen.rows.iter().enumerate() {
            // Tokens of a prompt that were not computed have rows of zeros: they count among the last rows.
            let skipped = self.last.map_or(0, |last| position - last - 1).min(self.window as u32);
            if skipped > 0 {
                let nothing = vec![0.0; layer.len];
                (0..skipped).for_each(|i| self.weights.push(position - skipped + i, |_| &nothing, layer));
            }
            self.last = Some(*position);
            let weights = |head: usize| &seen.weights[(head * rows + row) * layer.len..][..layer.len];
            self.weights.push(*position, weights, layer);
        }
    }

    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        self.weights.fused(head, scores);
        protect_recent(layer, head, self.window, scores);
    }

    fn weakest(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) -> Option<usize> {
        let distant = layer.next.saturating_sub(self.window as u32);
        self.weights.lowest(head, layer, distant).or_else(|| {
            self.score(layer, head, scores);
            refrain_kv::weakest(scores, layer.head(head))
        })
    }

    fn moved(&mut self, head: usize, from: usize, to: usize, _: u32) {
        self.weights.moved(head, from, to);
    }

    fn gather(&self, kept: &[u32], capacity: usize) -> Box<dyn TokenScorer> {
        Box::new(WindowScorer { weights: self.weights.gather(kept, capacity), ..*self })
    }

    fn bytes(&self) -> usize {
        self.weights.bytes()
    }
}

fn protect_recent(layer: &LayerView<'_>, head: usize, window: usize, scores: &mut [f32]) {
    for (score, position) in scores.iter_mut().zip(layer.head(head)) {
        if layer.is_recent(*position, window) {
            *score = f32::INFINITY;
        }
    }
}

/// Scores distant tokens by rows computed from recent queries at every step, as the published code does.
#[derive(Clone, Debug)]
struct QueryScorer {
    policy: MorphKv,
    group: usize,
    head_dim: usize,
    /// `rows × heads · group × d`, the oldest row overwritten.
    queries: Buffer,
    width: usize,
    /// Position of each row that is there.
    positions: Vec<u32>,
    next: usize,
}

impl QueryScorer {
    fn new(policy: MorphKv, sizes: Sizes) -> QueryScorer {
        let width = sizes.heads * sizes.group * sizes.head_dim;
        let rows = policy.rows().min(sizes.rows);
        let queries = Buffer::zeros(Dtype::F16, rows * width);
        let positions = Vec::with_capacity(rows);
        QueryScorer {
            policy,
            group: sizes.group,
            head_dim: sizes.head_dim,
            queries,
            width,
            positions,
            next: 0,
        }
    }

    /// Bytes of one layer's queries and of their positions.
    fn bytes_of(policy: &MorphKv, sizes: Sizes) -> usize {
        let width = sizes.heads * sizes.group * sizes.head_dim;
        policy.rows().min(sizes.rows) * (width * Dtype::F16.size() + size_of::<u32>())
    }

    /// Softmax over the distant tokens of the logits of `heads` query heads from `first` on, summed; `rows × len`, zero
    /// elsewhere.
    fn rows(&self, layer: &LayerView<'_>, head: usize, first: usize, heads: usize) -> Vec<f32> {
        let (d, size) = (self.head_dim, heads * self.head_dim);
        // Rows of a prompt may have gaps: those of older tokens than the last ones do not count.
        let recent = |row: &usize| layer.is_recent(self.positions[*row], self.policy.rows());
        let recent: Vec<usize> = (0..self.positions.len()).filter(recent).collect();
        let mut q = vec![0.0; recent.len() * size];
        for (row, q) in recent.iter().zip(q.chunks_exact_mut(size)) {
            let at = row * self.width + (head * self.group + first) * d;
            self.queries.as_slice().range(at..at + size).to_f32(q);
        }
        let mut rows = layer.concat_logits(head, &q, heads);
        for row in rows.chunks_exact_mut(layer.len) {
            for (logit, position) in row.iter_mut().zip(layer.head(head)) {
                if layer.is_recent(*position, self.policy.window) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            softmax(row);
        }
        rows
    }
}

impl TokenScorer for QueryScorer {
    fn observe(&mut self, seen: &AttentionReport<'_>, _: &LayerView<'_>) {
        let rows = self.queries.len() / self.width;
        for (query, position) in seen.queries.chunks_exact(self.width).zip(seen.rows) {
            self.queries.write_f32(self.next * self.width, query);
            match self.positions.get_mut(self.next) {
                Some(row) => *row = *position,
                None => self.positions.push(*position),
            }
            self.next = (self.next + 1) % rows;
        }
    }

    fn score(&self, layer: &LayerView<'_>, head: usize, scores: &mut [f32]) {
        scores.fill(0.0);
        let distant = layer.head(head).iter().any(|p| !layer.is_recent(*p, self.policy.window));
        if distant && !self.positions.is_empty() {
            let rows = match self.policy.profile {
                Profile::CodeMistral => (0..self.group)
                    .map(|m| self.rows(layer, head, m, 1))
                    .reduce(|mut all, one| {
                        all.iter_mut().zip(one).for_each(|(all, one)| *all = all.max(one));
                        all
                    })
                    .unwrap_or_default(),
                _ => self.rows(layer, head, 0, self.group),
            };
            for row in rows.chunks_exact(layer.len) {
                for (score, weight) in scores.iter_mut().zip(row) {
                    *score = match self.policy.fuse {
                        Fuse::Sum => *score + weight,
                        Fuse::Max => score.max(*weight),
                    };
                }
            }
        }
        protect_recent(layer, head, self.policy.window, scores);
    }

    fn gather(&self, _: &[u32], _: usize) -> Box<dyn TokenScorer> {
        Box::new(self.clone())
    }

    fn bytes(&self) -> usize {
        self.queries.bytes()
    }
}
