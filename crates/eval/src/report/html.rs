//! A report as one HTML file: no script, nothing loaded.

use super::table::{Block, Cell, Column, Figure, Row, Section, Table};

pub(super) const STYLE: &str = include_str!("style.css");

pub(super) fn render(title: &str, sections: &[Section]) -> String {
    let links = sections
        .iter()
        .enumerate()
        .map(|(at, section)| format!("<li><a href=\"#s{at}\">{}</a></li>", escape(&section.title)));
    let links: String = links.collect();
    let sections: String =
        sections.iter().enumerate().map(|(at, section)| self::section(at, section)).collect();
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
        <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
        <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n\
        <body>\n<header>\n<h1>{title}</h1>\n<nav aria-label=\"Contents\"><ul>{links}</ul></nav>\n</header>\n\
        <main>\n{sections}</main>\n</body>\n</html>\n"
    )
}

fn section(at: usize, section: &Section) -> String {
    let blocks: String = section
        .blocks
        .iter()
        .map(|block| match block {
            Block::Text(text) => format!("<p>{}</p>\n", escape(text)),
            Block::Table(table) => self::table(table),
            Block::Figure(figure) => self::figure(figure),
            Block::Details(title, text) => format!(
                "<details><summary>{}</summary><pre>{}</pre></details>\n",
                escape(title),
                escape(text)
            ),
        })
        .collect();
    format!(
        "<section id=\"s{at}\" aria-labelledby=\"h{at}\">\n<h2 id=\"h{at}\">{}</h2>\n{blocks}</section>\n",
        escape(&section.title)
    )
}

fn table(table: &Table) -> String {
    let title = escape(&table.title);
    let head: String = table.columns.iter().map(column).collect();
    let rows: String = table.rows.iter().map(|row| self::row(row, table.columns.len())).collect();
    let notes: String = table.notes.iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
    let notes = if notes.is_empty() { notes } else { format!("<ul class=\"notes\">{notes}</ul>\n") };
    // A column without a title is of facts, and needs no head.
    let headless = table.columns.iter().all(|column| column.title.is_empty());
    let head = match headless {
        true => String::new(),
        false => format!("<thead><tr><th scope=\"col\">{}</th>{head}</tr></thead>\n", escape(&table.corner)),
    };
    let wide = if table.columns.len() > 10 { " class=\"wide\"" } else { "" };
    let (class, source) = match &table.source {
        Some(source) => {
            let source = escape(source);
            ("published", format!("<p class=\"source\"><b>Published</b>, not measured here: {source}</p>\n"))
        }
        None => ("measured", String::new()),
    };
    format!(
        "<div class=\"{class}\">\n<h3>{title}</h3>\n{source}<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{title}\">\n\
        <table{wide}>\n{head}<tbody>\n{rows}</tbody>\n</table>\n</div>\n{notes}</div>\n"
    )
}

/// Long names may break after `_`.
fn column(column: &Column) -> String {
    let sub =
        if column.sub.is_empty() { String::new() } else { format!("<small>{}</small>", escape(&column.sub)) };
    format!("<th scope=\"col\">{}{sub}</th>", escape(&column.title).replace('_', "_<wbr>"))
}

fn row(row: &Row, columns: usize) -> String {
    let group = match row.group.as_str() {
        "" => String::new(),
        group => format!(
            "<tr class=\"group\"><th scope=\"rowgroup\" colspan=\"{}\">{}</th></tr>\n",
            columns + 1,
            escape(group)
        ),
    };
    let cells: String = row.cells.iter().map(cell).collect();
    format!("{group}<tr><th scope=\"row\">{}</th>{cells}</tr>\n", escape(&row.label))
}

fn cell(cell: &Cell) -> String {
    let value = escape(&cell.value);
    let value =
        if cell.link.is_empty() { value } else { format!("<a href=\"{}\">{value}</a>", escape(cell.link)) };
    let more = [&cell.interval, &cell.note].into_iter().filter(|text| !text.is_empty());
    let more: String = more.map(|text| format!("<small>{}</small>", escape(text))).collect();
    let number = cell.value.starts_with(|c: char| c.is_ascii_digit() || "–-−".contains(c));
    let class = if number { " class=\"number\"" } else { "" };
    format!("<td{class}>{value}{more}</td>")
}

fn figure(figure: &Figure) -> String {
    let panels: String = figure.panels.iter().map(|panel| format!("{panel}\n")).collect();
    format!(
        "<figure>\n<h3>{}</h3>\n<div class=\"panels\">\n{panels}</div>\n<figcaption>{}</figcaption>\n</figure>\n",
        escape(&figure.title),
        escape(&figure.note)
    )
}

/// As text or an attribute's value of HTML.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            // HTML has no way to write these.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
