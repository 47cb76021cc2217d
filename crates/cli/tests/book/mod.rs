//! The commands of the book (`docs/book`) and of the README's tour, run as a reader runs them.
//!
//! A chapter becomes one shell script of as many lines as the chapter has, so that a failure is told by the chapter's own line:
//! its commands where they stand, and nothing in place of all else. The script runs in a folder of its own, with a home of its own and a copy
//! of `examples`, and the first command that fails ends it. `refrain` is the tested program. `refrain serve` goes to the
//! background until the chapter ends or starts another one. Blocks of Python run where OpenAI's client is installed.
//!
//! Commands stand as a reader types them, and not one option more: a configuration file makes answers short and measurements
//! small. A block below `<!-- not run: REASON -->` is left out; [`NOT_RUN`] lists all of them.

mod json;

use std::collections::BTreeSet;

use super::*;

/// Files with commands, and the heading below which they stand, where it is not all of the file.
const CHAPTERS: &[(&str, Option<&str>)] = &[
    ("README.md", Some("## A tour")),
    ("docs/book/src/start.md", None),
    ("docs/book/src/choose.md", None),
    ("docs/book/src/serve.md", None),
    ("docs/book/src/share.md", None),
    ("docs/book/src/evaluate.md", None),
    ("docs/book/src/jobs.md", None),
    ("docs/book/src/json.md", None),
    ("docs/book/src/add-a-method.md", None),
    ("docs/book/src/python.md", None),
];

/// The blocks that are not run: their chapter, and the reason that stands above each.
const NOT_RUN: &[(&str, &str)] = &[
    ("docs/book/src/add-a-method.md", "compiles the project's tests, among which this one is"),
    ("docs/book/src/evaluate.md", "needs the benchmarks' data, and hours"),
    ("docs/book/src/jobs.md", "needs machines to be started on"),
    ("docs/book/src/python.md", "the Python module's own tests run it"),
    ("docs/book/src/share.md", "needs a bucket and its credentials"),
    ("docs/book/src/start.md", "builds the program, which the tests have already"),
];

/// Short answers and small measurements, as defaults of what commands leave open.
const CONFIGURATION: &str = r#"
[ask]
max-tokens = 8
compare-tokens = 4
[generate]
max-tokens = 16
[tune]
samples = 1
tokens = 600
max-tokens = 4
methods = "drift"
prefixes = "averaged"
[eval.run]
max-tokens = 4
time-budget = "10s"
[job.plan.eval]
max-tokens = 4
"#;

/// The functions that a chapter's script calls. They are a file of their own, since a failure names the line of the script.
const PRELUDE: &str = r#"
set -e -o pipefail
trap 'printf "%s" "$LINENO" > "$BOOK_FAILED"' ERR
server=
stop() {
    [ -z "$server" ] || { kill "$server" && wait "$server" || true; } 2>/dev/null
    server=
}
trap stop EXIT
refrain() {
    if [ "$1" != serve ]; then
        command refrain "$@" || return
        return 0
    fi
    stop
    command refrain "$@" &
    server=$!
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$REFRAIN_PORT/ready"; do
        kill -0 "$server" || return
        sleep 0.1
    done
}
run_python() {
    if "$BOOK_PYTHON" -c 'import openai' 2>/dev/null; then
        "$BOOK_PYTHON" - || return
    else
        cat >/dev/null
        echo "skipped: a block of Python, for want of the module openai; make .python-tests/installed" >&2
    fi
}
"#;

#[test]
fn readme() {
    run("README.md");
}

#[test]
fn start() {
    run("docs/book/src/start.md");
}

#[test]
fn choose() {
    run("docs/book/src/choose.md");
}

#[test]
fn serve() {
    run("docs/book/src/serve.md");
}

#[test]
fn share() {
    run("docs/book/src/share.md");
}

#[test]
fn evaluate() {
    run("docs/book/src/evaluate.md");
}

#[test]
fn jobs() {
    run("docs/book/src/jobs.md");
}

#[test]
fn json_page() {
    run("docs/book/src/json.md");
}

#[test]
fn add_a_method() {
    run("docs/book/src/add-a-method.md");
}

#[test]
fn every_chapter_with_commands_is_run_and_what_is_not_is_known() {
    let mut with_commands = BTreeSet::new();
    let mut not_run = Vec::new();
    let chapters = std::fs::read_dir(root().join("docs/book/src")).unwrap();
    let chapters = chapters.map(|entry| format!("docs/book/src/{}", entry.unwrap().file_name().display()));
    for name in chapters.filter(|name| name.ends_with(".md")).chain(["README.md".to_owned()]) {
        let chapter = Chapter::read(&name);
        if chapter.script.lines().any(|line| !line.is_empty()) || !chapter.not_run.is_empty() {
            with_commands.insert(name.clone());
        }
        not_run.extend(chapter.not_run.into_iter().map(|reason| (name.clone(), reason)));
    }
    not_run.sort();
    not_run.dedup();
    let known: BTreeSet<_> = CHAPTERS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(with_commands, known, "CHAPTERS has the files with commands, each with a test of its own");
    let known: Vec<_> =
        NOT_RUN.iter().map(|(name, reason)| ((*name).to_owned(), (*reason).to_owned())).collect();
    assert_eq!(not_run, known, "NOT_RUN has the blocks that are not run");
}

