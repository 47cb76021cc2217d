//! The driver of NVIDIA's GPUs over a library of the same names as CUDA's, `nvidia/libcuda.cpp`, which does what is queued as late and in as
//! adverse an order as it may. It has a few kernels of its own.
#![cfg(target_os = "linux")]

#[path = "../../../tests/common/needs.rs"]
mod needs;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use bytes::BytesMut;
use cudarc::driver::result::ctx;
use refrain_cuda::{Arg, Driver, Grid, Nvidia, NvidiaMemory};
use refrain_kernels::{Dtype, HostBytes, HostSlice};

const CHILD: &str = "REFRAIN_TEST_FAKE_CUDA";

/// Compiles the library into a folder of its own; none without a C++ compiler.
fn library() -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvidia/libcuda.cpp");
    let compiler = std::env::var_os("CXX").map_or_else(|| PathBuf::from("c++"), PathBuf::from);
    let ran = Command::new(compiler)
        .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-o"])
        .args([&folder.path().join("libcuda.so.1"), &source])
        .output();
    match ran {
        Err(error) => {
            needs::skip("c++", format!("there is no C++ compiler: {error}"));
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(folder)
        }
    }
}

/// Runs the body of the test of this name in processes that find the library, one for each of the settings.
fn with_library(name: &str, settings: &[&[(&str, &str)]], body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let Some(folder) = library() else { return };
    for setting in settings {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .env("LD_LIBRARY_PATH", folder.path())
            .envs(setting.iter().copied())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{setting:?}\n{out}\n{err}");
    }
}

const SEEDS: [&[(&str, &str)]; 8] = [
    &[("FAKE_CUDA_SEED", "1")],
    &[("FAKE_CUDA_SEED", "2")],
    &[("FAKE_CUDA_SEED", "3")],
    &[("FAKE_CUDA_SEED", "4")],
    &[("FAKE_CUDA_SEED", "5")],
    &[("FAKE_CUDA_SEED", "6"), ("FAKE_CUDA_PINNED", "0")],
    &[("FAKE_CUDA_SEED", "7"), ("FAKE_CUDA_PINNED", "1")],
    &[("FAKE_CUDA_SEED", "8"), ("FAKE_CUDA_PINNED", "3")],
];

/// to\[i\] = from\[i\] + value
fn add(driver: &Nvidia, to: &NvidiaMemory, from: &NvidiaMemory, value: u32, count: u32) {
    let grid = Grid { blocks: [count.div_ceil(256), 1, 1], threads: 256, shared: 0 };
    let args = [Arg::Memory(to, 0), Arg::Memory(from, 0), Arg::U32(value), Arg::U32(count)];
    driver.launch("add_32", grid, &args);
}

