//! How tokens are chosen: options, penalties, random draws, and the grammar that an answer has to follow.

mod grammar;
mod likeliest;
mod limits;
mod sampler;
mod schema;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(crate) use self::grammar::GrammarCompiler;
pub use self::grammar::{Grammar, StructuredOutput};
pub use self::likeliest::argmax;
pub(crate) use self::likeliest::likeliest;
pub(crate) use self::sampler::Sampler;
pub use self::schema::{with_closed_objects, without_unreadable};
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
    /// Lowers the logit of a token by this for each time that it stands in the answer; 0 changes nothing.
    pub frequency_penalty: f32,
    /// Lowers the logits of tokens that stand in the answer by this; 0 changes nothing.
    pub presence_penalty: f32,
    /// Is added to the logits of tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Texts that end the answer; they are not part of it. The text of a control token stands for the token.
    pub stop: Vec<String>,
    /// With every token, how likely the model found it, and this many of the likeliest; none tells nothing.
    pub logprobs: Option<usize>,
    /// Tokens before which nothing ends the answer: end tokens are not chosen, nor those that are a stop text unless a grammar allows nothing else, and no stop
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
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: BTreeMap::new(),
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
        check("repetition_penalty", penalty, (0.01..=100.0).contains(&penalty), "0.01 to 100")?;
        for (option, value) in
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)]
        {
            check(option, value, (-2.0..=2.0).contains(&value), "-2 to 2")?;
        }
        for bias in self.logit_bias.values() {
            check("logit_bias", *bias, (-100.0..=100.0).contains(bias), "-100 to 100 a token")?;
        }
        check("max_tokens", self.max_tokens as f32, self.max_tokens > 0, "at least 1")
    }

    /// # Errors
    /// If a bias is of a token that a model of `vocab` tokens does not have.
    pub fn check_biases(&self, vocab: usize) -> Result<()> {
        match self.logit_bias.keys().find(|token| **token as usize >= vocab) {
            Some(&token) => Err(Error::LogitBias { vocab, token }),
            None => Ok(()),
        }
    }
}

/// Lowers the logits of tokens to minus infinity.
pub(crate) fn ban(logits: &mut [f32], tokens: impl Iterator<Item = u32>) {
    for token in tokens {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_named() {
        let error = Sampling { top_p: 0.0, ..Sampling::default() }.check().unwrap_err().to_string();
        assert!(error.contains("top_p") && error.contains("more than 0"), "{error}");
        let error =
            Sampling { presence_penalty: 2.5, ..Sampling::default() }.check().unwrap_err().to_string();
        assert!(error.contains("presence_penalty") && error.contains("-2 to 2"), "{error}");
        let logit_bias = [(3, 101.0)].into();
        assert!(Sampling { logit_bias, ..Sampling::default() }.check().is_err());
        assert!(Sampling { temperature: f32::NAN, ..Sampling::default() }.check().is_err());
        // A tiny one makes logits infinite, which have no probabilities.
        let penalised = |repetition_penalty| Sampling { repetition_penalty, ..Sampling::default() }.check();
        let error = penalised(1e-38).unwrap_err().to_string();
        assert!(error.contains("repetition_penalty") && error.contains("0.01 to 100"), "{error}");
        assert!(penalised(0.01).is_ok() && penalised(100.0).is_ok());
    }
}
