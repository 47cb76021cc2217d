//! Paragraphs, lists, tables and headings, from the lines of all pages.

use std::collections::{HashMap, HashSet};

use super::line::Line;
use super::strings::marker;
use super::{running, tables};
use crate::error::ReadError;
use crate::markdown::Writer;

/// Size from which a text is a heading, in parts of the size of most of the document.
const HEADING_SIZE: f64 = 1.12;

/// Characters that a heading has at most.
const MAX_HEADING: usize = 200;

#[derive(Debug)]
enum Block {
    Text(Text),
    Item { number: Option<u32>, text: String, x0: f64 },
    Table(tables::Rows),
    Code(String),
}

#[derive(Debug)]
struct Text {
    text: String,
    size: f64,
    bold: bool,
    lines: usize,
}

/// Writes the text of all pages.
pub(super) fn write(mut pages: Vec<Vec<Line>>) -> Result<Writer, ReadError> {
    let body = body_size(&pages);
    running::remove(&mut pages, |line| is_large(half_points(line.size), body));
    let words = Words::new(&pages);
    let (mut blocks, mut cells) = (Vec::new(), 0);
    for page in &pages {
        let mut at = 0;
        while at < page.len() {
            let end = at + page[at..].iter().take_while(|line| line.column == page[at].column).count();
            column(&page[at..end], &words, body, &mut cells, &mut blocks)?;
            at = end;
        }
    }
    let sizes = Sizes::new(&blocks, body);
    let mut out = Writer::default();
    for block in &blocks {
        match block {
            Block::Text(text) => match sizes.level(text) {
                Some(level) => out.heading(level, &text.text),
                None => out.paragraph(&text.text),
            },
            Block::Item { number, text, .. } => out.item(0, *number, text),
            Block::Table(rows) => out.table(rows),
            Block::Code(text) => out.code(text),
        }
        out.check()?;
    }
    Ok(out)
}

/// Adds the blocks of a column; its first may go on with the last of the column before. `cells` are those of the tables before.
fn column(
    lines: &[Line],
    words: &Words,
    body: i64,
    cells: &mut usize,
    blocks: &mut Vec<Block>,
) -> Result<(), ReadError> {
    let pitch = pitch(lines);
    let mut first = blocks.len();
    let mut at = 0;
    while at < lines.len() {
        if let Some((rows, used)) = tables::table(&lines[at..], cells)? {
            blocks.push(Block::Table(rows));
            at += used;
            continue;
        }
        let mono = lines[at..].iter().take_while(|line| line.style.mono).count();
        if mono >= 2 {
            blocks.push(Block::Code(code(&lines[at..at + mono], pitch)));
            at += mono;
            continue;
        }
        let line = &lines[at];
        let before = (at > 0).then(|| &lines[at - 1]);
        let text = line.text();
        let goes_on = blocks.len() > first
            && before.is_some_and(|before| same_paragraph(before, line, pitch, blocks.last()));
        let across = at == 0 && blocks.last().is_some_and(|last| crosses(last, line, &text));
        // Then the paragraph of the column before is this column's too.
        first -= usize::from(across);
        // A heading may have a number as well.
        let plain = !line.style.bold && !is_large(half_points(line.size), body);
        if let Some((number, rest)) = marker(&text).filter(|_| !across && plain) {
            blocks.push(Block::Item { number, text: rest.to_owned(), x0: line.x0() });
        } else {
            match blocks.last_mut().filter(|_| goes_on || across) {
                Some(Block::Text(last)) => {
                    words.join(&mut last.text, &text);
                    last.lines += 1;
                }
                Some(Block::Item { text: last, .. }) => words.join(last, &text),
                _ => {
                    blocks.push(Block::Text(Text { text, size: line.size, bold: line.style.bold, lines: 1 }))
                }
            }
        }
        at += 1;
    }
    Ok(())
}

/// Lines of a program, indented as they stand.
fn code(lines: &[Line], pitch: f64) -> String {
    let left = lines.iter().map(Line::x0).fold(f64::INFINITY, f64::min);
    let mut text = String::new();
    for (index, line) in lines.iter().enumerate() {
        if index > 0 && (line.y - lines[index - 1].y) / line.size > 1.5 * pitch {
            text.push('\n');
        }
        // Glyphs of one width are mostly six tenths as wide as high.
        let indent = ((line.x0() - left) / (0.6 * line.size)).round().clamp(0.0, 80.0) as usize;
        text.push_str(&" ".repeat(indent));
        text.push_str(&line.text());
        text.push('\n');
    }
    text
}

