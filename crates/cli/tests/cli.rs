//! The built program, as a person or a script runs it.

mod bench;
mod book;
mod device;
mod documents;
mod eval;
mod eviction;
mod install;
#[cfg(feature = "remote")]
mod job;
#[path = "../../../tests/common/needs.rs"]
mod needs;
mod options;
#[path = "../../../tests/common/ports.rs"]
mod ports;
mod pull;
mod screen;
mod serve;
mod sparse;
mod store;
mod streams;
mod tune;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Reads a request whose body is JSON. The body ends its JSON, and nothing before does.
fn read_json_request(stream: &mut std::net::TcpStream) {
    let mut request = Vec::new();
    while !request.ends_with(b"}") {
        let mut part = [0; 1024];
        let read = std::io::Read::read(stream, &mut part).unwrap();
        request.extend(&part[..read]);
    }
}

/// A home of its own: no configuration, an empty store.
struct Home {
    folder: TempDir,
}

impl Home {
    fn new() -> Home {
        Home { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_refrain"));
        self.settle(&mut command).args(words);
        command
    }

    /// Gives a command this home, and none of the tester's own settings and input.
    fn settle<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("REFRAIN_"))
        {
            command.env_remove(name);
        }
        for (name, folder) in [("XDG_CONFIG_HOME", "config"), ("XDG_DATA_HOME", "data"), ("HF_HOME", "hub")] {
            command.env(name, self.path(folder));
        }
        for name in ["HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN", "SSL_CERT_DIR", "SSL_CERT_FILE"] {
            command.env_remove(name);
        }
        command.env_remove("NO_COLOR").env("REFRAIN_MODELS", models()).stdin(Stdio::null())
    }

    fn run(&self, words: &[&str]) -> Ran {
        Ran::of(self.command(words).output().unwrap())
    }

    /// Runs with `input` on standard input, to its end.
    fn run_with_input(&self, words: &[&str], input: &str) -> Ran {
        let mut child = self
            .command(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        Ran::of(child.wait_with_output().unwrap())
    }

    /// Runs with `--json`, and reads it.
    fn json(&self, words: &[&str]) -> Value {
        let words: Vec<&str> = words.iter().copied().chain(["--json"]).collect();
        serde_json::from_str(&self.run(&words).good().out).unwrap()
    }

    /// Files of chunks and of what methods keep beside them.
    fn chunk_files(&self) -> Vec<PathBuf> {
        fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, found);
                } else if path.extension().is_some_and(|e| e == "safetensors" || e == "summary") {
                    found.push(path);
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.path("data/refrain/chunks"), &mut found);
        found.sort();
        found
    }
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    fn of(output: Output) -> Ran {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let ran =
            Ran { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) };
        assert!(!ran.err.contains("panicked"), "{}", ran.err);
        ran
    }

    fn good(self) -> Ran {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self
    }

    /// It failed with this exit code and named all of these.
    fn failed(self, code: i32, named: &[&str]) -> Ran {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        for name in named {
            assert!(self.err.contains(name), "'{name}' is not in: {}", self.err);
        }
        self
    }
}

/// Folder of the models, before this test changes the environment of the program.
fn models() -> PathBuf {
    let named = std::env::var_os("REFRAIN_MODELS").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    named.unwrap_or_else(|| std::env::home_dir().unwrap().join(".cache/refrain/models"))
}

/// Whether tests on a real model can run; notes it if not.
fn real_model() -> bool {
    needs::real_model("SmolLM2-135M-Instruct.Q4_1.gguf").is_some()
}

const BOLTS: &str = "# Torque\n\nA stem bolt of a bicycle is tightened to 5 Nm. A seat post clamp takes 7 Nm, and a \
crank bolt takes 40 Nm. Carbon parts need carbon paste, and never more than the torque printed on them. Use a torque \
wrench that was calibrated within the last two years, and turn it slowly until it clicks once.\n";
const CHAINS: &str = "# Chains\n\nA waxed chain runs 300 km between treatments, an oiled one 200 km. Measure wear with a \
gauge: change a chain of eleven speeds at 0.5 percent. A new chain on worn sprockets skips under load.\n";

