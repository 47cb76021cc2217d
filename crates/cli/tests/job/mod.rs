//! `refrain job`, through the program, on a tiny model: one runner, several that are killed, and answers of benchmarks.

mod eval;
mod fleet;
mod killed;
#[path = "../../../../tests/common/moto.rs"]
mod moto;
mod prune;

use std::collections::BTreeSet;
use std::process::Child;
use std::time::{Duration, Instant};

use super::*;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");

/// A text of several chunks.
const CHAINS: [&str; 4] = [
    "# Wax\n\nA chain is waxed in a pot that holds two hundred grams, and hangs until it is dry to the touch.\n\n",
    "# Oil\n\nOil is put on each link by itself, from the inside, and what is too much is wiped off after an hour.\n\n",
    "# Wear\n\nA chain that is longer by half a percent takes the sprockets with it when it is left on for longer.\n\n",
    "# Dust\n\nDust and oil make a paste that grinds; where it is dusty, wax is the better of the two by far.\n\n",
];

/// The URL of a folder of a home.
fn url(home: &Home, name: &str) -> String {
    format!("file://{}", home.path(name).display())
}

/// Writes a file of documents of three sentences, and gives its path.
fn passages(home: &Home, number: usize) -> String {
    documents(home, number, 3)
}

/// Writes a file of documents of so many sentences, and gives its path.
fn documents(home: &Home, number: usize, sentences: usize) -> String {
    let text = |n: usize| format!("Bearing {n} runs {n}00 km before it is greased. ").repeat(sentences);
    let line = |n: usize| format!("{}\n", json!({ "title": format!("Bearing {n}"), "text": text(n) }));
    let lines: String = (0..number).map(line).collect();
    home.write("passages.jsonl", lines).to_str().unwrap().to_owned()
}

const SETTINGS: [&str; 8] =
    ["--model", TINY, "--chunk-tokens", "32", "--prefix", "none", "--method", "drift"];

/// Plans the ingest of a file in shards of so many documents.
fn plan(home: &Home, file: &str, shard_documents: &str, more: &[&str]) -> Value {
    let (job, remote) = (url(home, "job"), url(home, "library"));
    let to = ["--job", &job, "--remote", &remote, "--shard-documents", shard_documents];
    home.json(&[&["job", "plan", "ingest", file], &SETTINGS[..], &to, more].concat())
}

