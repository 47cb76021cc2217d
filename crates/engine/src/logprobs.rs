//! Log probabilities of tokens.

use crate::sampling::{argmax, likeliest};

/// Log probabilities of one token, before temperature and all other sampling options.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log probability of the token that was chosen.
    pub logprob: f32,
    /// The likeliest tokens, most likely first; as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// Log probabilities of the whole vocabulary, before a token is chosen.
pub(crate) struct VocabLogprobs {
    logits: Vec<f32>,
    /// The highest logit, and its log probability.
    highest: (f32, f32),
    top: Vec<(u32, f32)>,
}

impl VocabLogprobs {
    /// Log probabilities of logits, with the `most` likeliest tokens; ties go to the lower token.
    pub(crate) fn new(logits: &[f32], most: usize) -> VocabLogprobs {
        let mut kept = logits.to_vec();
        refrain_kernels::softmax(&mut kept);
        let first = argmax(logits) as usize;
        let highest = (logits[first], kept[first].ln());
        kept.copy_from_slice(logits);
        let mut found = VocabLogprobs { logits: kept, highest, top: Vec::new() };
        let top = likeliest(logits, most, f32::NEG_INFINITY);
        found.top = top.into_iter().map(|token| (token, found.logprob(token))).collect();
        found
    }

    fn logprob(&self, token: u32) -> f32 {
        // In this order nothing is lost of a token that is nearly certain.
        self.logits[token as usize] - self.highest.0 + self.highest.1
    }

    pub(crate) fn of(self, token: u32) -> TokenLogprobs {
        TokenLogprobs { logprob: self.logprob(token), top: self.top }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_the_likeliest_come_first() {
        let logits = [1.0f32, 3.0, 2.0, 3.0, -40.0];
        let logprobs = VocabLogprobs::new(&logits, 3).of(2);
        let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        assert!((f64::from(logprobs.logprob) - (2.0 - total.ln())).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 2]);
        let all = VocabLogprobs::new(&[1.0, 3.0, 2.0], 9);
        let sum: f32 = (0..3).map(|token| all.logprob(token).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && all.top.len() == 3);
        assert!(VocabLogprobs::new(&[0.0, 1.0], 0).top.is_empty());
    }
}
