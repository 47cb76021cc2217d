//! Prints what the kernels reach on this machine: `cargo run --release -p refrain-kernels --example throughput`.

use std::convert::Infallible;
use std::hint::black_box;
use std::time::Instant;

use refrain_kernels::{Attention, Buffer, Cpu, Dtype, Linear, Precision, Rows};

/// Seconds of one call: the best of several.
fn best(mut f: impl FnMut()) -> f64 {
    f();
    let start = Instant::now();
    let mut best = f64::MAX;
    let mut runs = 0;
    while runs < 3 || (start.elapsed().as_secs_f64() < 0.4 && runs < 2000) {
        let t = Instant::now();
        f();
        best = best.min(t.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

fn fill(n: usize) -> Vec<f32> {
    let mut s = 0x2545_f491_4f6c_dd1d_u64;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn weights(cpu: &Cpu, precision: Precision, outputs: usize, inputs: usize) -> Linear {
    let row = fill(inputs);
    let rows = |_, buf: &mut [f32]| {
        buf.copy_from_slice(&row);
        Ok::<(), Infallible>(())
    };
    Linear::pack(cpu, precision, outputs, inputs, None, Rows::Values(&rows)).unwrap_or_else(|e| match e {})
}

/// GFLOP/s of products whose operands stay in the first-level cache: what the kernels could reach.
fn peak(cpu: &Cpu, precision: Precision) -> f64 {
    let small: Vec<Linear> = (0..cpu.threads()).map(|_| weights(cpu, precision, 32, 256)).collect();
    let x = fill(12 * 256);
    let rounds = 2000;
    let t = best(|| {
        cpu.parallel(cpu.threads(), &|i| {
            let mut y = vec![0.0; 12 * 32];
            for _ in 0..rounds {
                cpu.linear(&small[i], black_box(&x), &mut y);
            }
        });
    });
    (cpu.threads() * rounds * 12 * 32 * 256 * 2) as f64 / t / 1e9
}

fn products(cpu: &Cpu) {
    for precision in [Precision::Bf16, Precision::Q8, Precision::F32] {
        println!("{precision} products, small-operand rate {:.0} GFLOP/s", peak(cpu, precision));
        for (m, k, n) in [
            (2048, 576, 1536),
            (256, 4096, 14336),
            (2048, 576, 576),
            (32, 576, 1536),
            (1, 4096, 14336),
            (1, 576, 1536),
        ] {
            let w = weights(cpu, precision, n, k);
            let (x, mut y) = (fill(m * k), Buffer::zeros(Dtype::F32, m * n));
            let Buffer::F32(y) = &mut y else { unreachable!() };
            let t = best(|| cpu.linear(&w, &x, y));
            let rate = (2 * m * k * n) as f64 / t / 1e9;
            println!(
                "  {m}x{k}x{n}: {:.3} ms, {rate:.0} GFLOP/s, weights {:.1} GB/s",
                t * 1e3,
                w.bytes() as f64 / t / 1e9
            );
        }
    }
}

fn attention(cpu: &Cpu) {
    for (rows, n, d, heads, kv_heads) in [
        (4096, 4096, 64, 9, 3),
        (4096, 4096, 128, 12, 2),
        (4096, 4096, 128, 9, 3),
        (256, 4096, 64, 9, 3),
        (16, 4096, 64, 9, 3),
        (1, 4096, 64, 9, 3),
        (1, 4096, 64, 14, 2),
    ] {
        for dtype in [Dtype::F16, Dtype::F32] {
            let q = fill(rows * heads * d);
            let (mut k, mut v) =
                (Buffer::zeros(dtype, kv_heads * n * d), Buffer::zeros(dtype, kv_heads * n * d));
            k.write_f32(0, &fill(kv_heads * n * d));
            v.write_f32(0, &fill(kv_heads * n * d));
            let visible: Vec<(u32, u32)> = (n - rows..n).map(|i| (0, i as u32 + 1)).collect();
            let pairs: usize = visible.iter().map(|v| v.1 as usize).sum();
            let mut out = vec![0.0; q.len()];
            let (k, v) = (k.as_slice(), v.as_slice());
            let a = Attention {
                q: &q,
                k,
                v,
                heads,
                kv_heads,
                head_dim: d,
                capacity: n,
                visible: &visible,
                scale: 0.125,
                precision: Precision::Bf16,
            };
            let t = best(|| cpu.attention(&a, &mut out));
            let rate = (4 * pairs * heads * d) as f64 / t / 1e9;
            let read = (2 * kv_heads * n * d * dtype.size()) as f64 / t / 1e9;
            println!(
                "attention {rows} rows, {n} keys {dtype}, d={d} {heads}/{kv_heads} heads: {:.3} ms, {rate:.0} GFLOP/s (causal), {read:.1} GB/s",
                t * 1e3
            );
            if rows >= 256 && dtype == Dtype::F16 {
                let mut s = vec![0.0; kv_heads * n];
                let t = best(|| cpu.column_sums(&a, 0..n, &mut s));
                println!("  column sums {:.3} ms", t * 1e3);
                let mut z = vec![0.0; rows * n];
                let t = best(|| cpu.concat_logits(&q, heads, kv_heads, d, k, n, 0..n, 0.125, &mut z));
                println!("  logits over all heads {:.3} ms", t * 1e3);
            }
        }
    }
}

fn element_wise(cpu: &Cpu) {
    let (m, f) = (2048, 1536);
    let (x, w) = (fill(m * f * 2), fill(f));
    let mut y = vec![0.0; m * f];
    let gb = |bytes: usize, t: f64| bytes as f64 / t / 1e9;
    let t = best(|| cpu.rms_norm(&x[..m * f], &w, 1e-6, &mut y));
    println!("rms_norm {:.1} GB/s", gb(m * f * 8, t));
    let (cos, sin) = (fill(m * 32), fill(m * 32));
    let t = best(|| cpu.rope(&mut y, 24, 64, &cos, &sin, 64));
    println!("rope {:.1} GB/s", gb(m * f * 8, t));
    let slots: Vec<u32> = (0..m as u32).collect();
    let mut src = Buffer::zeros(Dtype::F16, m * f);
    src.write_f32(0, &y);
    let mut dst = Buffer::zeros(Dtype::F16, m * f);
    let t = best(|| cpu.place_keys(src.as_slice(), 24, 64, &cos, &sin, 64, &slots, &mut dst));
    println!("place_keys f16 {:.1} GB/s", gb(m * f * 4, t));
    let t = best(|| src.as_slice().to_f32(&mut y));
    println!("f16 to f32 (one thread) {:.1} GB/s", gb(m * f * 6, t));
    let t = best(|| refrain_kernels::softmax(&mut y[..49152]));
    println!("softmax of 49152 (one thread) {:.2} Gelem/s", gb(49152, t));
    let t = best(|| cpu.parallel(8, &|i| _ = black_box(i)));
    println!("empty parallel call {:.2} us", t * 1e6);
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(0);
    let cpu = Cpu::new(threads);
    println!("{} threads, {:?}", cpu.threads(), cpu.isa());
    let only = std::env::args().nth(2);
    let wants = |what: &str| only.as_deref().is_none_or(|o| o == what);
    if wants("products") {
        products(&cpu);
    }
    if wants("attention") {
        attention(&cpu);
    }
    if wants("ops") {
        element_wise(&cpu);
    }
}
