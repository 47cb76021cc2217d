//! `refrain eval`, through the program, on a tiny model.

use super::*;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");

/// A folder of questions with their documents, short enough for the model's context of 512 tokens.
fn questions(home: &Home) -> PathBuf {
    let line = |i: usize| {
        format!(
            "{{\"_id\": \"q{i}\", \"question\": \"Where is bolt {i}?\", \"answers\": [\"box {i}\"], \"docs\": \
             [{{\"title\": \"A\", \"text\": \"Bolt {i} is in box {i}.\"}}, {{\"title\": \"\", \"text\": \"Chains hang.\"}}]}}\n"
        )
    };
    home.write("data/rag/bolts.jsonl", (0..4).map(line).collect::<String>());
    home.path("data")
}

#[test]
fn a_matrix_is_run_gone_on_with_and_reported() {
    let home = Home::new();
    questions(&home);
    let matrix = home.write(
        "small.toml",
        format!(
            "models = ['{TINY}']\ndata = 'data'\nmax_tokens = 6\nmethods = ['pie', 'a3:ratio=0.5']\n\
             [[tasks]]\nname = 'rag/bolts'\n[[tasks]]\nname = 'needle'\nlengths = [380]\ndepths = 2\n"
        ),
    );
    let (matrix, out) = (matrix.to_str().unwrap(), home.path("run"));
    let out = out.to_str().unwrap();
    let run = |more: &[&str]| home.json(&[&["eval", "run", matrix, "--out", out], more].concat());
    let first = run(&["--limit", "2", "--chunk-tokens", "64"]);
    assert_eq!((first["answers"].as_u64(), first["failed"].as_u64()), (Some(12), Some(0)), "{first}");
    assert_eq!(first["complete"], true);
    // Two more samples of the task that has them; what is there is not done again.
    let more = run(&["--limit", "4", "--chunk-tokens", "64", "--policies", "full"]);
    assert_eq!(more["answers"].as_u64(), Some(6), "{more}");
    let none = run(&["--limit", "4", "--chunk-tokens", "64", "--time-budget", "0s"]);
    assert_eq!((none["answers"].as_u64(), none["complete"].as_bool()), (Some(0), Some(true)));
    let stopped = run(&["--chunk-tokens", "64", "--time-budget", "0s", "--methods", "full_reuse"]);
    assert_eq!((stopped["answers"].as_u64(), stopped["complete"].as_bool()), (Some(0), Some(false)));
    let said = home.run(&["eval", "run", matrix, "--out", out, "--seed", "7"]).failed(1, &["seed 42, not 7"]);
    assert!(said.out.is_empty());

    let written = home.run(&["eval", "report", out]).good().out;
    assert_eq!(written.lines().count(), 4);
    let html = std::fs::read_to_string(home.path("run/report.html")).unwrap();
    for part in ["rag/bolts", "Vanilla", "PIE", "A3", "4 samples"] {
        assert!(html.contains(part), "{part} is not in the report");
    }
    let front = std::fs::read_to_string(home.path("run/front.svg")).unwrap();
    assert!(front.starts_with("<svg xmlns=") && front.contains("speed-up of the first token"), "{front}");
    let csv = std::fs::read_to_string(home.path("run/report.csv")).unwrap();
    assert!(csv.lines().any(|line| line.contains("bolts") && line.contains("a3:ratio=0.5")), "{csv}");
    let elsewhere = home.path("report");
    let files = home.json(&["eval", "report", out, "--out", elsewhere.to_str().unwrap()]);
    assert_eq!(files["answers"].as_u64(), Some(18));
    assert!(elsewhere.join("report.md").is_file());
}

/// Chunks of a run have no prefix unless one is named, and the layers that SamKV scores by are a setting.
#[test]
fn a_run_tells_the_prefix_of_its_chunks_and_keeps_to_its_calibration() {
    let home = Home::new();
    let data = questions(&home);
    let (data, out) = (data.to_str().unwrap(), home.path("run"));
    let words = [
        "eval",
        "run",
        "--model",
        TINY,
        "--tasks",
        "rag/bolts",
        "--data",
        data,
        "--limit",
        "1",
        "--max-tokens",
        "2",
    ];
    let run = |more: &[&str]| home.run(&[&words[..], &["--out", out.to_str().unwrap()], more].concat());
    run(&["--methods", "pie", "--prefix", "auto"]).failed(2, &["--prefix averaged", "auto is none"]);
    run(&["--methods", "auto"]).failed(2, &["name the methods"]);
    run(&["--methods", "sam_kv:block=16"]).good();
    run(&["--methods", "sam_kv:block=16", "--prefix", "averaged"]).good();
    let about: Value =
        serde_json::from_str(&std::fs::read_to_string(out.join("about.json")).unwrap()).unwrap();
    assert_eq!(about["settings"]["prefix of a chunk"], "none where a method names none", "{about}");
    assert_eq!(about["settings"][format!("stable layers of SamKV on {TINY}")], "built in");
    let methods = about["methods"].to_string();
    assert!(methods.contains("sam_kv:block=16,prefix=averaged"), "{methods}");
    // Names of methods are cut at commas, and at the sign between method and policy.
    let text = home.write("a,b+c.txt", "Bolts lie in boxes.");
    let (prefix, other) = (format!("text:{}", text.display()), home.path("other"));
    let behind = ["--methods", "pie", "--prefix", &prefix, "--out", other.to_str().unwrap()];
    home.run(&[&words[..], &behind].concat()).good();
    let results = std::fs::read_to_string(other.join("results.jsonl")).unwrap();
    assert!(results.contains("/a%2Cb%2Bc.txt\""), "{results}");
}

