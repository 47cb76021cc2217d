//! The blocks of a page, as its tags come.

use crate::error::ReadError;
use crate::limits::MAX_LIST_DEPTH;
use crate::markdown::{Table, Writer, is_exponent};

/// The block that text goes to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Block {
    #[default]
    Paragraph,
    Heading(usize),
    /// An item of a list until its marker was written; the rest of the item consists of paragraphs.
    Item,
}

/// The part of a page that was read so far.
#[derive(Default)]
pub(super) struct Page {
    pub(super) title: String,
    pub(super) out: Writer,
    block: Block,
    text: String,
    /// A heading, a term or a summary has begun, and has no text yet.
    untitled: bool,
    /// A `<sup>` is open.
    raised: bool,
    /// A `<sup>` has begun, and has no text yet.
    raises: bool,
    /// A link has begun, and has no text yet.
    linked: bool,
    /// How many elements of struck text are open.
    struck: usize,
    /// The block has a mark that begins struck text, and none that ends it.
    marked: bool,
    /// How many `<pre>` are open.
    pre: usize,
    /// The number of the next item of each list that is open; none where it has bullets.
    lists: Vec<Option<u32>>,
    /// The table that is open, unless it only places its content.
    table: Option<Table>,
}

impl Page {
    pub(super) fn start(&mut self, name: &str, start: Option<u32>) {
        self.untitled |= is_title(name);
        match name {
            "br" => self.text.push('\n'),
            "sup" => (self.raised, self.raises) = (true, true),
            "del" | "s" | "strike" => self.struck += 1,
            "pre" | "listing" | "xmp" => {
                self.flush();
                self.pre += 1;
            }
            "ul" | "ol" | "dir" => {
                self.flush();
                // Deeper lists are counted, since their ends are; their numbers are of no use.
                let number = (name == "ol").then(|| start.unwrap_or(1));
                self.lists.push(number.filter(|_| self.lists.len() <= MAX_LIST_DEPTH));
            }
            "li" => {
                self.flush();
                self.block = Block::Item;
            }
            "table" => self.start_table(),
            "thead" | "tbody" | "tfoot" => self.in_table(Table::end_group),
            "tr" => self.in_table(Table::row),
            "td" | "th" => self.in_table(Table::cell),
            _ if heading(name).is_some() => {
                // A table with headings places parts of the page.
                self.place_table();
                self.flush();
                self.block = heading(name).map_or(Block::Paragraph, Block::Heading);
            }
            _ if is_block(name) => self.flush(),
            _ => {}
        }
    }

    pub(super) fn end(&mut self, name: &str) -> Result<(), ReadError> {
        self.untitled &= !is_title(name);
        match name {
            "sup" => (self.raised, self.raises) = (false, false),
            "a" => self.linked = false,
            "del" | "s" | "strike" => {
                self.struck = self.struck.saturating_sub(1);
                if self.struck == 0 {
                    self.end_struck();
                }
            }
            "pre" | "listing" | "xmp" => {
                self.flush();
                self.pre = self.pre.saturating_sub(1);
            }
            "ul" | "ol" | "dir" => {
                self.flush();
                self.lists.pop();
                self.block = Block::Paragraph;
            }
            "table" => self.end_table()?,
            "thead" | "tbody" | "tfoot" => self.in_table(Table::end_group),
            "td" | "th" => self.flush(),
            "li" => {
                self.flush();
                self.block = Block::Paragraph;
            }
            _ if heading(name).is_some() => {
                self.flush();
                self.block = Block::Paragraph;
            }
            _ if is_block(name) => self.flush(),
            _ => {}
        }
        Ok(())
    }

    /// A heading, a term or a summary awaits its text.
    pub(super) fn is_untitled(&self) -> bool {
        self.untitled
    }

    pub(super) fn text(&mut self, text: &str) {
        if text.trim().is_empty() {
            return self.push(text);
        }
        self.untitled = false;
        let raises = std::mem::take(&mut self.raises);
        if std::mem::take(&mut self.linked) && self.raised && text.trim().chars().all(char::is_alphanumeric) {
            return self.push(&format!("[{}]", text.trim()));
        }
        if raises && is_exponent(&self.text, text) {
            self.text.push('^');
        }
        if self.struck > 0 && !self.marked && self.pre == 0 {
            self.marked = true;
            let (space, text) = text.split_at(text.len() - text.trim_start().len());
            self.push(space);
            self.push("~~");
            return self.push(text);
        }
        self.push(text);
    }

    /// A link to another place has begun. A raised number that is all of a link is the mark of a note.
    pub(super) fn start_link(&mut self) {
        self.linked = true;
    }

