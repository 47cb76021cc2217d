//! A persistent pool: workers spin shortly for the next job, then sleep.
//!
//! A job is open while tasks may be left. A worker joins an open job by raising the count in `state`; the
//! caller works too, closes the job once no task is left, and waits only for those who joined. A worker that
//! wakes late finds the job closed, so nobody ever waits for a sleeper.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Cpu, shared};

/// Instruction set used by the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ; `bf16` weights are widened and multiplied by `f32` FMA.
    Avx512,
    /// The same with BF16: pairs of `bf16` are multiplied by `vdpbf16ps`.
    Avx512Bf16,
    /// AVX-512, and tiles of `bf16` pairs multiplied by AMX.
    Amx,
}

/// How long a worker spins for the next job before it sleeps: longer than the gaps between one layer's steps.
const SPIN: Duration = Duration::from_micros(60);
/// More are never of use, and a system that has no room for them may end the program.
const MOST_THREADS: usize = 512;

/// Bit of `state` that says the job takes workers; the joined workers are counted below, jobs above it.
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// One call of `parallel`, on its caller's stack.
struct Job<'a> {
    task: &'a Task<'a>,
    tasks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Runs tasks until none is left. The first panic is kept and ends the job.
    fn work(&self) {
        let outer = INSIDE.replace(true);
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.tasks {
                break;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.task)(i))) {
                self.next.store(self.tasks, Ordering::Relaxed);
                lock(&self.panic).get_or_insert(panic);
            }
        }
        INSIDE.set(outer);
    }
}

/// What workers and callers share.
struct Shared {
    state: AtomicU64,
    /// The open job; its lifetime is erased.
    job: AtomicPtr<Job<'static>>,
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// Held while a job is open.
    caller: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    isa: Isa,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &(self.workers.len() + 1)).field("isa", &self.isa).finish()
    }
}

thread_local! {
    /// Whether this thread is running a task: what it starts then runs inline.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// No invariant spans a panic under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Joins the open job and works on it, unless it is the job `done`. Returns the job seen last.
    fn join(&self, done: u64) -> u64 {
        let state = self.state.load(Ordering::SeqCst);
        let epoch = state / EPOCH;
        if state & OPEN == 0 || epoch == done {
            return done;
        }
        if self.state.compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return done;
        }
        // SAFETY: the count just raised keeps `run` from returning, so the job is alive; `job` was stored
        // before `state` said that this epoch is open.
        unsafe { (*self.job.load(Ordering::Acquire)).work() };
        self.state.fetch_sub(1, Ordering::SeqCst);
        epoch
    }

    fn worker(&self) {
        let mut done = 0;
        let mut idle = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let seen = self.join(done);
            if seen != done {
                (done, idle) = (seen, Instant::now());
                continue;
            }
            for _ in 0..16 {
                std::hint::spin_loop();
            }
            if idle.elapsed() > SPIN {
                self.sleep(done);
                idle = Instant::now();
            }
        }
    }

    /// Sleeps until a job other than `done` is open. Raising `sleepers` before looking at `state`, and the
    /// caller's doing it in the other order, rules out that both miss each other.
    fn sleep(&self, done: u64) {
        let mut guard = lock(&self.asleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if (state & OPEN != 0 && state / EPOCH != done) || self.stop.load(Ordering::SeqCst) {
                break;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self, wanted: usize) {
        let sleepers = self.sleepers.load(Ordering::SeqCst);
        if sleepers > 0 {
            let guard = lock(&self.asleep);
            drop(guard);
            for _ in 0..wanted.min(sleepers) {
                self.wake.notify_one();
            }
        }
    }

    /// Opens the job, works on it, closes it and waits for those who joined.
    fn run(&self, job: &Job) {
        self.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Release);
        // The epoch wraps around after 2³² jobs.
        let epoch = self.state.load(Ordering::Relaxed) / EPOCH + 1;
        self.state.store(epoch.wrapping_mul(EPOCH) | OPEN, Ordering::SeqCst);
        self.wake(job.tasks - 1);
        job.work();
        self.state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0u32;
        while self.state.load(Ordering::SeqCst) & (OPEN - 1) != 0 {
            spins += 1;
            if spins < 2000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

impl Pool {
    fn new(threads: usize, isa: Isa) -> Pool {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(EPOCH),
            job: AtomicPtr::new(std::ptr::null_mut()),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        // A worker that cannot be started is done without.
        let workers = (1..threads)
            .filter_map(|i| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("kernels-{i}")).spawn(move || shared.worker()).ok()
            })
            .collect();
        Pool { shared, caller: Mutex::new(()), workers, isa }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.asleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch the panics of tasks; there is no other.
            let _ = worker.join();
        }
    }
}