/// A home with two documents in `docs`.
fn home_with_documents() -> Home {
    let home = Home::new();
    home.write("docs/bolts.md", BOLTS);
    home.write("docs/chains.md", CHAINS);
    home
}

#[test]
fn every_command_has_help_with_examples_and_global_options() {
    let home = Home::new();
    for command in [
        "pull",
        "ingest",
        "tune",
        "calibrate",
        "ask",
        "chat",
        "generate",
        "store",
        "bench ttft",
        "bench decode",
        "bench memory",
        "methods",
        "completions",
        "man",
        "health",
    ] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let help = home.run(&words).good().out;
        assert!(help.contains("Examples:") && help.contains("--model <MODEL>"), "{command}: {help}");
    }
    #[cfg(feature = "remote")]
    for command in ["job", "job plan ingest", "job plan eval", "job run", "job status", "job results"] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        assert!(home.run(&words).good().out.contains("Examples:"), "{command}");
    }
    for command in ["stats", "ls", "show", "rm", "verify", "gc", "pin", "export", "import"] {
        home.run(&["store", command, "--help"]).good();
    }
    // Every option of a method is told where the method is.
    let methods = refrain::fusion::METHODS.entries.iter().map(|entry| (entry.name, entry.options()));
    let policies = refrain::eviction::POLICIES.entries.iter().map(|entry| (entry.name, entry.options()));
    for (name, options) in methods.chain(policies) {
        let shown = home.run(&["methods", name]).good().out;
        for option in options {
            let first = option.help.split(' ').next().unwrap();
            assert!(
                shown.contains(&option.name) && shown.contains(first),
                "{name}: {}: {shown}",
                option.name
            );
        }
    }
    assert!(home.run(&["--version"]).good().out.starts_with("refrain "));
    home.run(&[]).failed(2, &["Usage"]);
    home.run(&["dance"]).failed(2, &["dance"]);
    home.run(&["list"]).failed(2, &["`refrain documents ls`"]);
    home.run(&["run"]).failed(2, &["`refrain ask`"]);
    home.run(&["store", "list"]).failed(2, &["`refrain store ls`"]);
    for words in [["bench", "run"], ["key", "list"]] {
        let said = home.run(&words).failed(2, &["unrecognized subcommand"]).err;
        assert!(!said.contains("`refrain "), "{words:?}: {said}");
    }
    // Variables that are set change nothing of what is asked for.
    let with_variables =
        |words: &[&str]| Ran::of(home.command(words).env("REFRAIN_STORE", "chunks").output().unwrap());
    with_variables(&[]).failed(2, &["Commands:", "Usage: refrain [OPTIONS] <COMMAND>"]);
    with_variables(&["store"]).failed(2, &["Commands:"]);
    with_variables(&["ingest"]).failed(2, &["Usage: refrain ingest <PATH>..."]);
    with_variables(&["store", "rm"]).failed(2, &["`refrain store ls`"]);
    for (command, list) in [
        (&["store", "rm"][..], "`refrain store ls`"),
        (&["store", "pin"], "`refrain store ls`"),
        (&["documents", "rm"], "`refrain documents ls`"),
        (&["pull"], "`refrain pull --list`"),
    ] {
        home.run(command).failed(2, &["required arguments", list]);
    }
}

