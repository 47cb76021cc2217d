//! CacheBlend (arXiv 2405.16444): tokens whose values (or keys) at layer 1 deviate most from the cache are recomputed.
//!
//! Layer 0 runs in full; at layer 1 all rows are projected, `Δ[t] = Σ (V_new − V_old)²`, and the
//! `p = floor(r·(n−|Q|))` tokens of highest Δ go on with the question.

use refrain_kv::stats::Distance;

use crate::{FusionMethod, LayerView, Mask, Plan, PromptView, Result};

/// What deviation is measured on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metric {
    /// Values, squared differences (the authors' code).
    #[default]
    ValueL2,
    /// Keys, squared differences (LMCache). Rotation does not change it.
    KeyL2,
    /// Keys, absolute differences (UCM).
    KeyL1,
}

/// Recompute the tokens that deviate most.
#[derive(Clone, Copy, Debug)]
pub struct CacheBlend {
    /// Recompute ratio `r` of the tokens before the question.
    pub ratio: f64,
    /// What deviation is measured on.
    pub metric: Metric,
    /// Shrink the set from 1.25·r at layer 2 to 0.75·r at the last, measuring Δ again at each layer.
    pub gradual: bool,
    /// Causal mask; [`Mask::BottomRight`] only for comparing with published code.
    pub mask: Mask,
}

impl Default for CacheBlend {
    fn default() -> Self {
        CacheBlend { ratio: 0.15, metric: Metric::default(), gradual: false, mask: Mask::default() }
    }
}

/// The layer at which deviation is measured.
const CHECK_LAYER: usize = 1;

impl CacheBlend {
    /// Ratio of the rows that go on from `layer` of `layers`.
    fn ratio_at(&self, layer: usize, layers: usize) -> f64 {
        if !self.gradual {
            return self.ratio;
        }
        let steps = layers.saturating_sub(3).max(1) as f64;
        let step = layer.saturating_sub(CHECK_LAYER + 1) as f64;
        self.ratio * (1.25 - 0.5 * (step / steps).min(1.0))
    }
}

impl FusionMethod for CacheBlend {
    fn plan(&self, prompt: &PromptView<'_>) -> Result<Plan> {
        prompt.check()?;
        let last = if self.gradual { prompt.layers } else { CHECK_LAYER + 1 };
        let narrows = if prompt.reusable() == 0 { Vec::new() } else { (CHECK_LAYER..last).collect() };
        Ok(Plan { rows: prompt.rows_after_system(), narrows, mask: self.mask, ..Plan::default() })
    }

    fn narrow(&self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        let (values, distance) = match self.metric {
            Metric::ValueL2 => (true, Distance::L2),
            Metric::KeyL2 => (false, Distance::L2),
            Metric::KeyL1 => (false, Distance::L1),
        };
        let scores = layer.deviation(values, distance)?;
        let count = layer.prompt.count(self.ratio_at(layer.layer, layer.prompt.layers));
        Ok(layer.keep(&layer.candidates(), &scores, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradual_ratio_falls_linearly_and_averages_the_ratio() {
        let method = CacheBlend { gradual: true, ratio: 0.2, ..CacheBlend::default() };
        let ratios: Vec<f64> = (2..10).map(|layer| method.ratio_at(layer, 10)).collect();
        assert!((ratios[0] - 0.25).abs() < 1e-6 && (ratios[7] - 0.15).abs() < 1e-6);
        assert!((ratios.iter().sum::<f64>() / 8.0 - 0.2).abs() < 1e-6);
        assert_eq!(method.ratio_at(1, 10), method.ratio_at(2, 10));
    }
}
