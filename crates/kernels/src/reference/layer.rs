//! Products, norms and rotation of the reference device.

use crate::device::{Norm, PackedLinear, Rotary, RowUnavailable, WeightMatrix};
use crate::linear::{Activation, WeightRows};

/// W (outputs × inputs) and b; gates first, then what they open.
pub(super) struct Weights {
    pub(super) w: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) inputs: usize,
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn normed(x: &[f32], norm: Norm<'_>) -> Vec<f32> {
    let n = norm.weight.len();
    let row = |x: &[f32]| {
        let scale = 1.0 / (dot(x, x) / n as f32 + norm.eps).sqrt();
        x.iter().zip(norm.weight).map(|(x, w)| x * scale * w).collect::<Vec<_>>()
    };
    x.chunks_exact(n).flat_map(row).collect()
}

pub(super) fn product(w: &PackedLinear, x: &[f32]) -> Vec<f32> {
    let Weights { w, b, inputs } = w.storage::<Weights>();
    let row = |x: &[f32]| w.chunks_exact(*inputs).zip(b).map(|(w, b)| dot(w, x) + b).collect::<Vec<_>>();
    x.chunks_exact(*inputs).flat_map(row).collect()
}

pub(super) fn add_branch(w: &PackedLinear, input: &[f32], post: Option<Norm<'_>>, x: &mut [f32]) {
    let branch = product(w, input);
    let branch = post.map_or(branch.clone(), |post| normed(&branch, post));
    x.iter_mut().zip(branch).for_each(|(x, y)| *x += y);
}

pub(super) fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x / 2.0 * (1.0 + inner.tanh())
        }
    }
}

/// Rotates a token's heads by entry `token` of a table.
pub(super) fn rotate(x: &mut [f32], head_dim: usize, rotary: Rotary<'_>, half: usize, token: usize) {
    let (cos, sin) = (&rotary.cos[token * half..][..half], &rotary.sin[token * half..][..half]);
    for head in x.chunks_exact_mut(head_dim) {
        for i in 0..half {
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * cos[i] - b * sin[i];
            head[i + half] = b * cos[i] + a * sin[i];
        }
    }
}

pub(super) fn pack(matrix: &WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
    let WeightMatrix { outputs, inputs, bias, rows, .. } = matrix;
    let mut w = vec![0.0; outputs * inputs];
    for (row, w) in w.chunks_exact_mut(*inputs).enumerate() {
        match rows {
            WeightRows::F32(write) => write(row, w)?,
            WeightRows::Q4(write) => {
                let mut blocks = vec![Default::default(); inputs.div_ceil(32)];
                write(row, &mut blocks)?;
                let weights = blocks.iter().flat_map(|b| b.q.map(|q| b.scale * f32::from(q) + b.min));
                w.iter_mut().zip(weights).for_each(|(w, weight)| *w = weight);
            }
        }
    }
    let (b, bytes) = (bias.clone().unwrap_or(vec![0.0; *outputs]), 4 * w.len());
    Ok(PackedLinear::new(Weights { w, b, inputs: *inputs }, bytes))
}
