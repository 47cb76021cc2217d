//! Tables: neighbouring lines whose parts stand below each other.

use super::line::Line;
use crate::error::ReadError;

/// Gap between a table's lines, in parts of their size.
const MAX_PITCH: f64 = 4.0;

/// Gap from which a line without a first cell is a row of its own.
const ROW_PITCH: f64 = 2.0;

/// Gap that words of a justified line do not have; below it two lines are no table yet.
const WIDE_GAP: f64 = 1.2;

/// Columns of a table.
const MAX_COLUMNS: usize = 64;

/// Rows of cells.
pub(super) type Rows = Vec<Vec<String>>;

struct Column {
    x0: f64,
    x1: f64,
}

/// The table that begins with the first of these lines: its rows, and how many lines it takes. `cells` are those of the document's tables before.
///
/// # Errors
/// If there are more cells than a document may have: each row has one in every column.
pub(super) fn table(lines: &[Line], cells: &mut usize) -> Result<Option<(Rows, usize)>, ReadError> {
    let mut columns: Vec<Column> = Vec::new();
    let mut used = 0;
    for (index, line) in lines.iter().enumerate() {
        let near = index == 0 || {
            let pitch = line.y - lines[index - 1].y;
            line.column == lines[0].column && pitch > 0.0 && pitch < MAX_PITCH * line.size
        };
        // A line with one part goes on with a cell that is not the first, or it is no part of the table.
        let single = line.cells.len() == 1;
        let fits = near && (!single || (index > 0 && continues(line, &lines[index - 1], &columns)));
        if !fits || !widen(&mut columns, line) {
            break;
        }
        if !single {
            used = index + 1;
        }
    }
    // Cells of the last row may go on below it.
    while lines
        .get(used)
        .is_some_and(|line| used > 0 && line.cells.len() == 1 && continues(line, &lines[used - 1], &columns))
    {
        used += 1;
    }
    let lines = &lines[..used];
    let gaps =
        lines.iter().flat_map(|line| line.cells.windows(2).map(|pair| (pair[1].x0 - pair[0].x1) / line.size));
    let narrow = gaps.reduce(f64::min).is_some_and(|gap| gap < WIDE_GAP);
    let full = lines.iter().filter(|line| line.cells.len() >= 2).count();
    if columns.len() < 2 || full < if narrow { 3 } else { 2 } {
        return Ok(None);
    }
    *cells += used * columns.len();
    ReadError::check_cells(*cells)?;
    Ok(Some((rows(lines, &columns), used)))
}

fn continues(line: &Line, before: &Line, columns: &[Column]) -> bool {
    let cell = &line.cells[0];
    let at = columns.iter().position(|column| cell.x0 < column.x1 && cell.x1 > column.x0);
    line.column == before.column && line.y - before.y < ROW_PITCH * line.size && at.is_some_and(|at| at > 0)
}

/// Takes a line's cells into the columns; false where one would lie in two, or there are too many.
fn widen(columns: &mut Vec<Column>, line: &Line) -> bool {
    let mut places = Vec::new();
    for cell in &line.cells {
        let mut over =
            columns.iter().enumerate().filter(|(_, column)| cell.x0 < column.x1 && cell.x1 > column.x0);
        match (over.next(), over.next()) {
            (_, Some(_)) => return false,
            (Some((place, _)), None) if places.contains(&Some(place)) => return false,
            (found, None) => places.push(found.map(|(place, _)| place)),
        }
    }
    if columns.len() + places.iter().filter(|place| place.is_none()).count() > MAX_COLUMNS {
        return false;
    }
    for (cell, place) in line.cells.iter().zip(places) {
        match place {
            Some(place) => {
                columns[place].x0 = columns[place].x0.min(cell.x0);
                columns[place].x1 = columns[place].x1.max(cell.x1);
            }
            None => columns.push(Column { x0: cell.x0, x1: cell.x1 }),
        }
    }
    columns.sort_by(|a, b| a.x0.total_cmp(&b.x0));
    true
}

fn rows(lines: &[Line], columns: &[Column]) -> Rows {
    let mut rows = Rows::new();
    for (index, line) in lines.iter().enumerate() {
        let mut row = vec![String::new(); columns.len()];
        for cell in &line.cells {
            let place = columns
                .iter()
                .position(|column| cell.x0 < column.x1 && cell.x1 > column.x0)
                .unwrap_or_default();
            row[place].clone_from(&cell.text);
        }
        let goes_on = row[0].is_empty() && index > 0 && line.y - lines[index - 1].y < ROW_PITCH * line.size;
        match rows.last_mut().filter(|_| goes_on) {
            Some(last) => {
                for (cell, more) in last.iter_mut().zip(&row).filter(|(_, more)| !more.is_empty()) {
                    cell.push(' ');
                    cell.push_str(more);
                }
            }
            None => rows.push(row),
        }
    }
    merge(&mut rows);
    rows
}

/// Joins neighbouring columns of which no row has both: a heading above numbers that end at one place.
fn merge(rows: &mut [Vec<String>]) {
    let mut at = 0;
    while at + 1 < rows.first().map_or(0, Vec::len) {
        if rows.iter().all(|row| row[at].is_empty() || row[at + 1].is_empty()) {
            for row in rows.iter_mut() {
                let next = row.remove(at + 1);
                row[at].push_str(&next);
            }
        } else {
            at += 1;
        }
    }
}
