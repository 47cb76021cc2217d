//! Statistics of attention, computed on the GPU and read as short vectors.

use std::ops::Range;

use refrain_kernels::{CachedAttention, Floats, GumbelNoise, HeadKeys, KvBuffer};

use super::attention::{
    ENTRIES, NoiseTables, Problem, THREADS, TILE, for_tensor_cores, tensor_bytes, tensor_tile, tile_stride,
};
use super::block::Block;
use super::context::CudaDevice;
use super::launch::{for_dtype, narrow, size};
use super::tensors::{floats, kv_block};
use crate::driver::{Arg, Driver};

/// Concatenated logits that are held at once.
const LOGITS: usize = 1 << 24;

/// Bytes of shared memory for a tile of keys.
fn tile_bytes(head_dim: usize) -> usize {
    4 * TILE * tile_stride(head_dim)
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
        let kernel = for_tensor_cores!(a, "tensor_mass").filter(|_| noise.is_none());
        let (problem, noise) = (Problem::new(self, a), noise.map(|noise| NoiseTables::new(self, noise, a)));
        let (scratch, tensor_sums);
        let lse = match lse {
            Some(lse) => {
                assert_eq!(lse.len(), a.q.len() / a.head_dim, "one sum for each row of q and head");
                floats::<D>(lse).arg(4 * a.first_row * a.heads)
            }
            None if kernel.is_some() => {
                tensor_sums = self.attention_sums(a, slots.start);
                floats::<D>(&tensor_sums).arg(4 * a.first_row * a.heads)
            }
            None => {
                scratch = self.block(4 * a.visible.len() * a.heads);
                self.log_sum_exp(&problem, noise.as_ref(), slots.start, scratch.arg(0));
                scratch.arg(0)
            }
        };
        let (out, dtype) = (self.block(4 * sums.len()), a.k.dtype());
        let mut args = problem.args([lse, out.arg(0), size(slots.start), size(slots.len())]);
        match (kernel, &noise) {
            (Some(kernel), _) => {
                let tile = tensor_tile(a.head_dim);
                let shared = tensor_bytes(tile, a.head_dim) + 4 * 4 * tile;
                self.launch(kernel, [slots.len().div_ceil(tile), a.kv_heads, 1], THREADS, shared, &args);
            }
            (None, noise) => {
                args.extend(noise.iter().flat_map(|noise| noise.args()));
                let kernel = match noise {
                    None => for_dtype!(dtype, "attention_mass"),
                    Some(_) => for_dtype!(dtype, "noisy_attention_mass"),
                };
                let grid = [slots.len().div_ceil(TILE), a.kv_heads, 1];
                self.launch(kernel, grid, THREADS, tile_bytes(a.head_dim) + 4 * 4 * 32, &args);
            }
        }
        self.read(&out, 0, sums);
    }

    /// The log-sum-exps of an attention over what rows see from `first_slot` on, rows of q × heads, on tensor cores. Its output is dropped.
    fn attention_sums(&self, a: &CachedAttention<'_>, first_slot: usize) -> Floats {
        let first = narrow(first_slot);
        let visible: Vec<(u32, u32)> =
            a.visible.iter().map(|(from, to)| ((*from).max(first), (*to).max(first))).collect();
        let (mut out, mut lse) = (self.new_floats(a.q.len()), self.new_floats(0));
        self.attend(&CachedAttention { visible: &visible, v: a.k, ..*a }, &mut out, Some(&mut lse));
        lse
    }

    pub(super) fn read_row_weights(&self, a: &CachedAttention<'_>, slots: Range<usize>, weights: &mut [f32]) {
        let rows = a.visible.len();
        assert_eq!(
            weights.len(),
            a.kv_heads * rows * slots.len(),
            "one weight for each KV head, row and slot"
        );
        assert!(slots.end <= a.capacity, "slots are below {}", a.capacity);
        let problem = Problem::new(self, a);
        let (lse, out) = (self.block(4 * rows * a.heads), self.block(4 * weights.len()));
        self.log_sum_exp(&problem, None, slots.start, lse.arg(0));
        let args = problem.args([lse.arg(0), out.arg(0), size(slots.start), size(slots.len())]);
        let grid = [slots.len().div_ceil(TILE), rows.div_ceil(ENTRIES), a.kv_heads];
        self.launch(for_dtype!(a.k.dtype(), "row_weights"), grid, THREADS, tile_bytes(a.head_dim), &args);
        self.read(&out, 0, weights);
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
        assert_eq!(lse.len(), a.q.len() / a.head_dim, "one sum for each row of q and head");
        assert!(slots.iter().all(|slot| (*slot as usize) < a.capacity), "slots are below {}", a.capacity);
        let (problem, indices) = (Problem::new(self, a), self.block_of(slots));
        let (lse, out) = (floats::<D>(lse).arg(4 * a.first_row * a.heads), self.block(4 * weights.len()));
        let args = problem.args([lse, indices.arg(0), out.arg(0)]);
        let grid = [slots.len(), rows.div_ceil(THREADS as usize), 1];
        self.launch(for_dtype!(a.k.dtype(), "column_weights"), grid, THREADS, 0, &args);
        self.read(&out, 0, weights);
    }

    pub(super) fn read_concat_mass(&self, a: &CachedAttention<'_>, slots: Range<usize>, sums: &mut [f32]) {
        assert_eq!(sums.len(), slots.len(), "one sum for each slot");
        let inside = |(from, to): &(u32, u32)| *from as usize >= slots.start && *to as usize <= slots.end;
        assert!(a.visible.iter().all(inside), "rows see none but these slots");
        if slots.is_empty() {
            return;
        }
        let out = self.block(4 * slots.len());
        self.zero(&out, 0, 4 * slots.len());
        let mut first_row = a.first_row;
        let (first, count) = (size(slots.start), size(slots.len()));
        for visible in a.visible.chunks((LOGITS / slots.len()).clamp(1, 4096)) {
            let rows = visible.len();
            let problem = Problem::new(self, &CachedAttention { first_row, visible, ..*a });
            let (z, lse) = (self.block(4 * rows * slots.len()), self.block(4 * rows));
            self.launch_concat_logits(a.k, &problem, (rows, slots.clone()), a.head_dim, &z);
            let visible = self.visible(visible);
            let (z, visible, lse) = (z.arg(0), visible.arg(0), lse.arg(0));
            let shared = 2 * 4 * THREADS as usize;
            self.launch("row_log_sum_exp", [rows, 1, 1], THREADS, shared, &[z, visible, lse, first, count]);
            let args = [z, visible, lse, out.arg(0), size(rows), first, count];
            self.launch_each("add_column_mass", slots.len(), &args);
            first_row += rows;
        }
        self.read(&out, 0, sums);
    }

    fn launch_concat_logits(
        &self,
        k: &KvBuffer,
        problem: &Problem<'_, D>,
        (rows, slots): (usize, Range<usize>),
        head_dim: usize,
        z: &Block<D>,
    ) {
        let args = problem.args([z.arg(0), size(slots.start), size(slots.len())]);
        let grid = [slots.len().div_ceil(TILE), rows.div_ceil(ENTRIES), 1];
        self.launch(for_dtype!(k.dtype(), "concat_logits"), grid, THREADS, tile_bytes(head_dim), &args);
    }

    pub(super) fn read_concat_logits(&self, q: &[f32], keys: HeadKeys<'_>, scale: f32, z: &mut [f32]) {
        let HeadKeys { k, head, head_dim, capacity, queries } = keys;
        let rows = q.len() / (queries * head_dim);
        let slots = z.len() / rows.max(1);
        assert_eq!(z.len(), rows * slots, "there are as many logits of each row");
        assert!(
            slots <= capacity && (head + 1) * capacity * head_dim <= k.len(),
            "slots are of a head of the cache"
        );
        let (q, out) = (self.block_of(q), self.block(4 * z.len()));
        let args = [
            q.arg(0),
            kv_block::<D>(k).arg(head * capacity * head_dim * k.dtype().size()),
            Arg::Null,
            size(rows),
            size(queries),
            size(1),
            size(capacity),
            size(head_dim),
            Arg::F32(scale),
            out.arg(0),
            size(0),
            size(slots),
        ];
        let grid = [slots.div_ceil(TILE), rows.div_ceil(ENTRIES), 1];
        self.launch(for_dtype!(k.dtype(), "concat_logits"), grid, THREADS, tile_bytes(head_dim), &args);
        self.read(&out, 0, z);
    }
}
