use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use refrain_kernels::{Cpu, parallel_each};

fn counts(cpu: &Cpu, tasks: usize) -> Vec<usize> {
    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    cpu.parallel(tasks, &|i| {
        counts[i].fetch_add(1, Ordering::Relaxed);
    });
    counts.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn each_task_runs_once() {
    for threads in [1, 2, 5] {
        let cpu = Cpu::new(threads).unwrap();
        assert_eq!(cpu.threads(), threads);
        for round in 0..300 {
            let tasks = [0, 1, 2, 3, 17, 200][round % 6];
            assert!(counts(&cpu, tasks).iter().all(|c| *c == 1));
            if round % 100 == 0 {
                // Long enough for the workers to fall asleep.
                std::thread::sleep(Duration::from_millis(3));
            }
        }
    }
}

#[test]
fn each_item_is_changed_once_by_its_index() {
    for threads in [1, 2, 5] {
        let cpu = Cpu::new(threads).unwrap();
        let mut items: Vec<String> = (0..300).map(|i| format!("{i}:")).collect();
        parallel_each(&cpu, &mut items, &|i, item| item.push_str(&i.to_string()));
        assert!(items.iter().enumerate().all(|(i, item)| *item == format!("{i}:{i}")));
        parallel_each(&cpu, &mut [(); 0], &|_, ()| panic!("there is none"));
    }
}

#[test]
fn nested_calls_run_inline() {
    let cpu = Cpu::new(3).unwrap();
    let sum = AtomicUsize::new(0);
    cpu.parallel(20, &|_| {
        let thread = std::thread::current().id();
        cpu.parallel(10, &|j| {
            assert_eq!(std::thread::current().id(), thread);
            sum.fetch_add(j, Ordering::Relaxed);
        });
    });
    assert_eq!(sum.into_inner(), 20 * 45);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let cpu = Cpu::new(3).unwrap();
    for round in 0..50 {
        let panic = catch_unwind(AssertUnwindSafe(|| {
            cpu.parallel(40, &|i| {
                if i == round % 40 {
                    std::panic::resume_unwind(Box::new("task failed"));
                }
            });
        }));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"task failed"));
        assert!(counts(&cpu, 30).iter().all(|c| *c == 1));
    }
}

#[test]
fn several_callers_at_once() {
    let cpu = Cpu::new(2).unwrap();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for tasks in 0..500 {
                    assert!(counts(&cpu, tasks % 50).iter().all(|c| *c == 1));
                }
            });
        }
    });
}

#[test]
fn clones_share_the_pool_and_dropping_ends_it() {
    for _ in 0..50 {
        let cpu = Cpu::new(4).unwrap();
        let clone = cpu.clone();
        drop(cpu);
        assert!(counts(&clone, 9).iter().all(|c| *c == 1));
    }
    assert!(Cpu::new(0).unwrap().threads() >= 1);
}

/// Waits until the condition holds, or ten seconds.
fn wait_for(condition: impl Fn() -> bool) -> bool {
    let start = std::time::Instant::now();
    while !condition() {
        if start.elapsed() > Duration::from_secs(10) {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// A second caller's tasks run side by side while the first caller's job is still open.
#[test]
fn jobs_of_two_callers_share_the_workers() {
    let cpu = Cpu::new(4).unwrap();
    let (started, met, done) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|s| {
        s.spawn(|| {
            cpu.parallel(2, &|_| {
                started.fetch_add(1, Ordering::SeqCst);
                assert!(wait_for(|| done.load(Ordering::SeqCst) == 1), "the second caller is stuck");
            });
        });
        assert!(wait_for(|| started.load(Ordering::SeqCst) == 2));
        let together = AtomicUsize::new(0);
        cpu.parallel(2, &|_| {
            met.fetch_add(1, Ordering::SeqCst);
            if wait_for(|| met.load(Ordering::SeqCst) == 2) {
                together.fetch_add(1, Ordering::SeqCst);
            }
        });
        done.store(1, Ordering::SeqCst);
        assert_eq!(together.into_inner(), 2, "the second caller worked alone");
    });
}

/// More callers than there are slots for jobs, each with nested calls, all come to an end.
#[test]
fn more_callers_than_slots_do_not_wait_for_one_another() {
    let cpu = Cpu::new(3).unwrap();
    std::thread::scope(|s| {
        for _ in 0..20 {
            s.spawn(|| {
                for _ in 0..50 {
                    let sum = AtomicUsize::new(0);
                    cpu.parallel(7, &|i| {
                        cpu.parallel(3, &|j| {
                            sum.fetch_add(i * 3 + j, Ordering::Relaxed);
                        });
                    });
                    assert_eq!(sum.into_inner(), 21 * 10);
                }
            });
        }
    });
}