    fn push(&mut self, text: &str) {
        if self.pre > 0 {
            self.text.push_str(text);
            return;
        }
        // Line breaks of the source are spaces; those of `<br>` were put in as such.
        for c in text.chars() {
            let c = if c.is_whitespace() { ' ' } else { c };
            if c != ' ' || !self.text.ends_with([' ', '\n']) {
                self.text.push(c);
            }
        }
    }

    /// Writes the mark that ends struck text, before the space behind it.
    fn end_struck(&mut self) {
        if std::mem::take(&mut self.marked) {
            let end = self.text.trim_end().len();
            self.text.insert_str(end, "~~");
        }
    }

    /// Writes the block that is open.
    pub(super) fn flush(&mut self) {
        self.end_struck();
        self.raised = false;
        let text = std::mem::take(&mut self.text);
        if text.trim().is_empty() {
            return;
        }
        let is_code = self.pre > 0 && text.trim().contains('\n');
        if is_code && self.table.is_some() && is_line_numbers(&text) {
            return;
        }
        if is_code && self.table.as_ref().is_some_and(Table::is_layout) {
            // Cells are of one line; a table may also place code beside the numbers of its lines.
            self.place_table();
        }
        match &mut self.table {
            // A caption stands before the table.
            Some(table) if table.is_empty() => return self.out.paragraph(&text),
            Some(table) => return table.text(&text),
            None => {}
        }
        if self.pre > 0 {
            self.out.code(&text);
            return;
        }
        match self.block {
            Block::Paragraph => self.out.paragraph(&text),
            Block::Heading(level) => self.out.heading(level, &text),
            Block::Item => {
                let number = self.lists.last_mut().and_then(Option::as_mut).map(|number| {
                    *number = number.saturating_add(1);
                    *number - 1
                });
                self.out.item(self.lists.len().saturating_sub(1), number, &text);
                self.block = Block::Paragraph;
            }
        }
    }

    /// The page is longer than a file's may be.
    pub(super) fn check(&self) -> Result<(), ReadError> {
        self.table.as_ref().map_or(Ok(()), Table::check)?;
        self.out.check()
    }

    fn in_table(&mut self, step: fn(&mut Table)) {
        self.flush();
        if let Some(table) = &mut self.table {
            step(table);
        }
    }

    fn start_table(&mut self) {
        self.flush();
        // A table with tables in it places parts of the page.
        self.place_table();
        self.block = Block::Paragraph;
        self.table = Some(Table::default());
    }

    /// Writes the cells of the open table as paragraphs, and closes it.
    fn place_table(&mut self) {
        if let Some(table) = self.table.take() {
            table.into_texts().for_each(|cell| self.out.paragraph(&cell));
        }
    }

    pub(super) fn end_table(&mut self) -> Result<(), ReadError> {
        self.flush();
        if let Some(table) = self.table.take() {
            self.out.table(&table.into_rows()?);
        }
        Ok(())
    }

    /// Gives the cell that has begun its columns and rows.
    pub(super) fn span(&mut self, columns: u16, rows: u16) {
        if let Some(table) = &mut self.table {
            table.columns(columns);
            table.rows(rows);
        }
    }
}

fn heading(name: &str) -> Option<usize> {
    match name.as_bytes() {
        [b'h', level @ b'1'..=b'6'] => Some(usize::from(level - b'0')),
        _ => None,
    }
}

/// Elements whose text is the title of what follows.
fn is_title(name: &str) -> bool {
    heading(name).is_some() || matches!(name, "dt" | "summary")
}

/// Whether a text counts lines.
fn is_line_numbers(text: &str) -> bool {
    let mut numbers = text.split_whitespace().map(|number| number.parse::<u16>().ok().map(u32::from));
    let first = numbers.next().flatten();
    first.is_some_and(|first| numbers.zip(first + 1..).all(|(number, next)| number == Some(next)))
}

/// Elements that a paragraph cannot hold.
pub(super) fn ends_paragraph(name: &str) -> bool {
    let others = matches!(
        name,
        "pre"
            | "listing"
            | "xmp"
            | "ul"
            | "ol"
            | "dir"
            | "li"
            | "table"
            | "thead"
            | "tbody"
            | "tfoot"
            | "tr"
            | "td"
            | "th"
    );
    others || heading(name).is_some() || (is_block(name) && name != "option")
}

/// Elements that begin and end a paragraph. <https://html.spec.whatwg.org/multipage/rendering.html#flow-content-3>
fn is_block(name: &str) -> bool {
    matches!(
        name,
        "address"
            | "article"
            | "aside"
            | "blockquote"
            | "body"
            | "caption"
            | "center"
            | "dd"
            | "details"
            | "div"
            | "dl"
            | "dt"
            | "fieldset"
            | "figcaption"
            | "figure"
            | "footer"
            | "form"
            | "header"
            | "hgroup"
            | "hr"
            | "html"
            | "legend"
            | "main"
            | "option"
            | "p"
            | "section"
            | "summary"
    )
}
