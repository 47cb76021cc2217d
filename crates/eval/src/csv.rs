//! Comma-separated values (RFC 4180).

/// A line of cells, quoted where they must be, with its end.
pub fn csv_line<T: AsRef<str>>(cells: impl IntoIterator<Item = T>) -> String {
    let quoted = |cell: T| match cell.as_ref() {
        text if text.contains([',', '"', '\r', '\n']) => format!("\"{}\"", text.replace('"', "\"\"")),
        text => text.to_owned(),
    };
    cells.into_iter().map(quoted).collect::<Vec<_>>().join(",") + "\n"
}
