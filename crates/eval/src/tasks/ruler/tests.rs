//! Properties of every task's samples, for any seed.

use std::collections::{BTreeMap, HashMap};

use super::fit::text;
use super::task::fill;
use super::*;
use crate::tasks::testing::{data, needs};

const LENGTHS: [usize; 3] = [512, 1024, 4096];

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// Counts as tokenizers do: long words are several tokens, so that prompts of as many units differ.
fn pieces(text: &str) -> usize {
    text.split_whitespace().map(|word| word.len().div_ceil(4)).sum()
}

fn built_in(task: &str, length: usize, count: usize) -> Vec<Sample> {
    let ruler = Ruler::open(None).unwrap();
    ruler.samples(task, length, count, 42, &words, &RulerOptions::default()).unwrap()
}

#[test]
fn every_task_fills_its_length_and_says_the_answer() {
    let ruler = Ruler::open(None).unwrap();
    assert_eq!(TASKS.len(), 11);
    for task in TASKS {
        for length in LENGTHS {
            for max_tokens in [None, Some(64)] {
                let options = RulerOptions { max_tokens, ..RulerOptions::default() };
                let samples = ruler.samples(task.name, length, 3, 42, &words, &options).unwrap();
                assert_eq!(samples.len(), 3);
                for (index, sample) in samples.iter().enumerate() {
                    let name = format!("{}-{length}-{index}", task.name);
                    assert_eq!(sample.id, name);
                    assert_eq!(sample.max_tokens, max_tokens.unwrap_or(task.tokens_to_generate));
                    assert_eq!((sample.length, sample.chat, sample.documents.len()), (Some(length), true, 1));
                    let size = words(&text(sample)) + sample.max_tokens;
                    // A unit is at most a line of noise or, of coded words, a 32nd of the prompt.
                    let unit = (length / 32).max(18) + 1;
                    assert!(size <= length && size + unit > length, "{name}: {size}");
                    assert!(!sample.gold.answers.is_empty());
                    for answer in &sample.gold.answers {
                        assert!(sample.documents[0].contains(answer.as_str()), "{name}: no {answer}");
                    }
                }
            }
        }
    }
}

#[test]
fn samples_whose_words_have_several_tokens_fit_within_a_step() {
    let ruler = Ruler::open(None).unwrap();
    for task in TASKS {
        for sample in ruler.samples(task.name, 4096, 10, 7, &pieces, &RulerOptions::default()).unwrap() {
            let size = pieces(&text(&sample)) + sample.max_tokens;
            // The longest step is 500 words of prose, some of which have two tokens.
            let step = if task.name.starts_with("niah") { 900 } else { 300 };
            assert!(size <= 4096 && size + step > 4096, "{}: {size}", sample.id);
        }
    }
}

#[test]
fn a_seed_is_all_that_a_sample_depends_on() {
    let ruler = Ruler::open(None).unwrap();
    let samples = |task: &str, length, count, seed| {
        ruler.samples(task, length, count, seed, &words, &RulerOptions::default()).unwrap()
    };
    for task in TASKS {
        let three = samples(task.name, 1024, 3, 42);
        assert_eq!(three, samples(task.name, 1024, 3, 42));
        assert_eq!(three[..2], samples(task.name, 1024, 2, 42));
        assert_ne!(text(&three[0]), text(&three[1]));
        assert_ne!(text(&three[0]), text(&samples(task.name, 1024, 1, 43)[0]));
        assert_ne!(three[0].gold, samples(task.name, 1100, 1, 42)[0].gold);
    }
}