/// The commands of a file, each at its own line, and the reasons of the blocks that are left out.
struct Chapter {
    script: String,
    not_run: Vec<String>,
}

impl Chapter {
    fn read(name: &str) -> Chapter {
        let text = std::fs::read_to_string(root().join(name)).unwrap();
        let section = CHAPTERS.iter().find(|(chapter, _)| *chapter == name).and_then(|(_, section)| *section);
        Chapter::of(name, &text, section)
    }

    fn of(name: &str, text: &str, section: Option<&str>) -> Chapter {
        let mut chapter = Chapter { script: String::new(), not_run: Vec::new() };
        let (mut fence, mut reason, mut is_in_section) = (None, None, section.is_none());
        for (index, line) in text.lines().enumerate() {
            let bare = line.trim_start();
            let command = match (fence, bare.strip_prefix("```")) {
                (None, None) => {
                    if let Some(section) = section.filter(|_| bare.starts_with("## ")) {
                        is_in_section = bare == section;
                    }
                    let mark = bare.strip_prefix("<!-- not run:").and_then(|rest| rest.strip_suffix("-->"));
                    reason = mark.or(reason.filter(|_| bare.is_empty()));
                    ""
                }
                (None, Some(language)) => {
                    let reason = reason.take();
                    let is_run = ["sh", "console", "python"].contains(&language) && is_in_section;
                    assert!(
                        !["bash", "shell", "shell-session"].contains(&language),
                        "{name}:{}: say sh",
                        index + 1
                    );
                    fence = Some(if is_run && reason.is_none() { language } else { "" });
                    chapter.not_run.extend(reason.filter(|_| is_run).map(|reason| reason.trim().to_owned()));
                    if fence == Some("python") { "run_python <<'END_OF_PYTHON'" } else { "" }
                }
                (Some("console"), None) => bare.strip_prefix("$ ").unwrap_or(""),
                (Some("sh" | "python"), None) => line,
                (Some(_), None) => "",
                (Some(language), Some(_)) => {
                    fence = None;
                    if language == "python" { "END_OF_PYTHON" } else { "" }
                }
            };
            chapter.script += command;
            chapter.script.push('\n');
        }
        chapter
    }
}

#[test]
fn commands_stay_at_their_lines() {
    let text = "# A\n```sh\none \\\n  two\n```\n## B\n<!-- not run: far away -->\n\n```sh\nthree\n```\n```console\n$ four\n5\n```\n\
                ```python\nsix\n```\n```text\n7\n```\n";
    let chapter = Chapter::of("", text, None);
    let expected = "\n\none \\\n  two\n\n\n\n\n\n\n\n\nfour\n\n\nrun_python <<'END_OF_PYTHON'\nsix\nEND_OF_PYTHON\n\n\n\n";
    assert_eq!((chapter.script.as_str(), chapter.not_run), (expected, vec!["far away".to_owned()]));
    let section = Chapter::of("", text, Some("## B")).script;
    assert!(!section.contains("one") && section.contains("four"), "{section}");
}

/// Runs the commands of a file, one after the other.
fn run(name: &str) {
    if !real_model() {
        return;
    }
    let home = Home::new();
    // A port of the chapter's own, since chapters run beside each other.
    let port = ports::own_port();
    let script = Chapter::read(name).script.replace("127.0.0.1:8080", &format!("127.0.0.1:{port}"));
    let files = [home.write("prelude", PRELUDE), home.write("chapter", script)];
    home.write("config/refrain/config.toml", CONFIGURATION);
    copy(&root().join("examples"), &home.path("work/examples"));

    let mut command = Command::new("bash");
    let program = Path::new(env!("CARGO_BIN_EXE_refrain")).parent().unwrap().to_owned();
    let others = std::env::var_os("PATH").unwrap_or_default();
    let all = std::env::join_paths([program].into_iter().chain(std::env::split_paths(&others))).unwrap();
    let python = std::env::var_os("REFRAIN_PYTHON").unwrap_or_else(|| "python3".into());
    home.settle(&mut command).args(["-c", r#". "$1"; . "$2""#, "bash"]).args(files);
    command.env("HOME", home.path("")).env("PATH", all).env("BOOK_PYTHON", python);
    command.env("BOOK_FAILED", home.path("failed")).env("REFRAIN_PORT", port.to_string());
    let Ran { code, out, err } = Ran::of(command.current_dir(home.path("work")).output().unwrap());
    if let Some(line) = err.lines().find_map(|line| line.strip_prefix("skipped: ")) {
        needs::skip("clients", format!("{name}: {line}"));
    }
    let failed = std::fs::read_to_string(home.path("failed")).unwrap_or_default();
    assert!(code == 0 && failed.is_empty(), "{name}, {failed}\n{}\n{}", tail(&out), tail(&err));
}

/// The end of what was said, with the command that said it.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        if from.is_dir() {
            copy(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap();
        }
    }
}

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
