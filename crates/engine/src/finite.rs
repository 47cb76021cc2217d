//! The check that a model's results are finite numbers.
//!
//! Weights that are damaged, or numbers beyond the range of their type, make NaNs and infinities, which spread to all tokens that see them. Keys
//! and values are checked before they are stored, and logits before a token is chosen from them.

use refrain_kernels::Slice;
use refrain_model::Decoder;

use crate::{Error, Result};

/// Values that are checked between two looks at the result, so that the check of each is a vector operation.
const BLOCK: usize = 1024;

/// Fails if one of the `values`, which are `what` of the model, is not finite.
pub(crate) fn check(decoder: &Decoder, what: &'static str, values: Slice<'_>) -> Result<()> {
    let finite = match values {
        Slice::F32(values) => all(values, |value| value.is_finite()),
        Slice::F16(values) => all(values, |value| value.is_finite()),
        Slice::Bf16(values) => all(values, |value| value.is_finite()),
    };
    if finite { Ok(()) } else { Err(Error::NotFinite { model: decoder.path().to_owned(), what }) }
}

fn all<T>(values: &[T], is_finite: impl Fn(&T) -> bool) -> bool {
    values.chunks(BLOCK).all(|block| block.iter().fold(true, |all, value| all & is_finite(value)))
}
