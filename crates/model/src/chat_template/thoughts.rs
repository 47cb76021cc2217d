//! Thoughts of a model, `<think>…</think>`, in its earlier answers.
//!
//! Templates of models that think leave thoughts out of answers before the user's last turn: they look for `</think>` in
//! the text. [`ChatTemplate::split`] gives templates placeholders in place of texts, so it takes the thoughts out first.

use std::borrow::Cow;

use super::{ChatTemplate, Layout, Message};

/// The end of thoughts.
const END: &str = "</think>";

/// What a template writes of an answer with thoughts before the user's last turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Thoughts {
    /// All of it.
    Kept,
    /// The text behind the thoughts, with the line breaks between them.
    Dropped,
    /// The text behind the thoughts and the line breaks after them.
    Trimmed,
}

impl ChatTemplate {
    /// The conversation without the thoughts that the template leaves out of answers before the user's last turn.
    pub(super) fn without_thoughts<'a>(&self, layout: &'a Layout) -> Cow<'a, Layout> {
        let is_answer = |turn: &Message| turn.role == "assistant" && turn.content.contains(END);
        let earlier = layout.after.iter().rposition(|turn| turn.role == "user").unwrap_or(0);
        if !layout.history.iter().chain(&layout.after[..earlier]).any(is_answer) {
            return Cow::Borrowed(layout);
        }
        let thoughts = self.thoughts();
        if thoughts == Thoughts::Kept {
            return Cow::Borrowed(layout);
        }
        let mut layout = layout.clone();
        let answers = layout.history.iter_mut().chain(&mut layout.after[..earlier]);
        for turn in answers.filter(|turn| is_answer(turn)) {
            let said = turn.content.rsplit_once(END).map_or("", |(_, said)| said);
            let trims = thoughts == Thoughts::Trimmed;
            turn.content = if trims { said.trim_start_matches('\n') } else { said }.to_owned();
        }
        Cow::Owned(layout)
    }

    /// What the template writes of an earlier answer with thoughts, found by rendering one.
    fn thoughts(&self) -> Thoughts {
        if let Some(known) = self.thoughts.get() {
            return *known;
        }
        let answer = "<think>\nprobed thoughts\n</think>\n\n\n\nprobed answer";
        let messages = [("user", "q"), ("assistant", answer), ("user", "q")];
        let messages = messages.map(|(role, text)| Message::text(role, text));
        // A failure is not kept: the system may have had no thread for the rendering.
        let Ok(written) = self.render(&messages, &[], true) else { return Thoughts::Kept };
        let thoughts = match written.split_once("probed answer") {
            Some((before, _)) if before.contains("probed thoughts") => Thoughts::Kept,
            Some((before, _)) if before.ends_with("\n\n\n\n") => Thoughts::Dropped,
            Some(_) => Thoughts::Trimmed,
            None => Thoughts::Kept,
        };
        *self.thoughts.get_or_init(|| thoughts)
    }
}
