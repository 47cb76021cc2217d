//! Evaluation as a job.

use super::*;

/// The answers and scores of a run's folder, by what was asked.
fn answers(folder: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(folder.join("results.jsonl")).unwrap();
    let part = |line: &str| {
        let record: Value = serde_json::from_str(line).unwrap();
        let names =
            ["benchmark", "task", "length", "sample", "method", "policy", "answer", "scores", "error"];
        json!(names.map(|name| record[name].clone())).to_string()
    };
    let found: BTreeSet<String> = text.lines().map(part).collect();
    assert_eq!(found.len(), text.lines().count(), "each once");
    found
}

#[test]
fn an_evaluation_in_shards_has_the_answers_of_one_run() {
    let home = Home::new();
    let line = |i: usize| {
        format!(
            "{{\"_id\": \"q{i}\", \"question\": \"Where is bolt {i}?\", \"answers\": [\"box {i}\"], \"docs\": \
             [{{\"title\": \"A\", \"text\": \"Bolt {i} is in box {i}.\"}}, {{\"title\": \"\", \"text\": \"Chains hang.\"}}]}}\n"
        )
    };
    home.write("data/rag/bolts.jsonl", (0..5).map(line).collect::<String>());
    let matrix = home.write(
        "small.toml",
        format!(
            "models = ['{TINY}']\ndata = 'data'\nmax_tokens = 6\nmethods = ['pie', 'a3:ratio=0.5']\n\
             [[tasks]]\nname = 'rag/bolts'\n[[tasks]]\nname = 'needle'\nlengths = [380]\ndepths = 2\n"
        ),
    );
    let (matrix, job, one, many) =
        (matrix.to_str().unwrap(), url(&home, "job"), home.path("one"), home.path("many"));
    let (one, many) = (one.to_str().unwrap(), many.to_str().unwrap());
    home.json(&["eval", "run", matrix, "--out", one, "--chunk-tokens", "64"]);
    let plan = |more: &[&str]| {
        let words =
            ["job", "plan", "eval", matrix, "--job", &job, "--chunk-tokens", "64", "--shard-samples", "2"];
        home.run(&[&words, more].concat())
    };
    let said = plan(&["--shard-methods", "2"]).good().out;
    assert!(said.contains("planned: 14 samples with 21 answers in 8 shards"), "{said}");
    assert!(plan(&["--shard-methods", "2"]).good().out.contains("was planned before"));
    plan(&["--seed", "7"]).failed(1, &["matrix"]);
    home.run(&["job", "results", "--job", &job, "--out", many]).failed(1, &["no shard has an answer yet"]);
    // Runners have no data.
    std::fs::remove_dir_all(home.path("data")).unwrap();
    let ran = home.run(&["job", "run", "--job", &job]).good().out;
    assert!(ran.contains("done: 14 samples in 8 shards"), "{ran}");
    let results = home.json(&["job", "results", "--job", &job, "--out", many]);
    assert_eq!(
        (&results["answers"], &results["done"], &results["shards"]),
        (&json!(21), &json!(8), &json!(8))
    );
    assert_eq!(answers(Path::new(many)), answers(Path::new(one)));
    home.run(&["job", "results", "--job", &job, "--out", many]).good();
    assert_eq!(answers(Path::new(many)).len(), 21, "none twice");
    let report = home.run(&["eval", "report", many]).good().out;
    assert_eq!(report.lines().count(), 4);
    let html = std::fs::read_to_string(home.path("many/report.html")).unwrap();
    assert!(html.contains("5 samples") && html.contains("A3"));
    // An end of a job with another manifest.
    let done = home.path("job/done/000003.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&done).unwrap()).unwrap();
    value["manifest"] = json!("0123456789abcdef");
    std::fs::write(&done, value.to_string()).unwrap();
    home.run(&["job", "results", "--job", &job, "--out", many]).failed(1, &["000003", "another manifest"]);
}

#[test]
fn another_model_under_the_same_name_is_refused() {
    let home = Home::new();
    let job = url(&home, "job");
    let words = ["--tasks", "needle", "--lengths", "380", "--limit", "1", "--max-tokens", "4"];
    home.run(&[&["job", "plan", "eval", "--model", TINY, "--job", &job], &words[..]].concat()).good();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/phi3");
    home.run(&["job", "run", "--job", &job, "--model", model])
        .failed(4, &["not the model that the job was planned with", "--model"]);
    // The model may lie elsewhere.
    let elsewhere = home.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    for entry in std::fs::read_dir(TINY).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), elsewhere.join(entry.file_name())).unwrap();
    }
    home.run(&["job", "run", "--job", &job, "--model", elsewhere.to_str().unwrap()]).good();
}

