//! YaRN: rotary frequencies for contexts longer than those of the pretraining, <https://arxiv.org/abs/2309.00071>.

use std::f64::consts::TAU;

use super::RopeScaling;
use super::checks::MAX_HEAD_DIM;

/// The parameters of YaRN, by transformers' names.
#[derive(Debug)]
pub(super) struct Yarn {
    pub(super) theta: f64,
    pub(super) rotary_dim: usize,
    pub(super) factor: f64,
    pub(super) original_context: usize,
    /// Pairs that turn more often than this in the original context keep their frequency.
    pub(super) beta_fast: f64,
    /// Pairs that turn less often than this have it divided by `factor`.
    pub(super) beta_slow: f64,
    /// Whether the bounds between the pairs are whole numbers.
    pub(super) truncate: bool,
    /// The factor of cosine and sine, if a file gives it.
    pub(super) attention_factor: Option<f64>,
    /// `mscale` and `mscale_all_dim`, which give that factor in DeepSeek's way.
    pub(super) mscales: Option<(f64, f64)>,
}

impl Yarn {
    /// The divisor of each frequency, the factor of cosine and sine, and the context; an error if they cannot be told.
    pub(super) fn scaling(&self) -> Result<RopeScaling, String> {
        if !(self.factor.is_finite() && self.factor > 0.0) {
            return Err(format!("the rope factor is {}, not a positive number", self.factor));
        }
        if self.original_context == 0 {
            return Err("the rope scaling's original context is 0".to_owned());
        }
        // The divisors take memory before the configuration is checked as a whole.
        if self.rotary_dim > MAX_HEAD_DIM {
            return Err(format!("the rotary dimension is {}, above {MAX_HEAD_DIM}", self.rotary_dim));
        }
        let dim = self.rotary_dim as f64;
        let (mut low, mut high) = (self.bound(self.beta_fast), self.bound(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let divisor = |pair: usize| {
            let scaled = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (scaled / self.factor + 1.0 - scaled).recip()
        };
        let mscale = |by: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * by * self.factor.ln() + 1.0 };
        let attention_factor = self.attention_factor.unwrap_or_else(|| match self.mscales {
            Some((some, all)) => mscale(some) / mscale(all),
            None => mscale(1.0),
        });
        let divisors = (0..self.rotary_dim / 2).map(divisor).collect();
        // A product beyond all bounds is refused as a length of the context.
        let context = (self.original_context as f64 * self.factor).round() as usize;
        Ok(RopeScaling::Yarn { divisors, attention_factor, context })
    }

    /// The pair of values, as a fraction, that turns `turns` times in the original context.
    fn bound(&self, turns: f64) -> f64 {
        let per_radian = self.original_context as f64 / (turns * TAU);
        self.rotary_dim as f64 * per_radian.ln() / (2.0 * self.theta.ln())
    }
}