/// The distance of lines inside paragraphs: that of the closest quarter.
fn pitch(lines: &[Line]) -> f64 {
    let mut pitches: Vec<f64> =
        lines.windows(2).map(|pair| (pair[1].y - pair[0].y) / pair[1].size).filter(|p| *p > 0.8).collect();
    pitches.sort_by(f64::total_cmp);
    pitches.get(pitches.len() / 4).copied().unwrap_or(1.2).min(2.0)
}

/// Whether a line goes on with the paragraph of the line before it.
fn same_paragraph(before: &Line, line: &Line, pitch: f64, last: Option<&Block>) -> bool {
    let size = line.size;
    let gap = (line.y - before.y) / size;
    if (before.size - size).abs() > 0.08 * size
        || before.style.bold != line.style.bold
        || gap > 1.25 * pitch + 0.1
        || gap < 0.0
    {
        return false;
    }
    let indent = line.x0() - line.left;
    match last {
        // An item's lines stand right of its mark.
        Some(Block::Item { x0, .. }) => return line.x0() > x0 + 0.3 * size,
        Some(Block::Text(_)) => {}
        Some(Block::Table(_) | Block::Code(_)) | None => return false,
    }
    let rest = (before.right - before.x1()) / (before.right - before.left).max(1.0);
    let text = before.text();
    if text.contains('…') && text.ends_with(|c: char| c.is_ascii_digit()) {
        // A line of a table of contents.
        return false;
    }
    let upper = line.text().chars().next().is_some_and(|c| !c.is_lowercase());
    let ended = ends_sentence(&text);
    if indent > 0.8 * size && before.x0() - before.left < 0.5 * size {
        // The lines of a reference or a long heading hang behind their first one, which fills its line or parts a word.
        let fills = !ended && rest <= 0.25 && before.style.mono == line.style.mono;
        return fills || (!upper && text.ends_with(is_hyphen));
    }
    !(upper && ((rest > 0.25 && ended) || rest > 0.5))
}

/// Whether a line that begins a column goes on with the paragraph that ended the one before.
fn crosses(last: &Block, line: &Line, text: &str) -> bool {
    let (before, same) = match last {
        Block::Text(before) => (
            &before.text,
            (before.size - line.size).abs() < 0.08 * line.size && before.bold == line.style.bold,
        ),
        Block::Item { text, .. } => (text, true),
        Block::Table(_) | Block::Code(_) => return false,
    };
    same && !ends_sentence(before) && text.chars().next().is_some_and(char::is_lowercase)
}

fn ends_sentence(text: &str) -> bool {
    let text = text.trim_end_matches(['"', '\'', '”', '’', '»', ')', ']']);
    text.ends_with(['.', '!', '?', ':', '…', '。', '！', '？'])
}

fn is_hyphen(c: char) -> bool {
    matches!(c, '-' | '\u{2010}' | '\u{AD}')
}

/// Bytes of a word that is looked up.
const MOST_OF_WORD: usize = 256;

/// The words of a document, which say whether a hyphen at a line's end is part of a word.
struct Words(HashSet<String>);

impl Words {
    fn new(pages: &[Vec<Line>]) -> Self {
        let mut words = HashSet::new();
        for line in pages.iter().flatten() {
            let text = line.text();
            let count = text.split_whitespace().count();
            // The last word may be half of one.
            words.extend(text.split_whitespace().take(count.saturating_sub(1)).map(key));
        }
        Words(words)
    }

