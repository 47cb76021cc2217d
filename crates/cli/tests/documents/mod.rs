//! Documents of all kinds, through the program.

use std::path::PathBuf;

use serde_json::json;

use super::{Home, real_model};

/// A sample of the crate that reads documents.
fn sample(name: &str) -> Vec<u8> {
    let samples = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../documents/tests/files");
    std::fs::read(samples.join(name)).unwrap()
}

/// A folder with a document of each kind, and two files that cannot be read.
fn mixed_folder(home: &Home) -> String {
    for (name, file) in [
        ("a.pdf", "handbook-chromium.pdf"),
        ("b.docx", "handbook-word.docx"),
        ("c.html", "handbook.html"),
        ("d/scan.pdf", "scanned.pdf"),
        ("d/secret.pdf", "encrypted.pdf"),
    ] {
        home.write(&format!("docs/{name}"), sample(file));
    }
    home.write("docs/e.md", "# Pumps\n\nA tyre takes 6 bar.");
    home.write(
        "docs/f.jsonl",
        "{\"title\": \"Bells\", \"text\": \"A bell is needed.\"}\n{\"text\": \"Lights too.\"}\n",
    );
    home.path("docs").to_str().unwrap().to_owned()
}

#[test]
fn paths_without_any_document_end_the_command() {
    let home = Home::new();
    let scanned = home.write("scan.pdf", sample("scanned.pdf"));
    home.write("both/scan.pdf", sample("scanned.pdf"));
    home.write("both/secret.pdf", sample("encrypted.pdf"));
    home.write("empty/picture.png", "");
    let (scanned, both) = (scanned.to_str().unwrap().to_owned(), home.path("both"));
    let (both, empty) = (both.to_str().unwrap(), home.path("empty"));
    for command in
        [["ingest"].as_slice(), &["calibrate"], &["ask", "why", "--docs"], &["generate", "on", "--docs"]]
    {
        let run = |path: &str| home.run(&[command, &[path]].concat());
        run(&scanned).failed(1, &["scan.pdf: has no text", "ocrmypdf"]);
        run(both)
            .failed(1, &["none of 2 files could be read", "scan.pdf: has no text", "secret.pdf: encrypted"]);
        run(empty.to_str().unwrap())
            .failed(1, &["empty holds no text, Markdown, HTML, PDF, DOCX or JSONL document"]);
        run("nowhere.pdf").failed(1, &["there is no file or folder nowhere.pdf"]);
    }
    // A misspelt path is not passed over beside a good one.
    home.write("good.txt", "fine");
    let good = home.path("good.txt");
    home.run(&["ingest", good.to_str().unwrap(), "nowhere.pdf"]).failed(1, &["nowhere.pdf"]);
    let ran = home.run(&["ingest", both, "--json"]).failed(1, &[]);
    assert!(ran.out.contains("secret.pdf: encrypted"), "{}", ran.out);
}

#[test]
fn help_names_the_kinds_of_files() {
    let home = Home::new();
    for command in ["ingest", "ask", "chat", "generate", "serve", "tune", "calibrate"] {
        let help = home.run(&[command, "--help"]).good().out;
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("Text, Markdown, HTML, PDF, DOCX or JSONL"), "{command}: {help}");
    }
}

#[test]
fn files_that_cannot_be_read_are_told_and_counted_beside_the_others() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let docs = mixed_folder(&home);
    let ran = home.run(&["ingest", &docs, "--quiet"]).failed(3, &[]);
    let lines: Vec<&str> = ran.err.lines().collect();
    assert_eq!(lines.len(), 2, "{}", ran.err);
    assert!(lines[0].starts_with("warning: ") && lines[0].contains("scan.pdf: has no text"), "{}", ran.err);
    assert!(lines[1].contains("secret.pdf: encrypted; save it without a password first"), "{}", ran.err);
    assert!(
        ran.out.starts_with("6 documents in ") && ran.out.ends_with(", 2 files could not be read\n"),
        "{}",
        ran.out
    );
    let again = home.run(&["ingest", &docs, "--json"]).failed(3, &[]);
    let again: serde_json::Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!((&again["documents"], &again["computed"]), (&json!(6), &json!(0)));
    assert_eq!(again["failures"][1]["error"], "encrypted; save it without a password first");
    assert!(again["failures"][0]["path"].as_str().unwrap().ends_with("scan.pdf"));
    let ask = ["ask", "--docs", &docs, "--max-tokens", "4", "How much air does a tyre take?"];
    let answer = home.json(&ask);
    assert_eq!(answer["failures"].as_array().unwrap().len(), 2);
    assert!(home.run(&ask).good().err.contains("secret.pdf: encrypted"));
    let text =
        home.json(&["generate", "--docs", &docs, "--max-tokens", "4", "How much air does a tyre take?"]);
    assert_eq!(text["failures"], answer["failures"]);
    let talk =
        home.run_with_input(&["chat", "--max-tokens", "2"], &format!("/docs {docs}/a.pdf\nWhy?\n")).good();
    assert!(talk.err.contains("1 document"), "{}", talk.err);
}

