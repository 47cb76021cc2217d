//! Items that fail: listed, not fatal.

use super::*;
use crate::History;

#[test]
fn items_that_fail_are_tried_again_and_then_listed() {
    let mut all = items(6);
    (all[1].body, all[2].body, all[4].body) = (Body::Bad, Body::Flaky, Body::Panics);
    all[5].body = Body::PanicsEarly;
    let job = planned(&in_memory(), &all, 3);
    let mut notes = Notes::default();
    let report = run(&job, &mut notes);
    assert!(report.complete && report.shards == 2);
    let failed = job.failed().unwrap();
    let listed: Vec<_> = failed
        .iter()
        .map(|failed| (failed.id.as_str(), failed.name.as_str(), failed.shard, failed.reason.as_str()))
        .collect();
    let expected = [
        ("i001", "item i001", 0, "it is bad"),
        ("i004", "item i004", 1, "it panicked: of i004"),
        ("i005", "item i005", 1, "it panicked: before it began"),
    ];
    assert_eq!(listed, expected);
    let tried = ["i000", "i001", "i002", "i004"].map(|id| notes.tried[id]);
    assert_eq!(tried, [1, 3, 2, 3]);
    assert_eq!(in_results(&job), ["i000", "i002", "i003"]);
    let ends: Vec<_> = job.results().unwrap().iter().map(|(_, done)| (done.items, done.failed)).collect();
    assert_eq!(ends, [(2, 1), (1, 2)]);
}

/// The names of two ids' objects have another order than the ids.
#[test]
fn an_id_that_begins_another_is_found_among_those_that_failed() {
    let all = ["a", "a-b"].map(|id| Item { id: id.to_owned(), weight: 1, body: Body::Bad });
    let job = planned(&in_memory(), &all, 2);
    run(&job, &mut Notes::default());
    assert_eq!(job.failed_ids().unwrap(), ["a", "a-b"]);
}

/// The partial result of a failed item is lost with a runner that stops, so that the next runner tries the item once more.
#[test]
fn what_is_listed_is_tried_once_more_by_the_next_runner() {
    let mut all = items(4);
    (all[0].body, all[1].body) = (Body::Partial, Body::Flaky);
    let job = planned(&in_memory(), &all, 4);
    let stop = stop_flag(false);
    let once = RunOptions { tries: 1, ..options() };
    job.run(&mut Notes::default(), &once, &stop, |step| stop.store(step.weight == 30, Relaxed)).unwrap();
    assert_eq!(job.failed_ids().unwrap(), ["i000", "i001"]);
    let mut second = Notes { tried: [("i001".to_owned(), 1)].into(), ..Notes::default() };
    assert!(run(&job, &mut second).complete);
    assert_eq!(["i000", "i001", "i002"].map(|id| second.tried[id]), [1, 2, 1]);
    // One that is done now is listed no more.
    assert_eq!(in_results(&job), ids(&all));
    assert_eq!(job.failed_ids().unwrap(), ["i000"]);
    let [(_, done)] = &job.results().unwrap()[..] else { panic!("there is one shard") };
    assert_eq!((done.items, done.failed), (3, 1));
}

/// The claim of a runner that died while it was at an item.
fn dead(job: &Job, item: Option<&str>, history: History) {
    let claim = Claim { item: item.map(str::to_owned), history, ..Claim::default() };
    job.objects.put("claims/000000.7", serde_json::to_vec(&claim).unwrap()).unwrap();
}

#[test]
fn an_item_at_which_runners_die_is_given_up() {
    for (deaths, is_given_up) in [(2, false), (3, true)] {
        let job = planned(&in_memory(), &items(3), 3);
        // All but the first of them have named the item, the last one now.
        let at = [("i001".to_owned(), deaths - 1), ("i002".to_owned(), 1)].into();
        dead(&job, Some("i001"), History { kept: 0, deaths, at });
        let mut notes = Notes::default();
        assert!(run(&job, &mut notes).complete);
        assert_eq!(notes.tried.contains_key("i001"), !is_given_up);
        assert!(notes.tried.contains_key("i002"));
        let failed = job.failed().unwrap();
        assert_eq!(failed.len(), usize::from(is_given_up));
        if let Some(failed) = failed.first() {
            assert!(failed.id == "i001" && failed.reason.starts_with("3 runners ended"), "{failed:?}");
            // The next runner leaves it alone, though its claim knows of no death.
            for folder in ["done", "claims"] {
                let left = names(&job, folder);
                left.iter().for_each(|name| job.objects.delete(&format!("{folder}/{name}")).unwrap());
            }
            let mut next = Notes::default();
            assert!(run(&job, &mut next).complete);
            assert_eq!(next.tried.keys().collect::<Vec<_>>(), ["i000", "i002"]);
        }
    }
}

