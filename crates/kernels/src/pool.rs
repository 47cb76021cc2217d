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

use crate::read_ahead::{Reader, Upcoming};

/// How long a worker spins for the next job before it sleeps: longer than the gaps between one layer's steps.
const SPIN: Duration = Duration::from_micros(60);
/// More threads are never of use, and a system that has no room for them may end the program.
const MOST_THREADS: usize = 512;
/// Jobs that may be open at the same time. Their states fill one cache line, which an idle worker reads.
const SLOTS: usize = 8;
/// Most shares of a job's tasks: more threads have a share together.
const MOST_SHARES: usize = 64;

/// Bit of a slot's state that says that the job takes workers; the joined workers are counted below, jobs above it.
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// One call of [`Pool::run`], on its caller's stack. Every thread has a share of neighbouring tasks, so that what it reads for one task
/// leads on to the next; a thread that is done with its own takes tasks of the others' shares.
struct Job<'a> {
    task: &'a Task<'a>,
    tasks: usize,
    shares: usize,
    /// The next task of each share.
    next: [AtomicUsize; MOST_SHARES],
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<'a> Job<'a> {
    fn new(task: &'a Task<'a>, tasks: usize, threads: usize) -> Job<'a> {
        let shares = threads.min(tasks).min(MOST_SHARES);
        let first = |share| if share < shares { tasks * share / shares } else { tasks };
        let next = from_fn(|share| AtomicUsize::new(first(share)));
        Job { task, tasks, shares, next, panic: Mutex::new(None) }
    }

    /// Runs tasks until none is left, those of the share of `thread` first. The first panic is kept and ends the job.
    fn work(&self, thread: usize) {
        let outer = INSIDE.replace(true);
        for share in (0..self.shares).map(|i| (thread + i) % self.shares) {
            let end = self.tasks * (share + 1) / self.shares;
            loop {
                let i = self.next[share].fetch_add(1, Ordering::Relaxed);
                if i >= end {
                    break;
                }
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.task)(i))) {
                    self.next.iter().for_each(|next| next.store(self.tasks, Ordering::Relaxed));
                    lock(&self.panic).get_or_insert(panic);
                }
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
    /// Memory that idle threads read ahead.
    upcoming: Upcoming,
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

    /// Joins the open job of a slot as `worker` and works on it, unless it is the job `done`. Returns the job seen last.
    fn join(&self, worker: usize, slot: usize, done: u64) -> u64 {
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
        unsafe { (*self.jobs[slot].load(Ordering::Acquire)).work(worker) };
        self.states.0[slot].fetch_sub(1, Ordering::SeqCst);
        state / EPOCH
    }

    /// Goes round the slots until the pool stops. After a job the next slot comes first, so that jobs which follow one
    /// another in one slot do not keep the worker from the jobs of other slots.
    fn worker(&self, index: usize, threads: usize) {
        let mut done = [0; SLOTS];
        let mut reader = Reader::default();
        let mut first = 0;
        let mut idle = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let joined = (0..SLOTS).map(|i| (first + i) % SLOTS).find(|&slot| {
                let seen = self.join(index, slot, done[slot]);
                std::mem::replace(&mut done[slot], seen) != seen
            });
            if let Some(slot) = joined {
                (first, idle) = ((slot + 1) % SLOTS, Instant::now());
                continue;
            }
            if reader.read(&self.upcoming, index, threads) {
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
    fn run(&self, slot: usize, job: &Job, threads: usize) {
        let state = &self.states.0[slot];
        self.jobs[slot].store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Release);
        // The epoch wraps around after 2³² jobs.
        let epoch = state.load(Ordering::Relaxed) / EPOCH + 1;
        state.store(epoch.wrapping_mul(EPOCH) | OPEN, Ordering::SeqCst);
        self.wake(job.tasks - 1);
        job.work(0);
        state.fetch_and(!OPEN, Ordering::SeqCst);
        let (mut spins, mut reader) = (0u32, Reader::default());
        while state.load(Ordering::SeqCst) & (OPEN - 1) != 0 {
            if reader.read(&self.upcoming, 0, threads) {
                continue;
            }
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
            upcoming: Upcoming::default(),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let threads = threads.min(MOST_THREADS);
        // The pool does without a worker that cannot be started.
        let workers = (1..threads)
            .filter_map(|i| {
                let shared = shared.clone();
                std::thread::Builder::new()
                    .name(format!("kernels-{i}"))
                    .spawn(move || shared.worker(i, threads))
                    .ok()
            })
            .collect();
        Pool { shared, callers: from_fn(|_| Mutex::new(())), workers }
    }

    /// Tells what the next job reads, from its first share to its last. Threads read their shares ahead while they have nothing to do.
    pub(crate) fn expect(&self, words: &[u32]) {
        if !inside_task() {
            self.shared.upcoming.set(words);
        }
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
        let job = Job::new(task, tasks, self.threads());
        self.shared.run(slot, &job, self.threads());
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::Job;

    #[test]
    fn a_thread_takes_its_own_share_in_order_and_then_those_of_others() {
        let taken = Mutex::new(Vec::new());
        let task = |i| taken.lock().unwrap().push(i);
        let all = |tasks, threads, thread| {
            Job::new(&task, tasks, threads).work(thread);
            std::mem::take(&mut *taken.lock().unwrap())
        };
        assert_eq!(all(10, 3, 1), [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]);
        assert_eq!(all(2, 3, 2), [0, 1], "fewer tasks than threads");
        let (threads, tasks) = (100, 1000);
        let mut many = all(tasks, threads, 99);
        many.sort_unstable();
        assert!(many.into_iter().eq(0..tasks), "more threads than shares");
    }
}
