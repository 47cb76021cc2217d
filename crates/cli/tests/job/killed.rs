//! Runners that are killed again and again until the job is done.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::fleet::{Fleet, Killed, S3};
use super::*;

const RUNNERS: usize = 4;

/// An ingest under runners that are killed.
struct Ingest {
    documents: usize,
    shard_documents: &'static str,
    /// Of each document.
    sentences: usize,
    /// Documents with more text than can be shared, each a shard of its own.
    poison: usize,
    /// How long a runner lives.
    life: Duration,
    /// The longest time that the job may take.
    longest: Duration,
}

impl Ingest {
    fn small(shard_documents: &'static str) -> Ingest {
        let (life, longest) = (Duration::from_millis(3600), Duration::from_secs(240));
        Ingest { documents: 60, shard_documents, sentences: 3, poison: 0, life, longest }
    }

    /// Runs it, asserts that it leaves what one undisturbed ingest leaves, each document once and the others listed, and gives how
    /// it went, with the number of chunks.
    fn check(&self, fleet: &Fleet, remote: &str, chunks: impl Fn() -> BTreeSet<String>) -> (Killed, usize) {
        let home = Home::new();
        let file = documents(&home, self.documents, self.sentences);
        for n in 0..self.poison {
            home.write(&format!("poison/{n}.txt"), format!("{n} ").repeat(9 << 20));
        }
        let mut words = vec!["job", "plan", "ingest", &file, "--job", &fleet.job, "--remote", remote];
        let poison = home.path("poison");
        if self.poison > 0 {
            words.push(poison.to_str().unwrap());
        }
        words.extend(["--shard-documents", self.shard_documents]);
        let planned = fleet.json(&[&words, &SETTINGS[..]].concat());
        assert_eq!(planned["items"], self.documents + self.poison);
        let killed = fleet.run_and_kill(self.life, self.longest);
        assert!(killed.kills > 0, "none was killed");
        assert_eq!(killed.status, if self.poison > 0 { 3 } else { 0 });

        let status = fleet.json(&["job", "status", "--job", &fleet.job]);
        let kills = killed.kills;
        assert_eq!(status["complete"], true, "{kills} were killed");
        let failed = status["failed"].as_array().unwrap();
        let names: BTreeSet<String> =
            failed.iter().map(|failed| failed["name"].as_str().unwrap().to_owned()).collect();
        let poison: BTreeSet<String> = (0..self.poison).map(|n| n.to_string()).collect();
        assert_eq!((&names, failed.len()), (&poison, self.poison), "{kills} were killed: {failed:?}");
        let found = chunks();
        assert_eq!(found, chunks_of_one_ingest(&file), "{kills} were killed");

        let listed = fleet.json(&["documents", "ls", "--remote", remote]);
        let listed = listed["documents"].as_array().unwrap();
        assert_eq!(listed.len(), self.documents, "each once");
        let titles: BTreeSet<&str> =
            listed.iter().map(|document| document["title"].as_str().unwrap()).collect();
        let all: Vec<String> = (0..self.documents).map(|n| format!("Bearing {n}")).collect();
        assert_eq!(titles, all.iter().map(String::as_str).collect());
        (killed, found.len())
    }
}

#[test]
fn killed_runners_leave_every_document_once_in_a_folder() {
    let home = Home::new();
    let fleet = Fleet::new(RUNNERS, url(&home, "job"), Vec::new());
    let chunks = || names(&home.path("library"), ".safetensors");
    Ingest::small("3").check(&fleet, &url(&home, "library"), chunks);
}

#[test]
fn killed_runners_leave_every_document_once_in_s3() {
    let Some(s3) = S3::start() else { return };
    let fleet = Fleet::new(RUNNERS, "s3://bucket/jobs/one".to_owned(), s3.environment());
    Ingest::small("3").check(&fleet, "s3://bucket/library", || s3.names("library", ".safetensors"));
    assert_eq!(deaths(&s3).len(), 20);
}

