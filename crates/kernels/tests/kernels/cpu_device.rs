use refrain_kernels::{
    Activation, Buffer, CacheHeads, Cpu, Device, Dtype, GatedMlp, KvRows, LayerTail, Linear, Mlp, Norm,
    PackedLinear, Precision, QkNorms, ReferenceDevice, Rotary, Slice, WeightMatrix, WeightRows, conformance,
    download, upload,
};

use crate::{Rng, bits, cpus};

const HIDDEN: usize = 96;
/// Two parts of the sums of gates with tiles.
const WIDE: usize = 608;
const Q: usize = 64;
const KV: usize = 32;
/// Two parts of a sum with tiles, the last panel not full.
const INTERMEDIATE: usize = 600;
const HEAD: usize = 16;

/// One layer's weights; those of a wide one have biases for gates as well.
struct Layer {
    hidden: usize,
    intermediate: usize,
    norm: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    qkv: PackedLinear,
    output: PackedLinear,
    mlp: GatedMlp,
}

impl Layer {
    fn new(cpu: &Cpu, precision: Precision, (hidden, intermediate): (usize, usize)) -> Layer {
        let mut rng = Rng::new(31);
        let (norm, q_norm, k_norm) = (rng.floats(hidden), rng.floats(HEAD), rng.floats(HEAD));
        let mut pack = |outputs: usize, inputs: usize, biased: bool, gated: bool| {
            let w = rng.floats(outputs * inputs);
            let bias = biased.then(|| rng.floats(outputs));
            let rows = |o: usize, buf: &mut [f32]| {
                buf.copy_from_slice(&w[o * inputs..(o + 1) * inputs]);
                Ok(())
            };
            let rows = WeightRows::F32(&rows);
            let matrix = WeightMatrix { precision, outputs, inputs, bias, rows };
            if gated { cpu.pack_gate_up(matrix).unwrap() } else { cpu.pack(matrix).unwrap() }
        };
        let qkv = pack(Q + 2 * KV, hidden, true, false);
        let output = pack(hidden, Q, false, false);
        let gate_up = pack(2 * intermediate, hidden, hidden == WIDE, true);
        let down = pack(hidden, intermediate, false, false);
        Layer { hidden, intermediate, norm, q_norm, k_norm, qkv, output, mlp: GatedMlp { gate_up, down } }
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.norm, eps: 1e-5 }
    }

    fn heads(&self) -> QkNorms<'_> {
        let norm = |weight| Norm { weight, eps: 1e-5 };
        QkNorms { q: norm(&self.q_norm), k: norm(&self.k_norm) }
    }

    /// The layer's second half, with or without norms after its branches.
    fn tail(&self, activation: Activation, post: bool) -> LayerTail<'_> {
        let post_norm = post.then(|| self.norm());
        LayerTail {
            output: &self.output,
            attention_post_norm: post_norm,
            mlp_norm: Some(self.norm()),
            mlp: Mlp::Dense(&self.mlp),
            activation,
            mlp_post_norm: post_norm,
            next: &self.output,
        }
    }
}

fn normed(cpu: &Cpu, weight: &[f32], x: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    cpu.rms_norm(x, weight, 1e-5, &mut y);
    y
}

/// x += post(input · Wᵀ)
fn add_branch(cpu: &Cpu, w: &PackedLinear, input: &[f32], post: Option<&[f32]>, x: &mut [f32]) {
    let w = w.storage::<Linear>();
    let Some(post) = post else { return cpu.linear_add(w, input, x) };
    let mut branch = vec![0.0; x.len()];
    cpu.linear(w, input, &mut branch);
    x.iter_mut().zip(normed(cpu, post, &branch)).for_each(|(x, y)| *x += y);
}

/// Columns `from .. from + n` of rows of `width`.
fn columns(x: &[f32], width: usize, from: usize, n: usize) -> Vec<f32> {
    x.chunks_exact(width).flat_map(|row| row[from..from + n].to_vec()).collect()
}

#[test]
fn the_cpu_computes_what_the_reference_does() {
    for threads in [1, 2] {
        cpus(threads).iter().for_each(|cpu| conformance::check(cpu));
    }
}

/// Places two tokens of the host, for which there is one slot.
fn place_two_in_one(device: &dyn Device) {
    let heads = CacheHeads { kv_heads: 1, head_dim: 4 };
    let mut cache = device.kv(Dtype::F32, 12);
    device.place(KvRows::Host(Slice::F32(&[0.0; 8])), heads, Rotary::default(), &[1], &mut cache);
}

