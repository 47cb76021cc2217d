//! One decoder for all families: Llama, Mistral, Qwen2 and Phi-3 differ by data, not by code.
//!
//! The decoder computes; which rows it computes and which keys they see is decided by its caller, layer by layer:
//! [`Decoder::project`], attention over the caller's KV cache, [`Decoder::finish`].

use refrain_kernels::{Buffer, Cpu, Dtype, Linear, Precision, Rows};
use refrain_kv::{Rope, Shape};

use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::files::ModelFiles;
use crate::rope;
use crate::weights::{Matrix, Weights};

/// Rows that go through a feed-forward or projection block at once; bounds the workspace.
const BLOCK: usize = 512;

/// A loaded model.
#[derive(Debug)]
pub struct Decoder {
    cpu: Cpu,
    files: ModelFiles,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Linear,
    precision: Precision,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    /// `(H + 2·Hkv)·d × D`: queries, keys, values.
    qkv: Linear,
    o: Linear,
    mlp_norm: Vec<f32>,
    /// `2·F × D`: gate, up.
    gate_up: Linear,
    down: Linear,
}

/// Buffers reused from layer to layer and step to step.
#[derive(Debug)]
pub struct Workspace {
    /// Queries of the last projection, `m × H × d`.
    pub q: Vec<f32>,
    /// Its keys before RoPE, `m × Hkv × d`, rounded to the cache's type. Longer than that if `m` has shrunk.
    pub k: Buffer,
    /// Its values, `m × Hkv × d`, rounded to the cache's type. Longer than that if `m` has shrunk.
    pub v: Buffer,
    /// Room for the attention's output, `m × H × d`.
    pub attended: Vec<f32>,
    normed: Vec<f32>,
    wide: Vec<f32>,
}

impl Workspace {
    /// An empty workspace for keys and values of this type.
    pub fn new(dtype: Dtype) -> Workspace {
        Workspace {
            q: Vec::new(),
            k: Buffer::zeros(dtype, 0),
            v: Buffer::zeros(dtype, 0),
            attended: Vec::new(),
            normed: Vec::new(),
            wide: Vec::new(),
        }
    }
}

/// The first `len` elements of `buffer`, grown if needed.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Decoder {
    /// Packs a model's weights. `progress(done, total)` is called after every layer, in layers.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape than the configuration says, or an unsupported type.
    pub fn load(
        files: ModelFiles,
        cpu: &Cpu,
        precision: Precision,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Decoder> {
        let (config, weights) = (files.config(), files.weights());
        let pack = Pack { config, weights, cpu, precision };
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            layers.push(pack.layer(index)?);
            progress(index + 1, config.layers);
        }
        let norm = weights.vector("model.norm.weight", config.hidden)?;
        let head_name = if !config.tied_embeddings && weights.has("lm_head.weight") {
            "lm_head.weight"
        } else {
            "model.embed_tokens.weight"
        };
        let head = pack.linear(&[(head_name.to_owned(), config.vocab)], config.hidden)?;
        weights.release_pages();
        Ok(Decoder { cpu: cpu.clone(), files, layers, norm, head, precision })
    }

    /// The resolved configuration.
    pub fn config(&self) -> &Config {
        self.files.config()
    }

    /// The CPU that it computes on.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// How weights are kept and multiplied.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Sizes of keys and values.
    pub fn shape(&self) -> Shape {
        let Config { layers, kv_heads, head_dim, .. } = *self.config();
        Shape { layers, kv_heads, head_dim }
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> usize {
        let layer = |l: &Layer| l.qkv.bytes() + l.o.bytes() + l.gate_up.bytes() + l.down.bytes();
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes()
    }

    /// Rotary frequencies for a request of `total` tokens, prompt and answer.
    pub fn rope(&self, total: usize) -> Rope {
        rope::rope(&self.config().rope, total)
    }

    /// Embeddings of `ids`: `m × D`.
    ///
    /// # Errors
    /// If an id has no row.
    pub fn embed(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let table = self.files.weights().matrix("model.embed_tokens.weight")?;
        let mut x = vec![0.0; ids.len() * self.config().hidden];
        for (id, row) in ids.iter().zip(x.chunks_mut(self.config().hidden)) {
            table.row(*id as usize, row)?;
        }
        Ok(x)
    }

    /// Queries, keys and values of `x` (`m × D`) at `layer`, none of them rotated, into `work.q`, `work.k`, `work.v`.
    pub fn project(&self, layer: usize, x: &[f32], work: &mut Workspace) {
        let Config { hidden, heads, kv_heads, head_dim, .. } = *self.config();
        let rows = x.len() / hidden;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let width = q_width + 2 * kv_width;
        work.q.resize(rows * q_width, 0.0);
        for buffer in [&mut work.k, &mut work.v] {
            if buffer.len() < rows * kv_width {
                *buffer = Buffer::zeros(buffer.dtype(), rows * kv_width);
            }
        }
        let layer = &self.layers[layer];
        for (block, x) in x.chunks(BLOCK * hidden).enumerate() {
            let normed = room(&mut work.normed, x.len());
            self.cpu.rms_norm(x, &layer.attention_norm, self.config().rms_eps, normed);
            let qkv = room(&mut work.wide, x.len() / hidden * width);
            self.cpu.linear(&layer.qkv, normed, qkv);
            for (i, row) in qkv.chunks(width).enumerate() {
                let at = block * BLOCK + i;
                work.q[at * q_width..(at + 1) * q_width].copy_from_slice(&row[..q_width]);
                work.k.write_f32(at * kv_width, &row[q_width..q_width + kv_width]);
                work.v.write_f32(at * kv_width, &row[q_width + kv_width..]);
            }
        }
    }

    /// The rest of a layer after attention, in place: `x += o(attended)`, `x += mlp(norm(x))`.
    ///
    /// `x` is `m × D`; `work.attended` holds the attention's output, `m × H × d`.
    pub fn finish(&self, layer: usize, x: &mut [f32], work: &mut Workspace) {
        let Config { hidden, intermediate, heads, head_dim, rms_eps, .. } = *self.config();
        let layer = &self.layers[layer];
        let blocks = x.chunks_mut(BLOCK * hidden).zip(work.attended.chunks(BLOCK * heads * head_dim));
        for (x, attended) in blocks {
            let rows = x.len() / hidden;
            self.cpu.linear_add(&layer.o, attended, x);
            let normed = room(&mut work.normed, x.len());
            self.cpu.rms_norm(x, &layer.mlp_norm, rms_eps, normed);
            let active = room(&mut work.wide, rows * intermediate);
            self.cpu.linear_swiglu(&layer.gate_up, normed, active);
            self.cpu.linear_add(&layer.down, active, x);
        }
    }

    /// Logits of `x` (`m × D`, after the last layer): `m × vocab`.
    pub fn logits(&self, x: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; x.len()];
        self.cpu.rms_norm(x, &self.norm, self.config().rms_eps, &mut normed);
        let mut logits = vec![0.0; x.len() / self.config().hidden * self.config().vocab];
        self.cpu.linear(&self.head, &normed, &mut logits);
        logits
    }
}

