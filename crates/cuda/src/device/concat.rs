//! Statistics of attention with all heads concatenated.

use std::ops::Range;

use refrain_kernels::{CachedAttention, HeadKeys, KvBuffer};

use super::attention::{ENTRIES, Problem, THREADS, TILE, for_tensor_cores, tensor_bytes};
use super::block::Block;
use super::context::CudaDevice;
use super::launch::{for_dtype, size};
use super::statistics::{HELD, tile_bytes};
use super::tensors::kv_block;
use crate::driver::{Arg, Driver};

impl<D: Driver> CudaDevice<D> {
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
        for visible in a.visible.chunks((HELD / slots.len()).clamp(1, 4096)) {
            let rows = visible.len();
            let a = CachedAttention { first_row, visible, ..*a };
            let problem = Problem::new(self, &a);
            let (z, lse) = (self.block(4 * rows * slots.len()), self.block(4 * rows));
            match for_tensor_cores!(a, "tensor_concat") {
                Some(kernel) => self.concat_on_tensor_cores(kernel, &a, &problem, slots.clone(), &z),
                None => self.launch_concat_logits(a.k, &problem, (rows, slots.clone()), a.head_dim, &z),
            }
            let (z, visible, lse) = (z.arg(0), problem.visible.arg(0), lse.arg(0));
            // Two numbers for each of 16 warps.
            self.launch("row_log_sum_exp", [rows, 1, 1], 512, 2 * 4 * 16, &[z, visible, lse, first, count]);
            let args = [z, visible, lse, out.arg(0), size(rows), first, count];
            self.launch("add_column_mass", [slots.len().div_ceil(32), 1, 1], 256, 4 * 8 * 32, &args);
            first_row += rows;
        }
        self.read(&out, 0, sums);
    }

    /// Writes z (rows × slots).
    fn concat_on_tensor_cores(
        &self,
        kernel: &'static str,
        a: &CachedAttention<'_>,
        problem: &Problem<'_, D>,
        slots: Range<usize>,
        z: &Block<D>,
    ) {
        // The heads of a group multiply one key: their queries are summed before.
        let queries = self.rounded_queries(a, problem, a.heads / a.kv_heads);
        let args = [
            queries.arg(0),
            kv_block::<D>(a.k).arg(0),
            z.arg(0),
            size(a.visible.len()),
            size(a.kv_heads),
            size(a.capacity),
            Arg::F32(a.scale),
            size(slots.start),
            size(slots.len()),
        ];
        let (rows, columns, stages) = (64, 32, if a.head_dim > 128 { 2 } else { 3 });
        let grid = [slots.len().div_ceil(columns), a.visible.len().div_ceil(rows), 1];
        self.launch(kernel, grid, THREADS, stages * tensor_bytes(rows + columns, a.head_dim), &args);
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