#[test]
fn what_a_dead_runner_has_kept_is_not_done_again() {
    let mut all = items(5);
    all[0].body = Body::Bad;
    let job = planned(&in_memory(), &all, 5);
    // It had given the first one up.
    let failed = json!({ "id": "i000", "name": "", "shard": 0, "reason": "it was bad" });
    job.objects.create("failed/i000.json", failed.to_string()).unwrap();
    dead(&job, None, History { kept: 2, ..History::default() });
    let mut notes = Notes { keeps: true, ..Notes::default() };
    assert!(run(&job, &mut notes).complete);
    assert_eq!(notes.tried.keys().collect::<Vec<_>>(), ["i002", "i003", "i004"]);
    let [(_, done)] = &job.results().unwrap()[..] else { panic!("there is one shard") };
    assert_eq!((done.items, done.failed, done.deaths), (4, 1, 1));
}

#[test]
fn a_shard_on_which_a_runner_died_is_given_back_at_once() {
    let job = planned(&in_memory(), &items(4), 4);
    let at: BTreeMap<String, u32> = [("i002".to_owned(), 1)].into();
    dead(&job, Some("i002"), History { kept: 1, ..History::default() });
    let claim = |generation: u32| -> Claim {
        let name = format!("claims/000000.{generation}");
        serde_json::from_slice(&job.objects.get(&name, 9999).unwrap().unwrap()).unwrap()
    };
    for generation in [8, 9] {
        let stop = stop_flag(false);
        let timeout = if generation == 8 { options().claim_timeout } else { MINUTE };
        let options = RunOptions { claim_timeout: timeout, ..options() };
        let begun = |step: crate::RunProgress| step.shard.is_some();
        job.run(&mut Notes::default(), &options, &stop, |step| stop.store(begun(step), Relaxed)).unwrap();
        let left = claim(generation);
        assert!(left.given_back && left.item.is_none(), "{left:?}");
        assert_eq!(left.history, History { kept: 1, deaths: 1, at: at.clone() });
        assert_eq!(names(&job, "claims"), ["000000.7".to_owned(), format!("000000.{generation}")]);
        let status = job.status().unwrap();
        assert_eq!((status.open, status.claimed.len()), (1, 0));
    }
    // A claim that was given back is taken up at once, and counts as no death.
    let options = RunOptions { claim_timeout: MINUTE, ..options() };
    let mut notes = Notes { keeps: true, ..Notes::default() };
    assert!(job.run(&mut notes, &options, &stop_flag(false), |_| ()).unwrap().complete);
    assert_eq!(notes.tried.keys().collect::<Vec<_>>(), ["i001", "i002", "i003"]);
    assert_eq!(job.results().unwrap()[0].1.deaths, 1);
    assert!(names(&job, "claims").is_empty());
}

#[test]
fn a_claim_hands_on_what_is_kept_and_who_died_since() {
    let job = planned(&in_memory(), &items(9), 9);
    let claim = || -> Claim {
        serde_json::from_slice(&job.objects.get("claims/000000.8", 9999).unwrap().unwrap()).unwrap()
    };
    let at = [("i001".to_owned(), 2)].into();
    dead(&job, Some("i001"), History { kept: 1, deaths: 2, at });
    let mut notes = Notes { keeps: true, pause: Duration::from_millis(30), ..Notes::default() };
    let options = RunOptions { tries: 9, claim_timeout: Duration::from_millis(100), ..options() };
    let stop = stop_flag(false);
    let mut first = None;
    let report = job.run(&mut notes, &options, &stop, |step| {
        if step.shard.is_some() && first.is_none() {
            first = Some(claim().history);
        }
        // Work was kept by now.
        if step.weight == 50 {
            let history = claim().history;
            assert!(history.kept > 1 && history.deaths == 0 && history.at.is_empty(), "{history:?}");
            stop.store(true, Relaxed);
        }
    });
    assert!(!report.unwrap().complete);
    assert_eq!(first.unwrap(), History { kept: 1, deaths: 3, at: [("i001".to_owned(), 3)].into() });
}
