//! A document.

use serde::{Deserialize, Serialize};

/// A document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Its title; may be empty.
    #[serde(default)]
    pub title: String,
    /// Its text; Markdown, where its file has structure.
    pub text: String,
}
