//! A prompt in three parts, and its middle truncation.

use super::super::TokenText;
use crate::Result;

/// A template filled in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    /// Up to the context.
    pub(crate) before: String,
    pub(crate) context: String,
    /// All after it.
    pub(crate) question: String,
}

impl Prompt {
    /// The template's text with context and input at their places, whatever braces they have themselves.
    pub(crate) fn new(template: &str, context: &str, input: &str) -> Prompt {
        let (before, question) = template.split_once("{context}").unwrap_or((template, ""));
        let [before, question] = [before, question].map(|part| part.replace("{input}", input));
        Prompt { before, context: context.into(), question }
    }

    /// Cut to `tokens` tokens as LongBench does: of a longer prompt the first and the last half of that are decoded
    /// apart and joined. Where a cut falls outside the context, the rest of the instructions takes that side.
    ///
    /// LongBench's tokens begin with BOS: a first half here has one more token of text.
    pub(crate) fn without_middle(self, tokens: usize, text: &dyn TokenText) -> Result<Prompt> {
        let ids = text.encode(&[&*self.before, &self.context, &self.question].concat())?;
        if ids.len() <= tokens {
            return Ok(self);
        }
        let half = tokens / 2;
        let (head, tail) = (text.decode(&ids[..half]), text.decode(&ids[ids.len() - half..]));
        let (before, front) = match head.strip_prefix(&self.before) {
            Some(front) => (self.before, front),
            None => (head.clone(), ""),
        };
        let (back, question) = match tail.strip_suffix(&self.question) {
            Some(back) => (back, self.question),
            None => ("", tail.clone()),
        };
        // A question of more than the second half may have its beginning in the first.
        let (front, begun) = match front.strip_prefix(&self.context) {
            Some(begun) => (&*self.context, begun),
            None => (front, ""),
        };
        Ok(Prompt { before, context: format!("{front}{back}"), question: format!("{begun}{question}") })
    }
}
