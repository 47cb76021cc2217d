//! Rotary frequencies of a specification, with its scaling.

use std::f64::consts::TAU;

use refrain_kv::Rope;

use crate::config::{RopeScaling, RopeSpec};

/// Frequencies for a request of `total` tokens (prompt and answer), frozen for all of it.
///
/// `θ_i = base^(−2i/rotary_dim)`, scaled as the specification says. LongRoPE picks its long factors where `total`
/// passes the original context.
pub(crate) fn rope(spec: &RopeSpec, total: usize) -> Rope {
    let half = spec.rotary_dim / 2;
    let plain = |i: usize| spec.theta.powf(-((2 * i) as f64) / spec.rotary_dim as f64);
    let mut scale = 1.0;
    let frequencies: Vec<f64> = match &spec.scaling {
        RopeScaling::None => (0..half).map(plain).collect(),
        RopeScaling::NoRope => vec![0.0; half],
        RopeScaling::Linear { factor } => (0..half).map(|i| plain(i) / factor).collect(),
        RopeScaling::Factors(factors) => {
            (0..half).map(|i| plain(i) / factors.get(i).map_or(1.0, |f| f64::from(*f))).collect()
        }
        RopeScaling::Yarn { divisors, attention_factor, .. } => {
            scale = *attention_factor;
            (0..half).map(|i| plain(i) / divisors.get(i).copied().unwrap_or(1.0)).collect()
        }
        RopeScaling::LongRope { short, long, original_context, attention_factor } => {
            scale = *attention_factor;
            let factors = if total > *original_context { long } else { short };
            (0..half).map(|i| plain(i) / factors.get(i).copied().unwrap_or(1.0)).collect()
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let original = *original_context as f64;
            let scaled = |frequency: f64| {
                let wavelength = TAU / frequency;
                let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                frequency * ((1.0 - smooth) / factor + smooth)
            };
            (0..half).map(|i| scaled(plain(i))).collect()
        }
    };
    Rope::new(frequencies.into_iter().map(|f| f as f32).collect(), scale as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yarn_divides_frequencies_and_multiplies_cosine_and_sine() {
        let scaling = RopeScaling::Yarn { divisors: vec![1.0, 4.0], attention_factor: 1.5, context: 8 };
        let spec = RopeSpec { theta: 100.0, rotary_dim: 4, scaling };
        for total in [8, 1 << 20] {
            let mut x = [1.0, 1.0, 0.0, 0.0];
            rope(&spec, total).rotate(&mut x, 4, 3);
            // Pair i turns by 3 · 100^(−i/2), divided.
            let expected = [3.0f64, 0.3 / 4.0].map(|angle| [1.5 * angle.cos(), 1.5 * angle.sin()]);
            let expected = [expected[0][0], expected[1][0], expected[0][1], expected[1][1]];
            assert!(
                x.iter().zip(expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5),
                "{x:?} {expected:?}"
            );
        }
    }
}
