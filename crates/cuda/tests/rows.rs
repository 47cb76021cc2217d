//! Kernels on rows of activations, emulated, against plain loops in `f64`.
#![cfg(feature = "emulate")]

use half::{bf16, f16};
use refrain_cuda::{Arg, Driver, Emulated, EmulatedMemory, Grid};
use refrain_kernels::conformance::random;

const EPS: f32 = 1e-5;
const ROWS: usize = 35;
/// Widths below, at and above what the threads of a block keep in registers, of whole fours and not.
const WIDTHS: [usize; 8] = [1, 3, 40, 64, 257, 300, 301, 600];

fn size(x: usize) -> Arg<'static, EmulatedMemory> {
    Arg::U32(u32::try_from(x).unwrap())
}

/// Memory that holds these numbers from a byte on.
fn memory_of(driver: &Emulated, at: usize, numbers: &[f32]) -> EmulatedMemory {
    let memory = driver.alloc(at + 4 * numbers.len()).unwrap();
    driver.write(&memory, at, bytemuck::cast_slice(numbers));
    memory
}

fn read<T: bytemuck::Pod>(driver: &Emulated, memory: &EmulatedMemory, at: usize, len: usize) -> Vec<T> {
    let mut out = vec![T::zeroed(); len];
    driver.read(memory, at, bytemuck::cast_slice_mut(&mut out)).unwrap();
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Runs a kernel on [`ROWS`] rows of `width` that begin at a byte, normed where `threads` are given, whose results are `stride` elements apart.
fn put<T: bytemuck::Pod>(
    layout: &str,
    threads: Option<u32>,
    at: usize,
    width: usize,
    stride: usize,
    elements: usize,
) -> Vec<T> {
    let driver = Emulated::new(1);
    let (x, weight) = (random(ROWS * width, 1), random(width, 2));
    let (x, weight) = (memory_of(&driver, at, &x), memory_of(&driver, at, &weight));
    let at_out = at * size_of::<T>() / 4;
    let out = driver.alloc(at_out + elements * size_of::<T>()).unwrap();
    let (from, weight, to) = (Arg::Memory(&x, at), Arg::Memory(&weight, at), Arg::Memory(&out, at_out));
    if let Some(threads) = threads {
        let kernel = if layout == "f32" { "rms_norm_f32" } else { "rms_norm_panels" };
        let grid = Grid { blocks: [ROWS as u32, 1, 1], threads, shared: 128 };
        driver.launch(kernel, grid, &[from, weight, to, size(width), size(stride), Arg::F32(EPS)]);
    } else {
        let kernel = if layout == "f32" { "round_rows_f32" } else { "round_rows_panels" };
        let blocks = [(ROWS * stride.div_ceil(4)).div_ceil(256) as u32, 1, 1];
        let grid = Grid { blocks, threads: 256, shared: 0 };
        driver.launch(kernel, grid, &[from, to, size(ROWS), size(width), size(stride)]);
    }
    read(&driver, &out, at_out, elements)
}

/// Elements of a row after its norm.
fn normed(x: &[f32], weight: &[f32]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(EPS)).sqrt();
    x.iter().zip(weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w)).collect()
}

fn assert_close(got: f32, expected: f64, most: f64, what: &str) {
    let error = (f64::from(got) - expected).abs();
    assert!(error <= most * expected.abs().max(1e-3), "{what}: {got} and not {expected}");
}

#[test]
fn norms_are_right_at_every_width_with_any_threads() {
    for (width, threads) in WIDTHS.into_iter().flat_map(|width| [32, 64, 96].map(|threads| (width, threads)))
    {
        let stride = width + 5;
        let got: Vec<f32> = put("f32", Some(threads), 0, width, stride, ROWS * stride);
        let (x, weight) = (random(ROWS * width, 1), random(width, 2));
        for (got, x) in got.chunks(stride).zip(x.chunks(width)) {
            for (got, expected) in got.iter().zip(normed(x, &weight)) {
                assert_close(*got, expected, 2e-6, &format!("width {width}, {threads} threads"));
            }
            assert_eq!(got[width..], [0.0; 5]);
        }
        // At any place a row has the same bits.
        let moved: Vec<f32> = put("f32", Some(threads), 4, width, stride, ROWS * stride);
        assert_eq!(bits(&moved), bits(&got));
    }
}

