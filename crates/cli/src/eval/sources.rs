//! `refrain eval fetch`: where the data of benchmarks comes from.

use anyhow::Result;
use serde_json::json;

use crate::output::{broken, print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// `refrain eval fetch`
pub(crate) fn fetch(context: &Context) -> Result<()> {
    if context.json {
        let source = |(what, place, path): &(&str, &str, &str)| json!({ "benchmark": what, "from": place, "lies_at": path });
        return print_json(&SOURCES.iter().map(source).collect::<Vec<_>>());
    }
    let mut table = Table::new(&["<benchmark", "<place in the data folder, and source"]);
    for (what, place, path) in SOURCES {
        table.push([*what, *path].map(str::to_owned).to_vec());
        table.push(["", *place].map(str::to_owned).to_vec());
    }
    let about = "RULER and the needle are generated: they need no data, and take their essays and words from it where it is \
         there.\nThe others are read from a folder that --data names. Their texts keep their sources' licences.";
    print(&format!("{}\n\n{}", broken(about, &std::io::stdout()), table.text()))
}

/// Benchmarks, where they come from, and where they lie in the data folder.
const SOURCES: &[(&str, &str, &str)] = &[
    (
        "LongBench",
        "https://huggingface.co/datasets/THUDM/LongBench (data.zip)",
        "longbench/TASK.jsonl, or TASK.jsonl",
    ),
    ("LongBench-E", "the same", "longbench/TASK_e.jsonl, or TASK_e.jsonl"),
    (
        "documents with questions",
        "any: {question, answers, docs: [{title, text, supporting}]} a line",
        "rag/NAME.jsonl",
    ),
    (
        "derived sets",
        "https://github.com/OSU-NLP-Group/HippoRAG (data), of which tools/eval_sets.py in Refrain's repository makes them",
        "rag/{musique,hotpotqa}_train100.jsonl, longbench_derived/{musique,hotpotqa}_short.jsonl",
    ),
    (
        "needle's essays",
        "https://github.com/gkamradt/LLMTest_NeedleInAHaystack",
        "needle/PaulGrahamEssays/*.txt",
    ),
    (
        "RULER's essays",
        "https://github.com/NVIDIA/RULER (scripts/data/synthetic/json)",
        "ruler/PaulGrahamEssays.json",
    ),
    ("RULER's words", "the Python package wonderwords", "ruler/wonderwords/{adjective,noun,verb}list.txt"),
    ("LongGenBench", "https://github.com/mozhu621/LongGenBench", "longgenbench/Dataset_{short,long}.json"),
    (
        "LongWriter",
        "https://github.com/THUDM/LongWriter (evaluation)",
        "longwriter/longbench_write{,_en}.jsonl",
    ),
    ("LongWrite-Ruler", "the same", "longwriter/longwrite_ruler.jsonl"),
    ("LongWriter's grading", "the same, for --judge", "longwriter/judge.txt"),
];
