//! The device interface of a decoder, and its implementation by the CPU.

use std::cell::Cell;
use std::fmt::Debug;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::floats::Floats;
use crate::linear::{Activation, Linear, Precision, WeightRows};
use crate::ops::{RmsNorm, Round};
use crate::scratch::{self, AlignedVec};
use crate::simd::Elem;

/// Rows that a thread takes through several steps: their intermediate results stay in its caches.
const BLOCK_ROWS: usize = 512;
/// With fewer rows for each thread, the threads share the work of each step.
const MIN_ROWS_PER_THREAD: usize = 128;
/// Rows at a time when threads share the work of each step.
const SHARED_ROWS: usize = 1024;

thread_local! {
    /// Rows after their norm.
    static NORMED: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// Rows between two products.
    static WIDE: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
    /// A residual branch before its post-norm, or one row's keys after their norm.
    static BRANCH: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

/// The parameters of a root-mean-square norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// One weight for each column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Norms of the single heads of queries and keys, applied between their projection and their rotation (Qwen3, Gemma 3).
/// Each weight is as long as a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Norm of each query head.
    pub q: Norm<'a>,
    /// Norm of each key head.
    pub k: Norm<'a>,
}

/// The weights of a layer's second half, from attention's output to the next layer.
#[derive(Debug)]
pub struct LayerTail<'a, L> {
    /// Attention's output projection O.
    pub output: &'a L,
    /// Norm of O's result before it joins the residual stream, in layers with norms on both sides of a branch.
    pub attention_post_norm: Option<Norm<'a>>,
    /// Norm of the MLP's input.
    pub mlp_norm: Norm<'a>,
    /// Gate and up projection, packed by [`Backend::pack_gate_up`].
    pub gate_up: &'a L,
    /// Activation of the gate.
    pub activation: Activation,
    /// Down projection.
    pub down: &'a L,
    /// Norm of the down projection's result before it joins the residual stream.
    pub mlp_post_norm: Option<Norm<'a>>,
}

/// The steps of a decoder layer, coarse enough for any device. Activations are `f32`, row-major, in the device's own
/// buffers; keys and values are cached in `Cache`. Nothing is allocated once buffers have grown to their size.
///
/// # Panics
/// All methods panic if lengths do not fit.
pub trait Backend: Clone + Debug + Send + Sync + 'static {
    /// Activations.
    type Floats: Debug + Send + Sync;
    /// Keys or values of a layer.
    type Cache: Debug + Send + Sync;
    /// Packed weights.
    type Linear: Debug + Send + Sync;

    /// This device with batch-invariant products: each row is computed as if it were alone, so that the result of a
    /// request does not depend on the requests computed with it.
    fn batch_invariant(&self) -> Self;

    /// An empty buffer.
    fn floats(&self) -> Self::Floats;

    /// Fills a buffer from the host's memory: `rows` rows of `width`, each written by `row(index, buffer)`.
    ///
    /// # Errors
    /// The first error of `row`.
    fn upload<E>(
        &self,
        rows: usize,
        width: usize,
        row: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
        x: &mut Self::Floats,
    ) -> Result<(), E>;

    /// Packs W (outputs × inputs) with its bias.
    ///
    /// # Errors
    /// One of the errors of `rows`.
    fn pack<E: Send>(
        &self,
        precision: Precision,
        outputs: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: WeightRows<'_, E>,
    ) -> Result<Self::Linear, E>;

    /// Packs gate and up projections (both width × inputs), the rows of the gate first.
    ///
    /// # Errors
    /// One of the errors of `rows`.
    fn pack_gate_up<E: Send>(
        &self,
        precision: Precision,
        width: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: WeightRows<'_, E>,
    ) -> Result<Self::Linear, E>;

    /// Bytes of packed weights.
    fn bytes(&self, w: &Self::Linear) -> usize;

    /// \[q | k | v\] = norm(x) · Wᵀ + b, then each head of q and k is normed where `heads` is given; `k` and `v`,
    /// m × `kv_width`, are rounded to their type and only grow.
    #[allow(clippy::too_many_arguments)]
    fn project_qkv(
        &self,
        x: &Self::Floats,
        norm: Norm<'_>,
        w: &Self::Linear,
        heads: Option<HeadNorms<'_>>,
        kv_width: usize,
        q: &mut Self::Floats,
        k: &mut Self::Cache,
        v: &mut Self::Cache,
    );

    /// x += post(attn_out · Oᵀ + b), then x += post(down(activation(gate(norm(x))) · up(norm(x)))); a post-norm that
    /// the layer lacks is the identity.
    fn attn_output_and_mlp(
        &self,
        attn_out: &Self::Floats,
        tail: &LayerTail<'_, Self::Linear>,
        x: &mut Self::Floats,
    );

    /// out (m × outputs) = norm(x) · Wᵀ
    fn logits(&self, x: &Self::Floats, norm: Norm<'_>, w: &Self::Linear, out: &mut Self::Floats);
}

