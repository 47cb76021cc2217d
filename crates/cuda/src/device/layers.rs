//! The steps of a layer: norms, products, and what joins the residual stream.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use refrain_kernels::{Dtype, Floats, GatedMlp, KvBuffer, LayerTail, MAX_BLOCK_ROWS, Mlp, Norm, QkNorms};

use super::block::Block;
use super::context::CudaDevice;
use super::launch::{assert_one_type, for_dtype, narrow, size};
use super::linear::{Epilogue, Input, Linear};
use super::tensors::{floats, kv_block};
use crate::driver::{Arg, Driver};

/// Weights of norms that are kept in the GPU's memory at most.
const MAX_NORMS: usize = 4096;

/// Rows somewhere in a GPU's memory, in `f32`.
pub(super) struct Rows<'a, M> {
    pub(super) at: Arg<'a, M>,
    pub(super) rows: usize,
    pub(super) width: usize,
}

impl<M> Clone for Rows<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Rows<'_, M> {}

/// Rows of a tensor.
pub(super) fn rows_of<D: Driver>(x: &Floats, width: usize, rows: Range<usize>) -> Rows<'_, D::Memory> {
    assert!(rows.end * width <= x.len(), "rows lie inside of the tensor");
    Rows { at: floats::<D>(x).arg(4 * rows.start * width), rows: rows.len(), width }
}

/// The range in parts of at most [`MAX_BLOCK_ROWS`].
pub(super) fn blocks(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(MAX_BLOCK_ROWS).map(move |first| first..(first + MAX_BLOCK_ROWS).min(end))
}

/// Elements of a row that a warp splits off where no norm says how many.
const SPLIT: usize = 256;
/// Bytes of shared memory of a block that norms a row.
const NORM_SHARED: usize = 32 * 4;

/// Threads of a block that norms a row.
fn norm_threads(width: usize) -> u32 {
    narrow((width / 8).next_multiple_of(32).clamp(32, 1024))
}

/// The destination of a norm or a rounding: memory, how rows lie there, and columns of a row, of which those that the source lacks become zeros.
pub(super) struct Target<'a, M> {
    pub(super) at: Arg<'a, M>,
    pub(super) rows: RowLayout,
    pub(super) stride: usize,
}

/// How rows lie in memory.
#[derive(Clone, Copy)]
pub(super) enum RowLayout {
    /// One behind the other, in `f32`.
    Plain,
    /// In panels of `bf16`, as products take them (`panels.h`).
    Panels,
}

/// The name of a kernel that there is for each layout of the rows that it writes.
macro_rules! for_layout {
    ($rows:expr, $name:literal) => {
        match $rows {
            RowLayout::Plain => concat!($name, "_f32"),
            RowLayout::Panels => concat!($name, "_panels"),
        }
    };
}

impl<M> Clone for Target<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Target<'_, M> {}

