//! The body of a document: its paragraphs, lists, tables and notes.

use quick_xml::events::BytesStart;

use super::numbering::Numbering;
use super::parts::{Archive, Xml, attribute, each, local, other_archive};
use super::relations::Names;
use super::styles::{Role, Styles};
use crate::error::ReadError;
use crate::limits::MAX_LIST_DEPTH;
use crate::markdown::{Table, Writer, is_exponent};

/// Elements whose text does not show: deleted and moved text, earlier properties, instructions of fields, and the older form of
/// a part that stands in a newer form beside it.
const HIDDEN: [&str; 8] =
    ["del", "moveFrom", "Fallback", "instrText", "pPrChange", "rPrChange", "trPrChange", "tcPrChange"];

/// The part of a document that was read so far.
pub(super) struct Body<'s> {
    pub(super) out: Writer,
    /// The first paragraph in the style of a title.
    pub(super) title: Option<String>,
    styles: &'s Styles,
    numbering: Numbering,
    paragraph: Paragraph,
    /// The outermost open table.
    table: Table,
    /// Tables that are open.
    tables: usize,
    /// Elements that are open from the first hidden one.
    hidden: usize,
    /// Text counts inside `<w:t>` alone.
    in_text: bool,
    /// The run that is open is raised.
    raised: bool,
    /// The mark of a note whose first paragraph has not begun.
    note: String,
    /// Lines in a style of programs, one after the other.
    code: String,
}

#[derive(Default)]
struct Paragraph {
    text: String,
    /// The text ends with raised characters.
    ends_raised: bool,
    style: String,
    list: Option<String>,
    depth: Option<usize>,
    outline: Option<usize>,
}

pub(super) fn read<'s>(
    archive: &mut Archive<'_>,
    names: &Names,
    styles: &'s Styles,
    numbering: Numbering,
) -> Result<Body<'s>, ReadError> {
    let mut body = Body {
        out: Writer::default(),
        title: None,
        styles,
        numbering,
        paragraph: Paragraph::default(),
        table: Table::default(),
        tables: 0,
        hidden: 0,
        in_text: false,
        raised: false,
        note: String::new(),
        code: String::new(),
    };
    let mut is_root = true;
    for part in [&names.main, &names.footnotes, &names.endnotes] {
        each(archive, part, |event| {
            if let Xml::Start(tag) | Xml::Empty(tag) = event
                && std::mem::take(&mut is_root)
                && local(tag.local_name().as_ref()) != "document"
            {
                // The main part of a workbook or of a presentation is told by the same relation.
                return Err(other_archive());
            }
            match event {
                Xml::Start(tag) => body.start(tag, true),
                Xml::Empty(tag) => body.start(tag, false),
                Xml::End(name) => body.end(name)?,
                Xml::Text(text) if body.in_text && body.hidden == 0 => body.text(text),
                Xml::Text(_) => {}
            }
            body.check()
        })?;
        body.end_part()?;
    }
    Ok(body)
}

impl Body<'_> {
    fn check(&self) -> Result<(), ReadError> {
        self.table.check()?;
        self.out.check_with(self.paragraph.text.len() + self.table.bytes() + self.code.len())
    }

    /// Ends what the part has left open, so that the next one begins outside of it.
    fn end_part(&mut self) -> Result<(), ReadError> {
        self.end_table()?;
        self.end_code();
        (self.tables, self.hidden, self.in_text) = (0, 0, false);
        self.paragraph = Paragraph::default();
        Ok(())
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
        let columns = || number().and_then(|columns| columns.try_into().ok()).unwrap_or(1);
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
            "r" => self.raised = false,
            "vertAlign" => self.raised = value().is_some_and(|value| value == "superscript"),
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
            "tr" if self.tables == 1 => self.table.row(),
            "tc" if self.tables == 1 => self.table.cell(),
            // Columns that the row leaves out at its beginning.
            "gridBefore" if self.tables == 1 && number() != Some(0) => {
                self.table.cell();
                self.table.columns(columns());
            }
            "gridSpan" if self.tables == 1 => self.table.columns(columns()),
            "vMerge" if self.tables == 1 && value().is_none_or(|value| value == "continue") => {
                self.table.continues()
            }
            _ => {}
        }
    }

    fn text(&mut self, text: &str) {
        let paragraph = &mut self.paragraph;
        if self.raised && !paragraph.ends_raised && is_exponent(&paragraph.text, text) {
            paragraph.text.push('^');
        }
        paragraph.text.push_str(text);
        paragraph.ends_raised = self.raised;
    }

    fn end(&mut self, name: &str) -> Result<(), ReadError> {
        if self.hidden > 0 {
            self.hidden -= 1;
            return Ok(());
        }
        match name {
            "t" => self.in_text = false,
            "p" => self.end_paragraph(),
            "tbl" => {
                self.end_paragraph();
                self.tables = self.tables.saturating_sub(1);
                if self.tables == 0 {
                    self.end_table()?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn end_table(&mut self) -> Result<(), ReadError> {
        self.end_code();
        self.out.table(&std::mem::take(&mut self.table).into_rows()?);
        Ok(())
    }

    fn end_paragraph(&mut self) {
        let paragraph = std::mem::take(&mut self.paragraph);
        let text = &paragraph.text;
        let item = self.item(&paragraph);
        let label = item.as_ref().and_then(|(_, label)| label.as_deref());
        let labelled = || label.map_or_else(|| text.clone(), |label| format!("{label} {text}"));
        if self.tables > 0 {
            if !text.trim().is_empty() {
                self.table.text(&labelled());
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
            Some(Role::Heading(level)) => {
                self.out.heading(level + usize::from(self.title.is_some()), &labelled())
            }
            Some(Role::Contents) => {}
            Some(Role::Code) | None => match &item {
                Some((depth, label)) => self.out.labelled_item(*depth, label.as_deref(), text),
                None => self.out.paragraph(text),
            },
        }
    }

    /// The depth and the label of a paragraph that is an item of a list. An item without text counts too, as Word shows its number.
    fn item(&mut self, paragraph: &Paragraph) -> Option<(usize, Option<String>)> {
        let styled = self.styles.numbering(&paragraph.style);
        let list = paragraph.list.as_deref().or(styled.map(|(list, _)| list));
        let depth =
            paragraph.depth.or(styled.map(|(_, depth)| depth)).unwrap_or_default().min(MAX_LIST_DEPTH);
        // The list 0 takes a paragraph out of its style's list.
        let list = list.filter(|list| *list != "0" && !list.is_empty())?;
        Some((depth, self.numbering.next(list, depth)))
    }

    fn end_code(&mut self) {
        self.out.code(&std::mem::take(&mut self.code));
    }
}
