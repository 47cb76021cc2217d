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
        // A tokenizer that normalises text gives a part back in other characters.
        let forms =
            |part: &str| -> Result<[String; 2]> { Ok([part.to_owned(), text.decode(&text.encode(part)?)]) };
        let after = |whole: &str, part: &str| -> Result<Option<String>> {
            Ok(forms(part)?.iter().find_map(|form| whole.strip_prefix(form.as_str()).map(str::to_owned)))
        };
        let (before, front) = match after(&head, &self.before)? {
            Some(front) => (self.before, front),
            None => (head, String::new()),
        };
        let whole_question = forms(&self.question)?.iter().find_map(|form| tail.strip_suffix(form.as_str()));
        if let Some(back) = whole_question {
            return Ok(Prompt { before, context: front + back, question: self.question });
        }
        // The beginning of a question of more than the second half may be in the first.
        Ok(match after(&front, &self.context)? {
            Some(begun) => Prompt { before, context: self.context, question: begun + &tail },
            None => Prompt { before, context: front, question: tail },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::testing::Words;

    /// Composes `é`, as a tokenizer with NFC does.
    struct Normalising(Words);

    impl TokenText for Normalising {
        fn encode(&self, text: &str) -> Result<Vec<u32>> {
            self.0.encode(&text.replace("e\u{301}", "\u{e9}"))
        }

        fn decode(&self, ids: &[u32]) -> String {
            self.0.decode(ids)
        }
    }

    #[test]
    fn parts_are_found_though_the_tokenizer_normalises_them() {
        let text = Normalising(Words::default());
        let context: String = (0..40).map(|i| format!(" w{i}")).collect();
        let prompt = Prompt::new("Cafe\u{301}:{context} Ou\u{300} est le {input} ?", &context, "cafe\u{301}");
        let cut = prompt.clone().without_middle(16, &text).unwrap();
        assert_eq!((&cut.before, &cut.question), (&prompt.before, &prompt.question));
        assert_eq!(cut.context, " w0 w1 w2 w3 w4 w5 w6 w37 w38 w39");
    }
}
