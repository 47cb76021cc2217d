//! Properties of the benchmark's samples.

use std::collections::HashMap;
use std::path::PathBuf;

use super::super::testing::{Words, data, folder_with};
use super::*;

const LONG: LongBenchOptions =
    LongBenchOptions { max_prompt_tokens: usize::MAX, chunk_tokens: 512, split: Split::Marked };

fn prompt(sample: &Sample) -> String {
    format!("{}{}{}", sample.before, sample.documents.concat(), sample.question)
}

/// The template with plain substitution, in one pass.
fn filled(template: &str, context: &str, input: &str) -> String {
    template.split("{context}").map(|part| part.replace("{input}", input)).collect::<Vec<_>>().join(context)
}

fn line(context: &str, input: &str) -> String {
    serde_json::json!({"_id": "id", "input": input, "context": context, "answers": ["Ann"], "length": 3,
        "dataset": "x", "language": "en", "all_classes": ["City", "State"]})
    .to_string()
}

/// The only sample of a file of its own.
fn one(name: &str, context: &str, input: &str, options: &LongBenchOptions) -> Sample {
    let folder = folder_with(&format!("{name}.jsonl"), &[line(context, input)]);
    let loaded = samples(name, folder.path(), None, options, &Words::default()).unwrap();
    assert_eq!(loaded.samples.len(), 1);
    loaded.samples.into_iter().next().unwrap()
}

#[test]
fn chat_and_first_line_are_as_in_the_benchmarks_scripts() {
    let named = |is: fn(&Task) -> bool| -> Vec<&str> {
        TASKS.iter().filter(|task| is(task)).map(|task| task.name).collect()
    };
    assert_eq!(named(|task| !task.chat()), ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"]);
    assert_eq!(named(Task::first_line), ["trec", "triviaqa", "samsum", "lsht"]);
    assert_eq!(TASKS.len(), 21);
    // As many as its paper counts.
    assert_eq!(TASKS.iter().map(|task| task.samples).sum::<usize>(), 4750);
    for task in TASKS {
        assert_eq!(task.prompt.matches("{context}").count(), 1, "{}", task.name);
    }
    assert_eq!(SUITES.iter().map(|(_, suite)| suite.len()).collect::<Vec<_>>(), [11, 4, 15]);
    for (_, suite) in SUITES {
        assert!(suite.iter().all(|name| task(name).is_ok_and(|task| task.name == without_edition(name))));
    }
}

#[test]
fn every_task_has_its_prompt_and_limits() {
    let context = "Some {input} text.\n";
    for task in TASKS {
        let sample = one(task.name, context, "What {context}?", &LONG);
        assert_eq!(prompt(&sample), filled(task.prompt, context, "What {context}?"), "{}", task.name);
        assert_eq!(sample.documents, [context]);
        let samsum = task.name == "samsum";
        assert_eq!((sample.min_tokens, sample.stop.len()), (usize::from(samsum), usize::from(samsum)));
        assert_eq!((sample.max_tokens, sample.chat, &*sample.id), (task.max_tokens, task.chat(), "id"));
        assert_eq!((sample.context_words, &*sample.gold.answers), (Some(3), &["Ann".to_owned()][..]));
        assert_eq!(sample.gold.classes, ["City", "State"]);
    }
    assert_eq!(one("samsum", context, "", &LONG).stop, ["\n"]);
    assert!(one("lcc", "", "", &LONG).documents.is_empty());
}

#[test]
fn documents_begin_at_their_markers() {
    for (name, parts) in [
        (
            "hotpotqa",
            vec!["Lead\n", "Passage 1:\nA\nsee Passage 9:\n\n", "Passage 22:\nB\nPassage x:\nPassage :\n"],
        ),
        ("multi_news", vec!["Passage 1:\nPassage 2\n", "Passage 2:\nB"]),
        ("passage_count", vec!["Paragraph 1: A\nParagraph 7:\n\n", "Paragraph 2: B"]),
        ("passage_retrieval_zh", vec!["段落1：甲\n段落二：\n", "段落2：乙"]),
        ("dureader", vec!["文章1\n标题：甲\n文章2号\n\n", "文章2\n标题：乙"]),
        ("qasper", vec!["Passage 1:\nA\n\nPassage 2:\nB"]),
    ] {
        assert_eq!(one(name, &parts.concat(), "q", &LONG).documents, parts, "{name}");
        let whole = one(name, &parts.concat(), "q", &LongBenchOptions { split: Split::Tokens, ..LONG });
        assert_eq!(whole.documents, [parts.concat()], "{name}");
    }
}

#[test]
fn lines_without_what_scores_are_refused_by_their_number() {
    let bare = |key: &str| {
        let mut line: serde_json::Value = serde_json::from_str(&line("c", "q")).unwrap();
        line[key] = serde_json::json!([]);
        line.to_string()
    };
    for (name, key) in [("qasper", "answers"), ("trec", "all_classes"), ("lsht", "all_classes")] {
        let folder = folder_with(&format!("{name}.jsonl"), &[line("c", "q"), String::new(), bare(key)]);
        let error = samples(name, folder.path(), None, &LONG, &Words::default()).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}.jsonl: line 3: `{key}` is ")), "{error}");
    }
    let folder = folder_with("qasper.jsonl", &[bare("all_classes")]);
    assert!(samples("qasper", folder.path(), None, &LONG, &Words::default()).is_ok());
}

