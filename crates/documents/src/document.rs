//! A document.

use serde::{Deserialize, Deserializer, Serialize};

/// A document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Its title; may be empty. In JSON it may be null as well.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub title: String,
    /// Its text; Markdown, where its file has structure.
    pub text: String,
}

fn null_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
