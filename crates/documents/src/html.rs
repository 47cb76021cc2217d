//! HTML: the text of a page as Markdown.
//!
//! Tags are handled in the order in which they stand, without a tree: a page may nest a million elements, and the text that is
//! written does not depend on how a tree would be mended.

use html5gum::emitters::default::DefaultEmitter;
use html5gum::{HtmlString, StartTag, Token, Tokenizer};

use crate::document::Document;
use crate::error::ReadError;
use crate::html::math::{Math, plain_tex};
use crate::html::page::{Page, ends_paragraph};
use crate::html::skipped::Skipped;
use crate::markdown::collapse;

mod charset;
mod math;
mod page;
mod skipped;

/// Elements that hold no text of the page: programs, navigation, controls, media, the readings of characters.
const SKIPPED: [&str; 25] = [
    "script", "style", "noscript", "template", "nav", "svg", "iframe", "object", "canvas", "audio", "video",
    "map", "dialog", "select", "textarea", "datalist", "applet", "noframes", "frameset", "menu", "rp", "rt",
    "rtc", "head", "title",
];

/// Roles of elements that hold no text of the page.
const SKIPPED_ROLES: [&str; 8] =
    ["navigation", "search", "banner", "contentinfo", "menu", "menubar", "toolbar", "dialog"];

/// Elements without content, hence without an end tag.
const VOID: [&str; 16] = [
    "area", "base", "basefont", "br", "col", "embed", "frame", "hr", "img", "input", "keygen", "link",
    "meta", "param", "source", "wbr",
];

/// Whether the bytes begin as a page does.
pub(crate) fn is_html(bytes: &[u8]) -> bool {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(1024)]).to_ascii_lowercase();
    let start = start.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{FEFF}');
    start.starts_with("<!doctype html")
        || start.starts_with("<html")
        || (start.starts_with("<?xml") && start.contains("<html"))
}

pub(crate) fn read(bytes: &[u8], stem: &str) -> Result<Document, ReadError> {
    let text = charset::decode(bytes)?;
    let mut page = convert(&text, true)?;
    // The main part of some pages is filled in by scripts, or the tag is misused.
    if page.out.is_empty() {
        page = convert(&text, false)?;
    }
    let title = collapse(&page.title);
    let (text, heading) = page.out.finish()?;
    if text.is_empty() {
        let remedy = "a page that scripts fill in must be saved from a browser";
        return Err(ReadError::NoText { remedy });
    }
    let title = if title.is_empty() { heading.unwrap_or_else(|| stem.to_owned()) } else { title };
    Ok(Document { title, text })
}

