//! The front that `refrain tune` measures: a row for every variant over all questions, and the choice among the rows.

use std::collections::{BTreeMap, HashMap};

use refrain::registry::{join, split};
use refrain_eval::Record;
use serde::Serialize;

use crate::bench::Spread;
use crate::table::Table;

/// A variant over all samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct FrontRow {
    pub(super) method: String,
    pub(super) prefix: String,
    /// Median share of the documents' rows that were computed.
    pub(super) charged: f64,
    /// Median of vanilla's time to the first token, measured beside the variant's where it was, over the variant's; 0 where chunks were
    /// prefilled within every answer.
    pub(super) speedup: f64,
    pub(super) kl: f64,
    kl_median: f64,
    pub(super) top1: f64,
    /// Sum of its scores over that of vanilla's.
    pub(super) score: f64,
}

impl FrontRow {
    pub(super) fn is_vanilla(&self) -> bool {
        self.method == "vanilla"
    }

    /// The method, and the prefix where there is one.
    pub(super) fn label(&self) -> String {
        match self.prefix.as_str() {
            "none" => self.method.clone(),
            prefix => format!("{} behind prefix {prefix}", self.method),
        }
    }

    /// The smaller of the shares of vanilla's tokens and of its score.
    pub(super) fn kept(&self) -> f64 {
        self.top1.min(self.score)
    }
}

/// Every variant that has answered at all, vanilla first, over the samples that all of these have answered, and the number of those samples.
pub(super) fn front(records: &[&Record]) -> (Vec<FrontRow>, usize) {
    let mut names: Vec<&str> = Vec::new();
    for record in records.iter().filter(|record| record.error.is_none()) {
        if !names.contains(&record.method.as_str()) {
            names.push(&record.method);
        }
    }
    let mut by_sample: HashMap<&str, HashMap<&str, &Record>> = HashMap::new();
    for record in records.iter().filter(|record| record.error.is_none()) {
        by_sample.entry(&record.sample).or_default().insert(&record.method, record);
    }
    by_sample.retain(|_, answers| answers.len() == names.len() && answers.contains_key("vanilla"));
    if by_sample.is_empty() {
        return (Vec::new(), 0);
    }
    let row = |name: &&str| {
        let pairs = || by_sample.values().map(|answers| (answers[*name], answers["vanilla"]));
        let fidelity = |of: fn(&refrain_eval::Fidelity) -> f64| -> Vec<f64> {
            pairs().map(|(own, _)| own.fidelity.as_ref().map_or(0.0, of)).collect()
        };
        let charged = pairs().filter_map(|(own, _)| Some(own.cost.as_ref()?.charged_ratio));
        let speedup = pairs().filter_map(|(own, vanilla)| {
            let own = own.cost.as_ref()?;
            Some(own.vanilla_or(vanilla.cost.as_ref())?.ttft / own.timed(own.ttft)?)
        });
        let score = |record: &Record| record.scores.get("score").copied().unwrap_or(0.0);
        let (own, all) =
            pairs().fold((0.0, 0.0), |sum, (own, vanilla)| (sum.0 + score(own), sum.1 + score(vanilla)));
        let (method, prefix) = match name.rsplit_once("prefix=") {
            Some((method, prefix)) => (method.trim_end_matches([',', ':']), prefix),
            None => (*name, "none"),
        };
        // The encoding is the store's, of which a method knows nothing.
        let (method, options) = split(method);
        let options = options.filter(|(option, _)| *option != "store_dtype");
        FrontRow {
            method: join(method, options.map(|(option, value)| format!("{option}={value}"))),
            prefix: prefix.to_owned(),
            charged: median(charged.collect()),
            speedup: median(speedup.collect()),
            kl: mean(&fidelity(|f| f.kl)),
            kl_median: median(fidelity(|f| f.kl)),
            top1: mean(&fidelity(|f| f.top1)),
            score: if all > 0.0 { own / all } else { 1.0 },
        }
    };
    (names.iter().map(row).collect(), by_sample.len())
}

/// The variants that have answered nothing, each with its last error.
pub(super) fn failed(records: &[Record]) -> BTreeMap<&str, &str> {
    let has_answered = |name: &str| records.iter().any(|other| other.method == name && other.error.is_none());
    let error = |record: &'_ Record| record.error.is_some() && !has_answered(&record.method);
    let failed = records.iter().filter(|record| error(record));
    failed.map(|record| (record.method.as_str(), record.error.as_deref().unwrap_or_default())).collect()
}

/// The row with the earliest first token that keeps the share `bound` of vanilla's tokens and of its score. Vanilla always does.
pub(super) fn choose(rows: &[FrontRow], bound: f64) -> Option<&FrontRow> {
    let near = rows.iter().filter(|row| row.is_vanilla() || row.kept() >= bound);
    near.max_by(|a, b| a.speedup.total_cmp(&b.speedup))
}

/// The row nearest to vanilla beside vanilla itself.
pub(super) fn nearest(rows: &[FrontRow]) -> Option<&FrontRow> {
    rows.iter().filter(|row| !row.is_vanilla()).max_by(|a, b| a.kept().total_cmp(&b.kept()))
}