fn words(driver: &Nvidia, memory: &NvidiaMemory, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; 4 * count];
    driver.read(memory, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn bytes_of(words: impl Iterator<Item = u32>) -> Vec<u8> {
    words.flat_map(u32::to_le_bytes).collect()
}

#[test]
fn work_is_done_in_order() {
    with_library("work_is_done_in_order", &SEEDS, || {
        let driver = Nvidia::open(0).unwrap();
        assert_eq!(driver.name(), "Fake 0");
        assert_eq!(driver.memory(), (1 << 30, 3 << 20));
        // More than all segments of pinned memory together, and what is written changes at once.
        let count = 7 << 20;
        let memory = driver.alloc(4 * count).unwrap();
        let mut from = bytes_of(0..count as u32);
        driver.write(&memory, 0, &from);
        from.fill(7);
        driver.write(&memory, 4 * (count - 1), &from[..4]);
        from.fill(9);
        let other = driver.alloc(4 * count).unwrap();
        add(&driver, &other, &memory, 5, count as u32);
        drop(memory);
        driver.zero(&other, 8, 4);
        driver.copy(&other, 4, &other, 16, 4);
        let mut wanted: Vec<u32> = (5..count as u32 + 5).collect();
        (wanted[2], wanted[4], wanted[count - 1]) = (0, 6, 0x0707_0707 + 5);
        assert_eq!(words(&driver, &other, count), wanted);
        for round in 0..2000u32 {
            driver.write(&other, 4 * round as usize, &round.to_le_bytes());
        }
        assert_eq!(words(&driver, &other, 2000), (0..2000).collect::<Vec<_>>());
        driver.wait().unwrap();
    });
}

/// Word `at` of what tests write.
fn word(at: usize) -> u32 {
    (at as u32).wrapping_mul(2_654_435_761)
}

/// Writes `count` words in units of `unit` bytes, from the word `offset` on, and checks each piece; returns the bytes of the longest one.
fn write_words(
    driver: &Nvidia,
    memory: &NvidiaMemory,
    (unit, count, offset): (usize, usize, usize),
) -> usize {
    let (mut next, mut longest) = (0, 0);
    driver.write_with(memory, 4 * offset, 4 * count, unit, &mut |first, to| {
        assert_eq!(first, next);
        next += to.len();
        longest = longest.max(to.len());
        assert!(to.len().is_multiple_of(unit) || next == 4 * count, "{} of {unit}", to.len());
        assert!(to.as_ptr().addr().is_multiple_of(8));
        let words = to.chunks_exact_mut(4).enumerate();
        words.for_each(|(i, to)| to.copy_from_slice(&word(first / 4 + i).to_le_bytes()));
    });
    assert_eq!(next, 4 * count);
    longest
}

#[test]
fn what_is_written_piece_by_piece_arrives_in_whole_units() {
    with_library("what_is_written_piece_by_piece_arrives_in_whole_units", &SEEDS, || {
        let driver = Nvidia::open(0).unwrap();
        for driver in [&driver, &driver.beside()] {
            // Units of a row, of most of a segment (of a queue beside another, and of one that is not), and of more than a segment; more than all
            // segments, and less than a unit.
            for (unit, count, offset) in [
                (12, 5 << 20, 0),
                (1_500_000, 2_000_000, 5),
                (6_000_000, 5_000_000, 9),
                (9_000_000, 6_750_000, 1),
                (4096, 1000, 3),
                (4, 0, 0),
            ] {
                let memory = driver.alloc(4 * (count + offset)).unwrap();
                write_words(driver, &memory, (unit, count, offset));
                let written = words(driver, &memory, count + offset);
                assert!((0..count).all(|at| written[offset + at] == word(at)), "units of {unit}");
            }
        }
        driver.wait().unwrap();
    });
}

#[test]
fn a_ring_is_filled_while_copies_from_it_are_under_way() {
    // Pinned memory for four segments of each queue.
    const SEGMENTS: [usize; 2] = [8 << 20, 2 << 20];
    let settings = [("FAKE_CUDA_SEED", "1"), ("FAKE_CUDA_PINNED_BYTES", "41943040")];
    with_library("a_ring_is_filled_while_copies_from_it_are_under_way", &[&settings], || {
        let driver = Nvidia::open(0).unwrap();
        let beside = driver.beside();
        for (queue, other, segment) in [(&driver, &beside, SEGMENTS[0]), (&beside, &driver, SEGMENTS[1])] {
            // Four segments.
            let count = segment;
            let memory = queue.alloc(4 * count).unwrap();
            launch(queue, "hold");
            // A wait for a copy would not end before the release.
            assert_eq!(write_words(queue, &memory, (4, count, 0)), segment);
            launch(other, "release");
            assert_eq!(words(queue, &memory, count), (0..count).map(word).collect::<Vec<_>>());
            // More than the ring, with pieces of one segment at most.
            let memory = queue.alloc(12 * count).unwrap();
            assert_eq!(write_words(queue, &memory, (4, 3 * count, 0)), segment);
            assert_eq!(words(queue, &memory, 3 * count), (0..3 * count).map(word).collect::<Vec<_>>());
        }
        driver.wait().unwrap();
    });
}

#[test]
fn arguments_and_shapes_arrive() {
    with_library("arguments_and_shapes_arrive", &[&[]], || {
        let driver = Nvidia::open(0).unwrap();
        let memory = driver.alloc(64).unwrap();
        let args = [Arg::Memory(&memory, 32), Arg::Null, Arg::U64(1 << 40), Arg::F32(1.25)];
        driver.launch("tell", Grid { blocks: [3, 2, 1], threads: 128, shared: 200 << 10 }, &args);
        let mut told = [0; 32];
        driver.read(&memory, 32, &mut told).unwrap();
        let told: Vec<_> = told.chunks_exact(8).map(|x| u64::from_le_bytes(x.try_into().unwrap())).collect();
        assert_eq!(told, [0, 1 << 40, 10, 30201]);
    });
}

/// Bytes that begin at a page, or 64 bytes behind its beginning.
fn bytes_at_a_page(words: impl Iterator<Item = u32>, is_at_a_page: bool) -> HostBytes {
    let bytes = bytes_of(words);
    let mut piece = BytesMut::zeroed(bytes.len() + 2 * 4096);
    let before = piece.as_ptr().addr().wrapping_neg() % 4096 + if is_at_a_page { 0 } else { 64 };
    let mut at_a_page = piece.split_off(before);
    at_a_page.truncate(bytes.len());
    at_a_page.copy_from_slice(&bytes);
    HostBytes::new(at_a_page.freeze())
}

/// Words of bytes.
fn part(bytes: &HostBytes, words: Range<usize>) -> HostSlice<'_> {
    HostSlice::new(bytes, Dtype::F32, 4 * words.start..4 * words.end).unwrap()
}

