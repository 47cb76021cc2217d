//! Texts of a page with their places, and the lines that they make.

/// Space between two glyphs from which they belong to different words, in parts of their size.
const WORD_GAP: f64 = 0.17;

/// Space that parts words on a tightly set line, and letters on one that is set with space between them.
const NARROW_GAP: f64 = 0.12;

/// Stands for that space until the line is known.
pub(super) const NARROW_SPACE: char = '\u{200A}';

/// Space from which texts on one line may be parts of a table, or of columns.
const CELL_GAP: f64 = 0.45;

/// That space before a text that is placed anew.
const PLACED_GAP: f64 = 0.3;

/// A hyphen where a word may be parted; at a line's end it is drawn.
pub(super) const SOFT_HYPHEN: &str = "\u{AD}";

/// Text drawn on one baseline without wide gaps. Coordinates are points, y growing downwards, turned so that the text runs to the right.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) text: String,
    pub(super) x0: f64,
    pub(super) x1: f64,
    /// The baseline.
    pub(super) y: f64,
    pub(super) size: f64,
    pub(super) style: Style,
    /// The program placed it anew, instead of going on behind the text before.
    pub(super) placed: bool,
    /// Quarter turns by which the text is turned on its page.
    pub(super) turns: u8,
}

/// How glyphs look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Style {
    pub(super) bold: bool,
    /// All are of one width, as in programs.
    pub(super) mono: bool,
}

impl Style {
    /// The style that a font's name tells; TeX has names of its own.
    pub(super) fn of(name: &str) -> Self {
        let name = name.to_ascii_lowercase();
        let name = name.split('+').next_back().unwrap_or_default();
        let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
        let starts = |words: &[&str]| words.iter().any(|word| name.starts_with(word));
        Style {
            bold: has(&["bold", "black", "heavy", "demi"]) || starts(&["cmbx", "sfbx"]),
            mono: has(&["mono", "courier", "consol", "typewriter", "code", "menlo"])
                || starts(&["cmtt", "sftt", "cmsltt"]),
        }
    }
}

impl Span {
    /// Whether a glyph drawn next belongs to this text.
    pub(super) fn continues(&self, next: &Span) -> bool {
        let gap = next.x0 - self.x1;
        self.turns == next.turns
            && self.style == next.style
            && (self.y - next.y).abs() < 0.1 * self.size
            && (self.size - next.size).abs() < 0.05 * self.size
            && gap > -0.4 * self.size
            && gap < cell_gap(&self.text, next) * self.size
    }

    pub(super) fn push(&mut self, next: &Span) {
        let gap = if next.text.is_empty() { 0.0 } else { (next.x0 - self.x1) / self.size };
        append(&mut self.text, &next.text, gap);
        // A place for a hyphen that is not drawn has a width in some fonts.
        if next.text != SOFT_HYPHEN {
            self.x1 = self.x1.max(next.x1);
        }
    }
}

/// The gap from which a text belongs to another cell than the one before it. Where each cell is placed anew, narrow ones are
/// told from the space between words by the lack of a space.
pub(super) fn cell_gap(before: &str, next: &Span) -> f64 {
    let spaced = before.ends_with(char::is_whitespace) || next.text.starts_with(char::is_whitespace);
    if next.placed && !spaced { PLACED_GAP } else { CELL_GAP }
}

/// Adds a text behind a gap, in parts of its size.
pub(super) fn append(text: &mut String, next: &str, gap: f64) {
    if gap > NARROW_GAP && !text.ends_with(char::is_whitespace) && !next.starts_with(char::is_whitespace) {
        text.push(if gap > WORD_GAP { ' ' } else { NARROW_SPACE });
    }
    text.push_str(next);
}

/// A part of a line, wide gaps around it.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) x0: f64,
    pub(super) x1: f64,
}

/// A line of a column.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) cells: Vec<Cell>,
    pub(super) y: f64,
    /// The size of most of its characters.
    pub(super) size: f64,
    /// The style that all of it has.
    pub(super) style: Style,
    /// The column it stands in: a number on its page, and its edges.
    pub(super) column: usize,
    pub(super) left: f64,
    pub(super) right: f64,
}

impl Line {
    pub(super) fn text(&self) -> String {
        let texts: Vec<&str> = self.cells.iter().map(|cell| cell.text.as_str()).collect();
        texts.join(" ")
    }

    pub(super) fn x0(&self) -> f64 {
        self.cells.first().map_or(self.left, |cell| cell.x0)
    }

    pub(super) fn x1(&self) -> f64 {
        self.cells.last().map_or(self.right, |cell| cell.x1)
    }
}

/// Texts by baseline from top to bottom, those of one baseline from left to right. Raised and lowered characters belong to the baseline beside them.
pub(super) fn rows(mut spans: Vec<Span>) -> Vec<Vec<Span>> {
    spans.sort_by(|a, b| a.y.total_cmp(&b.y));
    let mut rows: Vec<Vec<Span>> = Vec::new();
    // The largest text of the row says where its baseline lies.
    let (mut y, mut size) = (f64::NEG_INFINITY, 0.0_f64);
    for span in spans {
        if rows.is_empty() || (span.y - y).abs() > 0.5 * size.min(span.size) {
            (y, size) = (span.y, span.size);
            rows.push(vec![span]);
        } else if let Some(row) = rows.last_mut() {
            if span.size > 1.2 * size {
                (y, size) = (span.y, span.size);
            }
            row.push(span);
        }
    }
    rows.iter_mut().for_each(|row| row.sort_by(|a, b| a.x0.total_cmp(&b.x0)));
    rows
}
