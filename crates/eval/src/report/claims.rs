//! Statements of the papers, checked against the records.

use std::sync::LazyLock;

use serde::Deserialize;

use super::data::Data;
use super::measures;
use super::scores::{self, Parts};
use super::stats::{Stat, bootstrap, mean_of_means};
use super::table::{Block, Cell, Column, Row, Section, Table, Unit, distinct};
use super::variant_name::{base, default, option, without};
use crate::Record;

/// A statement of `claims.toml`, which explains the checks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Claim {
    says: String,
    source: String,
    /// Empty for all.
    #[serde(default)]
    benchmarks: Vec<String>,
    check: Check,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Check {
    Better([String; 2]),
    HitRate([String; 2]),
    Score { of: [String; 2], least: f64, most: f64 },
    Within { of: String, measure: String, least: f64, most: f64 },
    Option { of: String, option: String, values: [String; 2] },
}

/// The file is part of the program and its tests read it, so that it can always be read.
static CLAIMS: LazyLock<Vec<Claim>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        claim: Vec<Claim>,
    }
    toml::from_str::<File>(include_str!("claims.toml")).map_or_else(|_| Vec::new(), |file| file.claim)
});

/// The statements that the run has something to say on; none if there are none.
pub(super) fn section(data: &Data<'_>) -> Option<Section> {
    let mut table = Table {
        title: "Statements of the papers".to_owned(),
        corner: "Statement and model".to_owned(),
        columns: ["Variants", "By", "Verdict", "Measured", "Samples"].map(Column::new).into(),
        ..Table::default()
    };
    for claim in CLAIMS.iter() {
        let found = (0..data.models.len()).flat_map(|model| {
            claim.check(data, model).into_iter().map(move |found| found.row(data.models[model]))
        });
        let mut rows: Vec<Row> = found.collect();
        if let Some(first) = rows.first_mut() {
            first.group = format!("{} [{}]", claim.says, claim.source);
        }
        table.rows.extend(rows);
    }
    let how = "Differences are of pairs: only samples that both methods answered count; by score only tasks on which \
        a method has a score that says something, by KL all. Variants of the same budget are compared: an equal capacity, or an equal \
        recompute ratio, where both have one. LongGenBench is compared by the mean accuracy of its checks and LongWriter by \
        the judge's quality, and neither without a judge. Fewer than 8 samples, or a task with one alone, decide nothing. A statement agrees if the whole 95 % interval is on its side, contradicts if it is wholly on the \
        other, and is undecided between. What a paper measured on larger models and its own hardware need not hold here.";
    let some = !table.rows.is_empty();
    let blocks = vec![Block::Text(how.to_owned()), Block::Table(table)];
    some.then(|| Section { title: "Against the papers".to_owned(), blocks })
}

/// The evidence of the records on a claim.
struct Finding {
    /// Labels of the compared variants.
    variants: String,
    by: String,
    stat: Stat,
    unit: Unit,
    /// The range in which the claim holds.
    range: (f64, f64),
}

impl Finding {
    fn verdict(&self) -> &'static str {
        let (Stat { low, high, enough, .. }, (least, most)) = (self.stat, self.range);
        match () {
            () if !enough => "too few samples",
            () if low > least && high <= most => "agrees",
            () if high < least || low > most => "contradicts",
            () => "undecided",
        }
    }

    fn row(self, model: &str) -> Row {
        let cells = vec![
            Cell::text(&self.variants),
            Cell::text(&self.by),
            Cell::text(self.verdict()),
            Cell::stat(self.unit, Some(self.stat)),
            Cell::text(self.stat.samples.to_string()),
        ];
        Row { label: model.to_owned(), cells, ..Row::default() }
    }
}

impl Claim {
    fn check(&self, data: &Data<'_>, model: usize) -> Vec<Finding> {
        let mut tasks = data.tasks_of(model);
        tasks.retain(|task| {
            self.benchmarks.is_empty() || self.benchmarks.contains(&data.tasks[*task].benchmark)
        });
        let scope = Scope { data, model, tasks };
        match &self.check {
            Check::Better(of) => scope.pair(of).map_or(Vec::new(), |variants| scope.better(variants)),
            Check::HitRate(of) => {
                scope.pair(of).and_then(|variants| scope.hit_rate(variants)).into_iter().collect()
            }
            Check::Score { of, least, most } => {
                let found = scope.pair(of).and_then(|variants| {
                    let stat = data.relative(model, &scope.tasks, variants)?;
                    let range = (*least, *most);
                    Some(scope.finding(&variants, "score, share of the second's", stat, Unit::Percent, range))
                });
                found.into_iter().collect()
            }
            Check::Within { of, measure, least, most } => {
                let found = scope.variants(of).first().and_then(|(variant, _)| {
                    let measure = measures::named(measure)?;
                    let stat = data.measure(model, &scope.tasks, *variant, &measure)?;
                    Some(scope.finding(&[*variant], measure.title, stat, measure.unit, (*least, *most)))
                });
                found.into_iter().collect()
            }
            Check::Option { of, option, values } => {
                scope.option(of, option, values).map_or(Vec::new(), |variants| scope.better(variants))
            }
        }
    }
}

/// A difference that is to be positive.
const POSITIVE: (f64, f64) = (0.0, f64::INFINITY);

