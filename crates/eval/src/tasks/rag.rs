//! Questions over documents of their own: the natural input of chunk reuse.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::TaskData;
use super::file::{DataFile, spread};
use super::longbench::MULTI_HOP;
use crate::{Gold, Result, Sample, Scoring};

/// A question with its accepted answers and its documents.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Question {
    #[serde(rename = "_id", default)]
    pub(crate) id: String,
    pub(crate) question: String,
    pub(crate) answers: Vec<String>,
    pub(crate) docs: Vec<Document>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Document {
    #[serde(default)]
    pub(crate) title: String,
    pub(crate) text: String,
    /// Whether it has part of the answer, if that is known.
    pub(crate) supporting: Option<bool>,
}

/// The questions of a file, each with answers and documents.
pub(crate) fn questions(file: &DataFile) -> Result<Vec<Question>> {
    let questions: Vec<Question> = file.lines()?;
    for (index, question) in questions.iter().enumerate() {
        if question.answers.is_empty() || question.docs.is_empty() {
            return Err(file.wrong(format!("question {}: it needs answers and docs", index + 1)));
        }
    }
    Ok(questions)
}

/// How questions are asked and answers scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wording {
    /// As LongBench's hotpotqa.
    LongBench,
    /// As CacheBlend's own scripts (YaoJiayi/CacheBlend @55ad026 `blend_musique.py`).
    CacheBlend,
}

/// The file of a set: `rag/NAME.jsonl` of a folder, or its `NAME.jsonl`.
///
/// # Errors
/// If there is neither.
pub fn find(name: &str, folder: &Path) -> Result<PathBuf> {
    Ok(DataFile::find(folder, &[format!("rag/{name}.jsonl"), format!("{name}.jsonl")])?.path)
}

/// Samples of a file; `limit` takes some of all over it. A set whose name begins with
/// `cacheblend` is asked and scored as CacheBlend does it.
///
/// # Errors
/// If it cannot be read or is malformed.
pub fn samples(path: &Path, limit: Option<usize>) -> Result<TaskData> {
    let file = DataFile::open(path)?;
    let questions = questions(&file)?;
    let wording =
        if file.stem().starts_with("cacheblend") { Wording::CacheBlend } else { Wording::LongBench };
    let taken = spread(questions.len(), limit).map(|index| (index, &questions[index]));
    let (scoring, note) = match wording {
        Wording::LongBench => (Scoring::QaF1, "asked as LongBench's hotpotqa"),
        Wording::CacheBlend => (Scoring::TokenF1, "CacheBlend's protocol"),
    };
    Ok(TaskData {
        samples: taken.map(|(index, question)| wording.sample(index, question)).collect(),
        scoring,
        first_line: false,
        temperature: 0.0,
        top_p: 1.0,
        of: None,
        note: note.into(),
        hash: file.hash(),
    })
}

impl Wording {
    fn sample(self, index: usize, question: &Question) -> Sample {
        let documents = question.docs.iter().map(|document| self.document(document)).collect();
        let (before, asked) = self.around(&question.question);
        Sample {
            id: if question.id.is_empty() { index.to_string() } else { question.id.clone() },
            before,
            documents,
            question: asked,
            // CacheBlend's prompts stand between the marks of an instruction too.
            chat: true,
            max_tokens: 32,
            gold: Gold { answers: question.answers.clone(), ..Gold::default() },
            ..Sample::default()
        }
    }

    /// A document with the separator that follows it.
    fn document(self, Document { title, text, .. }: &Document) -> String {
        match self {
            Wording::LongBench if title.is_empty() => format!("{text}\n\n"),
            Wording::LongBench => format!("{title}\n{text}\n\n"),
            Wording::CacheBlend => format!("{title}\n\n{text}\n\n"),
        }
    }

    /// The prompt's text before and after the documents.
    fn around(self, question: &str) -> (String, String) {
        match self {
            Wording::LongBench => {
                let (before, after) = MULTI_HOP.split_once("{context}").unwrap_or_default();
                // The last document ends with the blank line that the template has here.
                (before.into(), after.trim_start_matches('\n').replace("{input}", question))
            }
            Wording::CacheBlend => (
                CACHEBLEND_BEFORE.into(),
                format!("{CACHEBLEND_QUESTION}{}\nAnswer:", cacheblend_question(question)),
            ),
        }
    }
}

const CACHEBLEND_BEFORE: &str = "You will be asked a question after reading several passages. Please directly answer the \
                                 question based on the given passages. Do NOT repeat the question. The answer should be \
                                 within 5 words..\nPassages:\n";
const CACHEBLEND_QUESTION: &str = "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. \
                                   The answer should be within 5 words. \nQuestion:";

