//! CacheBlend (arXiv 2405.16444): tokens whose values (or keys) at layer 1 deviate most from the cache are recomputed.
//!
//! Layer 0 runs in full; at layer 1 all rows are projected, `Δ[t] = Σ (V_new − V_old)²`, and the
//! `p = floor(r·(n−|Q|))` tokens of highest Δ go on with the question.

use std::sync::Arc;

use refrain_kv::stats::Distance;
use refrain_registry::Options;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::{planned, selecting};
use crate::{CachedTensor, FusionMethod, Mask, Needs, Pass, PassPlan, PrefillInputs, PromptLayout, Result};

/// The measure of deviation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Metric {
    /// Values, squared differences (the authors' code).
    #[default]
    #[serde(rename = "v_l2")]
    ValueL2,
    /// Keys, squared differences (LMCache). Rotation does not change it.
    #[serde(rename = "k_l2")]
    KeyL2,
    /// Keys, absolute differences (UCM).
    #[serde(rename = "k_l1")]
    KeyL1,
}

/// Recompute the tokens that deviate most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CacheBlend {
    /// Share of the tokens before the question that is recomputed.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub ratio: f64,
    /// Share of the documents' rows (tokens × layers) that is computed, the layers in full included; in place of `ratio` where it is
    /// not 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub charge: f64,
    /// The measure of deviation: values or keys, by squared or absolute differences.
    pub metric: Metric,
    /// Shrink the recomputed set with depth, from 1.25 to 0.75 of the ratio, measuring deviation again at each layer.
    pub gradual: bool,
    /// Causal mask; bottom_right lets rows see later keys, only to compare with published code.
    pub mask: Mask,
}

impl Default for CacheBlend {
    fn default() -> Self {
        CacheBlend {
            ratio: 0.15,
            charge: 0.0,
            metric: Metric::default(),
            gradual: false,
            mask: Mask::default(),
        }
    }
}

impl Options for CacheBlend {
    const NAME: &'static str = "cache_blend";
}

/// The layer at which deviation is measured.
const CHECK_LAYER: usize = 1;

impl CacheBlend {
    /// Share of the tokens before the question that is recomputed, on average over the layers that follow the check.
    fn mean_ratio(&self, layout: &PromptLayout) -> f64 {
        match self.charge {
            0.0 => self.ratio,
            charge => {
                let before = layout.len() - layout.question.len();
                layout.count_for_charge(charge, CHECK_LAYER + 1, 0) as f64 / before.max(1) as f64
            }
        }
    }

    /// Share of the mean ratio that `layer` of `layers` computes, from the first that follows the check on. Its mean over these is 1.
    fn share_at(&self, layer: usize, layers: usize) -> f64 {
        let steps = layers.saturating_sub(CHECK_LAYER + 2);
        if !self.gradual || steps == 0 {
            return 1.0;
        }
        1.25 - 0.5 * (layer - CHECK_LAYER - 1) as f64 / steps as f64
    }
}

impl FusionMethod for CacheBlend {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        let layout = &inputs.layout;
        layout.check()?;
        let deviation = match self.metric {
            Metric::ValueL2 => (CachedTensor::Values, Distance::L2),
            Metric::KeyL2 => (CachedTensor::Keys, Distance::L2),
            Metric::KeyL1 => (CachedTensor::Keys, Distance::L1),
        };
        if layout.reusable() == 0 {
            return Ok(planned(PassPlan::new(layout.required_tokens())));
        }
        let mut plan = PassPlan { mask: self.mask, ..PassPlan::new(layout.full_tokens()) };
        // No layer follows the last one.
        let last = if self.gradual { layout.layers - 1 } else { CHECK_LAYER + 1 }.max(CHECK_LAYER + 1);
        let needs = Needs { deviation: Some(deviation), ..Needs::default() };
        plan.checks = (CHECK_LAYER..last).map(|layer| (layer, needs)).collect();
        let (method, ratio) = (*self, self.mean_ratio(layout));
        Ok(selecting(plan, move |layer| {
            let share = method.share_at(layer.layer + 1, layer.layout.layers);
            let count = layer.layout.count(ratio * share);
            layer.best(&layer.candidates(), layer.deviation, count)
        }))
    }
}

#[cfg(test)]
mod tests {
    use refrain_kv::Span;

    use super::*;
    use crate::ChunkSpan;

    #[test]
    fn gradual_ratio_falls_linearly_and_averages_the_ratio() {
        let method = CacheBlend { gradual: true, ratio: 0.2, ..CacheBlend::default() };
        let ratio_at = |layer| method.ratio * method.share_at(layer, 10);
        let ratios: Vec<f64> = (2..10).map(ratio_at).collect();
        assert!((ratios[0] - 0.25).abs() < 1e-6 && (ratios[7] - 0.15).abs() < 1e-6);
        assert!((ratios.iter().sum::<f64>() / 8.0 - 0.2).abs() < 1e-6);
        assert_eq!(method.share_at(2, 3), 1.0, "one layer follows the check");
    }

    #[test]
    fn a_charge_is_what_all_layers_take_together() {
        let chunk = ChunkSpan { span: Span::new(0, 1000), ..ChunkSpan::default() };
        let layout = PromptLayout {
            layers: 10,
            system: Span::new(0, 0),
            system_cached: true,
            chunks: vec![chunk],
            question: Span::new(1000, 1010),
        };
        for gradual in [false, true] {
            let method = CacheBlend { gradual, charge: 0.4, ..CacheBlend::default() };
            let mean = method.mean_ratio(&layout);
            let rows = |layer: usize| layout.count(mean * method.share_at(layer, 10));
            let all = 2 * 1000 + (2..10).map(rows).sum::<usize>();
            assert!((3992..=4000).contains(&all), "{all} rows of 10000, gradual: {gradual}");
        }
    }
}
