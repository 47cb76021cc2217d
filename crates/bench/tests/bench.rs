//! The measurements, through the program.

#[path = "../../../tests/common/needs.rs"]
mod needs;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_refrain-bench"))
}

/// The smallest known model, where it was fetched.
fn model() -> Option<PathBuf> {
    needs::real_model("SmolLM2-135M-Instruct.Q4_1.gguf")
}

#[test]
fn the_worker_replies_to_every_line_and_goes_on_after_a_bad_one() {
    let Some(model) = model() else { return };
    let commands = [
        r#"{"op":"info"}"#,
        "no command",
        r#"{"op":"decode","context":[],"tokens":0}"#,
        r#"{"op":"prefill","ids":[]}"#,
        r#"{"op":"prefill","ids":[4000000000]}"#,
        r#"{"op":"tokenize","text":"How tight is a stem bolt?"}"#,
        r#"{"op":"prefill","ids":[1,504,720]}"#,
        r#"{"op":"decode","context":[1,504,720],"tokens":2}"#,
        r#"{"op":"decode","context":[],"tokens":2}"#,
    ];
    let mut worker =
        program().arg("worker").arg(model).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    worker.stdin.take().unwrap().write_all(commands.join("\n").as_bytes()).unwrap();
    let ran = worker.wait_with_output().unwrap();
    assert!(ran.status.success());
    let out = String::from_utf8(ran.stdout).unwrap();
    let replies: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(replies.len(), commands.len(), "{out}");
    assert_eq!(
        (&replies[0]["engine"], &replies[0]["compute"], &replies[0]["kv_bytes_per_token"]),
        (&"refrain".into(), &"q8".into(), &(2 * 30 * 192 * 2).into())
    );
    for bad in &replies[1..5] {
        assert!(!bad["error"].as_str().unwrap().is_empty(), "{bad}");
    }
    assert!(replies[5]["ids"].as_array().unwrap().len() > 5);
    let positive = |value: &Value| assert!(value.as_f64().unwrap() > 0.0, "{out}");
    positive(&replies[6]["seconds"]);
    positive(&replies[7]["prefill_seconds"]);
    positive(&replies[7]["seconds_per_token"]);
    assert!(replies[8]["prefill_seconds"].is_null());
    positive(&replies[8]["seconds_per_token"]);
}

#[test]
fn kernels_are_measured_against_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("missing/kernels.json");
    let failed = program().args(["kernels", "--json"]).arg(nowhere).output().unwrap();
    let error = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && error.contains("missing/kernels.json"), "{error}");
    for (words, named) in [(["--only", "ops,sums"], ["sums", "products"]), (["--runs", "0"], ["--runs", "0"])]
    {
        let wrong = program().arg("kernels").args(words).output().unwrap();
        let error = String::from_utf8_lossy(&wrong.stderr).into_owned();
        assert!(wrong.status.code() == Some(2) && named.iter().all(|name| error.contains(name)), "{error}");
    }

    let json = folder.path().join("kernels.json");
    let words = ["kernels", "--only", "attention,ops", "--runs", "1", "--json"];
    let ran = program().args(words).arg(&json).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let told: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    for peaks in ["all_threads", "one_thread"] {
        for peak in ["f32_flops", "bf16_flops", "read_bytes", "copy_bytes"] {
            assert!(told["peaks"][peaks][peak].as_f64().unwrap() > 0.0, "{peaks} {peak}");
        }
    }
    let rows = told["results"].as_array().unwrap();
    let of = |kernel| rows.iter().filter(|row| row["kernel"] == kernel).count();
    assert_eq!((of("attention"), of("element-wise"), rows.len()), (18, 4, 22));
    let table = String::from_utf8(ran.stdout).unwrap();
    for row in rows {
        assert!(row["share"].as_f64().unwrap() > 0.0 && row["best_seconds"].as_f64().unwrap() > 0.0, "{row}");
        assert!(table.contains(row["shape"].as_str().unwrap()), "{row}");
    }
    assert!(told["about"]["threads"].as_u64().unwrap() > 0);
}

/// The second turn of a conversation is measured over what the first has left, and anew.
#[test]
fn second_turns_are_measured_taken_over_and_anew() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");
    let folder = tempfile::tempdir().unwrap();
    let questions = folder.path().join("questions.jsonl");
    let wheel = |number: u32| {
        let text = format!("Wheel {number} has 2{number} spokes of steel and a valve of brass.");
        json!({ "title": format!("Wheel {number}"), "text": text })
    };
    let asked = json!({ "question": "Which valve?", "docs": [wheel(1), wheel(2)] });
    std::fs::write(&questions, format!("{asked}\n{asked}\n")).unwrap();
    let words =
        ["--prefix", "system", "--first", "How many spokes?", "--tokens", "4", "--compare-tokens", "4"];
    let ran = program().args(["turns", model]).arg(&questions).args(words).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let table = String::from_utf8(ran.stdout).unwrap();
    for method in ["drift:charge=0.15", "pie"] {
        let computed = |way: &str| -> f64 {
            let start = format!("| {method} | {way} | ");
            let row =
                table.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{table}"));
            row.split(" | ").last().unwrap().trim_end_matches(" |").parse().unwrap()
        };
        assert!(2.0 * computed("taken over") < computed("anew"), "{table}");
    }
    assert_eq!(table.matches("nearer taken over").count(), 2, "{table}");
}

#[test]
fn precision_refuses_what_measures_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (docs, questions) = (folder.path().join("docs"), folder.path().join("questions.txt"));
    std::fs::create_dir(&docs).unwrap();
    std::fs::write(&questions, "\n \n").unwrap();
    let (docs, questions) = (docs.to_str().unwrap(), questions.to_str().unwrap());
    for (words, told) in [
        (["--docs", docs], "hold no document"),
        (["--questions", questions], "questions.txt has no question"),
        (["--tokens", "0"], "--tokens"),
    ] {
        let failed = program().args(["precision", "no model"]).args(words).output().unwrap();
        let error = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && error.contains(told), "{error}");
        assert!(failed.stdout.is_empty(), "nothing is measured");
    }
}
