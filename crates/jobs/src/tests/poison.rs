//! Items that fail: listed, not fatal.

use super::*;

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

#[test]
fn what_is_listed_is_not_tried_again() {
    let mut all = items(3);
    all[0].body = Body::Bad;
    let job = planned(&in_memory(), &all, 3);
    let stop = AtomicBool::new(false);
    job.run(&mut Notes::default(), &options(), &stop, |step| stop.store(step.weight == 20, Relaxed)).unwrap();
    let mut second = Notes::default();
    assert!(run(&job, &mut second).complete);
    assert!(!second.tried.contains_key("i000") && second.done.contains_key("i001"));
    assert_eq!(in_results(&job), ["i001", "i002"]);
}

/// A claim of a runner that died while it was at an item.
fn dead(job: &Job, generation: u32, item: Option<&str>) {
    let claim = Claim { item: item.map(str::to_owned), ..Claim::default() };
    let name = format!("claims/000000.{generation}");
    job.objects.put(&name, serde_json::to_vec(&claim).unwrap()).unwrap();
}

#[test]
fn an_item_at_which_runners_die_is_given_up() {
    for (deaths, is_given_up) in [(2, false), (3, true)] {
        let job = planned(&in_memory(), &items(3), 3);
        // The first runner on a shard names no item.
        dead(&job, 1, None);
        (0..deaths).for_each(|death| dead(&job, 2 + death, Some("i001")));
        dead(&job, 9, Some("i002"));
        let mut notes = Notes::default();
        assert!(run(&job, &mut notes).complete);
        assert_eq!(notes.tried.contains_key("i001"), !is_given_up);
        assert!(notes.tried.contains_key("i002"));
        let failed = job.failed().unwrap();
        assert_eq!(failed.len(), usize::from(is_given_up));
        if let Some(failed) = failed.first() {
            assert!(failed.id == "i001" && failed.reason.starts_with("3 runners ended"), "{failed:?}");
        }
    }
}
