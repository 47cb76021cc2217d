//! The calls of a layer that are measured on a GPU, and their shapes.

use refrain_kernels::{
    Activation, CacheHeads, CachedAttention, Device, Dtype, Floats, GatedMlp, KvBuffer, KvRows, LayerTail,
    Mlp, Norm, PackedLinear, Precision, Rotary, RowUnavailable, TableEntries, TableNumber, WeightMatrix,
    WeightRows, upload,
};

use crate::cases::{angles, buffer, fill};

/// Dimensions of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) intermediate: usize,
}

/// Shapes of all cases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shapes {
    pub(crate) layer: Layer,
    /// Rows of products.
    pub(crate) rows: [usize; 4],
    /// Keys of a prompt's attention, as many as rows.
    pub(crate) keys: usize,
    /// Keys of one row's attention.
    pub(crate) row_keys: [usize; 2],
    /// Tokens of a prompt of which 15 % of the rows attend.
    pub(crate) selected_of: usize,
    /// Rows of a question, of which the attention mass is taken.
    pub(crate) question: usize,
    /// Bytes of operands that calls of few rows rotate through, so that none finds its own in a cache.
    pub(crate) rotation: usize,
}

impl Shapes {
    /// Shapes of Llama 3 8B.
    pub(crate) fn llama_8b() -> Shapes {
        Shapes {
            layer: Layer { hidden: 4096, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 14_336 },
            rows: [1, 8, 512, 4096],
            keys: 4096,
            row_keys: [4096, 32_768],
            selected_of: 6144,
            question: 64,
            rotation: 512 << 20,
        }
    }

    /// Small ones, for tests on emulated threads.
    pub(crate) fn tiny() -> Shapes {
        Shapes {
            layer: Layer { hidden: 64, heads: 4, kv_heads: 2, head_dim: 64, intermediate: 96 },
            rows: [1, 2, 17, 33],
            keys: 40,
            row_keys: [40, 70],
            selected_of: 60,
            question: 3,
            rotation: 1,
        }
    }
}

/// A call with its operands, and what it takes at least.
pub(crate) struct GpuCase {
    pub(crate) kernel: &'static str,
    pub(crate) shape: String,
    /// Multiplications and additions on tensor cores.
    pub(crate) operations: f64,
    /// Bytes of the GPU's memory that are read or written, each once.
    pub(crate) bytes: f64,
    /// Bytes that come from the host.
    pub(crate) bus_bytes: f64,
    pub(crate) prepare: Prepare,
}

/// Puts the operands into the GPU's memory.
pub(crate) type Prepare = Box<dyn FnOnce(&dyn Device) -> Call>;
pub(crate) type Call = Box<dyn FnMut(&dyn Device)>;

/// All cases, in the order of the table.
pub(crate) fn gpu_cases(shapes: &Shapes) -> Vec<GpuCase> {
    let Shapes { layer, rows, keys, row_keys, selected_of, question, rotation } = *shapes;
    let mut all = Vec::new();
    all.extend(rows.map(|rows| projection(layer, rows, rotation)));
    all.extend(rows.map(|rows| output_and_mlp(layer, rows, rotation, Precision::Bf16)));
    all.extend(rows.map(|rows| output_and_mlp(layer, rows, rotation, Precision::Q8)));
    for head_dim in [64, 128] {
        let visible = (0..keys).map(|row| (0, row as u32 + 1)).collect();
        all.push(attention("attention, prefill", Layer { head_dim, ..layer }, visible, 1));
    }
    for keys in row_keys {
        all.push(attention("attention, one row", layer, vec![(0, keys as u32)], rotation));
    }
    // The last row is the question's.
    let selected: Vec<(u32, u32)> = (1..=selected_of * 15 / 100)
        .map(|row| (0, (row * selected_of / (selected_of * 15 / 100)) as u32))
        .collect();
    all.push(attention("attention, 15 % of rows", layer, selected, 1));
    all.extend([false, true].map(|from_host| placing(layer, keys, from_host)));
    all.extend([false, true].map(|concatenated| mass(layer, question, selected_of, concatenated)));
    all
}

/// How many copies of operands of `bytes` bytes calls rotate through.
fn copies(rotation: usize, bytes: usize) -> usize {
    rotation.div_ceil(bytes.max(1)).max(1)
}

/// Weights of `outputs` × `inputs`, of which each row begins elsewhere in the same pseudo-random numbers.
fn weights(
    device: &dyn Device,
    precision: Precision,
    outputs: usize,
    inputs: usize,
    is_gated: bool,
) -> PackedLinear {
    let numbers = fill(inputs + 64 * 1024);
    let scale = 1.0 / (inputs as f32).sqrt();
    let row = |row: usize, out: &mut [f32]| {
        let from = row * 97 % (64 * 1024);
        out.iter_mut().zip(&numbers[from..]).for_each(|(out, number)| *out = scale * number);
        Ok::<(), RowUnavailable>(())
    };
    let matrix = WeightMatrix { precision, outputs, inputs, bias: None, rows: WeightRows::F32(&row) };
    let packed = if is_gated { device.pack_gate_up(matrix) } else { device.pack(matrix) };
    packed.unwrap_or_else(|RowUnavailable| unreachable!("every row can be had"))
}

