//! Questions over documents (RULER `qa.py`, its `qa_2`): a question's documents among the documents of other questions.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::Path;

use super::fit::{LengthBudget, Recipe};
use super::random::Random;
use super::task::{QA, RulerOptions};
use crate::tasks::file::DataFile;
use crate::tasks::rag;
use crate::{Gold, Result, Sample};

const BEFORE: &str = "Answer the question based on the given documents. Only give me the answer and do not output any other \
                      words.\n\nThe following are given documents.\n\n";
const QUESTION: &str = "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any \
                        other words.\n\nQuestion: ";

#[derive(Clone, Debug)]
struct Question {
    text: String,
    answers: Vec<String>,
    /// Its own documents, those that support the answer first.
    own: Vec<usize>,
    /// Number of documents that every prompt has: the supporting ones, or all if none is marked.
    needed: usize,
}

/// Questions of a file and the documents of all of them: makes samples of the task [`QA`].
#[derive(Clone, Debug)]
pub struct Questions {
    /// Titles and texts, each once.
    documents: Vec<String>,
    /// At least one.
    questions: Vec<Question>,
}

impl Questions {
    /// A JSONL file of records with `question`, `answers` and `docs` (`title`, `text` and, if known, `supporting`).
    ///
    /// # Errors
    /// If it cannot be read, or a record lacks one of them.
    pub fn open(path: &Path) -> Result<Questions> {
        let mut places = HashMap::new();
        let mut questions = Vec::new();
        for mut line in rag::questions(&DataFile::open(path)?)? {
            let supports = |document: &rag::Document| document.supporting == Some(true);
            line.docs.sort_by_key(|document| !supports(document));
            let supporting = line.docs.iter().filter(|document| supports(document)).count();
            let mut own = Vec::new();
            for document in line.docs {
                let next = places.len();
                let place = *places.entry(format!("{}\n{}", document.title, document.text)).or_insert(next);
                if !own.contains(&place) {
                    own.push(place);
                }
            }
            let needed = if supporting == 0 { own.len() } else { supporting.min(own.len()) };
            questions.push(Question { text: line.question, answers: line.answers, own, needed });
        }
        let mut documents = vec![String::new(); places.len()];
        places.into_iter().for_each(|(document, place)| documents[place] = document);
        Ok(Questions { documents, questions })
    }

    /// Number of documents, each counted once.
    pub fn documents(&self) -> usize {
        self.documents.len()
    }

    /// The first `count` samples, or one a question if there are fewer; see [`Ruler::samples`](super::Ruler::samples).
    /// Each document is one of the sample's documents, with the separator that follows it. Questions whose own documents are longer than
    /// the length are left out: their numbers in the file are told beside the samples.
    ///
    /// # Errors
    /// If all questions are too long.
    pub fn samples(
        &self,
        length: usize,
        count: usize,
        seed: u64,
        tokens: &dyn Fn(&str) -> usize,
        options: &RulerOptions,
    ) -> Result<(Vec<Sample>, Vec<usize>)> {
        let budget = LengthBudget::new(&QA, length, seed, tokens, options);
        let (mut samples, mut too_long, mut reason) = (Vec::new(), Vec::new(), None);
        for (index, question) in self.questions.iter().enumerate() {
            if samples.len() == count {
                break;
            }
            let asked = QuestionPrompt { documents: &self.documents, question };
            match budget.units(&asked).and_then(|units| budget.sample(&asked, units, index)) {
                Ok(sample) => samples.push(sample),
                Err(error) => {
                    too_long.push(index + 1);
                    reason = Some(error);
                }
            }
        }
        reason.filter(|_| samples.is_empty()).map_or(Ok((samples, too_long)), Err)
    }
}

/// One question; the units are documents.
struct QuestionPrompt<'a> {
    documents: &'a [String],
    question: &'a Question,
}

impl Recipe for QuestionPrompt<'_> {
    fn step(&self) -> usize {
        10
    }

    fn range(&self) -> RangeInclusive<usize> {
        self.question.needed..=self.documents.len()
    }

    fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
        let units = units.max(self.question.needed);
        let own = &self.question.own[..units.min(self.question.own.len())];
        let others: Vec<usize> =
            (0..self.documents.len()).filter(|place| !self.question.own.contains(place)).collect();
        let more = draw.places(units - own.len(), others.len()).into_iter().map(|place| others[place]);
        let mut chosen: Vec<usize> = own.iter().copied().chain(more).collect();
        draw.shuffle(&mut chosen);
        let documents = chosen.iter().zip(1..).map(|(place, number)| {
            let separator = if number == chosen.len() { "" } else { "\n\n" };
            format!("Document {number}:\n{}{separator}", self.documents[*place])
        });
        Sample {
            before: BEFORE.into(),
            documents: documents.collect(),
            question: format!("{QUESTION}{}", self.question.text),
            answer_prefix: " Answer:".into(),
            gold: Gold { answers: self.question.answers.clone(), ..Gold::default() },
            ..Sample::default()
        }
    }
}