#[test]
fn pinned_bytes_stay_until_they_are_copied() {
    let settings = [SEEDS[0], SEEDS[1], SEEDS[2], &[("FAKE_CUDA_REGISTERS", "0")]];
    with_library("pinned_bytes_stay_until_they_are_copied", &settings, || {
        let driver = Nvidia::open(0).unwrap();
        let (beside, count) = (driver.beside(), 5000);
        let is_registered = std::env::var_os("FAKE_CUDA_REGISTERS").is_none();
        for (round, is_at_a_page) in (0..20).zip([true, true, false].into_iter().cycle()) {
            let bytes = bytes_at_a_page(round..round + count as u32, is_at_a_page);
            driver.pin(&bytes);
            assert_eq!(bytes.is_pinned(), is_registered && is_at_a_page);
            if !bytes.is_pinned() {
                continue;
            }
            let other = bytes_at_a_page(7..17, true);
            driver.pin(&other);
            let [memory, sum] = [(); 2].map(|()| driver.alloc(4 * count).unwrap());
            driver.zero(&memory, 0, 4 * count);
            driver.write_pinned(&memory, &[part(&bytes, 2..100), part(&bytes, 0..0), part(&other, 1..10)]);
            add(&beside, &sum, &memory, 1, count as u32);
            // A copy may be under way; the bytes are unpinned when it was waited for.
            drop((bytes, other));
            let mut wanted: Vec<u32> = (round + 3..round + 101).chain(9..18).collect();
            wanted.resize(count, 1);
            assert_eq!(words(&beside, &sum, count), wanted);
            if round % 2 == 0 {
                driver.wait().unwrap();
            }
        }
        if !is_registered {
            return;
        }
        driver.wait().unwrap();
        // A queue that is gone, and has not been waited for.
        let (bytes, memory) = (bytes_at_a_page(0..count as u32, true), driver.alloc(4 * count).unwrap());
        driver.pin(&bytes);
        beside.write_pinned(&memory, &[part(&bytes, 0..count)]);
        drop((beside, bytes));
        assert_eq!(words(&driver, &memory, count), (0..count as u32).collect::<Vec<_>>());
    });
}