/// A question finds the chunks that it needs, among the documents that are given, or all that were ingested before.
#[test]
fn answers_draw_on_the_chunks_that_a_search_finds() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let sections = |about: &str| -> String {
        let section =
            |n| format!("## {about} of model {n}\n\nWords on {about} that say little. Number {n}.\n\n");
        (1..9).map(section).collect()
    };
    let brakes = sections("Brakes").replace("Number 6.", "Its lever is made of brass.");
    home.write("docs/brakes.md", format!("# Handbook\n\n{brakes}"));
    home.write("docs/lights.md", format!("# Lamps\n\n{}", sections("Lamps")));
    let docs = home.path("docs").to_str().unwrap().to_owned();
    let question = "What is the lever made of?";
    let asked = |more: &[&str]| {
        let fixed = ["ask", question, "--chunk-tokens", "64", "--max-tokens", "12", "--method", "pie"];
        [&fixed[..], more].concat().iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()
    };
    let run = |more: &[&str]| home.run(&asked(more).iter().map(String::as_str).collect::<Vec<_>>());
    run(&["--search"]).failed(1, &["there is no store at", "refrain ingest"]);
    let json = |more: &[&str]| home.json(&asked(more).iter().map(String::as_str).collect::<Vec<_>>());
    let given = json(&["--search=1", "--docs", &docs]);
    assert_eq!(given["sources"][0]["chunks"].as_array().unwrap().len(), 1, "{given}");
    assert!(given["answers"][0]["text"].as_str().unwrap().contains("brass"), "{given}");
    let added = home.json(&["ingest", &docs, "--chunk-tokens", "64", "--method", "pie"]);
    assert_eq!(added["searchable"], true);
    let kept = json(&["--search=1"]);
    assert_eq!(
        (&kept["sources"], &kept["answers"][0]["text"]),
        (&given["sources"], &given["answers"][0]["text"])
    );
    assert_eq!(kept["answers"][0]["stats"]["prefilled_chunks"], 0, "the chunk was ingested");
    let said = run(&["--search=2"]).good();
    assert!(said.err.contains("found Handbook ("), "{}", said.err);
    // Documents that were cut otherwise are found all the same.
    let all = home.json(&["ask", question, "--search", "--chunk-tokens", "96", "--max-tokens", "2"]);
    assert!(all["sources"][0]["chunks"][0]["score"].as_f64().unwrap() > 0.0);
    // Without a word in common the question is asked alone.
    let none = ["ask", "Xylophon?", "--search", "--max-tokens", "2", "--json"];
    assert_eq!(home.json(&none[..5])["sources"], json!([]));
    run(&["--search=0"]).failed(2, &["1..=64"]);

    // The list needs no model. A removed document is not found any more, and its chunks are not stored any more.
    let listed = home.json(&["documents", "ls", "--model", "none"])["documents"].clone();
    assert_eq!(listed.as_array().unwrap().len(), 2);
    let titled = |title: &str| {
        let found = listed.as_array().unwrap().iter().find(|document| document["title"] == title);
        found.unwrap_or_else(|| panic!("{listed}"))["id"].as_str().unwrap().to_owned()
    };
    let (handbook, lamps) = (titled("Handbook"), titled("Lamps"));
    let table = home.run(&["documents", "ls"]).good();
    assert!(table.out.contains(&handbook) && table.out.contains("Lamps"), "{}", table.out);
    home.run(&["documents", "rm", "doc-"]).failed(1, &["names no document", "documents ls"]);
    home.run(&["documents", "rm", "doc-none"]).failed(1, &["there is no document doc-none", "documents ls"]);
    home.run(&["documents", "rm", "--all"]).failed(1, &["nothing was removed", "--yes"]);
    let chunks = || home.json(&["store", "stats"])["disk"]["chunks"].as_u64().unwrap();
    let before = chunks();
    let sized = ["--chunk-tokens", "64"];
    let removed = home.json(&[&["documents", "rm", &handbook[..12]], &sized[..]].concat());
    assert_eq!(removed["removed"][0]["id"], handbook);
    assert!(chunks() < before);
    let found = json(&["--search=1"])["sources"].clone();
    assert!(found.as_array().unwrap().iter().all(|source| source["title"] == "Lamps"), "{found}");
    home.run(&["documents", "rm", &handbook]).failed(1, &["there is no document"]);
    assert_eq!(home.json(&["documents", "rm", "--all", "--yes"])["removed"][0]["id"], lamps);
    assert!(home.run(&["documents", "ls"]).good().out.contains("no documents in"));
}

