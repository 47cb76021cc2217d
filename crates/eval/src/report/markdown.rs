//! A report as Markdown (GitHub's tables). Figures are named only.

use super::table::{Block, Cell, Section, Table};

pub(super) fn render(title: &str, sections: &[Section]) -> String {
    let mut out = format!("# {}\n", escape(title));
    for section in sections {
        out += &format!("\n## {}\n", escape(&section.title));
        for block in &section.blocks {
            out += &match block {
                Block::Text(text) => format!("\n{}\n", escape(text)),
                Block::Table(table) => self::table(table),
                Block::Figure(figure) => format!(
                    "\n*Figure, in the HTML report: {}.* {}\n",
                    escape(&figure.title),
                    escape(&figure.note)
                ),
                Block::Details(title, text) => format!("\n{}:\n\n{}\n", escape(title), indented(text)),
            };
        }
    }
    out
}

fn table(table: &Table) -> String {
    let published = if table.source.is_some() { "Published: " } else { "" };
    let mut out = format!("\n### {published}{}\n\n", escape(&table.title));
    if let Some(source) = &table.source {
        out += &format!("As printed in {}; not measured here.\n\n", escape(source));
    }
    let titles = table.columns.iter().map(|column| match column.sub.as_str() {
        "" => escape(&column.title),
        sub => format!("{}<br>{}", escape(&column.title), escape(sub)),
    });
    let titles: Vec<String> = std::iter::once(escape(&table.corner)).chain(titles).collect();
    out += &format!("| {} |\n|{}\n", titles.join(" | "), " --- |".repeat(titles.len()));
    for row in &table.rows {
        if !row.group.is_empty() {
            out += &format!("| *{}* |{}\n", escape(&row.group), "  |".repeat(table.columns.len()));
        }
        let cells: Vec<String> = row.cells.iter().map(cell).collect();
        out += &format!("| {} | {} |\n", escape(&row.label), cells.join(" | "));
    }
    for note in &table.notes {
        out += &format!("\n- {}", escape(note));
    }
    if table.notes.is_empty() { out } else { out + "\n" }
}

fn cell(cell: &Cell) -> String {
    let value = escape(&cell.value);
    let value = if cell.link.is_empty() { value } else { format!("[{value}]({})", cell.link) };
    let more = [&cell.interval, &cell.note].into_iter().filter(|text| !text.is_empty());
    std::iter::once(value).chain(more.map(|text| format!("({})", escape(text)))).collect::<Vec<_>>().join(" ")
}

/// A block of code by indentation, since the text could close a fence.
fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

/// One line in which nothing is markup.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '&' => out += "&amp;",
            '|' | '*' | '_' | '`' | '[' | ']' | '\\' | '#' => out.extend(['\\', c]),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
