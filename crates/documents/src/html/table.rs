//! A table, as its rows and cells come.

use crate::error::ReadError;

/// The rows read so far.
#[derive(Default)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    /// Those rows and their cells.
    cells: usize,
}

impl Table {
    pub(super) fn row(&mut self) {
        self.cells += 1;
        self.rows.push(Vec::new());
    }

    pub(super) fn cell(&mut self) {
        if self.rows.is_empty() {
            self.row();
        }
        if let Some(row) = self.rows.last_mut() {
            self.cells += 1;
            row.push(String::new());
        }
    }

    pub(super) fn check(&self) -> Result<(), ReadError> {
        ReadError::check_cells(self.cells)
    }

    /// No row has begun.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Adds text to the last cell; text outside of cells becomes one of its own.
    pub(super) fn text(&mut self, text: &str) {
        if self.rows.last().is_none_or(Vec::is_empty) {
            self.cell();
        }
        if let Some(cell) = self.rows.last_mut().and_then(|row| row.last_mut()) {
            if !cell.is_empty() {
                cell.push(' ');
            }
            cell.push_str(text);
        }
    }

    pub(super) fn into_rows(self) -> Vec<Vec<String>> {
        self.rows
    }
}