#[test]
fn a_queue_beside_waits_for_the_other_and_frees_in_order() {
    with_library("a_queue_beside_waits_for_the_other_and_frees_in_order", &SEEDS, || {
        let driver = Nvidia::open(0).unwrap();
        let count = 1000;
        for round in 0..50 {
            let [a, b] = [(); 2].map(|()| driver.alloc(4 * count).unwrap());
            driver.write(&a, 0, &bytes_of(round..round + count as u32));
            add(&driver, &b, &a, 1, count as u32);
            let beside = driver.beside();
            // Memory of the one queue is used by the other, which may not see it before it is there.
            let c = beside.alloc(4 * count).unwrap();
            add(&beside, &c, &b, 1, count as u32);
            add(&beside, &c, &c, 1, count as u32);
            drop(a);
            drop(b);
            let d = beside.alloc(4 * count).unwrap();
            beside.copy(&c, 0, &d, 0, 4 * count);
            drop(c);
            beside.wait().unwrap();
            // Both have used it before.
            driver.zero(&d, 0, 4);
            add(&beside, &d, &d, 1, count as u32);
            beside.wait().unwrap();
            let mut wanted: Vec<u32> = (round + 4..round + 4 + count as u32).collect();
            wanted[0] = 1;
            assert_eq!(words(&driver, &d, count), wanted);
            // Memory of a queue that is gone.
            drop(beside);
            let e = driver.beside().alloc(4).unwrap();
            driver.write(&e, 0, &[1, 0, 0, 0]);
            assert_eq!(words(&driver, &e, 1), [1]);
        }
        driver.wait().unwrap();
    });
}

fn launch(driver: &Nvidia, kernel: &'static str) {
    driver.launch(kernel, Grid { blocks: [1; 3], threads: 32, shared: 0 }, &[]);
}

#[test]
fn a_queue_goes_on_while_another_is_busy_with_other_memory() {
    with_library("a_queue_goes_on_while_another_is_busy_with_other_memory", &SEEDS, || {
        let driver = Nvidia::open(0).unwrap();
        let count = 100;
        let [recycled, freed, busy] = [(); 3].map(|()| driver.alloc(4 * count).unwrap());
        driver.write(&busy, 0, &bytes_of(0..count as u32));
        add(&driver, &recycled, &busy, 1, count as u32);
        add(&driver, &freed, &busy, 1, count as u32);
        // An event lies behind the last use of the recycled memory.
        (0..16).for_each(|_| add(&driver, &busy, &busy, 1, count as u32));
        launch(&driver, "hold");
        add(&driver, &busy, &busy, 1, count as u32);
        drop(freed);

        let [beside, third] = [(); 2].map(|()| driver.beside());
        let own = beside.alloc(4 * count).unwrap();
        for round in 1..40 {
            beside.write(&recycled, 0, &bytes_of(round..round + count as u32));
            add(&beside, &own, &recycled, 1, count as u32);
            assert_eq!(words(&beside, &own, count), (round + 1..).take(count).collect::<Vec<_>>());
        }
        beside.wait().unwrap();
        // The memory that the busy queue uses is waited for.
        add(&beside, &own, &busy, 0, count as u32);
        launch(&third, "release");
        assert_eq!(words(&beside, &own, count), (17..).take(count).collect::<Vec<_>>());
        driver.wait().unwrap();
    });
}

#[test]
fn kernels_of_queues_beside_the_first_one_go_first() {
    with_library("kernels_of_queues_beside_the_first_one_go_first", &[&[]], || {
        let driver = Nvidia::open(0).unwrap();
        let priority = |driver: &Nvidia| {
            let memory = driver.alloc(4).unwrap();
            let grid = Grid { blocks: [1; 3], threads: 32, shared: 0 };
            driver.launch("priority", grid, &[Arg::Memory(&memory, 0)]);
            words(driver, &memory, 1)[0]
        };
        for _ in 0..2 {
            let [beside, third] = [(); 2].map(|()| driver.beside());
            assert_eq!([&driver, &beside, &third].map(priority), [0, 5, 5]);
        }
        driver.wait().unwrap();
    });
}

