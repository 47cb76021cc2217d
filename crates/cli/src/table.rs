//! Small aligned tables.

/// A table: the first column and those of words to the left, numbers to the right.
#[derive(Debug)]
pub(crate) struct Table {
    header: Vec<&'static str>,
    left: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Columns by their headings; one that begins with `<` is of words.
    pub(crate) fn new(header: &[&'static str]) -> Table {
        Table {
            header: header.iter().map(|name| name.trim_start_matches('<')).collect(),
            left: header.iter().map(|name| name.starts_with('<')).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, row: Vec<String>) {
        debug_assert_eq!(row.len(), self.header.len(), "a cell a column");
        self.rows.push(row);
    }

    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.header[column].chars().count()]).max().unwrap_or(0)
        };
        (0..self.header.len()).map(width).collect()
    }

    fn line<S: AsRef<str>>(&self, cells: &[S], widths: &[usize], between: &str) -> String {
        let pad = |(column, cell): (usize, &S)| {
            let space = " ".repeat(widths[column].saturating_sub(cell.as_ref().chars().count()));
            if self.left[column] {
                format!("{}{space}", cell.as_ref())
            } else {
                format!("{space}{}", cell.as_ref())
            }
        };
        cells.iter().enumerate().map(pad).collect::<Vec<_>>().join(between)
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let widths = self.widths();
        let mut out = format!("{}\n", self.line(&self.header, &widths, "  ").trim_end());
        for row in &self.rows {
            out.push_str(self.line(row, &widths, "  ").trim_end());
            out.push('\n');
        }
        out
    }

    /// For documents.
    pub(crate) fn markdown(&self) -> String {
        let widths: Vec<usize> = self.widths().iter().map(|width| (*width).max(3)).collect();
        let rule = |(left, width): (&bool, &usize)| {
            if *left { "-".repeat(*width) } else { format!("{}:", "-".repeat(width - 1)) }
        };
        let rule: Vec<String> = self.left.iter().zip(&widths).map(rule).collect();
        let mut out = format!("| {} |\n", self.line(&self.header, &widths, " | "));
        out.push_str(&format!("| {} |\n", rule.join(" | ")));
        for row in &self.rows {
            out.push_str(&format!("| {} |\n", self.line(row, &widths, " | ")));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_are_aligned() {
        let mut table = super::Table::new(&["<method", "ms"]);
        table.push(vec!["a3".into(), "7".into()]);
        table.push(vec!["vanilla".into(), "1234".into()]);
        assert_eq!(table.text(), "method     ms\na3          7\nvanilla  1234\n");
        assert_eq!(
            table.markdown(),
            "| method  |   ms |\n| ------- | ---: |\n| a3      |    7 |\n| vanilla | 1234 |\n"
        );
    }
}
