//! `refrain tune`, the choice that it makes, and prefixes, through the program.

use super::*;

#[test]
fn a_model_is_tuned_and_auto_follows_the_choice() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let docs = docs.to_str().unwrap();
    let questions = "{\"question\": \"How tight is a stem bolt?\", \"answers\": [\"5 Nm\"]}\n\n{\"question\": \"What is a stem?\"}\n";
    let questions = home.write("questions.jsonl", questions);
    let words = [
        "tune",
        docs,
        "--questions",
        questions.to_str().unwrap(),
        "--samples",
        "2",
        "--max-tokens",
        "6",
        "--bound",
        "0",
        "--methods",
        "pie;drift:charge=0.4",
        "--prefixes",
        "system",
    ];
    let tuned = home.json(&words);
    let (choice, front) = (&tuned["choice"], tuned["front"].as_array().unwrap());
    assert_eq!((front.len(), choice["samples"].as_u64()), (3, Some(2)), "{tuned}");
    assert_ne!(choice["method"], "vanilla", "anything is near enough: {tuned}");
    assert_eq!(choice["prefix"], "system");
    let vanilla = front.iter().find(|row| row["method"] == "vanilla").unwrap();
    assert_eq!((vanilla["speedup"].as_f64(), vanilla["top1"].as_f64()), (Some(1.0), Some(1.0)));
    assert!(Path::new(tuned["report"][0].as_str().unwrap()).is_file());
    // The command's second run has nothing left to answer. A question that names no method follows the choice.
    assert_eq!(home.json(&words)["choice"], *choice);
    // The choice is among the methods that are asked for, though measurements of another are in the folder.
    let elsewhere = home.path("elsewhere.toml");
    let mut fewer = words.to_vec();
    fewer.extend(["--output", elsewhere.to_str().unwrap()]);
    *fewer.iter_mut().find(|word| word.starts_with("pie;")).unwrap() = "pie";
    let fewer = home.json(&fewer);
    assert_eq!(fewer["front"].as_array().unwrap().len(), 2, "{fewer}");
    let ask = ["ask", "--docs", docs, "--max-tokens", "4", "What is a stem?"];
    let said = home.run(&ask).good().err;
    assert!(said.contains("prefix system: tuned with 2 questions"), "{said}");
    let answered = home.json(&ask);
    assert_eq!(
        (&answered["answers"][0]["method"], &answered["prefix"]),
        (&choice["method"], &json!("system"))
    );
    assert_eq!(answered["auto"]["method"], choice["method"]);
    assert!(answered["auto"]["why"].as_str().unwrap().starts_with("tuned with 2 questions"), "{answered}");
    assert_eq!(answered["answers"][0]["stats"]["other_prefix_chunks"], 0);
    // The list of models shows it.
    let model = |home: &Home| home.json(&["models"])[0].clone();
    let shown = model(&home);
    assert_eq!((&shown["method"], &shown["prefix"]), (&choice["method"], &json!("system")), "{shown}");
    assert_eq!(shown["tuned"], true);
    assert!(home.run(&["models"]).good().out.contains("system (tuned)"));
    // Chunks of the prefix are the store's; another system message does not fit them, and is told once.
    let listed = home.json(&["store", "ls"]);
    let chunks = listed["chunks"].as_array().unwrap_or_else(|| panic!("{listed}"));
    assert!(
        chunks.iter().any(|chunk| chunk["prefix"].as_str().is_some_and(|prefix| prefix.len() == 64)),
        "{listed}"
    );
    assert!(home.run(&["store", "ls"]).good().out.contains("prefix"));
    // A file that is of another model is told, and left.
    let file = Path::new(tuned["file"].as_str().unwrap()).to_owned();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("fingerprint = \"", "fingerprint = \"0")).unwrap();
    let said = home.run(&ask).good().err;
    assert!(said.contains("is not used") && !said.contains("tuned with"), "{said}");
    assert!(said.contains("built in for this model"), "{said}");
    assert_eq!(model(&home)["tuned"], false);
    // A method that is named has its own way, behind the same prefix.
    let words = ["ask", "--docs", docs, "--max-tokens", "4", "--method", "pie", "What is a stem?"];
    let named = home.json(&words);
    assert_eq!((&named["answers"][0]["method"], &named["prefix"]), (&json!("pie"), &json!("averaged")));
    assert!(!home.run(&words).good().err.contains("built in"));
    // A choice that is forgotten leaves what is built in.
    std::fs::write(&file, text).unwrap();
    assert_eq!(model(&home)["tuned"], true);
    let forgotten = home.run(&["tune", "--forget"]).good().out;
    assert!(forgotten.contains("removed") && forgotten.contains("built in for this model"), "{forgotten}");
    assert_eq!((file.exists(), &model(&home)["prefix"]), (false, &json!("averaged")));
    assert_eq!(home.json(&["tune", "--forget"])["removed"], Value::Null);
    home.run(&["tune", docs, "--forget"]).failed(2, &["--forget"]);
}

