//! From logits to a token.

use std::collections::BTreeMap;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::Sampling;

/// Tokens among which the likeliest of `top_p` are looked for first.
const SORTED: usize = 256;

/// Chooses the tokens of one answer.
#[derive(Debug)]
pub(crate) struct Sampler {
    options: Sampling,
    rng: ChaCha8Rng,
    /// Tokens of prompt and answer, ascending; empty where no penalty asks for them.
    seen: Vec<u32>,
    /// How often each token stands in the answer; empty where no penalty asks for it.
    counts: BTreeMap<u32, u32>,
}

impl Sampler {
    /// `prompt` counts for the repetition penalty.
    pub(crate) fn new(options: Sampling, prompt: impl IntoIterator<Item = u32>) -> Sampler {
        let rng = ChaCha8Rng::seed_from_u64(options.seed);
        let mut seen: Vec<u32> =
            if options.repetition_penalty == 1.0 { Vec::new() } else { prompt.into_iter().collect() };
        seen.sort_unstable();
        seen.dedup();
        Sampler { options, rng, seen, counts: BTreeMap::new() }
    }

    /// The next token; `logits` (vocab) are overwritten.
    pub(crate) fn sample(&mut self, logits: &mut [f32]) -> u32 {
        self.bias(logits);
        self.penalise(logits);
        let token = if self.options.temperature == 0.0 { argmax(logits) } else { self.draw(logits) };
        let Sampling { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.options;
        if repetition_penalty != 1.0
            && let Err(place) = self.seen.binary_search(&token)
        {
            self.seen.insert(place, token);
        }
        if frequency_penalty != 0.0 || presence_penalty != 0.0 {
            *self.counts.entry(token).or_default() += 1;
        }
        token
    }

    fn bias(&self, logits: &mut [f32]) {
        for (token, bias) in &self.options.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
    }

    /// The repetition penalty over prompt and answer, then the frequency and presence penalties over the answer, as vLLM has them.
    fn penalise(&self, logits: &mut [f32]) {
        let penalty = self.options.repetition_penalty;
        for token in &self.seen {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        for (token, count) in &self.counts {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit -= self.options.frequency_penalty * *count as f32 + self.options.presence_penalty;
            }
        }
    }

    /// Temperature, then top-k, top-p, min-p, each over what the one before it left.
    fn draw(&mut self, logits: &mut [f32]) -> u32 {
        // Relative to the highest, so that a tiny temperature cannot overflow.
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        logits.iter_mut().for_each(|logit| *logit = (*logit - highest) / self.options.temperature);
        refrain_kernels::softmax(logits);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let top_k = self.options.top_k;
        if top_k > 0 && top_k < order.len() {
            order.select_nth_unstable_by(top_k - 1, likelier);
            order.truncate(top_k);
        }
        let probability = |token: &u32| logits[*token as usize];
        if self.options.top_p < 1.0 {
            let total: f32 = order.iter().map(probability).sum();
            let (mut sum, mut kept) = (0.0, 0);
            // Most of the vocabulary is never put into order.
            for some in [SORTED, usize::MAX] {
                let some = some.min(order.len());
                if some < order.len() {
                    order.select_nth_unstable_by(some - 1, likelier);
                }
                order[kept..some].sort_unstable_by(likelier);
                while kept < some && sum < self.options.top_p * total {
                    sum += probability(&order[kept]);
                    kept += 1;
                }
                if kept < some {
                    break;
                }
            }
            order.truncate(kept);
        }
        let highest = order.iter().map(probability).fold(0.0, f32::max);
        order.retain(|token| probability(token) >= self.options.min_p * highest);
        let total: f64 = order.iter().map(|token| f64::from(probability(token))).sum();
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total;
        for token in &order {
            left -= f64::from(probability(token));
            if left < 0.0 {
                return *token;
            }
        }
        *order.last().unwrap_or(&0)
    }
}

/// Index of the highest value, ties to the lower index.
pub fn argmax(values: &[f32]) -> u32 {
    // Two simple passes, the first of them with vectors, are quicker than one that carries the index.
    let mut highest = [f32::NEG_INFINITY; 16];
    for values in values.chunks(highest.len()) {
        for (highest, value) in highest.iter_mut().zip(values) {
            *highest = if *value > *highest { *value } else { *highest };
        }
    }
    let highest = highest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    values.iter().position(|value| *value == highest).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(options, []);
        (0..count).map(|_| sampler.sample(&mut logits.to_vec())).collect()
    }

