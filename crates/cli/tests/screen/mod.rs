//! Screens of a terminal: progress, tables, and what Ctrl-C leaves.

use std::io::Read;

use refrain::corpus::LocalDocuments;

use super::*;

impl Home {
    /// The last screen of a command at a terminal of `columns` columns. Ctrl-C is sent once the regular expression `stop` is found; an
    /// empty one sends none.
    fn screen(&self, columns: usize, stop: &str, words: &[&str]) -> Ran {
        self.screen_of(columns, stop, &[&[env!("CARGO_BIN_EXE_refrain")], words].concat())
    }

    /// The last screen of any program.
    fn screen_of(&self, columns: usize, stop: &str, program: &[&str]) -> Ran {
        let mut terminal = Command::new(serve::python());
        let script = book::root().join("tests/e2e/screen.py");
        self.settle(&mut terminal).arg(script).args([&columns.to_string(), stop]).args(program);
        Ran::of(terminal.output().unwrap())
    }
}

#[test]
fn progress_leaves_nothing_on_the_screen_and_fits_it() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let docs = docs.to_str().unwrap();
    let words =
        ["tune", docs, "--samples", "1", "--max-tokens", "4", "--methods", "pie", "--prefixes", "averaged"];
    for shown in [home.screen(80, "", &words), home.screen(80, "", &["ingest", docs])] {
        let shown = shown.good().out;
        for debris in ["loading the model", "hashing", "━", "⏎"] {
            assert!(!shown.contains(debris), "{debris}: {shown}");
        }
    }
}

#[test]
fn a_stopped_ingest_keeps_what_is_whole_and_says_so() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    home.write("docs/a.md", BOLTS);
    home.write("docs/b.md", (0..600).map(|i| format!("{CHAINS}Page {i}.\n\n")).collect::<String>());
    let docs = home.path("docs");
    let words = ["ingest", docs.to_str().unwrap(), "--prefix", "none"];
    let stopped = || home.screen(80, r"\d{4}/\d+ tokens", &words).failed(130, &[]).out;
    let shown = stopped();
    assert!(shown.contains("stopped; ") && shown.contains("1 document is whole"), "{shown}");
    // The terminal's own ^C moves the cursor away from the bar, which stays with all that it said on one row.
    assert!(shown.lines().any(|row| row.starts_with("ingesting") && row.contains(" left")), "{shown}");
    assert_eq!(home.json(&["documents", "ls"])["documents"].as_array().unwrap().len(), 1);
    // Another program has the documents.
    let _documents = LocalDocuments::open(Some(&home.path("data/refrain/chunks")), u64::MAX).unwrap();
    let shown = stopped();
    assert!(shown.contains("does not find these documents") && shown.contains("stopped; "), "{shown}");
}

#[test]
fn a_server_shows_the_ingest_of_its_documents_and_says_what_a_stopped_one_keeps() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    home.write("docs/a.md", (0..600).map(|i| format!("{CHAINS}Page {i}.\n\n")).collect::<String>());
    let docs = home.path("docs");
    let words = ["serve", "--port", "0", "--docs", docs.to_str().unwrap(), "--prefix", "none"];
    let shown = home.screen(80, r"\d{4}/\d+ tokens", &words).good().out;
    assert!(shown.contains("stopped; ") && shown.contains("of the documents"), "{shown}");
    assert!(!home.chunk_files().is_empty());
}

#[test]
fn a_stopped_text_ends_with_its_statistics() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let words =
        ["generate", "Count to a thousand.", "--ignore-eos", "--evict", "full", "--max-tokens", "4000"];
    let shown = home.screen(80, r"\d{2} tokens  ", &words).failed(130, &[]).out;
    assert!(shown.contains("prompt tokens; TTFT"), "{shown}");
    assert!(!shown.contains("tokens/s  KV"), "{shown}");
}

/// SIGTERM stops a text as Ctrl-C does.
#[cfg(unix)]
#[test]
fn a_terminated_text_ends_with_its_statistics() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let words = ["generate", "Count to a thousand.", "--ignore-eos", "--max-tokens", "4000"];
    let mut command = home.command(&words);
    let mut text = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    text.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let sent = Command::new("kill").args(["-TERM", &text.id().to_string()]).status().unwrap();
    assert!(sent.success());
    Ran::of(text.wait_with_output().unwrap()).failed(130, &["prompt tokens; TTFT"]);
}

/// A question is seen wherever standard output goes.
#[cfg(unix)]
#[test]
fn a_question_is_asked_at_the_terminal() {
    let home = Home::new();
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let docs = home.write("docs/bolts.md", "A stem bolt is tightened to 5 Nm.");
    let ingest = ["ingest", docs.to_str().unwrap(), "--model", model.to_str().unwrap(), "--prefix", "none"];
    home.run(&ingest).good();
    let removed = home.path("removed.txt");
    let script = r#"exec timeout --foreground 20 "$0" store rm --all > "$1""#;
    let program = ["sh", "-c", script, env!("CARGO_BIN_EXE_refrain"), removed.to_str().unwrap()];
    let ran = home.screen_of(80, r"\[y/N\]", &program);
    assert!(ran.out.contains("remove 1 chunk") && ran.code != 0, "{} {}", ran.code, ran.out);
    assert_eq!((std::fs::read(&removed).unwrap().len(), home.chunk_files().len()), (0, 1));
}

/// Names of files are shown without the control characters that they may have.
#[test]
fn errors_fit_a_terminal_and_control_nothing() {
    let home = Home::new();
    let missing = format!("{}bolts\u{1b}[2J.md", "a long name of a file ".repeat(6));
    let shown = home.screen(80, "", &["ingest", &missing]).failed(1, &[]).out;
    assert!(
        shown.contains("error: there is no file or folder a long name") && !shown.contains('⏎'),
        "{shown}"
    );
    let said = home.run(&["ingest", &missing]).failed(1, &["bolts [2J.md"]).err;
    assert!(said.lines().count() == 1 && !said.contains('\u{1b}'), "{said}");
    // Causes and hints as well.
    let config = home.write("broken\u{1b}[2J.toml", "threads = \"two\"");
    let said = home.run(&["methods", "--config", config.to_str().unwrap()]).failed(2, &["because: "]).err;
    assert!(!said.contains('\u{1b}'), "{said}");
    let shown = home.screen(80, "", &["ask", "why", "--model", "nothing.gguf"]).failed(1, &[]).out;
    assert!(shown.contains("hint: known names are ") && !shown.contains('⏎'), "{shown}");
}

#[test]
fn lists_fit_a_terminal_and_break_no_word() {
    let home = Home::new();
    for words in [&["models"][..], &["methods"], &["methods", "inf_llm"], &["eval", "fetch"]] {
        let shown = home.screen(80, "", words).good().out;
        assert!(!shown.contains('⏎'), "{words:?}: {shown}");
    }
    let shown = home.screen(80, "", &["eval", "fetch"]).out;
    assert!(shown.contains("https://huggingface.co/datasets/THUDM/LongBench\n"), "{shown}");
}