/// A choice that rests on a few questions is told with the way back, unless it goes to another file.
#[test]
fn a_choice_of_few_questions_is_warned_of() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let docs = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let line = |i: usize| format!("{{\"question\": \"How tight is bolt {i}?\", \"answers\": [\"5 Nm\"]}}\n");
    let questions = home.write("questions.jsonl", (0..8).map(line).collect::<String>());
    let tune = |samples: &str, more: &[&str]| {
        let words = ["tune", docs.to_str().unwrap(), "--model", model.to_str().unwrap(), "--bound", "0"];
        let fixed = ["--questions", questions.to_str().unwrap(), "--max-tokens", "2", "--methods", "pie"];
        let few = ["--prefixes", "none", "--chunk-tokens", "64", "--quiet", "--samples", samples];
        home.run(&[&words[..], &fixed, &few, more].concat()).good().err
    };
    let said = tune("2", &[]);
    for part in ["warning: the choice rests on 2 questions", "`refrain tune --forget`", "--questions"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let elsewhere = tune("2", &["-o", home.path("choice.toml").to_str().unwrap()]);
    assert!(elsewhere.contains("rests on 2 questions") && !elsewhere.contains("--forget"), "{elsewhere}");
    assert_eq!(tune("8", &[]), "");
}

#[test]
fn what_cannot_be_tuned_is_told() {
    let early = Home::new();
    let nothing = ["tune", "nowhere", "--model", "nothing.gguf"];
    early.run(&[&nothing[..], &["--methods", "a9"]].concat()).failed(2, &["a9"]);
    early.run(&[&nothing[..], &["--prefixes", "systems"]].concat()).failed(2, &["systems"]);
    for option in [
        ["--questions", "file"],
        ["--samples", "5"],
        ["--tokens", "5"],
        ["--bound", "0.5"],
        ["--methods", "pie"],
        ["--prefixes", "none"],
        ["--out", "folder"],
        ["--time-budget", "1m"],
    ] {
        early.run(&[&["tune", "--forget"], &option[..]].concat()).failed(2, &["--forget", option[0]]);
    }
    // Advice is said where it applies.
    let file = early.write("bolts.md", BOLTS);
    let said = |more: &[&str]| {
        let words = ["tune", file.to_str().unwrap(), "--model", "nothing.gguf"];
        let said = early.run(&[&words, more].concat()).failed(1, &["nothing.gguf", "up to "]).err;
        (said.contains("about an hour"), said.contains("--time-budget 10m"))
    };
    assert_eq!(said(&[]), (true, true));
    assert_eq!(said(&["--methods", "pie", "--time-budget", "1m"]), (false, false));
    // The making of the questions takes part of the time.
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let (model, asked) =
        (model.to_str().unwrap(), early.write("asked.jsonl", "{\"question\": \"How tight?\"}\n"));
    let words = ["tune", file.to_str().unwrap(), "--model", model, "--methods", "pie", "--prefixes", "none"];
    let more = ["--questions", asked.to_str().unwrap(), "--time-budget", "0s"];
    early
        .run(&[&words[..], &more].concat())
        .failed(1, &["--time-budget was over before all questions", "--samples"]);
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let docs = docs.to_str().unwrap();
    home.run(&["tune", docs, "--bound", "1.5"]).failed(2, &["from 0 to 1"]);
    let questions = home.write("bad.jsonl", "{\"question\": \"Who?\"}\n{\"answer\": 3}\n");
    home.run(&["tune", docs, "--questions", questions.to_str().unwrap()]).failed(1, &["line 2", "question"]);
    home.run(&["ask", "Why?", "--prefix", "systems"])
        .failed(2, &["none, bos, system, averaged or text:FILE, or auto"]);
    home.run(&["ask", "Why?", "--left-tokens", "some"])
        .failed(2, &["some is not a number of tokens, or all"]);
    home.run(&["ask", "Why?", "--prefix", "text:no/such.txt"]).failed(1, &["no/such.txt"]);
}

#[test]
fn a_document_in_one_piece_is_answered_as_vanilla_does() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs/bolts.md");
    let words = |left| {
        let fixed = ["ask", "--docs", docs.to_str().unwrap(), "--max-tokens", "8", "--chunk-tokens", "24"];
        [&fixed[..], &["--left-tokens", left, "--compare", "vanilla;pie", "How tight is a crank bolt?"]]
            .concat()
    };
    let kl = |left| home.json(&words(left))["comparison"][1]["kl"].as_f64().unwrap();
    let (apart, some, whole) = (kl("0"), kl("16"), kl("all"));
    assert!(whole < 1e-6 && some > 1e-3 && apart > 1e-3, "{apart} {some} {whole}");
}