/// Queries, keys and values of normed rows.
fn projection(layer: Layer, rows: usize, rotation: usize) -> GpuCase {
    let Layer { hidden, heads, kv_heads, head_dim, .. } = layer;
    let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let outputs = q_width + 2 * kv_width;
    let weight_bytes = 2 * outputs * hidden;
    let copies = if rows <= 16 { copies(rotation, weight_bytes) } else { 1 };
    let prepare = move |device: &dyn Device| -> Call {
        let one = || weights(device, Precision::Bf16, outputs, hidden, false);
        let weights: Vec<_> = (0..copies).map(|_| one()).collect();
        let (x, norm) = (upload(device, &fill(rows * hidden)), vec![1.0; hidden]);
        let (mut q, mut k, mut v) = (device.floats(0), device.kv(Dtype::F16, 0), device.kv(Dtype::F16, 0));
        let mut turn = 0;
        Box::new(move |device| {
            let norm = Norm { weight: &norm, eps: 1e-5 };
            device.project_qkv(
                &x,
                0..rows,
                Some(norm),
                &weights[turn],
                None,
                kv_width,
                &mut q,
                &mut k,
                &mut v,
            );
            turn = (turn + 1) % weights.len();
        })
    };
    GpuCase {
        kernel: "product, q k v",
        shape: format!("{rows}×{hidden}×{outputs}"),
        operations: (2 * rows * hidden * outputs) as f64,
        bytes: (weight_bytes + rows * (4 * hidden + 4 * q_width + 2 * 2 * kv_width)) as f64,
        bus_bytes: 0.0,
        prepare: Box::new(prepare),
    }
}

/// The layer's second half: output projection and MLP, with what is between.
fn output_and_mlp(layer: Layer, rows: usize, rotation: usize, precision: Precision) -> GpuCase {
    let Layer { hidden, heads, head_dim, intermediate, .. } = layer;
    let q_width = heads * head_dim;
    let elements = hidden * q_width + 3 * hidden * intermediate;
    // A block of 32 weights of 8 bits has a scale of 2 bytes.
    let (kernel, weight_bytes) = match precision {
        Precision::Q8 => ("products, output and MLP, 8 bits", elements + elements / 16),
        _ => ("products, output and MLP", 2 * elements),
    };
    let copies = if rows <= 16 { copies(rotation, weight_bytes) } else { 1 };
    let prepare = move |device: &dyn Device| -> Call {
        let weights = |outputs, inputs, is_gated| weights(device, precision, outputs, inputs, is_gated);
        let all: Vec<(PackedLinear, GatedMlp)> = (0..copies)
            .map(|_| {
                let gate_up = weights(2 * intermediate, hidden, true);
                let down = weights(hidden, intermediate, false);
                (weights(hidden, q_width, false), GatedMlp { gate_up, down })
            })
            .collect();
        let (attended, norm) = (upload(device, &fill(rows * q_width)), vec![1.0; hidden]);
        let (mut x, mut turn) = (upload(device, &fill(rows * hidden)), 0);
        Box::new(move |device| {
            let (output, mlp) = &all[turn];
            let tail = LayerTail {
                output,
                attention_post_norm: None,
                mlp_norm: Some(Norm { weight: &norm, eps: 1e-5 }),
                mlp: Mlp::Dense(mlp),
                activation: Activation::Silu,
                mlp_post_norm: None,
                next: output,
            };
            device.attn_output_and_mlp((&attended, 0), &tail, 0..rows, &mut x);
            turn = (turn + 1) % all.len();
        })
    };
    GpuCase {
        kernel,
        shape: format!("{rows}×{hidden}, {intermediate} inside"),
        operations: (2 * rows * elements) as f64,
        bytes: (weight_bytes + rows * (4 * q_width + 2 * 4 * hidden)) as f64,
        bus_bytes: 0.0,
        prepare: Box::new(prepare),
    }
}

/// Queries with a cache of keys and values, or several that calls rotate through.
struct Rows {
    layer: Layer,
    q: Floats,
    kv: Vec<[KvBuffer; 2]>,
    capacity: usize,
    visible: Vec<(u32, u32)>,
}

impl Rows {
    fn new(device: &dyn Device, layer: Layer, visible: &[(u32, u32)], copies: usize) -> Rows {
        let capacity = last_key(visible);
        let one = buffer(Dtype::F16, layer.kv_heads * capacity * layer.head_dim);
        let kv = (0..copies).map(|_| [(); 2].map(|()| device.upload_kv(one.as_slice()))).collect();
        let q = upload(device, &fill(visible.len() * layer.heads * layer.head_dim));
        Rows { layer, q, kv, capacity, visible: visible.to_vec() }
    }

