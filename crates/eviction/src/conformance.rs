//! The conformance battery: rules of every eviction policy, independent of its scores. A new policy runs it in one line.

use refrain_kernels::{Cpu, Device, Dtype, KvBuffer, Slice};
use refrain_kv::{Span, survivors};

use crate::{
    AttentionNeeds, AttentionReport, Budget, CachedKeys, Eviction, EvictionPolicy, LayerView, PromptSpans,
    Sizes, TokenScorer,
};

const HEADS: usize = 2;
const GROUP: usize = 2;
const HEAD_DIM: usize = 8;
const STEPS: usize = 60;

/// Checks a policy on prompts of several lengths; panics with what is broken.
///
/// Budgets are the same twice, leave at least one token and do not prune to more than they allow; the one-shot ones are none
/// where nothing has to go. Scores are numbers and the same twice; what they protect fits the budget; the newest token stays;
/// the weakest token is the one of the lowest score. Tokens keep their scores when they change their slots, but where scores
/// are made anew from queries over whatever is there. Scorers hold no more bytes than the policy says before.
///
/// # Panics
/// If the policy breaks one of these.
pub fn check(eviction: &Eviction) {
    let policy = eviction.policy.as_ref();
    for (system, documents, question) in [(0, 0, 1), (2, 0, 3), (3, 30, 5), (4, 300, 20), (1, 2500, 9)] {
        let n = system + documents + question;
        let prompt = PromptSpans { system: Span::new(0, system), question: Span::new(n - question, n) };
        let budget = policy.budget(&prompt);
        assert_eq!(budget, policy.budget(&prompt), "{policy:?}: a budget must be the same twice");
        let Ok(budget) = budget else { continue };
        assert!(budget.is_none() || !policy.is_full(), "{policy:?} evicts and is full attention");
        let Some(budget) = budget else { continue };
        assert!((1..=budget.most).contains(&budget.keep), "{policy:?}: {budget:?}");
        assert!(budget.decoding || budget.keep < n, "{policy:?} prunes a prompt of {n} to {budget:?}");
        Run { policy, prompt, budget, device: &Cpu::new(1).unwrap(), seed: n as u64 }.check();
    }
}

struct Run<'a> {
    policy: &'a dyn EvictionPolicy,
    prompt: PromptSpans,
    budget: Budget,
    device: &'a dyn Device,
    seed: u64,
}

/// One layer's tokens, without values.
struct Layer {
    scorer: Box<dyn TokenScorer>,
    capacity: usize,
    len: usize,
    positions: Vec<u32>,
    keys: KvBuffer,
}

