//! Thoughts of a model that thinks before it answers, `<think>…</think>`, in its earlier answers and its next one.
//!
//! Templates of such models leave them out of turns before the user's last one. They find them in the text, where
//! [`ChatTemplate::split`](super::ChatTemplate::split) gives them a placeholder, so the thoughts are taken out of the text before.
//! In thoughts that stay, the marks around them are the template's text: the model wrote them as tokens of their own.

use super::message::Message;

/// The marks around thoughts.
pub const THOUGHT_MARKS: [&str; 2] = [BEGIN, END];
const BEGIN: &str = "<think>";
const END: &str = "</think>";
/// Thoughts and an answer by which a template is probed.
const THOUGHTS: &str = "probed thoughts";
const ANSWER: &str = "probed answer";

/// Whether the next answer begins with thoughts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Thinking {
    /// The answer has no thoughts, as far as the prompt tells.
    #[default]
    None,
    /// The model may begin thoughts.
    Optional,
    /// The prompt has begun thoughts, and the answer goes on with them.
    Begun,
}

impl Thinking {
    /// The beginning of an answer to a prompt that ends with `end`. A `free` template leaves thoughts to the model.
    pub(super) fn behind(end: &str, free: bool) -> Thinking {
        let end = end.trim_end();
        match (end.ends_with(BEGIN), end.ends_with(END)) {
            (true, _) => Thinking::Begun,
            (false, false) if free => Thinking::Optional,
            _ => Thinking::None,
        }
    }
}

/// An answer cut around the marks of its thoughts: white space before them, `<think>`, the thoughts, `</think>` and what is said behind it. A
/// mark that is not there is empty. A model writes either one once, whatever its thoughts and its answer quote.
pub(super) fn around_marks(answer: &str) -> [&str; 5] {
    let (before, rest) = answer.split_at(answer.len() - answer.trim_start().len());
    let (before, begin, rest) = match rest.strip_prefix(BEGIN) {
        Some(behind) => (before, BEGIN, behind),
        None => ("", "", answer),
    };
    match rest.split_once(END) {
        Some((thoughts, said)) => [before, begin, thoughts, END, said],
        None => [before, begin, rest, "", ""],
    }
}

/// The part of an answer with thoughts that a template writes where it stands before the user's last turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Thoughts {
    /// All of it.
    Kept,
    /// The text behind the thoughts, with the line breaks between them.
    Dropped,
    /// The text behind the thoughts and the line breaks after them.
    Trimmed,
}

impl Thoughts {
    /// Whether a turn is an answer with thoughts.
    pub(super) fn are_in(turn: &Message) -> bool {
        turn.role == "assistant" && turn.content.contains(END)
    }

    /// A conversation whose rendering shows which part a template writes.
    pub(super) fn probe() -> [Message; 3] {
        let answer = format!("<think>\n{THOUGHTS}\n{END}\n\n\n\n{ANSWER}");
        [("user", "q"), ("assistant", &*answer), ("user", "q")].map(|(role, text)| Message::text(role, text))
    }

    /// The part that a rendering of [`Thoughts::probe`] shows.
    pub(super) fn of(written: &str) -> Thoughts {
        match written.split_once(ANSWER) {
            Some((before, _)) if before.contains(THOUGHTS) => Thoughts::Kept,
            Some((before, _)) if before.ends_with("\n\n\n\n") => Thoughts::Dropped,
            Some(_) => Thoughts::Trimmed,
            None => Thoughts::Kept,
        }
    }

    /// This part of an answer.
    pub(super) fn written(self, answer: &str) -> &str {
        let said = answer.rsplit_once(END).map_or(answer, |(_, said)| said);
        match self {
            Thoughts::Kept => answer,
            Thoughts::Dropped => said,
            Thoughts::Trimmed => said.trim_start_matches('\n'),
        }
    }
}