/// The help of a command, and of all commands below it.
fn helps(home: &Home, command: &[&str]) -> Vec<String> {
    let help = home.run(&[command, &["--help"]].concat()).good().out;
    let commands =
        help.split("\nCommands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap_or_default();
    let names = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let below = names.filter(|name| !name.is_empty() && *name != "help");
    let mut all: Vec<String> = below.flat_map(|name| helps(home, &[command, &[name]].concat())).collect();
    all.push(help);
    all
}

#[test]
fn examples_can_be_copied_from_a_terminal_of_80_columns() {
    let helps = helps(&Home::new(), &[]);
    let examples = helps.iter().filter_map(|help| help.split("Examples:\n").nth(1)?.split("\n\n").next());
    let lines: Vec<&str> = examples.flat_map(str::lines).collect();
    assert!(lines.len() > 80, "{}", lines.len());
    for line in lines {
        assert!(line.starts_with("  ") && line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn methods_are_listed_and_wrong_ones_name_what_is_known() {
    let home = Home::new();
    let listed = home.json(&["methods"]);
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    let methods = refrain::fusion::METHODS.entries.iter().map(|entry| entry.name);
    let policies = refrain::eviction::POLICIES.entries.iter().map(|entry| entry.name);
    let known: Vec<&str> = methods.chain(policies).collect();
    assert_eq!(names, known);
    assert_eq!(
        home.json(&["methods", "a3"])["options"][0],
        json!({
            "name": "ratio", "type": "number", "minimum": 0.0, "maximum": 1.0, "default": 0.15,
            "description": "Share of the tokens before the question that is recomputed.",
        })
    );
    assert!(home.run(&["methods"]).good().out.contains("smoothing=5"));
    home.run(&["methods", "a4"]).failed(2, &["a4", "cache_blend"]);
    home.run(&["ask", "--method", "a4", "why"]).failed(2, &["a4", "cache_blend"]);
    home.run(&["ask", "--method", "pie:ratio=0.3", "why"]).failed(2, &["pie", "ratio"]);
    home.run(&["ask", "--method", "a3:ratio=7", "why"]).failed(2, &["ratio", "0 to 1"]);
    home.run(&["ask", "--ratio", "0.3", "why"]).failed(2, &["--ratio"]);
    home.run(&["ask", "--compare", "vanilla,a3", "why"]).failed(2, &["vanilla,a3", "separated by `;`"]);
    home.run(&["ask", "--compare", "vanilla", "--compare", "a5", "why"]).failed(2, &["a5", "a3"]);
    home.run(&["ask", "--compare", "vanilla;a3:colour=1", "why"]).failed(2, &["colour", "smoothing"]);
    home.run(&["bench", "ttft", "--methods", "a3;a9"]).failed(2, &["a9"]);
}

#[test]
fn errors_are_json_as_well_if_asked_for() {
    let home = Home::new();
    let ran = home.run(&["ask", "--method", "a4", "why", "--json"]).failed(2, &["a4"]);
    let error: Value = serde_json::from_str(&ran.out).unwrap();
    assert!(error["error"].as_str().unwrap().contains("a4") && error["hint"].is_string(), "{error}");
    let ran = home.run(&["ask", "--json", "--kv", "f8", "why"]).failed(2, &["f8"]);
    assert!(serde_json::from_str::<Value>(&ran.out).unwrap()["error"].as_str().unwrap().contains("f8"));
}

#[test]
fn a_model_that_is_not_there_says_what_to_do() {
    let home = Home::new();
    let empty = home.path("models");
    let empty = empty.to_str().unwrap();
    for command in [&["ask", "why"][..], &["ingest", "."]] {
        let words: Vec<&str> = command.iter().copied().chain(["--models", empty]).collect();
        home.run(&words).failed(1, &["smollm2-135m", "run: refrain pull smollm2-135m"]);
    }
    home.run(&["ask", "--model", "nothing.gguf", "why"]).failed(1, &["nothing.gguf", "qwen2.5-coder-0.5b"]);
    let cache = home.path("hub/hub");
    home.run(&["ask", "--model", "hf:org/name", "why"])
        .failed(1, &["run: refrain pull hf:org/name", cache.to_str().unwrap()]);
    home.run(&["ask", "--model", "hf:org", "why"]).failed(2, &["hf:ORG/NAME"]);
    home.run(&["pull", "nothing"]).failed(2, &["nothing", "smollm2-135m"]);
}

#[test]
fn pulls_fail_with_a_reason() {
    let home = Home::new();
    assert_eq!(home.json(&["pull", "--list"])[0]["name"], "smollm2-135m");
    let folder = home.path("models");
    let words = ["pull", "smollm2-135m", "--models", folder.to_str().unwrap()];
    let without_python = home
        .command(&words)
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("NO_PROXY", "127.0.0.1")
        .env("PATH", home.path("empty"))
        .output()
        .unwrap();
    let unreached = ["cannot fetch hf:", "127.0.0.1:9 cannot be reached", "HF_ENDPOINT", "Python 3 with pip"];
    Ran::of(without_python).failed(1, &unreached);
    let mut without_hub = home.command(&["pull", "hf:org/name"]);
    let without_hub = without_hub.env("HF_ENDPOINT", "http://127.0.0.1:9").env("NO_PROXY", "127.0.0.1");
    Ran::of(without_hub.output().unwrap()).failed(1, &["hf:org/name", "reachable", "HF_ENDPOINT"]);
}

#[test]
fn broken_model_files_are_named() {
    let home = Home::new();
    let text = home.write("model.gguf", "this is no model");
    home.run(&["ask", "--model", text.to_str().unwrap(), "why"]).failed(1, &["model.gguf"]);
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend(291u64.to_le_bytes());
    head.extend(40u64.to_le_bytes());
    let truncated = home.write("truncated.gguf", head);
    home.run(&["ask", "--model", truncated.to_str().unwrap(), "why"])
        .failed(1, &["truncated.gguf", "truncated", "byte"]);
    let empty = home.path("folder");
    std::fs::create_dir(&empty).unwrap();
    home.run(&["ask", "--model", empty.to_str().unwrap(), "why"]).failed(1, &["folder"]);
}

#[test]
fn broken_documents_and_empty_questions_are_named() {
    let home = Home::new();
    let bad = home.write("docs/latin1.txt", b"caf\xe9 au lait");
    home.run(&["ask", "--docs", bad.to_str().unwrap(), "why"]).failed(1, &["latin1.txt", "byte 3", "UTF-8"]);
    home.run(&["ingest", bad.to_str().unwrap()]).failed(1, &["latin1.txt", "byte 3"]);
    home.run(&["ingest", "nowhere.md"]).failed(1, &["nowhere.md"]);
    let records = home.write("records.jsonl", "{\"text\": \"fine\"}\n{\"title\": \"no text\"}\n");
    home.run(&["ingest", records.to_str().unwrap()]).failed(1, &["records.jsonl", "line 2", "text"]);
    home.run(&["ask", " "]).failed(2, &["question is empty"]);
    home.run(&["ask", "-"]).failed(2, &["question is empty"]);
}

#[test]
fn wrong_values_of_options_end_with_2() {
    let home = Home::new();
    for (option, value, named) in [
        ("--max-tokens", "0", "--max-tokens 0 is out of range"),
        ("--temperature", "-1", "--temperature -1 is out of range"),
        ("--top-p", "0", "--top-p 0 is out of range"),
        ("--repetition-penalty", "0", "--repetition-penalty 0 is out of range"),
        ("--min-p", "2", "--min-p 2 is out of range"),
        ("--logit-bias", "5=nan", "--logit-bias"),
        ("--chunk-tokens", "0", "--chunk-tokens"),
    ] {
        // No model is needed to tell them.
        for command in ["ask", "generate"] {
            let words = [command, "why", "--model", "nothing.gguf", option, value];
            home.run(&words).failed(2, &[named]);
        }
    }
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    for (option, value, named) in [("--choice", "", "none of them empty"), ("--regex", "(", "grammar")] {
        for command in ["ask", "generate"] {
            let words =
                [command, "why", "--model", model.to_str().unwrap(), "--prefix", "none", option, value];
            home.run(&words).failed(2, &[named]);
        }
    }
}

#[test]
fn flags_go_before_environment_before_file_before_default() {
    let home = Home::new();
    let place = |ran: Ran| ran.good().out;
    assert!(place(home.run(&["store", "ls"])).contains("data/refrain/chunks"));
    assert!(!home.path("data").exists(), "a command that looks makes no store");
    let names = ["from-file", "from-variable", "from-flag"];
    let [file, variable, flag] =
        names.map(|name| home.write(&format!("{name}/index.lock"), "").with_file_name(""));
    home.write("config/refrain/config.toml", format!("store = {file:?}\n[ask]\nmin-tokens = 3\n"));
    assert!(place(home.run(&["store", "ls"])).contains("from-file"));
    let with_variable =
        |words: &[&str]| Ran::of(home.command(words).env("REFRAIN_STORE", &variable).output().unwrap());
    assert!(place(with_variable(&["store", "ls"])).contains("from-variable"));
    assert!(place(with_variable(&["store", "ls", "--store", flag.to_str().unwrap()])).contains("from-flag"));
    // An empty variable is none, and one that is wrong is named.
    let mut empty = home.command(&["store", "ls"]);
    assert!(place(Ran::of(empty.env("REFRAIN_STORE", "").output().unwrap())).contains("from-file"));
    let mut wrong = home.command(&["store", "ls"]);
    Ran::of(wrong.env("REFRAIN_KV", "f8").output().unwrap()).failed(2, &["f8", "variable REFRAIN_KV"]);
    home.run(&["store", "ls", "--credential", ""]).failed(2, &["--credential"]);
    let mut json = home.command(&["methods", "pie"]);
    assert!(Ran::of(json.env("REFRAIN_JSON", "true").output().unwrap()).good().out.starts_with('{'));
}

#[test]
fn an_address_that_a_server_cannot_have_says_what_one_is() {
    let home = Home::new();
    let serve = |host: &str| home.run(&["serve", "--model", "nothing.gguf", "--host", host]);
    serve("localhost").failed(1, &["nothing.gguf"]);
    serve("example.org").failed(2, &["example.org", "127.0.0.1 or 0.0.0.0"]);
    serve("127.0.0.1:80").failed(2, &["--host 127.0.0.1 --port 80"]);
}

#[test]
fn a_wrong_instruction_set_is_told_at_start() {
    let home = Home::new();
    let mut command = home.command(&["methods", "pie"]);
    let ran = Ran::of(command.env("REFRAIN_CPU", "avx9").output().unwrap());
    ran.failed(2, &["REFRAIN_CPU", "avx9", "portable", "unset"]);
}

#[test]
fn configuration_files_are_checked() {
    let home = Home::new();
    let file = home.write("other.toml", "threads = 2\n[ask]\ncolour = \"red\"\n");
    let named = ["methods", "--config", file.to_str().unwrap()];
    home.run(&named).failed(2, &["other.toml", "ask.colour", "temperature"]);
    home.write("other.toml", "json = true\nquiet = true\nthreads = \"two\"\n");
    home.run(&named).failed(2, &["other.toml", "threads", "two"]);
    home.write("other.toml", "threads = \n");
    home.run(&named).failed(2, &["other.toml", "TOML"]);
    home.run(&["--config", file.to_str().unwrap(), "ask", "--help"]).good();
    let nowhere = ["methods", "--config", "nowhere.toml"];
    assert_eq!(home.run(&nowhere).failed(2, &["nowhere.toml"]).out, "");
    // The error is JSON where the environment asks for it and the command line does not decline.
    let json = |words: &[&str]| Ran::of(home.command(words).env("REFRAIN_JSON", "yes").output().unwrap());
    let told: Value = serde_json::from_str(&json(&nowhere).failed(2, &["nowhere.toml"]).out).unwrap();
    assert!(told["error"].as_str().unwrap().contains("nowhere.toml"), "{told}");
    assert_eq!(json(&[&nowhere[..], &["--json=false"]].concat()).failed(2, &[]).out, "");
    home.write("other.toml", "json = true\n");
    assert!(home.run(&named).good().out.starts_with('['));
}

#[test]
fn known_models_are_listed_with_what_is_known_of_them() {
    let home = Home::new();
    // None is fetched there, whatever this machine has.
    let nowhere = home.path("nowhere");
    let text = home.run(&["models", "--models", nowhere.to_str().unwrap()]).good().out;
    for word in ["smollm2-135m", "Q4_1", "8192", "98 MB", "Apache-2.0", "drift:charge=0.15 averaged", "no"] {
        assert!(text.contains(word), "{word}");
    }
    let folder = home.path("models");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("SmolLM2-135M-Instruct.Q4_1.gguf"), "").unwrap();
    let known = home.json(&["models", "--models", folder.to_str().unwrap()]);
    assert_eq!((&known[0]["fetched"], &known[1]["fetched"]), (&true.into(), &false.into()));
    assert_eq!((&known[0]["size"], &known[1]["size"]), (&0.into(), &491_000_000.into()), "bytes");
    assert_eq!((&known[0]["context"], &known[0]["method"]), (&8192.into(), &"drift:charge=0.15".into()));
}

#[test]
fn completions_know_commands_and_options() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = home.run(&["completions", shell]).good().out;
        assert!(script.contains("compare-tokens") && script.contains("ingest"), "{shell}");
    }
    // Values that are known are offered, and others are taken.
    let script = home.json(&["completions", "bash"])["script"].as_str().unwrap().to_owned();
    for values in ["none bos system averaged auto", "cpu cuda auto", "relax_kv", "morph_kv", "smollm2-135m"] {
        assert!(script.contains(values), "{values}");
    }
    // A model may be a path.
    let script = home.run(&["completions", "zsh"]).good().out;
    let models: Vec<&str> = script.lines().filter(|line| line.contains("--model=")).collect();
    assert!(!models.is_empty() && models.iter().all(|line| line.contains("_files")), "{models:?}");
    home.run(&["completions", "basic"]).failed(2, &["basic"]);
}

#[cfg(unix)]
#[test]
fn a_reader_that_stops_early_is_no_error() {
    let home = Home::new();
    let mut child =
        home.command(&["completions", "bash"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
}

#[test]
fn a_second_ingest_computes_nothing() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let ingest = ["ingest", docs.to_str().unwrap()];
    let first = home.json(&ingest);
    assert_eq!(
        (&first["documents"], &first["chunks"], &first["computed"]),
        (&2.into(), &2.into(), &2.into())
    );
    // The known model's chunks are the mean of two prefills.
    assert_eq!(2 * first["tokens"].as_u64().unwrap(), first["computed_tokens"].as_u64().unwrap());
    let files = home.chunk_files();
    assert_eq!(files.len(), 2);
    let second = home.json(&ingest);
    assert_eq!((&second["computed"], &second["bytes"]), (&0.into(), &0.into()));
    assert!(home.run(&ingest).good().out.contains("nothing new"));
    assert_eq!(home.chunk_files(), files);
    // Another chunk size makes other chunks of the same text.
    let smaller = home.json(&["ingest", docs.to_str().unwrap(), "--chunk-tokens", "32"]);
    assert!(smaller["chunks"].as_u64().unwrap() > 2 && smaller["computed"] != 0);
}

#[test]
fn answers_carry_a_measured_account() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let ask = |method: &str| {
        let words = [
            "ask",
            "--docs",
            docs.to_str().unwrap(),
            "--max-tokens",
            "12",
            "--prefix",
            "none",
            "--method",
            method,
            "How tight is a stem bolt?",
        ];
        home.json(&words)["answers"][0].clone()
    };
    let [vanilla, pie, a3] = ["vanilla", "pie", "a3:ratio=0.5"].map(ask);
    for answer in [&vanilla, &pie, &a3] {
        let stats = &answer["stats"];
        assert_eq!(stats["prompt_tokens"], vanilla["stats"]["prompt_tokens"]);
        let (ttft, compute) = (stats["ttft"].as_f64().unwrap(), stats["compute_ttft"].as_f64().unwrap());
        assert!(0.0 < compute && compute <= ttft, "{stats}");
        assert_eq!(
            stats["answer_tokens"].as_u64().unwrap() as usize,
            answer["tokens"].as_array().unwrap().len()
        );
        assert_eq!(stats["prefilled_chunks"], 0);
        assert!(!answer["text"].as_str().unwrap().is_empty());
    }
    assert_eq!(vanilla["stats"]["recompute_ratio"], 1.0);
    assert_eq!(
        (&vanilla["stats"]["cached_tokens"], &vanilla["stats"]["bytes_loaded"]),
        (&0.into(), &0.into())
    );
    assert_eq!(
        (&pie["stats"]["recompute_ratio"], &pie["stats"]["recomputed_tokens"]),
        (&0.0.into(), &0.into())
    );
    assert!(pie["stats"]["cached_tokens"].as_u64() >= pie["stats"]["document_tokens"].as_u64());
    let ratio = a3["stats"]["recompute_ratio"].as_f64().unwrap();
    assert!(ratio > 0.5 && ratio < 0.7, "half of the rows, and all of the first layers: {ratio}");
}

#[test]
fn the_answer_goes_to_standard_output_and_the_account_to_standard_error() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let words = ["ask", "--docs", docs.to_str().unwrap(), "--max-tokens", "8", "-"];
    let ran = home.run_with_input(&words, "How tight is a stem bolt?\n").good();
    assert!(!ran.out.contains("TTFT") && !ran.out.contains('\x1b'), "{}", ran.out);
    for word in ["prompt tokens", "cached", "recomputed", "charged", "full layer", "TTFT", "compute", "TPOT"]
    {
        assert!(ran.err.contains(word), "'{word}' is not in: {}", ran.err);
    }
    let quiet = home.run(&[
        "ask",
        "--docs",
        docs.to_str().unwrap(),
        "--max-tokens",
        "8",
        "--quiet",
        "How tight is a stem bolt?",
    ]);
    assert_eq!((quiet.good().err.as_str(), ran.out.is_empty()), ("", false));
}

