//! The two kinds of measured tables: scores by task, and everything else by measure.

use std::collections::BTreeMap;

use super::data::Data;
use super::measures::{Aggregate, Measure};
use super::scores::{self, SCORE};
use super::stats::Stat;
use super::table::{Cell, Column, Row, Table, Unit, counted, distinct};
use super::variant_name::{VariantName, base};

/// A row of a table: a variant, the paper's name for it, and the heading above it.
#[derive(Clone, Copy)]
pub(super) struct Line {
    pub variant: usize,
    alias: &'static str,
    group: &'static str,
}

/// Variants in the order of a paper's rows, each with its name there, vanilla first; below follow those that the paper has not.
/// A row is the variant of just this name, else the first with other options. Without rows fusion methods come first.
pub(super) fn lines(data: &Data<'_>, variants: &[usize], rows: &'static [(String, String)]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (name, alias) in rows {
        let free: Vec<usize> = variants
            .iter()
            .copied()
            .filter(|variant| lines.iter().all(|line| line.variant != *variant))
            .collect();
        let exact = free.iter().find(|variant| data.variants[**variant].name() == *name);
        let found =
            exact.or_else(|| free.iter().find(|variant| base(&data.variants[**variant].name()) == *name));
        lines.extend(found.map(|variant| Line { variant: *variant, alias, group: "" }));
    }
    let group = |variant: &VariantName| match (variant.method.as_str(), variant.policy.as_str()) {
        _ if variant.is_vanilla() => "",
        _ if !rows.is_empty() => "Not in the paper's table",
        (_, "full") => "Fusion methods",
        ("vanilla", _) => "Eviction policies",
        _ => "Both",
    };
    let others = variants.iter().copied().filter(|variant| lines.iter().all(|line| line.variant != *variant));
    let others = others.map(|variant| Line { variant, alias: "", group: group(&data.variants[variant]) });
    lines.extend(others.collect::<Vec<_>>());
    // A heading over everything says nothing.
    if lines
        .iter()
        .filter(|line| !line.group.is_empty())
        .all(|line| rows.is_empty() && line.group == lines[lines.len() - 1].group)
    {
        lines.iter_mut().for_each(|line| line.group = "");
    }
    let order = ["", "Not in the paper's table", "Fusion methods", "Eviction policies", "Both"];
    lines.sort_by_key(|line| {
        (!data.variants[line.variant].is_vanilla(), order.iter().position(|group| *group == line.group))
    });
    lines
}

/// The rows of a table, under the headings of their groups.
fn rows(data: &Data<'_>, lines: &[Line], cells: impl Fn(&Line) -> Vec<Cell>) -> Vec<Row> {
    let mut before = "";
    let row = |line: &Line| {
        let group = if line.group == before { "" } else { line.group };
        before = line.group;
        let alias = if line.alias.is_empty() { String::new() } else { format!(" ({})", line.alias) };
        Row {
            group: group.to_owned(),
            label: data.variants[line.variant].label() + &alias,
            cells: cells(line),
        }
    };
    lines.iter().map(row).collect()
}

/// A task as a column names it.
pub(super) fn task_name(data: &Data<'_>, task: usize) -> String {
    let about = &data.tasks[task];
    let length = about.length.map_or(String::new(), |length| format!(" {length}"));
    format!("{}{length}", about.task)
}

/// A row a variant and a column a task, or a score of it if it has several. The average is over the tasks' own scores, of
/// those tasks in `averaged` that say something.
pub(super) fn scores_table(
    data: &Data<'_>,
    model: usize,
    tasks: &[usize],
    lines: &[Line],
    averaged: Option<&[usize]>,
) -> Table {
    let informative =
        averaged.map(|own| data.informative(model, own)).filter(|informative| informative.len() > 1);
    let columns: Vec<(usize, String)> = tasks
        .iter()
        .flat_map(|task| data.score_names(model, *task).into_iter().map(move |name| (*task, name)))
        // Further scores of many tasks are for machines.
        .filter(|(_, name)| *name == SCORE || (informative.is_none() && tasks.len() < 3))
        .collect();
    let sized = tasks.iter().any(|task| data.tasks[*task].length != data.tasks[tasks[0]].length);
    let mut table = Table { corner: "Samples".to_owned(), ..Table::default() };
    table.columns = columns.iter().map(|(task, name)| column(data, model, (*task, name), sized)).collect();
    if let Some(informative) = &informative {
        table.columns.push(Column { title: "Avg".to_owned(), sub: counted(informative.len(), "task") });
    }
    table.rows = rows(data, lines, |line| {
        let cell = |(task, name): &(usize, String)| {
            let stat = data.score([model, *task, line.variant], name, None);
            Cell { note: missing(data, [model, *task, line.variant]), ..Cell::stat(Unit::Score, stat) }
        };
        let own = informative
            .as_ref()
            .map(|informative| Cell::stat(Unit::Score, data.average(model, informative, line.variant)));
        columns.iter().map(cell).chain(own).collect()
    });
    table.notes = notes(data, model, tasks);
    table.notes.push(CELLS.to_owned());
    if uneven(data, model, tasks, lines) {
        table.notes.push(UNEVEN.to_owned());
    }
    if let (Some(informative), Some(own)) = (informative, averaged) {
        if informative.len() < own.len() {
            table.notes.push("Avg leaves out the tasks that say nothing about quality.".to_owned());
        }
        let foreign = tasks.iter().filter(|task| !own.contains(task)).map(|task| task_name(data, *task));
        let foreign: Vec<String> = foreign.collect();
        if !foreign.is_empty() {
            table
                .notes
                .push(format!("Avg leaves out sets that are not the paper's: {}.", foreign.join(", ")));
        }
    }
    table
}

