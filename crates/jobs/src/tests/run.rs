//! Runners: alone, several at once, stopped, dead, and two on one shard.

use super::*;
use crate::claim::{Held, Watch};

/// Claims a shard for another runner, who then does nothing but renew it.
fn claimed(job: &Job, shard: usize, timeout: Duration) -> Held {
    Held::acquire(job, shard, &[], &Watch::default(), ("other", timeout)).unwrap().unwrap()
}

#[test]
fn every_item_is_done_once_and_a_done_job_has_nothing_left() {
    let all = items(23);
    let job = planned(&in_memory(), &all, 5);
    let (mut notes, mut told) = (Notes::default(), Vec::new());
    notes.before = vec!["i004".to_owned()];
    let report = job.run(&mut notes, &options(), &stop_flag(false), |step| told.push(step)).unwrap();
    assert!(report.complete && report.broken.is_empty());
    assert_eq!((report.shards, report.tally.items, report.tally.weight), (5, 22, 220));
    assert_eq!(notes.done.len(), 22);
    assert!(notes.done.values().all(|times| *times == 1) && !notes.done.contains_key("i004"));
    assert_eq!(in_results(&job), ids(&all));
    assert!(names(&job, "claims").is_empty() && job.failed().unwrap().is_empty());
    assert!(told.iter().any(|step| step.shard == Some(1) && (step.weight, step.of) == (30, 50)), "{told:?}");
    let mut second = Notes::default();
    let report = run(&job, &mut second);
    assert!(report.complete && report.shards == 0 && second.tried.is_empty());
}

#[test]
fn runners_at_once_share_the_shards() {
    let all = items(60);
    let job = planned(&in_memory(), &all, 3);
    let reports: Vec<(RunReport, Notes)> = std::thread::scope(|scope| {
        let work = |index| {
            let job = &job;
            move || {
                let mut notes = Notes { pause: Duration::from_millis(2), ..Notes::default() };
                let options = RunOptions { index, claim_timeout: MINUTE, ..options() };
                let report = job.run(&mut notes, &options, &stop_flag(false), |_| ()).unwrap();
                (report, notes)
            }
        };
        let threads: Vec<_> = (0..4).map(|index| scope.spawn(work(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(in_results(&job), ids(&all));
    assert!(reports.iter().all(|(report, _)| report.complete && report.shards > 0), "{reports:?}");
    assert_eq!(reports.iter().map(|(report, _)| report.shards).sum::<usize>(), 20);
    let done: usize = reports.iter().flat_map(|(_, notes)| notes.done.values()).sum();
    assert_eq!(done, 60, "claims keep two from one shard");
}

#[test]
fn a_runner_that_is_stopped_gives_its_claim_back() {
    let job = planned(&in_memory(), &items(8), 4);
    let stop = stop_flag(false);
    let mut notes = Notes::default();
    let report =
        job.run(&mut notes, &options(), &stop, |step| stop.store(step.weight == 20, Relaxed)).unwrap();
    assert!(!report.complete && report.shards == 0 && report.tally.items == 2, "{report:?}");
    assert!(names(&job, "claims").is_empty() && names(&job, "done").is_empty());
    // Interrupted in the middle of an item it ends as well.
    let mut slow = Notes { pause: Duration::from_millis(20), ..Notes::default() };
    let stop = stop_flag(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            stop.store(true, Relaxed);
        });
        job.run(&mut slow, &options(), &stop, |_| ()).unwrap()
    });
    assert!(!report.complete && names(&job, "claims").is_empty());
    // Nothing has to be waited for.
    let options = RunOptions { claim_timeout: MINUTE, ..options() };
    assert!(job.run(&mut Notes::default(), &options, &stop_flag(false), |_| ()).unwrap().complete);
}

#[test]
fn a_dead_claim_is_taken_over_and_a_live_one_is_not() {
    let job = planned(&in_memory(), &items(4), 2);
    let dead = Claim { runner: "dead".to_owned(), timeout: 0.2, ..Claim::default() };
    job.objects.put("claims/000000.1", serde_json::to_vec(&dead).unwrap()).unwrap();
    let live = claimed(&job, 1, Duration::from_millis(400));
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(&job, &mut Notes::default()));
        wait_for("the dead one's shard", || job.is_done(0).unwrap());
        assert!(began.elapsed() >= options().claim_timeout, "it was given its time");
        // Three times its time: the renewals count.
        std::thread::sleep(Duration::from_millis(1200));
        assert!(!job.is_done(1).unwrap(), "the live one keeps its shard");
        live.release(&[], false).unwrap();
        let report = runner.join().unwrap();
        assert!(report.complete && report.shards == 2);
    });
    assert!(names(&job, "claims").is_empty());
}

