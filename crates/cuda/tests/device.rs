//! The device's calls beside computing: copies of tensors, a device for another thread, errors.
#![cfg(feature = "emulate")]

use refrain_cuda::{Arg, CudaDevice, Driver, Emulated, Grid};
use refrain_kernels::conformance::random;
use refrain_kernels::{
    CacheHeads, Device, DeviceFailure, DeviceMemory, Dtype, KvRows, Rotary, download, upload, upload_kv,
};

fn device() -> CudaDevice<Emulated> {
    CudaDevice::new(Emulated::new(1), 1).unwrap()
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
fn a_want_of_memory_is_told_with_the_numbers_and_passes() {
    let device = CudaDevice::new(Emulated::with_memory(1, 1000), 1).unwrap();
    assert_eq!(device.memory(), Some(DeviceMemory { total: 1000, free: 1000 }));
    let mut x = device.floats(100);
    let wanted =
        |bytes, free| Err(DeviceFailure::OutOfMemory { device: "emulated CUDA".to_owned(), bytes, free });
    assert_eq!(DeviceFailure::catch(|| drop(device.floats(200))), wanted(800, 600));
    assert_eq!(DeviceFailure::catch(|| device.resize(&mut x, 200)), wanted(800, 600));
    assert_eq!((x.len(), device.memory().unwrap().free), (100, 600), "the tensor is as it was");
    let (kv, beside) = (device.kv(Dtype::F32, 100), device.beside());
    assert_eq!(DeviceFailure::catch(|| drop(kv.clone())), wanted(400, 200));
    assert_eq!(DeviceFailure::catch(|| drop(beside.floats(51))), wanted(204, 200));
    let pool = || device.parallel(2, &|_| drop(device.floats(51)));
    assert_eq!(DeviceFailure::catch(pool), wanted(204, 200));
    drop(kv);
    device.driver().fragment(500);
    assert_eq!(DeviceFailure::catch(|| drop(device.floats(126))), wanted(504, 600));
    assert_eq!(device.floats(125).len(), 125);
    assert_eq!(device.failure(), None);
}

#[test]
fn an_operation_that_failed_is_told_by_all_calls_that_wait() {
    let device = device();
    let (x, beside) = (upload(&device, &[1.0]), device.beside());
    let grid = Grid { blocks: [1, 1, 1], threads: 32, shared: 0 };
    device.driver().launch("none", grid, &[Arg::U32(1)]);
    let told = |failure: DeviceFailure, what: &str| {
        assert!(matches!(failure, DeviceFailure::Broken { .. }), "{failure:?}");
        let start = format!("emulated CUDA has failed, and computes again after a restart: {what}: none");
        assert!(failure.to_string().starts_with(&start), "{failure}");
    };
    told(device.failure().unwrap(), "computing");
    told(DeviceFailure::catch(|| download(&device, &x)).unwrap_err(), "reading 4 bytes");
    told(DeviceFailure::catch(|| beside.wait()).unwrap_err(), "waiting");
}
