//! Attention: the choice of a kernel, and the log-sum-exps that statistics begin with.

use std::sync::Arc;

use refrain_kernels::{CachedAttention, Dtype, Floats, GumbelNoise, KvBuffer, gumbel_logarithms};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::{BARRIERS, assert_one_type, for_dtype, narrow, size};
use super::tensors::{floats, kv_block};
use crate::driver::{Arg, Driver};

/// Threads of a block.
pub(super) const THREADS: u32 = 128;
/// Slots of a tile of plain kernels.
pub(super) const TILE: usize = 32;
/// Entries, rows by heads of a group, of a block of plain kernels.
pub(super) const ENTRIES: usize = 16;
/// Entries of a block of tensor-core kernels.
const TENSOR_ENTRIES: usize = 64;
/// Entries of a KV head, at most, for which the warps of a block share slots instead of entries.
const FEW_ENTRIES: usize = 16;
/// Slots of a piece of keys of so few entries, a multiple of any tile.
const FEW_PIECE: usize = 192;
/// Groups of threads that share the pieces of such an entry.
const FEW_GROUPS: usize = 4;
/// Blocks that fill a GPU, several of which a multiprocessor holds at a time.
const BLOCKS: usize = 256;
/// Slots of a tile of the kernels for Hopper, and tiles that are under way at a time.
const HOPPER_TILE: usize = 64;
const HOPPER_STAGES: usize = 6;
/// Entries of a KV head from which on the kernels for Hopper are faster.
const HOPPER_ENTRIES: usize = 32;
/// Slots that a piece of keys has at least.
const PIECE: usize = 256;

/// The kernel on tensor cores for keys of a type and a head dimension, where there is one.
macro_rules! for_tensor_cores {
    ($a:expr, $name:literal) => {
        match ($a.k.dtype(), $a.head_dim) {
            _ if $a.precision == refrain_kernels::Precision::F32 => None,
            (refrain_kernels::Dtype::F16, 64) => Some(concat!($name, "_f16_64")),
            (refrain_kernels::Dtype::F16, 80) => Some(concat!($name, "_f16_80")),
            (refrain_kernels::Dtype::F16, 96) => Some(concat!($name, "_f16_96")),
            (refrain_kernels::Dtype::F16, 128) => Some(concat!($name, "_f16_128")),
            (refrain_kernels::Dtype::F16, 256) => Some(concat!($name, "_f16_256")),
            (refrain_kernels::Dtype::Bf16, 64) => Some(concat!($name, "_bf16_64")),
            (refrain_kernels::Dtype::Bf16, 80) => Some(concat!($name, "_bf16_80")),
            (refrain_kernels::Dtype::Bf16, 96) => Some(concat!($name, "_bf16_96")),
            (refrain_kernels::Dtype::Bf16, 128) => Some(concat!($name, "_bf16_128")),
            (refrain_kernels::Dtype::Bf16, 256) => Some(concat!($name, "_bf16_256")),
            _ => None,
        }
    };
}

pub(super) use for_tensor_cores;

/// Slots of a tile on tensor cores.
pub(super) fn tensor_tile(head_dim: usize) -> usize {
    if head_dim > 128 { 32 } else { 64 }
}

/// Bytes of rows of keys, values or queries in shared memory on tensor cores.
pub(super) fn tensor_bytes(rows: usize, head_dim: usize) -> usize {
    let chunks = head_dim / 8;
    let stride = if chunks.is_multiple_of(8) { chunks } else { chunks | 1 };
    rows * stride * 16
}

/// Bytes of shared memory that a block of `weigh_values` takes, which takes the most of all plain kernels.
fn weigh_values_bytes(head_dim: usize) -> usize {
    let (keys_and_values, queries_and_sums) = (2 * TILE * tile_stride(head_dim), 2 * ENTRIES * head_dim);
    4 * (keys_and_values + queries_and_sums + ENTRIES * TILE + 3 * ENTRIES)
}

/// Most elements of a head that blocks with so many bytes of shared memory take.
pub(super) fn most_head_dim(shared: usize) -> usize {
    (1..).find(|head_dim| weigh_values_bytes(*head_dim) > shared).map_or(0, |head_dim| head_dim - 1)
}

/// Floats from one row of a plain kernel's tile to the next.
pub(super) fn tile_stride(head_dim: usize) -> usize {
    head_dim | 1
}

