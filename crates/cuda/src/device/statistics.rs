//! Statistics of attention, computed on the GPU and read as short vectors.

use std::ops::Range;

use refrain_kernels::{CachedAttention, Dtype, Floats, GumbelNoise, WeightAggregation};

use super::attention::{
    ENTRIES, NoiseTables, Problem, THREADS, TILE, for_tensor_cores, tensor_bytes, tensor_tile, tile_stride,
};
use super::block::Block;
use super::context::CudaDevice;
use super::launch::{for_dtype, size};
use super::tensors::{floats, kv_block};
use crate::driver::{Arg, Driver};

/// Numbers between kernels that are held at once.
pub(super) const HELD: usize = 1 << 24;
/// Blocks that fill a GPU. Where there are fewer, the keys or the rows of each are shared out.
const BLOCKS: usize = 512;
/// Slots that a piece of keys has at least.
const PIECE: usize = 256;
/// Columns of a stage of tensor-core kernels that weigh slots.
const COLUMNS: usize = 64;
/// Rows that a share of those that weigh slots has at least.
const SHARE: usize = 64;

/// Bytes of shared memory for a tile of keys.
pub(super) fn tile_bytes(head_dim: usize) -> usize {
    4 * TILE * tile_stride(head_dim)
}

/// Rows of queries or keys that a block of tensor-core kernels keeps: 4 strips.
fn strips(head_dim: usize) -> usize {
    if head_dim > 128 { 64 } else { 128 }
}

/// Shares of the rows that weigh `count` slots, on tensor cores: more than one where the slots make few blocks.
fn shares(a: &CachedAttention<'_>, count: usize) -> usize {
    let blocks = count.div_ceil(strips(a.head_dim)) * a.kv_heads;
    (BLOCKS / blocks.max(1)).min(a.visible.len() / SHARE).max(1)
}

/// Log-sum-exps of all rows of `a.q`, from the first row that attends on.
fn given<'a, D: Driver>(a: &CachedAttention<'_>, lse: &'a Floats) -> Arg<'a, D::Memory> {
    assert_eq!(lse.len(), a.q.len() / a.head_dim, "one sum for each row of q and head");
    floats::<D>(lse).arg(4 * a.first_row * a.heads)
}

impl<D: Driver> CudaDevice<D> {
    /// Attention mass of `slots`, kv_heads × slots: from `lse` where it is given, otherwise from sums over what rows see from the first
    /// of the slots on.
    pub(super) fn read_mass(
        &self,
        a: &CachedAttention<'_>,
        lse: Option<&Floats>,
        noise: Option<&GumbelNoise<'_>>,
        slots: Range<usize>,
        sums: &mut [f32],
    ) {
        assert_eq!(sums.len(), a.kv_heads * slots.len(), "one sum for each KV head and slot");
        assert!(slots.end <= a.capacity, "slots are below {}", a.capacity);
        if a.visible.is_empty() {
            return sums.fill(0.0);
        }
        let (problem, noise) = (Problem::new(self, a), noise.map(|noise| NoiseTables::new(self, noise, a)));
        let own;
        let lse = match lse {
            Some(lse) => given::<D>(a, lse),
            None => {
                own = self.log_sum_exps(a, &problem, noise.as_ref(), slots.start);
                own.arg(0)
            }
        };
        let out = self.block(4 * sums.len());
        match for_tensor_cores!(a, "tensor_mass").filter(|_| noise.is_none()) {
            Some(kernel) => {
                let (of, shares) = ((slots.start, slots.len()), shares(a, slots.len()));
                if shares == 1 {
                    self.weigh(kernel, a, &problem, lse, of, &out, None);
                } else {
                    let parts = self.block(4 * shares * sums.len());
                    self.weigh(kernel, a, &problem, lse, of, &parts, None);
                    let args = [parts.arg(0), out.arg(0), size(shares), size(1), size(sums.len())];
                    self.launch_each("sum_columns", sums.len(), &args);
                }
            }
            None => {
                let mut args = problem.args([lse, out.arg(0), size(slots.start), size(slots.len())]);
                args.extend(noise.iter().flat_map(|noise| noise.args()));
                let kernel = match noise {
                    None => for_dtype!(a.k.dtype(), "attention_mass"),
                    Some(_) => for_dtype!(a.k.dtype(), "noisy_attention_mass"),
                };
                let grid = [slots.len().div_ceil(TILE), a.kv_heads, 1];
                self.launch(kernel, grid, THREADS, tile_bytes(a.head_dim) + 4 * 4 * 32, &args);
            }
        }
        self.read(&out, 0, sums);
    }

