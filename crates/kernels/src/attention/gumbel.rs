//! Gumbel noise for attention scores. The noise of a query head, row and token does not depend on the order of
//! computation or on the number of threads.
//!
//! Noise is drawn from a table of 65,536 quantiles in random order: a hash of the seed, the query head and the row says where a row
//! begins, and the tokens that follow one another take neighbouring entries. So the noise of a tile of keys is read at once. Entries are
//! `e^g`, rounded to `bf16`, by which a softmax at temperature 1 multiplies its exponentials.

use std::f32::consts::LOG2_E;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;
use std::sync::LazyLock;

use half::bf16;

use super::input::Attention;
use super::query_blocks::QueryBlock;
use crate::simd::KEYS;

/// Entries of the table.
const ENTRIES: usize = 1 << 16;

/// `e^g` of every entry, and of the first ones again behind the last, so that the entries of a tile of keys are neighbours.
static WEIGHTS: LazyLock<Vec<bf16>> = LazyLock::new(|| {
    let mut order: Vec<u32> = (0..ENTRIES as u32).collect();
    order.sort_by_key(|i| mix32(*i));
    let uniform = |i: &u32| (f64::from(*i) + 0.5) / ENTRIES as f64;
    let mut weights: Vec<bf16> = order.iter().map(|i| bf16::from_f64(-1.0 / uniform(i).ln())).collect();
    weights.extend_from_within(..KEYS);
    weights
});

/// `g` of every entry.
static LOGARITHMS: LazyLock<Vec<f32>> =
    LazyLock::new(|| WEIGHTS[..ENTRIES].iter().map(|weight| weight.to_f32().ln()).collect());

/// `g` of each entry of the table that Gumbel noise is drawn from, for devices that read it themselves.
pub fn gumbel_logarithms() -> &'static [f32] {
    &LOGARITHMS
}

/// Noise of a call of [`Cpu::noisy_attention_mass`](crate::Cpu::noisy_attention_mass): `g = −ln(−ln U)` is added to the
/// logits, which are then divided by the temperature `τ`.
#[derive(Clone, Copy, Debug)]
pub struct GumbelNoise<'a> {
    /// Differs from run to run and from layer to layer. Without a seed there is no noise.
    pub seed: Option<u64>,
    /// `τ`, above 0.
    pub temperature: f32,
    /// Position of each row.
    pub query_positions: &'a [u32],
    /// Position of the token in each slot, kv_heads × capacity. Without it slot `s` holds the token at position `s`.
    pub key_positions: Option<&'a [u32]>,
}