#[test]
fn rows_in_panels_are_plain_ones_rounded_and_filled_up() {
    for (width, threads) in
        WIDTHS.into_iter().flat_map(|width| [None, Some(32), Some(96)].map(|threads| (width, threads)))
    {
        let (stride, panels) = (width.next_multiple_of(64), ROWS.div_ceil(32));
        let plain: Vec<f32> = put("f32", threads, 0, width, stride, ROWS * stride);
        if threads.is_none() {
            let x = random(ROWS * width, 1);
            let filled = x.chunks(width).flat_map(|row| [row, &vec![0.0; stride - width]].concat());
            assert_eq!(plain, filled.collect::<Vec<f32>>());
        }
        let got: Vec<u16> = put("panels", threads, 0, width, stride, panels * 32 * stride);
        for (i, x) in plain.iter().enumerate() {
            let (row, column) = (i / stride, i % stride);
            let step = row / 32 * (stride / 64) + column / 64;
            let piece = row % 32 * 8 + ((column % 64 / 8) ^ (row % 8));
            let got = got[step * 2048 + piece * 8 + column % 8];
            assert_eq!(got, bf16::from_f32(*x).to_bits(), "width {width}, row {row}, column {column}");
        }
    }
}

#[test]
fn queries_keys_and_values_are_split_rounded_and_normed() {
    for (q_width, kv_width, segments) in [
        (70, 30, None),
        (600, 300, None),
        (70, 30, Some((10, 10))),
        (70, 30, Some((70, 30))),
        (96, 32, Some((32, 32))),
        (640, 320, Some((640, 320))),
    ] {
        let driver = Emulated::new(1);
        let width = q_width + 2 * kv_width;
        let (q_segment, kv_segment) = segments.unwrap_or((256, 256));
        let (x, weights) = (random(ROWS * width, 1), [random(q_segment, 2), random(kv_segment, 3)]);
        let of_weights = weights.each_ref().map(|weight| memory_of(&driver, 0, weight));
        let of_x = memory_of(&driver, 0, &x);
        let q = driver.alloc(4 * ROWS * q_width).unwrap();
        let kv = [(); 2].map(|()| driver.alloc(2 * ROWS * kv_width).unwrap());
        let weight = |i: usize| segments.map_or(Arg::Null, |_| Arg::Memory(&of_weights[i], 0));
        let warps = ROWS * (q_width.div_ceil(q_segment) + 2 * kv_width.div_ceil(kv_segment));
        let grid = Grid { blocks: [warps.div_ceil(8) as u32, 1, 1], threads: 256, shared: 0 };
        let args = [
            Arg::Memory(&of_x, 0),
            Arg::Memory(&q, 0),
            Arg::Memory(&kv[0], 0),
            Arg::Memory(&kv[1], 0),
            size(ROWS),
            size(q_width),
            size(kv_width),
            weight(0),
            size(q_segment),
            Arg::F32(EPS),
            weight(1),
            size(kv_segment),
            Arg::F32(EPS),
        ];
        driver.launch("split_rows_f16", grid, &args);
        let q: Vec<f32> = read(&driver, &q, 0, ROWS * q_width);
        let [k, v] = kv.map(|kv| read::<u16>(&driver, &kv, 0, ROWS * kv_width));
        let wide = |side: Vec<u16>| side.iter().map(|x| f16::from_bits(*x).to_f32()).collect::<Vec<f32>>();
        for (row, x) in x.chunks(width).enumerate() {
            let (of_q, of_kv) = x.split_at(q_width);
            let (of_k, of_v) = of_kv.split_at(kv_width);
            for (name, got, x, norm, most) in [
                ("q", &q, of_q, segments.map(|_| &weights[0]), 2e-6),
                ("k", &wide(k.clone()), of_k, segments.map(|_| &weights[1]), 1e-3),
                ("v", &wide(v.clone()), of_v, None, 1e-3),
            ] {
                let expected: Vec<f64> = match norm {
                    Some(weight) => x.chunks(weight.len()).flat_map(|x| normed(x, weight)).collect(),
                    None => x.iter().map(|x| f64::from(*x)).collect(),
                };
                for (got, expected) in got[row * x.len()..].iter().zip(expected) {
                    assert_close(*got, expected, most, &format!("{name} of {segments:?}, row {row}"));
                }
            }
        }
    }
}

#[test]
fn bytes_are_copied_whatever_their_number() {
    for bytes in [1, 15, 16, 17, 4095, 4096, 4100] {
        let driver = Emulated::new(1);
        let from: Vec<u8> = (0..bytes).map(|i| (i * 7 % 251) as u8).collect();
        let [source, to] = [(); 2].map(|()| driver.alloc(bytes + 16).unwrap());
        driver.write(&source, 0, &from);
        driver.zero(&to, 0, bytes + 16);
        let grid = Grid { blocks: [bytes.div_ceil(16 * 256) as u32, 1, 1], threads: 256, shared: 0 };
        let args = [Arg::Memory(&source, 0), Arg::Memory(&to, 0), Arg::U64(bytes as u64)];
        driver.launch("copy_from_host", grid, &args);
        let got: Vec<u8> = read(&driver, &to, 0, bytes + 16);
        assert_eq!((&got[..bytes], &got[bytes..]), (&from[..], &[0; 16][..]), "{bytes} bytes");
    }
}