/// The text before the documents belongs to what chunks are prefilled behind, so that it is one for all commands.
#[test]
fn what_was_ingested_is_reused_by_every_command_that_answers() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let file = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let options = ["--model", model, "--prefix", "system", "--method", "pie"];
    home.json(&[&["ingest", file], &options[..]].concat());
    let chunks = |command: &str| {
        home.json(&[&[command, "How tight?", "--docs", file, "--max-tokens", "2"], &options[..]].concat());
        home.json(&["store", "stats"])["disk"]["chunks"].as_u64().unwrap()
    };
    // The chunk, and what stands before it.
    assert_eq!((chunks("ask"), chunks("generate")), (2, 2));
}

/// Files of a folder whose extensions are not known are left out and counted, and read where they are given by name.
#[test]
fn files_of_other_kinds_are_told() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for name in ["a.md", "b.py", "b.csv", "b.yaml", "c/d.py", "c/e.rs", "NOTES"] {
        home.write(&format!("docs/{name}"), format!("The file {name}."));
    }
    let (docs, script) = (home.path("docs"), home.path("docs/b.py"));
    let ingest = |path: &PathBuf, more: &[&str]| {
        let options =
            ["ingest", path.to_str().unwrap(), "--model", model.to_str().unwrap(), "--prefix", "none"];
        home.run(&[&options, more].concat()).good()
    };
    let ran = ingest(&docs, &["--json"]);
    let told = "6 files of other kinds were left out (.csv, .py, .rs, .yaml, …): text among them is read where it is given by name";
    assert!(ran.err.contains(told), "{}", ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&report["documents"], &report["left_out"]), (&json!(1), &json!(6)));
    assert!(!ingest(&script, &[]).err.contains("left out"));
}

/// Empty files are told: a folder's by their number, and one by its path. A failed download of another kind is a failure.
#[test]
fn empty_files_are_told() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let options = ["--model", model.to_str().unwrap(), "--prefix", "none"];
    for (name, text) in [("a.md", "A bolt."), ("b.txt", ""), ("c.txt", " \n"), ("d.jsonl", "")] {
        home.write(&format!("docs/{name}"), text);
    }
    let run = |name: &str, more: &[&str]| {
        home.run(&[&["ingest", home.path(name).to_str().unwrap()], &options[..], more].concat())
    };
    let ran = run("docs", &["--json"]).good();
    assert!(ran.err.contains("3 files are empty or blank (b.txt, c.txt, d.jsonl)"), "{}", ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&report["documents"], &report["empty"]), (&json!(1), &json!(3)));
    run("docs/b.txt", &[]).failed(1, &["b.txt is empty or blank"]);
    for name in ["page.html", "scan.pdf", "letter.docx"] {
        home.write(name, "");
        run(name, &[]).failed(1, &["has no text: the file is empty"]);
    }
}

