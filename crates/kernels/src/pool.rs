//! A persistent thread pool: workers spin shortly for the next job, then sleep.
//!
//! A caller takes a free slot and opens its job there; several callers have a slot each, and the workers go round the
//! slots, so that jobs of several callers share the workers. A worker joins an open job by raising the count in the
//! slot's state. The caller works too, closes the job once no task is left, and waits only for the workers that joined.
//! A worker that wakes late finds the job closed, so no caller ever waits for a sleeping worker. A caller never waits
//! for another caller either: if all slots are taken, it runs its tasks alone, which rules out deadlocks.

use std::any::Any;
use std::array::from_fn;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker spins for the next job before it sleeps: longer than the gaps between one layer's steps.
const SPIN: Duration = Duration::from_micros(60);
/// More threads are never of use, and a system that has no room for them may end the program.
const MOST_THREADS: usize = 512;
/// Jobs that may be open at the same time. Their states fill one cache line, which an idle worker reads.
const SLOTS: usize = 8;

/// Bit of a slot's state that says that the job takes workers; the joined workers are counted below, jobs above it.
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// One call of [`Pool::run`], on its caller's stack.
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

/// The states of all slots, in one cache line.
#[repr(align(64))]
struct States([AtomicU64; SLOTS]);

/// State that workers and callers share.
struct Shared {
    states: States,
    /// The open job of each slot; its lifetime is erased.
    jobs: [AtomicPtr<Job<'static>>; SLOTS],
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

/// Worker threads, and the slots of their jobs.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    /// Held by the caller of a slot while its job is open.
    callers: [Mutex<()>; SLOTS],
    workers: Vec<JoinHandle<()>>,
}

thread_local! {
    /// Whether this thread is running a task: jobs that it starts then run inline.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is running a task of a pool.
pub(crate) fn inside_task() -> bool {
    INSIDE.get()
}

/// No invariant spans a panic under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Whether a worker that has worked on job `done` of a slot in `state` may join its job.
    fn joinable(state: u64, done: u64) -> bool {
        state & OPEN != 0 && state / EPOCH != done
    }

    /// Joins the open job of a slot and works on it, unless it is the job `done`. Returns the job seen last.
    fn join(&self, slot: usize, done: u64) -> u64 {
        let state = self.states.0[slot].load(Ordering::SeqCst);
        if !Shared::joinable(state, done) {
            return done;
        }
        let raised =
            self.states.0[slot].compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed);
        if raised.is_err() {
            return done;
        }
        // SAFETY: the count just raised keeps `run` from returning, so the job is alive; `jobs` was stored
        // before the state said that this epoch is open.
        unsafe { (*self.jobs[slot].load(Ordering::Acquire)).work() };
        self.states.0[slot].fetch_sub(1, Ordering::SeqCst);
        state / EPOCH
    }

    /// Goes round the slots until the pool stops. After a job the next slot comes first, so that jobs which follow one
    /// another in one slot do not keep the worker from the jobs of other slots.
    fn worker(&self) {
        let mut done = [0; SLOTS];
        let mut first = 0;
        let mut idle = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let joined = (0..SLOTS).map(|i| (first + i) % SLOTS).find(|&slot| {
                let seen = self.join(slot, done[slot]);
                std::mem::replace(&mut done[slot], seen) != seen
            });
            if let Some(slot) = joined {
                (first, idle) = ((slot + 1) % SLOTS, Instant::now());
                continue;
            }
            for _ in 0..16 {
                std::hint::spin_loop();
            }
            if idle.elapsed() > SPIN {
                self.sleep(&done);
                idle = Instant::now();
            }
        }
    }

    /// Sleeps until a job other than those `done` is open. Raising `sleepers` before looking at the states, and the
    /// caller's doing it in the other order, rules out that both miss each other.
    fn sleep(&self, done: &[u64; SLOTS]) {
        let mut guard = lock(&self.asleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let mut slots = self.states.0.iter().zip(done);
            let open = slots.any(|(state, done)| Shared::joinable(state.load(Ordering::SeqCst), *done));
            if open || self.stop.load(Ordering::SeqCst) {
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

    /// Opens the job in a slot, works on it, closes it and waits for the workers that joined.
    fn run(&self, slot: usize, job: &Job) {
        let state = &self.states.0[slot];
        self.jobs[slot].store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Release);
        // The epoch wraps around after 2³² jobs.
        let epoch = state.load(Ordering::Relaxed) / EPOCH + 1;
        state.store(epoch.wrapping_mul(EPOCH) | OPEN, Ordering::SeqCst);
        self.wake(job.tasks - 1);
        job.work();
        state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0u32;
        while state.load(Ordering::SeqCst) & (OPEN - 1) != 0 {
            spins += 1;
            if spins < 2000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, the calling thread among them.
    pub(crate) fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            states: States(from_fn(|_| AtomicU64::new(EPOCH))),
            jobs: from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        // The pool does without a worker that cannot be started.
        let workers = (1..threads.min(MOST_THREADS))
            .filter_map(|i| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("kernels-{i}")).spawn(move || shared.worker()).ok()
            })
            .collect();
        Pool { shared, callers: from_fn(|_| Mutex::new(())), workers }
    }

    /// Number of threads that work on a job, its caller among them.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0..tasks)`, each index exactly once; returns when all are done. Runs them inline from inside a task,
    /// and alone while other threads have taken all slots.
    ///
    /// # Panics
    /// With the panic of a task; the remaining tasks may then be left out.
    pub(crate) fn run(&self, tasks: usize, task: &Task) {
        let alone = tasks <= 1 || self.workers.is_empty() || inside_task();
        let mut slots = self.callers.iter().enumerate();
        let free = if alone { None } else { slots.find_map(|(i, slot)| Some((i, slot.try_lock().ok()?))) };
        let Some((slot, caller)) = free else {
            (0..tasks).for_each(task);
            return;
        };
        let job = Job { task, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        self.shared.run(slot, &job);
        drop(caller);
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
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
