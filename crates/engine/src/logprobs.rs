//! Log probabilities of tokens.

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
    all: Vec<f32>,
    top: Vec<(u32, f32)>,
}

impl VocabLogprobs {
    /// Log probabilities of logits, with the `most` likeliest tokens; ties go to the lower token.
    pub(crate) fn new(logits: &[f32], most: usize) -> VocabLogprobs {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
        let all: Vec<f32> =
            logits.iter().map(|logit| (f64::from(logit - highest) - sum.ln()) as f32).collect();
        let mut order: Vec<u32> = (0..all.len() as u32).collect();
        let likelier = |a: &u32, b: &u32| all[*b as usize].total_cmp(&all[*a as usize]).then(a.cmp(b));
        if most > 0 && most < order.len() {
            order.select_nth_unstable_by(most - 1, likelier);
        }
        order.truncate(most);
        order.sort_unstable_by(likelier);
        let top = order.into_iter().map(|token| (token, all[token as usize])).collect();
        VocabLogprobs { all, top }
    }

    pub(crate) fn of(self, token: u32) -> TokenLogprobs {
        TokenLogprobs { logprob: self.all[token as usize], top: self.top }
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
        let sum: f32 = all.all.iter().map(|x| x.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6 && all.top.len() == 3);
        assert!(VocabLogprobs::new(&[0.0, 1.0], 0).top.is_empty());
    }
}
