//! From logits to a token.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// Softmax temperature; 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the `k` likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the likeliest tokens until their probabilities sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this times as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides (or multiplies, where negative) the logits of tokens already in prompt or answer; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// With every token, how likely the model found it, and this many of the likeliest; none tells nothing.
    pub logprobs: Option<usize>,
    /// Tokens before which nothing ends the answer: end tokens are not chosen, nor those that are a stop text, and no stop
    /// text counts.
    pub min_tokens: usize,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            max_tokens: 256,
            stop: Vec::new(),
            logprobs: None,
            min_tokens: 0,
        }
    }
}

impl Sampling {
    /// # Errors
    /// If a value is out of its range.
    pub fn check(&self) -> Result<()> {
        let check = |option, value: f32, right: bool, expected| {
            if right { Ok(()) } else { Err(Error::Sampling { option, value: f64::from(value), expected }) }
        };
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        check("temperature", temperature, (0.0..=100.0).contains(&temperature), "0 (greedy) to 100")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "more than 0, at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1")?;
        let penalty = repetition_penalty;
        check("repetition_penalty", penalty, penalty > 0.0 && penalty <= 100.0, "more than 0, at most 100")?;
        check("max_tokens", self.max_tokens as f32, self.max_tokens > 0, "at least 1")
    }
}

/// Tokens among which the likeliest of `top_p` are looked for first.
const SORTED: usize = 256;

/// Chooses the tokens of one answer.
#[derive(Debug)]
pub(crate) struct Sampler {
    options: Sampling,
    rng: ChaCha8Rng,
    seen: Vec<u32>,
}

impl Sampler {
    /// `prompt` counts for the repetition penalty.
    pub(crate) fn new(options: Sampling, prompt: impl IntoIterator<Item = u32>) -> Sampler {
        let rng = ChaCha8Rng::seed_from_u64(options.seed);
        let mut seen: Vec<u32> =
            if options.repetition_penalty == 1.0 { Vec::new() } else { prompt.into_iter().collect() };
        seen.sort_unstable();
        seen.dedup();
        Sampler { options, rng, seen }
    }

    /// The next token; `logits` (vocab) are overwritten.
    pub(crate) fn sample(&mut self, logits: &mut [f32]) -> u32 {
        self.penalise(logits);
        let token = if self.options.temperature == 0.0 { argmax(logits) } else { self.draw(logits) };
        if self.options.repetition_penalty != 1.0
            && let Err(place) = self.seen.binary_search(&token)
        {
            self.seen.insert(place, token);
        }
        token
    }

    fn penalise(&self, logits: &mut [f32]) {
        let penalty = self.options.repetition_penalty;
        for token in &self.seen {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
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
    fn values_out_of_range_are_named() {
        let error = Sampling { top_p: 0.0, ..Sampling::default() }.check().unwrap_err().to_string();
        assert!(error.contains("top_p") && error.contains("more than 0"), "{error}");
        assert!(Sampling { temperature: f32::NAN, ..Sampling::default() }.check().is_err());
    }
}
