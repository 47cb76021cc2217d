//! Options wherever they are given: those that need or exclude each other, and paths that are no text.

use super::*;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama");

impl Home {
    /// Runs with the environment variables.
    fn run_with(&self, variables: &[(&str, &str)], words: &[&str]) -> Ran {
        Ran::of(self.command(words).envs(variables.iter().copied()).output().unwrap())
    }

    fn configure(&self, text: &str) {
        self.write("config/refrain/config.toml", text);
    }
}

#[test]
fn an_option_of_the_configuration_file_needs_what_one_of_the_command_line_does() {
    let home = Home::new();
    let serve = |more: &[&str]| home.run(&[&["serve", "--model", "nothing.gguf"], more].concat());
    home.configure("[serve]\nssl-certfile = \"cert.pem\"\n");
    serve(&[]).failed(2, &["--ssl-certfile of the configuration file needs --ssl-keyfile", "hint: give"]);
    serve(&["--ssl-keyfile", "key.pem"]).failed(1, &["nothing.gguf"]);
    home.configure("[serve]\nmetrics_auth = true\n");
    serve(&[]).failed(2, &["--metrics-auth of the configuration file needs --api-key-file"]);
    serve(&["--metrics-auth=false"]).failed(1, &["nothing.gguf"]);
    home.configure("[serve]\napi-key-file = \"keys\"\n[eval.run]\njudge = \"http://127.0.0.1:9/v1\"\n");
    serve(&["--metrics-auth"]).failed(1, &["nothing.gguf"]);
    let eval = ["eval", "run", "--tasks", "needle", "--model", "nothing.gguf"];
    home.run(&[&eval[..], &["--judge-model", "m"]].concat()).failed(1, &["nothing.gguf"]);
    home.configure("");
    home.run(&[&eval[..], &["--judge-model", "m"]].concat()).failed(2, &["--judge-model needs --judge"]);
    serve(&["--ssl-keyfile", "key.pem"]).failed(2, &["--ssl-keyfile needs --ssl-certfile"]);
}

#[test]
fn a_variable_stops_no_command_that_has_no_use_for_it() {
    let home = Home::new();
    let serve = ["serve", "--model", "nothing.gguf"];
    home.run_with(&[("REFRAIN_METRICS_AUTH", "false")], &serve).failed(1, &["nothing.gguf"]);
    home.run_with(&[("REFRAIN_METRICS_AUTH", "true")], &serve)
        .failed(2, &["--metrics-auth of the environment variable REFRAIN_METRICS_AUTH needs --api-key-file"]);
    let eval = ["eval", "run", "--tasks", "needle", "--model", "nothing.gguf"];
    home.run_with(&[("REFRAIN_JUDGE_MODEL", "m")], &eval).failed(1, &["nothing.gguf"]);
    let forget = ["tune", "--forget", "--model", "nothing.gguf"];
    home.run_with(&[("REFRAIN_SAMPLES", "5"), ("REFRAIN_METHODS", "pie")], &forget)
        .failed(1, &["nothing.gguf"]);
    home.run_with(&[], &[&forget[..], &["--samples", "5"]].concat())
        .failed(2, &["--forget cannot be used with --samples"]);
}