impl Backend for Cpu {
    type Floats = Floats;
    type Cache = Buffer;
    type Linear = Linear;

    fn batch_invariant(&self) -> Cpu {
        self.to_batch_invariant()
    }

    fn floats(&self) -> Floats {
        Floats::new()
    }

    fn upload<E>(
        &self,
        rows: usize,
        width: usize,
        mut row: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
        x: &mut Floats,
    ) -> Result<(), E> {
        x.resize(rows * width);
        x.chunks_exact_mut(width).enumerate().try_for_each(|(index, x)| row(index, x))
    }

    fn pack<E: Send>(
        &self,
        precision: Precision,
        outputs: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: WeightRows<'_, E>,
    ) -> Result<Linear, E> {
        Linear::pack(self, precision, outputs, inputs, bias, rows)
    }

    fn pack_gate_up<E: Send>(
        &self,
        precision: Precision,
        width: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: WeightRows<'_, E>,
    ) -> Result<Linear, E> {
        Linear::pack_gate_up(self, precision, width, inputs, bias, rows)
    }

    fn bytes(&self, w: &Linear) -> usize {
        w.bytes()
    }

    fn project_qkv(
        &self,
        x: &Floats,
        norm: Norm<'_>,
        w: &Linear,
        heads: Option<HeadNorms<'_>>,
        kv_width: usize,
        q: &mut Floats,
        k: &mut Buffer,
        v: &mut Buffer,
    ) {
        let width = w.outputs();
        let (rows, q_width) = (x.len() / norm.weight.len(), width - 2 * kv_width);
        assert_eq!(x.len(), rows * norm.weight.len(), "x is rows of the norm's length");
        q.resize(rows * q_width);
        for buffer in [&mut *k, &mut *v] {
            if buffer.len() < rows * kv_width {
                *buffer = Buffer::zeros(buffer.dtype(), rows * kv_width);
            }
        }
        match (k, v) {
            (Buffer::F32(k), Buffer::F32(v)) => self.project_qkv_to(x, norm, w, heads, q, k, v),
            (Buffer::F16(k), Buffer::F16(v)) => self.project_qkv_to(x, norm, w, heads, q, k, v),
            (Buffer::Bf16(k), Buffer::Bf16(v)) => self.project_qkv_to(x, norm, w, heads, q, k, v),
            (k, v) => panic!("keys are {} and values {}", k.dtype(), v.dtype()),
        }
    }

    fn attn_output_and_mlp(&self, attn_out: &Floats, tail: &LayerTail<'_, Linear>, x: &mut Floats) {
        let (hidden, width) = (tail.mlp_norm.weight.len(), tail.gate_up.outputs());
        let rows = x.len() / hidden;
        let attn_width = tail.output.inputs();
        assert_eq!(x.len(), rows * hidden, "x is rows of the norm's length");
        assert_eq!(attn_out.len(), rows * attn_width, "attn_out has as many rows as x");
        let x = DisjointMut::new(x);
        self.by_blocks(rows, &|r| {
            // SAFETY: these rows belong to this block.
            let x = unsafe { x.part(r.start * hidden..r.end * hidden) };
            let attn_out = &attn_out[r.start * attn_width..r.end * attn_width];
            self.add_branch(tail.output, attn_out, tail.attention_post_norm, x);
            let mut wide = scratch::borrow(&WIDE, r.len() * width);
            let active = &mut wide.as_f32_mut()[..r.len() * width];
            self.normed(x, tail.mlp_norm, |normed| {
                self.linear_gated(tail.gate_up, tail.activation, normed, active);
            });
            self.add_branch(tail.down, active, tail.mlp_post_norm, x);
        });
    }

    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &Linear, out: &mut Floats) {
        out.resize(x.len() / norm.weight.len() * w.outputs());
        self.normed(x, norm, |normed| self.linear(w, normed, out));
    }
}