#[test]
fn queues_that_only_read_some_memory_do_not_wait_for_each_other() {
    // Writes from memory that is not pinned would wait for what they are queued behind.
    with_library("queues_that_only_read_some_memory_do_not_wait_for_each_other", &SEEDS[..5], || {
        let driver = Nvidia::open(0).unwrap();
        let [beside, third, last, idle] = [(); 4].map(|()| driver.beside());
        let count = 100;
        let read = |driver: &Nvidia, to: &NvidiaMemory, from: &NvidiaMemory| {
            let grid = Grid { blocks: [1; 3], threads: 128, shared: 0 };
            let args = [Arg::Memory(to, 0), Arg::Read(from, 0), Arg::U32(1), Arg::U32(count as u32)];
            driver.launch("add_32", grid, &args);
        };
        let counted = |from: u32| (from..).take(count).collect::<Vec<u32>>();
        let [shared, own, other] = [(); 3].map(|()| driver.alloc(4 * count).unwrap());
        for round in 0..20 {
            let (old, new) = (1000 * round, 1000 * round + 500);
            driver.write(&shared, 0, &bytes_of(old..old + count as u32));
            // An event lies behind the write.
            (0..16).for_each(|_| add(&driver, &own, &own, 1, count as u32));
            launch(&driver, "hold");
            read(&driver, &own, &shared);
            read(&beside, &other, &shared);
            assert_eq!(words(&beside, &other, count), counted(old + 1));
            // A write waits for readers, and readers wait for it.
            beside.write(&shared, 0, &bytes_of(new..new + count as u32));
            read(&third, &other, &shared);
            last.write(&shared, 0, &bytes_of(0..count as u32));
            launch(&idle, "release");
            assert_eq!(words(&driver, &own, count), counted(old + 1));
            assert_eq!(words(&third, &other, count), counted(new + 1));
            assert_eq!(words(&beside, &shared, count), counted(0));
        }
        driver.wait().unwrap();
    });
}

/// Memory goes its way like layers of a cache: loaders write it, the computing queue reads and changes it, and loaders get it again. The host
/// does not wait. `idle` pieces of work lie between.
fn recycle(driver: &Nvidia, rounds: u32, idle: u32) {
    let (count, loaders) = (50, [(); 3].map(|()| driver.beside()));
    let results = driver.alloc(4 * rounds as usize * count).unwrap();
    let other = driver.alloc(4).unwrap();
    driver.zero(&other, 0, 4);
    let mut pooled: Vec<NvidiaMemory> = Vec::new();
    for round in 0..rounds {
        let loader = &loaders[round as usize % loaders.len()];
        let layer = if pooled.len() > 1 { pooled.remove(0) } else { loader.alloc(4 * count).unwrap() };
        loader.zero(&layer, 0, 4 * count);
        loader.write(&layer, 0, &bytes_of(100 * round..100 * round + count as u32));
        add(driver, &layer, &layer, 1, count as u32);
        driver.copy(&layer, 0, &results, 4 * round as usize * count, 4 * count);
        (0..idle).for_each(|_| add(driver, &other, &other, 1, 1));
        pooled.push(layer);
    }
    let wanted = (0..rounds).flat_map(|round| (100 * round + 1..).take(count)).collect::<Vec<_>>();
    assert_eq!(words(driver, &results, wanted.len()), wanted);
    assert_eq!(words(driver, &other, 1), [rounds * idle]);
}

#[test]
fn memory_goes_from_queue_to_queue() {
    with_library("memory_goes_from_queue_to_queue", &SEEDS, || {
        let driver = Nvidia::open(0).unwrap();
        for (rounds, idle) in [(100, 0), (60, 7), (40, 16), (6, 700)] {
            recycle(&driver, rounds, idle);
        }
        driver.wait().unwrap();
    });
}