impl Run<'_> {
    fn random(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.seed >> 40) as f32 / (1 << 24) as f32
        };
        (0..count).map(|_| next()).collect()
    }

    fn sizes(&self, capacity: usize) -> Sizes {
        Sizes { heads: HEADS, group: GROUP, head_dim: HEAD_DIM, capacity, rows: self.prompt.len() + STEPS }
    }

    fn view<'a>(&'a self, layer: &'a Layer, next: usize) -> LayerView<'a> {
        LayerView {
            heads: HEADS,
            group: GROUP,
            head_dim: HEAD_DIM,
            scale: (HEAD_DIM as f32).sqrt().recip(),
            capacity: layer.capacity,
            len: layer.len,
            positions: &layer.positions,
            keys: CachedKeys::new(self.device, &layer.keys),
            next: next as u32,
        }
    }

    /// Gives random weights and queries of `rows` to the policy.
    fn observe(&mut self, layer: &mut Layer, rows: &[u32]) {
        let summed = !matches!(self.policy.needs(&self.prompt, STEPS), AttentionNeeds::RowWeights { .. });
        let count = if summed { 1 } else { rows.len() };
        let mut weights = self.random(HEADS * count * layer.len);
        for (i, weights) in weights.chunks_mut(layer.len).enumerate() {
            let row = rows[if summed { rows.len() - 1 } else { i % count }];
            let positions = &layer.positions[i / count * layer.capacity..];
            weights
                .iter_mut()
                .zip(positions)
                .filter(|(_, p)| **p > row)
                .for_each(|(weight, _)| *weight = 0.0);
        }
        let queries = self.random(rows.len() * HEADS * GROUP * HEAD_DIM);
        let seen = vec![layer.len as u32; rows.len()];
        let mut scorer = std::mem::replace(&mut layer.scorer, Box::new(crate::RecencyScorer::default()));
        let view = self.view(layer, rows[rows.len() - 1] as usize + 1);
        scorer.observe(&AttentionReport { rows, seen: &seen, weights: &weights, queries: &queries }, &view);
        layer.scorer = scorer;
        self.check_bytes(layer);
    }

    /// Asserts that what a scorer holds was known before.
    fn check_bytes(&self, layer: &Layer) {
        let (held, known) =
            (layer.scorer.bytes(), self.policy.side_bytes(&self.prompt, self.sizes(layer.capacity)));
        assert!(held <= known, "{:?}: a scorer holds {held} bytes, and {known} were said", self.policy);
    }

    fn scores(&self, layer: &Layer, next: usize, head: usize) -> Vec<f32> {
        let view = self.view(layer, next);
        let (mut scores, mut again) = (vec![f32::NAN; layer.len], vec![f32::NAN; layer.len]);
        layer.scorer.score(&view, head, &mut scores);
        layer.scorer.score(&view, head, &mut again);
        let bits = |scores: &[f32]| scores.iter().map(|score| score.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&scores), bits(&again), "{:?}: scores must be the same twice", self.policy);
        assert!(scores.iter().all(|score| !score.is_nan()), "{:?}: a score is no number", self.policy);
        let protected = scores.iter().filter(|score| **score == f32::INFINITY).count();
        assert!(protected <= self.budget.keep, "{:?} protects {protected} tokens", self.policy);
        scores
    }

    fn check(&mut self) {
        let n = self.prompt.len();
        let mut prompt = Layer {
            scorer: self.policy.scorer(&self.prompt, self.sizes(n)),
            capacity: n,
            len: n,
            positions: (0..HEADS).flat_map(|_| 0..n as u32).collect(),
            keys: self.device.upload_kv(Slice::F32(&self.random(HEADS * n * HEAD_DIM))),
        };
        let rows = match self.policy.needs(&self.prompt, STEPS) {
            AttentionNeeds::PromptSums { rows }
            | AttentionNeeds::RowWeights { rows }
            | AttentionNeeds::Queries { rows } => rows.min(n),
            _ => n,
        };
        let rows: Vec<u32> = (n as u32 - rows as u32..n as u32).collect();
        self.observe(&mut prompt, &rows);
        let kept: Vec<u32> = (0..HEADS)
            .flat_map(|head| {
                survivors(&self.scores(&prompt, n, head), &prompt.positions[..n], self.budget.keep)
            })
            .collect();
        let len = kept.len() / HEADS;
        assert!(
            kept.chunks(len).all(|kept| kept.contains(&(n as u32 - 1))),
            "{:?}: the newest token",
            self.policy
        );
        if !self.budget.decoding {
            return;
        }
        let mut layer = self.gathered(&prompt, &kept, len);
        self.check_bytes(&layer);
        for head in (0..HEADS).filter(|_| !self.queries()) {
            let (before, after) = (self.scores(&prompt, n, head), self.scores(&layer, n, head));
            for (slot, kept) in kept[head * len..][..len].iter().enumerate() {
                assert_eq!(
                    before[*kept as usize], after[slot],
                    "{:?}: another score in another slot",
                    self.policy
                );
            }
        }
        for position in n..n + STEPS {
            if layer.len > self.budget.most {
                self.prune(&mut layer, position);
            }
            let slot = layer.len;
            layer.len += 1;
            for head in 0..HEADS {
                layer.positions[head * layer.capacity + slot] = position as u32;
            }
            self.observe(&mut layer, &[position as u32]);
        }
    }

    /// Whether scores are made from queries.
    fn queries(&self) -> bool {
        matches!(self.policy.needs(&self.prompt, STEPS), AttentionNeeds::Queries { .. })
    }

    fn gathered(&self, prompt: &Layer, kept: &[u32], len: usize) -> Layer {
        let capacity = (self.budget.most + 1).max(len);
        let mut layer = Layer {
            scorer: prompt.scorer.gather(kept, capacity),
            capacity,
            len,
            positions: vec![0; HEADS * capacity],
            keys: self.device.kv(Dtype::F32, HEADS * capacity * HEAD_DIM),
        };
        for (head, kept) in kept.chunks(len).enumerate() {
            for (slot, from) in kept.iter().enumerate() {
                layer.positions[head * capacity + slot] = *from;
                let at = (head * prompt.capacity + *from as usize) * HEAD_DIM;
                let to = (head * capacity + slot) * HEAD_DIM;
                self.device.copy_kv(&prompt.keys, at..at + HEAD_DIM, &mut layer.keys, to);
            }
        }
        layer
    }

    /// Leaves what the policy keeps; every token that moves keeps its score.
    fn prune(&self, layer: &mut Layer, next: usize) {
        let keep = self.budget.keep;
        for head in 0..HEADS {
            let scores = self.scores(layer, next, head);
            let base = head * layer.capacity;
            let positions = &layer.positions[base..base + layer.len];
            let newest = positions.iter().position(|p| *p as usize + 1 == next);
            let kept = survivors(&scores, positions, keep);
            let stays = newest.is_some_and(|slot| kept.contains(&(slot as u32)));
            assert!(stays, "{:?}: the newest token goes at {next}", self.policy);
            if layer.len == keep + 1 {
                let weakest = layer.scorer.weakest(&self.view(layer, next), head, &mut vec![0.0; layer.len]);
                let gone = (0..layer.len).find(|slot| !kept.contains(&(*slot as u32)));
                assert_eq!(weakest, gone, "{:?} at {next}: the weakest is another", self.policy);
            }
            let holes = (0..keep as u32).filter(|slot| !kept.contains(slot));
            let moves: Vec<(u32, u32)> =
                holes.zip(kept.iter().copied().filter(|slot| *slot as usize >= keep)).collect();
            for (to, from) in &moves {
                let (to, from) = (*to as usize, *from as usize);
                let position = layer.positions[base + from];
                layer.scorer.moved(head, from, to, position);
                layer.positions[base + to] = position;
                self.device.copy_kv_within(
                    &mut layer.keys,
                    (base + from) * HEAD_DIM..(base + from + 1) * HEAD_DIM,
                    (base + to) * HEAD_DIM,
                );
            }
            let mut after = vec![0.0; layer.len];
            layer.scorer.score(&self.view(layer, next), head, &mut after);
            for (to, from) in moves {
                let (before, after) = (scores[from as usize], after[to as usize]);
                assert!(before == after || self.queries(), "{:?}: {before} became {after}", self.policy);
            }
        }
        layer.len = keep;
    }
}
