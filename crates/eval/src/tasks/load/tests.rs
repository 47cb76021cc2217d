//! Samples of a matrix on a tiny model.

use std::path::PathBuf;

use refrain::model::{ModelFiles, Tokenizer};

use super::*;
use crate::RunInfo;
use crate::tasks::testing::folder_with;

/// Tasks, and what is told beside them, of a matrix on a tiny model with this context.
fn load_on(context: usize, matrix: &Matrix) -> Result<(Vec<LoadedTask>, LoadNotes)> {
    load_as("tiny", context, matrix)
}

/// [`load_on`] of a model under another name.
fn load_as(name: &str, context: usize, matrix: &Matrix) -> Result<(Vec<LoadedTask>, LoadNotes)> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let tokenizer = Tokenizer::open(&ModelFiles::open(path).unwrap()).unwrap();
    load(matrix, &TaskModel { name, tokenizer: &tokenizer, context, chunk_tokens: 64 })
}

fn loaded(task: TaskSpec, context: usize) -> (Vec<LoadedTask>, Vec<String>) {
    let matrix = Matrix { tasks: vec![task], limit: Some(1), ..Matrix::default() };
    let (jobs, notes) = load_on(context, &matrix).unwrap();
    assert_eq!(notes.warnings, [""; 0], "no folder is given that could lack something");
    (jobs, notes.left_out)
}

fn task(name: &str, lengths: &[usize]) -> TaskSpec {
    TaskSpec { name: name.to_owned(), lengths: lengths.to_vec(), ..TaskSpec::default() }
}

#[test]
fn lengths_beyond_the_context_are_left_out() {
    for name in ["ruler/niah_single_1", "needle"] {
        let (jobs, left_out) = loaded(task(name, &[512, 1024, 4096, usize::MAX]), 1024);
        let why = |length| format!("{name} at {length} (longer than the context of 1024 tokens)");
        assert_eq!(left_out, [why(4096), why(usize::MAX)]);
        let lengths: Vec<_> = jobs.iter().map(|job| job.about.length).collect();
        assert_eq!(lengths, [Some(512), Some(1024)]);
    }
}

/// Within the room of the chat template the length is fitted, which is a matter of the model; the task stays that of its length.
#[test]
fn a_length_at_the_context_is_fitted_and_keeps_its_parameters() {
    let (jobs, _) = loaded(task("ruler/niah_single_1", &[512, 1024]), 1024);
    assert!(jobs.iter().all(|job| !job.about.note.contains("fitted") && job.about.of == Some(500)));
    assert!(jobs[0].about.model_notes.is_empty());
    let fitted = "fitted to 896 tokens, so that the chat template fits too";
    assert_eq!(jobs[1].about.model_notes["tiny"], fitted);
    // The samples' random choices depend on the length, and their names tell it.
    assert_eq!(jobs[1].samples[0].id, "niah_single_1-1024-0");
}

#[test]
fn a_limit_of_new_tokens_is_noted_of_every_task() {
    for name in ["needle", "ruler/niah_single_1"] {
        let (jobs, _) = loaded(TaskSpec { max_tokens: Some(9), ..task(name, &[400]) }, 512);
        assert!(jobs[0].about.note.ends_with("; at most 9 new tokens"), "{}", jobs[0].about.note);
        assert_eq!(jobs[0].samples[0].max_tokens, 9);
    }
}

#[test]
fn longbench_is_left_out_where_nothing_of_its_prompts_would_remain() {
    let line = r#"{"_id": "a", "input": "q", "context": "c", "answers": ["a"]}"#;
    let folder = folder_with("longbench/hotpotqa.jsonl", &[line.to_owned()]);
    let matrix = |max_prompt_tokens| Matrix {
        data: Some(folder.path().to_owned()),
        max_prompt_tokens,
        tasks: vec![task("longbench/hotpotqa", &[])],
        ..Matrix::default()
    };
    for (context, max_prompt_tokens, jobs) in [(655, None, 0), (656, None, 1), (512, Some(16), 1)] {
        let (found, notes) = load_on(context, &matrix(max_prompt_tokens)).unwrap();
        assert_eq!((found.len(), notes.left_out.len()), (jobs, 1 - jobs), "{context}");
        let why = format!("longbench/hotpotqa (the context of {context} tokens leaves no room");
        assert!(notes.left_out.iter().all(|left_out| left_out.starts_with(&why)), "{:?}", notes.left_out);
    }
}