/// CacheBlend's `normalize_question`: the first letter is lowercase, the end is a question mark.
fn cacheblend_question(question: &str) -> String {
    let mut letters = question.chars();
    let first = letters.next().map(char::to_lowercase).into_iter().flatten();
    let mark = if question.ends_with('?') { "" } else { "?" };
    first.chain(letters).collect::<String>() + mark
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::testing::{data, folder_with};

    fn line(title: &str) -> String {
        serde_json::json!({"_id": "q", "question": "Who is {input}", "answers": ["Ann"], "dataset": "d",
            "docs": [{"title": title, "text": "Ann is.", "supporting": null}, {"text": "Bob was."}]})
        .to_string()
    }

    fn prompt(sample: &Sample) -> String {
        format!("{}{}{}", sample.before, sample.documents.concat(), sample.question)
    }

    #[test]
    fn documents_stay_apart_and_are_asked_about_as_in_longbench() {
        let folder = folder_with("rag/mine.jsonl", &[line("Ann"), line(""), line("")]);
        let loaded = samples(&find("mine", folder.path()).unwrap(), Some(2)).unwrap();
        assert_eq!((loaded.samples.len(), loaded.scoring, loaded.of), (2, Scoring::QaF1, None));
        let [first, second] = &loaded.samples[..] else { unreachable!() };
        assert_eq!(first.documents, ["Ann\nAnn is.\n\n", "Bob was.\n\n"]);
        assert_eq!(second.documents[0], "Ann is.\n\n");
        let context = "Ann\nAnn is.\n\nBob was.";
        assert_eq!(
            prompt(first),
            MULTI_HOP.replace("{context}", context).replace("{input}", "Who is {input}")
        );
        assert_eq!((first.chat, first.max_tokens, &*first.id), (true, 32, "q"));
        assert_eq!(first.gold.answers, ["Ann"]);
    }

    #[test]
    fn cacheblends_sets_are_asked_as_cacheblend_does() {
        let folder = folder_with("cacheblend_x.jsonl", &[line("Ann")]);
        let loaded = samples(&find("cacheblend_x", folder.path()).unwrap(), None).unwrap();
        assert_eq!((loaded.scoring, &*loaded.note), (Scoring::TokenF1, "CacheBlend's protocol"));
        let sample = &loaded.samples[0];
        assert_eq!(sample.documents, ["Ann\n\nAnn is.\n\n", "\n\nBob was.\n\n"]);
        assert!(sample.before.ends_with("The answer should be within 5 words..\nPassages:\n"));
        assert!(sample.question.starts_with("\n\nAnswer the question directly based on"));
        assert!(sample.question.ends_with("within 5 words. \nQuestion:who is {input}?\nAnswer:"));
        assert_eq!((sample.chat, sample.max_tokens, sample.stop.len()), (true, 32, 0));
        for (question, expected) in [("Éa?", "éa?"), ("", "?"), ("Is it", "is it?")] {
            assert_eq!(cacheblend_question(question), expected);
        }
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let bare = r#"{"question": "q", "answers": [], "docs": []}"#.to_string();
        for (lines, expected) in [
            (vec![line("a"), bare], "mine.jsonl: question 2: it needs answers and docs"),
            (vec![String::new(), "{}".into()], "mine.jsonl: line 2: missing field `question`"),
            (vec![String::new()], "mine.jsonl: no records in it"),
        ] {
            let folder = folder_with("mine.jsonl", &lines);
            let error =
                find("mine", folder.path()).and_then(|path| samples(&path, None)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let error =
            find("mine", folder.path()).and_then(|path| samples(&path, None)).unwrap_err().to_string();
        assert!(error.contains("has no rag/mine.jsonl, nor mine.jsonl; `refrain eval fetch`"), "{error}");
    }

    #[test]
    fn every_set_loads() {
        let Some(data) = data("rag") else { return };
        for (name, count, documents, scoring) in [
            ("musique_train100", 67, 20, Scoring::QaF1),
            ("hotpotqa_train100", 67, 10, Scoring::QaF1),
            ("cacheblend_musique_s", 100, 10, Scoring::TokenF1),
        ] {
            let loaded = samples(&find(name, &data).unwrap(), None).unwrap();
            assert_eq!((loaded.samples.len(), loaded.scoring), (count, scoring), "{name}");
            assert_eq!(loaded.hash.len(), 64);
            let most = loaded.samples.iter().map(|sample| sample.documents.len()).max();
            assert_eq!(most, Some(documents), "{name}");
            assert!(loaded.samples.iter().all(|sample| !sample.gold.answers.is_empty()));
        }
    }
}
