//! Measured peaks of this machine, with which kernels are compared.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::cpu::Cpu;
use crate::disjoint::DisjointMut;
use crate::isa::Isa;
use crate::pages;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::Tiles;
#[cfg(target_arch = "x86_64")]
use crate::simd::features::Amx;
#[cfg(target_arch = "x86_64")]
use crate::simd::pair_tiles::{SIDE, TILE};
use crate::simd::{Kernel, Simd};

/// Duration of the measurement of a peak.
const LOOKED: Duration = Duration::from_millis(250);
/// Duration of a round in which the threads calculate: so long that waking them does not count, and so short that other
/// work of the machine interrupts few rounds.
const ROUND: f64 = 1e-3;
/// Floats that are gone through again and again, 512 MiB: more than a last-level cache keeps of them.
const FLOATS: usize = 128 << 20;
/// Floats read, or read and written, in one round.
const WINDOW: usize = FLOATS / 8;
/// Independent sums: four cycles of latency and two multiplications a cycle need eight. They and the two factors fit
/// the sixteen registers of AVX2.
const CHAINS: usize = 12;
/// Independent sums where eight lanes take two registers.
const PORTABLE_CHAINS: usize = 6;

impl Cpu {
    /// Most `f32` operations per second that `threads` threads of the pool (at most all) reach without touching memory;
    /// a fused multiplication and addition counts as two.
    pub fn peak_f32(&self, threads: usize) -> f64 {
        self.peak_operations(threads, &|rounds| match self.isa() {
            Isa::Portable => self.run(Chains::<PORTABLE_CHAINS> { rounds }),
            _ => self.run(Chains::<CHAINS> { rounds }),
        })
    }

    /// Most operations per second of products of `bf16` pairs summed in `f32`, by the instructions that the pool uses for them: tiles
    /// with [`Isa::Amx`], dot products with [`Isa::Avx512Bf16`], else those of [`Cpu::peak_f32`].
    pub fn peak_bf16(&self, threads: usize) -> f64 {
        #[cfg(target_arch = "x86_64")]
        if let Some(amx) = self.amx() {
            return self.peak_operations(threads, &|rounds| multiply_tiles(amx, rounds));
        }
        match self.isa() {
            Isa::Avx512Bf16 => self.peak_operations(threads, &|rounds| self.run(Pairs { rounds })),
            _ => self.peak_f32(threads),
        }
    }

    /// Most bytes per second that `threads` threads of the pool copy from memory to memory, each byte counted once
    /// though it is both read and written. Takes 512 MiB meanwhile.
    pub fn peak_copy(&self, threads: usize) -> f64 {
        let threads = threads.clamp(1, self.threads());
        let (src, mut dst) = (self.touched(FLOATS / 2), self.touched(FLOATS / 2));
        let to = DisjointMut::new(&mut dst);
        let round = WINDOW / 2;
        let each = round.div_ceil(threads);
        let seconds = best_window(FLOATS / 2 / round, |window| {
            self.parallel(threads, &|t| {
                let part = window * round + t * each..window * round + ((t + 1) * each).min(round);
                // SAFETY: part `t` belongs to task `t`.
                unsafe { to.part(part.clone()) }.copy_from_slice(black_box(&src[part]));
            });
        });
        black_box(&mut dst);
        (round * size_of::<f32>()) as f64 / seconds
    }

    /// Most bytes per second that `threads` threads of the pool read from memory and add up. Takes 512 MiB meanwhile.
    pub fn peak_read(&self, threads: usize) -> f64 {
        let threads = threads.clamp(1, self.threads());
        let src = self.touched(FLOATS);
        let each = WINDOW.div_ceil(threads);
        let read = |streams| {
            best_window(FLOATS / WINDOW, |window| {
                self.parallel(threads, &|t| {
                    let x = &src[window * WINDOW..][t * each..((t + 1) * each).min(WINDOW)];
                    black_box(self.run(Sum { x: black_box(x), streams }));
                });
            })
        };
        // Which reads faster depends on how the machine reads ahead.
        (WINDOW * size_of::<f32>()) as f64 / read(1).min(read(4))
    }

    /// Operations per second of `work(rounds)`, which says how many operations it did, run by each of `threads` threads.
    fn peak_operations(&self, threads: usize, work: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
        let threads = threads.clamp(1, self.threads());
        let run = |rounds| {
            self.parallel(threads, &|_| {
                black_box(work(rounds));
            });
        };
        let mut rounds = 1 << 10;
        while seconds(|| run(rounds)) < ROUND {
            rounds *= 2;
        }
        threads as f64 * work(rounds) / best(|| run(rounds))
    }

