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
        .failed(1, &["not the model that the job was planned with", "--model"]);
    // The model may lie elsewhere.
    let elsewhere = home.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    for entry in std::fs::read_dir(TINY).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), elsewhere.join(entry.file_name())).unwrap();
    }
    home.run(&["job", "run", "--job", &job, "--model", elsewhere.to_str().unwrap()]).good();
}