#[test]
fn examples_are_packed_but_never_cut() {
    let block = |i: usize| format!("Question: What is {i} ?\nType: City\n");
    let context: String = (0..10).map(block).collect();
    // Seven tokens a block, and one for the last line break.
    for (chunk_tokens, blocks) in [(0, 1), (14, 1), (15, 2), (28, 3), (29, 4), (1000, 10)] {
        let documents = one("trec", &context, "", &LongBenchOptions { chunk_tokens, ..LONG }).documents;
        assert_eq!(documents.concat(), context);
        assert_eq!(documents.len(), 10usize.div_ceil(blocks), "{chunk_tokens}");
        assert_eq!(documents[0], (0..blocks).map(block).collect::<String>());
        assert!(
            documents.iter().all(|document| document.starts_with("Question: ") && document.ends_with('\n'))
        );
    }
}

#[test]
fn the_middle_is_left_out_of_long_prompts() {
    let context: String = (0..40).map(|i| format!("Passage {i}:\nT{i} a b\n\n")).collect();
    let whole = filled(MULTI_HOP, &context, "Who?");
    let words = Words::default();
    let ids = words.encode(&whole).unwrap();
    for tokens in [120, 121, 60, 7, 1, 0] {
        let sample =
            one("hotpotqa", &context, "Who?", &LongBenchOptions { max_prompt_tokens: tokens, ..LONG });
        let half = tokens / 2;
        let expected = words.decode(&ids[..half]) + &words.decode(&ids[ids.len() - half..]);
        assert_eq!(prompt(&sample), expected, "{tokens}");
        if tokens >= 120 {
            assert!(
                sample.before.ends_with("given passages.\n") && sample.question.starts_with("\n\nAnswer")
            );
            assert!(sample.documents[0].starts_with("Passage 0:\n"));
            assert!(sample.documents.len() > 5 && sample.documents.len() < 40);
        }
    }
    // Within the limit nothing is.
    let options = LongBenchOptions { max_prompt_tokens: ids.len(), ..LONG };
    assert_eq!(prompt(&one("hotpotqa", &context, "Who?", &options)), whole);
}

