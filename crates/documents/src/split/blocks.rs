//! The blocks of a text in Markdown: headings, paragraphs, code, tables, lists.

use std::ops::Range;

use unicode_segmentation::UnicodeSegmentation;

/// Words before a full stop that mostly do not end a sentence.
const ABBREVIATIONS: [&str; 42] = [
    "al", "approx", "art", "bzw", "ca", "cf", "ch", "co", "corp", "d", "dept", "dr", "e.g", "ed", "eds",
    "eq", "etc", "fig", "figs", "i.e", "inc", "jr", "ltd", "mr", "mrs", "ms", "no", "nos", "nr", "p", "pp",
    "prof", "rev", "sec", "sr", "st", "u.s", "v", "vgl", "vol", "vs", "z.b",
];

/// Signs that end a sentence, or stand behind those that do.
const ENDS: [char; 26] = [
    '.', '!', '?', '…', ':', ';', '。', '｡', '！', '？', '।', '॥', '۔', '؟', '።', '։', '"', '”', '’', '\'',
    ')', '»', '」', '』', '）', '】',
];

/// The kind of a block, which says where it may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A heading and its level.
    Heading(usize),
    Paragraph,
    /// Code, a table or a list: cut between lines.
    Lines,
}

/// A block: it ends where the next begins, the space between them included.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) kind: Kind,
    pub(super) range: Range<usize>,
    /// The lines that those below them are read by: the fence of code, the header of a table and the line under it.
    pub(super) opening: Range<usize>,
}

/// The blocks of a text, which cover it from its first to its last byte.
pub(super) fn blocks(text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut at = 0;
    // The kind of the block that is open; none after an empty line.
    let mut open: Option<Kind> = None;
    let mut fence: Option<(char, usize)> = None;
    let mut was_table = false;
    let mut was_header = false;
    for line in text.split_inclusive('\n') {
        let start = at;
        at += line.len();
        let content = line.trim_end();
        let block = |kind| Block { kind, range: start..start, opening: start..start };
        if let Some((sign, length)) = fence {
            if is_fence(content).is_some_and(|(s, l)| s == sign && l >= length)
                && content.trim().chars().all(|c| c == sign)
            {
                fence = None;
                open = None;
            }
            continue;
        }
        let table = content.trim_start().starts_with('|');
        if let Some(last) = blocks.last_mut().filter(|_| was_header && is_under_header(content)) {
            last.opening.end = at;
        }
        was_header = false;
        if content.is_empty() {
            open = None;
        } else if let Some(found) = is_fence(content) {
            blocks.push(Block { opening: start..at, ..block(Kind::Lines) });
            fence = Some(found);
        } else if let Some(level) = heading_level(content) {
            blocks.push(block(Kind::Heading(level)));
            open = None;
        } else if let Some(level) = underline_level(content)
            .filter(|_| open == Some(Kind::Paragraph) && is_one_line(&blocks, start, text))
        {
            // The line below a heading that is underlined.
            if let Some(last) = blocks.last_mut() {
                last.kind = Kind::Heading(level);
            }
            open = None;
        } else if open.is_none() || (table != was_table && open != Some(Kind::Lines)) || (was_table && !table)
        {
            let kind = if table || is_item(content) { Kind::Lines } else { Kind::Paragraph };
            blocks.push(block(kind));
            open = Some(kind);
            was_header = table;
        } else if open == Some(Kind::Paragraph) && is_item(content) {
            blocks.push(block(Kind::Lines));
            open = Some(Kind::Lines);
        }
        was_table = table;
    }
    let starts: Vec<usize> =
        blocks.iter().skip(1).map(|block| block.range.start).chain([text.len()]).collect();
    blocks.iter_mut().zip(starts).for_each(|(block, end)| block.range.end = end);
    if let Some(first) = blocks.first_mut() {
        first.range.start = 0;
    }
    blocks
}

fn is_one_line(blocks: &[Block], end: usize, text: &str) -> bool {
    blocks.last().is_some_and(|block| text[block.range.start..end].trim_end().lines().nth(1).is_none())
}

/// Whether a line parts the header of a table from its rows.
fn is_under_header(line: &str) -> bool {
    line.contains('-') && line.trim_start().starts_with('|') && line.chars().all(|c| "|-: \t".contains(c))
}

/// The sign and the length of a fence of code.
fn is_fence(line: &str) -> Option<(char, usize)> {
    let line = line.trim_start();
    let sign = line.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let length = line.chars().take_while(|c| *c == sign).count();
    let rest = &line[length..];
    (length >= 3 && !(sign == '`' && rest.contains('`'))).then_some((sign, length))
}

