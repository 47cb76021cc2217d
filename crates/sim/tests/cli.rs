//! The program as it is called.

use std::process::{Command, Output};

fn run(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_refrain-sim")).args(words).output().unwrap()
}

fn printed(words: &[&str]) -> String {
    let output = run(words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "no terminal, no progress");
    String::from_utf8(output.stdout).unwrap()
}

const SMALL: [&str; 6] =
    ["small-fleet", "--workers=2,3", "--requests=60", "--corpus=100", "--rules=tessera,cost", "--delay=0,1"];

#[test]
fn a_table_has_a_row_for_each_number_delay_and_rule() {
    let text = printed(&SMALL);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 9);
    assert_eq!(rows[0][..5], ["scenario", "workers", "rate", "delay", "rule"]);
    assert_eq!(rows[1][..6], ["small-fleet", "2", "3/worker", "0", "s", "tessera"]);
    assert_eq!(rows[8][..6], ["small-fleet", "3", "3/worker", "1", "s", "cost"]);
    assert_eq!(printed(&SMALL), text, "the same scenario gives the same table");
    let markdown = printed(&[&SMALL[..], &["--markdown"]].concat());
    assert!(markdown.starts_with("| scenario "), "{markdown}");
    assert_eq!(markdown.lines().count(), 10);
}

#[test]
fn json_has_the_values_and_the_rows() {
    let json: serde_json::Value =
        serde_json::from_str(&printed(&[&SMALL[..], &["8b-a3", "--json"]].concat())).unwrap();
    assert_eq!(json[0]["values"]["corpus"], "100");
    assert_eq!(json[0]["values"]["bytes_per_token"], 23_040);
    assert_eq!(json[1]["values"]["bytes_per_token"], 131_072);
    let row = &json[0]["rows"][7];
    assert_eq!((&row["workers"], &row["rule"]), (&3.into(), &"cost".into()));
    assert_eq!(row["requests"], 72, "of 180 requests, 108 fill the caches");
    let shares = ["memory_share", "disk_share", "fetched_share", "prefilled_share"]
        .map(|name| row[name].as_f64().unwrap());
    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{row}");
    assert!(row["ttft_p50"].as_f64().unwrap() <= row["ttft_p99"].as_f64().unwrap());
}

#[test]
fn choices_are_timed_for_the_rules_of_the_router() {
    let words = [&SMALL[..5], &["--rules=random,cost", "--time-choices=100", "--json"]].concat();
    let words: Vec<&str> = words.into_iter().filter(|word| *word != "--rules=tessera,cost").collect();
    let json: serde_json::Value = serde_json::from_str(&printed(&words)).unwrap();
    let rows = json[0]["rows"].as_array().unwrap();
    assert!(rows[0].get("choice").is_none(), "chance takes no time");
    assert!(rows[1]["choice"]["least"].as_f64().unwrap() > 0.0);
    assert!(rows[1]["choice"]["pairs"].as_u64().unwrap() >= 50);
}

#[test]
fn the_requests_are_printed() {
    let lines = printed(&["small-fleet", "--arrivals", "--workers=2", "--requests=60", "--corpus=100"]);
    let arrivals: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(arrivals.len(), 120);
    let time = |arrival: &serde_json::Value| arrival["time"].as_f64().unwrap();
    assert!(arrivals.is_sorted_by_key(time), "one after the other");
    assert!(arrivals.iter().all(|arrival| arrival["chunks"].as_array().unwrap().len() == 5));
    let error = run(&["small-fleet", "--arrivals"]).stderr;
    assert!(String::from_utf8(error).unwrap().contains("--arrivals: give one number of workers"));
}

#[test]
fn presets_are_listed_and_shown() {
    let list = printed(&["--list"]);
    assert!(list.lines().any(|line| line.starts_with("8b-a3 ")), "{list}");
    let shown = printed(&["8b-a3", "--show", "--workers=7"]);
    assert!(shown.starts_with("# 8b-a3\n") && shown.contains("workers = [7]\n"), "{shown}");
    assert!(shown.contains("bytes_per_token = 131072\n") && shown.contains("few = 0.03\n"), "{shown}");
}

#[test]
fn errors_say_what_is_wrong() {
    for (words, code, told) in [
        (["9b", "--quiet"], 1, "9b is neither a preset (small-fleet"),
        (["8b-a3", "--memory=1"], 1, "--memory: a request's 5 chunks have to find room"),
        (["8b-a3", "--rate=much"], 2, "give a number above zero"),
        (["8b-a3", "--wokers=7"], 2, "--workers"),
    ] {
        let output = run(&words);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.starts_with("error: ") && error.contains(told), "{error}");
        assert!(output.stdout.is_empty());
    }
}