#[test]
fn built_in_text_that_stands_in_for_data_is_told_and_data_is_hashed() {
    let folder =
        folder_with("ruler/PaulGrahamEssays.json", &[r#"{"text": "One essay. Another."}"#.to_owned()]);
    std::fs::create_dir(folder.path().join("needle")).unwrap();
    let matrix = Matrix {
        data: Some(folder.path().to_owned()),
        limit: Some(1),
        max_tokens: Some(8),
        tasks: vec![
            task("ruler/niah_single_1", &[600]),
            task("ruler/niah_single_2", &[600]),
            task("needle", &[600]),
        ],
        ..Matrix::default()
    };
    let (before, notes) = load_on(1024, &matrix).unwrap();
    assert_eq!(notes.warnings.len(), 2, "each once: {:?}", notes.warnings);
    for (warning, part) in notes.warnings.iter().zip(["ruler/wonderwords", "needle/PaulGrahamEssays"]) {
        let path = folder.path().join(part);
        assert!(warning.starts_with(&format!("{} is missing: built-in", path.display())), "{warning}");
    }
    assert!(before[0].about.data.is_some() && before[2].about.data.is_none());
    // A list that is missing among others is a fault.
    std::fs::create_dir(folder.path().join("ruler/wonderwords")).unwrap();
    let error = load_on(1024, &matrix).unwrap_err().to_string();
    assert!(error.contains("adjectivelist.txt") && error.contains("refrain eval fetch"), "{error}");
    let words: String = (0..10).map(|i| format!("word{i}\n")).collect();
    for name in ["adjective", "noun", "verb"] {
        std::fs::write(folder.path().join(format!("ruler/wonderwords/{name}list.txt")), &words).unwrap();
    }
    std::fs::create_dir(folder.path().join("needle/PaulGrahamEssays")).unwrap();
    std::fs::write(folder.path().join("needle/PaulGrahamEssays/a.txt"), "A text. ").unwrap();
    let (after, notes) = load_on(1024, &matrix).unwrap();
    assert_eq!(notes.warnings, [""; 0]);
    assert!(after[2].about.data.is_some());
    assert_ne!(after[0].about.data, before[0].about.data, "the words are others");
    std::fs::write(folder.path().join("ruler/PaulGrahamEssays.json"), r#"{"text": "Others."}"#).unwrap();
    assert_ne!(load_on(1024, &matrix).unwrap().0[0].about.data, after[0].about.data);
}

#[test]
fn questions_that_are_too_long_are_left_out_by_their_numbers() {
    let line = |i: usize| {
        let text = "Bolts lie here. ".repeat(if i == 0 || i == 2 { 400 } else { 1 });
        serde_json::json!({"question": "Q?", "answers": ["a"], "docs": [{"title": format!("T{i}"), "text": text}]})
            .to_string()
    };
    let folder = folder_with("mine.jsonl", &(0..5).map(line).collect::<Vec<_>>());
    let file = Some(folder.path().join("mine.jsonl"));
    let spec = TaskSpec { file, limit: Some(2), ..task("ruler/qa", &[400]) };
    let (jobs, left_out) = loaded(spec.clone(), 512);
    assert_eq!(left_out, ["ruler/qa at 400 of mine.jsonl: question 1, 3 (too long)"]);
    let ids: Vec<&str> = jobs[0].samples.iter().map(|sample| sample.id.as_str()).collect();
    assert_eq!(ids, ["qa-400-1", "qa-400-3"]);
    let matrix = Matrix { tasks: vec![TaskSpec { lengths: vec![40], ..spec }], ..Matrix::default() };
    let error = load_on(512, &matrix).unwrap_err().to_string();
    assert!(error.contains("mine.jsonl: ruler: 40 tokens are too few for qa"), "{error}");
}

#[test]
fn questions_that_hold_all_documents_are_told() {
    let line = |i: usize| {
        serde_json::json!({"question": "Q?", "answers": ["a"], "docs": [{"title": format!("T{i}"), "text": "Bolts lie here."}]})
            .to_string()
    };
    let folder = folder_with("mine.jsonl", &(0..3).map(line).collect::<Vec<_>>());
    let spec = TaskSpec { file: Some(folder.path().join("mine.jsonl")), ..task("ruler/qa", &[400]) };
    let (jobs, notes) = load_on(1024, &Matrix { tasks: vec![spec.clone()], ..Matrix::default() }).unwrap();
    let told = "3 of 3 samples hold all documents of mine.jsonl and may be shorter";
    assert_eq!(jobs[0].about.notes(Some("tiny")), format!("mine.jsonl; {told}"));
    let [warning] = &notes.warnings[..] else { panic!("{:?}", notes.warnings) };
    assert!(warning.starts_with("ruler/qa at 400: 3 of 3 samples hold all documents"), "{warning}");
    // A run goes on with another limit, and with a model of another tokenizer.
    let run = |name: &str, limit| {
        let matrix = Matrix { tasks: vec![spec.clone()], limit, ..Matrix::default() };
        let (jobs, _) = load_as(name, 1024, &matrix).unwrap();
        RunInfo { tasks: vec![jobs[0].about.clone()], ..RunInfo::default() }
    };
    let (mut more, mut other) = (run("tiny", None), run("other", Some(1)));
    more.continue_from(&run("tiny", Some(2))).unwrap();
    other.continue_from(&more).unwrap();
    let notes = ["tiny", "other"].map(|model| other.tasks[0].notes(Some(model)));
    assert_eq!(
        notes,
        ["3 of 3", "1 of 1"].map(|all| format!("mine.jsonl; {all}{}", &told["3 of 3".len()..]))
    );
    assert_eq!(["tiny", "other"].map(|model| other.tasks[0].samples_of(model)), [3, 1]);
}

#[test]
fn a_suite_takes_the_papers_edition_where_the_data_have_it() {
    let line = r#"{"_id": "a", "input": "q", "context": "Passage 1:\nc", "answers": ["a"]}"#.to_owned();
    let folder = folder_with("longbench/hotpotqa.jsonl", std::slice::from_ref(&line));
    for name in ["qasper", "qasper_e"] {
        std::fs::write(folder.path().join(format!("longbench/{name}.jsonl")), &line).unwrap();
    }
    let data = Some(folder.path().to_path_buf());
    let matrix = Matrix { tasks: vec![task("longbench/a3", &[])], data, ..Matrix::default() };
    let (jobs, notes) = load_on(1024, &matrix).unwrap();
    let read: Vec<_> = jobs.iter().map(|job| (&*job.about.task, &*job.about.note)).collect();
    let other = "1 of 200 records; LongBench's set, where the paper has LongBench-E's";
    assert_eq!(read, [("qasper_e", "LongBench-E"), ("hotpotqa", other)]);
    assert_eq!(notes.left_out.len(), 9);
}
