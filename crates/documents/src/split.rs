//! Cuts a text by its structure into pieces that fit a size.

use std::ops::Range;

use blocks::{Block, Kind, trim};
use sizes::Sizes;

mod blocks;
mod sizes;

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The headings under which the text stands, the outermost first; those inside the text are not among them, nor outer ones for which
    /// there was no room.
    pub headings: Vec<String>,
    /// The lines without which the text is not understood, where it begins inside their block: the header of a table, or the fence of
    /// code. Empty elsewhere, and where there was no room for them.
    pub opening: String,
    /// The text, without the space around it.
    pub text: String,
    /// The place of the text, in bytes.
    pub range: Range<usize>,
}

impl Piece {
    /// The piece as it is understood alone: a line with the title and the headings above it, `Handbook > Brakes > Rear wheel`, an empty
    /// line and the text, behind the header of the table or the fence of the code that it begins in.
    ///
    /// A heading that begins the text moves into that line, unless the piece holds other headings of its level, which
    /// would seem to stand below it then. A title that is the first heading too stands there once.
    pub fn headed(&self, title: &str) -> String {
        let mut path: Vec<String> = self.headings.clone();
        let opening = if self.opening.is_empty() { String::new() } else { format!("{}\n", self.opening) };
        let whole = opening + &self.text;
        let mut text = whole.as_str();
        let found = blocks::blocks(text);
        let levels: Vec<usize> = found.iter().filter_map(Block::level).collect();
        for (index, block) in found.iter().enumerate() {
            let Some(level) = block.level() else { break };
            if levels[index + 1..].iter().any(|other| *other <= level) {
                break;
            }
            path.push(blocks::heading_text(&whole[block.range.clone()]));
            text = &whole[block.range.end..];
        }
        let title = title.split_whitespace().collect::<Vec<_>>().join(" ");
        let first = path.first().cloned().or_else(|| {
            let block = found.first().filter(|block| block.level().is_some())?;
            Some(blocks::heading_text(&whole[block.range.clone()]))
        });
        if !title.is_empty() && first.is_none_or(|first| !first.eq_ignore_ascii_case(&title)) {
            path.insert(0, title);
        }
        let line = path.join(" > ");
        match (line.is_empty(), text.trim().is_empty()) {
            (true, _) => text.to_owned(),
            (false, true) => line,
            (false, false) => format!("{line}\n\n{text}"),
        }
    }
}

/// The part of a piece, one in so many, that the headings above it and the opening of its first block may take.
const ABOVE: usize = 2;

/// Cuts a text in Markdown, or a plain one, into pieces of at most `max` as `size` counts the bytes of a range, with a title of size
/// `title` and the headings above them ([`Piece::headed`]).
///
/// A section that fits is one piece, with its subsections; so are neighbouring sections under one heading that fit together, since a
/// piece of a line or two says too little to be found by. Sections under different headings are never joined: a piece that is found
/// should be about one thing. A section that does not fit is cut between its blocks, a block between lines (code, tables, lists) or
/// sentences, a sentence between its lines, a line between words, a word between characters; a piece is filled as far as it goes, but
/// rather ends half full at the end of a block than inside the next. A heading stays with the text below it.
///
/// All of the text but white space is in one of the pieces, in its order. A piece is larger than `max` only where a single character is.
/// Above a piece that begins inside a table or code stands the header of the table or the fence, if half of the piece has room for it,
/// and of the headings those are kept, from the innermost, that fit into the rest of that half together.
///
/// `size` may be costly: it is called once for each block, once for each line or sentence of those that do not fit, and
/// a few times for each piece, on texts of hardly more than `max`. Sizes should add up roughly, as tokens do; where they do not, pieces
/// are smaller than they could be.
pub fn split(text: &str, max: usize, title: usize, size: impl Fn(Range<usize>) -> usize) -> Vec<Piece> {
    let blocks = blocks::blocks(text);
    let sizes = Sizes::new(text, max, size);
    let mut splitter =
        Splitter { text, sizes, title, blocks: &blocks, path: Vec::new(), pieces: Vec::new(), open: None };
    splitter.section(0..blocks.len());
    splitter.pieces
}

/// The first heading of a text, if it is of the first level.
pub(crate) fn title(text: &str) -> Option<Title> {
    let (at, block) =
        blocks::blocks(text).into_iter().enumerate().find(|(_, block)| block.level().is_some())?;
    (block.level() == Some(1))
        .then(|| Title { begins: at == 0, text: blocks::heading_text(&text[block.range]) })
}