/// Reads a page; with `main`, its main part alone where it has one.
fn convert(text: &str, main: bool) -> Result<Page, ReadError> {
    let mut emitter = DefaultEmitter::default();
    // In XML programs are marked up like text.
    let xml = text.trim_start().starts_with("<?xml");
    emitter.naively_switch_states(!xml);
    let main = if main { Main::Ahead } else { Main::Ignored };
    let mut reader =
        Reader { page: Page::default(), skipping: None, math: None, main, in_title: false, articles: 0 };
    for token in Tokenizer::new_with_emitter(text, emitter) {
        let Ok(token) = token;
        match token {
            Token::StartTag(tag) if is_empty(&tag, xml) => reader.empty(&tag),
            Token::StartTag(tag) => reader.start(&tag)?,
            Token::EndTag(tag) => reader.end(&name(&tag.name))?,
            Token::String(text) => reader.text(&String::from_utf8_lossy(&text)),
            Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
        if reader.main == Main::Behind {
            break;
        }
    }
    reader.end_math();
    reader.page.flush();
    reader.page.end_table()?;
    reader.page.out.check()?;
    Ok(reader.page)
}

/// The reader's place with regard to the page's main part.
#[derive(PartialEq, Eq)]
enum Main {
    Ignored,
    Ahead,
    /// Inside the element of this name, with so many others of the name.
    Inside(String, usize),
    Behind,
}

struct Reader {
    page: Page,
    skipping: Option<Skipped>,
    /// The formula that is open.
    math: Option<Math>,
    main: Main,
    in_title: bool,
    articles: usize,
}

impl Reader {
    fn start(&mut self, tag: &StartTag<()>) -> Result<(), ReadError> {
        let name = name(&tag.name);
        let name = name.as_str();
        let is_main = name == "main" || attribute(tag, "role").is_some_and(|role| role == "main");
        if let Some(skipped) = &mut self.skipping {
            if !skipped.start(name) && !is_main {
                self.in_title |= skipped.is("head") && name == "title" && self.page.title.is_empty();
                return Ok(());
            }
            self.skipping = None;
        }
        if ends_paragraph(name) {
            // No formula holds such an element: its end tag is missing.
            self.end_math();
        }
        if is_main && self.main == Main::Ahead && !is_hidden(tag) {
            self.main = Main::Inside(name.to_owned(), 0);
            let title = std::mem::take(&mut self.page.title);
            self.page = Page::default();
            self.page.title = title;
            self.articles = 0;
            return Ok(());
        }
        self.in_title |= name == "title" && self.page.title.is_empty();
        if !VOID.contains(&name) && (self.is_skipped(name) || is_hidden(tag)) {
            self.skipping = Some(Skipped::new(name));
            return Ok(());
        }
        if let Some(math) = &mut self.math {
            math.start(name, attribute(tag, "encoding").as_deref());
            if tag.self_closing {
                math.end(name);
            }
            return Ok(());
        }
        if name == "math" {
            self.math = Some(Math::new(value(tag, "alttext")));
            return Ok(());
        }
        if let Main::Inside(main, depth) = &mut self.main {
            *depth += usize::from(main == name);
        }
        if name == "img"
            && let Some(formula) = formula(tag)
        {
            self.page.text(&formula);
        }
        self.articles += usize::from(name == "article");
        let start = attribute(tag, "start").and_then(|start| start.parse().ok());
        self.page.start(name, start);
        if name == "a" && tag.attributes.contains_key("href".as_bytes()) {
            self.page.start_link();
        }
        if matches!(name, "td" | "th") {
            // A cell of 0 rows reaches to the end of its group.
            let rows = span(tag, "rowspan");
            self.page.span(span(tag, "colspan"), if rows == 0 { u16::MAX } else { rows });
        }
        self.page.check()
    }

    /// Takes an element that ends in its start tag: in a formula it may be an operand.
    fn empty(&mut self, tag: &StartTag<()>) {
        if let Some(math) = &mut self.math {
            let name = name(&tag.name);
            math.start(&name, None);
            math.end(&name);
        }
    }

    fn is_skipped(&self, name: &str) -> bool {
        // Inside an article these belong to it: a note, a signature.
        let outside = self.articles == 0 && !matches!(self.main, Main::Inside(..));
        match name {
            // A title that opens what follows is a button as a whole.
            "button" => !self.page.is_untitled(),
            "footer" | "aside" => outside,
            _ => SKIPPED.contains(&name),
        }
    }

    fn end(&mut self, name: &str) -> Result<(), ReadError> {
        self.in_title &= name != "title";
        if let Some(skipped) = &mut self.skipping {
            let (ends, own) = (skipped.end(name), skipped.is(name));
            if ends {
                self.skipping = None;
            }
            if !ends || own {
                return Ok(());
            }
        }
        if name == "math" || ends_paragraph(name) {
            self.end_math();
        }
        if let Some(math) = &mut self.math {
            math.end(name);
            return Ok(());
        }
        match &mut self.main {
            Main::Inside(main, 0) if main == name => self.main = Main::Behind,
            Main::Inside(main, depth) if main == name => *depth -= 1,
            _ => {}
        }
        if name == "article" {
            self.articles = self.articles.saturating_sub(1);
        }
        self.page.end(name)
    }

    fn text(&mut self, text: &str) {
        if self.in_title {
            self.page.title.push_str(text);
        } else if self.skipping.is_none() {
            match &mut self.math {
                Some(math) => math.text(text),
                None => self.page.text(text),
            }
        }
    }

    /// Writes the formula that is open.
    fn end_math(&mut self) {
        if let Some(math) = self.math.take() {
            self.page.text(&math.finish());
        }
    }
}

fn name(name: &HtmlString) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// Whether a start tag is all of its element: in HTML, elements of SVG and MathML alone may be closed so.
fn is_empty(tag: &StartTag<()>, xml: bool) -> bool {
    let name = name(&tag.name);
    tag.self_closing && (matches!(name.as_str(), "svg" | "math") || (xml && !VOID.contains(&name.as_str())))
}

fn value(tag: &StartTag<()>, name: &str) -> Option<String> {
    let value = tag.attributes.get(name.as_bytes())?;
    Some(String::from_utf8_lossy(value).trim().to_owned())
}

/// A value in lower case.
fn attribute(tag: &StartTag<()>, name: &str) -> Option<String> {
    Some(value(tag, name)?.to_ascii_lowercase())
}

/// The formula that a picture shows, as MediaWiki and WordPress write it. Other pictures may only decorate a page.
fn formula(tag: &StartTag<()>) -> Option<String> {
    let class = attribute(tag, "class")?;
    let is_formula = |class: &str| class.starts_with("mwe-math") || matches!(class, "tex" | "latex");
    let text = value(tag, "alt").filter(|_| class.split_whitespace().any(is_formula))?;
    Some(plain_tex(&text).to_owned())
}

/// The number of columns or rows that a cell takes.
fn span(tag: &StartTag<()>, name: &str) -> u16 {
    attribute(tag, name).and_then(|span| span.parse().ok()).unwrap_or(1)
}

fn is_hidden(tag: &StartTag<()>) -> bool {
    let style = attribute(tag, "style").unwrap_or_default().replace(' ', "");
    attribute(tag, "hidden").is_some_and(|value| value != "until-found")
        || attribute(tag, "aria-hidden").is_some_and(|value| value == "true")
        || attribute(tag, "role").is_some_and(|role| SKIPPED_ROLES.contains(&role.as_str()))
        || style.contains("display:none")
}

#[cfg(test)]
mod tests;
