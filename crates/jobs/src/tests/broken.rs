//! Objects that are not what they should be: bytes from outside, which may give an error and never a panic.

use super::*;
use crate::Error;
use crate::objects::JobObjects;

/// Beginnings and changes of a text, and things that are no object of a job.
fn damaged(whole: &[u8]) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> =
        ["", "{}", "[]", "null", "7", "{\"format\":1}", "\u{0}", "{\"a\":"].map(|text| text.into()).into();
    all.push(vec![0xff; 20]);
    all.push("[".repeat(100_000).into());
    for at in (0..whole.len()).step_by(whole.len() / 40 + 1) {
        all.push(whole[..at].to_vec());
        let mut changed = whole.to_vec();
        changed[at] ^= 0x55;
        all.push(changed);
    }
    all
}

#[test]
fn a_broken_manifest_is_an_error() {
    let objects = in_memory();
    let job = planned(&objects, &items(3), 2);
    let whole = objects.get("manifest.json", 1 << 20).unwrap().unwrap();
    for bytes in damaged(&whole) {
        objects.put("manifest.json", bytes.clone()).unwrap();
        match Job::open(objects.clone()) {
            Err(Error::Broken { name, .. }) => assert_eq!(name, "manifest.json"),
            Err(error) => panic!("{error}"),
            // A changed letter of a text is another job, whose shards are verified.
            Ok(other) => _ = other.run(&mut Notes::default(), &options(), &stop_flag(true), |_| ()),
        }
    }
    objects.put("manifest.json", serde_json::to_vec(&json!({ "format": 2 })).unwrap()).unwrap();
    let error = Job::open(objects.clone()).unwrap_err().to_string();
    assert!(error.contains("format 2") && error.contains("format 1"), "{error}");
    let mut manifest = job.manifest.clone();
    manifest.shards[1].hash = "../../etc/passwd".to_owned();
    objects.put("manifest.json", manifest.bytes().unwrap()).unwrap();
    assert!(Job::open(objects).unwrap_err().to_string().contains("shard 1 has no hash"));
}

#[test]
fn a_broken_shard_is_told_and_the_others_are_done() {
    let objects = in_memory();
    let all = items(6);
    let job = planned(&objects, &all, 2);
    let name = format!("shards/{}.jsonl", job.manifest.shards[1].hash);
    let whole = objects.get(&name, 1 << 20).unwrap().unwrap();
    let mut broken = damaged(&whole);
    broken.truncate(20);
    for bytes in broken {
        objects.put(&name, bytes).unwrap();
        let report = run(&job, &mut Notes::default());
        assert!(!report.complete && report.broken.len() == 1, "{report:?}");
        assert!(report.broken[&1].contains("not those that were planned"), "{report:?}");
    }
    objects.delete(&name).unwrap();
    let report = run(&job, &mut Notes::default());
    assert!(report.broken[&1].contains("missing"), "{report:?}");
    assert_eq!(in_results(&job), ["i000", "i001", "i004", "i005"]);
    assert!(names(&job, "claims").is_empty(), "a runner that can read it may have it");
    // Planning again brings the shard back.
    objects.put(&name, whole).unwrap();
    assert!(run(&job, &mut Notes::default()).complete);
    assert_eq!(in_results(&job), ids(&all));
}

#[test]
fn lines_that_are_no_items_break_a_shard() {
    let objects = JobObjects::new(in_memory(), Duration::ZERO);
    for line in [
        "{\"id\":\"a/b\",\"weight\":1,\"body\":\"Good\"}",
        "{\"id\":\"a\",\"weight\":-1,\"body\":\"Good\"}",
        "7",
    ] {
        let hash = blake3::hash(line.as_bytes()).to_hex().to_string();
        let shard = crate::Shard { hash, items: 1, weight: 1 };
        objects.put(&crate::item::name(&shard), line).unwrap();
        let error = crate::item::read::<Body>(&objects, &shard).unwrap_err();
        assert!(matches!(&error, Error::Broken { reason, .. } if reason.starts_with("line 1: ")), "{error}");
    }
}

#[test]
fn broken_claims_are_those_of_dead_runners() {
    let claim =
        serde_json::to_vec(&Claim { runner: "x".to_owned(), timeout: 1.0, ..Claim::default() }).unwrap();
    let mut all = damaged(&claim);
    all.truncate(30);
    all.push(vec![b' '; 1 << 20]);
    all.push(b"{\"runner\":\"x\",\"since\":0,\"timeout\":-1e300,\"renewed\":0,\"items\":99,\"weight\":9,\"rate\":1e999}".to_vec());
    let number = all.len();
    let job = planned(&in_memory(), &items(number), 1);
    for (shard, bytes) in all.into_iter().enumerate() {
        job.objects.put(&format!("claims/{shard:06}.4"), bytes).unwrap();
    }
    for name in ["x.1", "000001", "000002.x", "999999.1", "-1.1", "000003.4294967295", "000004.99999999999"] {
        job.objects.put(&format!("claims/{name}"), "{}").unwrap();
    }
    assert_eq!(job.status().unwrap().claimed.len(), number);
    let (stop, began) = (stop_flag(false), std::time::Instant::now());
    // A claim of the last number that there is has no successor: nobody wrote it in good order.
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_for("the others", || {
                job.status().unwrap().done == number - 1 || began.elapsed().as_secs() > 30
            });
            stop.store(true, Relaxed);
        });
        job.run(&mut Notes::default(), &options(), &stop, |_| ()).unwrap()
    });
    assert_eq!(report.shards, number - 1);
}

#[test]
fn broken_ends_and_entries_are_told() {
    let mut all = items(4);
    all[0].body = Body::Bad;
    let job = planned(&in_memory(), &all, 2);
    run(&job, &mut Notes::default());
    let (done, failed) = ("done/000001.json", "failed/i000.json");
    let whole = [done, failed].map(|name| job.objects.get(name, 1 << 20).unwrap().unwrap());
    for bytes in damaged(&whole[1]) {
        job.objects.put(failed, bytes).unwrap();
        let listed = job.failed().unwrap();
        assert!(listed.len() == 1 && listed[0].id == "i000", "{listed:?}");
    }
    job.objects.put(failed, vec![b' '; 1 << 20]).unwrap();
    assert_eq!(job.failed().unwrap()[0].reason, "its entry is broken");
    for bytes in damaged(&whole[0]) {
        job.objects.put(done, bytes).unwrap();
        match job.results() {
            Err(Error::Broken { name, .. }) => assert_eq!(name, done),
            other => assert_eq!(other.unwrap().len(), 2),
        }
        assert!(job.status().unwrap().is_complete());
    }
    let mut other: crate::Done = serde_json::from_slice(&whole[0]).unwrap();
    other.manifest = "0123456789abcdef".to_owned();
    job.objects.put(done, serde_json::to_vec(&other).unwrap()).unwrap();
    let error = job.results().unwrap_err().to_string();
    assert!(error.contains("000001") && error.contains("another manifest"), "{error}");
}
