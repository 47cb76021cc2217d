//! What a request may ask of the model: its tokens, and the room in its context.

use anyhow::Result;
use refrain::engine::{Engine, Error, Sampling};

use crate::output::Fail;

/// # Errors
/// If --logit-bias names a token that the model does not have.
pub(crate) fn check_biases(engine: &Engine, sampling: &Sampling) -> Result<()> {
    let vocab = engine.decoder().config().vocab;
    match sampling.logit_bias.keys().find(|token| **token as usize >= vocab) {
        Some(token) => {
            let message = format!("--logit-bias: the model has {vocab} tokens, and none of id {token}");
            Err(Fail::usage(message).into())
        }
        None => Ok(()),
    }
}

/// An error, with a hint where the prompt leaves too little of the context: `option` bounds the answer, and `shorter` makes a shorter prompt.
pub(crate) fn with_room(error: anyhow::Error, option: &str, shorter: &str) -> anyhow::Error {
    let Some(&Error::PromptTooLong { prompt, context, .. }) = error.downcast_ref() else {
        return error;
    };
    let hint = match context.saturating_sub(prompt) {
        0 => shorter.to_owned(),
        room => format!("{option} {room} at most; or {shorter}"),
    };
    Fail::new(error.to_string()).hint(hint).into()
}