    /// Memory of so many floats, its pages there and written by all threads.
    fn touched(&self, floats: usize) -> Vec<f32> {
        let mut memory = vec![0.0; floats];
        pages::advise_huge_pages(&memory);
        let shared = DisjointMut::new(&mut memory);
        self.by_rows(floats, 1, &|r| {
            // SAFETY: these floats belong to this task.
            unsafe { shared.part(r) }.fill(1.0);
        });
        memory
    }
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// Seconds of the quickest call.
fn best(mut f: impl FnMut()) -> f64 {
    f();
    let (start, mut best, mut calls) = (Instant::now(), f64::MAX, 0);
    while calls < 3 || start.elapsed() < LOOKED {
        best = best.min(seconds(&mut f));
        calls += 1;
    }
    best
}

/// Seconds of the quickest call, each call with the next of some windows.
fn best_window(windows: usize, mut f: impl FnMut(usize)) -> f64 {
    let mut window = 0;
    best(|| {
        f(window);
        window = (window + 1) % windows;
    })
}

/// Multiplies and adds in registers; gives the operations done.
struct Chains<const N: usize> {
    rounds: usize,
}

impl<const N: usize> Kernel for Chains<N> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        // x · 3/4 + 1/4 tends to 1 from anywhere.
        let (factor, more) = (simd.splat(black_box(0.75)), simd.splat(black_box(0.25)));
        // Sums that began alike would be one sum for the compiler.
        let mut sums: [S::F; N] = std::array::from_fn(|i| simd.splat(black_box(i as f32)));
        for _ in 0..self.rounds {
            for sum in &mut sums {
                *sum = simd.fma(*sum, factor, more);
            }
        }
        black_box(total(simd, &sums));
        (self.rounds * N * S::LANES * 2) as f64
    }
}

/// Multiplies pairs and adds in registers; gives the operations done.
struct Pairs {
    rounds: usize,
}

impl Kernel for Pairs {
    const PAIRS: bool = true;
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f64 {
        let words = black_box([0x3f80_3f80_u32; 32]);
        let mut sums: [S::F; CHAINS] = std::array::from_fn(|i| simd.splat(black_box(i as f32)));
        // SAFETY: a pair is at most 16 words of weights and two of activations.
        let weights = unsafe { simd.load_pair(words.as_ptr()) };
        for _ in 0..self.rounds {
            for sum in &mut sums {
                // SAFETY: a pair is at most 16 words of weights and two of activations.
                *sum = unsafe { simd.fma_pair(*sum, weights, words.as_ptr(), 1) };
            }
        }
        black_box(total(simd, &sums));
        (self.rounds * CHAINS * S::LANES * 4) as f64
    }
}

#[inline(always)]
fn total<S: Simd>(simd: S, sums: &[S::F]) -> f32 {
    let mut total = simd.splat(0.0);
    for sum in sums {
        total = simd.add(total, *sum);
    }
    simd.sum(total)
}

/// Adds up to the last whole vectors, going through `streams` (1 or 4) parts side by side.
struct Sum<'a> {
    x: &'a [f32],
    streams: usize,
}

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let step = 8 / self.streams;
        let part = self.x.len() / self.streams / (step * S::LANES) * (step * S::LANES);
        let mut sums = [simd.splat(0.0); 8];
        for i in (0..part).step_by(step * S::LANES) {
            for (j, sum) in sums.iter_mut().enumerate() {
                let at = j / step * part + i + j % step * S::LANES;
                // SAFETY: `i` and the vectors of a step stay below `part`, and all parts fit `x`.
                *sum = simd.add(*sum, unsafe { simd.load(self.x.as_ptr().add(at)) });
            }
        }
        total(simd, &sums)
    }
}

/// Multiplies tiles in registers, four sums side by side; gives the operations done.
#[cfg(target_arch = "x86_64")]
fn multiply_tiles(amx: Amx, rounds: usize) -> f64 {
    // ±1 in turns: zeros would take less power than a product does.
    let operand = black_box([0xbf80_3f80_u32; TILE]);
    let tiles = Tiles::configure(amx);
    // SAFETY: the registers are configured, and a tile is as large as the operand. There is at least one round.
    unsafe {
        std::arch::asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm4, [{a} + {s64}*1]",
            "tileloadd tmm5, [{a} + {s64}*1]",
            "tileloadd tmm6, [{a} + {s64}*1]",
            "tileloadd tmm7, [{a} + {s64}*1]",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {n}",
            "jnz 2b",
            a = in(reg) operand.as_ptr(),
            s64 = in(reg) 64usize,
            n = inout(reg) rounds.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
    drop(tiles);
    (rounds.max(1) * 4 * SIDE * SIDE * 2 * SIDE * 2) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_of_calculation_are_measured_with_every_instruction_set() {
        for cpu in Isa::ALL.into_iter().filter_map(|isa| Cpu::with_isa(1, isa).ok()) {
            let isa = cpu.isa();
            let (f32, bf16) = (cpu.peak_f32(1), cpu.peak_bf16(1));
            assert!(f32.is_finite() && f32 > 1e7 && bf16.is_finite() && bf16 > 1e7, "{isa:?}: {f32} {bf16}");
        }
    }

    #[test]
    fn every_stream_is_added_up() {
        let x: Vec<f32> = (0..4096).map(|i| (i % 7) as f32).collect();
        let expected: f32 = x.iter().sum();
        for cpu in Isa::ALL.into_iter().filter_map(|isa| Cpu::with_isa(1, isa).ok()) {
            for streams in [1, 4] {
                assert_eq!(cpu.run(Sum { x: &x, streams }), expected);
            }
        }
    }
}
