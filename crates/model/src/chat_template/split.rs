//! A prompt in pieces: `S ‖ documents ‖ Q`.

use super::placeholder::{CLOSE, OPEN, PAD, index_of, is_placeholder, placeholder};
use super::{ChatTemplate, Message};
use crate::error::{Result, template_error};
use crate::tokenizer::Piece;

/// A prompt without its documents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptParts {
    /// The pieces before the documents.
    pub system: Vec<Piece>,
    /// The pieces after the documents, with the beginning of the answer's turn.
    pub question: Vec<Piece>,
}

/// The texts of a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// The system message; none leaves it to the template, which may have one of its own.
    pub system: Option<String>,
    /// The user's turn before the documents.
    pub before_documents: String,
    /// The user's turn after the documents.
    pub question: String,
    /// Earlier turns, before the user's.
    pub history: Vec<Message>,
}

/// A user's text in place of a placeholder. The user's last turn has two, around the documents.
#[derive(Debug)]
enum Slot {
    Text(String),
    Documents { before: String, question: String },
}

/// A part of a rendered template.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    Literal(&'a str),
    Slot { index: usize, trims_start: bool, trims_end: bool },
}

impl ChatTemplate {
    /// The prompt around the documents, in pieces that know who wrote them.
    ///
    /// The system message goes into the user's first turn if the template refuses or ignores a system role. White space
    /// that the template trims from messages is trimmed.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`](crate::ModelError::ChatTemplate) if the template refuses the conversation, leaves
    /// out or repeats a message, or writes it otherwise than it is.
    pub fn split(&self, layout: &Layout) -> Result<PromptParts> {
        if let Some(turn) = layout.history.iter().find(|turn| !is_role(&turn.role)) {
            return Err(template_error(format!("cannot write a message of the role {:?}", turn.role)));
        }
        let Some(system) = &layout.system else { return self.try_split(&slots(layout, None)) };
        let mut apart = slots(layout, None);
        apart.insert(0, ("system".to_owned(), Slot::Text(system.clone())));
        self.try_split(&apart)
            .or_else(|error| self.try_split(&slots(layout, Some(system))).map_err(|_| error))
    }

    fn try_split(&self, slots: &[(String, Slot)]) -> Result<PromptParts> {
        let message = |(index, (role, _)): (usize, &(String, Slot))| Message {
            role: role.clone(),
            content: format!("{PAD}{}{PAD}", placeholder(index)),
        };
        let messages: Vec<Message> = slots.iter().enumerate().map(message).collect();
        let rendered = self.render(&messages, true)?;
        let parts = parts(&rendered).ok_or_else(|| {
            template_error(
                "changes the text of messages, so that a prompt cannot be made of parts".to_owned(),
            )
        })?;
        for (index, (role, _)) in slots.iter().enumerate() {
            let is_it = |part: &&Part<'_>| matches!(part, Part::Slot { index: i, .. } if *i == index);
            let times = parts.iter().filter(is_it).count();
            if times != 1 {
                let number = index + 1;
                return Err(template_error(format!(
                    "writes message {number} ({role}) {times} times, not once"
                )));
            }
        }
        Ok(assemble(&parts, slots))
    }
}

/// Whether a role can stand in a template's own text: a word, and no special token.
fn is_role(role: &str) -> bool {
    (1..=32).contains(&role.len())
        && role.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
}

/// The turns with their texts. `system` is said at the beginning of the user's first turn.
fn slots(layout: &Layout, system: Option<&str>) -> Vec<(String, Slot)> {
    let mut system = system.filter(|system| !system.trim().is_empty());
    let mut with_system = |role: &str, text: &str| match system.take_if(|_| role == "user") {
        Some(said) => format!("{said}\n\n{text}"),
        None => text.to_owned(),
    };
    let mut slots: Vec<(String, Slot)> = Vec::new();
    for turn in &layout.history {
        slots.push((turn.role.clone(), Slot::Text(with_system(&turn.role, &turn.content))));
    }
    let before = with_system("user", &layout.before_documents);
    slots.push(("user".to_owned(), Slot::Documents { before, question: layout.question.clone() }));
    slots
}

/// Cuts a rendered text at its placeholders; `None` if one is mutilated.
fn parts(rendered: &str) -> Option<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    let mut rest = rendered;
    while let Some((before, behind)) = rest.split_once(OPEN) {
        let (digits, after) = behind.split_once(CLOSE)?;
        let (left, right) = (before.strip_suffix(PAD), after.strip_prefix(PAD));
        parts.push(Part::Literal(left.unwrap_or(before)));
        parts.push(Part::Slot {
            index: index_of(digits)?,
            trims_start: left.is_none(),
            trims_end: right.is_none(),
        });
        rest = right.unwrap_or(after);
    }
    parts.push(Part::Literal(rest));
    let is_clean = |part: &Part<'_>| !matches!(part, Part::Literal(text) if text.contains(is_placeholder));
    parts.iter().all(is_clean).then_some(parts)
}

/// Puts the texts in the place of their placeholders.
fn assemble(parts: &[Part<'_>], slots: &[(String, Slot)]) -> PromptParts {
    let (mut before_documents, mut current) = (Vec::new(), Vec::new());
    for part in parts {
        match *part {
            Part::Literal(text) => push(&mut current, text, true),
            Part::Slot { index, trims_start, trims_end } => match &slots[index].1 {
                Slot::Text(text) => push(&mut current, trim(text, trims_start, trims_end), false),
                Slot::Documents { before, question } => {
                    push(&mut current, trim(before, trims_start, false), false);
                    before_documents = std::mem::take(&mut current);
                    push(&mut current, trim(question, false, trims_end), false);
                }
            },
        }
    }
    PromptParts { system: before_documents, question: current }
}

fn trim(text: &str, start: bool, end: bool) -> &str {
    let text = if start { text.trim_start() } else { text };
    if end { text.trim_end() } else { text }
}

/// Adds a text to the last piece if both have one author, so that one text is tokenised as one.
fn push(pieces: &mut Vec<Piece>, text: &str, literal: bool) {
    match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(last) if last.literal == literal => last.text.push_str(text),
        _ => pieces.push(Piece { text: text.to_owned(), literal }),
    }
}