#[test]
fn a_question_longer_than_half_begins_in_the_first_half() {
    let input = "word ".repeat(200);
    let sample = one(
        "trec",
        "Question: a\nType: City\n",
        &input,
        &LongBenchOptions { max_prompt_tokens: 100, ..LONG },
    );
    assert_eq!(sample.documents, ["Question: a\nType: City\n"]);
    assert!(sample.before.ends_with("examples of questions.\n\n"));
    assert!(sample.question.starts_with("\nword word") && sample.question.len() < input.len());
    // Instructions that are cut leave no context on their side.
    let cut =
        one("trec", "Question: a\nType: City\n", &input, &LongBenchOptions { max_prompt_tokens: 10, ..LONG });
    assert_eq!(cut.before, "Please determine the type of");
    assert!(cut.documents.is_empty());
}

#[test]
fn notes_tell_what_is_not_the_benchmark() {
    let lines = |count| vec![line("c", "i"); count];
    let note = |name: &str, file: &str, lines: &[String]| {
        let folder = folder_with(file, lines);
        let loaded = samples(name, folder.path(), Some(1), &LONG, &Words::default()).unwrap();
        assert_eq!(loaded.samples.len(), 1);
        assert_eq!(loaded.hash, blake3::hash(lines.join("\n").as_bytes()).to_hex().to_string());
        (loaded.note, loaded.of)
    };
    let v1 = |count| note("hotpotqa", "longbench/hotpotqa.jsonl", &lines(count));
    assert_eq!(v1(40), ("40 of 200 records".into(), Some(200)));
    assert_eq!(v1(200), (String::new(), Some(200)));
    let mixed = [line("c", "i"), line("c", "i").replace("\"x\"", "\"hotpotqa_e\"")];
    assert_eq!(note("hotpotqa", "hotpotqa.jsonl", &mixed).0, "2 of 200 records, 1 of LongBench-E");
    assert_eq!(note("hotpotqa_e", "hotpotqa_e.jsonl", &mixed), ("LongBench-E".into(), None));
    let derived = note("hotpotqa_short", "longbench_derived/hotpotqa_short.jsonl", &lines(2));
    assert_eq!(derived, ("derived from the data of hotpotqa, not LongBench".into(), None));
}

#[test]
fn what_is_wrong_is_said() {
    let error = |name: &str, lines: &[String]| {
        let folder = folder_with("longbench/trec.jsonl", lines);
        samples(name, folder.path(), None, &LONG, &Words::default()).unwrap_err().to_string()
    };
    let good = line("c", "i");
    let unknown = error("trek", std::slice::from_ref(&good));
    assert!(unknown.contains("no task \"trek\"") && unknown.contains("narrativeqa, qasper"), "{unknown}");
    assert!(error("_e", std::slice::from_ref(&good)).contains("no task \"_e\""));
    let missing = error("lcc", std::slice::from_ref(&good));
    let tried = "has no longbench/lcc.jsonl, nor longbench_derived/lcc.jsonl, nor lcc.jsonl; `refrain eval fetch` explains";
    assert!(missing.contains(tried), "{missing}");
    for (bad, expected) in [
        ("{", "longbench/trec.jsonl: line 3: EOF while parsing"),
        (&*good.replace("\"context\"", "\"text\""), "longbench/trec.jsonl: line 3: missing field `context`"),
        (&*good.replace("[\"Ann\"]", "\"Ann\""), "longbench/trec.jsonl: line 3: invalid type: string"),
    ] {
        let got = error("trec", &[good.clone(), String::new(), bad.into()]);
        assert!(got.contains(expected) && !got.contains("at line"), "{got}");
    }
}

/// Files of a folder of the data, by the name of their set.
fn sets(data: &Path, folder: &str) -> Vec<(String, PathBuf)> {
    let paths = data.join(folder).read_dir().unwrap().map(|entry| entry.unwrap().path());
    let jsonl = paths.filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    jsonl.map(|path| (path.file_stem().unwrap().to_str().unwrap().to_string(), path)).collect()
}

