//! Fields that clients write as `null` where they have nothing to say.

use serde::{Deserialize, Deserializer};

/// Reads `null` as the default.
pub(in crate::api) fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}
