//! An object store that does not answer for a while.

use std::sync::Arc;
use std::time::Instant;

use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};

use super::*;
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

#[test]
fn a_runner_waits_for_an_object_store_that_comes_back_and_not_for_ever() {
    let slow = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let mut remote = RemoteOptions::new("memory:///job");
    remote.timeout = Duration::from_millis(100);
    remote.objects = Some(slow.clone());
    let all = items(6);
    let job = planned(&Objects::open(&remote).unwrap(), &all, 2);
    let hang = |time| {
        slow.config_mut(|config| {
            (config.wait_get_per_call, config.wait_put_per_call) = (time, time);
            config.wait_list_per_call = time;
        });
    };
    let began = Instant::now();
    let report = std::thread::scope(|scope| {
        let mut notes = Notes { pause: Duration::from_millis(100), ..Notes::default() };
        let stop = AtomicBool::new(false);
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
    let error = job.run(&mut Notes::default(), &options, &AtomicBool::new(false), |_| ()).unwrap_err();
    assert!(error.to_string().contains("memory:///job"), "{error}");
}
