//! Values of the reference libraries: of the repository's own sentences (`tools/golden_metrics.py`), and of real predictions where the
//! benchmarks' data is there.

#[path = "../../../tests/common/needs.rs"]
mod needs;

use std::path::PathBuf;

use refrain_eval::metrics::needle::{kvpress, stemmed};
use refrain_eval::metrics::{extra, first_line, score};
use refrain_eval::{Gold, Scoring};
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Deserialize)]
struct Scored {
    pred: String,
    answers: Vec<String>,
    all_classes: Option<Vec<String>>,
    score: f64,
    score_levenshtein: Option<f64>,
}

#[derive(Deserialize)]
#[allow(non_snake_case)]
struct Needle {
    needle: String,
    response: String,
    rouge1_f: f64,
    rougeL_f: f64,
    needle_score_0_10: f64,
    pltrdy_rouge1_f: f64,
    pltrdy_rouge2_f: f64,
    pltrdy_rougeL_f: f64,
    pltrdy_rougeL_p: f64,
    pltrdy_rougeL_r: f64,
}

/// The file of the repository's own sentences.
#[derive(Deserialize)]
struct Own {
    longbench: Vec<OwnPair>,
    needle: Vec<Needle>,
}

#[derive(Deserialize)]
struct OwnPair {
    scoring: Scoring,
    prediction: String,
    answer: String,
    classes: Vec<String>,
    score: f64,
    levenshtein: Option<f64>,
}

fn own() -> Own {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/metrics.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Lines of a golden file, or none where the data is not there.
fn lines<T: DeserializeOwned>(name: &str) -> Option<Vec<T>> {
    let data = std::env::var_os("REFRAIN_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    let path = data.join("metrics_golden").join(format!("{name}.jsonl"));
    let Ok(text) = std::fs::read_to_string(&path) else {
        needs::skip("data", format!("{} is not there (REFRAIN_DATA names another folder)", path.display()));
        return None;
    };
    let rows: Vec<T> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!rows.is_empty(), "{} is empty", path.display());
    Some(rows)
}

fn assert_near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() < 1e-6, "{what}: {got} instead of {expected}");
}

fn assert_score(
    what: &str,
    scoring: Scoring,
    prediction: &str,
    gold: &Gold,
    (expected, levenshtein): (f64, Option<f64>),
) {
    assert_near(score(scoring, prediction, gold).unwrap(), expected, what);
    assert_eq!(levenshtein.is_some(), scoring == Scoring::CodeSim, "{what}");
    if let Some(expected) = levenshtein {
        let extra = extra(scoring, prediction, gold);
        assert_eq!(extra[0].0, "levenshtein");
        assert_near(extra[0].1, expected, what);
    }
}

fn assert_needle(row: &Needle) {
    let near =
        |got, expected, what: &str| assert_near(got, expected, &format!("{what} of {:?}", row.response));
    let google = stemmed(&row.needle, &row.response);
    near(google.rouge_1, row.rouge1_f, "ROUGE-1");
    near(google.rouge_l, row.rougeL_f, "ROUGE-L");
    let kvpress = kvpress(&row.needle, &row.response);
    near(kvpress.rouge_1.f, row.pltrdy_rouge1_f, "kvpress ROUGE-1");
    near(kvpress.rouge_2.f, row.pltrdy_rouge2_f, "kvpress ROUGE-2");
    near(kvpress.rouge_l.f, row.pltrdy_rougeL_f, "kvpress ROUGE-L");
    near(kvpress.rouge_l.precision, row.pltrdy_rougeL_p, "kvpress precision");
    near(kvpress.rouge_l.recall, row.pltrdy_rougeL_r, "kvpress recall");
    let gold = Gold { answers: vec![row.needle.clone()], ..Gold::default() };
    near(10.0 * score(Scoring::Needle, &row.response, &gold).unwrap(), row.needle_score_0_10, "score");
    let extra = extra(Scoring::Needle, &row.response, &gold);
    assert_eq!(extra.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["rouge_l", "kvpress", "substring"]);
    near(extra[0].1, row.rougeL_f, "extra ROUGE-L");
    near(extra[1].1, row.pltrdy_rougeL_f, "extra kvpress");
}

#[test]
fn own_sentences() {
    let own = own();
    for pair in &own.longbench {
        let what = format!("{:?} of {:?} to {:?}", pair.scoring, pair.prediction, pair.answer);
        let gold =
            Gold { answers: vec![pair.answer.clone()], classes: pair.classes.clone(), ..Gold::default() };
        assert_score(&what, pair.scoring, &pair.prediction, &gold, (pair.score, pair.levenshtein));
    }
    own.needle.iter().for_each(assert_needle);
    let metrics: Vec<Scoring> = own.longbench.iter().map(|pair| pair.scoring).collect();
    assert_eq!(metrics.chunk_by(PartialEq::eq).count(), 9, "all of LongBench's metrics");
}

/// Predictions stand in the files as the model gave them: the tasks of the first-line rule cut them first.
#[test]
fn longbench() {
    use Scoring::*;
    let tasks = [
        ("narrativeqa", QaF1),
        ("qasper", QaF1),
        ("multifieldqa_en", QaF1),
        ("multifieldqa_zh", QaF1Zh),
        ("hotpotqa", QaF1),
        ("2wikimqa", QaF1),
        ("musique", QaF1),
        ("dureader", RougeLZh),
        ("gov_report", RougeL),
        ("qmsum", RougeL),
        ("multi_news", RougeL),
        ("vcsum", RougeLZh),
        ("trec", Classification),
        ("triviaqa", QaF1),
        ("samsum", RougeL),
        ("lsht", Classification),
        ("passage_retrieval_en", Retrieval),
        ("passage_count", Count),
        ("passage_retrieval_zh", RetrievalZh),
        ("lcc", CodeSim),
        ("repobench-p", CodeSim),
    ];
    let mut found = 0;
    for (task, scoring) in tasks {
        let Some(rows) = lines::<Scored>(task) else { continue };
        found += 1;
        for (i, row) in rows.into_iter().enumerate() {
            let gold = Gold {
                answers: row.answers,
                classes: row.all_classes.unwrap_or_default(),
                ..Gold::default()
            };
            let first_line_only = ["trec", "triviaqa", "samsum", "lsht"].contains(&task);
            let prediction = if first_line_only { first_line(&row.pred) } else { &row.pred };
            let expected = (row.score, row.score_levenshtein);
            assert_score(&format!("{task} {i}"), scoring, prediction, &gold, expected);
        }
    }
    assert!(found == 0 || found == tasks.len(), "{found} of {} files are there", tasks.len());
}

#[test]
fn needle() {
    lines::<Needle>("needle_rouge").iter().flatten().for_each(assert_needle);
}
