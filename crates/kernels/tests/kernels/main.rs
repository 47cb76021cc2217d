//! Every kernel against a plain loop in `f64`, under every instruction set of this machine.

mod attention;
mod cpu_device;
mod from_lse;
mod isa;
mod linear;
mod ops;
mod pool;
mod same_bits;
mod weights;

use refrain_kernels::{Buffer, Cpu, Dtype, Isa};

/// xorshift64*.
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// In −1 .. 1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    fn buffer(&mut self, dtype: Dtype, n: usize) -> Buffer {
        let mut buffer = Buffer::zeros(dtype, n);
        buffer.write_f32(0, &self.floats(n));
        buffer
    }
}

/// One pool for each available instruction set.
fn cpus(threads: usize) -> Vec<Cpu> {
    Isa::ALL.into_iter().filter_map(|isa| Cpu::with_isa(threads, isa).ok()).collect()
}

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Asserts |a − b| <= tolerance · (1 + |b|) for all elements.
#[track_caller]
fn assert_close(a: &[f32], b: &[f64], tolerance: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let error = (*a as f64 - b).abs();
        assert!(error <= tolerance * (1.0 + b.abs()), "{what}: element {i} is {a}, should be {b}");
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
