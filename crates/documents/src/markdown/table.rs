//! A table, as its rows and cells come, and the places of its cells.

use crate::error::ReadError;
use crate::limits::MAX_TEXT_BYTES;

/// Columns that a cell may take. <https://html.spec.whatwg.org/multipage/tables.html#dom-tdth-colspan>
const MAX_COLUMNS: u16 = 1000;

/// The rows read so far.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
    /// Rows read so far, and their cells.
    cells: usize,
    /// Bytes of the text in those cells.
    bytes: usize,
    /// The most cells of a row.
    widest: usize,
    /// The next row is the first of its group.
    group_ended: bool,
}

#[derive(Default)]
struct Row {
    cells: Vec<Cell>,
    /// No cell of the rows above reaches into this one.
    begins_group: bool,
}

struct Cell {
    text: String,
    columns: u16,
    rows: u16,
    /// The cell above goes on in this one.
    continues: bool,
}

/// A cell that reaches into the rows below: the row it stands in, and the first row below it.
#[derive(Clone, Copy, Default)]
struct Reach {
    from: usize,
    to: usize,
}

impl Table {
    pub(crate) fn row(&mut self) {
        self.cells += 1;
        self.rows.push(Row { cells: Vec::new(), begins_group: std::mem::take(&mut self.group_ended) });
    }

    pub(crate) fn cell(&mut self) {
        if self.rows.is_empty() {
            self.row();
        }
        if let Some(row) = self.rows.last_mut() {
            self.cells += 1;
            row.cells.push(Cell { text: String::new(), columns: 1, rows: 1, continues: false });
            self.widest = self.widest.max(row.cells.len());
        }
    }

    /// Ends a group of rows, beyond which no cell reaches.
    pub(crate) fn end_group(&mut self) {
        self.group_ended = true;
    }

    /// Gives the last cell so many columns.
    pub(crate) fn columns(&mut self, columns: u16) {
        if let Some(cell) = self.last() {
            cell.columns = columns.clamp(1, MAX_COLUMNS);
        }
    }

    /// Gives the last cell so many rows.
    pub(crate) fn rows(&mut self, rows: u16) {
        if let Some(cell) = self.last() {
            cell.rows = rows.max(1);
        }
    }

    /// Makes the last cell a part of the one above.
    pub(crate) fn continues(&mut self) {
        if let Some(cell) = self.last() {
            cell.continues = true;
        }
    }

    /// The last cell of the last row.
    fn last(&mut self) -> Option<&mut Cell> {
        self.rows.last_mut()?.cells.last_mut()
    }

    /// The table so far has more cells or text than a file's may have.
    pub(crate) fn check(&self) -> Result<(), ReadError> {
        check(self.cells, self.bytes)
    }

    /// Bytes of the text in the cells.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// No row has begun.
    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Its cells may be read one after the other: there is one row, or a name and its value in each.
    pub(crate) fn is_layout(&self) -> bool {
        self.rows.len() < 2 || self.widest < 3
    }

    /// Adds text to the last cell; text outside of cells becomes one of its own.
    pub(crate) fn text(&mut self, text: &str) {
        if text.trim().is_empty() {
            return;
        }
        if self.rows.last().is_none_or(|row| row.cells.is_empty()) {
            self.cell();
        }
        if let Some(cell) = self.last() {
            if !cell.text.is_empty() {
                cell.text.push(' ');
            }
            cell.text.push_str(text);
            self.bytes += 1 + text.len();
        }
    }

    /// The texts of the cells, in the order in which they came.
    pub(crate) fn into_texts(self) -> impl Iterator<Item = String> {
        self.rows.into_iter().flat_map(|row| row.cells).map(|cell| cell.text)
    }

    /// The rows, each text in its column. A cell of several rows stands in each of them, since a row is read by itself; one of
    /// several columns stands in the first.
    ///
    /// # Errors
    /// If these are more cells, or more text, than a table may have.
    pub(crate) fn into_rows(self) -> Result<Vec<Vec<String>>, ReadError> {
        let mut grid = Grid::default();
        for row in self.rows {
            grid.row(row)?;
        }
        Ok(grid.rows)
    }
}

fn check(cells: usize, bytes: usize) -> Result<(), ReadError> {
    ReadError::check_cells(cells)?;
    if bytes > MAX_TEXT_BYTES {
        return Err(ReadError::too_large("text", MAX_TEXT_BYTES));
    }
    Ok(())
}

/// The cells of a table in their columns.
#[derive(Default)]
struct Grid {
    rows: Vec<Vec<String>>,
    /// The lowest cell with several rows in each column. The last one reaches below the last row.
    reaches: Vec<Reach>,
    cells: usize,
    bytes: usize,
}

impl Grid {
    fn row(&mut self, row: Row) -> Result<(), ReadError> {
        let number = self.rows.len();
        if row.begins_group {
            self.reaches.clear();
        }
        let has_cells = !row.cells.is_empty();
        self.rows.push(Vec::new());
        // The column after the last cell.
        let mut column = 0;
        for cell in row.cells {
            while self.reaches.get(column).is_some_and(|reach| reach.to > number) {
                self.put_reaching(column)?;
                column += 1;
            }
            let above = || self.rows.get(number.checked_sub(1)?)?.get(column).cloned();
            let text = if cell.continues { above().unwrap_or_default() } else { cell.text };
            let end = column + usize::from(cell.columns);
            if cell.rows > 1 {
                // The columns that reach down are counted, since each is written.
                self.cells += end - column;
            }
            self.put(column, text)?;
            if cell.rows > 1 {
                let length = self.reaches.len().max(end);
                self.reaches.resize(length, Reach::default());
                self.reaches[column..end].fill(Reach { from: number, to: number + usize::from(cell.rows) });
            }
            column = end;
        }
        // A row without cells of its own says nothing new.
        if has_cells {
            self.end_row(column)?;
        }
        while self.reaches.last().is_some_and(|reach| reach.to <= number + 1) {
            self.reaches.pop();
        }
        Ok(())
    }

    /// Puts in the cells that reach into the last row behind its own.
    fn end_row(&mut self, column: usize) -> Result<(), ReadError> {
        let number = self.rows.len() - 1;
        let own = self.rows[number].len();
        for column in column..self.reaches.len() {
            if self.reaches[column].to > number {
                self.put_reaching(column)?;
            }
        }
        // Empty columns at the end were put in to be counted.
        let row = &mut self.rows[number];
        while row.len() > own && row.last().is_some_and(String::is_empty) {
            row.pop();
        }
        Ok(())
    }

    /// Puts in the cell that reaches into a column from above.
    fn put_reaching(&mut self, column: usize) -> Result<(), ReadError> {
        let text = self.rows[self.reaches[column].from].get(column).cloned();
        self.put(column, text.unwrap_or_default())
    }

    /// Puts a text in a column of the last row, whose columns before it stay empty where they are.
    fn put(&mut self, column: usize, text: String) -> Result<(), ReadError> {
        let Some(row) = self.rows.last_mut() else { return Ok(()) };
        self.cells += column + 1 - row.len();
        self.bytes += text.len();
        check(self.cells, self.bytes)?;
        row.resize(column, String::new());
        row.push(text);
        Ok(())
    }
}
