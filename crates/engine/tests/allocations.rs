//! Memory asked for while decoding. A process of its own: its allocator counts.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use refrain_engine::{Engine, Prompt, Settings};
use refrain_eviction::POLICIES;
use refrain_fusion::{FusionMethod, Vanilla};
use refrain_kernels::Precision;
use refrain_store::Store;

struct Counting;

static ASKED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.fetch_add(1, Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The same where every step evicts a token.
fn bounded(engine: &Engine, context: &[u32], policy: &str, precision: Precision) {
    let eviction = POLICIES.parse(policy).unwrap();
    let prompt = Prompt { question: context.to_vec(), ..Prompt::default() };
    let vanilla: Arc<dyn FusionMethod> = Arc::new(Vanilla);
    let asked = |tokens: usize| {
        let run = |_| {
            let (mut first, mut last) = (0, 0);
            let mark = |done: &mut usize| {
                *done += 1;
                last = ASKED.load(Relaxed);
                if *done == 5 {
                    first = last;
                }
            };
            let mut done = 0;
            let mut mark = mark;
            engine.time_policies(&prompt, &vanilla, &[&eviction], tokens, |_| mark(&mut done)).unwrap();
            last - first
        };
        (0..5).map(run).min().unwrap()
    };
    asked(40);
    let (ten, forty) = (asked(10), asked(40));
    // The list of times grows as well, now and then.
    assert!((30..=34).contains(&(forty - ten)), "{policy} {precision}: {}", forty - ten);
}

/// Thirty steps more ask thirty times more: for the name of the embedding matrix, when its row is looked up. No layer and
/// no kernel asks. A thread may join late and ask for its scratch then, so that the least of several runs counts.
#[test]
fn no_operation_of_decoding_allocates() {
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for precision in [Precision::F32, Precision::Bf16, Precision::Q8] {
        for threads in [1, 2] {
            let settings = Settings { precision: Some(precision), threads, ..Settings::default() };
            let engine = Engine::open(&model, Store::in_memory(1 << 20), settings, |_, _| ()).unwrap();
            let context: Vec<u32> = (1..100).collect();
            let asked = |tokens: usize| {
                let run = |_| {
                    let before = ASKED.load(Relaxed);
                    engine.time_decode(&context, tokens).unwrap();
                    ASKED.load(Relaxed) - before
                };
                (0..5).map(run).min().unwrap()
            };
            // Buffers grow to their size.
            asked(40);
            let (ten, forty) = (asked(10), asked(40));
            assert_eq!(forty - ten, 30, "{precision}, {threads} threads");
            for policy in
                ["morph_kv:capacity=40,window=6", "morph_kv:capacity=40,window=6,fuse=max", "h2o:capacity=40"]
            {
                bounded(&engine, &context, policy, precision);
            }
        }
    }
}