/// The names of files below a folder that end so.
fn names(folder: &Path, end: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&next) else { continue };
        for entry in entries.map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if entry.to_str().unwrap().ends_with(end) {
                found.insert(entry.strip_prefix(folder).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found
}

/// The chunks of one ingest of the same file, without a job.
fn chunks_of_one_ingest(file: &str) -> BTreeSet<String> {
    let home = Home::new();
    let remote = url(&home, "library");
    home.run(&[&["ingest", file, "--remote", &remote], &SETTINGS[..]].concat()).good();
    names(&home.path("library"), ".safetensors")
}

#[test]
fn an_ingest_is_planned_run_shown_and_found() {
    let home = Home::new();
    let file = passages(&home, 10);
    let job = url(&home, "job");
    let planned = plan(&home, &file, "3", &[]);
    assert_eq!(
        (&planned["new"], &planned["shards"], &planned["items"]),
        (&json!(true), &json!(4), &json!(10))
    );
    assert!(planned["weight"].as_u64().unwrap() > 100, "{planned}");
    assert_eq!(plan(&home, &file, "3", &[])["new"], false);
    let before = home.json(&["job", "status", "--job", &job]);
    assert_eq!(
        (&before["complete"], &before["open"], &before["failed"]),
        (&json!(false), &json!(4), &json!([]))
    );
    let shown = home.run(&["job", "status", "--job", &job]).good().out;
    assert!(shown.contains("ingest: 0 of 4 shards done, 0 claimed, 4 open"), "{shown}");
    assert!(shown.contains("0 of 10 documents, 0 % of all tokens"), "{shown}");

    // A runner is told nothing but where the job is.
    let ran = home.run(&["job", "run", "--job", &job]).good();
    assert!(
        ran.out.starts_with("done: 10 documents in 4 shards; this runner did 10 documents of 4 shards"),
        "{}",
        ran.out
    );
    assert!(ran.err.contains("4 of 4 shards done"), "{}", ran.err);
    assert_eq!(names(&home.path("library"), ".safetensors"), chunks_of_one_ingest(&file));
    let shown = home.run(&["job", "status", "--watch", "--job", &job]).good().out;
    assert!(shown.contains("4 of 4 shards done, 0 claimed, 0 open\n10 of 10 documents, 100 %"), "{shown}");
    // Another machine finds the documents.
    let other = Home::new();
    let remote = url(&home, "library");
    let listed = other.json(&["documents", "ls", "--remote", &remote]);
    assert_eq!(listed["documents"].as_array().unwrap().len(), 10);

    let again = home.json(&["job", "run", "--job", &job]);
    assert_eq!((&again["complete"], &again["shards"], &again["items"]), (&json!(true), &json!(0), &json!(0)));
    assert!(names(&home.path("job/claims"), "").is_empty());
}

#[test]
fn what_does_not_fit_a_job_is_told() {
    let home = Home::new();
    let (file, job, remote) = (passages(&home, 4), url(&home, "job"), url(&home, "library"));
    home.run(&["job", "run", "--job", &job]).failed(1, &["there is no job at", "refrain job plan"]);
    home.run(&["job", "status"]).failed(2, &["--job"]);
    home.run(&["job", "status", "--job", "/jobs/docs"])
        .failed(1, &["/jobs/docs is no URL of an object store", "a folder is file:///FOLDER"]);
    let ingest = |more: &[&str]| home.run(&[&["job", "plan", "ingest", &file, "--job", &job], more].concat());
    ingest(&["--model", TINY]).failed(2, &["object store", "--remote"]);
    ingest(&["--model", "nothing.gguf", "--remote", &remote]).failed(1, &["nothing.gguf"]);
    plan(&home, &file, "3", &[]);
    let other = [&SETTINGS[..], &["--remote", &remote, "--shard-documents", "2", "--kv", "f32"]].concat();
    ingest(&other).failed(1, &["kv f16, not f32", "other items", "--job"]);
    let run = |more: &[&str]| home.run(&[&["job", "run", "--job", &job], more].concat());
    run(&["--chunk-tokens", "99", "--compute", "f32"])
        .failed(4, &["chunk tokens 32, not 99", "compute auto, not f32"]);
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/phi3");
    run(&["--model", model]).failed(4, &["fingerprint"]);
    run(&["--strict-numerics", "--ubatch-size", "16"])
        .failed(4, &["strict numerics false, not true", "ubatch size 2048, not 16"]);
    run(&["--credential", "secret"]).failed(4, &["namespace none, not"]);
    run(&["--claim-timeout", "25h"]).failed(2, &["1s to 24h"]);
    home.run(&["job", "results", "--job", &job, "--out", "x"])
        .failed(1, &[&format!("{job} is a job of ingest and has no answers")]);
    let manifest = home.path("job/manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("\"version\": \"", "\"version\": \"9.")).unwrap();
    run(&[]).failed(4, &["version 9."]);
    std::fs::write(&manifest, &text[..100]).unwrap();
    run(&[]).failed(4, &["manifest.json of the job is broken"]);
}

#[test]
fn a_shard_that_is_gone_ends_runners_for_good() {
    let home = Home::new();
    let file = passages(&home, 2);
    plan(&home, &file, "1", &[]);
    let shards = home.path("job/shards");
    let gone = names(&shards, ".jsonl").into_iter().next().unwrap();
    std::fs::remove_file(shards.join(gone)).unwrap();
    home.run(&["job", "run", "--job", &url(&home, "job")])
        .failed(4, &["1 shard cannot be read", "another --job"]);
    // JSON is one value, which has the error as well.
    let ran = home.run(&["job", "run", "--job", &url(&home, "job"), "--json"]);
    let ran = ran.failed(4, &["error: 1 shard cannot be read", "another --job"]);
    let told: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert!(told["broken"].as_object().unwrap().len() == 1 && told["hint"].is_string(), "{told}");
    assert!(told["error"].as_str().unwrap().contains("1 shard cannot be read"), "{told}");
    assert_eq!(names(&home.path("job/done"), "").len(), 1, "the other one is done");
}

