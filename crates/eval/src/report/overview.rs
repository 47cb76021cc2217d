//! The setup of a run, its summary, and advice.

use std::collections::BTreeMap;

use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;

use super::data::Data;
use super::figures;
use super::measures::{
    AT_REST, CHARGED, KEPT, KL, KL_FIRST, KL_MEDIAN, KV, KV_SHARE, Measure, RELATIVE, RIGHT_KEPT, TOP1,
    TPOT_SPEEDUP, TTFT_SPEEDUP,
};
use super::stats::Stat;
use super::table::{Block, Cell, Column, Row, Section, Table, Unit, counted, distinct};
use super::tables::{costs_table, lines, task_name};
use super::variant_name::{base, option};
use crate::calendar::utc;

/// Models, tasks, machine, settings and failures of the run.
pub(super) fn heading(data: &Data<'_>) -> Section {
    let about = data.about;
    let mut blocks = vec![Block::Table(facts(data))];
    if !about.models.is_empty() {
        blocks.push(Block::Table(models(data)));
    }
    if !data.tasks.is_empty() {
        blocks.push(Block::Table(tasks(data)));
    }
    blocks.push(Block::Table(methods(data)));
    blocks.extend(failures(data).map(Block::Table));
    let folded = [("Command", &about.command), ("Matrix", &about.matrix)];
    let folded = folded.into_iter().filter(|(_, text)| !text.is_empty());
    blocks.extend(folded.map(|(title, text)| Block::Details(title.to_owned(), text.clone())));
    Section { title: "What was run".to_owned(), blocks }
}

fn facts(data: &Data<'_>) -> Table {
    let (about, machine) = (data.about, &data.about.machine);
    let records: Vec<_> = data.counted().collect();
    let failed = records.iter().filter(|record| record.error.is_some()).count();
    let samples = distinct_samples(data);
    let finished = records.iter().map(|record| record.finished).filter(|time| *time > 0);
    let last = finished.max().map_or(String::new(), |time| format!(" to {}", utc(time)));
    let memory = Unit::Bytes.figure(machine.memory as f64);
    let device = machine.device.as_ref().map_or_else(String::new, |device| format!("{device}, "));
    let threads = counted(machine.threads, "thread");
    let settings = about.settings.iter().map(|(name, value)| format!("{name}: {value}"));
    let facts = [
        ("Program", format!("refrain {}", about.version)),
        ("When", format!("{}{last}, {} of work", utc(about.started), duration(about.seconds))),
        ("Machine", format!("{device}{}, {threads}, {}, {memory}, {}", machine.cpu, machine.isa, machine.os)),
        ("Samples", format!("{samples}, answered {} times; {failed} failed", records.len() - failed)),
        ("Seed", about.seed.to_string()),
        ("Settings", settings.collect::<Vec<_>>().join("; ")),
    ];
    let facts = facts.into_iter().filter(|(_, value)| !value.is_empty());
    let row = |(label, value): (&str, String)| Row {
        label: label.to_owned(),
        cells: vec![Cell::text(value)],
        ..Row::default()
    };
    Table {
        title: "The run".to_owned(),
        columns: vec![Column::new("")],
        rows: facts.map(row).collect(),
        ..Table::default()
    }
}

fn distinct_samples(data: &Data<'_>) -> usize {
    let key = |record: &crate::Record| {
        let depth = record.depth.map(f64::to_bits);
        (record.benchmark.clone(), record.task.clone(), record.length, depth, record.sample.clone())
    };
    data.counted().map(key).collect::<std::collections::BTreeSet<_>>().len()
}

fn models(data: &Data<'_>) -> Table {
    let titles = ["File", "Fingerprint", "Layers", "Heads (KV)", "Context", "Precision", "KV"];
    let row = |model: &crate::ModelInfo| Row {
        label: model.name.clone(),
        cells: [
            model.file.clone(),
            model.fingerprint.chars().take(12).collect(),
            model.layers.to_string(),
            format!("{} ({})", model.heads, model.kv_heads),
            model.context.to_string(),
            model.precision.clone(),
            model.kv.clone(),
        ]
        .map(Cell::text)
        .into(),
        ..Row::default()
    };
    Table {
        title: "Models".to_owned(),
        corner: "Model".to_owned(),
        columns: titles.map(Column::new).into(),
        rows: data.about.models.iter().map(row).collect(),
        ..Table::default()
    }
}

fn tasks(data: &Data<'_>) -> Table {
    let row = |task: &crate::TaskInfo| Row {
        label: task.label(),
        cells: [
            task.metric.clone(),
            task.of.map_or(task.samples.to_string(), |of| format!("{} of {of}", task.samples)),
            task.notes(None),
            task.data.as_ref().map_or(String::new(), |hash| hash.chars().take(12).collect()),
        ]
        .map(Cell::text)
        .into(),
        ..Row::default()
    };
    Table {
        title: "Tasks".to_owned(),
        corner: "Task".to_owned(),
        columns: ["Metric", "Samples", "Note", "Data (BLAKE3)"].map(Column::new).into(),
        rows: data.tasks.iter().map(row).collect(),
        ..Table::default()
    }
}

