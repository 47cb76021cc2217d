//! The papers' tables in the papers' layouts, with the papers' own numbers in tables beside.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use serde::Deserialize;

use super::data::Data;
use super::measures;
use super::table::{Block, Cell, Column, Row, Section, Table, counted, distinct};
use super::tables::{costs_table, lines, scores_table};
use super::variant_name::{VariantName, base, without};
use crate::tasks::longbench;

/// Model, task and variant of each score that a table shows.
type Shown = Vec<[usize; 3]>;

/// A paper of `papers.toml`, which explains the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    title: String,
    layout: Vec<Layout>,
    published: Vec<Published>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layout {
    title: String,
    benchmarks: Vec<String>,
    suite: Option<String>,
    #[serde(default)]
    tasks: Vec<String>,
    #[serde(default)]
    rows: Vec<(String, String)>,
    variants: Variants,
    #[serde(default)]
    average: bool,
    #[serde(default)]
    measures: Vec<String>,
}

/// Which variants a layout has beside vanilla.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", untagged)]
enum Variants {
    Kind(Kind),
    /// Variants of a name that differ only in an option, or in any if it is empty.
    Differing {
        of: String,
        option: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// Fusion methods, and A3-ex.
    Fusion,
    /// Eviction policies after vanilla's prefill.
    Eviction,
}

/// Numbers as a paper prints them. A row is its label, then its cells.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Published {
    title: String,
    source: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
    note: Option<String>,
}

/// The file is part of the program and its tests read it, so that it can always be read.
static PAPERS: LazyLock<Vec<Paper>> = LazyLock::new(|| {
    #[derive(Deserialize)]
    struct File {
        paper: Vec<Paper>,
    }
    toml::from_str::<File>(include_str!("papers.toml")).map_or_else(|_| Vec::new(), |file| file.paper)
});

/// A section for each paper whose tasks were run, and one for the tasks that no paper's table shows.
pub(super) fn sections(data: &Data<'_>) -> Vec<Section> {
    let mut sections = Vec::new();
    let mut shown = BTreeSet::new();
    for paper in PAPERS.iter() {
        let tables = paper.layout.iter().flat_map(|layout| layout.tables(data));
        let (tables, cells): (Vec<_>, Vec<Shown>) = tables.unzip();
        shown.extend(cells.into_iter().flatten());
        if !tables.is_empty() {
            let published = paper.published.iter().map(Published::table);
            let blocks = tables.into_iter().chain(published).map(Block::Table).collect();
            sections.push(Section { title: paper.title.clone(), blocks });
        }
    }
    sections.extend(others(data, &shown));
    sections
}

/// A table a benchmark, of the tasks that have a variant whose scores no paper's table shows.
fn others(data: &Data<'_>, shown: &BTreeSet<[usize; 3]>) -> Option<Section> {
    let mut blocks = Vec::new();
    for model in 0..data.models.len() {
        let hidden = |task: &usize| {
            let mut variants = data.variants_of(model, &[*task]).into_iter();
            variants.any(|variant| !shown.contains(&[model, *task, variant]))
        };
        let tasks: Vec<usize> = data.tasks_of(model).into_iter().filter(hidden).collect();
        for benchmark in distinct(tasks.iter().map(|task| data.tasks[*task].benchmark.clone())) {
            let here: Vec<usize> =
                tasks.iter().copied().filter(|task| data.tasks[*task].benchmark == benchmark).collect();
            let lines = lines(data, &data.variants_of(model, &here), &[]);
            let mut table = scores_table(data, model, &here, &lines, None);
            let tasks = counted(here.len(), "task");
            table.title = format!("{benchmark}: {}, {tasks}", data.models[model]);
            blocks.extend((!table.columns.is_empty()).then_some(Block::Table(table)));
        }
    }
    (!blocks.is_empty()).then(|| Section { title: "Other tasks".to_owned(), blocks })
}

impl Published {
    fn table(&self) -> Table {
        let row = |row: &Vec<String>| Row {
            label: row[0].clone(),
            cells: row[1..].iter().map(Cell::text).collect(),
            ..Row::default()
        };
        Table {
            title: self.title.clone(),
            source: Some(self.source.clone()),
            columns: self.columns.iter().map(Column::new).collect(),
            rows: self.rows.iter().map(row).collect(),
            notes: self.note.iter().cloned().collect(),
            ..Table::default()
        }
    }
}

