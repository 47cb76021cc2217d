//! What the papers say, checked against the records.

use super::arm::{base, default, option, without};
use super::data::Data;
use super::measures::{KEPT, KV_SHARE, Measure, TTFT_SPEEDUP};
use super::named::{self, Parts};
use super::stats::{Stat, bootstrap, mean_of_means};
use super::table::{Block, Cell, Column, Row, Section, Table, Unit, distinct};
use crate::Record;

/// A statement of a paper.
struct Claim {
    says: &'static str,
    source: &'static str,
    benchmarks: &'static [&'static str],
    check: Check,
}

enum Check {
    /// The first arm is better than the second, by score and by KL, on samples that both answered.
    Better(&'static str, &'static str),
    /// The first arm's hit rate is higher.
    HitRate(&'static str, &'static str),
    /// The first arm's mean score over the second's is in the range.
    Score(&'static str, &'static str, f64, f64),
    /// An arm's measure is in the range.
    Within(&'static str, &'static Measure, f64, f64),
    /// Between arms of this name that differ only in the option: the second value is better. The first is the default.
    Option(&'static str, &'static str, [&'static str; 2]),
}

const ALL: &[&str] = &[];
const A3: &str = "A3, LongBench table";
const SAM_KV: &str = "SamKV, tables 3 and 4";
const MORPH_KV: &str = "MorphKV, LongGenBench and LongWriter tables";

const fn claim(
    says: &'static str,
    source: &'static str,
    benchmarks: &'static [&'static str],
    check: Check,
) -> Claim {
    Claim { says, source, benchmarks, check }
}

const CLAIMS: &[Claim] = &[
    claim(
        "A3 is better than CacheBlend (its own table: not on Qwen2.5-7B)",
        A3,
        &["longbench"],
        Check::Better("a3", "cache_blend"),
    ),
    claim(
        "A3 is better than LegoLink (its own table: not on Qwen2.5-7B)",
        A3,
        &["longbench"],
        Check::Better("a3", "lego_link"),
    ),
    claim("A3 is better than PIE", A3, &["longbench"], Check::Better("a3", "pie")),
    claim(
        "A3 is better than CacheBlend on RULER",
        "A3, RULER table",
        &["ruler"],
        Check::Better("a3", "cache_blend"),
    ),
    claim(
        "FullReuse collapses: it loses more than a third of Vanilla's score",
        A3,
        ALL,
        Check::Score("full_reuse", "vanilla", f64::NEG_INFINITY, 2.0 / 3.0),
    ),
    claim("A3's hit rate is above LegoLink's", "A3, figure 2", ALL, Check::HitRate("a3", "lego_link")),
    claim(
        "LegoLink's hit rate is above CacheBlend's",
        "A3, figure 2",
        ALL,
        Check::HitRate("lego_link", "cache_blend"),
    ),
    claim(
        "A3's first token comes about twice as fast as Vanilla's (checked: 1.5× or more)",
        "A3, text",
        ALL,
        Check::Within("a3", &TTFT_SPEEDUP, 1.5, f64::INFINITY),
    ),
    claim(
        "A3-ex is not catastrophic: it keeps 95 % of A3's score on LongBench",
        "A3, A3-ex table",
        &["longbench"],
        Check::Score("a3+a3_ex", "a3", 0.95, f64::INFINITY),
    ),
    claim(
        "CacheBlend's first token comes 2.2 to 3.3 times as fast as Vanilla's (checked: 2.2× or more)",
        "CacheBlend",
        ALL,
        Check::Within("cache_blend", &TTFT_SPEEDUP, 2.2, f64::INFINITY),
    ),
    claim(
        "SamKV is better than FullReuse",
        SAM_KV,
        &["longbench", "rag"],
        Check::Better("sam_kv", "full_reuse"),
    ),
    claim(
        "SamKV is better than Multi-InfLLM (its own tables: by fusion not on HotpotQA with Mistral, nor on MuSiQue with \
            Llama)",
        SAM_KV,
        &["longbench", "rag"],
        Check::Better("sam_kv", "multi_inf_llm"),
    ),
    claim(
        "SamKV keeps about 15 % of the prompt (checked: 10 to 20 %)",
        "SamKV, table 1",
        &["longbench", "rag"],
        Check::Within("sam_kv", &KEPT, 0.10, 0.20),
    ),
    claim(
        "MorphKV is better than SnapKV (its own LongWriter table: not on Qwen2.5)",
        MORPH_KV,
        &["longgenbench", "longwriter"],
        Check::Better("morph_kv", "snap_kv"),
    ),
    claim(
        "MorphKV is better than H2O",
        MORPH_KV,
        &["longgenbench", "longwriter"],
        Check::Better("morph_kv", "h2o"),
    ),
    claim(
        "MorphKV holds at most half of full attention's KV while it writes",
        MORPH_KV,
        &["longwriter"],
        Check::Within("morph_kv", &KV_SHARE, 0.0, 0.5),
    ),
    claim(
        "MorphKV: max is better than sum (so the text; table 4 has sum ahead)",
        "MorphKV, text to table 4",
        ALL,
        Check::Option("morph_kv", "fuse", ["sum", "max"]),
    ),
];

/// The statements that the run has something to say on; none if there are none.
pub(super) fn section(data: &Data<'_>) -> Option<Section> {
    let mut table = Table {
        title: "Statements of the papers".to_owned(),
        corner: "Statement and model".to_owned(),
        columns: ["Arms", "By", "Verdict", "Measured", "Samples"].map(Column::new).into(),
        ..Table::default()
    };
    for claim in CLAIMS {
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
        Vanilla's own score says something, by KL all. Arms of the same budget are compared: an equal capacity, or an equal \
        recompute ratio, where both have one. LongGenBench is compared by the mean accuracy of its checks and LongWriter by \
        the judge's quality, and neither without a judge. Fewer than 8 samples, or one of each task, decide nothing. A statement agrees if the whole 95 % interval is on its side, contradicts if it is wholly on the \
        other, and is undecided between. What a paper measured on larger models and its own hardware need not hold here.";
    let some = !table.rows.is_empty();
    let blocks = vec![Block::Text(how.to_owned()), Block::Table(table)];
    some.then(|| Section { title: "Against the papers".to_owned(), blocks })
}

/// What the records say of a claim.
struct Finding {
    /// Labels of what is compared.
    arms: String,
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
            Cell::text(&self.arms),
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
            self.benchmarks.is_empty() || self.benchmarks.contains(&data.tasks[*task].benchmark.as_str())
        });
        let scope = Scope { data, model, tasks };
        match &self.check {
            Check::Better(arm, than) => scope.pair(arm, than).map_or(Vec::new(), |arms| scope.better(arms)),
            Check::HitRate(arm, than) => {
                scope.pair(arm, than).and_then(|arms| scope.hit_rate(arms)).into_iter().collect()
            }
            Check::Score(arm, to, least, most) => {
                let found = scope.pair(arm, to).and_then(|arms| {
                    let stat = data.relative(model, &scope.tasks, arms)?;
                    let range = (*least, *most);
                    Some(scope.finding(&arms, "score, share of the second's", stat, Unit::Percent, range))
                });
                found.into_iter().collect()
            }
            Check::Within(arm, measure, least, most) => {
                let found = scope.arms(arm).first().and_then(|(arm, _)| {
                    let stat = data.measure(model, &scope.tasks, *arm, measure)?;
                    Some(scope.finding(&[*arm], measure.title, stat, measure.unit, (*least, *most)))
                });
                found.into_iter().collect()
            }
            Check::Option(name, option, values) => {
                scope.option(name, option, *values).map_or(Vec::new(), |arms| scope.better(arms))
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
    /// Arms of this name, the one without options first.
    fn arms(&self, name: &str) -> Vec<(usize, String)> {
        let arms = self.data.arms_of(self.model, &self.tasks);
        let named = arms.into_iter().map(|arm| (arm, self.data.arms[arm].name()));
        let mut named: Vec<_> = named.filter(|(_, own)| base(own) == name).collect();
        named.sort_by_key(|(_, own)| own != name);
        named
    }

    /// The first two arms of these names that have the same budget.
    fn pair(&self, name: &str, other: &str) -> Option<[usize; 2]> {
        let others = self.arms(other);
        self.arms(name)
            .iter()
            .find_map(|(arm, own)| Some([*arm, others.iter().find(|(_, other)| same_budget(own, other))?.0]))
    }

    /// Two arms that differ only in an option, with its values in this order: the default's first, left out of names.
    fn option(&self, name: &str, option: &str, [default, other]: [&str; 2]) -> Option<[usize; 2]> {
        let named = self.arms(name);
        let value = |own: &str| super::arm::option(own, option).unwrap_or(default).to_owned();
        named.iter().filter(|(_, own)| value(own) == other).find_map(|(arm, own)| {
            let like = |(_, second): &&(usize, String)| {
                value(second) == default && without(second, option) == without(own, option)
            };
            Some([*arm, named.iter().find(like)?.0])
        })
    }

    fn finding(&self, arms: &[usize], by: &str, stat: Stat, unit: Unit, range: (f64, f64)) -> Finding {
        let arms = arms.iter().map(|arm| self.data.arms[*arm].label()).collect::<Vec<_>>().join(", ");
        Finding { arms, by: by.to_owned(), stat, unit, range }
    }

    fn difference(&self, tasks: &[usize], arms: [usize; 2], of: fn(&Record) -> Option<f64>) -> Option<Stat> {
        let pair = |a: &Record, b: &Record| Some(of(a)? - of(b)?);
        let groups = tasks.iter().map(|task| self.data.paired([self.model, *task], arms, pair));
        bootstrap(groups.collect(), mean_of_means)
    }

    /// Of the scores that papers compare, by task.
    fn scores(&self, task: usize, arms: [usize; 2]) -> Vec<(Parts, Parts)> {
        let name = self.data.compared(task);
        let pair = |a: &Record, b: &Record| named::three(&a.scores, name).zip(named::three(&b.scores, name));
        self.data.paired([self.model, task], arms, pair)
    }

    /// By score where scores speak, and by KL; of tasks that have the score that papers compare.
    fn better(&self, arms: [usize; 2]) -> Vec<Finding> {
        let scored: Vec<usize> =
            self.tasks.iter().copied().filter(|task| !self.scores(*task, arms).is_empty()).collect();
        let loud = self.data.loud(self.model, &scored);
        let ahead = |group: &Vec<(Parts, Parts)>| {
            let of = |side: fn(&(Parts, Parts)) -> &Parts| named::pooled(group.iter().map(side));
            of(|pair| &pair.0) - of(|pair| &pair.1)
        };
        let groups = loud.iter().map(|task| self.scores(*task, arms)).collect();
        let score = bootstrap(groups, |groups: &[Vec<(Parts, Parts)>]| {
            groups.iter().map(ahead).sum::<f64>() / groups.len() as f64
        });
        let by_score = format!("{} (of 100)", self.score_name(&loud));
        let score =
            score.map(|stat| self.finding(&arms, &by_score, stat.times(100.0), Unit::Score, POSITIVE));
        // Smaller is nearer to vanilla.
        let kl = self.difference(&scored, arms, |record| Some(-record.fidelity.as_ref()?.kl));
        let kl = kl.map(|stat| self.finding(&arms, "KL, smaller by", stat, Unit::Nats, POSITIVE));
        score.into_iter().chain(kl).collect()
    }

    fn score_name(&self, tasks: &[usize]) -> String {
        distinct(tasks.iter().map(|task| self.data.compared(*task))).join(" and ")
    }

    fn hit_rate(&self, arms: [usize; 2]) -> Option<Finding> {
        let stat = self.difference(&self.tasks, arms, |record| record.fidelity.as_ref()?.hit_rate_40)?;
        Some(self.finding(&arms, "hit rate, higher by", stat, Unit::Percent, POSITIVE))
    }
}

/// Where both have a capacity, or a recompute ratio, it is equal.
fn same_budget(one: &str, other: &str) -> bool {
    ["capacity", "ratio"].iter().all(|name| {
        let value = |arm| option(arm, name).map(str::to_owned).or_else(|| default(arm, name));
        let number = |value: &str| value.parse::<f64>().ok();
        value(one)
            .zip(value(other))
            .is_none_or(|(a, b)| a == b || number(&a).is_some_and(|a| number(&b) == Some(a)))
    })
}