#[test]
fn a_live_claim_outlasts_the_own_shard_of_another_runner() {
    let job = planned(&in_memory(), &items(2), 1);
    let live = claimed(&job, 1, Duration::from_millis(400));
    let stop = stop_flag(false);
    let mut notes = Notes { pause: Duration::from_millis(800), ..Notes::default() };
    // Nothing is left for it but to wait.
    let waits = |step: crate::RunProgress| step.shard.is_none();
    job.run(&mut notes, &options(), &stop, |step| stop.store(waits(step), Relaxed)).unwrap();
    assert_eq!(notes.done.into_keys().collect::<Vec<_>>(), ["i000"], "the other shard has its runner");
    assert!(!live.lost().load(Relaxed));
}

#[test]
fn a_claim_that_asks_for_more_time_gets_it() {
    let job = planned(&in_memory(), &items(1), 1);
    let patient = Claim { runner: "slow".to_owned(), timeout: 1.5, ..Claim::default() };
    job.objects.put("claims/000000.1", serde_json::to_vec(&patient).unwrap()).unwrap();
    let began = std::time::Instant::now();
    assert!(run(&job, &mut Notes::default()).complete);
    assert!(began.elapsed() >= Duration::from_millis(1500), "{:?}", began.elapsed());
}

#[test]
fn one_of_many_takes_a_dead_claim_over() {
    let job = planned(&in_memory(), &items(1), 1);
    job.objects.put("claims/000000.7", "{}").unwrap();
    let held: Vec<Held> = std::thread::scope(|scope| {
        let take = || {
            let (mut watch, look) = (Watch::default(), job.look().unwrap());
            watch.see(&look);
            std::thread::sleep(Duration::from_millis(60));
            let name = crate::run::runner_name("x").unwrap();
            Held::acquire(&job, 0, &look.claims[&0], &watch, (&name, Duration::from_millis(50))).unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(held.len(), 1);
    assert_eq!(names(&job, "claims"), ["000000.7", "000000.8"]);
}

#[test]
fn two_owners_of_a_shard_cost_time_only() {
    let all = items(6);
    let job = planned(&in_memory(), &all, 6);
    // The first owner sleeps through its time, as a machine that was suspended, and wakes when the second one is done.
    let (mut slow, stop) = (Notes::default(), stop_flag(false));
    let first = Held::acquire(&job, 0, &[], &Watch::default(), ("first", MINUTE)).unwrap().unwrap();
    let mut watch = Watch::default();
    watch.see(&job.look().unwrap());
    let seen = job.look().unwrap().claims[&0].clone();
    let earlier = Claim { runner: "first".to_owned(), ..Claim::default() };
    job.objects.put("claims/000000.1", serde_json::to_vec(&earlier).unwrap()).unwrap();
    watch.see(&job.look().unwrap());
    let second = Held::acquire(&job, 0, &seen, &watch, ("second", Duration::ZERO)).unwrap().unwrap();
    let mut quick = Notes::default();
    let (mut tally, mut progress) = (crate::Tally::default(), crate::RunProgress::default());
    for (held, runner, notes) in [(&second, "second", &mut quick), (&first, "first", &mut slow)] {
        let mut run = crate::shard_run::ShardRun {
            job: &job,
            shard: 0,
            runner,
            tries: 3,
            held,
            control: Control { stop: &stop, lost: &stop_flag(false) },
            tally: &mut tally,
            progress: &mut progress,
            tell: &mut |_| (),
        };
        assert!(matches!(run.run(notes).unwrap(), crate::shard_run::Ended::Done));
    }
    assert_eq!((quick.done.len(), slow.done.len()), (6, 6), "both did it");
    let results = job.results().unwrap();
    assert_eq!((results.len(), results[0].1.runner.as_str()), (1, "second"), "the first to end counts");
    assert_eq!(in_results(&job), ids(&all));
}

#[test]
fn a_runner_whose_shard_another_has_leaves_it() {
    let job = planned(&in_memory(), &items(40), 40);
    let (mut slow, stop) = (Notes { pause: Duration::from_millis(20), ..Notes::default() }, stop_flag(false));
    let report = std::thread::scope(|scope| {
        let runner = scope.spawn(|| {
            let options = RunOptions { claim_timeout: Duration::from_millis(500), ..options() };
            job.run(&mut slow, &options, &stop, |_| ()).unwrap()
        });
        wait_for("the first claim", || names(&job, "claims") == ["000000.1"]);
        job.objects.put("claims/000000.2", "{}").unwrap();
        wait_for("its end", || names(&job, "claims") == ["000000.2"]);
        stop.store(true, Relaxed);
        runner.join().unwrap()
    });
    assert!(!report.complete && report.shards == 0 && slow.done.len() < 40, "{report:?}");
}

#[test]
fn a_machine_at_fault_ends_its_runner_and_not_the_item() {
    for (body, reason) in [(Body::Machine, "the disk is full"), (Body::Breaks, "the GPU has failed")] {
        let mut all = items(3);
        all[1].body = body;
        let job = planned(&in_memory(), &all, 3);
        let options = RunOptions { tries: 1, ..options() };
        let error = job.run(&mut Notes::default(), &options, &stop_flag(false), |_| ()).unwrap_err();
        assert_eq!(error.to_string(), reason);
        assert!(names(&job, "claims").is_empty() && job.failed().unwrap().is_empty());
    }
}