/// A judge that gives one reply a request, then ends; how many it gave.
fn judge(replies: Vec<(u16, &'static str)>) -> (String, std::thread::JoinHandle<usize>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let serve = move || {
        let replies = replies.into_iter().map(|(status, content)| {
            let (mut stream, _) = listener.accept().unwrap();
            read_json_request(&mut stream);
            let body = json!({ "choices": [{ "message": { "content": content } }] }).to_string();
            let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close", body.len());
            std::io::Write::write_all(&mut stream, format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
        });
        replies.count()
    };
    (url, std::thread::spawn(serve))
}

/// Answers that wait for their grades are no failures: the shard is given back, and a runner with a judge that replies does it.
#[test]
fn a_judge_that_refuses_ends_the_runner_and_lists_nothing() {
    const GRADES: &str = "{\"Relevance\": 5, \"Accuracy\": 5, \"Coherence\": 5, \"Clarity\": 5, \
                          \"Breadth and Depth\": 5, \"Reading Experience\": 5}";
    let home = Home::new();
    home.write("data/longwriter/longbench_write_en.jsonl", "{\"prompt\": \"Write.\", \"length\": 4}\n");
    home.write("data/longwriter/judge.txt", "Grade $RESPONSE$ to $INST$");
    let asked_once = [(401, "wrong key")];
    // Its first word is good, and then it grades neither of two answers.
    let refused = [(200, "yes"), (401, ""), (401, ""), (401, "wrong key")];
    let graded = [(200, "yes"), (200, GRADES), (200, GRADES)];
    let (endpoint, replies) = judge([&asked_once[..], &refused, &graded].concat());
    let (data, job) = (home.path("data"), url(&home, "job"));
    let words = ["job", "plan", "eval", "--model", TINY, "--tasks", "longwriter/en", "--methods", "pie"];
    let more = ["--data", data.to_str().unwrap(), "--max-tokens", "4", "--judge", &endpoint, "--job", &job];
    home.run(&[&words[..], &more].concat()).good();
    let run = || home.run(&["job", "run", "--job", &job]);
    run().failed(1, &["the judge does not reply", "401", "OPENAI_API_KEY"]);
    run().failed(1, &["/v1/chat/completions", "401"]);
    for folder in ["claims", "failed", "done"] {
        assert!(names(&home.path(&format!("job/{folder}")), "").is_empty(), "{folder}");
    }
    run().good();
    assert_eq!(replies.join().unwrap(), 8);
    let results = home.json(&["job", "results", "--job", &job, "--out", home.path("run").to_str().unwrap()]);
    assert_eq!((&results["answers"], &results["failed"]), (&json!(2), &json!(0)));
}

/// Each model has a calibration of its own, which runners share.
#[test]
fn two_models_of_which_one_is_calibrated_are_one_run() {
    const OTHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/phi3");
    let home = Home::new();
    let (out, many) = (home.path("one"), home.path("many"));
    let both = format!("{TINY},{OTHER}");
    let asked = ["--on", &both, "--tasks", "needle", "--lengths", "380", "--limit", "1"];
    let more = ["--max-tokens", "2", "--methods", "sam_kv:block=16", "--chunk-tokens", "64"];
    let words = [&asked[..], &more].concat();
    // The manifest of a job names the fingerprint that a calibration is of.
    let plan = |job: &str| home.run(&[&["job", "plan", "eval", "--job", job], &words[..]].concat()).good();
    plan(&url(&home, "before"));
    let manifest = std::fs::read(home.path("before/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let fingerprint = &manifest["settings"]["models"][TINY].as_str().unwrap()[..16];
    let calibration = format!(
        "model = 'tiny'\nfingerprint = '{fingerprint}'\nlayers = 2\nfirst_stable_layer = 1\n\
         last_stable_layer = 2\ndocuments = 1\nagreement = [0.5]\n"
    );
    home.write(&format!("data/refrain/calibration/{fingerprint}.toml"), calibration);
    home.run(&[&["eval", "run", "--out", out.to_str().unwrap()], &words[..]].concat()).good();
    let settings = |folder: &Path| {
        let about = std::fs::read_to_string(folder.join("about.json")).unwrap();
        serde_json::from_str::<Value>(&about).unwrap()["settings"].clone()
    };
    let layers = |folder: &Path, model: &str| {
        let layers = settings(folder)[format!("stable layers of SamKV on {model}")].clone();
        layers.as_str().unwrap().to_owned()
    };
    assert_eq!(layers(&out, OTHER), "built in");
    assert_eq!(layers(&out, TINY), "1 to 2");

    let job = url(&home, "job");
    plan(&job);
    let run = ["job", "run", "--job", &job];
    let elsewhere = Ran::of(home.command(&run).env("XDG_DATA_HOME", home.path("other")).output().unwrap());
    elsewhere.failed(4, &["stable layers of SamKV on", "in the job and built in here", "--calibration"]);
    home.run(&run).good();
    home.run(&["job", "results", "--job", &job, "--out", many.to_str().unwrap()]).good();
    assert_eq!(settings(&many), settings(&out));
}
