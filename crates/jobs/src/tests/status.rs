//! What a job's objects say of it.

use super::*;
use crate::claim::{Held, Watch};

#[test]
fn the_status_counts_what_is_done_claimed_and_open() {
    let mut all = items(12);
    all[1].body = Body::Bad;
    let job = planned(&in_memory(), &all, 3);
    let status = job.status().unwrap();
    assert_eq!((status.shards, status.done, status.open, status.items), (4, 0, 4, 12));
    assert_eq!((status.rate, status.seconds_left, status.is_complete()), (0.0, None, false));
    let stop = stop_flag(false);
    job.run(&mut Notes::default(), &options(), &stop, |step| stop.store(step.done == 1, Relaxed)).unwrap();
    let timeout = Duration::from_secs(60);
    let held = Held::acquire(&job, 2, &[], &Watch::default(), ("someone", timeout)).unwrap().unwrap();
    held.progress(2, 20, 5.0);
    held.at(Some("i007")).unwrap();
    let dead =
        Claim { runner: "dead".to_owned(), since: 5, timeout: 0.0, rate: f64::MAX, ..Claim::default() };
    for name in ["claims/000003.1", "claims/000003.2"] {
        job.objects.put(name, serde_json::to_vec(&dead).unwrap()).unwrap();
    }
    std::thread::sleep(Duration::from_millis(1100));
    let status = job.status().unwrap();
    assert_eq!((status.done, status.open, status.claimed.len()), (1, 1, 2));
    assert_eq!((status.items_done, status.weight, status.weight_done), (5, 120, 50));
    assert_eq!((status.rate, status.seconds_left), (5.0, Some(14.0)), "the dead do nothing");
    let [live, dead] = status.claimed.as_slice() else { panic!("{status:?}") };
    assert!(live.alive && live.shard == 2 && live.runner == "someone" && live.deaths == 0, "{live:?}");
    assert!(live.seconds < 60 && live.renewed < 60 && live.item.as_deref() == Some("i007"), "{live:?}");
    assert!(!dead.alive && dead.deaths == 1 && dead.renewed >= 1 && dead.seconds > 1_000_000_000, "{dead:?}");
    assert_eq!(status.failed.len(), 1);
    assert_eq!(status.failed[0].reason, "it is bad");
    held.release(&[], false).unwrap();
    run(&job, &mut Notes::default());
    let status = job.status().unwrap();
    assert!(status.is_complete() && status.claimed.is_empty() && status.seconds_left.is_none());
    assert_eq!(status.items_done, 12);
}