struct Pack<'a> {
    config: &'a Config,
    weights: &'a Weights,
    cpu: &'a Cpu,
    precision: Precision,
}

impl Pack<'_> {
    fn layer(&self, index: usize) -> Result<Layer> {
        let Config { hidden, heads, kv_heads, head_dim, intermediate, .. } = *self.config;
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let mlp = [("mlp.gate_proj.weight", intermediate), ("mlp.up_proj.weight", intermediate)];
        let attention = [
            ("self_attn.q_proj.weight", q),
            ("self_attn.k_proj.weight", kv),
            ("self_attn.v_proj.weight", kv),
        ];
        let named = |parts: &[(&str, usize)]| parts.iter().map(|(part, rows)| (name(part), *rows)).collect();
        // Some models store them as one matrix.
        let parts = |fused: &str, parts: &[(&str, usize)]| -> Vec<(String, usize)> {
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            if self.weights.has(&name(fused)) { vec![(name(fused), rows)] } else { named(parts) }
        };
        Ok(Layer {
            attention_norm: self.weights.vector(&name("input_layernorm.weight"), hidden)?,
            qkv: self.linear(&parts("self_attn.qkv_proj.weight", &attention), hidden)?,
            o: self.linear(&[(name("self_attn.o_proj.weight"), hidden)], q)?,
            mlp_norm: self.weights.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up: self.gated(&parts("mlp.gate_up_proj.weight", &mlp), intermediate, hidden)?,
            down: self.linear(&[(name("mlp.down_proj.weight"), hidden)], intermediate)?,
        })
    }

    /// Packs matrices `(name, rows)` of `inputs` columns below one another, with their biases where there are any.
    fn linear(&self, parts: &[(String, usize)], inputs: usize) -> Result<Linear> {
        let stacked = Stacked::new(self.weights, parts, inputs)?;
        let (outputs, bias) = (stacked.outputs, stacked.bias.clone());
        stacked.pack(self.precision, |rows| {
            Linear::pack(self.cpu, self.precision, outputs, inputs, bias, rows)
        })
    }

    /// The same for gates and, below them, what they open.
    fn gated(&self, parts: &[(String, usize)], width: usize, inputs: usize) -> Result<Linear> {
        let stacked = Stacked::new(self.weights, parts, inputs)?;
        let bias = stacked.bias.clone();
        stacked.pack(self.precision, |rows| {
            Linear::pack_gated(self.cpu, self.precision, width, inputs, bias, rows)
        })
    }
}

/// Matrices below one another.
struct Stacked<'a> {
    /// The first row of each.
    matrices: Vec<(usize, Matrix<'a>)>,
    outputs: usize,
    bias: Option<Vec<f32>>,
}

impl<'a> Stacked<'a> {
    fn new(weights: &'a Weights, parts: &[(String, usize)], inputs: usize) -> Result<Stacked<'a>> {
        let (mut matrices, mut bias, mut biased, mut outputs) = (Vec::new(), Vec::new(), false, 0);
        for (name, rows) in parts {
            matrices.push((outputs, weights.matrix_of(name, *rows, inputs)?));
            outputs += rows;
            let name = name.replace(".weight", ".bias");
            if weights.has(&name) {
                biased = true;
                bias.extend(weights.vector(&name, *rows)?);
            }
            bias.resize(outputs, 0.0);
        }
        Ok(Stacked { matrices, outputs, bias: biased.then_some(bias) })
    }

    /// Gives the rows to `pack`, as blocks of four bits where the precision keeps them and all matrices have them.
    fn pack(
        &self,
        precision: Precision,
        pack: impl FnOnce(Rows<'_, ModelError>) -> Result<Linear>,
    ) -> Result<Linear> {
        let find = |row: usize| {
            let (start, matrix) = &self.matrices[self.matrices.partition_point(|(start, _)| *start <= row) - 1];
            (matrix, row - start)
        };
        if precision == Precision::Q8 && self.matrices.iter().all(|(_, matrix)| matrix.has_nibbles()) {
            return pack(Rows::Nibbles(&|row, out| {
                let (matrix, row) = find(row);
                matrix.nibbles(row, out)
            }));
        }
        pack(Rows::Values(&|row, out| {
            let (matrix, row) = find(row);
            matrix.row(row, out)
        }))
    }
}