/// A file that is named twice, or lies in a folder that is named too, is one document; and so is one that a chat has already.
#[test]
fn a_file_that_several_paths_lead_to_is_read_once() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let options = ["--model", model.to_str().unwrap(), "--prefix", "none"];
    let file = home.write("docs/bolts.md", "A stem bolt is tightened to 5 Nm.");
    let (docs, file) = (home.path("docs"), file.to_str().unwrap());
    let ran = home.run(&[&["ingest", docs.to_str().unwrap(), file, file], &options[..]].concat()).good();
    assert!(
        ran.out.starts_with("1 document in 1 chunk") && !ran.err.contains("holds no"),
        "{}{}",
        ran.out,
        ran.err
    );
    let lines = format!("/docs {file}\n/docs {file}\n");
    let ran = home.run_with_input(&[&["chat"], &options[..]].concat(), &lines).good();
    assert!(ran.err.contains("already there: 1 document"), "{}", ran.err);
    assert!(!ran.err.contains("2 documents"), "{}", ran.err);
}

/// An answer without documents says so where some are stored, and a number apart from `--search` is told where it belongs.
#[test]
fn a_question_without_documents_is_told_of_the_stored_ones() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let file = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let options = ["--model", model, "--prefix", "none", "--max-tokens", "2"];
    let told = |more: &[&str]| {
        let ran = home.run(&[&["ask", "How tight?"], &options[..], more].concat()).good();
        ran.err.contains("answered without documents: --search draws on the stored ones")
    };
    assert!(!told(&[]));
    home.json(&[&["ingest", file], &options[..4]].concat());
    assert_eq!((told(&[]), told(&["--search"]), told(&["--docs", file])), (true, false, false));
    assert!(!told(&["--credential", "another"]), "documents of another namespace");
    home.run(&["ask", "--search", "3", "How tight?"]).failed(2, &["tip: write --search=3"]);
}

/// A chat draws on the stored documents when it is asked to, each question on the chunks that match it.
#[test]
fn a_chat_searches_the_stored_documents() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    home.write("docs/bolts.md", "# Bolts\n\nA stem bolt is tightened to 5 Nm.");
    home.write("docs/tyres.md", "# Tyres\n\nA tyre takes 6 bar.");
    let docs = home.path("docs");
    let options = ["--model", model.to_str().unwrap(), "--prefix", "none"];
    home.run(&[&["chat", "--search"], &options[..]].concat()).failed(1, &["there is no store at"]);
    home.json(&[&["ingest", docs.to_str().unwrap()], &options[..]].concat());
    let chat = ["chat", "--max-tokens", "2", "--json"];
    let lines = "A bolt?\n/search 1\nA bolt?\nA tyre?\n/search off\nA tyre?\n";
    let ran = home.run_with_input(&[&chat, &options[..]].concat(), lines).good();
    let titles = ran.out.lines().map(|line| {
        let answer: serde_json::Value = serde_json::from_str(line).unwrap();
        answer["sources"].as_array().map(|all| all.iter().map(|one| one["title"].clone()).collect::<Vec<_>>())
    });
    let of = |title: &str| Some(vec![json!(title)]);
    assert_eq!(titles.collect::<Vec<_>>(), [None, of("Bolts"), of("Tyres"), None]);
    assert!(ran.err.contains("the stored documents searched for 1 chunk"), "{}", ran.err);
    home.run_with_input(&[&chat, &options[..]].concat(), "/search 65\n").failed(1, &["give 1 to 64, or off"]);
}

/// A chat that searches its documents prefills only the chunks that its answers draw on, and all chunks when the documents stand in the prompt.
#[test]
fn a_chat_prefills_what_its_answers_draw_on() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    home.write("docs/bolts.md", "# Bolts\n\nA stem bolt is tightened to 5 Nm.");
    home.write("docs/tyres.md", "# Tyres\n\nA tyre takes 6 bar.");
    let docs = home.path("docs");
    let options = ["--model", model.to_str().unwrap(), "--prefix", "none", "--method", "pie"];
    let chat = |tokens: &str, lines: &str| {
        let words = ["chat", "--docs", docs.to_str().unwrap(), "--search=1", "--max-tokens", tokens];
        home.run_with_input(&[&words, &options[..]].concat(), lines)
    };
    let labels = || {
        let listed = home.json(&["store", "ls"])["chunks"].clone();
        let labels =
            listed.as_array().unwrap().iter().map(|chunk| chunk["label"].as_str().unwrap().to_owned());
        labels.filter(|label| ["Bolts", "Tyres"].contains(&label.as_str())).collect::<Vec<_>>()
    };
    chat("2", "A bolt?\n").good();
    assert_eq!(labels(), ["Bolts"]);
    chat("2", "/search off\n").good();
    assert_eq!(labels().len(), 2);
    let given = ["start the chat again with --max-tokens", "search for fewer chunks with /search N"];
    chat("100000", "A bolt?\n").failed(1, &given);
}