/// The front as a table, earliest first tokens last, with a mark at the chosen row.
pub(super) fn table(rows: &[FrontRow], chosen: &FrontRow) -> String {
    let mut table = Table::new(&[
        "<",
        "<method",
        "<prefix",
        "TTFT speed-up",
        "charged",
        "KL",
        "same token",
        "score kept",
    ]);
    let mut order: Vec<&FrontRow> = rows.iter().collect();
    order.sort_by(|a, b| a.speedup.total_cmp(&b.speedup));
    for row in order {
        table.push(vec![
            if row == chosen { "*" } else { "" }.to_owned(),
            row.method.clone(),
            row.prefix.clone(),
            if row.speedup > 0.0 { format!("{:.2}x", row.speedup) } else { "–".to_owned() },
            format!("{:.1} %", 100.0 * row.charged),
            format!("{:.4}", row.kl),
            format!("{:.1} %", 100.0 * row.top1),
            format!("{:.1} %", 100.0 * row.score),
        ]);
    }
    table.text()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// 0 where there are no values.
fn median(values: Vec<f64>) -> f64 {
    if values.is_empty() { 0.0 } else { Spread::of(values).median }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(method: &str, speedup: f64, top1: f64, score: f64) -> FrontRow {
        let (method, prefix) = (method.to_owned(), "none".to_owned());
        FrontRow { method, prefix, charged: 0.1, speedup, kl: 0.0, kl_median: 0.0, top1, score }
    }

    #[test]
    fn the_cheapest_that_is_near_enough_is_chosen_and_vanilla_if_none_is() {
        let rows = [row("vanilla", 1.0, 1.0, 1.0), row("pie", 9.0, 0.9, 1.2), row("a3", 4.0, 0.99, 0.97)];
        assert_eq!(choose(&rows, 0.98).unwrap().method, "vanilla");
        assert_eq!(choose(&rows, 0.97).unwrap().method, "a3");
        assert_eq!(choose(&rows, 0.9).unwrap().method, "pie");
        assert_eq!(choose(&[], 0.9), None);
        assert_eq!(nearest(&rows).unwrap().method, "a3");
        assert_eq!(nearest(&rows[..1]), None);
        assert_eq!((median(Vec::new()), median(vec![4.0, 1.0, 2.0, 3.0])), (0.0, 2.5));
    }

    #[test]
    fn only_questions_that_all_have_answered_count() {
        let record = |method: &str, sample: &str, top1: f64, ttft: f64| Record {
            method: method.to_owned(),
            sample: sample.to_owned(),
            fidelity: Some(refrain_eval::Fidelity { top1, kl: 0.2, ..Default::default() }),
            cost: Some(refrain_eval::Cost { ttft, charged_ratio: 0.1, ..Default::default() }),
            scores: [("score".to_owned(), top1)].into(),
            ..Record::default()
        };
        let records = [
            record("vanilla", "a", 1.0, 2.0),
            record("drift:charge=0.1,prefix=system", "a", 0.5, 0.5),
            record("vanilla", "b", 1.0, 2.0),
        ];
        let failing = Record { error: Some("no memory".to_owned()), ..record("a3", "a", 0.0, 0.0) };
        let late = Record { error: Some("late".to_owned()), ..record("vanilla", "c", 0.0, 0.0) };
        let records: Vec<_> = records.into_iter().chain([failing, late]).collect();
        assert_eq!(
            failed(&records),
            [("a3", "no memory")].into(),
            "what has answered once is no such variant"
        );
        let (rows, samples) = front(&records.iter().collect::<Vec<_>>());
        assert_eq!((rows.len(), samples), (2, 1));
        let drift = &rows[1];
        assert_eq!((drift.method.as_str(), drift.prefix.as_str()), ("drift:charge=0.1", "system"));
        assert_eq!((drift.speedup, drift.top1, drift.score), (4.0, 0.5, 0.5));
    }

    /// Vanilla's records may be of an hour in which the machine had less other work, and chunks that are prefilled within an answer are no
    /// part of its method's time.
    #[test]
    fn a_variant_is_set_against_vanilla_beside_its_answers() {
        let record = |method: &str, sample: &str, ttft: f64, prefilled_chunks: usize| Record {
            method: method.to_owned(),
            sample: sample.to_owned(),
            cost: Some(refrain_eval::Cost {
                ttft,
                prefilled_chunks,
                vanilla: (method == "drift")
                    .then(|| refrain_eval::VanillaCost { ttft: 5.0, ..Default::default() }),
                ..Default::default()
            }),
            ..Record::default()
        };
        let records = [
            record("vanilla", "a", 2.0, 0),
            record("vanilla", "b", 2.0, 0),
            record("drift", "a", 2.5, 0),
            record("drift", "b", 50.0, 3),
            record("pie", "a", 1.0, 1),
            record("pie", "b", 1.0, 1),
        ];
        let (rows, _) = front(&records.iter().collect::<Vec<_>>());
        let speedups: Vec<f64> = rows.iter().map(|row| row.speedup).collect();
        assert_eq!(speedups, [1.0, 2.0, 0.0]);
        let chosen = choose(&rows, 0.0).unwrap();
        assert_eq!(chosen.method, "drift");
        let shown = table(&rows, chosen);
        assert!(shown.lines().any(|line| line.contains("pie") && line.contains('–')), "{shown}");
    }

    #[test]
    fn a_choice_names_no_encoding() {
        let record = |method: &str| Record {
            method: method.to_owned(),
            sample: "a".to_owned(),
            cost: Some(refrain_eval::Cost { ttft: 1.0, ..Default::default() }),
            ..Record::default()
        };
        let names = ["vanilla", "pie:store_dtype=q8", "a3:ratio=0.3,store_dtype=q8,prefix=averaged"];
        let records = names.map(record);
        let (rows, _) = front(&records.iter().collect::<Vec<_>>());
        let methods: Vec<_> = rows.iter().map(|row| (row.method.as_str(), row.prefix.as_str())).collect();
        assert_eq!(methods, [("vanilla", "none"), ("pie", "none"), ("a3:ratio=0.3", "averaged")]);
        for (method, _) in methods {
            refrain::fusion::METHODS.parse(method).unwrap();
        }
    }
}