/// A kernel of attention on tensor cores.
struct TensorKernel {
    name: &'static str,
    /// Entries of a block.
    entries: usize,
    /// Threads of a block.
    threads: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
    pieces: Pieces,
}

/// How the keys of a block of entries are shared out.
#[derive(Clone, Copy)]
enum Pieces {
    /// In pieces of so many slots, an argument of the kernel, so that bits depend neither on the GPU nor on what else is computed.
    Of(usize),
    /// In as many pieces as make so many blocks.
    Fill(usize),
}

/// An attention's arguments in the GPU's memory. `a` may be of some rows of `q`.
pub(super) struct Problem<'a, D: Driver> {
    pub(super) q: Arg<'a, D::Memory>,
    k: &'a KvBuffer,
    pub(super) visible: Arc<Block<D>>,
    rows: usize,
    heads: usize,
    kv_heads: usize,
    capacity: usize,
    head_dim: usize,
    scale: f32,
}

impl<'a, D: Driver> Problem<'a, D> {
    pub(super) fn new(device: &CudaDevice<D>, a: &CachedAttention<'a>) -> Problem<'a, D> {
        let CachedAttention { heads, kv_heads, head_dim, capacity, scale, k, .. } = *a;
        let rows = a.visible.len();
        assert!(heads.is_multiple_of(kv_heads), "KV heads divide heads");
        assert_eq!(k.len(), kv_heads * capacity * head_dim, "k is kv_heads × capacity × head_dim");
        assert!((a.first_row + rows) * a.width() <= a.q.len(), "rows lie inside of q");
        let in_cache = |(from, to): &(u32, u32)| from <= to && *to as usize <= capacity;
        assert!(a.visible.iter().all(in_cache), "rows see slots below {capacity}");
        Problem {
            q: floats::<D>(a.q).arg(4 * a.first_row * a.width()),
            k,
            visible: device.visible(a.visible),
            rows,
            heads,
            kv_heads,
            capacity,
            head_dim,
            scale,
        }
    }

    /// The parameters that plain kernels share, with those of one kernel.
    pub(super) fn args<const N: usize>(&'a self, own: [Arg<'a, D::Memory>; N]) -> Vec<Arg<'a, D::Memory>> {
        let mut args = vec![
            self.q,
            kv_block::<D>(self.k).arg(0),
            self.visible.arg(0),
            size(self.rows),
            size(self.heads),
            size(self.kv_heads),
            size(self.capacity),
            size(self.head_dim),
            Arg::F32(self.scale),
        ];
        args.extend(own);
        args
    }

    /// Blocks of entries of a KV head.
    fn entry_blocks(&self, each: usize) -> usize {
        (self.rows * self.heads / self.kv_heads).div_ceil(each)
    }
}

/// Noise in the GPU's memory.
pub(super) struct NoiseTables<D: Driver> {
    logarithms: Arc<Block<D>>,
    query_positions: Arc<Block<D>>,
    key_positions: Block<D>,
    seed: Option<u64>,
    temperature: f32,
}

impl<D: Driver> NoiseTables<D> {
    pub(super) fn new(device: &CudaDevice<D>, noise: &GumbelNoise<'_>, a: &CachedAttention<'_>) -> Self {
        assert!(noise.temperature > 0.0, "the temperature is above 0");
        assert_eq!(noise.query_positions.len(), a.visible.len(), "one position a row");
        let (slots, key_positions) = (a.kv_heads * a.capacity, noise.key_positions);
        assert!(
            key_positions.is_none_or(|positions| positions.len() == slots),
            "one position for each KV head and slot"
        );
        let logarithms = device.noise.get_or_init(|| Arc::new(device.block_of(gumbel_logarithms())));
        NoiseTables {
            logarithms: logarithms.clone(),
            query_positions: device.kept_block_of(noise.query_positions),
            key_positions: device.block_of(key_positions.unwrap_or_default()),
            seed: noise.seed,
            temperature: noise.temperature,
        }
    }

    pub(super) fn args(&self) -> [Arg<'_, D::Memory>; 6] {
        [
            self.logarithms.arg(0),
            self.query_positions.arg(0),
            self.key_positions.arg(0),
            Arg::U64(self.seed.unwrap_or_default()),
            Arg::U32(u32::from(self.seed.is_some())),
            Arg::F32(self.temperature),
        ]
    }
}