#[test]
fn of_options_that_exclude_each_other_the_strongest_source_decides() {
    let home = Home::new();
    let ask = ["ask", "why", "--model", TINY, "--prefix", "none", "--max-tokens", "8"];
    home.configure("[ask]\nchoice = [\"yes\"]\n");
    let said = home.run(&ask).good().out;
    assert_eq!(said.trim(), "yes");
    // The expression is read, and the choice is not.
    home.run(&[&ask[..], &["--regex", "("]].concat()).failed(2, &["grammar"]);
    home.run_with(&[("REFRAIN_REGEX", "(")], &ask).failed(2, &["grammar"]);
    let said = home.run_with(&[("REFRAIN_REGEX", "(")], &[&ask[..], &["--choice", "no"]].concat()).good().out;
    assert_eq!(said.trim(), "no");
    home.run(&[&ask[..], &["--regex", "a", "--json-object"]].concat())
        .failed(2, &["--json-object cannot be used with --regex", "leave one of them out"]);
    home.run_with(&[("REFRAIN_REGEX", "a"), ("REFRAIN_GRAMMAR", "b")], &ask)
        .failed(2, &["variable REFRAIN_REGEX cannot be used with --grammar of the environment"]);
    home.configure("[ask]\nchoice = [\"yes\"]\nregex = \"a\"\n");
    home.run(&ask).failed(2, &["--regex of the configuration file cannot be used with --choice"]);
    home.configure("[bench.serve]\nkeys = 2\n");
    let bench = ["bench", "serve", "--model", TINY, "--url", "http://127.0.0.1:9"];
    home.run(&bench).failed(1, &["127.0.0.1:9"]);
    home.run(&[&bench[..], &["--keys", "2"]].concat()).failed(2, &["--url cannot be used with --keys"]);
}

#[test]
fn a_store_that_cannot_be_made_is_told_with_the_option_that_names_another() {
    let home = Home::new();
    let file = home.write("notes.txt", "notes");
    for store in [file.clone(), file.join("below")] {
        let words = ["ask", "why", "--model", TINY, "--prefix", "none", "--store", store.to_str().unwrap()];
        home.run(&words).failed(1, &["a file of this name is there", "hint: --store names another folder"]);
    }
}

/// No shell expands the home folder in a variable.
#[test]
fn the_home_folder_stands_for_a_tilde() {
    let home = Home::new();
    let folder = home.path("");
    let variables = [("HOME", folder.to_str().unwrap()), ("REFRAIN_STORE", "~/chunks")];
    home.run_with(&variables, &["store", "ls"]).failed(1, &["there is no store at ~/chunks"]);
    let file = home.write("bolts.md", "A stem bolt is tightened to 5 Nm.");
    let ingest = ["ingest", file.to_str().unwrap(), "--model", TINY, "--prefix", "none"];
    home.run_with(&variables, &ingest).good();
    assert!(home.path("chunks").is_dir());
}

/// The method was chosen behind a prefix of its own, of which its reason says how near to vanilla answers are.
#[test]
fn statistics_name_the_prefix_that_chunks_lie_behind() {
    let home = Home::new();
    let ask = ["ask", "why", "--model", TINY, "--max-tokens", "1"];
    let chosen = home.run(&ask).good().err;
    assert!(chosen.contains("\ndrift:charge=0.3 behind prefix averaged: near vanilla"), "{chosen}");
    let given = home.run(&[&ask[..], &["--prefix", "none"]].concat()).good().err;
    let said = "\ndrift:charge=0.3 behind prefix none: chosen behind prefix averaged, near vanilla";
    assert!(given.contains(said), "{given}");
}

/// Options that are part of a chunk's name say that other values share nothing.
#[test]
fn helps_tell_which_options_commands_that_share_chunks_have_in_common() {
    let help = Home::new().run(&["ingest", "--help"]).good().out;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for name in ["prefix", "chunk-tokens", "left-tokens", "store-dtype", "kv", "compute", "strict-numerics"] {
        let (_, text) = help.split_once(&format!(" --{name}")).unwrap();
        let text = text.split(" --").next().unwrap();
        assert!(text.contains("Commands that share chunks need the same"), "{name}: {text}");
    }
}

/// Paths that are no UTF-8 are taken as they are, and JSON has their text.
#[cfg(unix)]
#[test]
fn paths_need_not_be_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    let home = Home::new();
    let run = |words: &[&str], last: &[u8]| {
        Ran::of(home.command(words).arg(OsStr::from_bytes(last)).output().unwrap())
    };
    run(&["methods"], b"--config=nowhere\xff.toml").failed(2, &["cannot read", "nowhere"]);
    let listed: Value =
        serde_json::from_str(&run(&["models", "--json", "--models"], b"m\xff").good().out).unwrap();
    assert!(listed[0]["path"].as_str().unwrap().starts_with('m'), "{listed}");
}
