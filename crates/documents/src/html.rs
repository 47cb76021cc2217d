//! HTML: the text of a page as Markdown.
//!
//! Tags are handled in the order in which they stand, without a tree: a page may nest a million elements, and the text that is
//! written does not depend on how a tree would be mended.

use html5gum::emitters::default::DefaultEmitter;
use html5gum::{HtmlString, StartTag, Token, Tokenizer};

use crate::document::Document;
use crate::error::ReadError;
use crate::html::page::Page;
use crate::markdown::collapse;

mod charset;
mod page;
mod table;

/// Elements that hold no text of the page: programs, navigation, controls, media.
const SKIPPED: [&str; 24] = [
    "script", "style", "noscript", "template", "nav", "svg", "iframe", "object", "canvas", "audio", "video",
    "map", "dialog", "button", "select", "textarea", "datalist", "applet", "noframes", "frameset", "menu",
    "rp", "head", "title",
];

/// Roles of elements that hold no text of the page.
const SKIPPED_ROLES: [&str; 8] =
    ["navigation", "search", "banner", "contentinfo", "menu", "menubar", "toolbar", "dialog"];

/// Elements without content, hence without an end tag.
const VOID: [&str; 16] = [
    "area", "base", "basefont", "br", "col", "embed", "frame", "hr", "img", "input", "keygen", "link",
    "meta", "param", "source", "wbr",
];

/// Elements of a page's head; any other ends it.
const OF_HEAD: [&str; 9] =
    ["title", "meta", "link", "script", "style", "base", "noscript", "template", "head"];

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
    // In XML any element may be closed by its start tag, and programs are marked up like text.
    let xml = text.trim_start().starts_with("<?xml");
    emitter.naively_switch_states(!xml);
    let main = if main { Main::Ahead } else { Main::Ignored };
    let mut reader = Reader { page: Page::default(), skipping: None, main, in_title: false, articles: 0 };
    for token in Tokenizer::new_with_emitter(text, emitter) {
        let Ok(token) = token;
        match token {
            Token::StartTag(tag) if xml && tag.self_closing && !VOID.contains(&name(&tag.name).as_str()) => {}
            Token::StartTag(tag) => reader.start(&tag)?,
            Token::EndTag(tag) => reader.end(&name(&tag.name)),
            Token::String(text) => reader.text(&String::from_utf8_lossy(&text)),
            Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
        if reader.main == Main::Behind {
            break;
        }
    }
    reader.page.flush();
    reader.page.end_table();
    reader.page.out.check()?;
    Ok(reader.page)
}

/// The reader's place with regard to the page's main part.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Main {
    Ignored,
    Ahead,
    Inside,
    Behind,
}

struct Reader {
    page: Page,
    /// The element that is passed over, and how many of its name are open inside.
    skipping: Option<(String, usize)>,
    main: Main,
    in_title: bool,
    articles: usize,
}

impl Reader {
    fn start(&mut self, tag: &StartTag<()>) -> Result<(), ReadError> {
        let name = name(&tag.name);
        let name = name.as_str();
        let is_main = name == "main" || attribute(tag, "role").is_some_and(|role| role == "main");
        if let Some((skipped, depth)) = &mut self.skipping {
            if skipped == name {
                *depth += 1;
            }
            // The end tag of a skipped element may be missing; these tags show that it ended.
            let ends = match skipped.as_str() {
                "head" => !OF_HEAD.contains(&name),
                "nav" | "menu" | "select" => matches!(name, "article" | "h1"),
                _ => false,
            };
            let ends = ends || is_main;
            if !ends {
                self.in_title |= skipped == "head" && name == "title" && self.page.title.is_empty();
                return Ok(());
            }
            self.skipping = None;
        }
        if is_main && self.main == Main::Ahead && !is_hidden(tag) {
            self.main = Main::Inside;
            let title = std::mem::take(&mut self.page.title);
            self.page = Page::default();
            self.page.title = title;
            self.articles = 0;
            return Ok(());
        }
        self.in_title |= name == "title" && self.page.title.is_empty();
        if !VOID.contains(&name) && (self.is_skipped(name) || is_hidden(tag)) {
            self.skipping = Some((name.to_owned(), 0));
            return Ok(());
        }
        self.articles += usize::from(name == "article");
        let start = attribute(tag, "start").and_then(|start| start.parse().ok());
        self.page.start(name, start);
        self.page.check()
    }

    fn is_skipped(&self, name: &str) -> bool {
        // Inside an article these belong to it: a note, a signature.
        let outside = self.articles == 0 && self.main != Main::Inside;
        SKIPPED.contains(&name) || (outside && matches!(name, "footer" | "aside"))
    }

    fn end(&mut self, name: &str) {
        self.in_title &= name != "title";
        if let Some((skipped, depth)) = &mut self.skipping {
            if skipped == name && *depth > 0 {
                *depth -= 1;
            } else if skipped == name || name == "body" {
                self.skipping = None;
            }
            return;
        }
        match name {
            "main" if self.main == Main::Inside => self.main = Main::Behind,
            "article" => self.articles = self.articles.saturating_sub(1),
            _ => {}
        }
        self.page.end(name);
    }

    fn text(&mut self, text: &str) {
        if self.in_title {
            self.page.title.push_str(text);
        } else if self.skipping.is_none() {
            self.page.text(text);
        }
    }
}

fn name(name: &HtmlString) -> String {
    String::from_utf8_lossy(name).into_owned()
}

fn attribute(tag: &StartTag<()>, name: &str) -> Option<String> {
    let value = tag.attributes.get(name.as_bytes())?;
    Some(String::from_utf8_lossy(value).trim().to_ascii_lowercase())
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
