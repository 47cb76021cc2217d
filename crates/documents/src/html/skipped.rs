//! An element that is passed over, and the tags that end it: its own end tag may be missing.
//! <https://html.spec.whatwg.org/multipage/syntax.html#optional-tags>

use super::page::ends_paragraph;

/// Elements of a page's head; any other ends it.
const OF_HEAD: [&str; 9] =
    ["title", "meta", "link", "script", "style", "base", "noscript", "template", "head"];

/// An element that is passed over.
pub(super) struct Skipped {
    name: String,
    /// Elements that are open inside, and whose end tags do not end this one.
    depth: usize,
}

impl Skipped {
    pub(super) fn new(name: &str) -> Self {
        Skipped { name: name.to_owned(), depth: 0 }
    }

    pub(super) fn is(&self, name: &str) -> bool {
        self.name == name
    }

    /// Takes a start tag, and tells whether it ends the element.
    pub(super) fn start(&mut self, name: &str) -> bool {
        let ends = match self.name.as_str() {
            "head" => !OF_HEAD.contains(&name),
            "nav" | "menu" | "select" => matches!(name, "article" | "h1"),
            "p" => ends_paragraph(name),
            _ => self.depth == 0 && is_next(&self.name, name),
        };
        self.depth += usize::from(self.holds(name));
        ends
    }

    /// Takes an end tag, and tells whether it ends the element.
    pub(super) fn end(&mut self, name: &str) -> bool {
        let inside = self.depth > 0;
        if inside && self.holds(name) {
            self.depth -= 1;
            return false;
        }
        let outer = match self.name.as_str() {
            "p" => ends_paragraph(name),
            "td" | "th" | "tr" => matches!(name, "tr" | "thead" | "tbody" | "tfoot"),
            _ => false,
        };
        name == "body" || (!inside && (outer || self.is(name) || self.holds(name)))
    }

    /// Whether an element of the name may hold others of this one's: a list holds items.
    fn holds(&self, name: &str) -> bool {
        match self.name.as_str() {
            "li" => matches!(name, "ul" | "ol" | "menu" | "dir"),
            "dt" | "dd" => name == "dl",
            "td" | "th" | "tr" => name == "table",
            "rt" | "rp" | "rtc" => name == "ruby",
            own => name == own,
        }
    }
}

/// Whether an element that follows a skipped one shows that it ended.
fn is_next(skipped: &str, name: &str) -> bool {
    match skipped {
        "li" => name == "li",
        "dt" | "dd" => matches!(name, "dt" | "dd"),
        "td" | "th" => matches!(name, "td" | "th" | "tr" | "thead" | "tbody" | "tfoot"),
        "tr" => matches!(name, "tr" | "thead" | "tbody" | "tfoot"),
        "rt" | "rp" | "rtc" => matches!(name, "rb" | "rt" | "rp" | "rtc"),
        _ => false,
    }
}