const CELLS: &str = "Cells are means over the samples that the row itself answered; ratios and differences, in other tables, \
    are of samples that both sides answered.";
const UNEVEN: &str =
    "Rows have different numbers of samples (a stopped run, or failures): compare them by the paired ratios.";

/// Variants that answered a task at all answered different numbers of its samples.
fn uneven(data: &Data<'_>, model: usize, tasks: &[usize], lines: &[Line]) -> bool {
    tasks.iter().any(|task| {
        let counts = lines.iter().map(|line| data.answered(model, *task, line.variant).count());
        distinct(counts.filter(|count| *count > 0)).len() > 1
    })
}

/// `sized`: the table has tasks of several lengths.
fn column(data: &Data<'_>, model: usize, (task, name): (usize, &str), sized: bool) -> Column {
    let about = &data.tasks[task];
    let task_name = if sized { task_name(data, task) } else { about.task.clone() };
    let title = format!("{task_name} {}", scores::title(&about.benchmark, name));
    let met = met(data, model, task);
    let of = about.of.or((met < about.samples).then_some(about.samples));
    let of = of.map_or(String::new(), |of| format!(" of {of}"));
    let uninformative = data.uninformative(model, task).map_or("", |_| " · says nothing †");
    Column { title: title.trim_end().to_owned(), sub: format!("{met}{of}{uninformative}") }
}

/// Most samples of a task that a variant has a record of.
fn met(data: &Data<'_>, model: usize, task: usize) -> usize {
    let of = |variant: usize| {
        data.answered(model, task, variant).count() + data.failed(model, task, variant).count()
    };
    (0..data.variants.len()).map(of).max().unwrap_or(0)
}

/// Samples without an answer, and fewer than the column has, in words.
fn missing(data: &Data<'_>, [model, task, variant]: [usize; 3]) -> String {
    let failed = data.failed(model, task, variant).count();
    match data.answered(model, task, variant).count() + failed {
        _ if failed > 0 => format!("{failed} failed"),
        own if own > 0 && own < met(data, model, task) => counted(own, "sample"),
        _ => String::new(),
    }
}

/// Notes on differences from the benchmarks and on tasks that tell nothing about quality.
pub(super) fn notes(data: &Data<'_>, model: usize, tasks: &[usize]) -> Vec<String> {
    let note = |task: &usize| data.tasks[*task].notes(Some(data.models[model]));
    let mut notes = Vec::new();
    for text in distinct(tasks.iter().map(note).filter(|text| !text.is_empty())) {
        let of = tasks.iter().filter(|task| note(task) == text);
        let names = distinct(of.map(|task| data.tasks[*task].task.as_str()));
        notes.push(format!("{}: {text}.", names.join(", ")));
    }
    for task in tasks {
        if let Some(why) = data.uninformative(model, *task) {
            notes.push(format!("† {} says nothing about quality: {why}.", task_name(data, *task)));
        }
    }
    let fewer = |task: &&usize| met(data, model, **task) < data.tasks[**task].samples;
    if tasks.iter().any(|task| fewer(&task)) {
        let asked = distinct(tasks.iter().filter(fewer).map(|task| data.tasks[*task].samples.to_string()));
        notes.push(format!(
            "The run was stopped early: {} samples of a task were asked for.",
            asked.join(" or ")
        ));
    }
    notes
}

/// A row a variant and a column a measure, over tasks.
pub(super) fn costs_table(
    data: &Data<'_>,
    model: usize,
    tasks: &[usize],
    lines: &[Line],
    measures: &[Measure],
) -> Table {
    let stat = |line: &Line, measure: &Measure| {
        // Vanilla recomputes everything: its hit rate says nothing.
        let empty = measure.name.starts_with("hit_rate") && data.variants[line.variant].method == "vanilla";
        if empty { None } else { data.measure(model, tasks, line.variant, measure) }
    };
    // A measure's statistic of each variant.
    let found = |measure| -> BTreeMap<usize, Stat> {
        lines.iter().filter_map(|line| Some((line.variant, stat(line, measure)?))).collect()
    };
    let measures: Vec<(&Measure, BTreeMap<usize, Stat>)> = measures
        .iter()
        .map(|measure| (measure, found(measure)))
        .filter(|(_, found)| !found.is_empty())
        .collect();
    let mut table = Table { corner: "Method".to_owned(), ..Table::default() };
    table.columns = measures.iter().map(|(measure, _)| Column::new(measure.title)).collect();
    let met = |line: &Line| data.met(model, tasks, line.variant).len();
    let uneven = lines.iter().any(|line| met(line) != met(&lines[0]));
    if uneven {
        table.columns.push(Column::new("Tasks"));
    }
    table.rows = rows(data, lines, |line| {
        let cell = |(measure, found): &(&Measure, BTreeMap<usize, Stat>)| {
            let stat = found.get(&line.variant).copied();
            let cell = Cell::stat(measure.unit, stat);
            match stat.filter(|_| matches!(measure.of, Aggregate::RightKept)) {
                Some(Stat { value, samples, .. }) => {
                    let kept = (value * samples as f64).round();
                    Cell { note: format!("{kept} of {samples}"), ..cell }
                }
                None => cell,
            }
        };
        let cells = measures.iter().map(cell);
        cells.chain(uneven.then(|| Cell::text(met(line).to_string()))).collect()
    });
    let uninformative: Vec<String> = tasks
        .iter()
        .filter_map(|task| {
            Some(format!("{} ({})", task_name(data, *task), data.uninformative(model, *task)?))
        })
        .collect();
    if measures.iter().any(|(measure, _)| matches!(measure.of, Aggregate::Relative))
        && !uninformative.is_empty()
    {
        table
            .notes
            .push(format!("Scores leave out what says nothing about quality: {}.", uninformative.join("; ")));
    }
    table
}
