//! Documents of a request, and the options that only this server has.

use std::collections::BTreeMap;

use refrain::engine::Document;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa::openapi::Ref;

use super::null::null_is_default;
use super::numbers::whole_number;
use super::objects::read_from_objects;
use crate::api_error::{ApiError, Result};

/// Most chunks that a search may find.
const MAX_SEARCH_LIMIT: usize = 64;

/// The documents to answer from.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "documents takes \"search\", or a list of {\"title\", \"text\"} and {\"id\", \"parts\"}, of which title and parts may be left out"
)]
pub(crate) enum Documents {
    /// `"search"`: the stored chunks that match the question best.
    Search(String),
    /// A list of documents.
    List(Vec<DocumentReference>),
}

impl Documents {
    /// Bytes of the documents that are given as texts.
    pub(crate) fn bytes(&self) -> usize {
        let Documents::List(list) = self else { return 0 };
        let bytes = |document: &DocumentReference| match document {
            DocumentReference::Text(document) => document.title.len() + document.text.len(),
            DocumentReference::Id { .. } => 0,
        };
        list.iter().map(bytes).sum()
    }
}

/// A document given by its text, or by the id of a stored one, which `parts` may narrow to some of its chunks.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum DocumentReference {
    // First, so that an object with both fields is read as a text: its id is the client's own.
    Text(DocumentText),
    Id {
        id: String,
        /// Indices of the chunks that are wanted, as an answer tells those of its documents; all of them without it, and for methods that
        /// need whole documents.
        #[serde(default)]
        parts: Option<Vec<u32>>,
    },
}

/// A document as a text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct DocumentText {
    #[serde(default, deserialize_with = "null_is_default")]
    pub(crate) title: String,
    #[schema(min_length = 1)]
    pub(crate) text: String,
}

read_from_objects!(DocumentText);

impl From<DocumentText> for Document {
    fn from(document: DocumentText) -> Document {
        Document { title: document.title, text: document.text }
    }
}

/// How the prompt is prefilled and its cache kept.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct RefrainOptions {
    #[serde(default)]
    #[schema(schema_with = fusion_method)]
    pub(crate) method: Option<Value>,
    #[serde(default)]
    #[schema(schema_with = eviction_policy)]
    pub(crate) evict: Option<Value>,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(crate) explain: Explain,
    /// Most chunks that a search finds. A method that needs whole documents gets those that the chunks belong to, as many as
    /// fit into the context.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = 1, maximum = 64, default = 5)]
    pub(crate) search: Option<usize>,
    /// Unknown fields, which are refused.
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, Value>,
}

/// Schema of a fusion method: its text, or an object with its name and options.
pub(in crate::api) fn fusion_method() -> Ref {
    Ref::from_schema_name("FusionMethod")
}

/// Schema of an eviction policy: its text, or an object with its name and options.
fn eviction_policy() -> Ref {
    Ref::from_schema_name("EvictionPolicy")
}

/// Whether the answer reports the question's attention: for the most attended tokens (`true`), or for every token of the
/// documents (`"tokens"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(untagged, expecting = "explain takes true, false or \"tokens\"")]
pub(crate) enum Explain {
    MostAttended(bool),
    Tokens(EveryToken),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
pub(crate) enum EveryToken {
    #[serde(rename = "tokens")]
    Tokens,
}

impl Default for Explain {
    fn default() -> Explain {
        Explain::MostAttended(false)
    }
}

impl Explain {
    pub(crate) fn is_wanted(self) -> bool {
        self != Explain::MostAttended(false)
    }
}

impl RefrainOptions {
    /// Refuses unknown fields, and a search for no chunk or too many. An option that is written beside its method would have no effect.
    pub(super) fn check(&self) -> Result<()> {
        if self.search.is_some_and(|limit| !(1..=MAX_SEARCH_LIMIT).contains(&limit)) {
            let message = format!("refrain.search is 1 to {MAX_SEARCH_LIMIT}");
            return Err(ApiError::field("refrain.search", message));
        }
        let Some(name) = self.unknown.keys().next() else { return Ok(()) };
        let message = format!(
            "refrain.{name} is not known: method, evict, explain, search; an option stands with its method, as in \
             {{\"method\": {{\"name\": \"a3\", \"ratio\": 0.2}}}}"
        );
        Err(ApiError::field(&format!("refrain.{name}"), message))
    }
}
