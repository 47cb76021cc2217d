//! Mistakes of a launch become errors.
#![cfg(feature = "emulate")]

use refrain_cuda::{Arg, Driver, Emulated, EmulatedMemory, Grid};

const GRID: Grid = Grid { blocks: [2, 1, 1], threads: 256, shared: 0 };

fn launched(
    kernel: &'static str,
    grid: Grid,
    args: impl Fn(&EmulatedMemory) -> Vec<Arg<'_, EmulatedMemory>>,
) -> String {
    let driver = Emulated::new(1);
    let memory = driver.alloc(512 * 4).unwrap();
    driver.launch(kernel, grid, &args(&memory));
    driver.wait().err().map(|error| error.0).unwrap_or_default()
}

#[test]
fn an_access_past_the_end_is_an_error_and_not_the_end() {
    let add = |count| launched("add", GRID, |x| vec![Arg::Memory(x, 0), Arg::Memory(x, 0), Arg::U64(count)]);
    assert_eq!(add(512), "");
    let late = launched("add", GRID, |x| vec![Arg::Memory(x, 4), Arg::Memory(x, 0), Arg::U64(512)]);
    assert!(late.contains("outside of memory"), "{late}");
    // The next launch of this thread is not harmed.
    assert_eq!(add(511), "");
}

#[test]
fn memory_that_a_launch_only_reads_is_not_written() {
    let driver = Emulated::new(1);
    let [x, y] = [(); 2].map(|()| driver.alloc(512 * 4).unwrap());
    [&x, &y].into_iter().for_each(|memory| driver.zero(memory, 0, 512 * 4));
    driver.wait().unwrap();
    let add = |to, from| driver.launch("add", GRID, &[to, from, Arg::U64(512)]);
    add(Arg::Memory(&x, 0), Arg::Read(&y, 0));
    add(Arg::Memory(&x, 0), Arg::Constant(&y, 0));
    // Memory that one argument only reads may be written by another.
    add(Arg::Memory(&x, 0), Arg::Read(&x, 0));
    driver.wait().unwrap();
    driver.zero(&y, 0, 512 * 4);
    driver.wait().unwrap();
    for to in [Arg::Read(&y, 0), Arg::Constant(&y, 0)] {
        let driver = Emulated::new(1);
        driver.launch("add", GRID, &[to, Arg::Memory(&x, 0), Arg::U64(512)]);
        let error = driver.wait().unwrap_err();
        assert!(error.0.contains("a write to memory that the launch only reads"), "{error}");
    }
}

#[test]
fn a_launch_that_does_not_fit_its_kernel_is_refused() {
    fn args(x: &EmulatedMemory) -> Vec<Arg<'_, EmulatedMemory>> {
        vec![Arg::Memory(x, 0), Arg::Memory(x, 0), Arg::U64(1)]
    }
    assert!(launched("none", GRID, args).contains("no such kernel"));
    assert!(launched("add", Grid { threads: 288, ..GRID }, args).contains("threads"));
    assert!(launched("add", Grid { shared: 1 << 20, ..GRID }, args).contains("shared memory"));
    assert!(launched("add", GRID, |x| args(x)[..2].to_vec()).contains("arguments"));
    assert!(
        launched("add", GRID, |x| vec![Arg::Memory(x, 0), Arg::Memory(x, 0), Arg::U32(1)])
            .contains("arguments")
    );
}

#[test]
fn shared_memory_ends_where_the_launch_says() {
    let norm = |shared| {
        launched("rms_norm_f32", Grid { shared, ..GRID }, |x| {
            let (x, width) = (|| Arg::Memory(x, 0), || Arg::U32(256));
            vec![x(), x(), x(), width(), width(), Arg::F32(1.0)]
        })
    };
    assert_eq!(norm(32), "");
    assert!(norm(16).contains("outside of memory"));
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let error = Emulated::new(1).alloc(1 << 40).unwrap_err();
    assert!(error.0.contains("1099511627776 bytes"), "{error}");
}