#[test]
fn a_seed_that_is_drawn_is_told() {
    let (home, model) = (Home::new(), concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/llama"));
    let generate = |seed: &str| {
        let words = ["--model", model, "--prefix", "none", "--temperature", "1", "--max-tokens", "8", "why"];
        home.run(&[&["generate", "--seed", seed], &words[..]].concat()).good()
    };
    let drawn = generate("-1");
    let (_, told) = drawn.err.split_once("--seed ").unwrap();
    assert_eq!(generate(told.split(' ').next().unwrap()).out, drawn.out);
    assert!(!generate("1").err.contains("--seed"));
    home.run(&["generate", "--seed", "x", "why"]).failed(2, &["--seed"]);
}

#[test]
fn methods_stand_side_by_side() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let words = [
        "ask",
        "--docs",
        docs.to_str().unwrap(),
        "--max-tokens",
        "8",
        "--compare",
        "vanilla;pie;a3:ratio=1",
        "--compare-tokens",
        "6",
        "--explain",
        "How tight is a stem bolt?",
    ];
    let shown = home.run(&words).good().out;
    for word in ["method", "speed-up", "KL", "vanilla", "pie", "a3:ratio=1", "attends to most"] {
        assert!(shown.contains(word), "'{word}' is not in: {shown}");
    }
    let told = home.json(&words);
    let rows = told["comparison"].as_array().unwrap();
    let [vanilla, pie, a3] = [0, 1, 2].map(|row: usize| &rows[row]);
    assert_eq!(
        (&vanilla["kl"], &vanilla["top1"], &vanilla["speedup"]),
        (&0.0.into(), &1.0.into(), &1.0.into())
    );
    assert!(pie["kl"].as_f64().unwrap() > 0.0);
    assert!(a3["kl"].as_f64().unwrap() < 1e-3, "everything recomputed is vanilla: {a3}");
    assert_eq!(told["answers"].as_array().unwrap().len(), 3);
    assert!(told["answers"][2]["explanation"]["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()));
}

#[test]
fn a_corrupted_chunk_is_computed_again_and_counted() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let words = [
        "ask",
        "--docs",
        docs.to_str().unwrap(),
        "--max-tokens",
        "8",
        "--method",
        "pie",
        "How tight is a stem bolt?",
    ];
    let before = home.json(&words)["answers"][0].clone();
    let listed = home.json(&["store", "ls"]);
    let chunk = listed["chunks"].as_array().unwrap().iter().find(|chunk| chunk["label"] == "Torque").unwrap();
    let file = PathBuf::from(chunk["path"].as_str().unwrap());
    let good = std::fs::read(&file).unwrap();
    let damage = || {
        let mut bytes = good.clone();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
    };
    damage();
    let after = home.json(&words)["answers"][0].clone();
    assert_eq!(
        (&before["stats"]["prefilled_chunks"], &after["stats"]["prefilled_chunks"]),
        (&0.into(), &1.into())
    );
    assert_eq!((&after["text"], &after["tokens"]), (&before["text"], &before["tokens"]));
    let again = std::fs::read(&file).unwrap();
    assert_eq!(again.len(), good.len());
    damage();
    let verified = home.json(&["store", "verify"]);
    assert_eq!(verified["failed"].as_array().unwrap().len(), 1);
    assert_eq!(verified["failed"][0]["removed"], true);
    assert!(!file.exists());
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_before_anything_is_computed() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let book = home.write("book.txt", CHAINS.repeat(200));
    let ran = home.run(&["ask", "--docs", book.to_str().unwrap(), "How far?"]);
    ran.failed(1, &["context is 8192", "hint: give fewer documents", "--search"]);
    assert!(home.chunk_files().is_empty());
    home.run(&["ask", "--max-tokens", "9000", "How far?"])
        .failed(1, &["9000", "context is 8192", "hint: --max-tokens 8"]);
    home.run(&["ask", &"far ".repeat(9000)]).failed(1, &["hint: ask a shorter question"]);
    home.run(&["ask", "--temperature", "-1", "How far?"]).failed(2, &["--temperature -1 is out of range"]);
    home.run(&["ask", "--max-tokens", "-1", "How far?"]).failed(2, &["invalid value '-1' for '--max-tokens"]);
    home.run(&["ask", "--logit-bias", "99999999=1", "How far?"])
        .failed(2, &["--logit-bias: the model has 49152 tokens, and none of id 99999999"]);
    home.run(&["ask", "--top-p", "0", "How far?"]).failed(2, &["--top-p 0"]);
    home.run(&["bench", "ttft", "--lengths", "9000"]).failed(2, &["9000"]);
}

#[test]
fn a_chat_remembers_and_ends_with_its_input() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let words = ["chat", "--docs", docs.to_str().unwrap(), "--max-tokens", "8", "--json"];
    let turns = "How tight is a stem bolt?\n/method pie\nAnd a crank bolt?\n";
    let ran = home.run_with_input(&words, turns).good();
    let answers: Vec<Value> = ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0]["method"], "drift", "the method that is built in for the model");
    assert_eq!(answers[1]["method"], "pie");
    let tokens = |answer: &Value| answer["stats"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&answers[1]) > tokens(&answers[0]), "the first turn is part of the second prompt");
}