#[test]
fn answers_that_fail_are_told_by_the_exit_status() {
    let home = Home::new();
    let data = questions(&home);
    let line = json!({
        "_id": "long", "question": "Where is bolt 1?", "answers": ["box 1"],
        "docs": [{ "title": "A", "text": "Bolt 1 is in box 1. ".repeat(400) }],
    });
    home.write("data/rag/long.jsonl", format!("{line}\n"));
    let (data, out) = (data.to_str().unwrap(), home.path("run"));
    let run = |task: &str, more: &[&str]| {
        let words = ["eval", "run", "--model", TINY, "--tasks", task, "--data", data, "--methods", "pie"];
        let fixed = ["--max-tokens", "4", "--chunk-tokens", "64", "--out", out.to_str().unwrap()];
        home.run(&[&words[..], &fixed, more].concat())
    };
    run("rag/bolts", &[]).good();
    // Its prompt is longer than the model's context.
    let told = ["warning: 2 answers failed: the prompt has", "2 failed", "the same command tries them again"];
    run("rag/long", &[]).failed(3, &told);
    let ran = run("rag/long", &["--json"]).failed(3, &[]);
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&told["failed"], &told["complete"]), (&json!(2), &json!(false)));
    let failures = told["failures"].as_array().unwrap();
    assert_eq!((failures.len(), &failures[0]["answers"]), (1, &json!(2)), "{told}");
}

#[test]
fn a_judge_that_does_not_reply_is_told_before_anything_is_written() {
    let home = Home::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let refuses = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        read_json_request(&mut stream);
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 404 X\r\nContent-Length: 8\r\n\r\nno model")
            .unwrap();
    });
    home.write("data/longwriter/longbench_write_en.jsonl", "{\"prompt\": \"Write.\", \"length\": 4}\n");
    let (data, out) = (home.path("data"), home.path("run"));
    let words =
        ["eval", "run", "--model", TINY, "--tasks", "longwriter/en", "--data", data.to_str().unwrap()];
    let judged = ["--judge", &url, "--judge-model", "typo", "--out", out.to_str().unwrap()];
    home.run(&[&words[..], &judged].concat())
        .failed(1, &["the judge does not reply", "404", "no model", "--judge-model"]);
    refuses.join().unwrap();
    assert!(!out.exists());
}

#[test]
fn what_cannot_be_run_says_what_to_do() {
    let home = Home::new();
    let run = |words: &[&str]| home.run(&[&["eval", "run", "--model", TINY], words].concat());
    run(&[]).failed(2, &["no task", "refrain eval tasks"]);
    run(&["--tasks", "longbench/hotpotqa"]).failed(2, &["--data", "refrain eval fetch"]);
    run(&["--tasks", "longbench/hotpotqa", "--data", "nowhere"])
        .failed(1, &["nowhere: there is no such folder", "refrain eval fetch"]);
    let data = home.path("data");
    std::fs::create_dir(&data).unwrap();
    run(&["--tasks", "longbench/all", "--data", data.to_str().unwrap(), "--max-prompt-tokens", "300"])
        .failed(1, &[".jsonl", "refrain eval fetch"]);
    run(&["--tasks", "longbench/hotpotqa", "--lengths", "400"])
        .failed(2, &["longbench/hotpotqa has no key `lengths`"]);
    run(&["--tasks", "longbench/hotpot"]).failed(2, &["longbench/hotpot", "refrain eval tasks"]);
    run(&["--tasks", "neddle", "--lengths", "400"]).failed(2, &["there is no task \"neddle\"", "eval tasks"]);
    run(&["--tasks", "needle;ruler", "--lengths", "400"]).failed(2, &["separated by `,`"]);
    run(&["--tasks", "needle", "--limit", "0"]).failed(2, &["at least 1"]);
    // Names and numbers may have spaces behind commas, and a run of nothing leaves no folder.
    let out = home.path("nothing");
    let lists = ["--tasks", "needle, ruler/vt", "--lengths", "99998, 99999", "--out", out.to_str().unwrap()];
    run(&lists).failed(1, &["no task is left to run", "shorter --lengths"]);
    assert!(!out.exists());
    run(&["needle"]).failed(1, &["cannot read the matrix needle", "No such file", "--tasks needle"]);
    run(&["--tasks", "needle", "--methods", "a4"]).failed(2, &["a4", "refrain methods"]);
    run(&["--tasks", "needle", "--time-budget", "5"]).failed(2, &["90s"]);
    run(&["none.toml"]).failed(1, &["none.toml"]);
    home.run(&["eval", "report", "none"]).failed(1, &["none", "folder of a run"]);
    let listed = home.run(&["eval", "tasks"]).good().out;
    for name in ["ruler/vt", "longbench/a3", "longbench/dureader", "needle", "longwriter/en"] {
        assert!(listed.contains(name), "{name} is not in {listed}");
    }
    let fetched = home.run(&["eval", "fetch"]).good().out;
    for name in
        ["huggingface.co/datasets/THUDM/LongBench", "tools/eval_sets.py", "longbench_derived/{musique,"]
    {
        assert!(fetched.contains(name), "{name} is not in {fetched}");
    }
    assert!(home.json(&["eval", "fetch"]).as_array().unwrap().len() > 5);
}
