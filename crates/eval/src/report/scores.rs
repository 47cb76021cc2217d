//! Scores by name. Most are means over samples; scores of LongGenBench's checks are pooled over all checks.

use std::collections::BTreeMap;

use crate::Record;

/// The name of a task's own score.
pub(super) const SCORE: &str = "score";
/// Words of the answer.
const WORDS: &str = "words";
/// Prefix of the names of checks that no judge answered.
const PROXY: &str = "proxy_";
/// The mean accuracy of LongGenBench's checks, as its paper and MorphKV's print it.
const AVERAGE: &str = "average";
/// The mean of a judge's grades of LongWriter (S_q).
const QUALITY: &str = "quality";
/// The mean of LongWriter's length and quality scores, of answers that are graded.
const OVERALL: &str = "overall";
const KINDS: [&str; 3] = ["once", "range", "periodic"];

/// A range of context lengths in words, with its name.
pub(super) struct Bucket {
    pub name: &'static str,
    pub words: std::ops::Range<usize>,
}

/// The ranges by which LongBench-E has its scores (`scorer_e` of its `eval.py`).
pub(super) static BUCKETS: [Bucket; 3] = [
    Bucket { name: "0-4k", words: 0..4000 },
    Bucket { name: "4-8k", words: 4000..8000 },
    Bucket { name: "8k+", words: 8000..usize::MAX },
];

impl Bucket {
    pub(super) fn has(&self, record: &Record) -> bool {
        record.context_words.is_some_and(|words| self.words.contains(&words))
    }
}

type Scores = BTreeMap<String, f64>;
/// Numerators and denominators.
pub(super) type Parts = [(f64, f64); 3];

/// Names of the scores to show, the task's own first.
pub(super) fn names<'a>(records: impl Iterator<Item = &'a Scores>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (name, _) in records.flatten() {
        let shown = match name.strip_suffix("_asked") {
            Some(kind) => vec![kind.to_owned()],
            None => match name.strip_suffix("checks") {
                Some(prefix) => [AVERAGE, "stic_1", "stic_2"].map(|name| format!("{prefix}{name}")).to_vec(),
                None if name.ends_with("_yes") || name == "long" => Vec::new(),
                None if name == QUALITY => vec![QUALITY.to_owned(), OVERALL.to_owned()],
                None => vec![name.clone()],
            },
        };
        names.extend(shown);
    }
    let order = |name: &String| {
        let checked = ["once", "range", "periodic", AVERAGE, "stic_1", "stic_2", WORDS];
        let bare = name.strip_prefix(PROXY).unwrap_or(name);
        (name != SCORE, checked.iter().position(|known| *known == bare), name.clone())
    };
    names.sort_by_key(order);
    names.dedup();
    names
}

/// The score that papers compare of a benchmark. Without a judge records may lack it.
pub(super) fn compared(benchmark: &str) -> &'static str {
    match benchmark {
        "longgenbench" => AVERAGE,
        "longwriter" => QUALITY,
        _ => SCORE,
    }
}

/// A score as a column names it, beside its task; empty for the only one.
pub(super) fn title(benchmark: &str, name: &str) -> String {
    match (benchmark, name) {
        ("longgenbench", SCORE) => "completion rate".to_owned(),
        ("longwriter", SCORE) => "S_l".to_owned(),
        ("longwriter", QUALITY) => "S_q".to_owned(),
        (_, SCORE) => String::new(),
        _ => name.replace('_', " "),
    }
}

/// The number that a score of 1 is shown as. The needle's scale of 10 is that of its ROUGE scores alone.
pub(super) fn scale(name: &str, task: f64) -> f64 {
    match name {
        WORDS => 1.0,
        "substring" | "kvpress" => 100.0,
        _ => task,
    }
}