/// A person's terminal: lines are edited, and Ctrl-C stops an answer or a prefill and not the chat.
#[cfg(target_os = "linux")]
#[test]
fn a_person_chats_at_a_terminal() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let book =
        home.write("a book.md", (0..600).map(|i| format!("{CHAINS}Page {i}.\n\n")).collect::<String>());
    let mut person = Command::new(serve::python());
    home.settle(&mut person)
        .arg(book::root().join("tests/e2e/chat.py"))
        .args([book, home.path("answers.txt")])
        .args([env!("CARGO_BIN_EXE_refrain"), "chat"]);
    let ran = Ran::of(person.output().unwrap()).good();
    assert_eq!(ran.out, "ok\n");
}

#[test]
fn time_to_first_token_is_measured() {
    if !real_model() {
        return;
    }
    let home = Home::new();
    let words = [
        "bench",
        "ttft",
        "--lengths",
        "150,250",
        "--methods",
        "vanilla;pie;a3",
        "--runs",
        "1",
        "--chunk-tokens",
        "64",
    ];
    let told = home.json(&words);
    let rows = told["results"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    assert_eq!((&rows[0]["length"], &rows[0]["speedup"]), (&150.into(), &1.0.into()));
    assert!(rows[5]["bound"].as_f64().unwrap() > 1.0);
    assert!(told["about"]["command"].as_str().unwrap().starts_with("refrain bench ttft --lengths 150,250"));
    assert!(!home.path("data/refrain/chunks").exists(), "the user's store is left alone");
    let words = ["bench", "ttft", "--lengths", "100", "--methods", "a3", "--runs", "1", "--markdown"];
    let markdown = home.run(&words).good().out;
    assert!(markdown.contains("| tokens |") && markdown.contains("```sh\nrefrain bench ttft"), "{markdown}");
}
