//! Checks of a request against the model: the tokens of its biases, and the room in the context.

use anyhow::Result;
use refrain::engine::{Engine, Error, Sampling};

use crate::output::Fail;

/// # Errors
/// If --logit-bias names a token that the model does not have.
pub(crate) fn check_biases(engine: &Engine, sampling: &Sampling) -> Result<()> {
    let checked = sampling.check_biases(engine.decoder().config().vocab);
    Ok(checked.map_err(|error| Fail::usage(format!("--logit-bias: {error}")))?)
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
