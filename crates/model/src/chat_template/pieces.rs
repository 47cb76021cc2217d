//! Pieces of a prompt by their authors.

use super::placeholder::unmarked;
use crate::tokenizer::Piece;

/// The author of a run of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Author {
    Template,
    /// A message of the user, the assistant or the system.
    User,
    /// A definition, a call or a result of a tool.
    Tool,
}

/// Runs of text, none of them empty.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    runs: Vec<(String, Author)>,
}

impl Pieces {
    /// Adds text of the template in which marked characters are a tool's.
    pub(super) fn push_marked(&mut self, text: &str) {
        for c in text.chars() {
            match unmarked(c) {
                Some(c) => self.push(c.encode_utf8(&mut [0; 4]), Author::Tool),
                None => self.push(c.encode_utf8(&mut [0; 4]), Author::Template),
            }
        }
    }

    /// Adds a user's text.
    pub(super) fn push_user(&mut self, text: &str, of_tool: bool) {
        self.push(text, if of_tool { Author::Tool } else { Author::User });
    }

    fn push(&mut self, text: &str, author: Author) {
        match self.runs.last_mut() {
            _ if text.is_empty() => {}
            Some((last, by)) if *by == author => last.push_str(text),
            _ => self.runs.push((text.to_owned(), author)),
        }
    }

    /// The pieces. Users' texts side by side are one piece, so that they are tokenised as one text.
    ///
    /// The template's text around a tool's in one JSON value, as in `{"name": "…"}`, goes to the tool's: a cut in the
    /// middle of JSON would give other tokens than models were trained on. Text that can be a special token is
    /// left to the template.
    pub(super) fn join(self) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut push = |text: &str, literal: bool| match pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if last.literal == literal => last.text.push_str(text),
            _ => pieces.push(Piece { text: text.to_owned(), literal }),
        };
        let is_tool = |index: Option<usize>| {
            index.and_then(|index| self.runs.get(index)).is_some_and(|(_, author)| *author == Author::Tool)
        };
        for (index, (text, author)) in self.runs.iter().enumerate() {
            if *author != Author::Template {
                push(text, false);
                continue;
            }
            let head = if is_tool(index.checked_sub(1)) { json_head(text) } else { 0 };
            let tail = if is_tool(Some(index + 1)) { json_tail(&text[head..]) } else { 0 };
            let end = text.len() - tail;
            push(&text[..head], false);
            push(&text[head..end], true);
            push(&text[end..], false);
        }
        pieces
    }
}

/// Whether a character can stand in JSON and in no special token but between `<` and `>` or `[` and `]`.
fn is_json(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, ' ' | '"' | ',' | ':' | '{' | '}' | '_' | '-' | '.' | '(' | ')')
}

/// The length of a text's beginning that ends the JSON before it, with the line breaks that follow.
fn json_head(text: &str) -> usize {
    let rest = text.trim_start_matches(|c| is_json(c) || c == ']').trim_start_matches('\n');
    text.len() - rest.len()
}

/// The length of a text's end that begins the JSON after it.
fn json_tail(text: &str) -> usize {
    text.len() - text.trim_end_matches(|c| is_json(c) || c == '[').len()
}