/// An unknown command stops a script, so that no later line gets the answer of another. --quiet shows replies to commands.
#[test]
fn a_chat_refuses_unknown_commands_and_shows_its_help() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let chat = ["chat", "--quiet", "--model", model.to_str().unwrap(), "--prefix", "none", "--method", "pie"];
    let ran = home.run_with_input(&chat, "/help\n/method\n").good();
    assert!(ran.err.contains("/method NAME") && ran.err.contains("with pie"), "{}", ran.err);
    let ran = home.run_with_input(&chat, "/metod vanilla\nWhy?\n");
    assert_eq!(ran.failed(1, &["there is no command /metod", "hint: /help lists"]).out, "");
}

/// The default of --max-tokens is cut to the room that the context leaves for an answer.
#[test]
fn a_chat_answers_as_long_as_the_context_has_room() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let chat = ["chat", "--json", "--model", model.to_str().unwrap(), "--prefix", "none"];
    let ran = home.run_with_input(&chat, &format!("{}\n", "bolt ".repeat(80))).good();
    let answer: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    let room = 512 - answer["stats"]["prompt_tokens"].as_u64().unwrap();
    let said = format!("the context has room for {room} tokens of this answer; ask a shorter question");
    assert!(ran.err.contains(&said), "{said}: {}", ran.err);
}

/// A new conversation has no room for a question that is longer than the context.
#[test]
fn a_chat_advises_what_makes_room() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let chat = ["chat", "--max-tokens", "100", "--model", model.to_str().unwrap(), "--prefix", "none"];
    let said = |questions: &[usize]| {
        let lines: String = questions.iter().map(|words| format!("{}\n", "bolt ".repeat(*words))).collect();
        home.run_with_input(&chat, &lines).failed(1, &["context is 512"]).err
    };
    let long = said(&[1, 600]);
    assert!(long.contains("ask a shorter question") && !long.contains("/new"), "{long}");
    let together = said(&[60, 60, 60]);
    assert!(together.contains("/new forgets what was said"), "{together}");
}

/// An answer that --max-tokens ends says so, and warns where it may lack a part of its form.
#[test]
fn an_answer_that_is_cut_says_so() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for command in ["ask", "generate"] {
        let run = |more: &[&str]| {
            let words = [command, "How tight?", "--model", model.to_str().unwrap(), "--prefix", "none"];
            home.run(&[&words, more].concat()).good().err
        };
        let said = run(&["--max-tokens", "3"]);
        assert!(
            said.contains("; ended after 3 tokens by --max-tokens") && !said.contains("warning"),
            "{said}"
        );
        let form = ["--regex", "[a-z]{40}", "--quiet"];
        let said = run(&[&form[..], &["--max-tokens", "3"]].concat());
        assert!(said.starts_with("warning: the answer was ended by --max-tokens 3"), "{said}");
        assert_eq!(run(&[&form[..], &["--max-tokens", "60"]].concat()), "");
        let whole = run(&["--choice", "yes", "--max-tokens", "60"]);
        assert!(whole.contains("TTFT") && !whole.contains("--max-tokens"), "{whole}");
    }
}

/// An edited file is another document, and searches find the older one until it is removed.
#[test]
fn an_edited_document_is_told_beside_the_older_one() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let ingest = |torque: &str| {
        let file = home.write("bolts.md", format!("# Bolts\n\nA stem bolt is tightened to {torque} Nm."));
        let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
        home.run(&["ingest", file, "--model", model, "--prefix", "none"]).good().err
    };
    let said = "if its text is an older one";
    let first = ingest("5");
    assert!(!first.contains(said) && !ingest("5").contains(said), "{first}");
    let old = home.json(&["documents", "ls"])["documents"][0]["id"].as_str().unwrap().to_owned();
    let second = ingest("6");
    assert!(second.contains(said) && second.contains(&format!("`refrain documents rm {old}`")), "{second}");
}