    #[test]
    fn temperature_draws_by_probability_and_a_seed_repeats() {
        let logits = [0.0, 2f32.ln(), 5f32.ln()];
        let options = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        let drawn = draws(options.clone(), &logits, 8000);
        for (token, expected) in [(0, 0.125), (1, 0.25), (2, 0.625)] {
            let share = drawn.iter().filter(|t| **t == token).count() as f64 / 8000.0;
            assert!((share - expected).abs() < 0.02, "{token}: {share}");
        }
        assert_eq!(drawn, draws(options.clone(), &logits, 8000));
        assert_ne!(drawn, draws(Sampling { seed: 8, ..options }, &logits, 8000));
    }

    #[test]
    fn filters_leave_only_what_they_name() {
        let logits = [0.1f32.ln(), 0.5f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let base = Sampling { temperature: 1.0, ..Sampling::default() };
        let only = |options: Sampling| {
            let mut tokens = draws(options, &logits, 500);
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        assert_eq!(only(Sampling { top_k: 2, ..base.clone() }), [1, 2]);
        assert_eq!(only(Sampling { top_k: 3, top_p: 0.5, ..base.clone() }), [1]);
        assert_eq!(only(Sampling { top_p: 0.79, ..base.clone() }), [1, 2]);
        assert_eq!(only(Sampling { min_p: 0.5, ..base.clone() }), [1, 2]);
        assert_eq!(only(Sampling { top_p: 0.01, ..base.clone() }), [1]);
        assert_eq!(only(Sampling { temperature: 1e-38, ..base.clone() }), [1]);
        assert_eq!(only(base), [0, 1, 2, 3]);
    }

    #[test]
    fn the_likeliest_are_found_among_many() {
        // Likelier by a tenth of a per cent, one after the other; some stand for what is put into order later.
        let logits: Vec<f32> = (0..2000).map(|i| ((i * 7919) % 2000) as f32 / 1000.0).collect();
        for top_p in [0.01, 0.2, 0.7, 1.0] {
            let mut sorted: Vec<usize> = (0..2000).collect();
            sorted.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let total: f32 = logits.iter().map(|l| l.exp()).sum();
            let mut sum = 0.0;
            let within = sorted.iter().position(|i| {
                sum += logits[*i].exp() / total;
                sum > top_p + 1e-4
            });
            let least = logits[sorted[within.unwrap_or(1999)]];
            let options = Sampling { temperature: 1.0, top_p, ..Sampling::default() };
            let drawn = draws(options, &logits, 4000);
            assert!(drawn.iter().all(|token| logits[*token as usize] >= least), "{top_p}");
            // All of them, as far as chance reaches.
            let lowest = drawn.iter().map(|token| logits[*token as usize]).fold(f32::MAX, f32::min);
            assert!(lowest < least + 0.02, "{top_p}: {lowest}, {least}");
        }
        assert_eq!(argmax(&logits), logits.iter().position(|l| *l == 1.999).unwrap() as u32);
        assert_eq!((argmax(&[1.0, 3.0, 3.0]), argmax(&[f32::NEG_INFINITY; 20]), argmax(&[])), (1, 0, 0));
    }

    #[test]
    fn repetition_penalty_lowers_what_was_seen() {
        let options = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(options, [1]);
        assert_eq!(sampler.sample(&mut [1.0, 1.5, -3.0]), 0);
        assert_eq!(sampler.sample(&mut [1.0, 1.5, -3.0]), 1);
        assert_eq!(sampler.sample(&mut [-1.0, -1.2, -1.5]), 2);
    }

    #[test]
    fn frequency_and_presence_penalties_count_the_answer_alone() {
        let options = Sampling { frequency_penalty: 0.25, presence_penalty: 0.5, ..Sampling::default() };
        let mut sampler = Sampler::new(options, [0, 1, 2]);
        // 2.0; then 2.0 - 0.75 = 1.25 against 1.3; then 1.25 against 0.55; then 2.0 - 1.0 = 1.0 against 0.55.
        let logits = [2.0, 1.3];
        let chosen: Vec<u32> = (0..5).map(|_| sampler.sample(&mut logits.to_vec())).collect();
        assert_eq!(chosen, [0, 1, 0, 0, 0]);
        let mut penalised = logits.to_vec();
        sampler.penalise(&mut penalised);
        assert_eq!(penalised, [2.0 - 4.0 * 0.25 - 0.5, 1.3 - 0.25 - 0.5]);
    }

    #[test]
    fn a_bias_is_added_to_the_logit_of_its_token() {
        let logit_bias = [(1, 2.0), (2, -100.0), (9, 5.0)].into();
        let mut sampler = Sampler::new(Sampling { logit_bias, ..Sampling::default() }, []);
        assert_eq!(sampler.sample(&mut [1.0, 0.5, 50.0]), 1);
    }
}
