//! The device's calls beside computing: copies of tensors, a device for another thread, errors.
#![cfg(feature = "emulate")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use refrain_cuda::{Arg, CudaDevice, Driver, Emulated, Grid};
use refrain_kernels::conformance::random;
use refrain_kernels::{
    CacheHeads, Device, Dtype, KvRows, Precision, Rotary, WeightMatrix, WeightRows, download, upload,
    upload_kv,
};

fn device() -> CudaDevice<Emulated> {
    CudaDevice::new(Emulated::new(1), 1).unwrap()
}

/// The message of a call's panic.
fn panic_of(f: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("the call panics");
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[test]
fn a_clone_is_a_copy() {
    let device = device();
    let (values, others) = (random(100, 1), random(100, 2));
    let mut x = upload(&device, &values);
    let clone = x.clone();
    device.copy(&upload(&device, &others), 0..100, &mut x, 0);
    assert_eq!((download(&device, &clone), download(&device, &x)), (values, others));
    assert!(device.kv(Dtype::F16, 0).clone().is_empty());
}

#[test]
fn tensors_of_a_device_beside_are_tensors_of_the_device() {
    let device = device();
    let beside = device.beside();
    assert_eq!((beside.threads(), device.threads()), (1, 1));
    let rows = random(3 * 4, 1);
    let placed = std::thread::spawn(move || {
        let (heads, mut cache) = (CacheHeads { kv_heads: 1, head_dim: 4 }, beside.kv(Dtype::F32, 5 * 4));
        let rows = upload_kv(&*beside, refrain_kernels::Slice::F32(&rows));
        beside.place(KvRows::Device(&rows, 0), heads, Rotary::default(), &[4, 0, 2], &mut cache);
        (rows, cache)
    });
    let (rows, cache) = placed.join().unwrap();
    let placed = device.gather_kv_rows(&cache, 4, &[4, 0, 2]);
    assert_eq!(device.download_kv(&placed, 0..12), device.download_kv(&rows, 0..12));
}

#[test]
fn weights_other_than_f32_are_kept_in_bf16() {
    let device = device();
    let row = |_: usize, out: &mut [f32]| {
        out.fill(1.0);
        Ok(())
    };
    let bytes = |precision| {
        let rows = WeightRows::F32(&row);
        let matrix = WeightMatrix { precision, outputs: 10, inputs: 128, bias: None, rows };
        device.pack(matrix).unwrap().bytes()
    };
    assert_eq!([Precision::F32, Precision::Bf16, Precision::Q8].map(bytes), [5120, 2560, 2560]);
}

#[test]
fn an_error_of_the_driver_says_what_was_asked_of_which_device() {
    let device = device();
    let panic = panic_of(|| {
        device.floats(1 << 36);
    });
    assert!(panic.contains("emulated CUDA: allocating 274877906944 bytes: out of memory"), "{panic}");
    let x = upload(&device, &[1.0]);
    let grid = Grid { blocks: [1, 1, 1], threads: 32, shared: 0 };
    device.driver().launch("none", grid, &[Arg::U32(1)]);
    let panic = panic_of(|| {
        download(&device, &x);
    });
    assert!(panic.starts_with("emulated CUDA: reading 4 bytes: none"), "{panic}");
}