    /// The log-sum-exps of an attention over what rows see from `first_slot` on, rows × heads. Values are not read.
    fn log_sum_exps(
        &self,
        a: &CachedAttention<'_>,
        problem: &Problem<'_, D>,
        noise: Option<&NoiseTables<D>>,
        first_slot: usize,
    ) -> Block<D> {
        let entries = a.visible.len() * a.heads;
        let lse = self.block(4 * entries);
        let Some(kernel) = for_tensor_cores!(a, "tensor_sums").filter(|_| noise.is_none()) else {
            self.log_sum_exp(problem, noise, first_slot, lse.arg(0));
            return lse;
        };
        let from = a.visible.iter().map(|seen| seen.0).min().unwrap_or(0) as usize;
        let to = a.visible.iter().map(|seen| seen.1).max().unwrap_or(0) as usize;
        let high = (entries / a.kv_heads).div_ceil(strips(a.head_dim));
        let most = to.saturating_sub(from.max(first_slot)) / PIECE;
        let pieces = (BLOCKS / (high * a.kv_heads).max(1)).min(most).max(1);
        let launch = |lse| {
            let args = [
                problem.q,
                kv_block::<D>(a.k).arg(0),
                problem.visible.arg(0),
                lse,
                size(a.visible.len()),
                size(a.heads),
                size(a.kv_heads),
                size(a.capacity),
                Arg::F32(a.scale),
                size(first_slot),
            ];
            // Queries, and two stages of keys.
            let shared = tensor_bytes(strips(a.head_dim) + 2 * tensor_tile(a.head_dim), a.head_dim);
            self.launch(kernel, [high, a.kv_heads, pieces], THREADS, shared, &args);
        };
        if pieces == 1 {
            launch(lse.arg(0));
        } else {
            let parts = self.block(4 * pieces * entries);
            launch(parts.arg(0));
            let args = [parts.arg(0), lse.arg(0), size(pieces), size(entries)];
            self.launch_each("merge_sums", entries, &args);
        }
        lse
    }

    /// Queries in the keys' type of 16 bits, each `together` heads of a row summed.
    pub(super) fn rounded_queries(
        &self,
        a: &CachedAttention<'_>,
        problem: &Problem<'_, D>,
        together: usize,
    ) -> Block<D> {
        let elements = a.visible.len() * a.width() / together;
        let rounded = self.block(2 * elements);
        let kernel = if a.k.dtype() == Dtype::F16 { "sum_heads_f16" } else { "sum_heads_bf16" };
        let args = [problem.q, rounded.arg(0), size(elements / 4), size(together), size(a.head_dim)];
        self.launch_each(kernel, elements / 4, &args);
        rounded
    }

    /// Weighs `count` slots from `first` on, or those of a list, on tensor cores. A kernel that takes a list gets `Arg::Null` for none.
    #[allow(clippy::too_many_arguments)]
    fn weigh(
        &self,
        kernel: &'static str,
        a: &CachedAttention<'_>,
        problem: &Problem<'_, D>,
        lse: Arg<'_, D::Memory>,
        (first, count): (usize, usize),
        out: &Block<D>,
        list: Option<Arg<'_, D::Memory>>,
    ) {
        let queries = self.rounded_queries(a, problem, 1);
        let mut args = vec![
            queries.arg(0),
            kv_block::<D>(a.k).arg(0),
            problem.visible.arg(0),
            size(a.visible.len()),
            size(a.heads),
            size(a.kv_heads),
            size(a.capacity),
            Arg::F32(a.scale),
            lse,
            out.arg(0),
            size(first),
            size(count),
        ];
        args.extend(list);
        // Keys, and two stages of queries and of what there is of each.
        let shared = tensor_bytes(strips(a.head_dim) + 2 * COLUMNS, a.head_dim) + 2 * COLUMNS * 16;
        let grid = [count.div_ceil(strips(a.head_dim)), a.kv_heads, shares(a, count)];
        self.launch(kernel, grid, THREADS, shared, &args);
    }

    /// Weights of each row, from `lse` as in [`CudaDevice::read_mass`].
    pub(super) fn read_row_weights(
        &self,
        a: &CachedAttention<'_>,
        lse: Option<&Floats>,
        slots: Range<usize>,
        weights: &mut [f32],
    ) {
        let count = slots.len();
        let all = a.kv_heads * a.visible.len() * count;
        assert_eq!(weights.len(), all, "one weight for each KV head, row and slot");
        assert!(slots.end <= a.capacity, "slots are below {}", a.capacity);
        let (problem, out) = (Problem::new(self, a), self.block(4 * weights.len()));
        let own;
        let lse = match lse {
            Some(lse) => given::<D>(a, lse),
            None => {
                own = self.log_sum_exps(a, &problem, None, slots.start);
                own.arg(0)
            }
        };
        self.weigh_rows(a, &problem, lse, (slots.start, count), &out);
        self.read(&out, 0, weights);
    }