#[test]
fn many_threads_have_queues() {
    with_library("many_threads_have_queues", &SEEDS[..2], || {
        let driver = Nvidia::open(0).unwrap();
        let shared = driver.alloc(4).unwrap();
        driver.write(&shared, 0, &[5, 0, 0, 0]);
        // More queues at once than there are streams: some share.
        thread::scope(|scope| {
            for index in 0..80u32 {
                let (beside, shared) = (driver.beside(), &shared);
                scope.spawn(move || {
                    for round in 0..20 {
                        let own = beside.alloc(4).unwrap();
                        add(&beside, &own, shared, 100 * index + round, 1);
                        assert_eq!(words(&beside, &own, 1), [5 + 100 * index + round]);
                    }
                });
            }
        });
        driver.wait().unwrap();
    });
}

#[test]
fn the_first_error_is_kept() {
    with_library("the_first_error_is_kept", &[&[]], || {
        let driver = Nvidia::open(0).unwrap();
        let grid = Grid { blocks: [1; 3], threads: 32, shared: 0 };
        let error = driver.alloc(2 << 30).unwrap_err().to_string();
        assert!(error.starts_with("allocating 2147483648 bytes: out of memory"), "{error}");
        driver.wait().unwrap();
        assert_eq!(driver.failure(), None);
        driver.launch("no_such_kernel", grid, &[]);
        let first = driver.wait().unwrap_err();
        assert!(first.to_string().starts_with("finding the kernel no_such_kernel: not found"), "{first}");
        assert_eq!(driver.failure(), Some(first.clone()));
        driver.launch("crash", grid, &[]);
        let memory = driver.alloc(4).unwrap();
        assert_eq!(driver.read(&memory, 0, &mut [0; 4]).unwrap_err(), first);
        assert_eq!(driver.beside().wait().unwrap_err(), first);

        let other = Nvidia::open(0).unwrap();
        other.launch("crash", grid, &[]);
        // A GPU that has failed while it was idle says so when it is asked for its memory.
        assert_eq!(other.failure(), None);
        other.memory();
        assert!(other.failure().unwrap().to_string().contains("an illegal address"));
        let error = other.wait().unwrap_err().to_string();
        assert!(error.starts_with("waiting for the GPU: an illegal address"), "{error}");
    });
}

#[test]
fn the_bus_is_measured_from_pinned_memory() {
    let settings: [&[(&str, &str)]; 2] = [&[], &[("FAKE_CUDA_PINNED", "0")]];
    with_library("the_bus_is_measured_from_pinned_memory", &settings, || {
        let driver = Nvidia::open(0).unwrap();
        let memory = driver.alloc(4000).unwrap();
        match driver.pinned_write_seconds(&memory, 4000, 3) {
            Ok(seconds) => {
                assert!(seconds > 0.0 && seconds < 1.0, "{seconds}");
                assert_eq!(words(&driver, &memory, 1000), vec![0; 1000]);
            }
            Err(error) => {
                assert_eq!(std::env::var("FAKE_CUDA_PINNED").as_deref(), Ok("0"));
                assert!(
                    error.to_string().starts_with("pinning 4000 bytes of the host: out of memory"),
                    "{error}"
                );
            }
        }
        driver.wait().unwrap();
    });
}

#[test]
fn bytes_outside_of_memory_are_refused() {
    with_library("bytes_outside_of_memory_are_refused", &[&[]], || {
        let driver = Nvidia::open(0).unwrap();
        let memory = driver.alloc(16).unwrap();
        driver.zero(&memory, 8, 8);
        let outside = AssertUnwindSafe(|| driver.zero(&memory, 8, 9));
        let refused = catch_unwind(outside).unwrap_err();
        assert!(refused.downcast_ref::<String>().unwrap().contains("lie outside of memory"));
    });
}

#[test]
fn a_gpu_that_cannot_be_asked_hides_no_other() {
    let settings = [("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_LOST", "0")];
    with_library("a_gpu_that_cannot_be_asked_hides_no_other", &[&settings], || {
        assert_eq!(Nvidia::open(1).unwrap().name(), "Fake 1");
        let error = Nvidia::open(0).unwrap_err().to_string();
        assert!(error.starts_with("finding the GPU: "), "{error}");
    });
}