/// A heading that names a text.
pub(crate) struct Title {
    pub(crate) text: String,
    /// Nothing stands before it.
    pub(crate) begins: bool,
}

impl Block {
    fn level(&self) -> Option<usize> {
        match self.kind {
            Kind::Heading(level) => Some(level),
            Kind::Paragraph | Kind::Lines => None,
        }
    }
}

struct Splitter<'t, S> {
    text: &'t str,
    sizes: Sizes<'t, S>,
    title: usize,
    blocks: &'t [Block],
    /// The headings above the current blocks, with their sizes.
    path: Vec<(String, usize)>,
    pieces: Vec<Piece>,
    /// The piece that is being filled.
    open: Option<Open>,
}

#[derive(Clone)]
struct Open {
    range: Range<usize>,
    /// The sizes of its parts.
    sum: usize,
    above: Above,
    /// It holds nothing but headings, which stay with the text below them.
    bare: bool,
}

/// The headings and the opening above the beginning of a piece.
#[derive(Clone)]
struct Above {
    /// The headings that it tells.
    headings: Range<usize>,
    /// The lines that open the block which it begins in.
    opening: Range<usize>,
    /// The size of both, and that of the title.
    size: usize,
}

/// A part of a section that is not divided while it fits: a block, or a subsection.
struct Part {
    blocks: Range<usize>,
    range: Range<usize>,
    size: usize,
}

/// Divides a range of a text.
type Cut = fn(&str, Range<usize>) -> Vec<Range<usize>>;

