//! Products, norms and rotation of the reference device.

use crate::device::{Experts, GatedMlp, Norm, PackedLinear, QkNorms, Rotary, RowUnavailable, WeightMatrix};
use crate::linear::Activation;

/// W (outputs × inputs) and b; gates first, then what they open.
pub(super) struct Weights {
    pub(super) w: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) inputs: usize,
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn normed(x: &[f32], norm: Option<Norm<'_>>) -> Vec<f32> {
    let Some(norm) = norm else { return x.to_vec() };
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

pub(super) fn add_normed(branch: &[f32], post: Option<Norm<'_>>, x: &mut [f32]) {
    x.iter_mut().zip(normed(branch, post)).for_each(|(x, y)| *x += y);
}

pub(super) fn gated_mlp(mlp: &GatedMlp, activation: Activation, x: &[f32]) -> Vec<f32> {
    let width = mlp.gate_up.storage::<Weights>().b.len();
    let gated = |row: &[f32]| {
        let (gate, up) = row.split_at(width / 2);
        gate.iter().zip(up).map(|(g, u)| activate(activation, *g) * u).collect::<Vec<_>>()
    };
    let active: Vec<f32> = product(&mlp.gate_up, x).chunks_exact(width).flat_map(gated).collect();
    product(&mlp.down, &active)
}

pub(super) fn mixture(mixture: Experts<'_>, activation: Activation, x: &[f32], hidden: usize) -> Vec<f32> {
    let Experts { router, experts, top_k, normalised } = mixture;
    let row = |x: &[f32]| {
        let logits = product(router, x);
        let sum: f32 = logits.iter().map(|logit| logit.exp()).sum();
        let mut chosen: Vec<(usize, f32)> =
            logits.iter().map(|logit| logit.exp() / sum).enumerate().collect();
        chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
        chosen.truncate(top_k);
        let whole: f32 = if normalised { chosen.iter().map(|(_, weight)| weight).sum() } else { 1.0 };
        let mut y = vec![0.0; hidden];
        for (expert, weight) in chosen {
            let part = gated_mlp(&experts[expert], activation, x);
            y.iter_mut().zip(part).for_each(|(y, part)| *y += weight / whole * part);
        }
        y
    };
    x.chunks_exact(hidden).flat_map(row).collect()
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

/// Queries, keys and values of normed rows.
pub(super) fn projected(
    w: &PackedLinear,
    x: &[f32],
    qk_norms: Option<QkNorms<'_>>,
    kv_width: usize,
) -> [Vec<f32>; 3] {
    let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
    let width = w.storage::<Weights>().b.len();
    for row in product(w, x).chunks_exact(width) {
        let (row_q, row_kv) = row.split_at(width - 2 * kv_width);
        let (row_k, row_v) = row_kv.split_at(kv_width);
        q.extend(normed(row_q, qk_norms.map(|norms| norms.q)));
        k.extend(normed(row_k, qk_norms.map(|norms| norms.k)));
        v.extend(row_v);
    }
    [q, k, v]
}

pub(super) fn pack(matrix: &WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable> {
    let WeightMatrix { outputs, inputs, bias, rows, .. } = matrix;
    let mut w = vec![0.0; outputs * inputs];
    for (row, w) in w.chunks_exact_mut(*inputs).enumerate() {
        rows.write_f32(row, w)?;
    }
    let (b, bytes) = (bias.clone().unwrap_or(vec![0.0; *outputs]), 4 * w.len());
    Ok(PackedLinear::new(Weights { w, b, inputs: *inputs }, bytes))
}
