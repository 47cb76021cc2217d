//! Planning, once and again.

use super::*;
use crate::Error;

fn plan(
    objects: &Objects,
    items: &[Item<Body>],
    size: ShardSize,
    compute: &str,
) -> crate::Result<crate::Planned> {
    let mut plan = Plan::new(objects.clone(), size)?;
    for item in items {
        plan.add("", item)?;
    }
    plan.finish("test", settings(compute))
}

const SIZE: ShardSize = ShardSize { items: 4, weight: 30 };

#[test]
fn shards_are_as_large_as_they_may_be_and_items_are_once_in_them() {
    let objects = in_memory();
    let mut all = items(7);
    all[5].weight = 99;
    let mut plan = Plan::new(objects.clone(), SIZE).unwrap();
    for item in &all {
        assert!(plan.add("", item).unwrap());
        assert!(!plan.add("", item).unwrap(), "it is known");
    }
    let job = plan.finish("test", settings("q8")).unwrap().job;
    let sizes: Vec<_> = job.manifest().shards.iter().map(|shard| (shard.items, shard.weight)).collect();
    assert_eq!(sizes, [(3, 30), (2, 20), (1, 99), (1, 10)]);
    assert_eq!((job.manifest().items(), job.manifest().weight()), (7, 159));
    let mut read = Vec::new();
    for shard in &job.manifest().shards {
        read.extend(crate::item::read::<Body>(&job.objects, shard).unwrap());
    }
    assert_eq!(read, all);
    assert_eq!(Job::open(objects).unwrap().manifest(), job.manifest());
}

#[test]
fn items_of_different_groups_share_no_shard() {
    let mut plan = Plan::new(in_memory(), ShardSize { items: 10, weight: u64::MAX }).unwrap();
    for (item, group) in items(5).iter().zip(["a", "a", "b", "b", "a"]) {
        plan.add(group, item).unwrap();
    }
    let shards = plan.finish("test", settings("q8")).unwrap().job.manifest.shards;
    assert_eq!(shards.iter().map(|shard| shard.items).collect::<Vec<_>>(), [2, 2, 1]);
}

#[test]
fn planning_again_changes_nothing_and_another_plan_is_refused() {
    let objects = in_memory();
    let first = plan(&objects, &items(9), SIZE, "q8").unwrap();
    let before = objects.list("", None).unwrap();
    let again = plan(&objects, &items(9), SIZE, "q8").unwrap();
    assert!(first.is_new && !again.is_new);
    assert_eq!((again.job.hash, again.job.manifest), (first.job.hash, first.job.manifest));
    let refused = |items: &[Item<Body>], size: ShardSize, compute: &str| {
        let error = plan(&objects, items, size, compute).unwrap_err();
        assert!(matches!(error, Error::OtherJob { .. }), "{error}");
        error.to_string()
    };
    let error = refused(&items(9), SIZE, "bf16");
    assert!(error.contains("with compute q8, not bf16;") && error.contains("--job"), "{error}");
    let error = refused(&items(8), SIZE, "q8");
    assert!(error.contains("9 items in 3 shards, not 8 items in 3 shards"), "{error}");
    let mut others = items(9);
    others[3].body = Body::Bad;
    assert!(refused(&others, SIZE, "q8").contains("other items"));
    assert!(refused(&[], SIZE, "q8").contains("not 0 items"));
    assert_eq!(objects.list("", None).unwrap(), before, "nothing was written");
}

#[test]
fn planners_at_once_make_one_job() {
    let objects = in_memory();
    let plans: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| plan(&objects, &items(40), SIZE, "q8").unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(plans.iter().all(|planned| planned.job.hash == plans[0].job.hash));
    assert_eq!(names(&plans[0].job, "shards").len(), 14);
}

#[test]
fn what_cannot_be_planned_says_why() {
    let objects = in_memory();
    assert!(matches!(plan(&objects, &[], SIZE, "q8"), Err(Error::Empty(_))));
    for id in ["", "a/b", "..", ".hidden", "a b", "ä", &"x".repeat(129)] {
        let mut plan = Plan::new(objects.clone(), SIZE).unwrap();
        let error = plan.add("", &Item { id: id.to_owned(), weight: 1, body: Body::Good }).unwrap_err();
        assert!(matches!(error, Error::Item(_)), "{id}: {error}");
    }
    assert!(matches!(Job::open(objects.clone()), Err(Error::NoJob(_))));
    // Without its manifest a job's results would be taken for those of the next one.
    objects.put("done/000000.json", b"{}".to_vec()).unwrap();
    let error = plan(&objects, &items(2), SIZE, "q8").unwrap_err().to_string();
    assert!(error.contains("done/"), "{error}");
}

#[test]
fn a_runner_with_other_settings_is_told_which() {
    let job = planned(&in_memory(), &items(2), 2);
    assert!(job.manifest().check_settings("test", &settings("q8")).is_ok());
    let mut other = settings("f32");
    other.insert("system".to_owned(), json!("Be brief."));
    other.insert("further".to_owned(), json!(1));
    let error = job.manifest().check_settings("eval", &other).unwrap_err().to_string();
    for part in
        ["kind test, not eval", "compute q8, not f32", "system none, not Be brief.", "further none, not 1"]
    {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(!error.contains("chunk"), "{error}");
}