    /// Weights of each row, kv_heads × rows × `count`, of the slots from `first` on.
    fn weigh_rows(
        &self,
        a: &CachedAttention<'_>,
        problem: &Problem<'_, D>,
        lse: Arg<'_, D::Memory>,
        (first, count): (usize, usize),
        out: &Block<D>,
    ) {
        match for_tensor_cores!(a, "tensor_weights") {
            Some(kernel) => self.weigh(kernel, a, problem, lse, (first, count), out, Some(Arg::Null)),
            None => {
                let args = problem.args([lse, out.arg(0), size(first), size(count)]);
                let grid = [count.div_ceil(TILE), a.visible.len().div_ceil(ENTRIES), a.kv_heads];
                let kernel = for_dtype!(a.k.dtype(), "row_weights");
                self.launch(kernel, grid, THREADS, tile_bytes(a.head_dim), &args);
            }
        }
    }

    /// Scores of slots from the weights of each row, of which at most `held` are held at once, or those of a slot.
    pub(super) fn read_aggregated_weights(
        &self,
        a: &CachedAttention<'_>,
        slots: Range<usize>,
        aggregation: WeightAggregation,
        held: usize,
        scores: &mut [f32],
    ) {
        assert_eq!(scores.len(), slots.len(), "one score for each slot");
        assert!(slots.end <= a.capacity, "slots are below {}", a.capacity);
        if a.visible.is_empty() {
            return scores.fill(0.0);
        }
        let (problem, out) = (Problem::new(self, a), self.block(4 * scores.len()));
        let (lse, rows) = (self.log_sum_exps(a, &problem, None, slots.start), a.visible.len());
        let (heads, is_max) = match aggregation {
            WeightAggregation::L2 => (a.heads, 0),
            WeightAggregation::Max => (a.heads / a.kv_heads, 1),
        };
        let each = (held / (a.kv_heads * rows)).clamp(1, slots.len().max(1));
        let weights = self.block(4 * a.kv_heads * rows * each);
        for first in (0..slots.len()).step_by(each) {
            let count = each.min(slots.len() - first);
            self.weigh_rows(a, &problem, lse.arg(0), (slots.start + first, count), &weights);
            let (weights, out) = (weights.arg(0), out.arg(4 * first));
            let args = [weights, out, size(a.kv_heads), size(rows), size(count), size(heads), size(is_max)];
            self.launch("aggregate_weights", [count.div_ceil(32), 1, 1], 256, 4 * 8 * 32, &args);
        }
        self.read(&out, 0, scores);
    }

    pub(super) fn read_column_weights(
        &self,
        a: &CachedAttention<'_>,
        lse: &Floats,
        slots: &[u32],
        weights: &mut [f32],
    ) {
        let rows = a.visible.len();
        assert_eq!(weights.len(), slots.len() * rows, "one weight for each slot and row");
        assert!(slots.iter().all(|slot| (*slot as usize) < a.capacity), "slots are below {}", a.capacity);
        let (problem, indices) = (Problem::new(self, a), self.block_of(slots));
        let (lse, out) = (given::<D>(a, lse), self.block(4 * weights.len()));
        match for_tensor_cores!(a, "tensor_weights") {
            Some(kernel) => {
                let each = (HELD / (a.kv_heads * rows).max(1)).max(1);
                for first in (0..slots.len()).step_by(each) {
                    let count = each.min(slots.len() - first);
                    let parts = self.block(4 * a.kv_heads * rows * count);
                    self.weigh(kernel, a, &problem, lse, (0, count), &parts, Some(indices.arg(4 * first)));
                    let out = out.arg(4 * first * rows);
                    let args = [parts.arg(0), out, size(a.kv_heads), size(rows), size(count)];
                    self.launch_each("sum_columns", rows * count, &args);
                }
            }
            None => {
                let args = problem.args([lse, indices.arg(0), out.arg(0)]);
                let grid = [slots.len(), rows.div_ceil(THREADS as usize), 1];
                self.launch(for_dtype!(a.k.dtype(), "column_weights"), grid, THREADS, 0, &args);
            }
        }
        self.read(&out, 0, weights);
    }
}

#[cfg(all(test, feature = "emulate"))]
mod tests;