/// The level of a heading of one line.
fn heading_level(line: &str) -> Option<usize> {
    let indent = line.len() - line.trim_start_matches(' ').len();
    let line = line.trim_start_matches(' ');
    let level = line.bytes().take_while(|byte| *byte == b'#').count();
    let rest = &line[level..];
    let has_text = rest.starts_with([' ', '\t']) && !rest.trim_matches([' ', '\t', '#']).is_empty();
    (indent <= 3 && (1..=6).contains(&level) && has_text).then_some(level)
}

fn underline_level(line: &str) -> Option<usize> {
    let line = line.trim();
    match line.as_bytes() {
        [b'=', rest @ ..] if rest.len() >= 2 && rest.iter().all(|byte| *byte == b'=') => Some(1),
        [b'-', rest @ ..] if rest.len() >= 2 && rest.iter().all(|byte| *byte == b'-') => Some(2),
        _ => None,
    }
}

fn is_item(line: &str) -> bool {
    let line = line.trim_start();
    let number = line.bytes().take_while(u8::is_ascii_digit).count();
    let rest = &line[number..];
    let marked = if number == 0 {
        rest.starts_with(['-', '*', '+', '•'])
    } else {
        number <= 9 && rest.starts_with(['.', ')'])
    };
    marked && rest.chars().nth(1).is_some_and(|c| c == ' ' || c == '\t')
}

/// The words of a heading, without its signs.
pub(super) fn heading_text(block: &str) -> String {
    let line = block.trim_start().lines().next().unwrap_or_default().trim();
    let text =
        if heading_level(line).is_some() { line.trim_start_matches('#').trim_end_matches('#') } else { line };
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The lines of a range.
pub(super) fn lines(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let mut at = range.start;
    let line = |line: &str| {
        at += line.len();
        at - line.len()..at
    };
    text[range].split_inclusive('\n').map(line).collect()
}

/// The lines of a range, or its items where it is a list: an indented line belongs to the item above.
pub(super) fn items(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let is_list =
        is_item(text[range.clone()].lines().find(|line| !line.trim().is_empty()).unwrap_or_default());
    for range in lines(text, range) {
        let line = &text[range.clone()];
        let goes_on = line.trim().is_empty() || (is_list && line.starts_with([' ', '\t']) && !is_item(line));
        match found.last_mut() {
            Some(last) if goes_on => last.end = range.end,
            _ => found.push(range),
        }
    }
    found
}

/// Most characters one after the other, none of them a letter or a digit, in which the end of a sentence is looked for: Unicode's rules look from
/// each of them for the next letter, and a text may have a million.
const MOST_BETWEEN: usize = 256;

/// The parts of a range that are looked through for sentences, of which only texts with very long gaps have several.
fn parts(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let (mut parts, mut start, mut between) = (Vec::new(), range.start, 0);
    for (at, c) in text[range.clone()].char_indices() {
        between = if c.is_alphanumeric() { 0 } else { between + 1 };
        if between > MOST_BETWEEN {
            parts.push(start..range.start + at);
            (start, between) = (range.start + at, 0);
        }
    }
    parts.push(start..range.end);
    parts
}

/// The sentences of a range.
pub(super) fn sentences(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let mut open = false;
    let bounds = |part: Range<usize>| {
        let sentences = text[part.clone()].split_sentence_bound_indices();
        sentences.map(move |(at, sentence)| (part.start + at, sentence))
    };
    for (start, sentence) in parts(text, range).into_iter().flat_map(bounds) {
        let end = start + sentence.len();
        match found.last_mut() {
            Some(last) if open => last.end = end,
            _ => found.push(start..end),
        }
        // A line break ends a sentence for Unicode, and not in a paragraph.
        open = !sentence.trim_end().ends_with(ENDS) || ends_with_abbreviation(sentence);
    }
    found
}

fn ends_with_abbreviation(sentence: &str) -> bool {
    let Some(start) = sentence.trim_end().strip_suffix('.') else { return false };
    let word = start.rsplit(|c: char| c.is_whitespace() || c == '(').next().unwrap_or_default();
    let initial = word.chars().count() == 1 && word.chars().all(char::is_uppercase);
    initial || ABBREVIATIONS.contains(&word.to_lowercase().as_str())
}

/// The words of a range, each with the space behind it.
pub(super) fn words(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for (at, word) in text[range.clone()].split_word_bound_indices() {
        let start = range.start + at;
        match found.last_mut() {
            Some(last) if word.trim().is_empty() => last.end = start + word.len(),
            _ => found.push(start..start + word.len()),
        }
    }
    found
}

/// The characters of a range as they are seen.
pub(super) fn graphemes(text: &str, range: Range<usize>) -> Vec<Range<usize>> {
    let start = range.start;
    text[range].grapheme_indices(true).map(|(at, part)| start + at..start + at + part.len()).collect()
}

/// A range without the white space around it.
pub(super) fn trim(text: &str, range: Range<usize>) -> Range<usize> {
    let part = &text[range.clone()];
    let start = range.start + part.len() - part.trim_start().len();
    start..start + part.trim().len()
}