#[test]
fn what_there_is_not_is_refused() {
    let ruler = Ruler::open(None).unwrap();
    let ask = |task: &str, length| {
        ruler
            .samples(task, length, 1, 1, &words, &RulerOptions::default())
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert!(ask("niah_single_4", 4096).contains("niah_multikey_3"));
    for task in TASKS {
        for length in [0, 60, task.tokens_to_generate] {
            assert!(ask(task.name, length).contains(task.name));
        }
    }
}

#[test]
fn a_prompt_with_less_room_keeps_the_parameters_of_its_length() {
    let ruler = Ruler::open(None).unwrap();
    let options = RulerOptions { room: Some(3968), ..RulerOptions::default() };
    let sample = &ruler.samples("cwe", 4096, 1, 42, &words, &options).unwrap()[0];
    assert!(words(&text(sample)) + sample.max_tokens <= 3968);
    assert_eq!((sample.length, sample.id.as_str()), (Some(4096), "cwe-4096-0"));
    // Ten words ten times, and thirty others three times.
    assert!(sample.before.contains(" 190. ") && !sample.before.contains(" 191. "));
}

#[test]
fn needles_are_as_many_as_the_task_has() {
    // Needles, answers and lines or words of the haystack that are needles too.
    let expected = [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ];
    for (task, needles, answers) in expected {
        for sample in built_in(task, 1024, 5) {
            assert_eq!(sample.documents[0].matches("One of the special magic ").count(), needles, "{task}");
            assert_eq!(sample.gold.answers.len(), answers, "{task}");
            assert_eq!(sample.depth.is_some(), needles == 1, "{task}");
        }
    }
    for task in ["niah_multikey_2", "niah_multikey_3"] {
        let sample = &built_in(task, 1024, 1)[0];
        let lines: Vec<&str> = sample.documents[0].lines().collect();
        assert!(lines.len() > 50 && lines.iter().all(|line| line.starts_with("One of the special magic ")));
        let line = lines.iter().position(|line| line.contains(&sample.gold.answers[0])).unwrap();
        assert_eq!(sample.depth, Some(line as f64 * 100.0 / (lines.len() - 1) as f64));
    }
}

#[test]
fn every_key_asked_for_has_its_answers_in_order() {
    let sample = &built_in("niah_multiquery", 1024, 1)[0];
    let query = sample.question.split(" numbers for ").nth(1).unwrap().split(" mentioned").next().unwrap();
    let keys: Vec<&str> = query.split(", ").map(|key| key.trim_start_matches("and ")).collect();
    assert_eq!(keys.len(), 4);
    assert!(query.contains(", and ") && sample.answer_prefix.contains(query));
    for (key, value) in keys.iter().zip(&sample.gold.answers) {
        assert!(sample.documents[0].contains(&format!("numbers for {key} is: {value}.")));
    }
}

#[test]
fn noise_is_lines() {
    let sample = &built_in("niah_single_1", 1024, 1)[0];
    let (needles, noise): (Vec<&str>, Vec<&str>) =
        sample.documents[0].split('\n').partition(|line| line.starts_with("One of"));
    assert_eq!(needles.len(), 1);
    assert!(noise.iter().all(|line| *line == niah::NOISE));
    let value: usize = sample.gold.answers[0].parse().unwrap();
    assert!((1_000_000..10_000_000).contains(&value));
}

/// Names that a chain's assignments give a value.
fn evaluate(text: &str, value: &str) -> Vec<String> {
    let mut variables: BTreeMap<&str, &str> = BTreeMap::new();
    let mut names = Vec::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("VAR ")) {
        let (name, assigned) = line.split_once(" = ").unwrap();
        let assigned = match assigned.strip_prefix("VAR ") {
            Some(other) => variables[other.strip_suffix(' ').expect("RULER's trailing space")],
            None => assigned,
        };
        variables.insert(name, assigned);
        if assigned == value {
            names.push(name.to_string());
        }
    }
    names
}

#[test]
fn a_chain_of_variables_leads_to_its_value() {
    for length in LENGTHS {
        for sample in built_in("vt", length, 5) {
            let value = sample.question.split("the value ").nth(1).unwrap().split(' ').next().unwrap();
            assert!((10_000..=99_998).contains(&value.parse::<usize>().unwrap()));
            let names = evaluate(&sample.documents[0], value);
            assert_eq!(names, sample.gold.answers);
            assert!(names.len() == 5 && names.iter().all(|name| name.len() == 5));
            assert!(
                sample
                    .answer_prefix
                    .contains(&format!("5 variables are assigned the value {value}, they are: "))
            );
        }
    }
}

#[test]
fn variable_tracking_has_a_worked_example() {
    let samples = built_in("vt", 4096, 2);
    for sample in &samples {
        let (example, rest) = sample.before.split_once("\n\nMemorize and track").unwrap();
        assert!(
            example.starts_with("Memorize and track the chain(s)") && rest.ends_with("following text.\n\n")
        );
        let (prompt, answer) = example.split_once("they are:  ").unwrap();
        let value = prompt.rsplit("the value ").next().unwrap().split(',').next().unwrap();
        assert_eq!(evaluate(prompt, value).join(" "), answer);
        assert!(answer.split(' ').all(|name| name.len() == 3));
        let size = words(prompt) + 30;
        assert!((480..=500).contains(&size), "{size}");
    }
    assert_ne!(samples[0].before, samples[1].before);
}

fn counts<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<(usize, &'a str)> {
    let mut counts = HashMap::new();
    words.into_iter().for_each(|word| *counts.entry(word).or_insert(0) += 1);
    let mut counts: Vec<(usize, &str)> = counts.into_iter().map(|(word, count)| (count, word)).collect();
    counts.sort_by(|a, b| b.cmp(a));
    counts
}

