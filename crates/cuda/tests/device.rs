//! The device's calls beside computing: copies of tensors, a device for another thread, errors.
#![cfg(feature = "emulate")]

use refrain_cuda::{Arg, CudaDevice, Driver, Emulated, Grid};
use refrain_kernels::conformance::{random, stored};
use refrain_kernels::{
    CacheHeads, CachedAttention, Device, DeviceFailure, DeviceMemory, Dtype, KvRows, Precision,
    ReferenceDevice, Rotary, TableEntries, TableNumber, download, upload,
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
        let rows = beside.upload_kv(refrain_kernels::Slice::F32(&rows));
        beside.place(KvRows::Device(&rows, 0), heads, Rotary::default(), &[4, 0, 2], &mut cache);
        (rows, cache)
    });
    let (rows, cache) = placed.join().unwrap();
    let placed = device.gather_kv_rows(&cache, 4, &[4, 0, 2]);
    let elements = |kv| device.download_kv(kv, 0..12).into_buffer();
    assert_eq!(elements(&placed), elements(&rows));
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

/// Queries, keys and values of a call of `rope_and_place`, read back.
fn placed(
    device: &dyn Device,
    dtype: Dtype,
    (d, half): (usize, usize),
    slots: &[u32],
    rotary: Rotary<'_>,
) -> Vec<f32> {
    let (q_heads, heads, tokens) = (3, CacheHeads { kv_heads: 2, head_dim: d }, slots.len());
    let (width, capacity) = (heads.width(), 30);
    assert_eq!(rotary.dim(tokens), 2 * half);
    let mut q = upload(device, &random(tokens * q_heads * d, 1));
    let mut caches = [2, 3].map(|seed| device.upload_kv(stored(dtype, capacity * width, seed).as_slice()));
    let (k, v) = (stored(dtype, (tokens + 1) * width, 4), stored(dtype, tokens * width, 5));
    let (k, [k_cache, v_cache]) = (device.upload_kv(k.as_slice()), &mut caches);
    let rows = (KvRows::Device(&k, 1), KvRows::Host(v.as_slice()));
    device.rope_and_place(Some((&mut q, q_heads)), rows, heads, rotary, slots, (k_cache, v_cache));
    let caches = caches.map(|cache| device.download_kv(&cache, 0..cache.len()).as_slice().floats());
    [&download(device, &q)[..], &caches.concat()].concat()
}