impl<D: Driver> CudaDevice<D> {
    /// The weights of a norm in the GPU's memory. Those of a model stay where they are in the host's, and so they are kept.
    fn norm_weight(&self, norm: Norm<'_>) -> Arc<Block<D>> {
        let key = (norm.weight.as_ptr().addr(), norm.weight.len());
        let mut kept = self.norm_weights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, block)) = kept.get(&key).filter(|(weight, _)| weight == norm.weight) {
            return block.clone();
        }
        if kept.len() >= MAX_NORMS {
            kept.clear();
        }
        let block = Arc::new(self.block_of(norm.weight));
        kept.insert(key, (norm.weight.to_vec(), block.clone()));
        block
    }

    /// Norms rows.
    fn norm_into(&self, x: Rows<'_, D::Memory>, norm: Norm<'_>, to: Target<'_, D::Memory>) {
        assert_eq!(norm.weight.len(), x.width, "a norm is as wide as the rows");
        let weight = self.norm_weight(norm);
        let args = [x.at, weight.arg(0), to.at, size(x.width), size(to.stride), Arg::F32(norm.eps)];
        self.launch(
            for_layout!(to.rows, "rms_norm"),
            [x.rows, 1, 1],
            norm_threads(x.width),
            NORM_SHARED,
            &args,
        );
    }

    /// Rounds rows.
    pub(super) fn round_into(&self, x: Rows<'_, D::Memory>, to: Target<'_, D::Memory>) {
        let args = [x.at, to.at, size(x.rows), size(x.width), size(to.stride)];
        self.launch_each(for_layout!(to.rows, "round_rows"), x.rows * to.stride.div_ceil(4), &args);
    }

    /// Norms or rounds rows, whichever is asked for.
    fn put(&self, x: Rows<'_, D::Memory>, norm: Option<Norm<'_>>, to: Target<'_, D::Memory>) {
        match norm {
            Some(norm) => self.norm_into(x, norm, to),
            None => self.round_into(x, to),
        }
    }

    /// Calls `then` with rows, normed where a norm is given, as a product with `w` takes them.
    pub(super) fn with_input<T>(
        &self,
        x: Rows<'_, D::Memory>,
        norm: Option<Norm<'_>>,
        w: &Linear<D>,
        then: impl FnOnce(&Input<'_, D::Memory>) -> T,
    ) -> T {
        assert_eq!(x.width, w.inputs(), "rows are as wide as the weights' inputs");
        let rows = x.rows;
        if w.is_f32() && norm.is_none() {
            return then(&Input { rows, at: x.at });
        }
        let block = self.block(w.input_bytes(rows, w.input_stride()));
        let layout = if w.is_f32() { RowLayout::Plain } else { RowLayout::Panels };
        self.put(x, norm, Target { at: block.arg(0), rows: layout, stride: w.input_stride() });
        then(&Input { rows, at: block.arg(0) })
    }

    /// The result of a product, in `f32`, rows × outputs.
    pub(super) fn stored_product(&self, w: &Linear<D>, input: &Input<'_, D::Memory>) -> Block<D> {
        let out = self.block(4 * input.rows * w.outputs());
        self.product(w, input, Epilogue::Store, out.arg(0));
        out
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn project(
        &self,
        (x, rows): (&Floats, Range<usize>),
        norm: Option<Norm<'_>>,
        w: &Linear<D>,
        qk_norms: Option<QkNorms<'_>>,
        kv_width: usize,
        q: &mut Floats,
        kv: [&mut KvBuffer; 2],
    ) {
        let (hidden, width) = (w.inputs(), w.outputs());
        assert!(x.len().is_multiple_of(hidden), "x is rows of the weights' inputs");
        let (first, all, q_width) = (rows.start, rows.len(), width - 2 * kv_width);
        let q = self.resized(q, all * q_width);
        let [k, v] = kv.map(|kv| {
            if kv.len() < all * kv_width {
                *kv = self.zeroed_kv(kv.dtype(), all * kv_width);
            }
            &*kv
        });
        let dtype = k.dtype();
        assert_one_type(dtype, v.dtype());
        for rows in blocks(0..all) {
            let of_x = rows_of::<D>(x, hidden, first + rows.start..first + rows.end);
            let wide = self.with_input(of_x, norm, w, |input| self.stored_product(w, input));
            let at = |kv: &KvBuffer| kv_block::<D>(kv).bytes().min(rows.start * kv_width * kv.dtype().size());
            let [k, v] = [k, v].map(|kv| kv_block::<D>(kv).arg(at(kv)));
            let to = [q.arg(4 * rows.start * q_width), k, v];
            self.split_rows(&wide, rows.len(), [q_width, kv_width], qk_norms, dtype, to);
        }
    }

    /// Splits rows of queries, keys and values into q in `f32`, and k and v of a type; norms queries and keys where norms are given.
    fn split_rows(
        &self,
        wide: &Block<D>,
        rows: usize,
        [q_width, kv_width]: [usize; 2],
        qk_norms: Option<QkNorms<'_>>,
        dtype: Dtype,
        [q, k, v]: [Arg<'_, D::Memory>; 3],
    ) {
        let norms = qk_norms.map_or([None; 2], |norms| [Some(norms.q), Some(norms.k)]);
        let weights = norms.map(|norm| norm.map(|norm| self.norm_weight(norm)));
        let [of_q, of_k] = [(0, q_width), (1, kv_width)].map(|(i, width)| {
            let (Some(norm), Some(weight)) = (norms[i], &weights[i]) else { return (Arg::Null, SPLIT, 0.0) };
            assert!(width.is_multiple_of(norm.weight.len()), "rows are whole segments of a norm");
            (weight.arg(0), norm.weight.len(), norm.eps)
        });
        let segments = q_width.div_ceil(of_q.1) + 2 * kv_width.div_ceil(of_k.1);
        let mut args = vec![wide.arg(0), q, k, v, size(rows), size(q_width), size(kv_width)];
        for (weight, segment, eps) in [of_q, of_k] {
            args.extend([weight, size(segment), Arg::F32(eps)]);
        }
        self.launch_each(for_dtype!(dtype, "split_rows"), 32 * rows * segments, &args);
    }

    /// x += post(input · Wᵀ + b)
    fn add_branch(
        &self,
        w: &Linear<D>,
        input: &Input<'_, D::Memory>,
        post: Option<Norm<'_>>,
        x: Rows<'_, D::Memory>,
    ) {
        if post.is_none() {
            return self.product(w, input, Epilogue::Add, x.at);
        }
        let branch = self.stored_product(w, input);
        self.add_normed(&branch, post, x);
    }

    /// x += post(branch)
    pub(super) fn add_normed(&self, branch: &Block<D>, post: Option<Norm<'_>>, x: Rows<'_, D::Memory>) {
        let Some(norm) = post else {
            let count = x.rows * x.width;
            return self.launch_each("add", count, &[x.at, branch.arg(0), Arg::U64(count as u64)]);
        };
        assert_eq!(norm.weight.len(), x.width, "a post-norm norms whole rows");
        let (weight, width) = (self.norm_weight(norm), size(x.width));
        let args = [branch.arg(0), weight.arg(0), x.at, width, width, Arg::F32(norm.eps)];
        self.launch("rms_norm_add", [x.rows, 1, 1], norm_threads(x.width), NORM_SHARED, &args);
    }

    /// The rows between the two products of a network, as the second takes them.
    pub(super) fn gated(
        &self,
        mlp: &GatedMlp,
        tail: &LayerTail<'_>,
        input: &Input<'_, D::Memory>,
    ) -> Block<D> {
        let gate_up = mlp.gate_up.storage::<Linear<D>>();
        let down = mlp.down.storage::<Linear<D>>();
        assert_eq!(gate_up.is_f32(), down.is_f32(), "the weights of a network are of one type");
        assert_eq!(gate_up.outputs(), down.inputs(), "the down projection takes what the gates give");
        let stride = gate_up.output_stride();
        let active = self.block(gate_up.input_bytes(input.rows, stride));
        if stride != gate_up.outputs() {
            self.zero(&active, 0, active.bytes());
        }
        self.product(gate_up, input, Epilogue::Gate(tail.activation), active.arg(0));
        active
    }

    pub(super) fn finish_layer(
        &self,
        (attn_out, first): (&Floats, usize),
        tail: &LayerTail<'_>,
        rows: Range<usize>,
        x: &mut Floats,
    ) {
        let output = tail.output.storage::<Linear<D>>();
        let (hidden, attn_width, start) = (output.outputs(), output.inputs(), rows.start);
        for rows in blocks(rows) {
            let x = rows_of::<D>(x, hidden, rows.clone());
            let attended = first + rows.start - start..first + rows.end - start;
            self.with_input(rows_of::<D>(attn_out, attn_width, attended), None, output, |input| {
                self.add_branch(output, input, tail.attention_post_norm, x);
            });
            match tail.mlp {
                Mlp::Dense(mlp) => {
                    let gate_up = mlp.gate_up.storage::<Linear<D>>();
                    let active =
                        self.with_input(x, tail.mlp_norm, gate_up, |input| self.gated(mlp, tail, input));
                    let input = Input { rows: x.rows, at: active.arg(0) };
                    self.add_branch(mlp.down.storage(), &input, tail.mlp_post_norm, x);
                }
                Mlp::Experts(experts) => self.add_experts(experts, tail, x),
            }
        }
    }

    /// Rows in `f32`, normed where a norm is given.
    pub(super) fn normed_rows(&self, x: Rows<'_, D::Memory>, norm: Option<Norm<'_>>) -> Block<D> {
        let out = self.block(4 * x.rows * x.width);
        self.put(x, norm, Target { at: out.arg(0), rows: RowLayout::Plain, stride: x.width });
        out
    }

    pub(super) fn read_logits(&self, x: &Floats, norm: Norm<'_>, w: &Linear<D>, out: &mut Vec<f32>) {
        let rows = x.len() / w.inputs();
        let logits = self.with_input(rows_of::<D>(x, w.inputs(), 0..rows), Some(norm), w, |input| {
            self.stored_product(w, input)
        });
        // The layers are done, and the next step has other tokens.
        self.clear_uploads();
        out.resize(rows * w.outputs(), 0.0);
        self.read(&logits, 0, out);
    }
}
