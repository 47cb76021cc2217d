//! The parts of a report, before they are HTML or Markdown.

use super::stats::Stat;

/// A chapter.
pub(super) struct Section {
    pub title: String,
    pub blocks: Vec<Block>,
}

pub(super) enum Block {
    Text(String),
    Table(Table),
    Figure(Figure),
    /// A long text under a title, folded away.
    Details(String, String),
}

/// A table; measured, or as a paper printed it, never both.
#[derive(Default)]
pub(super) struct Table {
    pub title: String,
    /// Where it is published; none if it is measured.
    pub source: Option<String>,
    /// Over the rows' labels.
    pub corner: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    pub notes: Vec<String>,
}

#[derive(Clone, Default)]
pub(super) struct Column {
    pub title: String,
    /// A second line: samples and remarks.
    pub sub: String,
}

#[derive(Default)]
pub(super) struct Row {
    /// A heading above this row.
    pub group: String,
    pub label: String,
    pub cells: Vec<Cell>,
}

/// A value with its 95 % interval and a note.
#[derive(Clone, Default)]
pub(super) struct Cell {
    pub value: String,
    pub interval: String,
    pub note: String,
    /// The value is a link; only our own.
    pub link: &'static str,
}

/// Pictures side by side, each with a title of its own.
pub(super) struct Figure {
    pub title: String,
    pub note: String,
    /// SVG.
    pub panels: Vec<String>,
}

impl Column {
    pub(super) fn new(title: impl Into<String>) -> Column {
        Column { title: title.into(), sub: String::new() }
    }
}

impl Cell {
    pub(super) fn text(value: impl Into<String>) -> Cell {
        Cell { value: value.into(), ..Cell::default() }
    }

    /// A cell with the statistic, or a dash.
    pub(super) fn stat(unit: Unit, stat: Option<Stat>) -> Cell {
        let Some(stat) = stat else { return Cell::text("–") };
        // A value that cannot vary has no interval to show.
        let interval = if stat.low == stat.high { String::new() } else { unit.interval(stat) };
        Cell { value: unit.figure(stat.value), interval, ..Cell::default() }
    }
}

/// How a number is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Unit {
    Count,
    Score,
    Percent,
    Times,
    Nats,
    Seconds,
    Bytes,
}

impl Unit {
    /// The factor of a shown number, and its suffix.
    pub(super) fn suffix(self) -> (f64, &'static str) {
        match self {
            Unit::Percent => (100.0, " %"),
            Unit::Times => (1.0, "×"),
            _ => (1.0, ""),
        }
    }

    pub(super) fn figure(self, value: f64) -> String {
        let of = |sizes: [(f64, &str); 3], digits: usize| {
            let (size, name) = sizes.into_iter().find(|(size, _)| value.abs() >= *size).unwrap_or(sizes[2]);
            format!("{:.digits$} {name}", value / size)
        };
        let text = match self {
            Unit::Count => format!("{value:.0}"),
            Unit::Score => format!("{value:.2}"),
            Unit::Percent => format!("{:.1} %", value * 100.0),
            Unit::Times => format!("{value:.2}×"),
            Unit::Nats if value != 0.0 && value.abs() < 0.001 => format!("{value:.1e}"),
            Unit::Nats => format!("{value:.3}"),
            Unit::Seconds => of([(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")], 1 + usize::from(value >= 1.0)),
            Unit::Bytes => of([(1073741824.0, "GiB"), (1048576.0, "MiB"), (1024.0, "KiB")], 1),
        };
        text.replace('-', "−")
    }

    /// `LOW–HIGH`, the unit once.
    pub(super) fn interval(self, stat: Stat) -> String {
        let (low, high) = (self.figure(stat.low), self.figure(stat.high));
        let same =
            [" %", "×", " s", " ms", " µs", " GiB", " MiB", " KiB"].iter().find(|unit| high.ends_with(*unit));
        let low = same.and_then(|unit| low.strip_suffix(unit)).unwrap_or(&low);
        // A dash after a minus reads badly.
        let dash = if high.starts_with('−') { " to " } else { "–" };
        format!("{low}{dash}{high}")
    }
}

/// Each value once, where it came first.
pub(super) fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut kept, value| {
        if !kept.contains(&value) {
            kept.push(value);
        }
        kept
    })
}

/// `1 sample`, `2 samples`.
pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
