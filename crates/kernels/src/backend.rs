//! What a decoder asks of a device.

use std::cell::Cell;
use std::fmt::Debug;

use crate::scratch::{self, Words};
use crate::shared::Shared;
use crate::{Buffer, Cpu, Floats, Linear, Precision, Rows};

/// Rows that go through a step's products at once: their intermediate results stay in the caches.
const BLOCK: usize = 1024;

thread_local! {
    /// Rows after their norm.
    static NORMED: Cell<Words> = const { Cell::new(Words::new()) };
    /// Rows between two products.
    static WIDE: Cell<Words> = const { Cell::new(Words::new()) };
}

/// A root-mean-square norm: weights and what is added to the mean square.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// One weight for each column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
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

    /// \[q | k | v\] = norm(x) · Wᵀ + b; `k` and `v`, m × `kv_width`, are rounded to their type and only grow.
    #[allow(clippy::too_many_arguments)]
    fn project(
        &self,
        x: &Self::Floats,
        norm: Norm<'_>,
        w: &Self::Linear,
        kv_width: usize,
        q: &mut Self::Floats,
        k: &mut Self::Cache,
        v: &mut Self::Cache,
    );

    /// x += attended · Wᵀ + b
    fn output(&self, attended: &Self::Floats, w: &Self::Linear, x: &mut Self::Floats);

    /// x += down(silu(gate(norm(x))) · up(norm(x)))
    fn mlp(&self, x: &mut Self::Floats, norm: Norm<'_>, gate_up: &Self::Linear, down: &Self::Linear);

    /// out (m × outputs) = norm(x) · Wᵀ
    fn logits(&self, x: &Self::Floats, norm: Norm<'_>, w: &Self::Linear, out: &mut Self::Floats);
}

impl Backend for Cpu {
    type Floats = Floats;
    type Cache = Buffer;
    type Linear = Linear;

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
        kv_width: usize,
        q: &mut Floats,
        k: &mut Buffer,
        v: &mut Buffer,
    ) {
        let (hidden, width) = (norm.weight.len(), w.outputs());
        let (rows, q_width) = (x.len() / hidden, width - 2 * kv_width);
        q.resize(rows * q_width);
        for buffer in [&mut *k, &mut *v] {
            if buffer.len() < rows * kv_width {
                *buffer = Buffer::zeros(buffer.dtype(), rows * kv_width);
            }
        }
        let mut wide = scratch::lend(&WIDE, rows.min(BLOCK) * width);
        for (block, x) in x.chunks(BLOCK * hidden).enumerate() {
            let qkv = &mut wide.words.floats_mut()[..x.len() / hidden * width];
            self.normed(x, norm, |normed| self.linear(w, normed, qkv));
            let first = block * BLOCK;
            let rows = qkv.len() / width;
            let queries = Shared::new(&mut q[first * q_width..(first + rows) * q_width]);
            self.by_rows(rows, width, &|r| {
                for i in r {
                    let q = &qkv[i * width..][..q_width];
                    // SAFETY: row `i` belongs to this task.
                    unsafe { queries.part(i * q_width..(i + 1) * q_width) }.copy_from_slice(q);
                }
            });
            self.round_columns(qkv, width, q_width, first, kv_width, k);
            self.round_columns(qkv, width, q_width + kv_width, first, kv_width, v);
        }
    }

    fn output(&self, attended: &Floats, w: &Linear, x: &mut Floats) {
        self.linear_add(w, attended, x);
    }

    fn mlp(&self, x: &mut Floats, norm: Norm<'_>, gate_up: &Linear, down: &Linear) {
        let (hidden, width) = (norm.weight.len(), gate_up.outputs());
        let mut wide = scratch::lend(&WIDE, (x.len() / hidden).min(BLOCK) * width);
        for x in x.chunks_mut(BLOCK * hidden) {
            let active = &mut wide.words.floats_mut()[..x.len() / hidden * width];
            self.normed(x, norm, |normed| self.linear_swiglu(gate_up, normed, active));
            self.linear_add(down, active, x);
        }
    }

    fn logits(&self, x: &Floats, norm: Norm<'_>, w: &Linear, out: &mut Floats) {
        out.resize(x.len() / norm.weight.len() * w.outputs());
        self.normed(x, norm, |normed| self.linear(w, normed, out));
    }
}

impl Cpu {
    /// Hands the normed rows to `then`.
    fn normed(&self, x: &[f32], norm: Norm<'_>, then: impl FnOnce(&[f32])) {
        let mut normed = scratch::lend(&NORMED, x.len());
        let normed = &mut normed.words.floats_mut()[..x.len()];
        self.rms_norm(x, norm.weight, norm.eps, normed);
        then(normed);
    }
}
