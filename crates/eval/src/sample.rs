//! One sample of a benchmark: the parts of its prompt as text, and the expected answer.

use serde::{Deserialize, Serialize};

use crate::metrics::longgen::Plan;

/// One sample. The prompt is `before ‖ documents ‖ question`, wrapped by the chat template if `chat`, then
/// `answer_prefix`; nothing is trimmed and nothing put between.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its name within the task: from the data, or made of the parameters that it was generated from.
    pub id: String,
    /// Text before the documents: instructions, a worked example.
    pub before: String,
    /// Documents or parts of one, verbatim with whatever separates them: the units of reuse. Longer ones are cut every chunk
    /// size of tokens.
    pub documents: Vec<String>,
    /// Text after the documents.
    pub question: String,
    /// How the answer begins, after the chat template's tail.
    pub answer_prefix: String,
    /// Whether the chat template goes around it.
    pub chat: bool,
    /// Most new tokens. Fewer where the model's context leaves no room for so many.
    pub max_tokens: usize,
    /// New tokens before which no stop string counts.
    pub min_tokens: usize,
    /// Strings that end the answer; they are no part of it.
    pub stop: Vec<String>,
    /// Tokens of the context that it was made for, where the benchmark is a grid.
    pub length: Option<usize>,
    /// Where its needle lies, in percent of the context.
    pub depth: Option<f64>,
    /// Words of its context, or characters of a Chinese one, as LongBench's data count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_words: Option<usize>,
    /// The expected answer.
    pub gold: Gold,
}

/// The expected answer of a sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gold {
    /// Right answers, or references that all must be met: the metric says.
    pub answers: Vec<String>,
    /// Classes that there are, of a classification.
    pub classes: Vec<String>,
    /// The sections that a long output must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
}

impl Scoring {
    /// Its name, as in tables.
    pub fn name(self) -> &'static str {
        match self {
            Scoring::QaF1 => "qa_f1",
            Scoring::QaF1Zh => "qa_f1_zh",
            Scoring::TokenF1 => "token_f1",
            Scoring::RougeL => "rouge_l",
            Scoring::RougeLZh => "rouge_l_zh",
            Scoring::Classification => "classification",
            Scoring::Count => "count",
            Scoring::Retrieval => "retrieval",
            Scoring::RetrievalZh => "retrieval_zh",
            Scoring::CodeSim => "code_sim (difflib)",
            Scoring::MatchAll => "string_match_all",
            Scoring::MatchPart => "string_match_part",
            Scoring::Needle => "10 × ROUGE-1 F",
            Scoring::LongGen => "completion rate",
            Scoring::LongWriter => "S_l",
        }
    }
}

/// How a task is scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// F1 of words (LongBench `qa_f1_score`).
    QaF1,
    /// F1 of words as jieba cuts them (`qa_f1_zh_score`).
    QaF1Zh,
    /// F1 of the tokenizer's ids (CacheBlend's own protocol).
    TokenF1,
    /// ROUGE-L of the `rouge` package (`rouge_score`).
    RougeL,
    /// ROUGE-L of words as jieba cuts them (`rouge_zh_score`).
    RougeLZh,
    /// Classes named (`classification_score`).
    Classification,
    /// Share of the answer's numbers that are right (`count_score`).
    Count,
    /// Share of the named passages that are right (`retrieval_score`).
    Retrieval,
    /// Share of the named Chinese passages that are right (`retrieval_zh_score`).
    RetrievalZh,
    /// Likeness of the first line of code (`code_sim_score`), difflib's.
    CodeSim,
    /// Share of the references that stand in the answer (RULER `string_match_all`).
    MatchAll,
    /// Whether any of them does (RULER `string_match_part`).
    MatchPart,
    /// Ten times ROUGE-1 F with the needle, scaled to 0..1 (needle in a haystack).
    Needle,
    /// Share of the sections that are there (LongGenBench CR); the judge's are further scores.
    LongGen,
    /// Length score (LongWriter S_l); the judge's are further scores.
    LongWriter,
}
