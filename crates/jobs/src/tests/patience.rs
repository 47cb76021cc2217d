//! An object store that does not answer for a while.

use std::time::Instant;

use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};

use super::*;
use crate::claim::{Held, Watch};
use crate::patience::{Failed, repeat};

#[test]
fn what_may_pass_is_repeated_until_patience_ends_and_what_lasts_is_not() {
    let fails = |times: usize, patience, failed: fn(usize) -> Failed<usize>| {
        let mut tries = 0;
        let outcome = repeat(patience, || {
            tries += 1;
            if tries > times { Ok(()) } else { Err(failed(tries)) }
        });
        (outcome, tries)
    };
    let (long, none) = (Duration::from_secs(600), Duration::ZERO);
    assert_eq!(fails(2, long, Failed::Passing), (Ok(()), 3));
    assert_eq!(fails(2, long, Failed::Lasting), (Err(1), 1));
    assert_eq!(fails(usize::MAX, none, Failed::Passing), (Err(1), 1));
    // The last error is told.
    let (outcome, tries) = fails(usize::MAX, Duration::from_millis(300), Failed::Passing);
    assert!(outcome == Err(tries) && tries > 1, "{tries}");
}

/// An object store in memory that can be made to hang.
struct Hanging(Arc<ThrottledStore<InMemory>>);

impl Hanging {
    fn new() -> (Hanging, Objects) {
        let slow = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
        let mut remote = RemoteOptions::new("memory:///job");
        remote.timeout = Duration::from_millis(100);
        remote.objects = Some(slow.clone());
        (Hanging(slow), Objects::open(&remote).unwrap())
    }

    /// Has each request take so long from now on.
    fn hang(&self, time: Duration) {
        self.0.config_mut(|config| {
            (config.wait_get_per_call, config.wait_put_per_call) = (time, time);
            (config.wait_list_per_call, config.wait_delete_per_call) = (time, time);
        });
    }
}

#[test]
fn a_claim_does_not_age_while_the_object_store_is_away() {
    let (slow, objects) = Hanging::new();
    let mut job = planned(&objects, &items(1), 1);
    job.objects = job.objects.with_patience(MINUTE, &stop_flag(false));
    job.objects.put("claims/000000.1", "{}").unwrap();
    let mut watch = Watch::default();
    let mut take = |job: &Job| {
        let look = job.look().unwrap();
        watch.see(&look);
        let who = ("other", Duration::from_millis(500));
        Held::acquire(job, 0, &look.claims[&0], &watch, who).unwrap()
    };
    assert!(take(&job).is_none());
    let began = Instant::now();
    slow.hang(MINUTE);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(600));
            slow.hang(Duration::ZERO);
        });
        // It waits for the object store.
        assert!(take(&job).is_none(), "its owner could not renew it");
    });
    assert!(began.elapsed() >= Duration::from_millis(600));
    std::thread::sleep(Duration::from_millis(600));
    assert!(take(&job).is_some(), "its owner could have");
}

#[test]
fn a_runner_waits_for_an_object_store_that_comes_back_and_not_for_ever() {
    let (slow, objects) = Hanging::new();
    let hang = |time| slow.hang(time);
    let all = items(6);
    let job = planned(&objects, &all, 2);
    let began = Instant::now();
    let report = std::thread::scope(|scope| {
        let mut notes = Notes { pause: Duration::from_millis(100), ..Notes::default() };
        let stop = stop_flag(false);
        let runner = scope.spawn({
            let job = &job;
            move || job.run(&mut notes, &options(), &stop, |_| ()).unwrap()
        });
        std::thread::sleep(Duration::from_millis(150));
        hang(Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1000));
        assert!(!runner.is_finished());
        hang(Duration::ZERO);
        runner.join().unwrap()
    });
    assert!(report.complete && began.elapsed() > Duration::from_secs(1), "{report:?}");
    assert_eq!(in_results(&job), ids(&all));

    hang(Duration::from_secs(60));
    let options = RunOptions { patience: Duration::from_millis(300), ..options() };
    let error = job.run(&mut Notes::default(), &options, &stop_flag(false), |_| ()).unwrap_err();
    assert!(error.to_string().contains("memory:///job"), "{error}");
}

#[test]
fn a_runner_that_is_to_stop_does_not_wait_for_an_object_store() {
    let (slow, objects) = Hanging::new();
    let job = planned(&objects, &items(4), 4);
    let (stop, began) = (stop_flag(false), Instant::now());
    let mut notes = Notes { pause: Duration::from_millis(50), ..Notes::default() };
    // Work can be kept no more, nor the claim given back.
    let error = job.run(&mut notes, &options(), &stop, |step| {
        if step.weight == 20 {
            slow.hang(MINUTE);
            stop.store(true, Relaxed);
        }
    });
    assert!(error.unwrap_err().to_string().contains("memory:///job"));
    assert!(began.elapsed() < Duration::from_secs(20), "its patience is {:?}", options().patience);
}

#[test]
fn a_job_waits_as_long_as_its_patience_says() {
    let (slow, objects) = Hanging::new();
    let mut all = items(1);
    all[0].body = Body::Bad;
    let job = planned(&objects, &all, 1);
    run(&job, &mut Notes::default());
    slow.hang(MINUTE);
    let impatient = job.clone().with_patience(Duration::ZERO, &stop_flag(false));
    assert!(impatient.failed().unwrap_err().to_string().contains("memory:///job"));
    assert!(impatient.is_down());
    let patient = job.with_patience(MINUTE, &stop_flag(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            slow.hang(Duration::ZERO);
        });
        assert_eq!(patient.failed().unwrap().len(), 1);
    });
}
