use refrain_kernels::{Backend, Buffer, Cpu, Dtype, Linear, Norm, Precision, Rows};

use crate::{Rng, bits, cpus};

const HIDDEN: usize = 96;
const Q: usize = 64;
const KV: usize = 32;
const INTERMEDIATE: usize = 160;

/// One layer's weights.
struct Layer {
    norm: Vec<f32>,
    qkv: Linear,
    output: Linear,
    gate_up: Linear,
    down: Linear,
}

impl Layer {
    fn new(cpu: &Cpu, precision: Precision) -> Layer {
        let mut rng = Rng::new(31);
        let norm = rng.floats(HIDDEN);
        let mut pack = |outputs: usize, inputs: usize, biased: bool, gated: bool| {
            let w = rng.floats(outputs * inputs);
            let bias = biased.then(|| rng.floats(outputs));
            let rows = |o: usize, buf: &mut [f32]| {
                buf.copy_from_slice(&w[o * inputs..(o + 1) * inputs]);
                Ok::<(), ()>(())
            };
            if gated {
                Linear::pack_gated(cpu, precision, outputs / 2, inputs, bias, Rows::Values(&rows)).unwrap()
            } else {
                Linear::pack(cpu, precision, outputs, inputs, bias, Rows::Values(&rows)).unwrap()
            }
        };
        let qkv = pack(Q + 2 * KV, HIDDEN, true, false);
        let output = pack(HIDDEN, Q, false, false);
        let gate_up = pack(2 * INTERMEDIATE, HIDDEN, false, true);
        let down = pack(HIDDEN, INTERMEDIATE, false, false);
        Layer { norm, qkv, output, gate_up, down }
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.norm, eps: 1e-5 }
    }
}

fn normed(cpu: &Cpu, layer: &Layer, x: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    cpu.rms_norm(x, &layer.norm, 1e-5, &mut y);
    y
}

/// Columns `from .. from + n` of rows of `width`.
fn columns(x: &[f32], width: usize, from: usize, n: usize) -> Vec<f32> {
    x.chunks_exact(width).flat_map(|row| row[from..from + n].to_vec()).collect()
}

/// Threads, blocks of rows and their ends change no bit of what the kernels give one after the other.
#[test]
fn steps_are_their_kernels_in_turn() {
    let mut rng = Rng::new(32);
    for (precision, dtype) in [Precision::F32, Precision::Bf16].into_iter().zip([Dtype::F32, Dtype::Bf16]) {
        for threads in [1, 2, 3] {
            for cpu in cpus(threads) {
                let layer = Layer::new(&cpu, precision);
                for rows in [0, 1, 127, 130, 300, 700] {
                    let what = format!("{rows} rows, {precision}, {threads} threads, {:?}", cpu.isa());
                    let start = rng.floats(rows * HIDDEN);
                    let (mut x, mut q, mut attended) = (cpu.floats(), cpu.floats(), cpu.floats());
                    x.resize(rows * HIDDEN);
                    x.copy_from_slice(&start);
                    let (mut k, mut v) = (Buffer::zeros(dtype, 5), Buffer::zeros(dtype, 5));
                    cpu.project(&x, layer.norm(), &layer.qkv, KV, &mut q, &mut k, &mut v);
                    let mut qkv = vec![0.0; rows * (Q + 2 * KV)];
                    cpu.linear(&layer.qkv, &normed(&cpu, &layer, &start), &mut qkv);
                    assert_eq!(bits(&q), bits(&columns(&qkv, Q + 2 * KV, 0, Q)), "{what}: queries");
                    for (found, from) in [(&k, Q), (&v, Q + KV)] {
                        let mut should = Buffer::zeros(dtype, rows * KV);
                        should.write_f32(0, &columns(&qkv, Q + 2 * KV, from, KV));
                        let found = found.as_slice().range(0..rows * KV);
                        assert_eq!(found.as_bytes(), should.as_slice().as_bytes(), "{what}: keys or values");
                    }
                    attended.resize(rows * Q);
                    attended.copy_from_slice(&q);
                    cpu.finish(&attended, &layer.output, layer.norm(), &layer.gate_up, &layer.down, &mut x);
                    let mut should = start;
                    cpu.linear_add(&layer.output, &q, &mut should);
                    let mut active = vec![0.0; rows * INTERMEDIATE];
                    cpu.linear_swiglu(&layer.gate_up, &normed(&cpu, &layer, &should), &mut active);
                    cpu.linear_add(&layer.down, &active, &mut should);
                    assert_eq!(bits(&x), bits(&should), "{what}: hidden states");
                }
            }
        }
    }
}