/// A score of one record as `(score, 1)`, or the parts of a pooled score as numerators and denominators: the sums
/// over records are divided part by part, and the ratios averaged. None if the record lacks the score.
fn parts(scores: &Scores, name: &str) -> Option<Vec<(f64, f64)>> {
    if let Some(score) = scores.get(name) {
        // The benchmark counts the words of long outputs only.
        let counts = name != WORDS || scores.get("long") != Some(&0.0);
        return counts.then(|| vec![(*score, 1.0)]);
    }
    let (prefix, bare) = name.strip_prefix(PROXY).map_or(("", name), |bare| (PROXY, bare));
    let get = |name: String| scores.get(&name).copied();
    if name == OVERALL {
        return Some(vec![((scores.get(SCORE)? + scores.get(QUALITY)?) / 2.0, 1.0)]);
    }
    let of = |kind: &str| Some((get(format!("{prefix}{kind}_yes"))?, get(format!("{prefix}{kind}_asked"))?));
    let all = || {
        let kinds: Vec<(f64, f64)> = KINDS.iter().filter_map(|kind| of(kind)).collect();
        let sum = kinds.iter().fold((0.0, 0.0), |sum, kind| (sum.0 + kind.0, sum.1 + kind.1));
        (!kinds.is_empty()).then_some(sum)
    };
    match bare {
        AVERAGE => KINDS.iter().map(|kind| of(kind)).collect(),
        "stic_1" => Some(vec![all()?]),
        "stic_2" => Some(vec![(all()?.0, get(format!("{prefix}checks"))?)]),
        kind => Some(vec![of(kind)?]),
    }
}

/// Three parts of a record; one ratio of sums stands for three equal ones.
pub(super) fn three(scores: &Scores, name: &str) -> Option<Parts> {
    parts(scores, name).map(|parts| [0, 1, 2].map(|at| parts[at % parts.len()]))
}

/// The pooled score of records' parts: sums over sums, averaged over the parts. A check that was never asked counts
/// 0, as in the reference.
pub(super) fn pooled<'a>(records: impl Iterator<Item = &'a Parts> + Clone) -> f64 {
    let ratio = |part: usize| {
        let sum =
            records.clone().fold((0.0, 0.0), |sum, parts| (sum.0 + parts[part].0, sum.1 + parts[part].1));
        if sum.1 > 0.0 { sum.0 / sum.1 } else { 0.0 }
    };
    (0..3).map(ratio).sum::<f64>() / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(named: &[(&str, f64)]) -> Scores {
        named.iter().map(|(name, score)| ((*name).to_owned(), *score)).collect()
    }

    #[test]
    fn checks_are_pooled_over_all_that_were_asked() {
        let record = |once: (f64, f64), range: (f64, f64), checks: f64| {
            scores(&[
                ("score", 0.5),
                ("words", 100.0),
                ("long", 0.0),
                ("once_yes", once.0),
                ("once_asked", once.1),
                ("range_yes", range.0),
                ("range_asked", range.1),
                ("periodic_yes", 0.0),
                ("periodic_asked", 0.0),
                ("checks", checks),
            ])
        };
        let records = [record((1.0, 1.0), (1.0, 4.0), 8.0), record((0.0, 3.0), (2.0, 2.0), 12.0)];
        assert_eq!(
            names(records.iter()),
            ["score", "once", "range", "periodic", "average", "stic_1", "stic_2", "words"]
        );
        let value = |name: &str| {
            let parts: Vec<Parts> = records.iter().filter_map(|record| three(record, name)).collect();
            pooled(parts.iter())
        };
        let near = |name: &str, expected: f64| assert!((value(name) - expected).abs() < 1e-12, "{name}");
        near("once", 0.25);
        near("range", 0.5);
        near("average", 0.25);
        near("stic_1", 0.4);
        near("stic_2", 0.2);
        near("score", 0.5);
        assert_eq!(parts(&records[0], "words"), None, "the output is not long");
        assert_eq!(parts(&records[0], "proxy_once"), None);
        assert_eq!((scale("words", 100.0), scale("once", 100.0)), (1.0, 100.0));
        assert_eq!(
            ["score", "rouge_l", "kvpress", "substring"].map(|name| scale(name, 10.0)),
            [10.0, 10.0, 100.0, 100.0]
        );
    }

    #[test]
    fn the_overall_score_is_of_length_and_quality() {
        let graded = scores(&[("score", 0.5), ("words", 9.0), ("quality", 1.0), ("quality_clarity", 1.0)]);
        assert_eq!(names([&graded].into_iter()), ["score", "overall", "quality", "quality_clarity", "words"]);
        assert_eq!(parts(&graded, "overall"), Some(vec![(0.75, 1.0)]));
        assert_eq!(parts(&scores(&[("score", 0.5)]), "overall"), None, "not graded");
    }
}