impl Cpu {
    /// Calls `f` for blocks of rows. If there are enough rows, each thread takes a block at a time through all steps, so
    /// that intermediate results stay in its caches; otherwise the threads share the work of each step.
    fn by_blocks(&self, rows: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
        let threads = self.threads();
        if rows < MIN_ROWS_PER_THREAD * threads {
            return (0..rows)
                .step_by(SHARED_ROWS)
                .for_each(|first| f(first..(first + SHARED_ROWS).min(rows)));
        }
        let blocks = rows.div_ceil(BLOCK_ROWS).next_multiple_of(threads);
        let each = rows.div_ceil(blocks).next_multiple_of(32);
        self.parallel(rows.div_ceil(each), &|b| f(b * each..((b + 1) * each).min(rows)));
    }

    /// x += post(input · Wᵀ + b)
    fn add_branch(&self, w: &Linear, input: &[f32], post: Option<Norm<'_>>, x: &mut [f32]) {
        let Some(post) = post else { return self.linear_add(w, input, x) };
        let mut branch = scratch::borrow(&BRANCH, x.len());
        let branch = &mut branch.as_f32_mut()[..x.len()];
        self.linear(w, input, branch);
        let (width, x) = (post.weight.len(), DisjointMut::new(x));
        self.normed(branch, post, |normed| {
            self.by_rows(normed.len() / width, width, &|r| {
                let r = r.start * width..r.end * width;
                // SAFETY: these rows belong to this task.
                let x = unsafe { x.part(r.clone()) };
                x.iter_mut().zip(&normed[r]).for_each(|(x, y)| *x += y);
            });
        });
    }

    /// [`Backend::project_qkv`] into keys and values of one type.
    #[allow(clippy::too_many_arguments)]
    fn project_qkv_to<E: Elem>(
        &self,
        x: &[f32],
        norm: Norm<'_>,
        w: &Linear,
        heads: Option<HeadNorms<'_>>,
        q: &mut [f32],
        k: &mut [E],
        v: &mut [E],
    ) {
        let (hidden, width) = (norm.weight.len(), w.outputs());
        let rows = x.len() / hidden;
        let q_width = q.len() / rows.max(1);
        let kv_width = (width - q_width) / 2;
        let (q, k, v) = (DisjointMut::new(q), DisjointMut::new(k), DisjointMut::new(v));
        self.by_blocks(rows, &|r| {
            let mut wide = scratch::borrow(&WIDE, r.len() * width);
            let qkv = &mut wide.as_f32_mut()[..r.len() * width];
            self.normed(&x[r.start * hidden..r.end * hidden], norm, |normed| self.linear(w, normed, qkv));
            self.by_rows(r.len(), width, &|part| {
                for i in part {
                    let (row, at) = (&qkv[i * width..(i + 1) * width], r.start + i);
                    // SAFETY: row `at` belongs to this task.
                    let (q, k, v) = unsafe {
                        (
                            q.part(at * q_width..(at + 1) * q_width),
                            k.part(at * kv_width..(at + 1) * kv_width),
                            v.part(at * kv_width..(at + 1) * kv_width),
                        )
                    };
                    let (q_row, kv_row) = row.split_at(q_width);
                    let (k_row, v_row) = kv_row.split_at(kv_width);
                    match heads {
                        None => {
                            q.copy_from_slice(q_row);
                            self.run(Round { src: k_row, out: k });
                        }
                        Some(HeadNorms { q: q_norm, k: k_norm }) => {
                            self.run(RmsNorm { x: q_row, weight: q_norm.weight, eps: q_norm.eps, y: q });
                            let mut normed = scratch::borrow(&BRANCH, kv_width);
                            let y = &mut normed.as_f32_mut()[..kv_width];
                            self.run(RmsNorm { x: k_row, weight: k_norm.weight, eps: k_norm.eps, y });
                            self.run(Round { src: y, out: k });
                        }
                    }
                    self.run(Round { src: v_row, out: v });
                }
            });
        });
    }

    /// Calls `then` with the normalised rows.
    fn normed(&self, x: &[f32], norm: Norm<'_>, then: impl FnOnce(&[f32])) {
        let mut normed = scratch::borrow(&NORMED, x.len());
        let normed = &mut normed.as_f32_mut()[..x.len()];
        self.rms_norm(x, norm.weight, norm.eps, normed);
        then(normed);
    }
}
