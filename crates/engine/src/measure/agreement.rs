//! Agreement of two models of the next token.

use std::sync::OnceLock;

use serde::Serialize;

use crate::engine::Engine;
use crate::sampling::argmax;

/// The logarithm of a probability that no sum of a vocabulary's terms shows.
const NEGLIGIBLE: f64 = -50.0;

/// Agreement of distributions of the next token with exact ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Mean over positions of `KL(exact ‖ other)`, in nats.
    pub kl: f64,
    /// `KL(exact ‖ other)` at the first position, which the answer's first token is chosen from; 0 of no position.
    pub kl_first: f64,
    /// Greatest difference of a logit from the exact one, over the greatest exact one's absolute value.
    pub apart: f64,
    /// Share of positions at which both have the same likeliest token.
    pub top1: f64,
    /// Positions compared.
    pub positions: usize,
}

impl Engine {
    /// Agreement of `logits` with the `expected` ones, both `positions × vocab`.
    pub(crate) fn agreement(&self, expected: &[f32], logits: &[f32]) -> Agreement {
        let vocab = self.decoder().config().vocab;
        let pairs = || expected.chunks(vocab).zip(logits.chunks(vocab));
        let positions = expected.len() / vocab;
        let same = pairs().filter(|(p, q)| argmax(p) == argmax(q)).count();
        let divergences: Vec<OnceLock<f64>> = pairs().map(|_| OnceLock::new()).collect();
        self.decoder().device().parallel(divergences.len(), &|i| {
            let row = i * vocab..(i + 1) * vocab;
            let _ = divergences[i].set(divergence(&expected[row.clone()], &logits[row]));
        });
        let divergences: Vec<f64> = divergences.into_iter().filter_map(OnceLock::into_inner).collect();
        let kl = divergences.iter().sum::<f64>() / positions as f64;
        let kl_first = divergences.first().copied().unwrap_or(0.0);
        let apart = apart(expected, logits);
        Agreement { kl, kl_first, apart, top1: same as f64 / positions as f64, positions }
    }
}

/// The greatest difference of elements over the greatest absolute value of `p`. What is no number stays so.
fn apart(p: &[f32], q: &[f32]) -> f64 {
    let most = |values: &mut dyn Iterator<Item = f32>| {
        values.fold(0.0f32, |most, x| if x.abs() > most || x.is_nan() { x.abs() } else { most })
    };
    let greatest = most(&mut p.iter().copied());
    let difference = most(&mut p.iter().zip(q).map(|(p, q)| p - q));
    if difference == 0.0 { 0.0 } else { f64::from(difference) / f64::from(greatest) }
}

/// `KL(p ‖ q)` in nats of the softmax of two rows of logits.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let normaliser = |logits: &[f32]| {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        max + logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln()
    };
    let (p_norm, q_norm) = (normaliser(p), normaliser(q));
    let term = |(p, q): (&f32, &f32)| {
        let (log_p, log_q) = (f64::from(*p) - p_norm, f64::from(*q) - q_norm);
        // Most of a vocabulary is so unlikely that it adds nothing.
        if log_p < NEGLIGIBLE && log_q.is_finite() { 0.0 } else { log_p.exp() * (log_p - log_q) }
    };
    let sum: f64 = p.iter().zip(q).map(term).sum();
    // Rounding may fall below 0; what is no number stays so.
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    #[test]
    fn logits_are_apart_by_their_greatest_difference() {
        assert_eq!(super::apart(&[1.0, -4.0, 2.0], &[1.5, -4.0, 1.0]), 0.25);
        assert_eq!(super::apart(&[0.0, 0.0], &[0.0, 0.0]), 0.0);
        assert!(super::apart(&[1.0, 2.0, 3.0], &[1.0, f32::NAN, 9.0]).is_nan());
    }

    #[test]
    fn divergence_is_zero_for_shifted_logits_and_right_for_two_outcomes() {
        assert!(super::divergence(&[1.0, 2.0, 3.0], &[3.0, 4.0, 5.0]) < 1e-12);
        let got = super::divergence(&[0.0, 0.0], &[3f32.ln(), 0.0]);
        assert!(super::divergence(&[0.0, f32::NAN], &[1.0, 2.0]).is_nan());
        let expected = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        assert!((got - expected).abs() < 1e-6, "{got} {expected}");
    }
}
