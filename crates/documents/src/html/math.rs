//! A formula in MathML, as a line of text: in TeX where the page has it so, else by its marks.
//! <https://www.w3.org/TR/mathml-core/>

use crate::markdown::collapse;

/// Most bytes of an operand that is looked at for whether it needs parentheses.
const MAX_PLAIN_BYTES: usize = 16;

/// A formula that is being read.
#[derive(Default)]
pub(super) struct Math {
    /// The formula in TeX.
    tex: String,
    /// The formula as its marks have it.
    text: String,
    open: Vec<Element>,
    annotation: Option<Annotation>,
}

/// An element that is open.
struct Element {
    name: String,
    /// Number of the children that have begun.
    children: usize,
    /// The place at which its text begins, behind a parenthesis; none unless it is an operand of the element around it or of a root.
    operand: Option<usize>,
}

/// Another form of the formula.
struct Annotation {
    name: String,
    is_tex: bool,
}

impl Math {
    /// A formula whose start tag has this `alttext`.
    pub(super) fn new(alttext: Option<String>) -> Self {
        Math { tex: alttext.unwrap_or_default(), ..Math::default() }
    }

    pub(super) fn start(&mut self, name: &str, encoding: Option<&str>) {
        if self.annotation.is_some() {
            return;
        }
        if matches!(name, "annotation" | "annotation-xml") {
            let is_tex = encoding.is_some_and(|encoding| encoding.contains("tex")) && self.tex.is_empty();
            self.annotation = Some(Annotation { name: name.to_owned(), is_tex });
            return;
        }
        let mut is_operand = name == "msqrt";
        if let Some(parent) = self.open.last_mut() {
            parent.children += 1;
            self.text.push_str(separator(&parent.name, parent.children));
            is_operand |= has_operands(&parent.name);
        }
        if name == "msqrt" {
            self.text.push('√');
        }
        let operand = is_operand.then(|| {
            self.text.push('(');
            self.text.len()
        });
        self.open.push(Element { name: name.to_owned(), children: 0, operand });
    }

    pub(super) fn end(&mut self, name: &str) {
        if let Some(annotation) = &self.annotation {
            if annotation.name == name {
                self.annotation = None;
            }
            return;
        }
        let Some(element) = self.open.pop_if(|element| element.name == name) else { return };
        if name == "mroot" && element.children > 1 {
            self.text.push(')');
        }
        let Some(start) = element.operand else { return };
        let operand = &self.text[start..];
        let is_plain = operand.chars().nth(1).is_none() || operand.chars().all(char::is_alphanumeric);
        if operand.len() <= MAX_PLAIN_BYTES && is_plain {
            let is_joined = operand.starts_with(char::is_alphanumeric)
                && self.text[..start - 1].ends_with(char::is_alphanumeric);
            self.text.replace_range(start - 1..start, if is_joined { " " } else { "" });
        } else {
            self.text.push(')');
        }
    }

    pub(super) fn text(&mut self, text: &str) {
        match &self.annotation {
            Some(annotation) if annotation.is_tex => self.tex.push_str(text),
            Some(_) => {}
            None => {
                let is_visible = |c: &char| !matches!(c, '\u{2061}'..='\u{2064}');
                let text: String = collapse(text).chars().filter(is_visible).collect();
                // Neighbours such as `sin` and `x` are two words.
                if self.text.ends_with(char::is_alphanumeric) && text.starts_with(char::is_alphanumeric) {
                    self.text.push(' ');
                }
                self.text.push_str(&text);
            }
        }
    }

    /// The whole formula.
    pub(super) fn finish(self) -> String {
        let tex = plain_tex(&self.tex);
        if tex.is_empty() { self.text } else { format!("${tex}$") }
    }
}

/// A formula in TeX without the style that MediaWiki gives it.
pub(super) fn plain_tex(tex: &str) -> &str {
    let tex = tex.trim();
    let inner = tex.strip_prefix("{\\displaystyle ").and_then(|tex| tex.strip_suffix('}'));
    inner.unwrap_or(tex).trim()
}

/// Whether the children of an element stand for themselves, each in parentheses where it has several signs.
fn has_operands(name: &str) -> bool {
    matches!(name, "msup" | "msub" | "msubsup" | "munder" | "mover" | "munderover" | "mfrac" | "mroot")
}

/// The text before the child of this number, from 1, of an element.
fn separator(name: &str, child: usize) -> &'static str {
    match (name, child) {
        ("msub" | "msubsup" | "munder" | "munderover", 2) => "_",
        ("msup" | "mover", 2) | ("msubsup" | "munderover", 3) => "^",
        ("mfrac", 2) => "/",
        ("mroot", 2) => "^(1/",
        ("mtable", 2..) => "; ",
        ("mtr", 2..) => ", ",
        _ => "",
    }
}