#[test]
#[should_panic(expected = "tokens × heads × head_dim")]
fn the_cpu_refuses_more_rows_of_the_host_than_slots() {
    place_two_in_one(&Cpu::new(1).unwrap());
}

#[test]
#[should_panic(expected = "tokens × heads × head_dim")]
fn the_reference_refuses_more_rows_of_the_host_than_slots() {
    place_two_in_one(&ReferenceDevice);
}

/// Threads, blocks of rows and their ends change no bit of what the kernels give one after the other.
#[test]
fn steps_are_their_kernels_in_turn() {
    let mut rng = Rng::new(32);
    for (precision, dtype) in [Precision::F32, Precision::Bf16].into_iter().zip([Dtype::F32, Dtype::Bf16]) {
        for threads in [1, 2, 3] {
            for cpu in cpus(threads) {
                let layer = Layer::new(&cpu, precision, (HIDDEN, INTERMEDIATE));
                for rows in [0, 1, 127, 130, 300, 700] {
                    let what = format!("{rows} rows, {precision}, {threads} threads, {:?}", cpu.isa());
                    let start = rng.floats(rows * HIDDEN);
                    for (extra, activation) in [(false, Activation::Silu), (true, Activation::GeluTanh)] {
                        let what = format!("{what}, extra norms {extra}");
                        steps(&cpu, &layer, (extra, activation), dtype, &start, &what);
                    }
                }
            }
        }
    }
}

/// Sums of gates that have several parts, and biases of gates, change no bit either.
#[test]
fn steps_of_a_wide_layer_are_their_kernels_in_turn() {
    let mut rng = Rng::new(33);
    for cpu in cpus(2) {
        let layer = Layer::new(&cpu, Precision::Bf16, (WIDE, 70));
        for rows in [1, 33, 70, 270] {
            let what = format!("{rows} rows, {:?}", cpu.isa());
            for activation in [Activation::Silu, Activation::GeluTanh] {
                let start = rng.floats(rows * WIDE);
                steps(&cpu, &layer, (false, activation), Dtype::Bf16, &start, &what);
            }
        }
    }
}

/// Projects `start` and finishes the layer, against the kernels one after the other. `extra` stands for norms of heads and
/// norms after the branches.
fn steps(
    cpu: &Cpu,
    layer: &Layer,
    (extra, activation): (bool, Activation),
    dtype: Dtype,
    start: &[f32],
    what: &str,
) {
    let rows = start.len() / layer.hidden;
    let (mut x, mut q) = (upload(cpu, start), cpu.floats(0));
    let (mut k, mut v) = (cpu.kv(dtype, 5), cpu.kv(dtype, 5));
    let heads = extra.then(|| layer.heads());
    cpu.project_qkv(&x, 0..rows, Some(layer.norm()), &layer.qkv, heads, KV, &mut q, &mut k, &mut v);
    let mut qkv = vec![0.0; rows * (Q + 2 * KV)];
    cpu.linear(layer.qkv.storage(), &normed(cpu, &layer.norm, start), &mut qkv);
    let part = |from, n, norm: &[f32]| match columns(&qkv, Q + 2 * KV, from, n) {
        part if extra && !norm.is_empty() => normed(cpu, norm, &part),
        part => part,
    };
    let queries = download(cpu, &q);
    assert_eq!(bits(&queries), bits(&part(0, Q, &layer.q_norm)), "{what}: queries");
    for (found, from, norm) in [(&k, Q, &layer.k_norm[..]), (&v, Q + KV, &[])] {
        let mut should = Buffer::zeros(dtype, rows * KV);
        should.write_f32(0, &part(from, KV, norm));
        let found = cpu.download_kv(found, 0..rows * KV);
        assert_eq!(found.as_slice().as_bytes(), should.as_slice().as_bytes(), "{what}: keys or values");
    }
    cpu.attn_output_and_mlp((&q, 0), &layer.tail(activation, extra), 0..rows, &mut x);
    let mut should = start.to_vec();
    let post = extra.then_some(&layer.norm[..]);
    add_branch(cpu, &layer.output, &queries, post, &mut should);
    let mut active = vec![0.0; rows * layer.intermediate];
    cpu.linear_gated(
        layer.mlp.gate_up.storage(),
        activation,
        &normed(cpu, &layer.norm, &should),
        &mut active,
    );
    add_branch(cpu, &layer.mlp.down, &active, post, &mut should);
    assert_eq!(bits(&download(cpu, &x)), bits(&should), "{what}: hidden states");
}
