//! A paper's table: its tasks, rows and columns, filled from the records.

use super::arm::{Arm, base, without};
use super::data::Data;
use super::measures::Measure;
use super::table::{Table, distinct};
use super::tables::{costs, lines, scores};

/// Models, tasks and arms whose scores a table shows.
pub(super) type Shown = Vec<[usize; 3]>;

/// A table of a paper.
pub(super) struct Layout {
    pub title: &'static str,
    /// The paper's first.
    pub benchmarks: &'static [&'static str],
    /// None for all of the benchmarks. `NAME_…` are sets derived from `NAME`.
    pub tasks: &'static [&'static str],
    /// Names of arms in the order of the paper's rows, and what it calls them.
    pub rows: &'static [(&'static str, &'static str)],
    pub arms: Arms,
    pub kind: Kind,
}

/// Which arms a table has beside vanilla.
pub(super) enum Arms {
    /// Fusion methods, and A3-ex.
    Fusion,
    /// Eviction policies after vanilla's prefill.
    Eviction,
    /// Those of a name that differ in nothing but this option; in any if it is empty.
    Differing(&'static str, &'static str),
}

pub(super) enum Kind {
    /// A column a task, and an average if told.
    Scores(bool),
    Costs(&'static [Measure]),
}

impl Layout {
    /// A table a model and length, if it has something beside vanilla, with the cells whose scores it shows.
    pub(super) fn tables(&self, data: &Data<'_>) -> Vec<(Table, Shown)> {
        let mut tables = Vec::new();
        for model in 0..data.models.len() {
            let tasks = self.tasks_of(data, model);
            let lengths = distinct(tasks.iter().map(|task| data.tasks[*task].length));
            for length in lengths {
                let here: Vec<usize> =
                    tasks.iter().copied().filter(|task| data.tasks[*task].length == length).collect();
                let arms = self.arms_of(data, &data.arms_of(model, &here));
                let enough = if matches!(self.arms, Arms::Differing(..)) { 2 } else { 1 };
                if arms.iter().filter(|arm| !data.arms[**arm].is_vanilla()).count() < enough {
                    continue;
                }
                let lines = lines(data, &arms, self.rows);
                let mut table = match self.kind {
                    Kind::Scores(average) => {
                        let own: Vec<usize> =
                            here.iter().copied().filter(|task| self.is_own(data, *task)).collect();
                        scores(data, model, &here, &lines, average.then_some(&own[..]))
                    }
                    Kind::Costs(measures) => costs(data, model, &here, &lines, measures),
                };
                let length = length.map_or(String::new(), |length| format!(", {length} tokens"));
                table.title = format!("{}: {}{length}", self.title, data.models[model]);
                let cell = |arm: &usize| {
                    let arm = *arm;
                    data.met(model, &here, arm).into_iter().map(move |task| [model, task, arm])
                };
                let scored = matches!(self.kind, Kind::Scores(_));
                let shown = if scored { arms.iter().flat_map(cell).collect() } else { Shown::new() };
                tables.extend((!table.columns.is_empty()).then_some((table, shown)));
            }
        }
        tables
    }

    /// Tasks in the paper's order.
    fn tasks_of(&self, data: &Data<'_>, model: usize) -> Vec<usize> {
        let mut tasks = data.tasks_of(model);
        tasks.retain(|task| self.place(data, *task).is_some());
        tasks.sort_by_key(|task| self.place(data, *task));
        tasks
    }

    fn place(&self, data: &Data<'_>, task: usize) -> Option<usize> {
        let about = &data.tasks[task];
        if !self.benchmarks.contains(&about.benchmark.as_str()) {
            return None;
        }
        let is = |name: &&str| {
            about.task.strip_prefix(*name).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        if self.tasks.is_empty() { Some(0) } else { self.tasks.iter().position(is) }
    }

    /// The paper has this very set: it is not derived from one of its sets, nor of another benchmark.
    fn is_own(&self, data: &Data<'_>, task: usize) -> bool {
        let about = &data.tasks[task];
        let named = self.tasks.is_empty() || self.tasks.contains(&about.task.as_str());
        named && self.benchmarks.first() == Some(&about.benchmark.as_str())
    }

    fn arms_of(&self, data: &Data<'_>, arms: &[usize]) -> Vec<usize> {
        let name = |arm: &usize| data.arms[*arm].name();
        let has = |index: &usize| {
            let arm: &Arm = &data.arms[*index];
            let differs = |base_name: &str, option: &str| {
                let own = name(index);
                let like = |other: &usize| {
                    let other = name(other);
                    base(&other) == base_name
                        && other != own
                        && (option.is_empty() || without(&other, option) == without(&own, option))
                };
                base(&own) == base_name && arms.iter().any(like)
            };
            arm.is_vanilla()
                || match self.arms {
                    Arms::Fusion => arm.method != "vanilla" || base(&arm.policy) == "a3_ex",
                    Arms::Eviction => arm.method == "vanilla",
                    Arms::Differing(base_name, option) => differs(base_name, option),
                }
        };
        arms.iter().copied().filter(has).collect()
    }
}