#[test]
fn every_file_loads_and_fills_its_template() {
    let Some(data) = data("longbench") else { return };
    let sets = [sets(&data, "longbench"), sets(&data, "longbench_derived")].concat();
    assert!(sets.len() >= 20);
    for (name, path) in sets {
        let words = Words::default();
        let loaded = samples(&name, &data, None, &LONG, &words).unwrap();
        let lines: Vec<Line> = DataFile::open(&path).unwrap().lines().unwrap();
        assert_eq!(loaded.samples.len(), lines.len(), "{name}");
        assert_eq!(loaded.note.contains("derived from"), name.ends_with("_short"), "{name}: {}", loaded.note);
        let task = task(&name).unwrap();
        for (sample, index) in loaded.samples.iter().zip(spread(lines.len(), None)) {
            let line = &lines[index];
            assert_eq!(sample.documents.concat(), line.context, "{name}");
            assert_eq!(prompt(sample), filled(task.prompt, &line.context, &line.input), "{name}");
            let parts = sample.documents.len();
            match task.context {
                Context::Documents(marker) => assert_eq!(parts, marker.parts(&line.context).len()),
                Context::Examples(marker) => check_packed(sample, &marker.parts(&line.context), &words),
                Context::Whole => assert_eq!(parts, 1, "{name}"),
            }
        }
        let most = loaded.samples.iter().map(|sample| sample.documents.len()).max().unwrap();
        assert_eq!(most > 1, task.context != Context::Whole, "{name}");
    }
}

/// No block is cut, and no two neighbours would fit one chunk.
fn check_packed(sample: &Sample, blocks: &[&str], words: &Words) {
    let mut blocks = blocks.iter();
    for document in &sample.documents {
        let mut joined = String::new();
        while joined.len() < document.len() {
            joined += blocks.next().unwrap();
        }
        assert_eq!(&joined, document);
    }
    assert!(blocks.next().is_none());
    for two in sample.documents.windows(2) {
        let first_of_next = task_block(&two[1]);
        assert!(words.encode(&format!("{}{first_of_next}", two[0])).unwrap().len() > LONG.chunk_tokens);
    }
}

/// The first block of some that begin alike.
fn task_block(document: &str) -> &str {
    let head = document.split_inclusive([' ', '\n']).next().unwrap();
    let next = document[head.len()..].find(&format!("\n{head}"));
    next.map_or(document, |at| &document[..head.len() + at + 1])
}

#[test]
fn halves_of_long_prompts_remain() {
    let Some(data) = data("longbench") else { return };
    let options = LongBenchOptions { max_prompt_tokens: 200, ..LONG };
    for name in ["2wikimqa", "gov_report", "lcc", "samsum", "multifieldqa_en"] {
        let words = Words::default();
        let cut = samples(name, &data, Some(3), &options, &words).unwrap().samples;
        let whole = samples(name, &data, Some(3), &LONG, &words).unwrap().samples;
        for (cut, whole) in cut.iter().zip(&whole) {
            let ids = words.encode(&prompt(whole)).unwrap();
            assert!(ids.len() > 200, "{name}");
            let halves = words.decode(&ids[..100]) + &words.decode(&ids[ids.len() - 100..]);
            assert_eq!(prompt(cut), halves, "{name}");
        }
    }
}

#[test]
fn the_table_is_the_benchmarks_configuration() {
    let Some(data) = data("longbench/config") else { return };
    let config = |name: &str| -> HashMap<String, serde_json::Value> {
        serde_json::from_str(&std::fs::read_to_string(data.join("longbench/config").join(name)).unwrap())
            .unwrap()
    };
    let (prompts, limits, metrics) =
        (config("dataset2prompt.json"), config("dataset2maxlen.json"), config("dataset2metric.json"));
    assert_eq!((prompts.len(), limits.len(), metrics.len()), (TASKS.len(), TASKS.len(), TASKS.len()));
    for task in TASKS {
        assert_eq!(prompts[task.name], task.prompt);
        assert_eq!(limits[task.name], task.max_tokens);
        let metric = serde_json::to_value(task.scoring).unwrap();
        let metric = if task.scoring == Scoring::Retrieval { "retrieval_en".into() } else { metric };
        assert_eq!(metrics[task.name], metric, "{}", task.name);
    }
}