impl Layout {
    /// A table a model and length that has a variant beside vanilla, with the scores that it shows.
    fn tables(&'static self, data: &Data<'_>) -> Vec<(Table, Shown)> {
        let measures: Vec<_> = self.measures.iter().filter_map(|name| measures::named(name)).collect();
        let least = if matches!(self.variants, Variants::Differing { .. }) { 2 } else { 1 };
        let mut tables = Vec::new();
        for model in 0..data.models.len() {
            let tasks = self.tasks_of(data, model);
            for length in distinct(tasks.iter().map(|task| data.tasks[*task].length)) {
                let here: Vec<usize> =
                    tasks.iter().copied().filter(|task| data.tasks[*task].length == length).collect();
                let variants = self.variants_of(data, &data.variants_of(model, &here));
                if variants.iter().filter(|variant| !data.variants[**variant].is_vanilla()).count() < least {
                    continue;
                }
                let lines = lines(data, &variants, &self.rows);
                let mut table = if measures.is_empty() {
                    let own: Vec<usize> =
                        here.iter().copied().filter(|task| self.is_own(data, *task)).collect();
                    scores_table(data, model, &here, &lines, self.average.then_some(&own[..]))
                } else {
                    costs_table(data, model, &here, &lines, &measures)
                };
                let length = length.map_or(String::new(), |length| format!(", {length} tokens"));
                table.title = format!("{}: {}{length}", self.title, data.models[model]);
                let cells = |variant: &usize| {
                    let variant = *variant;
                    data.met(model, &here, variant).into_iter().map(move |task| [model, task, variant])
                };
                let shown = if measures.is_empty() {
                    variants.iter().flat_map(cells).collect()
                } else {
                    Shown::new()
                };
                tables.extend((!table.columns.is_empty()).then_some((table, shown)));
            }
        }
        tables
    }

    /// Names of the tasks in the paper's order; empty for all of the benchmarks.
    fn names(&self) -> Vec<&str> {
        let suite = self.suite.as_deref().and_then(longbench::suite).unwrap_or_default();
        self.tasks.iter().map(String::as_str).chain(suite.iter().copied()).collect()
    }

    /// The model's tasks in the paper's order.
    fn tasks_of(&self, data: &Data<'_>, model: usize) -> Vec<usize> {
        let mut tasks = data.tasks_of(model);
        tasks.retain(|task| self.position(data, *task).is_some());
        tasks.sort_by_key(|task| self.position(data, *task));
        tasks
    }

    /// The position of a task in the paper's order. `NAME_…` are sets derived from `NAME`, or of another edition.
    fn position(&self, data: &Data<'_>, task: usize) -> Option<usize> {
        let (about, names) = (&data.tasks[task], self.names());
        if !self.benchmarks.contains(&about.benchmark) {
            return None;
        }
        let is = |name: &&str| {
            let rest = about.task.strip_prefix(longbench::without_edition(name));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        if names.is_empty() { Some(0) } else { names.iter().position(is) }
    }

    /// Whether the paper has this very set: not one derived from it, nor one of another benchmark. LongBench's set of a task stands in for that
    /// of LongBench-E where the latter was not run.
    fn is_own(&self, data: &Data<'_>, task: usize) -> bool {
        let (about, names) = (&data.tasks[task], self.names());
        let was_run = |name: &str| data.tasks.iter().any(|other| other.task == name);
        let stands_for = |name: &&str| longbench::without_edition(name) == about.task && !was_run(name);
        let named = names.is_empty() || names.contains(&about.task.as_str()) || names.iter().any(stands_for);
        named && self.benchmarks.first() == Some(&about.benchmark)
    }

    /// The variants of the table, vanilla among them.
    fn variants_of(&self, data: &Data<'_>, all: &[usize]) -> Vec<usize> {
        let name = |variant: &usize| data.variants[*variant].name();
        let has = |index: &usize| {
            let variant: &VariantName = &data.variants[*index];
            let differs = |of: &str, option: &str| {
                let own = name(index);
                let like = |other: &usize| {
                    let other = name(other);
                    base(&other) == of
                        && other != own
                        && (option.is_empty() || without(&other, option) == without(&own, option))
                };
                base(&own) == of && all.iter().any(like)
            };
            variant.is_vanilla()
                || match &self.variants {
                    Variants::Kind(Kind::Fusion) => {
                        variant.method != "vanilla" || base(&variant.policy) == "a3_ex"
                    }
                    Variants::Kind(Kind::Eviction) => variant.method == "vanilla",
                    Variants::Differing { of, option } => differs(of, option),
                }
        };
        all.iter().copied().filter(has).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn papers_can_be_read_and_name_what_there_is() {
        let layouts = PAPERS.iter().map(|paper| (paper.layout.len(), paper.published.len()));
        assert_eq!(layouts.collect::<Vec<_>>(), [(2, 5), (3, 4), (6, 7), (2, 1)]);
        for layout in PAPERS.iter().flat_map(|paper| &paper.layout) {
            assert!(layout.measures.iter().all(|name| measures::named(name).is_some()), "{}", layout.title);
            assert!(layout.suite.is_none() || !layout.names().is_empty(), "{}", layout.title);
        }
        for table in PAPERS.iter().flat_map(|paper| &paper.published) {
            assert!(table.rows.iter().all(|row| row.len() == table.columns.len() + 1), "{}", table.title);
        }
    }
}