/// TTFT leaves out the prefill that the answer waited for, so that the statistics name it; an answer from stored chunks waited for none.
#[test]
fn statistics_name_the_prefill_before_the_first_token() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let model = model.to_str().unwrap();
    for command in ["ask", "generate"] {
        let file =
            home.write(&format!("{command}.md"), format!("A stem bolt of {command} is tightened to 5 Nm."));
        let docs = ["--docs", file.to_str().unwrap(), "--max-tokens", "2", "--method", "pie"];
        let words = [&[command, "How tight?", "--model", model, "--prefix", "none"], &docs[..]].concat();
        let waited = || home.run(&words).good().err.contains(" compute), after ");
        assert_eq!((waited(), waited()), (true, false), "{command}");
    }
    // An answer that reuses no chunk waits for none.
    let file = home.write("compared.md", "A crank bolt is tightened to 40 Nm.");
    let compare = ["ask", "How tight?", "--model", model, "--prefix", "none", "--compare", "vanilla;pie"];
    let ran =
        home.run(&[&compare, &["--docs", file.to_str().unwrap(), "--max-tokens", "2"][..]].concat()).good();
    let waited = |method: &str| {
        let line = ran.err.lines().find(|line| line.starts_with(method));
        line.unwrap_or_else(|| panic!("{}", ran.err)).contains(" compute), after ")
    };
    assert_eq!((waited("vanilla: "), waited("pie: ")), (false, true));
}

/// A script whose variable is empty must not remove the only document that there is.
#[test]
fn an_id_without_a_digit_removes_no_document() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let file = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    home.json(&["ingest", file, "--model", model, "--prefix", "none"]);
    let listed = || home.json(&["documents", "ls"])["documents"].as_array().unwrap().clone();
    for name in ["", "d", "doc", "doc-"] {
        home.run(&["documents", "rm", name, "--model", model])
            .failed(1, &["names no document: give doc-", "refrain documents ls"]);
        assert_eq!(listed().len(), 1, "{name:?}");
    }
    let id = listed()[0]["id"].as_str().unwrap()[..5].to_owned();
    assert_eq!(
        home.json(&["documents", "rm", &id, "--model", model])["removed"].as_array().unwrap().len(),
        1
    );
}

/// A removal that could not delete a chunk is finished by the same command, though the document is not listed any more.
#[test]
fn a_removal_that_was_interrupted_is_finished_by_its_id() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let file = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let (model, file) = (model.to_str().unwrap(), file.to_str().unwrap());
    let listed = || home.json(&["documents", "ls"])["documents"].as_array().unwrap().clone();
    let interrupted = || {
        home.json(&["ingest", file, "--model", model, "--prefix", "none"]);
        let id = listed()[0]["id"].as_str().unwrap().to_owned();
        let chunk = home.chunk_files().remove(0);
        std::fs::remove_file(&chunk).unwrap();
        std::fs::create_dir_all(chunk.join("in the way")).unwrap();
        home.run(&["documents", "rm", &id, "--model", model]).failed(1, &["the chunk store's folder"]);
        assert!(listed().is_empty());
        std::fs::remove_dir_all(&chunk).unwrap();
        id
    };
    let id = interrupted();
    let rm = ["documents", "rm", &id, &id, "--model", model];
    assert!(home.run(&rm).good().out.contains("removed 1 document\n"));
    home.run(&rm).failed(1, &["there is no document"]);
    assert_eq!(interrupted(), id);
    assert_eq!(home.json(&rm), json!({ "removed": [], "finished": [id] }));
}