#[test]
fn heads_of_every_size_are_rotated_and_placed() {
    let (device, runs, scattered) = (device(), [7, 8, 9, 10, 11], [3, 9, 8, 29, 0]);
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        // 16 bytes at a time, one element at a time, and by the type.
        for size in [(32, 16), (32, 8), (24, 0), (20, 10), (24, 4), (15, 7)] {
            let (cos, sin) = (random(5 * size.1, 6), random(5 * size.1, 7));
            for slots in [&runs, &scattered] {
                let placed =
                    |device: &dyn Device| placed(device, dtype, size, slots, Rotary::new(&cos, &sin));
                let unit = [2e-6, 2e-3, 2e-2][dtype as usize];
                for (i, (got, wanted)) in placed(&device).iter().zip(placed(&ReferenceDevice)).enumerate() {
                    assert!(
                        (got - wanted).abs() <= unit,
                        "{dtype}, {size:?}, {slots:?}: {i}: {got}, {wanted}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_table_is_copied_once_and_again_when_it_changes() {
    let device = device();
    let (size, slots, [table, other]) = ((16, 8), [4, 5, 6], [(); 2].map(|()| TableNumber::unused()));
    // Values and the tensors of a call: what else is copied is the table.
    let written = |rotary| {
        let before = device.driver().written();
        let got = placed(&device, Dtype::F32, size, &slots, rotary);
        let wanted = placed(&ReferenceDevice, Dtype::F32, size, &slots, Rotary::new(rotary.cos, rotary.sin));
        assert!(got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() < 1e-5));
        device.driver().written() - before
    };
    let values = random(2 * 6 * 8, 8);
    let (cos, sin) = values.split_at(6 * 8);
    let rotary = |table, first: usize| {
        let range = 8 * first..8 * (first + 3);
        let entries = Some(TableEntries { table, first });
        Rotary { cos: &cos[range.clone()], sin: &sin[range], entries }
    };
    let bytes = 2 * 4 * 3 * 8;
    let first = written(rotary(table, 0));
    assert_eq!(written(rotary(table, 0)), first - bytes);
    assert_eq!(written(rotary(table, 3)), first, "other entries");
    assert_eq!(written(rotary(other, 3)), first, "another table");
    assert_eq!([0, 3].map(|from| written(rotary(table, from))), [first - bytes; 2]);
    let unnumbered = Rotary::new(&sin[..24], &cos[..24]);
    assert_eq!([(); 2].map(|()| written(unnumbered)), [first; 2]);
    // Many tables later it is copied again.
    (0..600).for_each(|_| _ = written(rotary(TableNumber::unused(), 1)));
    assert_eq!(written(rotary(table, 0)), first);
}

#[test]
fn an_array_is_copied_once_and_again_when_it_changes() {
    let device = device();
    let (heads, d, capacity) = (2, 16, 40);
    let q = upload(&device, &random(3 * heads * d, 1));
    let [k, v] =
        [2, 3].map(|seed| device.upload_kv(stored(Dtype::F16, heads * capacity * d, seed).as_slice()));
    let attend = |visible: &[(u32, u32)]| {
        let a = CachedAttention {
            q: &q,
            first_row: 0,
            k: &k,
            v: &v,
            heads,
            kv_heads: heads,
            head_dim: d,
            capacity,
            visible,
            scale: 0.25,
            precision: Precision::F32,
        };
        let (mut out, before) = (device.floats(q.len()), device.driver().written());
        device.attention(&a, &mut out, None);
        (device.driver().written() - before, download(&device, &out))
    };
    let (one, another) = ([(0, 9), (3, 20), (5, 30)], [(0, 9), (3, 21), (5, 30)]);
    let (first, second) = (attend(&one), attend(&another));
    assert_eq!((first.0, second.0), (24, 24));
    assert_eq!((attend(&one), attend(&another)), ((0, first.1.clone()), (0, second.1.clone())));
    assert_ne!(first.1, second.1);
}

#[test]
fn uploads_that_are_kept_count_as_free_and_make_room() {
    let device = CudaDevice::new(Emulated::with_memory(1, 4096), 1).unwrap();
    let mut x = upload(&device, &random(64, 1));
    let free = device.memory().unwrap().free;
    let (cos, entries) = (random(4 * 8, 2), TableEntries { table: TableNumber::unused(), first: 0 });
    device.rope(&mut x, 1, 16, Rotary { cos: &cos, sin: &cos, entries: Some(entries) });
    assert!(device.driver().memory().1 < free, "the table is kept");
    assert_eq!(device.memory().unwrap().free, free);
    let all = device.floats(free as usize / 4);
    assert_eq!(device.memory().unwrap().free, 0);
    drop(all);
    let before = download(&device, &x);
    device.rope(&mut x, 1, 16, Rotary { cos: &cos, sin: &cos, entries: Some(entries) });
    assert_ne!(download(&device, &x), before);
}

#[test]
fn rows_and_arrays_of_many_pieces_arrive() {
    let device = CudaDevice::new(Emulated::new(1), 3).unwrap();
    let (rows, width) = (300, 700);
    let mut x = device.floats(0);
    let number = |row: usize, column: usize| (row * width + column) as f32;
    let row = |row: usize, to: &mut [f32]| to.iter_mut().enumerate().for_each(|(i, x)| *x = number(row, i));
    device.upload_rows(rows, width, &row, &mut x);
    let all: Vec<f32> = (0..rows * width).map(|i| i as f32).collect();
    assert_eq!(download(&device, &x), all);
    let kv = device.upload_kv(refrain_kernels::Slice::F32(&all));
    assert_eq!(device.download_kv(&kv, 0..all.len()).as_slice().floats(), all);
}
