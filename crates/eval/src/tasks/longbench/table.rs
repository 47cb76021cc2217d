//! The benchmark's tasks, with its `dataset2prompt.json`, `dataset2maxlen.json` and `dataset2metric.json`.

use super::divide::Marker;
use super::task::{Context, Language, Task};
use crate::Scoring;

const PASSAGES: Context = Context::Documents(Marker::numbered("Passage ", ":\n"));
const PARAGRAPHS: Context = Context::Documents(Marker::numbered("Paragraph ", ": "));

pub(crate) const MULTI_HOP: &str = "Answer the question based on the given passages. Only give me the answer and do not output \
    any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question \
    based on the given passages. Only give me the answer and do not output any other \
    words.\n\nQuestion: {input}\nAnswer:";

/// The tasks, in the order of the benchmark's paper. Prompts are verbatim, with their slips.
pub const TASKS: &[Task] = &[
    Task {
        name: "narrativeqa",
        scoring: Scoring::QaF1,
        max_tokens: 128,
        language: Language::English,
        samples: 200,
        context: Context::Whole,
        prompt: "You are given a story, which can be either a novel or a movie script, and a question. \
                  Answer the question asconcisely as you can, using a single phrase if possible. Do not \
                  provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the story \
                  asconcisely as you can, using a single phrase if possible. Do not provide any \
                  explanation.\n\nQuestion: {input}\n\nAnswer:",
    },
    Task {
        name: "qasper",
        scoring: Scoring::QaF1,
        max_tokens: 128,
        language: Language::English,
        samples: 200,
        context: Context::Whole,
        prompt: "You are given a scientific article and a question. Answer the question as concisely as you \
                  can, using a single phrase or sentence if possible. If the question cannot be answered \
                  based on the information in the article, write \"unanswerable\". If the question is a \
                  yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any \
                  explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as \
                  concisely as you can, using a single phrase or sentence if possible. If the question cannot \
                  be answered based on the information in the article, write \"unanswerable\". If the \
                  question is a yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide \
                  any explanation.\n\nQuestion: {input}\n\nAnswer:",
    },
    Task {
        name: "multifieldqa_en",
        scoring: Scoring::QaF1,
        max_tokens: 64,
        language: Language::English,
        samples: 150,
        context: Context::Whole,
        prompt: "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following \
                  question based on the above text, only give me the answer and do not output any other \
                  words.\n\nQuestion: {input}\nAnswer:",
    },
    Task {
        name: "multifieldqa_zh",
        scoring: Scoring::QaF1Zh,
        max_tokens: 64,
        language: Language::Chinese,
        samples: 200,
        context: Context::Whole,
        prompt: "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
    },
    Task {
        name: "hotpotqa",
        scoring: Scoring::QaF1,
        max_tokens: 32,
        language: Language::English,
        samples: 200,
        context: PASSAGES,
        prompt: MULTI_HOP,
    },
    Task {
        name: "2wikimqa",
        scoring: Scoring::QaF1,
        max_tokens: 32,
        language: Language::English,
        samples: 200,
        context: PASSAGES,
        prompt: MULTI_HOP,
    },
    Task {
        name: "musique",
        scoring: Scoring::QaF1,
        max_tokens: 32,
        language: Language::English,
        samples: 200,
        context: PASSAGES,
        prompt: MULTI_HOP,
    },
    Task {
        name: "dureader",
        scoring: Scoring::RougeLZh,
        max_tokens: 128,
        language: Language::Chinese,
        samples: 200,
        context: Context::Documents(Marker::numbered("文章", "\n")),
        prompt: "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
    },
    Task {
        name: "gov_report",
        scoring: Scoring::RougeL,
        max_tokens: 512,
        language: Language::English,
        samples: 200,
        context: Context::Whole,
        prompt: "You are given a report by a government agency. Write a one-page summary of the \
                  report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    },
    Task {
        name: "qmsum",
        scoring: Scoring::RougeL,
        max_tokens: 512,
        language: Language::English,
        samples: 200,
        context: Context::Whole,
        prompt: "You are given a meeting transcript and a query containing a question or instruction. Answer \
                  the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query \
                  based on the above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
    },
    Task {
        name: "multi_news",
        scoring: Scoring::RougeL,
        max_tokens: 512,
        language: Language::English,
        samples: 200,
        context: PASSAGES,
        prompt: "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, \
                  write a one-page summary of all the news.\n\nSummary:",
    },
    Task {
        name: "vcsum",
        scoring: Scoring::RougeLZh,
        max_tokens: 512,
        language: Language::Chinese,
        samples: 200,
        context: Context::Whole,
        prompt: "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    },
    Task {
        name: "trec",
        scoring: Scoring::Classification,
        max_tokens: 64,
        language: Language::English,
        samples: 200,
        context: Context::Examples(Marker::word("Question: ")),
        prompt: "Please determine the type of the question below. Here are some examples of \
                  questions.\n\n{context}\n{input}",
    },
    Task {
        name: "triviaqa",
        scoring: Scoring::QaF1,
        max_tokens: 32,
        language: Language::English,
        samples: 200,
        context: Context::Examples(Marker::word("Passage:\n")),
        prompt: "Answer the question based on the given passage. Only give me the answer and do not output \
                  any other words. The following are some examples.\n\n{context}\n\n{input}",
    },
    Task {
        name: "samsum",
        scoring: Scoring::RougeL,
        max_tokens: 128,
        language: Language::English,
        samples: 200,
        context: Context::Examples(Marker::word("Dialogue: ")),
        prompt: "Summarize the dialogue into a few short sentences. The following are some \
                  examples.\n\n{context}\n\n{input}",
    },
    Task {
        name: "lsht",
        scoring: Scoring::Classification,
        max_tokens: 64,
        language: Language::Chinese,
        samples: 200,
        context: Context::Examples(Marker::word("新闻内容：")),
        prompt: "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    },
    Task {
        name: "passage_count",
        scoring: Scoring::Count,
        max_tokens: 32,
        language: Language::English,
        samples: 200,
        context: PARAGRAPHS,
        prompt: "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. \
                  Please carefully read these paragraphs and determine how many unique paragraphs there are \
                  after removing duplicates. In other words, how many non-repeating paragraphs are there in \
                  total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing \
                  duplicates. The output format should only contain the number, such as 1, 2, 3, and so \
                  on.\n\nThe final answer is: ",
    },
    Task {
        name: "passage_retrieval_en",
        scoring: Scoring::Retrieval,
        max_tokens: 32,
        language: Language::English,
        samples: 200,
        context: PARAGRAPHS,
        prompt: "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which \
                  paragraph the abstract is from.\n\n{context}\n\nThe following is an \
                  abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is from. \
                  The answer format must be like \"Paragraph 1\", \"Paragraph 2\", etc.\n\nThe answer is: ",
    },
    Task {
        name: "passage_retrieval_zh",
        scoring: Scoring::RetrievalZh,
        max_tokens: 32,
        language: Language::Chinese,
        samples: 200,
        context: Context::Documents(Marker::numbered("段落", "：")),
        prompt: "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是\"段落1\"，\"段落2\"等格式\n\n答案是：",
    },
    Task {
        name: "lcc",
        scoring: Scoring::CodeSim,
        max_tokens: 64,
        language: Language::Code,
        samples: 500,
        context: Context::Whole,
        prompt: "Please complete the code given below. \n{context}Next line of code:\n",
    },
    Task {
        name: "repobench-p",
        scoring: Scoring::CodeSim,
        max_tokens: 64,
        language: Language::Code,
        samples: 500,
        context: Context::Whole,
        prompt: "Please complete the code given below. \n{context}{input}Next line of code:\n",
    },
];

/// The tasks of A3's table, which its code reads from LongBench-E.
pub const A3: &[&str] = &[
    "qasper_e",
    "multifieldqa_en_e",
    "hotpotqa_e",
    "2wikimqa_e",
    "gov_report_e",
    "multi_news_e",
    "trec_e",
    "triviaqa_e",
    "samsum_e",
    "passage_count_e",
    "lcc_e",
];

/// The tasks of SamKV's.
pub const SAMKV: &[&str] = &["2wikimqa", "musique", "hotpotqa", "dureader"];

/// The tasks of MorphKV's.
pub const MORPHKV: &[&str] = &[
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "multifieldqa_zh",
    "hotpotqa",
    "2wikimqa",
    "qmsum",
    "multi_news",
    "vcsum",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
];

/// The papers' tables by name.
pub const SUITES: &[(&str, &[&str])] = &[("a3", A3), ("samkv", SAMKV), ("morphkv", MORPHKV)];

/// The tasks of a suite.
pub fn suite(name: &str) -> Option<&'static [&'static str]> {
    SUITES.iter().find(|(known, _)| *known == name).map(|(_, tasks)| *tasks)
}
