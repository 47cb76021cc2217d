//! Methods side by side over the same prompt.

use refrain_eviction::Eviction;
use refrain_fusion::FusionMethod;
use serde::Serialize;
use std::time::Instant;

use crate::load::Prefilled;
use crate::prefill::Watch;
use crate::{Account, Answer, Engine, Prompt, Reference, Result, Sampling, argmax};

/// One method beside vanilla.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The method as it was asked for.
    pub method: String,
    /// What its prefill took.
    pub account: Account,
    /// Vanilla's TTFT divided by its own.
    pub speedup: f64,
    /// Mean over positions of `KL(vanilla ‖ method)` of the next token's distribution, in nats.
    pub kl: f64,
    /// Share of positions at which both have the same likeliest token.
    pub top1: f64,
    /// Positions compared: vanilla's own answer, fed to every method.
    pub positions: usize,
}

/// How near some distributions of the next token are to others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Mean over positions of `KL(exact ‖ other)`, in nats.
    pub kl: f64,
    /// Share of positions at which both have the same likeliest token.
    pub top1: f64,
    /// Positions compared.
    pub positions: usize,
}

impl Engine {
    /// Compares methods, each with `eviction`, with vanilla at full attention, teacher-forced over vanilla's first `tokens`
    /// greedy answer tokens.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn compare(
        &self,
        prompt: &Prompt,
        methods: &[(String, std::sync::Arc<dyn FusionMethod>)],
        eviction: &Eviction,
        tokens: usize,
    ) -> Result<Vec<Comparison>> {
        let room = self.room(prompt, tokens, Eviction::full())?;
        let sampling = Sampling { max_tokens: tokens, ..Sampling::default() };
        let Reference { answer: Answer { account: vanilla, tokens: answer, .. }, logits: expected, .. } =
            self.reference(prompt, &sampling, tokens, false)?;
        let mut rows = Vec::new();
        for (name, method) in methods {
            let reference = name == "vanilla" && eviction.is_full();
            let (account, logits) = match reference {
                true => (vanilla.clone(), expected.clone()),
                false => self.forced(prompt, (method.as_ref(), eviction), &answer, room)?,
            };
            let Agreement { kl, top1, positions } = self.agreement(&expected, &logits);
            let speedup = vanilla.ttft / account.ttft;
            rows.push(Comparison { method: name.clone(), speedup, account, kl, top1, positions });
        }
        Ok(rows)
    }

    /// How near this engine comes to `exact`, one of the same model with another precision: both compute the whole
    /// prompt and then the first `tokens` greedy answer tokens of `exact`.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn agreement_with(&self, exact: &Engine, prompt: &Prompt, tokens: usize) -> Result<Agreement> {
        let room = self.room(prompt, tokens, Eviction::full())?;
        let sampling = Sampling { max_tokens: tokens, ..Sampling::default() };
        let expected = exact.reference(prompt, &sampling, tokens, false)?;
        let (_, logits) = self.forced(prompt, vanilla(), &expected.answer.tokens, room)?;
        Ok(self.agreement(&expected.logits, &logits))
    }

    pub(crate) fn agreement(&self, expected: &[f32], logits: &[f32]) -> Agreement {
        let vocab = self.decoder.config().vocab;
        let pairs = || expected.chunks(vocab).zip(logits.chunks(vocab));
        let positions = expected.len() / vocab;
        let same = pairs().filter(|(p, q)| argmax(p) == argmax(q)).count();
        let kl: f64 = pairs().map(|(p, q)| divergence(p, q)).sum();
        Agreement { kl: kl / positions as f64, top1: same as f64 / positions as f64, positions }
    }

    /// A method's account and its logits where vanilla chose each token of `answer`.
    fn forced(
        &self,
        prompt: &Prompt,
        way: Way<'_>,
        answer: &[u32],
        room: usize,
    ) -> Result<(Account, Vec<f32>)> {
        let (mut account, Prefilled { mut state, mut logits, .. }) = self.timed(prompt, way, room)?;
        // Step by step, as vanilla went: several at once may be rounded otherwise.
        for token in &answer[..answer.len() - 1] {
            logits.extend_from_slice(state.extend(&[*token])?);
        }
        account.count_cache(&state, way.1);
        Ok((account, logits))
    }

    /// Prefill with its account: TTFT ends with the choice of the first token.
    pub(crate) fn timed<'a>(
        &'a self,
        prompt: &Prompt,
        (method, eviction): Way<'a>,
        room: usize,
    ) -> Result<(Account, Prefilled)> {
        let started = Instant::now();
        let prefilled = self.prefill(prompt, method, eviction, room, Watch::Nothing)?;
        argmax(&prefilled.logits);
        let ttft = started.elapsed().as_secs_f64();
        let mut account = self.account(prompt, &prefilled.work, &prefilled.loaded);
        account.ttft = ttft;
        account.compute_ttft = ttft - prefilled.loaded.waited.as_secs_f64();
        account.count_cache(&prefilled.state, eviction);
        Ok((account, prefilled))
    }

    /// The account of one prefill up to its first token, for benchmarks.
    ///
    /// # Errors
    /// As for [`Engine::answer`].
    pub fn measure(
        &self,
        prompt: &Prompt,
        method: &dyn FusionMethod,
        eviction: &Eviction,
    ) -> Result<Account> {
        Ok(self.timed(prompt, (method, eviction), self.room(prompt, 1, eviction)?)?.0)
    }
}

/// Which tokens are computed, and which stay.
pub(crate) type Way<'a> = (&'a dyn FusionMethod, &'a Eviction);

/// What methods are compared with.
fn vanilla() -> Way<'static> {
    (&refrain_fusion::Vanilla, Eviction::full())
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
        log_p.exp() * (log_p - log_q)
    };
    let sum: f64 = p.iter().zip(q).map(term).sum();
    // Rounding may fall below 0; what is no number stays so.
    if sum < 0.0 { 0.0 } else { sum }
}

#[cfg(test)]
mod tests {
    #[test]
    fn divergence_is_zero_for_shifted_logits_and_right_for_two_outcomes() {
        assert!(super::divergence(&[1.0, 2.0, 3.0], &[3.0, 4.0, 5.0]) < 1e-12);
        let got = super::divergence(&[0.0, 0.0], &[3f32.ln(), 0.0]);
        assert!(super::divergence(&[0.0, f32::NAN], &[1.0, 2.0]).is_nan());
        let expected = 0.5 * (0.5f64 / 0.75).ln() + 0.5 * (0.5f64 / 0.25).ln();
        assert!((got - expected).abs() < 1e-6, "{got} {expected}");
    }
}
