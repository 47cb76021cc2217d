//! Lines of a page, from the places of its texts.

use super::bidi::{is_ltr, is_rtl, reordered};
use super::columns;
use super::line::{Cell, Line, NARROW_SPACE, SOFT_HYPHEN, Span, Style, append, cell_gap, rows};
use super::strings::marker;
use crate::markdown::collapse;

/// Headings on one line.
const MAX_LEADERS: usize = 8;

/// Dots that lead from a heading to its page.
const LEADERS: &str = ".....";
const WIDE_LEADERS: &str = ". . . . ";

/// The lines of a page in the order of reading: column by column, text that runs the same way together.
pub(super) fn lines(spans: Vec<Span>) -> Vec<Line> {
    let mut ways: [Vec<Span>; 4] = Default::default();
    for span in spans.into_iter().filter(|span| !span.text.trim().is_empty()) {
        ways[usize::from(span.turns % 4)].push(span);
    }
    // The way most of the text runs comes first: a note in the margin after it.
    ways.sort_by_key(|spans| std::cmp::Reverse(spans.iter().map(|span| span.text.len()).sum::<usize>()));
    let mut lines = Vec::new();
    let columns = ways.into_iter().flat_map(|spans| {
        let rtl = is_from_right(&spans);
        let spans = if rtl { spans.into_iter().map(turned).collect() } else { spans };
        columns::split(spans).into_iter().map(move |column| (rtl, column))
    });
    for (column, (rtl, spans)) in columns.enumerate() {
        let left = spans.iter().map(|span| span.x0).fold(f64::INFINITY, f64::min);
        let right = spans.iter().map(|span| span.x1).fold(f64::NEG_INFINITY, f64::max);
        for row in rows(spans) {
            lines.extend(line(row, rtl, column, left, right));
        }
    }
    lines
}

/// Whether most letters are of scripts that run from right to left.
fn is_from_right(spans: &[Span]) -> bool {
    let count = |is_kind: fn(char) -> bool| {
        spans.iter().flat_map(|span| span.text.chars()).filter(|c| is_kind(*c)).count()
    };
    count(is_rtl) > count(is_ltr)
}

/// A text whose place is told from the right, so that columns, lines and cells follow each other as they are read.
fn turned(span: Span) -> Span {
    Span { x0: -span.x1, x1: -span.x0, ..span }
}

/// The text with an ellipsis for the dots between a heading and its page.
fn shorten_leaders(text: &str) -> String {
    let mut shortened = String::with_capacity(text.len());
    let mut rest = text;
    for _ in 0..MAX_LEADERS {
        let Some(at) = rest.find(LEADERS).or_else(|| rest.find(WIDE_LEADERS)) else { break };
        shortened.push_str(rest[..at].trim_end());
        shortened.push_str(" … ");
        rest = rest[at..].trim_start_matches(['.', ' ']);
    }
    shortened.push_str(rest);
    shortened
}

/// Whether narrow spaces stand between the letters of a line rather than between its words, which have more letters than that.
fn is_letterspaced(cells: &[Cell]) -> bool {
    let count = |is_kind: fn(char) -> bool| {
        cells.iter().flat_map(|cell| cell.text.chars()).filter(|c| is_kind(*c)).count()
    };
    3 * count(|c| c == NARROW_SPACE) > count(|c| !c.is_whitespace())
}

fn line(row: Vec<Span>, rtl: bool, column: usize, left: f64, right: f64) -> Option<Line> {
    let style =
        Style { bold: row.iter().all(|span| span.style.bold), mono: row.iter().all(|span| span.style.mono) };
    let main = row.iter().max_by_key(|span| span.text.chars().count())?;
    let (y, size) = (main.y, main.size);
    // The texts of a cell are joined from left to right.
    let row: Vec<Span> = if rtl { row.into_iter().rev().map(turned).collect() } else { row };
    let mut cells: Vec<Cell> = Vec::new();
    let mut last: Option<(Span, f64)> = None;
    for span in row {
        let gap = last.as_ref().map(|(before, _)| span.x0 - before.x1);
        // Some programs draw a text twice, a hair apart, to make it bold.
        let again = last.as_ref().is_some_and(|(before, _)| {
            before.text.trim() == span.text.trim() && (before.x0 - span.x0).abs() < 0.3 * span.size
        });
        if again {
            continue;
        }
        match (cells.last_mut(), gap) {
            (Some(cell), Some(gap)) if gap < cell_gap(&cell.text, &span) * size => {
                append(&mut cell.text, &span.text, gap / span.size.min(size));
                cell.x1 = cell.x1.max(span.x1);
            }
            _ => cells.push(Cell { text: span.text.clone(), x0: span.x0, x1: span.x1 }),
        }
        last = Some((span, size));
    }
    let is_spaced = is_letterspaced(&cells);
    for cell in &mut cells {
        if is_spaced {
            cell.text.retain(|c| c != NARROW_SPACE);
        }
        // Programs are indented by spaces, which are drawn in some files.
        let lead = cell.text.chars().take_while(|c| c.is_whitespace()).count();
        cell.x0 += lead as f64 * (cell.x1 - cell.x0) / cell.text.chars().count().max(1) as f64;
        let hyphen = if cell.text.trim_end().ends_with(SOFT_HYPHEN) { SOFT_HYPHEN } else { "" };
        cell.text = shorten_leaders(&collapse(&reordered(&cell.text, rtl))) + hyphen;
    }
    cells.retain(|cell| !cell.text.is_empty());
    if rtl {
        cells.reverse();
        cells.iter_mut().for_each(|cell| (cell.x0, cell.x1) = (-cell.x1, -cell.x0));
    }
    // The mark of an item stands apart from its text.
    if cells.len() >= 2 && marker(&format!("{} x", cells[0].text)).is_some_and(|(_, rest)| rest == "x") {
        let text = cells.remove(1);
        cells[0].text = format!("{} {}", cells[0].text, text.text);
        cells[0].x1 = text.x1;
    }
    (!cells.is_empty()).then_some(Line { cells, y, size, style, column, left, right })
}