/// The items of `1. a 2. b`, whose numbers must count up.
fn items(list: &str) -> Vec<&str> {
    let parts: Vec<&str> = list.split(' ').collect();
    let numbered = parts.chunks(2).zip(1..);
    numbered
        .map(|(item, number)| {
            assert_eq!(item[0], format!("{number}."));
            item[1]
        })
        .collect()
}

#[test]
fn the_common_words_are_the_most_frequent() {
    for (length, repeats, example_repeats) in [(1024, [6, 1], [3, 1]), (4096, [30, 3], [10, 3])] {
        for sample in built_in("cwe", length, 3) {
            let (example, instruction) =
                sample.before.rsplit_once('\n').unwrap().0.rsplit_once('\n').unwrap();
            assert!(instruction.starts_with("Below is a numbered list of words."));
            let answer = example.split("in the list are: ").nth(1).unwrap();
            let list = example.lines().nth(1).unwrap();
            for (list, mut gold, repeats) in [
                (list, items(answer), example_repeats),
                (&sample.documents[0][..], sample.gold.answers.iter().map(String::as_str).collect(), repeats),
            ] {
                let counts = counts(items(list));
                let mut common: Vec<&str> = counts[..10].iter().map(|(_, word)| *word).collect();
                assert!(counts[..10].iter().all(|(count, _)| *count == repeats[0]));
                assert!(counts[10..].iter().all(|(count, _)| *count == repeats[1]));
                gold.sort_unstable();
                common.sort_unstable();
                assert_eq!(common, gold);
            }
        }
    }
}

#[test]
fn the_words_asked_for_are_the_most_frequent_but_the_dots() {
    for length in LENGTHS {
        for sample in built_in("fwe", length, 3) {
            let counts = counts(sample.documents[0].split(' '));
            assert_eq!(counts[0].1, "...");
            let ranked: Vec<&str> = counts[1..4].iter().map(|(_, word)| *word).collect();
            assert_eq!(ranked, sample.gold.answers);
            assert!(counts[3].0 > counts[4].0, "the fourth is not the third: {counts:?}");
            // Zipf: rank k stands k⁻² as often as the first.
            assert!(counts[1].0.abs_diff(counts[0].0 / 4) <= 1 && counts[2].0.abs_diff(counts[0].0 / 9) <= 1);
        }
    }
}

fn questions(lines: &str) -> (tempfile::TempDir, Result<Questions>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("questions.jsonl");
    std::fs::write(&path, lines).unwrap();
    let questions = Questions::open(&path);
    (folder, questions)
}

#[test]
fn questions_keep_what_supports_them_and_take_others_beside() {
    let line = |i: usize| {
        let document = |j: usize| serde_json::json!({"title": format!("T{i}.{j}"), "text": "many words ".repeat(10), "supporting": j == 2});
        let docs: Vec<_> = (0..4).map(document).collect();
        serde_json::json!({"question": format!("Q{i}?"), "answers": ["yes"], "docs": docs}).to_string()
    };
    let lines: Vec<String> = (0..20).map(line).collect();
    let (_folder, questions) = questions(&lines.join("\n"));
    let questions = questions.unwrap();
    let count = |length| {
        let (samples, too_long) =
            questions.samples(length, 99, 42, &words, &RulerOptions::default()).unwrap();
        assert_eq!((samples.len(), too_long.len()), (20, 0));
        for (i, sample) in samples.iter().enumerate() {
            assert_eq!(sample.id, format!("qa-{length}-{i}"));
            assert!(words(&text(sample)) + 32 <= length);
            let context = sample.documents.concat();
            assert!(context.contains(&format!("\nT{i}.2\n")), "{context}");
            let titles: Vec<&str> = context.lines().filter(|line| line.starts_with('T')).collect();
            assert_eq!(titles.len(), sample.documents.len());
            assert_eq!(counts(titles)[0].0, 1);
            let numbers = sample.documents.iter().zip(1..);
            assert!(
                numbers.into_iter().all(|(text, number)| text.starts_with(&format!("Document {number}:\nT")))
            );
            assert_eq!(context.matches("\n\nDocument").count(), sample.documents.len() - 1);
            assert!(!context.ends_with("\n\n"));
            assert!(sample.question.ends_with(&format!("any other words.\n\nQuestion: Q{i}?")));
        }
        samples[0].documents.len()
    };
    // A document is 23 words, all else 80 with the answer.
    assert_eq!([count(103), count(512), count(4096)], [1, 18, 80]);
    assert!(questions.samples(102, 1, 42, &words, &RulerOptions::default()).is_err());
}

