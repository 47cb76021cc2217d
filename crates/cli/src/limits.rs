//! Checks of a request: its sampling, its form, the tokens of its biases, and the room in the context.

use anyhow::Result;
use refrain::engine::{Engine, Error, Grammar, Sampling, StructuredOutput};

use crate::output::Fail;

/// # Errors
/// If an option of the sampling is out of its range.
pub(crate) fn check_sampling(sampling: &Sampling) -> Result<()> {
    let named = |error: Error| match error {
        Error::Sampling { option, value, expected } => {
            format!("--{} {value} is out of range; choose {expected}", option.replace('_', "-"))
        }
        error => error.to_string(),
    };
    Ok(sampling.check().map_err(|error| Fail::usage(named(error)))?)
}

/// The grammar of the form that the answer is held to.
///
/// # Errors
/// If the form is wrong.
pub(crate) fn grammar(engine: &Engine, form: Option<&StructuredOutput>) -> Result<Option<Grammar>> {
    let made = form.map(|form| engine.grammar(form)).transpose();
    Ok(made.map_err(|error| Fail::usage(error.to_string()))?)
}

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