    /// Adds a line to the text before it, behind a space or, where a word was hyphenated, without.
    fn join(&self, before: &mut String, line: &str) {
        let hyphen = before.chars().next_back().filter(|c| is_hyphen(*c));
        let continued = line.chars().next().is_some_and(char::is_lowercase);
        let Some(hyphen) = hyphen.filter(|_| continued) else {
            let wide = |c: Option<char>| c.is_some_and(is_wide);
            if !(wide(before.chars().next_back()) && wide(line.chars().next())) {
                before.push(' ');
            }
            return before.push_str(line);
        };
        before.truncate(before.len() - hyphen.len_utf8());
        // Lines that all end in a hyphen make one word, which grows with each of them.
        let start = before.char_indices().nth_back(MOST_OF_WORD).map_or(0, |(at, _)| at);
        let first = before[start..].split_whitespace().next_back().unwrap_or_default();
        let second = line.split_whitespace().next().unwrap_or_default();
        let is_word = first.len() + second.len() <= MOST_OF_WORD;
        let known = |word: String| self.0.contains(&key(&word));
        let apart = is_word && known(format!("{first}-{second}")) && !known(format!("{first}{second}"));
        // A number or a capital before the hyphen is rarely half of a word.
        let compound = first.chars().next_back().is_some_and(|c| !c.is_lowercase()) && hyphen != '\u{AD}';
        if apart || compound {
            before.push('-');
        }
        before.push_str(line);
    }
}

/// A word as it is looked up: its letters, without case and the signs around it.
fn key(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphanumeric()).replace('\u{2010}', "-").to_lowercase()
}

/// Characters of scripts that put no spaces between words.
fn is_wide(c: char) -> bool {
    matches!(c, '\u{3000}'..='\u{30FF}' | '\u{3400}'..='\u{9FFF}' | '\u{F900}'..='\u{FAFF}' | '\u{FF00}'..='\u{FF60}')
}

/// The sizes of a document's texts: most of it has one, headings have others.
struct Sizes {
    body: i64,
    /// Larger sizes of short texts, the largest first.
    headings: Vec<i64>,
    /// Bold is rare enough to mark headings.
    bold_marks: bool,
}

impl Sizes {
    fn new(blocks: &[Block], body: i64) -> Self {
        let (mut bold, mut all) = (0, 0);
        for text in blocks.iter().filter_map(Block::as_text) {
            all += text.text.len();
            bold += if text.bold { text.text.len() } else { 0 };
        }
        let mut headings: Vec<i64> = blocks
            .iter()
            .filter_map(Block::as_text)
            .filter(|text| text.is_short())
            .map(|text| half_points(text.size))
            .filter(|size| is_large(*size, body))
            .collect();
        headings.sort_unstable();
        headings.dedup();
        headings.reverse();
        Sizes { body, headings, bold_marks: bold * 4 < all }
    }

    /// The level of a heading; none for other texts.
    fn level(&self, text: &Text) -> Option<usize> {
        let size = half_points(text.size);
        if !text.is_short() {
            return None;
        }
        if let Some(at) = self.headings.iter().position(|heading| *heading == size) {
            return Some((at + 1).min(6));
        }
        let marked = self.bold_marks && text.bold && size >= self.body && text.lines <= 2;
        (marked && !ends_sentence(&text.text)).then_some((self.headings.len() + 1).min(6))
    }
}

/// The size of most of the text.
fn body_size(pages: &[Vec<Line>]) -> i64 {
    let mut counts: HashMap<i64, usize> = HashMap::new();
    for line in pages.iter().flatten() {
        *counts.entry(half_points(line.size)).or_default() +=
            line.cells.iter().map(|cell| cell.text.len()).sum::<usize>();
    }
    counts.iter().max_by_key(|(size, count)| (**count, **size)).map_or(0, |(size, _)| *size)
}

/// Whether a size is that of headings, both in half points.
fn is_large(size: i64, body: i64) -> bool {
    size as f64 > body as f64 * HEADING_SIZE
}

fn half_points(size: f64) -> i64 {
    (size * 2.0).round() as i64
}

impl Text {
    fn is_short(&self) -> bool {
        self.text.chars().count() <= MAX_HEADING
            && self.lines <= 4
            && self.text.chars().any(char::is_alphabetic)
    }
}

impl Block {
    fn as_text(&self) -> Option<&Text> {
        match self {
            Block::Text(text) => Some(text),
            Block::Item { .. } | Block::Table(_) | Block::Code(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time for a line does not grow with the word that it goes on with: that of all would be minutes.
    #[test]
    fn a_word_of_many_lines_is_not_looked_up_whole() {
        let (words, mut text) = (Words(HashSet::new()), "a-".to_owned());
        (0..300_000).for_each(|_| words.join(&mut text, "a-"));
        assert_eq!((text.len(), text.trim_matches('a')), (300_002, "-"));
    }
}