/// Where a claim is checked.
struct Scope<'a> {
    data: &'a Data<'a>,
    model: usize,
    tasks: Vec<usize>,
}

impl Scope<'_> {
    /// Variants of this name, the one without options first.
    fn variants(&self, name: &str) -> Vec<(usize, String)> {
        let variants = self.data.variants_of(self.model, &self.tasks);
        let named = variants.into_iter().map(|variant| (variant, self.data.variants[variant].name()));
        let mut named: Vec<_> = named.filter(|(_, own)| base(own) == name).collect();
        named.sort_by_key(|(_, own)| own != name);
        named
    }

    /// The first two variants of these names with an equal budget.
    fn pair(&self, [name, other]: &[String; 2]) -> Option<[usize; 2]> {
        let others = self.variants(other);
        self.variants(name).iter().find_map(|(variant, own)| {
            Some([*variant, others.iter().find(|(_, other)| same_budget(own, other))?.0])
        })
    }

    /// Two variants that differ only in an option, with its values in this order: the default's first, left out of names.
    fn option(&self, name: &str, option: &str, [default, other]: &[String; 2]) -> Option<[usize; 2]> {
        let named = self.variants(name);
        let value = |own: &str| super::variant_name::option(own, option).unwrap_or(default).to_owned();
        named.iter().filter(|(_, own)| value(own) == *other).find_map(|(variant, own)| {
            let like = |(_, second): &&(usize, String)| {
                value(second) == *default && without(second, option) == without(own, option)
            };
            Some([*variant, named.iter().find(like)?.0])
        })
    }

    fn finding(&self, variants: &[usize], by: &str, stat: Stat, unit: Unit, range: (f64, f64)) -> Finding {
        let variants = variants
            .iter()
            .map(|variant| self.data.variants[*variant].label())
            .collect::<Vec<_>>()
            .join(", ");
        Finding { variants, by: by.to_owned(), stat, unit, range }
    }

    fn difference(
        &self,
        tasks: &[usize],
        variants: [usize; 2],
        of: fn(&Record) -> Option<f64>,
    ) -> Option<Stat> {
        let pair = |a: &Record, b: &Record| Some(of(a)? - of(b)?);
        let groups = tasks.iter().map(|task| self.data.paired([self.model, *task], variants, pair));
        bootstrap(groups.collect(), mean_of_means)
    }

    /// Aggregate the scores that papers compare, by task.
    fn scores(&self, task: usize, variants: [usize; 2]) -> Vec<(Parts, Parts)> {
        let name = self.data.compared(task);
        let pair =
            |a: &Record, b: &Record| scores::three(&a.scores, name).zip(scores::three(&b.scores, name));
        self.data.paired([self.model, task], variants, pair)
    }

    /// By score where scores speak, and by KL; of tasks that have the score that papers compare.
    fn better(&self, variants: [usize; 2]) -> Vec<Finding> {
        let scored: Vec<usize> =
            self.tasks.iter().copied().filter(|task| !self.scores(*task, variants).is_empty()).collect();
        let informative = self.data.informative(self.model, &scored);
        let ahead = |group: &Vec<(Parts, Parts)>| {
            let of = |side: fn(&(Parts, Parts)) -> &Parts| scores::pooled(group.iter().map(side));
            of(|pair| &pair.0) - of(|pair| &pair.1)
        };
        let groups = informative.iter().map(|task| self.scores(*task, variants)).collect();
        let score = bootstrap(groups, |groups: &[Vec<(Parts, Parts)>]| {
            groups.iter().map(ahead).sum::<f64>() / groups.len() as f64
        });
        let by_score = format!("{} (of 100)", self.score_name(&informative));
        let score =
            score.map(|stat| self.finding(&variants, &by_score, stat.times(100.0), Unit::Score, POSITIVE));
        // Smaller is nearer to vanilla.
        let kl = self.difference(&scored, variants, |record| Some(-record.fidelity.as_ref()?.kl));
        let kl = kl.map(|stat| self.finding(&variants, "KL, smaller by", stat, Unit::Nats, POSITIVE));
        score.into_iter().chain(kl).collect()
    }

    fn score_name(&self, tasks: &[usize]) -> String {
        distinct(tasks.iter().map(|task| self.data.compared(*task))).join(" and ")
    }

    fn hit_rate(&self, variants: [usize; 2]) -> Option<Finding> {
        let stat = self.difference(&self.tasks, variants, |record| record.fidelity.as_ref()?.hit_rate_40)?;
        Some(self.finding(&variants, "hit rate, higher by", stat, Unit::Percent, POSITIVE))
    }
}

/// Where both have a capacity, or a recompute ratio, it is equal.
fn same_budget(one: &str, other: &str) -> bool {
    ["capacity", "ratio"].iter().all(|name| {
        let value = |variant| option(variant, name).map(str::to_owned).or_else(|| default(variant, name));
        let number = |value: &str| value.parse::<f64>().ok();
        value(one)
            .zip(value(other))
            .is_none_or(|(a, b)| a == b || number(&a).is_some_and(|a| number(&b) == Some(a)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_can_be_read_and_name_what_there_is() {
        assert_eq!(CLAIMS.len(), 17);
        for claim in CLAIMS.iter() {
            if let Check::Within { measure, .. } = &claim.check {
                assert!(measures::named(measure).is_some(), "{measure}");
            }
        }
    }
}
