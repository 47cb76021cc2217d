//! Runners that are killed at any moment, as processes of their own over a folder that they share.
//!
//! A child is this test program itself, run with [`FOLDER`] set.

use std::env;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::*;

const FOLDER: &str = "REFRAIN_JOB_FOLDER";
const INDEX: &str = "REFRAIN_JOB_INDEX";

fn objects(folder: &Path) -> Objects {
    Objects::open(&RemoteOptions::new(format!("file://{}", folder.display()))).unwrap()
}

#[test]
#[ignore = "run by the tests of crashes, as a process of its own"]
fn child() {
    let Ok(folder) = env::var(FOLDER) else { return };
    let job = Job::open(objects(Path::new(&folder))).unwrap();
    // A runner that lives shorter than a dead claim's time can take nothing over.
    let claim_timeout = Duration::from_millis(150);
    let options = RunOptions { index: env::var(INDEX).unwrap().parse().unwrap(), claim_timeout, ..options() };
    let mut notes = Notes { pause: Duration::from_millis(10), ..Notes::default() };
    let report = job.run(&mut notes, &options, &stop_flag(false), |_| ()).unwrap();
    assert!(report.complete);
}

fn start(folder: &Path, index: usize) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "tests::crash::child", "--ignored", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .env(INDEX, index.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Lets runners work until one says that the job is complete, and starts each that ends otherwise again. Kills one of them every
/// `kill_every`.
fn run_all(folder: &Path, runners: usize, kill_every: Option<Duration>) -> (usize, usize) {
    let mut children: Vec<Child> = (0..runners).map(|index| start(folder, index)).collect();
    let (mut killed, mut died, began, mut last) = (0, 0, Instant::now(), Instant::now());
    loop {
        assert!(began.elapsed() < Duration::from_secs(120), "the job never ends");
        std::thread::sleep(Duration::from_millis(5));
        if kill_every.is_some_and(|every| last.elapsed() >= every) {
            children[killed % runners].kill().unwrap();
            (killed, last) = (killed + 1, Instant::now());
        }
        for (index, child) in children.iter_mut().enumerate() {
            match child.try_wait().unwrap() {
                None => {}
                Some(status) if status.success() => {
                    for child in &mut children {
                        let _ = child.kill();
                        child.wait().unwrap();
                    }
                    return (killed, died - killed.min(died));
                }
                Some(_) => {
                    died += 1;
                    *child = start(folder, index);
                }
            }
        }
    }
}

#[test]
fn killed_runners_end_the_job_with_every_item_once() {
    let folder = tempfile::tempdir().unwrap();
    let all = items(400);
    let job = planned(&objects(folder.path()), &all, 20);
    let (killed, _) = run_all(folder.path(), 4, Some(Duration::from_millis(200)));
    assert!(killed >= 4, "{killed} were killed");
    assert_eq!(job.results().unwrap().len(), 20);
    assert_eq!(in_results(&job), ids(&all));
    assert_eq!(job.failed().unwrap(), []);
}

#[test]
fn an_item_that_kills_its_runners_is_listed_and_the_others_are_done() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = items(9);
    all[4].body = Body::Kills;
    let job = planned(&objects(folder.path()), &all, 3);
    let (_, died) = run_all(folder.path(), 1, None);
    assert_eq!(died, 4, "once unnamed, and three times named");
    let failed = job.failed().unwrap();
    assert_eq!(failed.iter().map(|failed| failed.id.as_str()).collect::<Vec<_>>(), ["i004"]);
    let good: Vec<String> = ids(&all).into_iter().filter(|id| id != "i004").collect();
    assert_eq!(in_results(&job), good);
}