#[test]
fn memory_that_a_piece_of_work_may_do_without_is_not_waited_for() {
    with_library("memory_that_a_piece_of_work_may_do_without_is_not_waited_for", &[&[]], || {
        let driver = Nvidia::open(0).unwrap();
        // A wait would not end before the release.
        launch(&driver, "hold");
        assert!(driver.try_alloc(2 << 30).is_none());
        let memory = driver.try_alloc(4).unwrap();
        driver.write(&memory, 0, &[1, 0, 0, 0]);
        launch(&driver.beside(), "release");
        assert_eq!(words(&driver, &memory, 1), [1]);
        assert_eq!(driver.failure(), None);
    });
}

#[test]
fn memory_is_freed_behind_a_write_that_has_panicked() {
    // A write from memory that is not pinned is one piece.
    with_library("memory_is_freed_behind_a_write_that_has_panicked", &SEEDS[..5], || {
        let driver = Nvidia::open(0).unwrap();
        let (beside, bytes) = (driver.beside(), 5 << 20);
        for _ in 0..20 {
            let memory = driver.alloc(bytes).unwrap();
            let write = AssertUnwindSafe(|| {
                beside.write_with(&memory, 0, bytes, 4, &mut |first, to| {
                    assert_eq!(first, 0, "the second piece");
                    to.fill(7);
                });
            });
            assert!(catch_unwind(write).is_err());
            drop(memory);
            driver.wait().unwrap();
            beside.wait().unwrap();
        }
    });
}

#[test]
#[allow(unsafe_code)]
fn the_context_of_another_user_of_cuda_stays_that_of_its_thread() {
    with_library("the_context_of_another_user_of_cuda_stays_that_of_its_thread", &[&[]], || {
        let others = 0u64;
        let context = (&raw const others).cast_mut().cast();
        // SAFETY: the library does nothing with a context but tell it.
        unsafe { ctx::set_current(context) }.unwrap();
        let driver = Nvidia::open(0).unwrap();
        let beside = driver.beside();
        let memory = beside.alloc(4).unwrap();
        driver.write(&memory, 0, &[3, 0, 0, 0]);
        add(&driver, &memory, &memory, 1, 1);
        assert_eq!(words(&driver, &memory, 1), [4]);
        assert_eq!(driver.memory(), (1 << 30, 3 << 20));
        driver.pin(&bytes_at_a_page(0..9, true));
        driver.wait().unwrap();
        drop((beside, memory, driver));
        assert_eq!(ctx::get_current().unwrap(), Some(context));
    });
}

#[test]
fn what_is_missing_is_told() {
    let settings: [&[(&str, &str)]; 5] = [
        &[("FAKE_CUDA_DEVICES", "0"), ("WANTED", "there is no NVIDIA GPU")],
        &[("FAKE_CUDA_STUB", "1"), ("WANTED", "take the toolkit's folder of stubs out of LD_LIBRARY_PATH")],
        &[
            ("FAKE_CUDA_DEVICES", "2"),
            ("WANTED", "there is no GPU 5; the GPUs here are 0: Fake 0, 1: Fake 1"),
        ],
        &[("FAKE_CUDA_DEVICES", "6"), ("FAKE_CUDA_VERSION", "12080"), ("WANTED", "supports CUDA 12.8")],
        &[
            ("FAKE_CUDA_DEVICES", "6"),
            ("FAKE_CUDA_CAPABILITY", "75"),
            ("WANTED", "GPU 5, Fake 5, has compute capability 7.5"),
        ],
    ];
    with_library("what_is_missing_is_told", &settings, || {
        let error = Nvidia::open(5).unwrap_err().to_string();
        assert!(error.contains(&std::env::var("WANTED").unwrap()), "{error}");
    });
}
