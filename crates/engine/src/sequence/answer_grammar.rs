//! The grammar of an answer, which holds for the text behind the answer's thoughts.
//!
//! A model that thinks writes `<think>…</think>` before it answers, in words that no grammar knows. Until the token that ends `</think>`, every
//! token may come but those that end the answer: an answer that ends by itself has its form.

use refrain_model::{THOUGHT_MARKS, Thinking};

use crate::Result;
use crate::engine::Engine;
use crate::sampling::{Grammar, ban};

/// A grammar and the place of the answer before or in it.
#[derive(Debug)]
pub(super) struct AnswerGrammar {
    grammar: Grammar,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Nothing is written yet. The token begins thoughts, any other one the text of the grammar.
    Start { thoughts: u32 },
    /// Within thoughts, whose last bytes these are: fewer than `</think>` has.
    Thoughts(Vec<u8>),
    /// Behind thoughts, or there are none.
    Text,
}

impl AnswerGrammar {
    /// The grammar of an answer that begins in this way. Where `<think>` is no token of the model, the answer has no thoughts.
    pub(super) fn new(grammar: Grammar, thinking: Thinking, engine: &Engine) -> AnswerGrammar {
        let stage = match thinking {
            Thinking::None => Stage::Text,
            Thinking::Begun => Stage::Thoughts(Vec::new()),
            Thinking::Optional => {
                let token = engine.tokenizer().token_id(THOUGHT_MARKS[0]);
                token.map_or(Stage::Text, |thoughts| Stage::Start { thoughts })
            }
        };
        AnswerGrammar { grammar, stage }
    }

    /// Lowers the logits of all tokens that may not come next to minus infinity.
    ///
    /// # Errors
    /// As for [`Grammar::mask`].
    pub(super) fn mask(&mut self, logits: &mut [f32], engine: &Engine) -> Result<()> {
        match self.stage {
            Stage::Text => self.grammar.mask(logits),
            Stage::Thoughts(_) => {
                ban(logits, engine.ends());
                Ok(())
            }
            Stage::Start { thoughts } => {
                let likely = logits.get(thoughts as usize).copied();
                self.grammar.mask(logits)?;
                match (likely, logits.get_mut(thoughts as usize)) {
                    (Some(likely), Some(logit)) if *logit == f32::NEG_INFINITY => *logit = likely,
                    // Thoughts are a part of the grammar, or the model has no embedding of their mark.
                    _ => self.stage = Stage::Text,
                }
                Ok(())
            }
        }
    }

    /// Takes note of a token that [`AnswerGrammar::mask`] allowed.
    ///
    /// # Errors
    /// As for [`Grammar::push`].
    pub(super) fn push(&mut self, token: u32, engine: &Engine) -> Result<()> {
        match &mut self.stage {
            Stage::Start { thoughts } if *thoughts == token => self.stage = Stage::Thoughts(Vec::new()),
            Stage::Thoughts(last) => {
                let end = THOUGHT_MARKS[1].as_bytes();
                last.extend(engine.tokenizer().bytes_of(token));
                if last.windows(end.len()).any(|bytes| bytes == end) {
                    self.stage = Stage::Text;
                } else {
                    last.drain(..last.len().saturating_sub(end.len() - 1));
                }
            }
            Stage::Start { .. } | Stage::Text => {
                self.stage = Stage::Text;
                self.grammar.push(token)?;
            }
        }
        Ok(())
    }

    /// Whether nothing but an end token may come next.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self.stage, Stage::Text) && self.grammar.is_complete()
    }
}
