//! Eviction policies through the program.

use super::*;

#[test]
fn wrong_policies_and_options_say_what_is_right() {
    let home = Home::new();
    home.run(&["ask", "--evict", "morph", "why"])
        .failed(2, &["eviction policy `morph`", "morph_kv", "refrain methods"]);
    let clash = ["ask", "--evict", "morph_kv:capacity=30,window=30", "why"];
    home.run(&clash).failed(2, &["capacity 30", "window of 30"]);
    home.run(&["generate", "--evict", "streaming_llm:capacity=4", "why"])
        .failed(2, &["capacity 4", "4 sinks"]);
    home.run(&["ask", "--evict", "full:capacity=600", "why"])
        .failed(2, &["`full` takes no option `capacity`", "--evict morph_kv"]);
    home.run(&["ask", "--capacity", "600", "why"]).failed(2, &["--capacity"]);
    home.run(&["bench", "decode", "--policies", "full;h3o"]).failed(2, &["h3o", "h2o"]);
    home.run(&["bench", "memory", "--policies", "morph_kv:fuse=product"]).failed(2, &["product", "sum"]);
    let shown = home.run(&["methods", "morph_kv"]).good().out;
    assert!(shown.contains("2503.00979") && shown.contains("--evict morph_kv:capacity=600"), "{shown}");
    assert_eq!(home.json(&["methods", "snap-kv"])["kind"], "eviction");
}

#[test]
fn an_answer_in_a_bounded_cache_says_what_it_holds() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let question = "How tall is the lighthouse?";
    let mut words = vec!["ask", "--docs", docs.to_str().unwrap(), question, "--max-tokens", "12"];
    words.extend(["--evict", "morph_kv:capacity=64,window=8,fuse=max"]);
    let said = home.run(&words).good().err;
    assert!(
        said.contains("morph_kv:") && said.contains("capacity=64") && said.contains("fuse=max"),
        "{said}"
    );
    assert!(said.contains("65 tokens retained") && said.contains("of full attention's"), "{said}");
    let answer = home.json(&words)["answers"][0].clone();
    let stats = |name: &str| answer["stats"][name].as_u64().unwrap();
    assert_eq!((stats("retained_tokens"), &answer["stats"]["kv_accounting"]), (65, &"kv_head".into()));
    assert!(stats("kv_bytes") < stats("kv_bytes_peak") && stats("kv_bytes") < stats("kv_bytes_full"));
    assert!(stats("side_bytes") > 0);
    // The same tokens as full attention while there is room for all of them.
    let tokens = |evict: &str| {
        let words =
            ["ask", "--docs", docs.to_str().unwrap(), question, "--max-tokens", "12", "--evict", evict];
        home.json(&words)["answers"][0]["tokens"].clone()
    };
    assert_eq!(tokens("full"), tokens("morph_kv:capacity=4000"));
    // Bytes of tokens that are held are compared with those of all tokens, however much is allocated for more.
    *words.last_mut().unwrap() = "morph_kv:capacity=4000";
    let said = home.run(&words).good().err;
    assert!(said.contains("(100 % of full attention's") && said.contains(" allocated, at peak"), "{said}");
    // Compared with full attention, which a small cache is not.
    *words.last_mut().unwrap() = "morph_kv:capacity=64,window=8,fuse=max";
    let mut compared = words.clone();
    compared.extend(["--compare", "vanilla"]);
    assert!(home.json(&compared)["comparison"][0]["kl"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_long_text_goes_to_standard_output_and_how_it_goes_to_standard_error() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let words = [
        "generate",
        "Count from one to a hundred.",
        "--max-tokens",
        "90",
        "--evict",
        "morph_kv:capacity=48,window=8",
        // How soon a small model ends by itself depends on the machine's rounding.
        "--ignore-eos",
    ];
    let ran = home.run(&words).good();
    assert!(!ran.out.trim().is_empty());
    assert!(ran.err.contains("49 tokens retained"), "{}", ran.err);
    let answer = home.json(&words);
    assert_eq!(answer["text"].as_str().unwrap().trim_end(), ran.out.trim_end());
    let evict = answer["evict"].as_str().unwrap();
    assert!(evict.starts_with("morph_kv:") && evict.contains("capacity=48"), "{evict}");
    // Past the end token, if asked to.
    let on = ["generate", "Say yes.", "--max-tokens", "40", "--ignore-eos"];
    assert_eq!(home.json(&on)["stats"]["answer_tokens"], 40);
    home.run(&["generate", "-"]).failed(2, &["prompt is empty", "standard input"]);
    home.run(&["methods", "morph"]).failed(2, &["morph_kv", "cache_blend"]);
    let long = ["generate", "Count.", "--max-tokens", "9000"];
    home.run(&long).failed(1, &["context", "9000"]);
}

#[test]
fn curves_of_policies_are_measured_and_written() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let csv = home.path("curves.csv");
    let files = ["--csv", csv.to_str().unwrap()];
    let policies = ["--policies", "full;full:per_query_head;morph_kv:capacity=80", "--prompt", "100"];
    let words =
        [&["bench", "memory", "--tokens", "60", "--lengths", "120,300"][..], &policies, &files].concat();
    let measured = home.json(&words);
    let row = |i: usize| measured["results"][i].clone();
    assert_eq!((&row(0)["policy"], &row(1)["accounting"]), (&"full attention".into(), &"query_head".into()));
    let kv = |i: usize| row(i)["kv_bytes"].as_u64().unwrap();
    assert_eq!(kv(1), 3 * kv(0));
    let token = measured["about"]["token_bytes"].as_u64().unwrap();
    assert_eq!(kv(2), 81 * token);
    let last = row(2)["answer"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["tokens"], &last["retained"]), (&60.into(), &81.into()));
    assert_eq!(row(2)["prompts"][1][1], 81 * token);
    let curves = std::fs::read_to_string(&csv).unwrap();
    assert!(curves.lines().count() > 60 && curves.contains("full:per_query_head=true"), "{curves}");
    let words =
        [&["bench", "decode", "--tokens", "60", "--runs", "1", "--short", "10,50"][..], &policies, &files]
            .concat();
    let measured = home.json(&words);
    for row in measured["results"].as_array().unwrap() {
        assert_eq!(row["curve"].as_array().unwrap().last().unwrap()[0], 60);
        assert!(
            row["short"].as_array().unwrap().len() == 2 && row["growth"].as_f64().unwrap() > 0.0,
            "{row}"
        );
    }
    assert!(
        std::fs::read_to_string(&csv)
            .unwrap()
            .contains("Time a token while the answer grows,full:per_query_head")
    );
    let too_long = ["bench", "decode", "--prompt", "8000", "--tokens", "2000"];
    home.run(&too_long).failed(2, &["8000", "2000", "8192"]);
}