/// Says that files were written a day ago.
fn make_old(folder: &Path, names: &BTreeSet<String>) {
    let day = Duration::from_secs(24 * 3600);
    for name in names {
        let file = std::fs::File::options().append(true).open(folder.join(name)).unwrap();
        file.set_modified(std::time::SystemTime::now() - day).unwrap();
    }
}

#[test]
fn old_garbage_goes_and_nothing_else_while_runners_die() {
    let home = Home::new();
    let (library, remote) = (home.path("library"), url(&home, "library"));
    // Chunks without documents.
    let other = home.write("other.txt", CHAINS.concat());
    let words = ["ingest", other.to_str().unwrap(), "--remote", &remote, "--sync-interval", "off"];
    home.run(&[&words, &SETTINGS[..]].concat()).good();
    let garbage = names(&library, ".safetensors");
    assert!(garbage.len() > 2);
    make_old(&library, &garbage);
    let prune = || {
        home.run(&[
            "store", "prune", "--remote", &remote, "--unused", "1h", "--grace", "1s", "--delete", "--json",
        ])
    };
    prune().failed(1, &["holds no document"]);

    let fleet = Fleet::new(RUNNERS, url(&home, "job"), Vec::new());
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let collector = scope.spawn(|| {
            let mut deleted = 0;
            // There is no document at first.
            while !ends.load(Relaxed) || deleted < garbage.len() {
                let ran = prune();
                if ran.code == 0 {
                    let report: Value = serde_json::from_str(&ran.out).unwrap();
                    deleted += report["deleted"].as_u64().unwrap() as usize;
                }
            }
            deleted
        });
        let deleted = || {
            ends.store(true, Relaxed);
            while !collector.is_finished() {
                std::thread::sleep(Duration::from_millis(20));
            }
            names(&library, ".safetensors")
        };
        Ingest::small("3").check(&fleet, &remote, deleted);
        assert_eq!(collector.join().unwrap(), garbage.len());
    });
}

/// Of each shard, how many runners died on it.
fn deaths(s3: &S3) -> Vec<u64> {
    let done = s3.names("jobs/one/done", ".json");
    done.iter().map(|name| s3.json(&format!("jobs/one/done/{name}"))["deaths"].as_u64().unwrap()).collect()
}

#[test]
#[ignore = "it takes minutes: make job-test"]
fn two_thousand_documents_by_killed_runners_in_s3() {
    let s3 = S3::start().expect("the test needs moto");
    let fleet = Fleet::new(RUNNERS, "s3://bucket/jobs/one".to_owned(), s3.environment());
    let (life, longest) = (Duration::from_secs(3), Duration::from_secs(540));
    let ingest = Ingest { documents: 1998, shard_documents: "111", sentences: 1, poison: 2, life, longest };
    let (killed, chunks) =
        ingest.check(&fleet, "s3://bucket/library", || s3.names("library", ".safetensors"));

    let deaths = deaths(&s3);
    assert_eq!(deaths.len(), 20);
    // What a machine has in its own folder it has prefilled or fetched.
    let stored: usize = fleet.homes.iter().map(|home| names(&home.path("data"), ".safetensors").len()).sum();
    let fetched = s3.chunk_requests("GET", 200);
    let [sent, refused] = [200, 412].map(|status| s3.chunk_requests("PUT", status));
    println!(
        "{} documents in 20 shards, {RUNNERS} runners, each killed every {life:?}: {:.0} s, {} kills, {} takeovers of {} shards; \
         {chunks} chunks, {} prefills more than that; {sent} chunks sent, {refused} found there, {fetched} fetched",
        ingest.documents + ingest.poison,
        killed.seconds,
        killed.kills,
        deaths.iter().sum::<u64>(),
        deaths.iter().filter(|deaths| **deaths > 0).count(),
        stored as i64 - fetched as i64 - chunks as i64,
    );
}
