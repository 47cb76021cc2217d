//! The body of a document: its paragraphs, lists, tables and notes.

use quick_xml::events::BytesStart;

use super::numbering::Numbering;
use super::parts::{Archive, Xml, attribute, each, local};
use super::styles::{Role, Styles};
use crate::error::ReadError;
use crate::limits::MAX_LIST_DEPTH;
use crate::markdown::Writer;

/// Elements whose text does not show: deleted and moved text, earlier properties, instructions of fields, and the older form of
/// a part that stands in a newer form beside it.
const HIDDEN: [&str; 5] = ["del", "moveFrom", "Fallback", "instrText", "pPrChange"];

/// The part of a document that was read so far.
pub(super) struct Body<'s> {
    pub(super) out: Writer,
    /// The first paragraph in the style of a title.
    pub(super) title: Option<String>,
    styles: &'s Styles,
    numbering: Numbering,
    paragraph: Paragraph,
    /// The rows of the outermost open table.
    rows: Vec<Vec<String>>,
    /// Those rows and their cells.
    cells: usize,
    /// Bytes of the text in those cells.
    cell_bytes: usize,
    /// Tables that are open.
    tables: usize,
    /// Elements that are open from the first hidden one.
    hidden: usize,
    /// Text counts inside `<w:t>` alone.
    in_text: bool,
    /// The mark of a note whose first paragraph has not begun.
    note: String,
    /// Lines in a style of programs, one after the other.
    code: String,
}

#[derive(Default)]
struct Paragraph {
    text: String,
    style: String,
    list: Option<String>,
    depth: Option<usize>,
    outline: Option<usize>,
}

pub(super) fn read<'s>(
    archive: &mut Archive<'_>,
    styles: &'s Styles,
    numbering: Numbering,
) -> Result<Body<'s>, ReadError> {
    let mut body = Body {
        out: Writer::default(),
        title: None,
        styles,
        numbering,
        paragraph: Paragraph::default(),
        rows: Vec::new(),
        cells: 0,
        cell_bytes: 0,
        tables: 0,
        hidden: 0,
        in_text: false,
        note: String::new(),
        code: String::new(),
    };
    for part in ["word/document.xml", "word/footnotes.xml", "word/endnotes.xml"] {
        each(archive, part, |event| {
            match event {
                Xml::Start(tag) => body.start(tag, true),
                Xml::Empty(tag) => body.start(tag, false),
                Xml::End(name) => body.end(name),
                Xml::Text(text) if body.in_text && body.hidden == 0 => body.paragraph.text.push_str(text),
                Xml::Text(_) => {}
            }
            body.check()
        })?;
        body.end_part();
    }
    Ok(body)
}

impl Body<'_> {
    fn check(&self) -> Result<(), ReadError> {
        ReadError::check_cells(self.cells)?;
        self.out.check_with(self.paragraph.text.len() + self.cell_bytes + self.code.len())
    }

    /// Ends what the part has left open, so that the next one begins outside of it.
    fn end_part(&mut self) {
        self.end_table();
        self.end_code();
        (self.tables, self.hidden, self.in_text) = (0, 0, false);
        self.paragraph = Paragraph::default();
    }

    fn start(&mut self, tag: &BytesStart<'_>, open: bool) {
        let name = tag.local_name();
        let name = local(name.as_ref());
        if self.hidden > 0 || HIDDEN.contains(&name) {
            self.hidden += usize::from(open);
            return;
        }
        let value = || attribute(tag, "val");
        let number = || value().and_then(|value| value.parse::<usize>().ok());
        match name {
            "p" => {
                // A paragraph inside another, in a text box, ends the outer one's text so far.
                self.end_paragraph();
                self.paragraph.text = std::mem::take(&mut self.note);
            }
            "pStyle" => self.paragraph.style = value().unwrap_or_default(),
            "numId" => self.paragraph.list = value(),
            "ilvl" => self.paragraph.depth = number(),
            "outlineLvl" => self.paragraph.outline = number().map(|level| level.saturating_add(1)),
            "t" => self.in_text = open,
            "tab" | "ptab" => self.paragraph.text.push('\t'),
            "br" | "cr" => self.paragraph.text.push('\n'),
            "noBreakHyphen" => self.paragraph.text.push('\u{2011}'),
            "footnoteReference" | "endnoteReference" => {
                if let Some(id) = attribute(tag, "id") {
                    self.paragraph.text.push_str(&format!("[{id}]"));
                }
            }
            // The first notes of each part draw the lines above notes, and have a type.
            "footnote" | "endnote" if open && attribute(tag, "type").is_none() => {
                if let Some(id) = attribute(tag, "id") {
                    self.note = format!("[{id}] ");
                }
            }
            "tbl" if open => {
                self.end_paragraph();
                self.tables += 1;
            }
            "tr" if self.tables == 1 => {
                self.cells += 1;
                self.rows.push(Vec::new());
            }
            "tc" if self.tables == 1 => {
                self.cells += 1;
                self.rows.last_mut().into_iter().for_each(|row| row.push(String::new()))
            }
            _ => {}
        }
    }

    fn end(&mut self, name: &str) {
        if self.hidden > 0 {
            self.hidden -= 1;
            return;
        }
        match name {
            "t" => self.in_text = false,
            "p" => self.end_paragraph(),
            "tbl" => {
                self.end_paragraph();
                self.tables = self.tables.saturating_sub(1);
                if self.tables == 0 {
                    self.end_table();
                }
            }
            _ => {}
        }
    }

    fn end_table(&mut self) {
        self.end_code();
        self.out.table(&std::mem::take(&mut self.rows));
        (self.cells, self.cell_bytes) = (0, 0);
    }

    fn end_paragraph(&mut self) {
        let paragraph = std::mem::take(&mut self.paragraph);
        let text = &paragraph.text;
        if self.tables > 0 {
            if let Some(cell) = self.rows.last_mut().and_then(|row| row.last_mut()) {
                cell.push(' ');
                cell.push_str(text);
                self.cell_bytes += 1 + text.len();
            }
            return;
        }
        let role = paragraph
            .outline
            .filter(|level| (1..=9).contains(level))
            .map(|level| Role::Heading(level.min(6)));
        let role = role.or_else(|| self.styles.role(&paragraph.style));
        if role == Some(Role::Code) {
            self.code.push_str(text);
            self.code.push('\n');
            return;
        }
        if text.trim().is_empty() {
            return;
        }
        self.end_code();
        match role {
            Some(Role::Title) => {
                self.title.get_or_insert_with(|| text.clone());
                self.out.heading(1, text);
            }
            // Headings stand below the title.
            Some(Role::Heading(level)) => self.out.heading(level + usize::from(self.title.is_some()), text),
            Some(Role::Contents) => {}
            Some(Role::Code) | None => self.plain(&paragraph),
        }
    }

    /// Writes a paragraph that is an item of a list, or of the text.
    fn plain(&mut self, paragraph: &Paragraph) {
        let styled = self.styles.numbering(&paragraph.style);
        let list = paragraph.list.as_ref().or(styled.map(|(list, _)| list));
        let depth =
            paragraph.depth.or(styled.map(|(_, depth)| *depth)).unwrap_or_default().min(MAX_LIST_DEPTH);
        // The list 0 takes a paragraph out of its style's list.
        match list.filter(|list| *list != "0" && !list.is_empty()) {
            Some(list) => {
                let number = self.numbering.next(list, depth);
                self.out.item(depth, number, &paragraph.text);
            }
            None => self.out.paragraph(&paragraph.text),
        }
    }

    fn end_code(&mut self) {
        self.out.code(&std::mem::take(&mut self.code));
    }
}