impl<D: Driver> CudaDevice<D> {
    pub(super) fn visible(&self, visible: &[(u32, u32)]) -> Arc<Block<D>> {
        self.kept_block_of(&visible.iter().map(|(from, to)| [*from, *to]).collect::<Vec<[u32; 2]>>())
    }

    /// Writes lse (rows × heads) over the slots that rows see from `first_slot` on.
    pub(super) fn log_sum_exp(
        &self,
        problem: &Problem<'_, D>,
        noise: Option<&NoiseTables<D>>,
        first_slot: usize,
        lse: Arg<'_, D::Memory>,
    ) {
        let (d, dtype) = (problem.head_dim, problem.k.dtype());
        let shared = 4 * (TILE * tile_stride(d) + ENTRIES * d + 2 * ENTRIES * 32);
        let grid = [problem.entry_blocks(ENTRIES), problem.kv_heads, 1];
        let mut args = problem.args([lse, size(first_slot)]);
        let kernel = match noise {
            None => for_dtype!(dtype, "log_sum_exp"),
            Some(noise) => {
                args.extend(noise.args());
                for_dtype!(dtype, "noisy_log_sum_exp")
            }
        };
        self.launch(kernel, grid, THREADS, shared, &args);
    }

    pub(super) fn attend(&self, a: &CachedAttention<'_>, out: &mut Floats, lse: Option<&mut Floats>) {
        assert_eq!(out.len(), a.q.len(), "out has the rows of q");
        assert_one_type(a.k.dtype(), a.v.dtype());
        assert_eq!(a.k.len(), a.v.len(), "there are as many values as keys");
        let problem = Problem::new(self, a);
        let out = floats::<D>(out).arg(4 * a.first_row * a.width());
        let lse = lse.map(|lse| self.resized(lse, a.q.len() / a.head_dim));
        let lse = lse.map(|lse| lse.arg(4 * a.first_row * a.heads));
        match self.tensor_kernel(a) {
            Some(kernel) => self.attend_on_tensor_cores(&kernel, &problem, a, out, lse),
            None => self.attend_plainly(&problem, a.v, out, lse),
        }
    }

    /// The kernel of an attention on tensor cores, where there is one. Kernels for Hopper sum in the order of the others: bits of a row do not
    /// depend on which it is.
    fn tensor_kernel(&self, a: &CachedAttention<'_>) -> Option<TensorKernel> {
        let name = for_tensor_cores!(a, "tensor_attention")?;
        let (d, entries) = (a.head_dim, a.visible.len() * a.heads / a.kv_heads);
        let tile = tensor_tile(d);
        // A warp takes 16 slots of a tile for an entry. Shared memory has queries and two stages of keys and values; sums that warps merge take less.
        let few = for_tensor_cores!(a, "few_rows_attention").filter(|_| entries <= FEW_ENTRIES);
        if let Some(name) = few {
            let entries = TENSOR_ENTRIES * 16 / tile;
            let shared = tensor_bytes(entries + 4 * tile, d);
            let pieces = Pieces::Of(FEW_PIECE);
            return Some(TensorKernel { name, entries, threads: THREADS as usize, shared, pieces });
        }
        let on_hopper = self.driver.is_hopper() && entries >= HOPPER_ENTRIES;
        let hopper = match (a.k.dtype(), d) {
            _ if !on_hopper => None,
            (Dtype::F16, 64) => Some(("hopper_attention_f16_64", 3)),
            (Dtype::F16, 128) => Some(("hopper_attention_f16_128", 2)),
            (Dtype::Bf16, 64) => Some(("hopper_attention_bf16_64", 3)),
            (Dtype::Bf16, 128) => Some(("hopper_attention_bf16_128", 2)),
            _ => None,
        };
        Some(match hopper {
            // A warpgroup loads stages of keys and values.
            Some((name, groups)) => TensorKernel {
                name,
                entries: groups * TENSOR_ENTRIES,
                threads: 128 * (groups + 1),
                shared: tensor_bytes(HOPPER_STAGES * 2 * HOPPER_TILE, d) + BARRIERS,
                pieces: Pieces::Fill(self.driver.multiprocessors()),
            },
            // Queries, and two stages of keys and values.
            None => TensorKernel {
                name,
                entries: TENSOR_ENTRIES,
                threads: THREADS as usize,
                shared: tensor_bytes(TENSOR_ENTRIES + 4 * tile, d),
                pieces: Pieces::Fill(BLOCKS),
            },
        })
    }