impl GumbelNoise<'_> {
    pub(super) fn check(&self, a: &Attention) {
        assert!(self.temperature > 0.0, "the temperature is above 0");
        assert_eq!(self.query_positions.len(), a.visible.len(), "one position a row");
        assert!(
            self.key_positions.is_none_or(|positions| positions.len() == a.kv_heads * a.capacity),
            "one position for each KV head and slot"
        );
    }

    /// Whether noise only multiplies the exponentials, by entries that are neighbours where slots are.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn multiplies(&self) -> bool {
        self.seed.is_some() && self.temperature == 1.0 && self.key_positions.is_none()
    }

    /// `e^g` of query head `head` of row `row` and the token in a slot of a KV head's `capacity`; none without a seed.
    pub fn weight(
        &self,
        head: usize,
        row: usize,
        (kv_head, slot): (usize, usize),
        capacity: usize,
    ) -> Option<f32> {
        let position = match self.key_positions {
            Some(positions) => positions[kv_head * capacity + slot],
            None => slot as u32,
        };
        let key = self.key(self.seed?, head, row);
        Some(WEIGHTS[entry(key, position)].to_f32())
    }

    /// The hash of a query head and a row.
    fn key(&self, seed: u64, head: usize, row: usize) -> u32 {
        mix64(seed ^ mix64((head as u64) << 32 | u64::from(self.query_positions[row]))) as u32
    }

    /// The hash of query row `i`.
    fn key_of(&self, seed: u64, block: &QueryBlock, i: usize) -> u32 {
        let row = block.row(i);
        self.key(seed, block.index(i) - row * block.shape.heads, row)
    }

    /// The hashes of at most `N` query rows, zeros behind them; none without a seed.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn keys<const N: usize>(&self, block: &QueryBlock, queries: Range<usize>) -> Option<[u32; N]> {
        let (seed, mut keys) = (self.seed?, [0; N]);
        keys.iter_mut().zip(queries).for_each(|(key, i)| *key = self.key_of(seed, block, i));
        Some(keys)
    }

    /// Turns the base-2 scores of query row `i` with the slots from `first` on into noisy ones.
    #[inline(always)]
    pub(super) fn add(&self, block: &QueryBlock, i: usize, first: usize, scores: &mut [f32]) {
        let scale = 1.0 / self.temperature;
        let Some(seed) = self.seed else {
            for score in scores.iter_mut() {
                *score *= scale;
            }
            return;
        };
        let (shape, key) = (block.shape, self.key_of(seed, block, i));
        let mut positions: [u32; KEYS] = std::array::from_fn(|slot| (first + slot) as u32);
        if let Some(all) = self.key_positions {
            let tokens = &all[block.g * shape.capacity..(block.g + 1) * shape.capacity];
            let here = &tokens[first..(first + KEYS).min(tokens.len())];
            positions[..here.len()].copy_from_slice(here);
        }
        let logarithms = &LOGARITHMS[..];
        for (score, position) in scores.iter_mut().zip(positions) {
            *score = (*score + logarithms[entry(key, position)] * LOG2_E) * scale;
        }
    }
}

/// The entry of a token's position. Each 65,536 positions begin anew, so that no two tokens always share their noise.
#[inline(always)]
pub(super) fn entry(key: u32, position: u32) -> usize {
    (mix32(key.wrapping_add(position >> 16)).wrapping_add(position) as usize) % ENTRIES
}

/// `e^g` of the 64 entries from one on: of neighbouring slots from a multiple of 64 on, where [`GumbelNoise::multiplies`].
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn tile(entry: usize) -> &'static [bf16] {
    &WEIGHTS[entry..entry + KEYS]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_the_quantiles_of_a_gumbel_distribution() {
        let mut weights: Vec<f64> = WEIGHTS[..ENTRIES].iter().map(|weight| weight.to_f64()).collect();
        let mean = weights.iter().map(|weight| weight.ln()).sum::<f64>() / ENTRIES as f64;
        assert!((mean - 0.577_2).abs() < 1e-3, "the mean is Euler's constant: {mean}");
        // Neighbours have nothing in common.
        let product: f64 = weights.windows(2).map(|w| (w[0].ln() - mean) * (w[1].ln() - mean)).sum();
        assert!((product / ENTRIES as f64).abs() < 0.02, "{product}");
        weights.sort_by(f64::total_cmp);
        let median = weights[ENTRIES / 2];
        assert!((median - 1.0 / 2f64.ln()).abs() < 0.01, "{median}");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_tile_is_the_noise_of_its_slots() {
        let queries = [5, 70_000];
        let noise =
            GumbelNoise { seed: Some(9), temperature: 1.0, query_positions: &queries, key_positions: None };
        for (row, first) in [(0, 0), (0, 65_472), (1, 65_536), (1, 1 << 20)] {
            let key = noise.key(9, 3, row);
            let expected: Vec<f32> =
                (0..KEYS).filter_map(|i| noise.weight(3, row, (1, first + i), 1 << 21)).collect();
            let tile: Vec<f32> =
                tile(entry(key, first as u32)).iter().map(|weight| weight.to_f32()).collect();
            assert_eq!(tile, expected, "row {row}, slots from {first} on");
        }
        let key = (0..).find(|key| entry(*key, 0) == ENTRIES - 1).unwrap();
        assert_eq!(tile(entry(key, 0))[..2], [WEIGHTS[ENTRIES - 1], WEIGHTS[0]], "the table is a circle");
    }
}