/// The methods and policies of the run, with their papers.
fn methods(data: &Data<'_>) -> Table {
    let parts = data
        .variants
        .iter()
        .flat_map(|variant| variant.name().split('+').map(str::to_owned).collect::<Vec<_>>());
    let rows = distinct(parts.map(|name| base(&name))).into_iter().map(|name| {
        let method = METHODS.entry(&name).map(|entry| (entry.description, entry.source));
        let found = method.or_else(|_| POLICIES.entry(&name).map(|entry| (entry.description, entry.source)));
        let (summary, paper) = found.unwrap_or(("not known to this program", ""));
        let link = Cell { link: paper, ..Cell::text(paper.trim_start_matches("https://")) };
        let label = super::variant_name::label(&name);
        Row { label, cells: vec![Cell::text(summary), link], ..Row::default() }
    });
    Table {
        title: "Methods and policies".to_owned(),
        corner: "Name".to_owned(),
        columns: vec![Column::new("What it does"), Column::new("Paper")],
        rows: rows.collect(),
        ..Table::default()
    }
}

/// Most kinds of failures that are shown.
const ERRORS: usize = 8;

fn failures(data: &Data<'_>) -> Option<Table> {
    let mut by_text: BTreeMap<String, Vec<&crate::Record>> = BTreeMap::new();
    for record in data.counted() {
        if let Some(error) = record.failure() {
            by_text.entry(error).or_default().push(record);
        }
    }
    let mut kinds: Vec<_> = by_text.into_iter().collect();
    kinds.sort_by_key(|(_, records)| std::cmp::Reverse(records.len()));
    let row = |(error, records): &(String, Vec<&crate::Record>)| {
        let first = records[0];
        let example =
            format!("{}, {}, {}, {}, {}", first.model, first.task, first.sample, first.method, first.policy);
        let cells = vec![Cell::text(records.len().to_string()), Cell::text(example)];
        Row { label: error.chars().take(300).collect(), cells, ..Row::default() }
    };
    let left = kinds.len().saturating_sub(ERRORS);
    (!kinds.is_empty()).then(|| Table {
        title: "Failures".to_owned(),
        corner: "Error".to_owned(),
        columns: vec![Column::new("Records"), Column::new("For example")],
        rows: kinds.iter().take(ERRORS).map(row).collect(),
        notes: if left > 0 { vec![format!("and {left} other errors")] } else { Vec::new() },
        ..Table::default()
    })
}

const SUMMARY: &[Measure] = &[
    RELATIVE,
    RIGHT_KEPT,
    KL,
    KL_MEDIAN,
    KL_FIRST,
    TOP1,
    TTFT_SPEEDUP,
    TPOT_SPEEDUP,
    CHARGED,
    KEPT,
    KV_SHARE,
    KV,
];

/// Quality and cost of every variant against vanilla, by model.
pub(super) fn summary(data: &Data<'_>) -> Section {
    let mut blocks = Vec::new();
    for model in 0..data.models.len() {
        let tasks = data.tasks_of(model);
        let lines = lines(data, &data.variants_of(model, &tasks), &[]);
        if lines.is_empty() {
            continue;
        }
        let encoded =
            lines.iter().any(|line| option(&data.variants[line.variant].method, "store_dtype").is_some());
        let mut measures = SUMMARY.to_vec();
        measures.extend(encoded.then_some(AT_REST));
        let mut table = costs_table(data, model, &tasks, &lines, &measures);
        table.title = format!("All tasks: {}", data.models[model]);
        blocks.extend(advice(data, model, &tasks).into_iter().map(Block::Text));
        blocks.push(Block::Table(table));
    }
    blocks.extend(figures::scatter(data).map(Block::Figure));
    if data.vanilla().is_none() {
        let none = "Vanilla was not run: no quality or time can be set against it.";
        blocks.insert(0, Block::Text(none.to_owned()));
    }
    blocks.push(Block::Text(READING.to_owned()));
    Section { title: "Summary".to_owned(), blocks }
}

const READING: &str = "How to read: scores as a share of Vanilla's, and all ratios and differences, are paired: of the samples \
    that both sides answered; scores are unweighted means of the tasks'. Scores in the tables by task, and measures that are no ratio, are over the \
    samples that the row itself answered; advice is by the samples that all candidates answered. KL is KL(Vanilla ‖ method) of the next token over the first tokens of Vanilla's own answer, and \
    the next column the share of positions at which both have the same likeliest token. Ratios of cost are medians over \
    samples, each against Vanilla's cost of the same sample; recompute ratio is of document tokens, sequence ratio of prompt \
    tokens kept, KV against full attention's at the end of the answer. Small figures are 95 % intervals (bootstrap over \
    samples within tasks, 2000 resamples); where a task has fewer than two samples there is none.";

