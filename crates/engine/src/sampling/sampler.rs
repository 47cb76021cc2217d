//! From logits to a token.

use std::collections::BTreeMap;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::Sampling;
use super::likeliest::{argmax, likeliest, maximum};

/// Probabilities that are added up, and passed over, at once.
const BLOCK: usize = 256;

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
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.options;
        // Relative to the highest, so that a tiny temperature cannot overflow.
        let highest = maximum(logits);
        logits.iter_mut().for_each(|logit| *logit = (*logit - highest) / temperature);
        refrain_kernels::softmax(logits);
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let keeps_k = top_k > 0 && top_k < logits.len();
        if !keeps_k && top_p >= 1.0 && min_p == 0.0 {
            return draw_of_all(logits, uniform);
        }
        let least = if min_p == 0.0 { 0.0 } else { min_p * maximum(logits) };
        let mut kept = if keeps_k {
            let mut kept = likeliest(logits, top_k, 0.0);
            if top_p < 1.0 {
                let total: f32 = kept.iter().map(|token| logits[*token as usize]).sum();
                kept.truncate(reach(logits, &kept, top_p * total).unwrap_or(top_k));
            }
            kept
        } else if top_p < 1.0 {
            nucleus(logits, top_p)
        } else {
            likeliest(logits, usize::MAX, least)
        };
        kept.truncate(kept.partition_point(|token| logits[*token as usize] >= least));
        let probabilities = || kept.iter().map(|token| f64::from(logits[*token as usize]));
        let mut left = uniform * probabilities().sum::<f64>();
        let drawn = probabilities().position(|probability| {
            left -= probability;
            left < 0.0
        });
        drawn.map_or(kept.last(), |at| kept.get(at)).copied().unwrap_or(0)
    }
}

/// The likeliest tokens of a vocabulary, until their probabilities sum to `top_p`; the likeliest first.
fn nucleus(probabilities: &[f32], top_p: f32) -> Vec<u32> {
    // The probabilities below it sum to less than what is left out.
    let least = (1.0 - top_p) / probabilities.len() as f32 / 2.0;
    let mut kept = Vec::new();
    // Most answers have few tokens to choose from.
    for most in [256, 4096, usize::MAX] {
        kept = likeliest(probabilities, most, least);
        if let Some(count) = reach(probabilities, &kept, top_p) {
            kept.truncate(count);
            break;
        }
    }
    kept
}

/// The number of `tokens`, at least 1, whose probabilities sum to `share`; none if all of them do not.
fn reach(probabilities: &[f32], tokens: &[u32], share: f32) -> Option<usize> {
    let mut sum = 0.0;
    let reaches = |token: &u32| {
        sum += probabilities[*token as usize];
        sum >= share
    };
    tokens.iter().position(reaches).map(|at| at + 1)
}

/// The token of a vocabulary at this part of the sum of all probabilities.
fn draw_of_all(probabilities: &[f32], part: f64) -> u32 {
    let sums: Vec<f64> = probabilities.chunks(BLOCK).map(sum).collect();
    let mut left = part * sums.iter().sum::<f64>();
    for (block, sum) in sums.into_iter().enumerate() {
        if left >= sum {
            left -= sum;
            continue;
        }
        for (token, probability) in (0..).zip(probabilities).skip(block * BLOCK).take(BLOCK) {
            left -= f64::from(*probability);
            if left < 0.0 {
                return token;
            }
        }
    }
    // Rounding left something over. A token that cannot be is never drawn.
    probabilities.iter().rposition(|probability| *probability > 0.0).unwrap_or(0) as u32
}

fn sum(values: &[f32]) -> f64 {
    let mut sums = [0.0; 8];
    for values in values.chunks(sums.len()) {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    sums.into_iter().sum()
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
    }

    /// Every filter by its definition: all tokens in order, then as many as it leaves.
    fn drawn_in_order(options: &Sampling, logits: &[f32], rng: &mut ChaCha8Rng) -> u32 {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut p: Vec<f32> = logits.iter().map(|logit| (logit - highest) / options.temperature).collect();
        refrain_kernels::softmax(&mut p);
        let mut order: Vec<usize> = (0..p.len()).collect();
        if options.top_k > 0 || options.top_p < 1.0 || options.min_p > 0.0 {
            order.sort_by(|a, b| p[*b].total_cmp(&p[*a]).then(a.cmp(b)));
        }
        order.truncate(if options.top_k > 0 { options.top_k } else { p.len() });
        if options.top_p < 1.0 {
            let total = if options.top_k > 0 { order.iter().map(|token| p[*token]).sum() } else { 1.0 };
            let mut sum = 0.0;
            let reached = order.iter().position(|token| {
                sum += p[*token];
                sum >= options.top_p * total
            });
            order.truncate(reached.map_or(p.len(), |at| at + 1));
        }
        order.retain(|token| options.min_p == 0.0 || p[*token] >= options.min_p * p[argmax(&p) as usize]);
        let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * order.iter().map(|token| f64::from(p[*token])).sum::<f64>();
        let drawn = order.iter().find(|token| {
            left -= f64::from(p[**token]);
            left < 0.0
        });
        *drawn.unwrap() as u32
    }

    #[test]
    fn tokens_are_those_of_the_whole_vocabulary_in_order() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        for spread in [0.0, 0.5, 3.0, 12.0] {
            for (top_k, top_p, min_p) in [
                (0, 1.0, 0.0),
                (0, 0.3, 0.0),
                (0, 0.95, 0.0),
                (0, 0.999, 0.02),
                (40, 1.0, 0.0),
                (40, 0.9, 0.0),
                (2000, 0.9, 0.1),
                (0, 1.0, 0.05),
            ] {
                let options =
                    Sampling { temperature: 0.8, top_k, top_p, min_p, seed: 3, ..Sampling::default() };
                let mut sampler = Sampler::new(options.clone(), []);
                for _ in 0..20 {
                    let logits: Vec<f32> =
                        (0..6000).map(|_| (rng.next_u32() as f32 / 4e9).powi(3) * spread).collect();
                    let expected = drawn_in_order(&options, &logits, &mut sampler.rng.clone());
                    assert_eq!(sampler.sample(&mut logits.clone()), expected, "{spread} {options:?}");
                }
            }
        }
    }

    #[test]
    fn a_token_that_cannot_be_is_never_drawn() {
        // Tokens that a grammar forbids, before, between and after the two that it allows.
        let mut logits = vec![f32::NEG_INFINITY; 1000];
        (logits[300], logits[700]) = (1.0, 0.5);
        for options in [
            Sampling { temperature: 1.0, ..Sampling::default() },
            Sampling { temperature: 1.0, top_k: 50, ..Sampling::default() },
            Sampling { temperature: 1.0, top_p: 0.99, ..Sampling::default() },
        ] {
            let mut drawn = draws(options, &logits, 500);
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn, [300, 700]);
        }
        assert_eq!([draw_of_all(&[0.0, 0.5, 0.5, 0.0], 1.0), draw_of_all(&[0.0, 0.5, 0.0], 0.0)], [2, 1]);
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
