//! A persistent thread pool: workers spin shortly for the next job, then sleep.
//!
//! A caller takes a free slot and opens its job there; several callers have a slot each, and the workers go round the
//! slots, so that jobs of several callers share the workers. A worker joins an open job by raising the count in the
//! slot's state. The caller works too, closes the job once no task is left, and waits only for the workers that joined.
//! A worker that wakes late finds the job closed, so no caller ever waits for a sleeping worker. A caller never waits
//! for another caller either: if all slots are taken, it runs its tasks alone, which rules out deadlocks.
//!
//! Every thread has a share of neighbouring tasks, so that what it reads for one task leads on to the next; a thread that is done with its
//! own takes tasks of the others' shares.
//!
//! A step of decoding opens some 150 jobs of a few microseconds. A cache line that another core has written takes up to a quarter of a
//! microsecond to come, so that a job touches few of them: one to open, to join and to leave, and nobody's but the thread's own to count
//! tasks.

use std::any::Any;
use std::array::from_fn;
use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::prefetch;
use crate::read_ahead::{Reader, Upcoming};

/// How long a worker spins for the next job before it sleeps: longer than the gaps between one layer's steps.
const SPIN: Duration = Duration::from_micros(60);
/// Bytes of a task's captured variables that a worker asks for before it joins.
const CAPTURED: usize = 128;
/// Looks at the slots between two looks at the clock.
const LOOKS: usize = 16;
/// More threads are never of use, and a system that has no room for them may end the program.
const MOST_THREADS: usize = 512;
/// Jobs that may be open at the same time.
const SLOTS: usize = 8;
/// Most shares of a job's tasks: more threads have a share together.
const MOST_SHARES: usize = 64;

/// Bit of a slot's state that says that the job takes workers; the joined workers are counted below, jobs above it.
const OPEN: u64 = 1 << 31;
const EPOCH: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// One call of [`Pool::run`].
#[derive(Clone, Copy)]
struct Job<'a> {
    task: &'a Task<'a>,
    tasks: usize,
    shares: usize,
    /// On the caller's stack.
    panic: &'a Mutex<Option<Box<dyn Any + Send>>>,
}

/// All that a worker needs to join a job, in one cache line.
#[repr(align(128))]
struct Slot {
    state: AtomicU64,
    /// The task's captured variables.
    captured: AtomicPtr<u8>,
    /// The open job; its lifetime is erased. Written by the caller while no worker has joined, and read by those who have.
    job: UnsafeCell<MaybeUninit<Job<'static>>>,
}

/// The next task of a share, and above it the epoch of its job, so that nobody has to write to it before a job begins. It has cache lines
/// of its own.
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    /// Takes one of `tasks`, the share's in the job of this epoch.
    fn take(&self, epoch: u64, tasks: Range<usize>) -> Option<usize> {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            let task = if seen / EPOCH == epoch { (seen % EPOCH) as usize } else { tasks.start };
            if task >= tasks.end {
                return None;
            }
            let taken = epoch * EPOCH + task as u64 + 1;
            match self.0.compare_exchange_weak(seen, taken, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(task),
                Err(now) => seen = now,
            }
        }
    }

    /// Makes `task` the next one of the job of this epoch.
    fn set(&self, epoch: u64, task: usize) {
        self.0.store(epoch * EPOCH + task as u64, Ordering::Relaxed);
    }
}

impl Job<'_> {
    /// Runs tasks until none is left, those of the share of `thread` first. The first panic is kept and ends the job.
    fn work(&self, epoch: u64, shares: &[Share], thread: usize) {
        let outer = INSIDE.replace(true);
        let own = |share: usize| self.tasks * share / self.shares..self.tasks * (share + 1) / self.shares;
        for share in (0..self.shares).map(|i| (thread + i) % self.shares) {
            while let Some(i) = shares[share].take(epoch, own(share)) {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.task)(i))) {
                    shares[..self.shares].iter().for_each(|share| share.set(epoch, self.tasks));
                    lock(self.panic).get_or_insert(panic);
                }
            }
        }
        INSIDE.set(outer);
    }
}

/// State that workers and callers share.
struct Shared {
    slots: [Slot; SLOTS],
    /// The shares of each slot's job.
    shares: [Box<[Share]>; SLOTS],
    /// Memory that idle threads read ahead.
    upcoming: Upcoming,
    sleepers: AtomicUsize,
    asleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
}

