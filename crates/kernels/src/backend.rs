//! What a decoder asks of a device.

use std::cell::Cell;
use std::fmt::Debug;
use std::ops::Range;

use crate::ops::{RmsNorm, Round};
use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::simd::Elem;
use crate::{Activation, Buffer, Cpu, Floats, Linear, Precision, Rows};

/// Rows that a thread takes through several steps: their intermediate results stay in its caches.
const BLOCK: usize = 512;
/// With fewer rows for each thread the threads share each step's work ...
const LEAST: usize = 128;
/// ... on so many rows at a time.
const SHARED: usize = 1024;

thread_local! {
    /// Rows after their norm.
    static NORMED: Cell<Words> = const { Cell::new(Words::new()) };
    /// Rows between two products.
    static WIDE: Cell<Words> = const { Cell::new(Words::new()) };
    /// A residual branch before its post-norm, or one row's keys after their norm.
    static BRANCH: Cell<Words> = const { Cell::new(Words::new()) };
}

/// A root-mean-square norm: weights and what is added to the mean square.
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
    /// Gate and up projection, packed by [`Backend::pack_gated`].
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
/// All of them if lengths do not fit.
pub trait Backend: Clone + Debug + Send + Sync + 'static {
    /// Activations.
    type Floats: Debug + Send + Sync;
    /// Keys or values of a layer.
    type Cache: Debug + Send + Sync;
    /// Packed weights.
    type Linear: Debug + Send + Sync;

    /// The same device, computing each row of a product as if it were alone: what rows of different requests come to
    /// does not depend on how many there are.
    fn each(&self) -> Self;

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
        rows: Rows<'_, E>,
    ) -> Result<Self::Linear, E>;

    /// Packs gates and what they open (both width × inputs), one below the other in `rows`.
    ///
    /// # Errors
    /// One of the errors of `rows`.
    fn pack_gated<E: Send>(
        &self,
        precision: Precision,
        width: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: Rows<'_, E>,
    ) -> Result<Self::Linear, E>;

    /// Bytes of packed weights.
    fn bytes(&self, w: &Self::Linear) -> usize;

    /// \[q | k | v\] = norm(x) · Wᵀ + b, then each head of q and k is normed where `heads` is given; `k` and `v`,
    /// m × `kv_width`, are rounded to their type and only grow.
    #[allow(clippy::too_many_arguments)]
    fn project(
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

    /// x += post(attended · Oᵀ + b), then x += post(down(activation(gate(norm(x))) · up(norm(x)))); a post-norm that
    /// the layer lacks is the identity.
    fn finish(&self, attended: &Self::Floats, tail: &LayerTail<'_, Self::Linear>, x: &mut Self::Floats);

    /// out (m × outputs) = norm(x) · Wᵀ
    fn logits(&self, x: &Self::Floats, norm: Norm<'_>, w: &Self::Linear, out: &mut Self::Floats);
}

impl Backend for Cpu {
    type Floats = Floats;
    type Cache = Buffer;
    type Linear = Linear;

    fn each(&self) -> Cpu {
        Cpu { each: true, ..self.clone() }
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
        rows: Rows<'_, E>,
    ) -> Result<Linear, E> {
        Linear::pack(self, precision, outputs, inputs, bias, rows)
    }

    fn pack_gated<E: Send>(
        &self,
        precision: Precision,
        width: usize,
        inputs: usize,
        bias: Option<Vec<f32>>,
        rows: Rows<'_, E>,
    ) -> Result<Linear, E> {
        Linear::pack_gated(self, precision, width, inputs, bias, rows)
    }

    fn bytes(&self, w: &Linear) -> usize {
        w.bytes()
    }

    fn project(
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
            (Buffer::F32(k), Buffer::F32(v)) => self.project_to(x, norm, w, heads, q, k, v),
            (Buffer::F16(k), Buffer::F16(v)) => self.project_to(x, norm, w, heads, q, k, v),
            (Buffer::Bf16(k), Buffer::Bf16(v)) => self.project_to(x, norm, w, heads, q, k, v),
            (k, v) => panic!("keys are {} and values {}", k.dtype(), v.dtype()),
        }
    }

    fn finish(&self, attended: &Floats, tail: &LayerTail<'_, Linear>, x: &mut Floats) {
        let (hidden, width) = (tail.mlp_norm.weight.len(), tail.gate_up.outputs());
        let rows = x.len() / hidden;
        let attended_width = tail.output.inputs();
        assert_eq!(x.len(), rows * hidden, "x is rows of the norm's length");
        assert_eq!(attended.len(), rows * attended_width, "as many rows are attended");
        let x = Shared::new(x);
        self.by_blocks(rows, &|r| {
            // SAFETY: these rows belong to this block.
            let x = unsafe { x.part(r.start * hidden..r.end * hidden) };
            let attended = &attended[r.start * attended_width..r.end * attended_width];
            self.add_branch(tail.output, attended, tail.attention_post_norm, x);
            let mut wide = scratch::lend(&WIDE, r.len() * width);
            let active = &mut wide.words.floats_mut()[..r.len() * width];
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
    /// Calls `f` for blocks of rows: one for each thread at a time where there are enough of them, which then does all
    /// its steps alone, so that what goes from one step to the next stays in its caches; otherwise the steps share
    /// their work.
    fn by_blocks(&self, rows: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
        let threads = self.threads();
        if rows < LEAST * threads {
            return (0..rows).step_by(SHARED).for_each(|first| f(first..(first + SHARED).min(rows)));
        }
        let blocks = rows.div_ceil(BLOCK).next_multiple_of(threads);
        let each = rows.div_ceil(blocks).next_multiple_of(32);
        self.parallel(rows.div_ceil(each), &|b| f(b * each..((b + 1) * each).min(rows)));
    }

    /// x += post(input · Wᵀ + b)
    fn add_branch(&self, w: &Linear, input: &[f32], post: Option<Norm<'_>>, x: &mut [f32]) {
        let Some(post) = post else { return self.linear_add(w, input, x) };
        let mut branch = scratch::lend(&BRANCH, x.len());
        let branch = &mut branch.words.floats_mut()[..x.len()];
        self.linear(w, input, branch);
        let (width, x) = (post.weight.len(), Shared::new(x));
        self.normed(branch, post, |normed| {
            self.by_rows(normed.len() / width, width, &|r| {
                let r = r.start * width..r.end * width;
                // SAFETY: these rows belong to this task.
                let x = unsafe { x.part(r.clone()) };
                x.iter_mut().zip(&normed[r]).for_each(|(x, y)| *x += y);
            });
        });
    }

    /// [`Backend::project`] into keys and values of one type.
    #[allow(clippy::too_many_arguments)]
    fn project_to<E: Elem>(
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
        let (q, k, v) = (Shared::new(q), Shared::new(k), Shared::new(v));
        self.by_blocks(rows, &|r| {
            let mut wide = scratch::lend(&WIDE, r.len() * width);
            let qkv = &mut wide.words.floats_mut()[..r.len() * width];
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
                            self.isa().run(Round { src: k_row, out: k });
                        }
                        Some(HeadNorms { q: q_norm, k: k_norm }) => {
                            self.isa().run(RmsNorm {
                                x: q_row,
                                weight: q_norm.weight,
                                eps: q_norm.eps,
                                y: q,
                            });
                            let mut normed = scratch::lend(&BRANCH, kv_width);
                            let y = &mut normed.words.floats_mut()[..kv_width];
                            self.isa().run(RmsNorm { x: k_row, weight: k_norm.weight, eps: k_norm.eps, y });
                            self.isa().run(Round { src: y, out: k });
                        }
                    }
                    self.isa().run(Round { src: v_row, out: v });
                }
            });
        });
    }

    /// Hands the normed rows to `then`.
    fn normed(&self, x: &[f32], norm: Norm<'_>, then: impl FnOnce(&[f32])) {
        let mut normed = scratch::lend(&NORMED, x.len());
        let normed = &mut normed.words.floats_mut()[..x.len()];
        self.rms_norm(x, norm.weight, norm.eps, normed);
        then(normed);
    }
}
