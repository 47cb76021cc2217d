//! `refrain bench serve`: its scenarios, on a tiny model.

use super::*;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");

/// What the benchmark measured, with 3 clients for a second over documents that fit the model's context of 512 tokens.
fn measured(more: &[&str]) -> Value {
    let home = Home::new();
    for wheel in 1..5 {
        home.write(
            &format!("docs/{wheel}.txt"),
            format!("Wheel {wheel} has 2{wheel} spokes and a valve of brass."),
        );
    }
    let questions = home.write("questions.txt", "How many spokes?\nWhich valve?\n");
    let (docs, questions) = (home.path("docs"), questions.to_str().unwrap().to_owned());
    let own = ["bench", "serve", "--model", TINY, "--methods", "a3", "--clients", "3", "--seconds", "1s"];
    let asked = ["--docs", docs.to_str().unwrap(), "--questions", &questions, "--per-request", "1-2"];
    // A proxy reaches no server of this machine.
    let mut bench = home.command(&[&own, asked.as_slice(), more, &["--json"]].concat());
    let shared = home.path("shared");
    std::fs::create_dir(&shared).unwrap();
    bench
        .env("HTTP_PROXY", "http://127.0.0.1:9")
        .env("REFRAIN_REMOTE", format!("file://{}", shared.display()));
    let told = Ran::of(bench.output().unwrap()).good().out;
    let left = std::fs::read_dir(&shared).unwrap().count();
    assert_eq!(left, 0, "documents of a benchmark are in the object store of the machine");
    serde_json::from_str(&told).unwrap()
}

/// The rows of a part, by what the server did without.
fn rows<'a>(told: &'a Value, part: &Value) -> Vec<(Option<&'a str>, &'a Value)> {
    let rows = told["results"].as_array().unwrap().iter();
    rows.filter(|row| row["part"] == *part).map(|row| (row["without"].as_str(), row)).collect()
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"))
}

#[test]
fn conversations_are_measured_with_and_without_prefix_caching() {
    let more = [
        "--scenario",
        "multi-turn",
        "--turns",
        "3",
        "--tokens",
        "8",
        "--compare",
        "prefix-caching",
        "--rounds",
        "2",
    ];
    let told = measured(&more);
    assert_eq!((&told["scenario"], &told["rounds"]), (&json!("multi-turn"), &json!(2)));
    let (first, later) = (rows(&told, &json!("first_turns")), rows(&told, &json!("later_turns")));
    for ((without, first), (_, later)) in first.into_iter().zip(later) {
        let (cached, prefix) = (number(later, "cached_share"), number(later, "prefix_share"));
        // Conversations end with their last turn.
        assert_eq!(number(later, "requests"), 2.0 * number(first, "requests"), "{without:?}");
        assert!(number(first, "requests") > 3.0 && first["failed"] == json!({}), "{first}");
        assert!(number(first, "prefix_share") == 0.0 && number(first, "cached_share") > 0.1, "{first}");
        match without {
            None => assert!(prefix > 0.5 && cached == prefix, "{later}"),
            Some("prefix-caching") => assert!(prefix == 0.0 && cached > 0.1, "{later}"),
            Some(other) => panic!("{other} was not to be compared"),
        }
        assert!(later["ttft"].as_array().unwrap().iter().all(|seconds| seconds.as_f64() > Some(0.0)));
    }
    assert_eq!(rows(&told, &json!("all")).len(), 2);
}

#[test]
fn quotations_are_measured_with_and_without_proposals() {
    let told = measured(&[
        "--scenario",
        "extractive",
        "--tokens",
        "80",
        "--compare",
        "speculation",
        "--rounds",
        "1",
    ]);
    let rows = rows(&told, &json!("all"));
    let names: Vec<Option<&str>> = rows.iter().map(|(without, _)| *without).collect();
    assert_eq!(names, [None, Some("speculation")]);
    assert!(number(rows[0].1, "drafted_share") > 0.0 && number(rows[1].1, "drafted_share") == 0.0, "{told}");
    for (_, row) in rows {
        // Both numbers are counts over one time, so their ratio carries the rounding of two divisions.
        let tokens = number(row, "tokens_per_second") / number(row, "rate");
        assert!((63.99..80.01).contains(&tokens) && row["failed"] == json!({}), "{tokens} tokens: {row}");
        assert!(row["tpot"][0].as_f64() > Some(0.0), "{row}");
    }
}