/// Two stores share an object store in a third folder: documents ingested in one are listed, found and removed in the other.
#[test]
fn documents_are_shared_through_the_object_store() {
    let home = Home::new();
    home.write("docs/brakes.md", "# Brakes\n\nA brake lever is made of brass.");
    home.write("docs/lamps.md", "# Lamps\n\nA lamp is made of glass.");
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let (model, docs) = (model.to_str().unwrap().to_owned(), home.path("docs").to_str().unwrap().to_owned());
    let remote = format!("file://{}", home.path("bucket").display());
    home.write("bucket/.keep", "");
    let in_folder = |folder: &str, words: &[&str]| {
        let folder = home.path(folder).to_str().unwrap().to_owned();
        // A busy machine may be slow.
        let patient = ["--remote-timeout", "60s", "--remote-policy", "fetch"];
        let more = ["--model", &model, "--remote", &remote, "--store", &folder, "--prefix", "none"];
        home.run(&[words, &more, &patient].concat())
    };
    let json = |folder: &str, words: &[&str]| -> serde_json::Value {
        let ran = in_folder(folder, &[words, &["--json"]].concat()).good();
        assert!(!ran.err.contains("warning"), "{}", ran.err);
        serde_json::from_str(&ran.out).unwrap()
    };
    let listed = |folder: &str| json(folder, &["documents", "ls"])["documents"].as_array().unwrap().clone();
    let added = json("one", &["ingest", &docs, "--method", "pie"]);
    assert_eq!((&added["searchable"], &added["unpublished"]), (&json!(true), &json!(0)));
    let titles: Vec<_> = listed("two").iter().map(|document| document["title"].clone()).collect();
    assert!(titles.len() == 2 && titles.contains(&json!("Brakes")), "{titles:?}");
    let ask = ["ask", "What is a lever made of?", "--search=1", "--method", "pie", "--max-tokens", "2"];
    let (there, here) = (json("two", &ask), json("one", &ask));
    assert_eq!(there["sources"], here["sources"]);
    assert_eq!(there["sources"][0]["title"], "Brakes");
    assert_eq!(there["answers"][0]["text"], here["answers"][0]["text"]);
    assert_eq!(there["answers"][0]["stats"]["prefilled_chunks"], 0);
    // Another folder that shares chunks alone knows of none.
    let alone = ["documents", "ls", "--sync-interval", "off"];
    assert_eq!(json("three", &alone)["documents"], json!([]));
    in_folder("three", &["documents", "ls", "--sync-interval", "0s"]).failed(2, &["above 0, or off"]);

    let brakes = there["sources"][0]["id"].as_str().unwrap();
    assert_eq!(json("two", &["documents", "rm", brakes])["removed"][0]["id"], brakes);
    assert_eq!(listed("one").len(), 1);
    assert_eq!(listed("one"), listed("two"));
    assert!(json("one", &ask)["sources"].as_array().unwrap().iter().all(|source| source["id"] != brakes));
    // While the object store is away, the store's own documents are listed, and a new document is kept.
    home.write("further.md", "# Bells\n\nA bell is made of bronze.");
    let further = home.path("further.md").to_str().unwrap().to_owned();
    std::fs::rename(home.path("bucket"), home.path("away")).unwrap();
    std::fs::write(home.path("bucket"), "").unwrap();
    let ran = in_folder("one", &["ingest", &further, "--method", "pie", "--json"]).good();
    assert!(ran.err.contains("1 document not shared yet"), "{}", ran.err);
    let ran = in_folder("one", &["documents", "ls"]).good();
    assert!(
        ran.err.contains("the documents that this machine knows") && ran.out.contains("Bells"),
        "{}",
        ran.err
    );
    std::fs::remove_file(home.path("bucket")).unwrap();
    std::fs::rename(home.path("away"), home.path("bucket")).unwrap();
    // A listing and a search read: neither that document nor one of a folder that was never shared goes to the others with them.
    assert_eq!(listed("one").len(), 2);
    let own = home.path("own").to_str().unwrap().to_owned();
    home.json(&["ingest", &further, "--model", &model, "--prefix", "none", "--store", &own]);
    for command in [&["documents", "ls"][..], &ask] {
        json("one", command);
        json("own", command);
    }
    assert_eq!(listed("two").len(), 1);
    json("one", &["ingest", &further, "--method", "pie"]);
    assert_eq!(listed("two").len(), 2);
}

#[test]
fn a_beginning_of_several_ids_is_told_with_them() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    // Ids begin with one of 16 digits, so that two of 17 begin alike.
    for number in 0..17 {
        home.write(&format!("docs/{number}.md"), format!("Page {number}."));
    }
    home.run(&["ingest", home.path("docs").to_str().unwrap()]).good();
    let listed = home.json(&["documents", "ls"])["documents"].clone();
    let mut ids: Vec<&str> =
        listed.as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    let pair = ids.windows(2).find(|pair| pair[0][..5] == pair[1][..5]).unwrap();
    home.run(&["documents", "rm", &pair[0][..5]]).failed(1, &[pair[0], pair[1], "give more digits"]);
}