impl<S: Fn(Range<usize>) -> usize> Splitter<'_, S> {
    /// Makes pieces of a section's blocks: those up to its first subsection, and the subsections.
    fn section(&mut self, blocks: Range<usize>) {
        let mut at = blocks.start;
        while at < blocks.end {
            let end = self.part_end(at, blocks.end);
            self.add(&self.part(at..end));
            at = end;
        }
        self.close();
    }

    /// The end of the block or subsection at a block.
    fn part_end(&self, at: usize, end: usize) -> usize {
        let Some(level) = self.blocks[at].level() else { return at + 1 };
        let next = self.blocks[at + 1..end]
            .iter()
            .position(|block| block.level().is_some_and(|other| other <= level));
        next.map_or(end, |next| at + 1 + next)
    }

    fn part(&self, blocks: Range<usize>) -> Part {
        let range = self.blocks[blocks.start].range.start..self.blocks[blocks.end - 1].range.end;
        let size = self.blocks[blocks.clone()].iter().map(|block| self.sizes.of(block.range.clone())).sum();
        Part { blocks, range, size }
    }

    /// The lines above the piece that is open, or begins at a place.
    fn above(&self, start: usize) -> Above {
        self.open.as_ref().map_or_else(|| self.above_next(start), |open| open.above.clone())
    }

    /// The lines above a piece that begins at a place.
    fn above_next(&self, start: usize) -> Above {
        let room = self.sizes.max(self.title) / ABOVE;
        let at = self.blocks.partition_point(|block| block.range.start <= start);
        let block = self.blocks[..at].last().filter(|block| block.opening.end <= start);
        let opening =
            block.map(|block| block.opening.clone()).filter(|range| self.sizes.of(range.clone()) <= room);
        let opening = opening.unwrap_or_default();
        let (mut first, mut size) = (self.path.len(), self.sizes.of(opening.clone()));
        while first > 0 && size + self.path[first - 1].1 <= room {
            first -= 1;
            size += self.path[first].1;
        }
        Above { headings: first..self.path.len(), opening, size: size + self.title }
    }

    /// Adds a part to the open piece, to the next, or divides it.
    fn add(&mut self, part: &Part) {
        if self.push(part.range.clone(), part.size) {
            return;
        }
        let bare = self.open.as_ref().is_some_and(|open| open.bare);
        let is_half = |open: &Open| open.sum.saturating_mul(2) >= self.sizes.max(open.above.size);
        let half = self.open.as_ref().is_some_and(is_half);
        let kind = self.blocks[part.blocks.start].kind;
        let fits = self.sizes.fits(part.range.clone(), part.size, self.above_next(part.range.start).size);
        if let Kind::Heading(_) = kind {
            if !bare {
                self.close();
            }
            if !(fits && self.push(part.range.clone(), part.size)) {
                self.divide_section(part);
            }
            return;
        }
        // Code, tables and lists that fit are not divided to fill a piece.
        if fits && !bare && (kind == Kind::Lines || half) {
            self.close();
            self.push(part.range.clone(), part.size);
            return;
        }
        if half && !bare {
            self.close();
        }
        match kind {
            Kind::Lines => {
                self.divide(part.range.clone(), &[blocks::items, blocks::sentences, blocks::lines]);
            }
            Kind::Paragraph | Kind::Heading(_) => {
                self.divide(part.range.clone(), &[blocks::sentences, blocks::lines]);
            }
        }
    }

    /// Adds a range to the open piece, or begins one with it; false where it does not fit.
    fn push(&mut self, range: Range<usize>, size: usize) -> bool {
        let start = self.open.as_ref().map_or(range.start, |open| open.range.start);
        let sum = self.open.as_ref().map_or(0, |open| open.sum).saturating_add(size);
        let above = self.above(start);
        if !self.sizes.fits(start..range.end, sum, above.size) {
            return false;
        }
        self.open = Some(Open { range: start..range.end, sum, above, bare: false });
        true
    }

    /// Makes pieces of a section that does not fit. Headings that are open begin the first.
    fn divide_section(&mut self, part: &Part) {
        let range = self.blocks[part.blocks.start].range.clone();
        let size = self.sizes.of(range.clone());
        if !self.push(range.clone(), size) {
            self.close();
            if !self.push(range.clone(), size) {
                // A heading beyond the limit.
                self.divide(range.clone(), &[]);
                self.close();
            }
        }
        if let Some(open) = &mut self.open {
            open.bare = true;
        }
        self.path.push((blocks::heading_text(&self.text[range]), size));
        self.section(part.blocks.start + 1..part.blocks.end);
        self.path.pop();
    }

    /// Fills pieces with the parts of a block, and leaves the last open.
    fn divide(&mut self, range: Range<usize>, cuts: &[Cut]) {
        let Some((cut, finer)) = cuts.split_first() else {
            return self.fill(&blocks::words(self.text, range), true);
        };
        for range in cut(self.text, range) {
            let size = self.sizes.of(range.clone());
            if self.push(range.clone(), size) {
                continue;
            }
            let bare = self.open.as_ref().is_some_and(|open| open.bare);
            if !bare && self.sizes.fits(range.clone(), size, self.above_next(range.start).size) {
                self.close();
                self.push(range, size);
            } else {
                self.divide(range, finer);
            }
        }
    }

    /// Fills pieces with words, each as far as it goes, or with the characters of a word that does not fit.
    fn fill(&mut self, parts: &[Range<usize>], words: bool) {
        let mut at = 0;
        while at < parts.len() {
            let start = self.open.as_ref().map_or(parts[at].start, |open| open.range.start);
            let above = self.above(start);
            let count = self.sizes.most(start, &parts[at..], above.size);
            if count > 0 {
                let range = start..parts[at + count - 1].end;
                let sum = self.sizes.of(range.clone());
                self.open = Some(Open { range, sum, above, bare: false });
                at += count;
            } else if self.open.is_some() {
                self.close();
            } else {
                match words {
                    true => self.fill(&blocks::graphemes(self.text, parts[at].clone()), false),
                    // A single character beyond the limit.
                    false => self.piece(parts[at].clone(), &above),
                }
                at += 1;
            }
            if at < parts.len() && count > 0 {
                self.close();
            }
        }
    }

    /// Ends the open piece.
    fn close(&mut self) {
        let Some(open) = self.open.take() else { return };
        if self.sizes.fits_exactly(open.range.clone(), open.above.size) {
            self.piece(open.range, &open.above);
        } else {
            // The sizes of the parts did not add up.
            self.fill(&blocks::words(self.text, open.range), true);
            if let Some(rest) = self.open.take() {
                self.piece(rest.range, &rest.above);
            }
        }
    }

    fn piece(&mut self, range: Range<usize>, above: &Above) {
        let trimmed = trim(self.text, range);
        let text = self.text[trimmed.clone()].to_owned();
        if !text.is_empty() {
            let headings = self.path.get(above.headings.clone()).unwrap_or_default();
            let headings = headings.iter().map(|(text, _)| text.clone()).collect();
            let opening = self.text[above.opening.clone()].trim().to_owned();
            self.pieces.push(Piece { headings, opening, text, range: trimmed });
        }
    }
}

#[cfg(test)]
mod tests;