    fn attention(&self, turn: usize) -> CachedAttention<'_> {
        let Layer { heads, kv_heads, head_dim, .. } = self.layer;
        let [k, v] = &self.kv[turn % self.kv.len()];
        CachedAttention {
            q: &self.q,
            first_row: 0,
            k,
            v,
            heads,
            kv_heads,
            head_dim,
            capacity: self.capacity,
            visible: &self.visible,
            scale: 1.0 / (head_dim as f32).sqrt(),
            precision: Precision::Bf16,
        }
    }
}

fn last_key(visible: &[(u32, u32)]) -> usize {
    visible.iter().map(|seen| seen.1 as usize).max().unwrap_or(0)
}

fn pairs(visible: &[(u32, u32)]) -> usize {
    visible.iter().map(|seen| (seen.1 - seen.0) as usize).sum()
}

fn attention(kernel: &'static str, layer: Layer, visible: Vec<(u32, u32)>, rotation: usize) -> GpuCase {
    let Layer { heads, kv_heads, head_dim, .. } = layer;
    let (rows, keys, pairs) = (visible.len(), last_key(&visible), pairs(&visible));
    let kv_bytes = 2 * 2 * kv_heads * keys * head_dim;
    let prepare = move |device: &dyn Device| -> Call {
        let rows = Rows::new(device, layer, &visible, copies(rotation, kv_bytes));
        let (mut out, mut turn) = (device.floats(rows.q.len()), 0);
        Box::new(move |device| {
            device.attention(&rows.attention(turn), &mut out, None);
            turn += 1;
        })
    };
    GpuCase {
        kernel,
        shape: format!("{rows}×{keys}, {heads}/{kv_heads} heads of {head_dim}"),
        operations: (4 * pairs * heads * head_dim) as f64,
        bytes: (kv_bytes + 2 * 4 * rows * heads * head_dim) as f64,
        bus_bytes: 0.0,
        prepare: Box::new(prepare),
    }
}

/// Keys rotated to their places, by a table that layers share; the keys may come from the host.
fn placing(layer: Layer, tokens: usize, from_host: bool) -> GpuCase {
    let Layer { kv_heads, head_dim, .. } = layer;
    let elements = tokens * kv_heads * head_dim;
    let prepare = move |device: &dyn Device| -> Call {
        let ([cos, sin], rows) = (angles(tokens, head_dim / 2), buffer(Dtype::F16, elements));
        let slots: Vec<u32> = (0..tokens as u32).collect();
        let on_device = device.upload_kv(rows.as_slice());
        let (mut cache, table) = (device.kv(Dtype::F16, elements), TableNumber::unused());
        Box::new(move |device| {
            let rows = match from_host {
                true => KvRows::Host(rows.as_slice()),
                false => KvRows::Device(&on_device, 0),
            };
            let heads = CacheHeads { kv_heads, head_dim };
            let rotary = Rotary { cos: &cos, sin: &sin, entries: Some(TableEntries { table, first: 0 }) };
            device.place(rows, heads, rotary, &slots, &mut cache);
        })
    };
    let tables = 4 * tokens * head_dim;
    GpuCase {
        kernel: "placing with rotation",
        shape: format!("{tokens}×{kv_heads}×{head_dim}{}", if from_host { ", from the host" } else { "" }),
        operations: 0.0,
        bytes: (2 * 2 * elements + tables) as f64,
        bus_bytes: if from_host { (2 * elements) as f64 } else { 0.0 },
        prepare: Box::new(prepare),
    }
}

/// Attention mass of each key, by a question's rows, which all see every key; no values are read.
fn mass(layer: Layer, rows: usize, keys: usize, concatenated: bool) -> GpuCase {
    let Layer { heads, kv_heads, head_dim, .. } = layer;
    let visible = vec![(0, keys as u32); rows];
    let prepare = move |device: &dyn Device| -> Call {
        let rows = Rows::new(device, layer, &visible, 1);
        let mut sums = vec![0.0; if concatenated { keys } else { kv_heads * keys }];
        Box::new(move |device| match concatenated {
            true => device.concat_attention_mass(&rows.attention(0), 0..keys, &mut sums),
            false => device.attention_mass(&rows.attention(0), 0..keys, &mut sums),
        })
    };
    GpuCase {
        kernel: if concatenated { "attention mass, heads concatenated" } else { "attention mass" },
        shape: format!("{rows}×{keys}, {heads}/{kv_heads} heads of {head_dim}"),
        operations: (2 * rows * keys * heads * head_dim) as f64,
        bytes: (2 * kv_heads * keys * head_dim + 4 * rows * heads * head_dim) as f64,
        bus_bytes: 0.0,
        prepare: Box::new(prepare),
    }
}