// SAFETY: a job is written by the caller that holds its slot while no worker has joined, and read by workers that have; the state orders
// both. Its task is `Sync`, and its panic behind a lock.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

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
        let Slot { state, captured, job } = &self.slots[slot];
        let seen = state.load(Ordering::SeqCst);
        if !Shared::joinable(seen, done) {
            return done;
        }
        prefetch::to_read(captured.load(Ordering::Relaxed), CAPTURED);
        if state.compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return done;
        }
        let epoch = seen / EPOCH;
        // SAFETY: the count just raised keeps `run` from returning, so the job is alive; it was written before the state said that this
        // epoch is open.
        unsafe { (*job.get()).assume_init() }.work(epoch, &self.shares[slot], worker);
        state.fetch_sub(1, Ordering::SeqCst);
        epoch
    }

    /// Goes round the slots until the pool stops. After a job the next slot comes first, so that jobs which follow one
    /// another in one slot do not keep the worker from the jobs of other slots.
    fn worker(&self, index: usize, threads: usize) {
        let mut done = [0; SLOTS];
        let mut reader = Reader::default();
        let mut first = 0;
        let mut idle = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            for _ in 0..LOOKS {
                let joined = (0..SLOTS).map(|i| (first + i) % SLOTS).find(|&slot| {
                    let seen = self.join(index, slot, done[slot]);
                    std::mem::replace(&mut done[slot], seen) != seen
                });
                if let Some(slot) = joined {
                    (first, idle) = ((slot + 1) % SLOTS, Instant::now());
                } else if !reader.read(&self.upcoming, index, threads) {
                    std::hint::spin_loop();
                }
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
            let mut slots = self.slots.iter().zip(done);
            let open = slots.any(|(slot, done)| Shared::joinable(slot.state.load(Ordering::SeqCst), *done));
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
    fn run(&self, slot: usize, work: Job<'_>, threads: usize) {
        let (Slot { state, captured, job }, shares) = (&self.slots[slot], &self.shares[slot]);
        let mut epoch = state.load(Ordering::Relaxed) / EPOCH + 1;
        if epoch == EPOCH {
            // Epochs begin again, and no share may still have one of them.
            shares.iter().for_each(|share| share.set(0, 0));
            epoch = 1;
        }
        captured.store(std::ptr::from_ref(work.task).cast_mut().cast(), Ordering::Relaxed);
        // SAFETY: no worker has joined, and none can before the state is open. This call waits for those that join, so that the job
        // outlives their use of it.
        unsafe { job.get().write(MaybeUninit::new(std::mem::transmute::<Job<'_>, Job<'static>>(work))) };
        state.store((epoch * EPOCH) | OPEN, Ordering::SeqCst);
        self.wake(work.tasks - 1);
        work.work(epoch, shares, 0);
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
        let threads = threads.min(MOST_THREADS);
        let slot = |_| Slot {
            state: AtomicU64::new(0),
            captured: AtomicPtr::new(std::ptr::null_mut()),
            job: UnsafeCell::new(MaybeUninit::uninit()),
        };
        let shares = |_| (0..threads.min(MOST_SHARES)).map(|_| Share(AtomicU64::new(0))).collect();
        let shared = Arc::new(Shared {
            slots: from_fn(slot),
            shares: from_fn(shares),
            upcoming: Upcoming::default(),
            sleepers: AtomicUsize::new(0),
            asleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
        });
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
        assert!(u32::try_from(tasks).is_ok(), "tasks are counted in 32 bits");
        let panic = Mutex::new(None);
        let shares = self.threads().min(tasks).min(MOST_SHARES);
        self.shared.run(slot, Job { task, tasks, shares, panic: &panic }, self.threads());
        drop(caller);
        if let Some(panic) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
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
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::{EPOCH, Job, MOST_SHARES, Pool, Share};

    fn shares() -> Vec<Share> {
        (0..MOST_SHARES).map(|_| Share(AtomicU64::new(0))).collect()
    }

    #[test]
    fn a_thread_takes_its_own_share_in_order_and_then_those_of_others() {
        let (taken, panic, all_shares) = (Mutex::new(Vec::new()), Mutex::new(None), shares());
        let task = |i| taken.lock().unwrap().push(i);
        let all = |epoch, tasks, shares, thread| {
            Job { task: &task, tasks, shares, panic: &panic }.work(epoch, &all_shares, thread);
            std::mem::take(&mut *taken.lock().unwrap())
        };
        assert_eq!(all(1, 10, 3, 1), [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]);
        assert_eq!(all(1, 10, 3, 1), [], "all tasks of this epoch are taken");
        assert_eq!(all(2, 2, 2, 2), [0, 1], "fewer tasks than threads");
        let mut many = all(3, 1000, MOST_SHARES, 99);
        many.sort_unstable();
        assert!(many.into_iter().eq(0..1000), "more threads than shares");
    }

    #[test]
    fn epochs_begin_again() {
        let pool = Pool::new(3);
        let count = || {
            let taken = AtomicU64::new(0);
            pool.run(100, &|_| _ = taken.fetch_add(1, Ordering::Relaxed));
            taken.into_inner()
        };
        assert_eq!(count(), 100);
        for slot in &pool.shared.slots {
            slot.state.store((EPOCH - 2) * EPOCH, Ordering::SeqCst);
        }
        // The epoch before the last, the last, and the first ones, which the shares already had.
        assert_eq!([count(), count(), count(), count()], [100; 4]);
    }

    #[test]
    fn a_panic_ends_its_job_alone() {
        let pool = Pool::new(2);
        let failed = catch_unwind(AssertUnwindSafe(|| {
            pool.run(10, &|i| assert_ne!(i, 3, "the fourth task fails"));
        }));
        assert!(failed.is_err());
        let taken = AtomicU64::new(0);
        pool.run(10, &|_| _ = taken.fetch_add(1, Ordering::Relaxed));
        assert_eq!(taken.into_inner(), 10);
    }
}
