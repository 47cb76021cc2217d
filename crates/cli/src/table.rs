//! Small aligned tables.

use std::io;
use std::os::fd::AsFd;

use terminal_size::{Width, terminal_size_of};
use textwrap::{Options, WordSplitter};
use unicode_width::UnicodeWidthStr as _;

/// Columns of words are not made narrower than this.
const NARROWEST: usize = 14;

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

    /// Cells that each column has room for, where none is broken.
    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].width());
            cells.chain([self.header[column].width()]).max().unwrap_or(0)
        };
        (0..self.header.len()).map(width).collect()
    }

    /// The width below which a column is not broken: words stay whole, so that methods, paths and addresses can be copied, and so do
    /// cells of numbers.
    fn narrowest(&self, column: usize) -> usize {
        let longest = |text: &str| text.split(' ').map(|word| word.width()).max().unwrap_or(0);
        let header = longest(self.header[column]);
        let cells = self.rows.iter().map(|row| &row[column]);
        let (cells, least) = match self.left[column] {
            true => (cells.map(|cell| longest(cell)).max(), NARROWEST),
            false => (cells.map(|cell| cell.width()).max(), 0),
        };
        header.max(cells.unwrap_or(0)).max(least)
    }

    /// Widths that fit into `columns` of a terminal: the widest columns but for the first one are broken between words to make room. Where that
    /// is not enough, no cell is broken: the terminal breaks all lines, and would show the padding of those that go on as empty ones.
    fn widths_within(&self, columns: usize) -> Vec<usize> {
        let mut widths = self.widths();
        let narrowest: Vec<usize> = (0..widths.len()).map(|column| self.narrowest(column)).collect();
        loop {
            let all: usize = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
            let broken = (1..widths.len()).filter(|column| widths[*column] > narrowest[*column]);
            let widest = broken.max_by_key(|column| widths[*column]);
            match (all.checked_sub(columns), widest) {
                (None | Some(0), _) => return widths,
                (_, None) => return self.widths(),
                (Some(_), Some(widest)) => widths[widest] -= 1,
            }
        }
    }

    fn line<S: AsRef<str>>(&self, cells: &[S], widths: &[usize], between: &str) -> String {
        let pad = |(column, cell): (usize, &S)| {
            let space = " ".repeat(widths[column].saturating_sub(cell.as_ref().width()));
            if self.left[column] {
                format!("{}{space}", cell.as_ref())
            } else {
                format!("{space}{}", cell.as_ref())
            }
        };
        cells.iter().enumerate().map(pad).collect::<Vec<_>>().join(between)
    }

    /// A row on as many lines as its longest broken cell takes.
    fn lines<S: AsRef<str>>(&self, cells: &[S], widths: &[usize]) -> String {
        let broken: Vec<Vec<_>> = cells
            .iter()
            .zip(widths)
            .map(|(cell, width)| textwrap::wrap(cell.as_ref(), whole_words(*width)))
            .collect();
        let lines = broken.iter().map(Vec::len).max().unwrap_or(0);
        let line = |index: usize| {
            let cells: Vec<&str> =
                broken.iter().map(|cell| cell.get(index).map_or("", |part| part.as_ref())).collect();
            format!("{}\n", self.line(&cells, widths, "  ").trim_end())
        };
        (0..lines).map(line).collect()
    }

    /// For people: as wide as it is, or where standard output is a terminal, as wide as that if columns of words leave room.
    pub(crate) fn text(&self) -> String {
        self.text_within(columns(&io::stdout()))
    }

    fn text_within(&self, columns: Option<usize>) -> String {
        let widths = columns.map_or_else(|| self.widths(), |columns| self.widths_within(columns));
        let rows = self.rows.iter().map(|row| self.lines(row, &widths));
        self.lines(&self.header, &widths) + &rows.collect::<String>()
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

/// Lines of so many columns that are broken at spaces alone: hyphens and long words stay whole.
pub(crate) fn whole_words(columns: usize) -> Options<'static> {
    Options::new(columns).break_words(false).word_splitter(WordSplitter::NoHyphenation)
}

/// Columns of a stream that is a terminal.
pub(crate) fn columns(stream: &impl AsFd) -> Option<usize> {
    terminal_size_of(stream).map(|(Width(columns), _)| usize::from(columns))
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_of_words_are_broken_for_a_narrow_terminal() {
        let mut table = super::Table::new(&["<name", "size", "<what it is"]);
        table.push(vec!["a".into(), "7".into(), "words that are more than fit".into()]);
        table.push(vec!["日本".into(), "12".into(), "few".into()]);
        assert_eq!(
            table.text_within(Some(30)),
            "name  size  what it is\na        7  words that are\n            more than fit\n日本    12  few\n"
        );
        assert!(
            table.text_within(Some(26)).lines().all(|line| line.len() <= 26),
            "numbers and names stay whole"
        );
        assert!(table.text_within(None).contains("words that are more than fit"));
        assert_eq!(table.text_within(Some(25)), table.text_within(None));
    }

    #[test]
    fn words_and_numbers_stay_whole_in_a_narrow_terminal() {
        let mut table = super::Table::new(&["<method", "same token", "<where it is"]);
        table.push(vec!["drift".into(), "100.0 %".into(), "in /tmp/a-new/folder-of-data".into()]);
        let narrow = "\
method     same  where it is
          token
drift   100.0 %  in
                 /tmp/a-new/folder-of-data
";
        assert_eq!(table.text_within(Some(42)), narrow);
        assert_eq!(table.text_within(Some(20)), table.text_within(None));
    }

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
