//! Measured peaks, on emulated threads.
#![cfg(feature = "emulate")]

use refrain_cuda::{Arg, CudaDevice, Driver, Emulated, Grid, PeakWork, Peaks};

#[test]
fn a_round_has_as_many_operations_as_are_counted() {
    let driver = Emulated::new(2);
    let sums = driver.alloc(64 * 4).unwrap();
    let run = |rounds, mask| {
        let grid = Grid { blocks: [1, 1, 1], threads: 64, shared: 0 };
        driver.launch("peak_bf16", grid, &[Arg::Memory(&sums, 0), Arg::U32(rounds), Arg::U32(mask)]);
        let mut bytes = [0; 64 * 4];
        driver.read(&sums, 0, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect::<Vec<f32>>()
    };
    // Each element of eight products of 16 × 16 by 16 × 8 is a sum of 16 ones, and a lane has four of each.
    assert_eq!(run(3, 0), vec![3.0 * 8.0 * 4.0 * 16.0; 64]);
    // Drawn elements differ from thread to thread.
    let drawn = run(1, 0x807f_807f);
    assert!(drawn.iter().all(|x| x.is_finite() && x.abs() < 4.0 * 512.0), "{drawn:?}");
    assert!(drawn.iter().any(|x| *x != drawn[0]), "{drawn:?}");
}

#[test]
fn peaks_are_positive() {
    let device = CudaDevice::new(Emulated::new(2), 1).unwrap();
    let work = PeakWork { blocks: 2, rounds: 2, bytes: 1 << 20, runs: 2 };
    for peak in [device.peak_bf16(work), device.peak_memory(work), device.peak_bus(work)] {
        let peak = peak.unwrap();
        assert!(peak.is_finite() && peak > 0.0, "{peak}");
    }
    // More than there is of memory is an error.
    let small = CudaDevice::new(Emulated::with_memory(2, 1 << 20), 1).unwrap();
    assert!(small.peak_memory(work).unwrap_err().to_string().contains("out of memory"));
}