#[test]
fn files_that_cannot_be_planned_are_told_by_the_exit_status() {
    let home = Home::new();
    home.write("docs/good.txt", "A chain is waxed in a pot.");
    home.write("docs/bad.pdf", "%PDF-1.7 and nothing else");
    let (docs, job, remote) = (home.path("docs"), url(&home, "job"), url(&home, "library"));
    let words =
        ["job", "plan", "ingest", docs.to_str().unwrap(), "--job", &job, "--remote", &remote, "--json"];
    for is_new in [true, false] {
        let ran = home.run(&[&words, &SETTINGS[..]].concat());
        assert_eq!(ran.code, 3, "{}{}", ran.out, ran.err);
        let planned: Value = serde_json::from_str(&ran.out).unwrap();
        assert_eq!((&planned["new"], &planned["items"]), (&json!(is_new), &json!(1)));
        let failed = planned["failures"][0]["path"].as_str().unwrap();
        assert!(failed.ends_with("bad.pdf"), "{planned}");
    }
    home.run(&["job", "run", "--job", &job]).good();
}

#[test]
fn runners_tell_numerics_apart_where_the_plan_does() {
    let home = Home::new();
    let (file, job) = (passages(&home, 2), url(&home, "job"));
    plan(&home, &file, "3", &["--strict-numerics"]);
    home.run(&["job", "run", "--job", &job]).good();
    let chunks = names(&home.path("library"), ".safetensors");
    assert!(!chunks.is_empty() && chunks.is_disjoint(&chunks_of_one_ingest(&file)), "{chunks:?}");
}

#[test]
fn a_key_of_namespaces_without_a_credential_is_told() {
    let home = Home::new();
    let (file, job, remote) = (passages(&home, 1), url(&home, "job"), url(&home, "library"));
    let told = "a key of namespaces does nothing without --credential";
    let with_key = |words: &[&str]| {
        Ran::of(home.command(words).env("REFRAIN_NAMESPACE_KEY", "ab".repeat(32)).output().unwrap())
            .good()
            .err
    };
    let planned = ["job", "plan", "ingest", &file, "--job", &job, "--remote", &remote];
    for words in [&[&planned, &SETTINGS[..]].concat()[..], &["job", "run", "--job", &job]] {
        let said = with_key(words);
        assert!(said.contains(told), "{words:?}: {said}");
    }
}

#[test]
fn a_document_that_fails_is_listed_and_told_by_the_exit_status() {
    let home = Home::new();
    let file = passages(&home, 2);
    let large = home.write("docs/large.txt", "x".repeat((16 << 20) + 1));
    plan(&home, &file, "3", &[large.to_str().unwrap()]);
    let job = url(&home, "job");
    let ran = home.run(&["job", "run", "--job", &job]);
    assert_eq!(ran.code, 3, "{}{}", ran.out, ran.err);
    assert!(
        ran.out.contains("1 document failed:\n  doc-")
            && ran.out.contains("large: a document that machines share may have"),
        "{}",
        ran.out
    );
    assert!(ran.out.starts_with("done: 2 of 3 documents, 1 failed in "), "{}", ran.out);
    let shown = home.run(&["job", "status", "--job", &job]).good().out;
    assert!(shown.contains("2 of 3 documents, 1 failed, 100 % of all tokens"), "{shown}");
    let status = home.json(&["job", "status", "--job", &job]);
    assert_eq!((&status["complete"], &status["failed"][0]["name"]), (&json!(true), &json!("large")));
    let again = home.run(&["job", "run", "--job", &job, "--json"]);
    assert_eq!((again.code, again.out.lines().count()), (3, 1));
}

#[cfg(unix)]
#[test]
fn a_runner_that_is_stopped_gives_its_shard_back() {
    let home = Home::new();
    let file = passages(&home, 600);
    plan(&home, &file, "600", &[]);
    let job = url(&home, "job");
    let mut child = home.command(&["job", "run", "--job", &job]).spawn().unwrap();
    wait_for(&mut child, || names(&home.path("job/claims"), "").len() == 1);
    let killed = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(names(&home.path("job/claims"), "").is_empty() && names(&home.path("job/done"), "").is_empty());
    let shown = home.run(&["job", "status", "--job", &job]).good().out;
    assert!(shown.contains("0 of 1 shard done, 0 claimed, 1 open"), "{shown}");
}

/// Waits for something that a program does, two minutes at most.
fn wait_for(child: &mut Child, mut is_there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_there() {
        assert!(child.try_wait().unwrap().is_none(), "it ended");
        assert!(began.elapsed() < Duration::from_secs(120), "it never came");
        std::thread::sleep(Duration::from_millis(10));
    }
}