/// Sentences on which method, and which policy, to take; of samples that all of them and vanilla answered.
fn advice(data: &Data<'_>, model: usize, tasks: &[usize]) -> Vec<String> {
    let variants =
        data.variants_of(model, tasks).into_iter().filter(|variant| !data.variants[*variant].is_vanilla());
    let (fusion, eviction): (Vec<usize>, Vec<usize>) =
        variants.partition(|variant| data.variants[*variant].method != "vanilla");
    let said = |(kind, variants, cost): (&str, Vec<usize>, Measure)| {
        let has_answered =
            |variant: &usize| tasks.iter().any(|task| data.answered(model, *task, *variant).next().is_some());
        let variants: Vec<usize> = variants.into_iter().filter(has_answered).collect();
        let all: Vec<usize> = variants.iter().copied().chain(data.vanilla()).collect();
        let data = &data.answered_by_all(model, &all);
        let common = data.tasks_of(model);
        let said = Choice { data, model, tasks: &common, variants: &variants, cost }.said()?;
        Some(format!("{kind} on {}, {}: {said}", data.models[model], counted(common.len(), "task")))
    };
    [("Fusion", fusion, TTFT_SPEEDUP), ("Eviction", eviction, KV_SHARE)]
        .into_iter()
        .filter_map(said)
        .collect()
}

/// A choice among variants, whose cost is a speed-up or a share of memory.
struct Choice<'a> {
    data: &'a Data<'a>,
    model: usize,
    tasks: &'a [usize],
    variants: &'a [usize],
    cost: Measure,
}

impl Choice<'_> {
    fn of(&self, measure: Measure) -> Vec<(usize, Stat)> {
        let stat = |variant: &usize| {
            Some((*variant, self.data.measure(self.model, self.tasks, *variant, &measure)?))
        };
        self.variants.iter().filter_map(stat).collect()
    }

    /// A variant and its cost in words.
    fn priced(&self, variant: usize) -> String {
        let what = if self.cost.unit == Unit::Times {
            "Vanilla's speed to the first token"
        } else {
            "full attention's KV"
        };
        let cost = self.data.measure(self.model, self.tasks, variant, &self.cost);
        let cost =
            cost.map_or(String::new(), |stat| format!(" at {} of {what}", self.cost.unit.figure(stat.value)));
        self.data.variants[variant].label() + &cost
    }

    /// None if there are too few samples for advice.
    fn said(&self) -> Option<String> {
        let scores = self.of(RELATIVE);
        let scored = !scores.is_empty();
        let scores: Vec<_> = scores.into_iter().filter(|(_, stat)| stat.enough).collect();
        if scored && scores.is_empty() {
            return None;
        }
        let Some((best, score)) = scores.iter().max_by(|a, b| a.1.value.total_cmp(&b.1.value)) else {
            let (best, kl) = self
                .of(KL)
                .into_iter()
                .filter(|(_, stat)| stat.enough)
                .min_by(|a, b| a.1.value.total_cmp(&b.1.value))?;
            let (best, samples) = (self.priced(best), counted(kl.samples, "sample"));
            let kl = Unit::Nats.figure(kl.value);
            return Some(format!(
                "no score says something about quality; by KL {best} is nearest to Vanilla ({kl} nats; {samples})."
            ));
        };
        let (share, interval) = (Unit::Percent.figure(score.value), Unit::Percent.interval(*score));
        let samples = counted(score.samples, "sample");
        let best_said = format!(
            "{} has the best score, {share} of Vanilla's ({interval}; {samples})",
            self.priced(*best)
        );
        let price = |stat: &Stat| if self.cost.unit == Unit::Times { -stat.value } else { stat.value };
        let near = |variant: usize| scores.iter().any(|(other, stat)| *other == variant && stat.high >= 1.0);
        let costs = self.of(self.cost);
        let cheapest = costs
            .iter()
            .filter(|(variant, _)| near(*variant))
            .min_by(|a, b| price(&a.1).total_cmp(&price(&b.1)));
        let cheapest_said = match cheapest {
            Some((variant, _)) if variant == best => {
                "it is also the cheapest that these samples cannot tell from Vanilla by score".to_owned()
            }
            Some((variant, _)) => format!(
                "the cheapest that these samples cannot tell from Vanilla by score is {}",
                self.priced(*variant)
            ),
            None if scores.iter().any(|(variant, _)| near(*variant)) => {
                "no time was measured of those that these samples cannot tell from Vanilla by score"
                    .to_owned()
            }
            None => "all score below Vanilla by more than chance".to_owned(),
        };
        let uninformative =
            self.tasks.iter().filter(|task| self.data.uninformative(self.model, **task).is_some());
        let uninformative: Vec<String> = uninformative.map(|task| task_name(self.data, *task)).collect();
        let left = if uninformative.is_empty() {
            String::new()
        } else {
            format!(" Left out, as they say nothing: {}.", uninformative.join(", "))
        };
        Some(format!("{best_said}; {cheapest_said}.{left}"))
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 5400.0 => format!("{:.1} hours", s / 3600.0),
        s if s >= 90.0 => format!("{:.1} minutes", s / 60.0),
        s => format!("{s:.0} seconds"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(
            [duration(60.0), duration(600.0), duration(7200.0)],
            ["60 seconds", "10.0 minutes", "2.0 hours"]
        );
    }
}
