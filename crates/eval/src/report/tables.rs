//! The two kinds of measured tables: scores by task, and everything else by measure.

use std::collections::BTreeMap;

use super::data::Data;
use super::measures::{Aggregate, Measure};
use super::scores::{self, Bucket, SCORE};
use super::stats::Stat;
use super::table::{Cell, Column, Row, Table, Unit, counted, distinct};
use super::variant_name::{VariantName, base};
use crate::Record;

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
    let of_task = |task: &usize| {
        let task = *task;
        let names = data.score_names(model, task).into_iter();
        let whole = names.map(move |name| ScoreColumn { task, name, bucket: None });
        let by_length = data.buckets(task).iter();
        whole.chain(by_length.map(move |bucket| ScoreColumn {
            task,
            name: SCORE.to_owned(),
            bucket: Some(bucket),
        }))
    };
    let columns: Vec<ScoreColumn> = tasks
        .iter()
        .flat_map(of_task)
        // Further scores of many tasks are for machines.
        .filter(|column| column.name == SCORE || (informative.is_none() && tasks.len() < 3))
        .collect();
    let sized = tasks.iter().any(|task| data.tasks[*task].length != data.tasks[tasks[0]].length);
    let mut table = Table { corner: "Samples".to_owned(), ..Table::default() };
    table.columns = columns.iter().map(|column| column.heading(data, model, sized)).collect();
    if let Some(informative) = &informative {
        table.columns.push(Column { title: "Avg".to_owned(), sub: counted(informative.len(), "task") });
    }
    table.rows = rows(data, lines, |line| {
        let cell = |column: &ScoreColumn| column.cell(data, model, line.variant);
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

const CELLS: &str = "Cells are means over the samples that the row itself answered, or over as many of its answers as the cell says have the \
    score; ratios and differences, in other tables, are of samples that both sides answered.";
const FAILED: &str = "Measures that are no ratio to Vanilla's are over the samples that the row itself answered: a row that fails on hard ones looks \
    better than it is.";
const UNEVEN: &str =
    "Rows have different numbers of samples (a stopped run, or failures): compare them by the paired ratios.";

/// Variants that answered a task at all answered different numbers of its samples.
fn uneven(data: &Data<'_>, model: usize, tasks: &[usize], lines: &[Line]) -> bool {
    tasks.iter().any(|task| {
        let counts = lines.iter().map(|line| data.answered(model, *task, line.variant).count());
        distinct(counts.filter(|count| *count > 0)).len() > 1
    })
}

/// A score of a task, of all its samples or of those with contexts of some lengths.
struct ScoreColumn {
    task: usize,
    name: String,
    bucket: Option<&'static Bucket>,
}

impl ScoreColumn {
    /// `sized`: the table has tasks of several lengths.
    fn heading(&self, data: &Data<'_>, model: usize, sized: bool) -> Column {
        let ScoreColumn { task, name, bucket } = self;
        let about = &data.tasks[*task];
        let task_name = if sized { task_name(data, *task) } else { about.task.clone() };
        if let Some(bucket) = bucket {
            let title = format!("{task_name} {}", bucket.name);
            return Column { title, sub: "words of context".to_owned() };
        }
        let title = format!("{task_name} {}", scores::title(&about.benchmark, name));
        let (met, asked) = (met(data, model, *task), about.samples_of(data.models[model]));
        let of = about.of.or((met < asked).then_some(asked));
        let of = of.map_or(String::new(), |of| format!(" of {of}"));
        let uninformative = data.uninformative(model, *task).map_or("", |_| " · says nothing †");
        Column { title: title.trim_end().to_owned(), sub: format!("{met}{of}{uninformative}") }
    }

    fn cell(&self, data: &Data<'_>, model: usize, variant: usize) -> Cell {
        let place = [model, self.task, variant];
        if let Some(bucket) = self.bucket {
            let stat = data.score(place, &self.name, |record| bucket.has(record));
            let note = stat.map_or(String::new(), |stat| counted(stat.samples, "sample"));
            return Cell { note, ..Cell::stat(Unit::Score, stat) };
        }
        let stat = data.score(place, &self.name, |_| true);
        let answered = data.answered(model, self.task, variant).count();
        let fewer = stat.filter(|stat| stat.samples < answered);
        let fewer = fewer.map_or(String::new(), |stat| format!("{} of {answered} answers", stat.samples));
        let mut notes = vec![missing(data, place), fewer];
        notes.retain(|note| !note.is_empty());
        Cell { note: notes.join(", "), ..Cell::stat(Unit::Score, stat) }
    }
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
    notes.extend(tasks.iter().filter_map(|task| room_of_answers(data, model, *task)));
    let asked = |task: usize| data.tasks[task].samples_of(data.models[model]);
    let fewer = tasks.iter().filter(|task| met(data, model, **task) < asked(**task));
    let asked = distinct(fewer.map(|task| asked(*task).to_string()));
    if !asked.is_empty() {
        notes.push(format!(
            "The run was stopped early: {} samples of a task were asked for.",
            asked.join(" or ")
        ));
    }
    notes
}

/// The answers of a task that the context has less room for than their limit, in words.
fn room_of_answers(data: &Data<'_>, model: usize, task: usize) -> Option<String> {
    let answers = data.variants_of(model, &[task]).into_iter();
    let answers = answers.flat_map(|variant| data.answered(model, task, variant));
    let room = |record: &Record| {
        let room = record.answer_room?;
        Some((room, record.cost.as_ref().is_some_and(|cost| cost.answer_tokens >= room)))
    };
    let rooms: Vec<(usize, bool)> = answers.filter_map(room).collect();
    let least = rooms.iter().map(|(room, _)| room).min()?;
    let ended = rooms.iter().filter(|(_, is_full)| *is_full).count();
    Some(format!(
        "{}: the context has room for {least} new tokens or more, fewer than the task allows; {ended} of {} answers end there.",
        task_name(data, task),
        rooms.len()
    ))
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
    let count = |line: &Line, of: &dyn Fn(usize, usize) -> usize| -> usize {
        tasks.iter().map(|task| of(*task, line.variant)).sum()
    };
    let failed = |line: &Line| count(line, &|task, variant| data.failed(model, task, variant).count());
    let fails = lines.iter().any(|line| failed(line) > 0);
    if fails {
        table.columns.push(Column::new("Failed"));
        table.notes.push(FAILED.to_owned());
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
        let failures = || {
            let answered = count(line, &|task, variant| data.answered(model, task, variant).count());
            Cell::text(format!("{} of {}", failed(line), failed(line) + answered))
        };
        let met = uneven.then(|| Cell::text(met(line).to_string()));
        cells.chain(met).chain(fails.then(failures)).collect()
    });
    let uninformative: Vec<String> = tasks
        .iter()
        .filter_map(|task| {
            Some(format!("{} ({})", task_name(data, *task), data.uninformative(model, *task)?))
        })
        .collect();
    let untimed = |task: usize, variant: usize| {
        let costs = data.answered(model, task, variant).filter_map(|record| record.cost.as_ref());
        costs.filter(|cost| cost.prefilled_chunks > 0).count()
    };
    let untimed: usize = lines.iter().map(|line| count(line, &untimed)).sum();
    if untimed > 0 {
        table.notes.push(format!(
            "{} no time to the first token: the store in memory had no room for all chunks, and some were prefilled within it. A larger \
             --memory in a new run has room.",
            if untimed == 1 { "1 answer has".to_owned() } else { format!("{untimed} answers have") }
        ));
    }
    if measures.iter().any(|(measure, _)| matches!(measure.of, Aggregate::Relative))
        && !uninformative.is_empty()
    {
        table
            .notes
            .push(format!("Scores leave out what says nothing about quality: {}.", uninformative.join("; ")));
    }
    table
}
