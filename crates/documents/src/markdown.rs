//! Structured text as it is written: Markdown's headings, lists, tables and paragraphs.

use crate::error::ReadError;
use crate::limits::{MAX_LIST_DEPTH, MAX_TEXT_BYTES};

pub(crate) use table::Table;

mod table;

/// Writes a text block by block.
#[derive(Default)]
pub(crate) struct Writer {
    text: String,
    /// Items of one list stand on neighbouring lines.
    in_list: bool,
    first_heading: Option<String>,
}

impl Writer {
    /// A heading of level 1 to 6.
    pub(crate) fn heading(&mut self, level: usize, text: &str) {
        let text = collapse(text);
        if !text.is_empty() {
            self.first_heading.get_or_insert_with(|| text.clone());
            self.block(&format!("{} {text}", "#".repeat(level.clamp(1, 6))));
        }
    }

    /// A paragraph, with its line breaks.
    pub(crate) fn paragraph(&mut self, text: &str) {
        let text = lines(text);
        if text.is_empty() {
            return;
        }
        // A paragraph that begins like a heading or a fence is none.
        let marked = text.starts_with('#') || text.starts_with("```") || text.starts_with("~~~");
        self.block(&if marked { format!("\\{text}") } else { text });
    }

    /// An item of a list, `depth` lists inside others; `number` in an ordered list.
    pub(crate) fn item(&mut self, depth: usize, number: Option<u32>, text: &str) {
        let label = number.map(|number| format!("{number}."));
        self.labelled_item(depth, label.as_deref(), text);
    }

    /// An item of a list with its label, which is its marker where it is one of Markdown's.
    pub(crate) fn labelled_item(&mut self, depth: usize, label: Option<&str>, text: &str) {
        let text = collapse(text);
        if text.is_empty() {
            return;
        }
        let indent = "  ".repeat(depth.min(MAX_LIST_DEPTH));
        let marker = match label.map(collapse).unwrap_or_default() {
            label if label.is_empty() => "-".to_owned(),
            label if is_number(&label) => label,
            label => format!("- {label}"),
        };
        let line = format!("{indent}{marker} {text}");
        if self.in_list {
            self.text.push('\n');
            self.text.push_str(&line);
        } else {
            self.block(&line);
            self.in_list = true;
        }
    }

    /// A table of rows of cells; the first row is its header.
    pub(crate) fn table(&mut self, rows: &[Vec<String>]) {
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.iter().map(|cell| collapse(cell)).collect::<Vec<_>>())
            .filter(|row: &Vec<String>| row.iter().any(|cell| !cell.is_empty()))
            .collect();
        let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
        if columns < 2 || rows.len() < 2 {
            // A table of one column or row only places its text.
            rows.iter().flatten().for_each(|cell| self.paragraph(cell));
            return;
        }
        let mut table = String::new();
        for (index, row) in rows.iter().enumerate() {
            table.push('|');
            // Rows below the header end with their own last cell: one long row must not lengthen a million others.
            for cell in row {
                table.push_str(&format!(" {} |", cell.replace('|', "\\|")));
            }
            if index == 0 {
                table.push_str(&"  |".repeat(columns - row.len()));
                table.push_str("\n|");
                table.push_str(&" --- |".repeat(columns));
            }
            table.push('\n');
        }
        self.block(table.trim_end());
    }

    /// Text whose lines and spaces stay as they are.
    pub(crate) fn code(&mut self, text: &str) {
        let text = text.trim_matches('\n').trim_end();
        if !text.trim().is_empty() {
            let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or_default();
            let fence = "`".repeat(longest.max(2) + 1);
            self.block(&format!("{fence}\n{text}\n{fence}"));
        }
    }

    fn block(&mut self, block: &str) {
        if !self.text.is_empty() {
            self.text.push_str("\n\n");
        }
        self.text.push_str(block);
        self.in_list = false;
    }

    /// A heading was written, or any text.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// The text is longer than a file's may be.
    pub(crate) fn check(&self) -> Result<(), ReadError> {
        self.check_with(0)
    }

    /// The text would be longer than a file's may be with so many bytes of an element that is still open.
    pub(crate) fn check_with(&self, open: usize) -> Result<(), ReadError> {
        if self.text.len() + open > MAX_TEXT_BYTES {
            return Err(ReadError::too_large("text", MAX_TEXT_BYTES));
        }
        Ok(())
    }

    /// The text, and its first heading.
    pub(crate) fn finish(self) -> Result<(String, Option<String>), ReadError> {
        self.check()?;
        Ok((self.text, self.first_heading))
    }
}

/// The text on one line, its words parted by single spaces.
pub(crate) fn collapse(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.extend(word.chars().filter(|&c| is_text(c)));
    }
    line
}

/// Whether a label is a number as Markdown's lists have it: `1.` or `1)`.
fn is_number(label: &str) -> bool {
    label.strip_suffix(['.', ')']).is_some_and(|number| {
        (1..=9).contains(&number.len()) && number.bytes().all(|digit| digit.is_ascii_digit())
    })
}

/// Whether a raised text is the exponent or the note of the number, the word or the parenthesis before it, which it would
/// lengthen otherwise: `10` and `6`, `m` and `2`. A sign alone tells no charge, such as that of Na⁺, from an exponent.
pub(crate) fn is_exponent(base: &str, raised: &str) -> bool {
    let is_sign = |c: char| matches!(c, '+' | '-' | '−' | '–');
    let is_number = raised.trim_start_matches(is_sign).starts_with(|c: char| c.is_ascii_digit());
    if base.ends_with(|c: char| c.is_ascii_digit()) {
        return is_number || raised.starts_with(is_sign);
    }
    is_number && base.ends_with(|c: char| c.is_alphabetic() || c == ')')
}

/// The text's lines that are not empty, each collapsed.
fn lines(text: &str) -> String {
    let mut joined = String::with_capacity(text.len());
    for line in text.lines().map(collapse).filter(|line| !line.is_empty()) {
        if !joined.is_empty() {
            joined.push('\n');
        }
        joined.push_str(&line);
    }
    joined
}

/// Neither a control character nor one that only says where a word may be hyphenated.
fn is_text(c: char) -> bool {
    !(c.is_control() || matches!(c, '\u{AD}' | '\u{200B}' | '\u{FEFF}' | '\u{FFFE}' | '\u{FFFF}'))
}
