//! Thoughts of a model that thinks before it answers, `<think>…</think>`, in its earlier answers.
//!
//! Templates of such models leave them out of turns before the user's last one. They find them in the text, where
//! [`ChatTemplate::split`](super::ChatTemplate::split) gives them a placeholder, so the thoughts are taken out of the text before.

use super::message::Message;

/// The end of thoughts.
const END: &str = "</think>";
/// Thoughts and an answer by which a template is probed.
const THOUGHTS: &str = "probed thoughts";
const ANSWER: &str = "probed answer";

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
