//! Names of tasks and suites.

use super::{Protocol, longbench, ruler};

/// Long outputs: names, the sets that they are read from, and whose settings.
pub(super) const LONG_OUTPUTS: [(&str, &str, Protocol, &str); 8] = [
    ("longgenbench/short", "short", Protocol::Own, "LongGenBench, the 16K setting"),
    ("longgenbench/long", "long", Protocol::Own, "the 32K setting"),
    (
        "longgenbench/morphkv",
        "short",
        Protocol::MorphKv,
        "MorphKV's 40 prompts of the 16K setting, without its judge's three examples",
    ),
    ("longwriter/en", "longbench_write_en", Protocol::Own, "LongBench-Write, English"),
    ("longwriter/all", "longbench_write", Protocol::Own, "LongBench-Write, English and Chinese"),
    ("longwriter/ruler", "longwrite_ruler", Protocol::Own, "LongWrite-Ruler, of which only lengths count"),
    ("longwriter/morphkv", "longbench_write_en", Protocol::MorphKv, "with MorphKV's limit of new tokens"),
    ("longwriter/morphkv_ruler", "longwrite_ruler", Protocol::MorphKv, "the same of LongWrite-Ruler"),
];

/// Whether a name is one of a task or a suite.
pub(crate) fn is_known(name: &str) -> bool {
    match name.split_once('/').unwrap_or((name, "")) {
        ("needle" | "ruler", "") | ("ruler", "qa") | ("longbench", "all") => true,
        ("ruler", task) => ruler::TASKS.iter().any(|known| known.name == task),
        ("longbench", task) => {
            longbench::SUITES.iter().any(|(suite, _)| *suite == task) || longbench::task(task).is_ok()
        }
        ("rag", task) => !task.is_empty(),
        _ => LONG_OUTPUTS.iter().any(|(known, ..)| *known == name),
    }
}

/// Names of all tasks and suites, each with a description.
pub fn names() -> Vec<(String, String)> {
    let mut names = vec![
        ("needle".to_owned(), "needle in a haystack: lengths × depths, generated".to_owned()),
        ("ruler".to_owned(), "all 11 generated tasks of RULER".to_owned()),
    ];
    names.extend(ruler::TASKS.iter().map(|task| (format!("ruler/{}", task.name), String::new())));
    names.push((
        "ruler/qa".to_owned(),
        "questions of a file (`file`), padded with its other documents".to_owned(),
    ));
    for (suite, tasks) in longbench::SUITES {
        names.push((format!("longbench/{suite}"), tasks.join(", ")));
    }
    names.push(("longbench/all".to_owned(), "all 21 tasks of LongBench".to_owned()));
    let editions = "; NAME_e: of LongBench-E; NAME_short: a derived set";
    for (index, task) in longbench::TASKS.iter().enumerate() {
        let what = if index == 0 { format!("one of LongBench{editions}") } else { String::new() };
        names.push((format!("longbench/{}", task.name), what));
    }
    let rag = "questions with separate documents: rag/NAME.jsonl of the data, or `file`";
    names.push(("rag/NAME".to_owned(), rag.to_owned()));
    names.extend(LONG_OUTPUTS.iter().map(|(name, _, _, what)| ((*name).to_owned(), (*what).to_owned())));
    names
}