    fn attend_plainly(
        &self,
        problem: &Problem<'_, D>,
        v: &KvBuffer,
        out: Arg<'_, D::Memory>,
        lse: Option<Arg<'_, D::Memory>>,
    ) {
        let scratch;
        let lse = match lse {
            Some(lse) => lse,
            None => {
                scratch = self.block(4 * problem.rows * problem.heads);
                scratch.arg(0)
            }
        };
        self.log_sum_exp(problem, None, 0, lse);
        let shared = weigh_values_bytes(problem.head_dim);
        let grid = [problem.entry_blocks(ENTRIES), problem.kv_heads, 1];
        let args = problem.args([kv_block::<D>(v).arg(0), lse, out]);
        self.launch(for_dtype!(v.dtype(), "weigh_values"), grid, THREADS, shared, &args);
    }

    fn attend_on_tensor_cores(
        &self,
        kernel: &TensorKernel,
        problem: &Problem<'_, D>,
        a: &CachedAttention<'_>,
        out: Arg<'_, D::Memory>,
        lse: Option<Arg<'_, D::Memory>>,
    ) {
        // Rows that see nothing do not count, as in the kernel.
        let seen = a.visible.iter().filter(|seen| seen.0 < seen.1);
        let from = seen.clone().map(|seen| seen.0).min().unwrap_or(0) as usize;
        let to = seen.map(|seen| seen.1).max().unwrap_or(0) as usize;
        let blocks = problem.entry_blocks(kernel.entries) * a.kv_heads;
        let (first_piece, pieces, groups) = match kernel.pieces {
            Pieces::Of(slots) => {
                let first = from / slots;
                (first, to.div_ceil(slots).saturating_sub(first).max(1), FEW_GROUPS)
            }
            Pieces::Fill(all) => (0, (all / blocks.max(1)).min(to.saturating_sub(from) / PIECE).max(1), 1),
        };
        let launch = |out, lse| {
            let mut args = vec![
                problem.q,
                kv_block::<D>(a.k).arg(0),
                kv_block::<D>(a.v).arg(0),
                problem.visible.arg(0),
                out,
                lse,
                size(problem.rows),
                size(a.heads),
                size(a.kv_heads),
                size(a.capacity),
                Arg::F32(a.scale),
            ];
            if let Pieces::Of(slots) = kernel.pieces {
                args.push(size(slots));
            }
            let grid = [blocks, 1, pieces];
            self.launch(kernel.name, grid, narrow(kernel.threads), kernel.shared, &args);
        };
        if pieces == 1 {
            return launch(out, lse.unwrap_or(Arg::Null));
        }
        let entries = problem.rows * a.heads;
        let (parts, sums) = (self.block(4 * pieces * entries * a.head_dim), self.block(4 * pieces * entries));
        launch(parts.arg(0), sums.arg(0));
        let (lse, d) = (lse.unwrap_or(Arg::Null), a.head_dim);
        let threads = groups * d.next_multiple_of(32);
        let shared = 4 * pieces + 8 * threads;
        let [first_piece, pieces, entries] = [first_piece, pieces, entries].map(size);
        let args = [parts.arg(0), sums.arg(0), out, lse, first_piece, pieces, entries, size(d)];
        self.launch("merge_pieces", [problem.rows * a.heads, 1, 1], narrow(threads), shared, &args);
    }

    pub(super) fn merge(
        &self,
        first: usize,
        out: &mut Floats,
        lse: &mut Floats,
        other: &Floats,
        other_lse: &Floats,
    ) {
        let (d, entries) = (out.len() / lse.len().max(1), other_lse.len());
        assert!(first + entries <= lse.len() && other.len() == entries * d, "entries lie inside of the sums");
        let (out, lse) = (floats::<D>(out).arg(4 * first * d), floats::<D>(lse).arg(4 * first));
        let args = [out, lse, floats::<D>(other).arg(0), floats::<D>(other_lse).arg(0), size(d)];
        self.launch("merge_attention", [entries, 1, 1], 32, 0, &args);
    }
}
