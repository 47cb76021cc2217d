//! Bytes a pair of key and worker. A process of its own: its allocator counts.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use refrain_route::{Load, Rates, Router, Rule, Settings, State, Update, WorkerId};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A fleet whose worker `w` holds the keys that `of` gives, which come one after the other, as they do when a worker fetches them.
fn filled(workers: u64, keys: u64, of: impl Fn(u64, u64) -> u64) -> Router {
    let rates = Rates { prefill: 3000.0, local: 2e9, remote: 1e8, remote_latency: 0.03, service: 0.2 };
    let mut router = Router::new(Settings { rule: Rule::Cost, bytes_per_token: 23_040, rates });
    for worker in 0..workers {
        router.add(WorkerId(worker)).unwrap();
        for key in 0..keys {
            let added = vec![of(worker, key)];
            let (removed, load) = (Vec::new(), Load::default());
            let state = State { epoch: 1, seq: key + 1, added, removed, load, own: None, rates };
            assert_eq!(router.state(WorkerId(worker), &state), Update::Applied);
        }
    }
    router
}

fn mixed(x: u64) -> u64 {
    let x = (x + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// One test, so that no other counts beside it.
#[test]
fn a_pair_takes_what_the_docs_say() {
    let bytes = |router: &Router, before: usize| (HELD.load(Relaxed) - before) as f64 / router.pairs() as f64;
    // A key for each pair: keys and lists of workers are at their largest.
    let before = HELD.load(Relaxed);
    let mut router = filled(100, 2000, |worker, key| mixed(worker * 2000 + key));
    assert_eq!(router.distinct_keys(), 200_000);
    let alone = bytes(&router, before);
    assert!(alone < 75.0 + 25.0, "{alone} bytes a pair whose key nobody shares");
    // A worker that leaves takes its list with it, and keys that only it held.
    let all = HELD.load(Relaxed);
    (0..50).for_each(|worker| assert!(router.remove(WorkerId(worker))));
    let left = all - HELD.load(Relaxed);
    assert!(left >= 50 * 2000 * 9, "{left} bytes came back for 100,000 pairs");
    assert_eq!((router.pairs(), router.distinct_keys()), (100_000, 100_000));
    drop(router);
    // All workers hold the same keys.
    let before = HELD.load(Relaxed);
    let router = filled(200, 1000, |_, key| mixed(key));
    assert_eq!((router.pairs(), router.distinct_keys()), (200_000, 1000));
    let shared = bytes(&router, before);
    assert!(shared < 25.0 + 4.0 + 1.0, "{shared} bytes a pair whose key all share");
    eprintln!("{alone:.1} bytes a pair alone, {shared:.1} shared");
}