#[test]
fn every_key_has_a_row_of_its_own() {
    let told = measured(&["--keys", "3", "--tokens", "8", "--leave", "0.3"]);
    let (_, all) = rows(&told, &json!("all"))[0];
    let keys: Vec<f64> =
        (1..=3).map(|key| number(rows(&told, &json!({ "key": key }))[0].1, "requests")).collect();
    assert!(keys.iter().all(|requests| *requests > 0.0), "{keys:?}");
    assert_eq!(keys.iter().sum::<f64>(), number(all, "requests"));
    assert!(number(all, "left") > 0.0 && all["failed"] == json!({}), "{all}");
    assert!(told["memory_after"]["process"].as_u64() > Some(1 << 20), "{told}");
}

#[test]
fn chats_tools_and_ingests_are_told_apart() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let words = [
        "bench",
        "serve",
        "--methods",
        "a3",
        "--clients",
        "4",
        // Long enough for each kind to be answered while other tests keep the machine busy.
        "--seconds",
        "10s",
        "--per-request",
        "0",
        "--tokens",
        "4",
    ];
    let told = home.json(&[words.as_slice(), &["--tools", "0.3", "--ingest", "0.3"]].concat());
    for kind in ["chat", "tools", "ingest"] {
        let (_, row) = rows(&told, &json!({ "kind": kind }))[0];
        assert!(number(row, "answered") > 0.0 && row["failed"] == json!({}), "{row}");
        assert_eq!(row["ttft"][0].is_null(), kind == "ingest", "{row}");
    }
    assert!(home.run(&["bench", "serve", "--help"]).good().out.contains("multi-turn"));
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let home = Home::new();
    // A file that cannot be written is told before the model is opened.
    for bench in ["decode", "memory"] {
        home.run(&["bench", bench, "--model", "nothing.gguf", "--csv", "no/such/folder.csv"])
            .failed(1, &["cannot write no/such/folder.csv"]);
    }
    let serve = |more: &[&str]| home.run(&[&["bench", "serve", "--model", TINY], more].concat());
    serve(&["--leave", "2"]).failed(2, &["--leave 2 is no share"]);
    serve(&["--ingest", "0.6", "--tools", "0.6"]).failed(2, &["their sum is at most 1"]);
    serve(&["--scenario", "multi-turn", "--limit", "1s"]).failed(2, &["--scenario mixed"]);
    serve(&["--compare", "speculation", "--limit", "1s"]).failed(2, &["--limit and --compare"]);
    serve(&["--compare", "speculation", "--url", "http://localhost:1"]).failed(2, &["--url"]);
    serve(&["--clients", "1,0"]).failed(2, &["--clients", "1.."]);
    serve(&["--max-num-seqs", "0"]).failed(2, &["--max-num-seqs", "1.."]);
    serve(&["--scenario", "anything"]).failed(2, &["multi-turn", "extractive"]);
}

/// The chunks of the prompt are stored before a policy is measured.
#[test]
fn decoding_is_measured_over_chunks_that_are_stored() {
    let home = Home::new();
    let words = ["bench", "decode", "--model", TINY, "--method", "pie", "--policies", "full", "--runs", "1"];
    let more = ["--prompt", "200", "--tokens", "8", "--short", "4", "--chunk-tokens", "64"];
    let told = home.json(&[&words[..], &more].concat());
    assert_eq!(told["results"][0]["prefilled_chunks"], 0, "{told}");
}

/// Ctrl-C and SIGTERM leave no chunks of a benchmark behind.
#[cfg(unix)]
#[test]
fn a_stopped_benchmark_removes_its_folder() {
    let home = Home::new();
    let temporary = home.write("tmp/other", "").with_file_name("");
    let entries = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder)
            .map_or_else(|_| Vec::new(), |all| all.map(|entry| entry.unwrap().path()).collect())
    };
    for signal in ["-INT", "-TERM"] {
        let words =
            ["bench", "ttft", "--model", TINY, "--prefix", "none", "--methods", "pie", "--runs", "1000000"];
        let mut bench = home.command(&[&words[..], &["--lengths", "300", "--chunk-tokens", "64"]].concat());
        let bench = bench.env("TMPDIR", &temporary).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut bench = bench.spawn().unwrap();
        let begun = std::time::Instant::now();
        // The store has files once the measurement has begun.
        while !entries(&temporary).iter().any(|path| !entries(path).is_empty()) {
            assert!(begun.elapsed().as_secs() < 60 && bench.try_wait().unwrap().is_none());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(Command::new("kill").args([signal, &bench.id().to_string()]).status().unwrap().success());
        Ran::of(bench.wait_with_output().unwrap()).failed(130, &[]);
        assert_eq!(entries(&temporary), [temporary.join("other")], "{signal}");
    }
}
