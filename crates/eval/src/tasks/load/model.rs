//! The model that samples are made for.

use refrain::engine::Engine;
use refrain::model::{Specials, Tokenizer};

use crate::tasks::TokenText;
use crate::{Error, Result};

/// Tokens that a chat template may take.
pub(super) const TEMPLATE: usize = 128;

/// The properties of a model that samples depend on.
#[derive(Clone, Copy, Debug)]
pub struct TaskModel<'a> {
    /// The name that records have.
    pub name: &'a str,
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its context.
    pub context: usize,
    /// Tokens of a chunk.
    pub chunk_tokens: usize,
}

impl TokenText for TaskModel<'_> {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.tokenizer.encode(text, Specials::Plain);
        ids.map_err(|error| Error::Engine(error.into()))
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, true)
    }
}

impl<'a> TaskModel<'a> {
    /// An engine's model under the name that records have.
    pub fn of(name: &'a str, engine: &'a Engine) -> TaskModel<'a> {
        TaskModel {
            name,
            tokenizer: engine.tokenizer(),
            context: engine.decoder().config().context,
            chunk_tokens: engine.settings().chunk_tokens,
        }
    }

    pub(super) fn count(&self, text: &str) -> usize {
        self.encode(text).map_or(usize::MAX / 2, |ids| ids.len())
    }

    /// Tokens that a LongBench prompt is cut to: somewhat under the window, as the benchmark's own configurations have it, which leaves room
    /// for its answers of up to 512 tokens. Longer answers take room from the prompt, down to half of the context.
    pub(super) fn prompt_tokens(&self, max_tokens: Option<usize>) -> usize {
        let windows = [(32_768, 31_500), (16_384, 15_500), (8192, 7500), (4096, 3500)];
        let fits = windows.iter().find(|(window, _)| self.context >= *window);
        let beside = |answer: usize| self.context.saturating_sub(answer.saturating_add(TEMPLATE));
        let own = fits.map_or(beside(512), |(_, tokens)| *tokens);
        max_tokens.map_or(own, |most| own.min(beside(most).max(self.context / 2)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use refrain::model::ModelFiles;

    use super::*;

    #[test]
    fn long_answers_take_room_from_longbench_prompts() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let tokenizer = Tokenizer::open(&ModelFiles::open(path).unwrap()).unwrap();
        let tokens = |context, most| {
            TaskModel { name: "tiny", tokenizer: &tokenizer, context, chunk_tokens: 64 }.prompt_tokens(most)
        };
        assert_eq!((tokens(4096, None), tokens(4096, Some(64)), tokens(1000, None)), (3500, 3500, 360));
        assert_eq!((tokens(4096, Some(1000)), tokens(4096, Some(4000))), (2968, 2048));
    }
}
