//! Methods that keep parts of documents, through the program.

use super::*;

/// Documents long enough to have middle blocks.
fn long_documents(home: &Home) -> PathBuf {
    let paragraph = |town: &str, i: usize| {
        format!(
            "In the year {} the harbour of {town} counted {} boats, {} of them with two masts. ",
            1800 + i,
            i * 7 % 90 + 3,
            i * 3 % 40 + 1
        )
    };
    let record = |town: &str| {
        let text: String = (0..36).map(|i| paragraph(town, i)).collect();
        format!("{{\"title\": \"{town}\", \"text\": \"{text}\"}}\n")
    };
    home.write("towns.jsonl", ["Calder", "Norrvik", "Sant Pau"].map(record).concat())
}

#[test]
fn a_part_of_the_documents_is_kept_read_and_told() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let docs = long_documents(&home);
    let docs = docs.to_str().unwrap();
    // Ingested in chunks, as for other methods; then for this one, which has its documents whole.
    assert!(home.run(&["ingest", docs]).good().out.contains("3 documents in"));
    let ingested = home.json(&["ingest", docs, "--method", "sam_kv"]);
    assert_eq!((ingested["chunks"].as_u64(), ingested["computed"].as_u64()), (Some(3), Some(3)));
    assert!(home.chunk_files().iter().any(|path| path.to_string_lossy().ends_with(".summary")));
    assert_eq!(home.json(&["ingest", docs, "--method", "sam_kv"])["computed"], 0);
    let words =
        ["ask", "--docs", docs, "--method", "sam_kv", "--max-tokens", "8", "How many boats had Norrvik?"];
    let said = home.run(&words).good().err;
    assert!(said.contains("sequence ratio") && said.contains("read"), "{said}");
    let stats = home.json(&words)["answers"][0]["stats"].clone();
    let number = |name: &str| stats[name].as_f64().unwrap();
    assert!(number("sequence_ratio") < 0.6 && number("recompute_ratio") < 0.6, "{stats}");
    assert!(number("bytes_read") > 0.0 && number("bytes_read") < 0.7 * number("document_bytes"), "{stats}");
    assert!(number("kv_bytes") < number("kv_bytes_full"), "{stats}");
    // With its options, a policy after it, beside others, and explained.
    let options = "sam_kv:update=overwrite,selection=false";
    let mut more = vec!["ask", "--docs", docs, "--method", options, "--max-tokens", "8"];
    more.extend(["How many boats had Norrvik?", "--evict", "morph_kv:capacity=100", "--explain"]);
    more.extend(["--compare", "vanilla;multi_inf_llm:topk=3"]);
    let compared = home.json(&more);
    assert_eq!(compared["comparison"].as_array().unwrap().len(), 2);
    let spec = compared["answers"][0]["method"].as_str().unwrap();
    assert!(spec.contains("selection=false") && spec.contains("update=overwrite"), "{spec}");
    assert_eq!(compared["answers"][0]["stats"]["retained_tokens"], 101);
    home.run(&["store", "verify"]).good();
}

#[test]
fn options_of_sparse_methods_are_checked() {
    let home = Home::new();
    home.run(&["ask", "--method", "sam_kv:block=0", "why"]).failed(2, &["block", "from 1 to"]);
    home.run(&["ask", "--method", "sam_kv:update=mend", "why"]).failed(2, &["update", "fusion, overwrite"]);
    home.run(&["ask", "--method", "multi_inf_llm:local=0", "why"]).failed(2, &["local", "from 1 to"]);
    home.run(&["ask", "--method", "sam_kv:local_blocks=0", "why"]).failed(2, &["local_blocks", "from 1 to"]);
    assert!(home.run(&["methods", "sam_kv"]).good().out.contains("2508.11661"));
}

#[test]
fn calibration_is_found_kept_and_used() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let docs = long_documents(&home);
    let docs = docs.to_str().unwrap();
    let found = home.json(&["calibrate", docs]);
    let number = |name: &str| found["calibration"][name].as_u64().unwrap();
    assert_eq!(found["calibration"]["agreement"].as_array().unwrap().len() as u64, number("layers") - 1);
    assert_eq!(number("documents"), 3);
    let (first, last) = (number("first_stable_layer"), number("last_stable_layer"));
    assert!(1 <= first && first < last && last <= number("layers"));
    let shown = home.run(&["calibrate", docs, "-o", home.path("own.toml").to_str().unwrap()]).good();
    assert!(shown.out.contains("agreement of layers"), "{}", shown.out);
    let file = PathBuf::from(found["file"].as_str().unwrap());
    assert!(file.starts_with(home.path("data")) && file.is_file());
    assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(home.path("own.toml")).unwrap());
    // A file of another model, or none at all, is refused where it is asked for.
    let other = "model = \"x\"\nfingerprint = \"0\"\nlayers = 3\nfirst_stable_layer = 2\nlast_stable_layer = 3\ndocuments = 1\nagreement = []\n";
    let ask = |file: &Path| {
        let words = ["ask", "why", "--max-tokens", "1", "--calibration", file.to_str().unwrap()];
        home.run(&words)
    };
    ask(&home.write("other.toml", other)).failed(1, &["it is of x"]);
    ask(&home.write("broken.toml", "layers = ")).failed(1, &["cannot use the calibration"]);
    let short = home.write("short.txt", "Too short to tell.");
    home.run(&["calibrate", short.to_str().unwrap()]).failed(1, &["long enough"]);
}