#[test]
fn a_file_of_no_questions_is_refused() {
    for lines in ["", "{}", r#"{"question": "Q", "answers": [], "docs": [{"title": "", "text": ""}]}"#, "[1"]
    {
        assert!(questions(lines).1.is_err(), "{lines}");
    }
}

#[test]
fn a_sample_has_the_shape_of_rulers_own() {
    let Some(data) = data("ruler") else { return };
    let file = data.join("ruler/reference_samples/niah_multikey_3_4096_first20.jsonl");
    let ruler = Ruler::open(Some(&data.join("ruler"))).unwrap();
    assert_eq!(ruler.source(), "essays: Paul Graham; words: wonderwords");
    let ours = ruler.samples("niah_multikey_3", 4096, 1, 42, &words, &RulerOptions::default()).unwrap();
    // All UUIDs are replaced by one word, which leaves the template, here with the answer prefix in `input`.
    let shape = |text: &str| {
        let is_hex = |c: char| c.is_ascii_hexdigit() || c == '-';
        let plain = |word: &str| {
            let uuid = word.trim_end_matches(['.', '\n']);
            if uuid.len() == 36 && uuid.chars().all(is_hex) {
                word.replace(uuid, "UUID")
            } else {
                word.into()
            }
        };
        let lines: Vec<String> =
            text.split('\n').map(|line| line.split(' ').map(plain).collect::<Vec<_>>().join(" ")).collect();
        (lines[0].clone(), lines[1..lines.len() - 1].to_vec(), lines[lines.len() - 1].clone())
    };
    let (first, mut needles, last) = shape(&text(&ours[0]));
    needles.dedup();
    for line in std::fs::read_to_string(file).unwrap().lines() {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let (their_first, mut their_needles, their_last) = shape(record["input"].as_str().unwrap());
        their_needles.dedup();
        assert_eq!((&their_first, &their_needles, &their_last), (&first, &needles, &last));
    }
}

#[test]
fn the_templates_are_those_of_the_data() {
    let Some(data) = data("ruler") else { return };
    let tasks: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(data.join("ruler/tasks.json")).unwrap()).unwrap();
    let ruler = Ruler::open(Some(&data.join("ruler"))).unwrap();
    for task in TASKS {
        let sample = &ruler.samples(task.name, 4096, 1, 1, &words, &RulerOptions::default()).unwrap()[0];
        let base = &tasks["base"][tasks["tasks"][task.name]["task"].as_str().unwrap()];
        assert_eq!(base["tokens_to_generate"], task.tokens_to_generate);
        if task.name.starts_with("niah") {
            continue; // In the singular: the wording has its own test.
        }
        let value = sample.question.split("the value ").nth(1).and_then(|rest| rest.split(' ').next());
        let places = [("{query}", value.unwrap_or_default()), ("{num_v}", "5")];
        let (before, question) = base["template"].as_str().unwrap().split_once("{context}").unwrap();
        assert!(sample.before.ends_with(before));
        assert_eq!(sample.question, fill(question, &places));
        assert_eq!(sample.answer_prefix, fill(base["answer_prefix"].as_str().unwrap(), &places));
    }
    let hotpotqa = Questions::open(&data.join("rag/hotpotqa_train100.jsonl")).unwrap();
    let sample = &hotpotqa.samples(4096, 1, 1, &words, &RulerOptions::default()).unwrap().0[0];
    let (before, question) =
        tasks["base"]["qa"]["template"].as_str().unwrap().split_once("{context}").unwrap();
    assert_eq!(sample.before, before);
    assert!(sample.question.starts_with(question.strip_suffix("{query}").unwrap()));
}

#[test]
fn samples_fit_when_a_model_counts() {
    let Some(data) = data("ruler") else { return };
    let Some(model) = std::env::var_os("REFRAIN_MODEL") else {
        return needs::skip("tokenizer", "REFRAIN_MODEL names no model whose tokenizer could count");
    };
    let tokenizer =
        refrain::model::Tokenizer::open(&refrain::model::ModelFiles::open(model).unwrap()).unwrap();
    let tokens = |text: &str| tokenizer.encode(text, refrain::model::Specials::Plain).unwrap().len();
    let ruler = Ruler::open(Some(&data.join("ruler"))).unwrap();
    for task in TASKS {
        let start = std::time::Instant::now();
        let samples = ruler.samples(task.name, 4096, 5, 42, &tokens, &RulerOptions::default()).unwrap();
        let sizes: Vec<usize> =
            samples.iter().map(|sample| tokens(&text(sample)) + sample.max_tokens).collect();
        eprintln!("{}: {sizes:?} in {:?}", task.name, start.elapsed());
        assert!(sizes.iter().all(|size| (3000..=4096).contains(size)), "{}: {sizes:?}", task.name);
    }
}