impl Cpu {
    /// A pool of `threads` threads, the calling thread among them; 0: one per available core.
    ///
    /// The best instruction set is found at run time; the environment variable `REFRAIN_CPU`
    /// (`portable`, `avx2`, `avx512`, `avx512bf16`, `amx`) asks for a particular one, and [`Cpu::isa`] tells what is used.
    pub fn new(threads: usize) -> Cpu {
        let asked = match std::env::var("REFRAIN_CPU").as_deref() {
            Ok("portable") => Isa::Portable,
            Ok("avx2") => Isa::Avx2,
            Ok("avx512") => Isa::Avx512,
            Ok("avx512bf16") => Isa::Avx512Bf16,
            Ok("amx") => Isa::Amx,
            _ => Isa::best(),
        };
        Cpu::with_isa(threads, asked)
    }

    /// A pool that uses `isa`, or the best available set where this machine lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Cpu {
        let threads =
            if threads == 0 { std::thread::available_parallelism().map_or(1, |n| n.get()) } else { threads };
        let threads = threads.min(MOST_THREADS);
        let isa = if isa.available() { isa } else { Isa::best() };
        Cpu { pool: Arc::new(Pool::new(threads, isa)), each: false }
    }

    /// Number of threads that share the work.
    pub fn threads(&self) -> usize {
        self.pool.workers.len() + 1
    }

    /// Number of threads that would share work begun now: inside a task it is done alone.
    pub(crate) fn sharing(&self) -> usize {
        if INSIDE.get() { 1 } else { self.threads() }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.pool.isa
    }

    /// Runs `f(0..tasks)`, each index exactly once, dynamically balanced over the pool; returns when all are done.
    ///
    /// Called from inside a task it runs inline, and so it does while another thread uses the pool.
    ///
    /// # Panics
    /// With the panic of a task; the remaining tasks may then be left out.
    pub fn parallel(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let alone = tasks <= 1 || self.pool.workers.is_empty() || INSIDE.get();
        let caller = if alone { None } else { self.pool.caller.try_lock().ok() };
        let Some(caller) = caller else {
            (0..tasks).for_each(f);
            return;
        };
        let job = Job { task: f, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        self.pool.shared.run(&job);
        drop(caller);
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    /// Runs `f` on each of the items, exactly once, as [`Cpu::parallel`] runs tasks.
    ///
    /// # Panics
    /// As [`Cpu::parallel`].
    pub fn parallel_each<T: Send>(&self, items: &mut [T], f: &(dyn Fn(usize, &mut T) + Sync)) {
        let (tasks, items) = (items.len(), shared::Shared::new(items));
        self.parallel(tasks, &|i| {
            // SAFETY: item `i` belongs to task `i`.
            unsafe { items.part(i..i + 1) }.iter_mut().for_each(|item| f(i, item));
        });
    }

    /// Runs the tasks here, one after the other, where they are too small to be worth waking anybody.
    pub(crate) fn parallel_if(&self, worth: bool, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        if worth { self.parallel(tasks, f) } else { (0..tasks).for_each(f) }
    }
}
