//! Gumbel noise for attention scores. The noise of a query head, row and token does not depend on the order of
//! computation or on the number of threads.

use super::input::Attention;
use super::query_blocks::QueryBlock;
use crate::simd::KEYS;

/// Noise of a call of [`Cpu::noisy_attention_mass`](crate::Cpu::noisy_attention_mass): `g = −ln(−ln U)` is added to the
/// logits, which are then divided by the temperature `τ`. `U` is a hash of seed, query head, row and token.
#[derive(Clone, Copy, Debug)]
pub struct GumbelNoise<'a> {
    /// Differs from run to run and from layer to layer. Without a seed there is no noise.
    pub seed: Option<u64>,
    /// `τ`, above 0.
    pub temperature: f32,
    /// Position of each row.
    pub query_positions: &'a [u32],
    /// Position of the token in each slot, kv_heads × capacity.
    pub key_positions: &'a [u32],
}

impl GumbelNoise<'_> {
    pub(super) fn check(&self, a: &Attention) {
        assert!(self.temperature > 0.0, "the temperature is above 0");
        assert_eq!(self.query_positions.len(), a.visible.len(), "one position a row");
        assert_eq!(
            self.key_positions.len(),
            a.kv_heads * a.capacity,
            "one position for each KV head and slot"
        );
    }

    /// `U` of query head `head` of row `row` and the token at index `token` of [`GumbelNoise::key_positions`]: above 0 and below
    /// 1; none without a seed.
    pub fn uniform(&self, head: usize, row: usize, token: usize) -> Option<f32> {
        let (low, high) = self.keys(self.seed?, head, row);
        Some(uniform(self.key_positions[token], low, high))
    }

    /// Halves of the hash of a query head and a row.
    fn keys(&self, seed: u64, head: usize, row: usize) -> (u32, u32) {
        let key = mix64(seed ^ mix64((head as u64) << 32 | u64::from(self.query_positions[row])));
        (key as u32, (key >> 32) as u32)
    }

    /// Turns the base-2 scores of query row `i` with the slots from `first` on into noisy ones. In base 2 the noise is
    /// `−log₂(−log₂ U)`, but for a constant that softmax does not see.
    #[inline(always)]
    pub(super) fn add(&self, block: &QueryBlock, i: usize, first: usize, scores: &mut [f32]) {
        let scale = 1.0 / self.temperature;
        let Some(seed) = self.seed else {
            for score in scores.iter_mut() {
                *score *= scale;
            }
            return;
        };
        let (shape, row) = (block.shape, block.row(i));
        let head = block.index(i) - row * shape.heads;
        let (low, high) = self.keys(seed, head, row);
        let tokens = &self.key_positions[block.g * shape.capacity..(block.g + 1) * shape.capacity];
        let mut positions = [0; KEYS];
        let here = &tokens[first..(first + KEYS).min(tokens.len())];
        positions[..here.len()].copy_from_slice(here);
        for (score, position) in scores.iter_mut().zip(positions) {
            let exponential = (-log2(uniform(position, low, high))).max(1e-9);
            *score = (*score - log2(exponential)) * scale;
        }
    }
}

/// Exact, and never 0 or 1.
#[inline(always)]
fn uniform(position: u32, low: u32, high: u32) -> f32 {
    let hash = mix32(mix32(position ^ low).wrapping_add(high));
    ((hash >> 9) as f32 + 0.5) * (1.0 / (1 << 23) as f32)
}

/// The finaliser of SplitMix64.
fn mix64(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The finaliser of MurmurHash3.
#[inline(always)]
fn mix32(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
    x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
    x ^ x >> 16
}

/// log₂ x of a positive normal number, relative error about 1e-6 (Cephes' `logf` coefficients). Plain arithmetic, so that a
/// loop of it becomes vectors.
#[inline(always)]
fn log2(x: f32) -> f32 {
    // The mantissa between √½ and √2.
    let exponent = (x.to_bits() as i32).wrapping_sub(0x3f35_04f3) >> 23;
    let f = f32::from_bits((x.to_bits() as i32).wrapping_sub(exponent << 23) as u32) - 1.0;
    let mut p = 7.037_683_6e-2;
    for c in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        p = p * f + c;
    }
    let ln = f - 0.5 * f * f + f * f * f * p;
    exponent as f32 + ln * std::f32::consts::LOG2_E
}

#[cfg(test)]
mod tests {
    #[test]
    fn logarithms_are_right() {
        for x in [1e-9f32, 3e-8, 0.1, 0.499, 0.706, 0.708, 0.999_999_94, 1.0, 1.5, 24.0] {
            let (got, expected) = (f64::from(super::log2(x)), f64::from(x).log2());
            assert!((got - expected).abs() <= 2e-6 * expected.abs(), "{x}: {got} {expected}");
        }
    }
}
