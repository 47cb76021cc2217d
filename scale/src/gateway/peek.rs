//! What the gateway reads of a request's body. Workers read the rest.

use std::collections::BTreeMap;

use axum::http::HeaderValue;
use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

/// The fields of a request for an answer that the gateway looks at. The parser skips all others.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Peek {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    documents: Option<IgnoredAny>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    temperature: Option<f64>,
    #[serde(default)]
    seed: Option<Value>,
}

impl Peek {
    /// Reads a body. One that is wrong asks for nothing here: its worker says what is wrong with it.
    pub(super) fn of(body: &[u8]) -> Peek {
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// Name of the model that is to answer.
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether the prompt has chunks beside its system part.
    pub(super) fn has_documents(&self) -> bool {
        self.documents.is_some()
    }

    /// Whether the answer comes as a stream.
    pub(super) fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// The body of a request whose answer follows from it. A worker draws a seed for a request that samples without one, and another
    /// worker would draw another: such a request is given its seed here. None if the body is no object.
    pub(super) fn seeded(&self, body: &Bytes, draw: impl FnOnce() -> u32) -> Option<Bytes> {
        // -1 has a worker draw a seed as well.
        let is_given = self.seed.as_ref().is_some_and(|seed| seed.as_i64() != Some(-1));
        if is_given || self.temperature.is_none_or(|temperature| temperature <= 0.0) {
            return Some(body.clone());
        }
        let mut fields: BTreeMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
        let seed = serde_json::value::to_raw_value(&draw()).ok()?;
        fields.insert("seed".to_owned(), &seed);
        serde_json::to_vec(&fields).ok().map(Bytes::from)
    }
}

/// The number of a chat: of the tenant, and of the messages up to the first one of a user, which all turns share. None if the body is no
/// chat.
pub(super) fn chat(body: &[u8], tenant: &HeaderValue) -> Option<u64> {
    #[derive(Deserialize)]
    struct Chat<'a> {
        #[serde(borrow)]
        messages: Vec<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Message {
        role: String,
    }
    let Chat { messages } = serde_json::from_slice(body).ok()?;
    let role = |message: &RawValue| serde_json::from_str(message.get()).map(|Message { role }| role);
    let first = messages.iter().position(|message| role(message).is_ok_and(|role| role == "user"))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(tenant.as_bytes());
    messages[..=first].iter().for_each(|message| _ = hasher.update(message.get().as_bytes()));
    let mut number = [0; 8];
    hasher.finalize_xof().fill(&mut number);
    Some(u64::from_le_bytes(number))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_and_streams_are_seen() {
        for (body, documents, streams) in [
            (r#"{"documents": [{"id": "a"}], "stream": true}"#, true, true),
            (r#"{"messages": [], "documents": "search", "stream": false}"#, true, false),
            (r#"{"documents": null, "stream": null}"#, false, false),
            (r#"{"messages": [{"documents": [], "stream": true}]}"#, false, false),
            ("no JSON", false, false),
        ] {
            let peek = Peek::of(body.as_bytes());
            assert_eq!((peek.has_documents(), peek.streams()), (documents, streams), "{body}");
        }
    }

    #[test]
    fn a_seed_is_drawn_for_requests_that_sample_without_one() {
        for (body, wanted) in [
            (r#"{"temperature": 0.5, "a": [1, {"b": 0.10}]}"#, Some(7)),
            (r#"{"seed": null, "temperature": 1}"#, Some(7)),
            (r#"{"seed": -1, "temperature": 1}"#, Some(7)),
            (r#"{"seed": 3, "temperature": 1}"#, Some(3)),
            (r#"{"temperature": 0}"#, None),
            ("{}", None),
        ] {
            let body = Bytes::from_static(body.as_bytes());
            let seeded = Peek::of(&body).seeded(&body, || 7).unwrap();
            let (mut before, mut after): (Value, Value) =
                (serde_json::from_slice(&body).unwrap(), serde_json::from_slice(&seeded).unwrap());
            assert_eq!(after.get("seed").cloned(), wanted.map(|seed| json!(seed)), "{after}");
            for value in [&mut before, &mut after] {
                value.as_object_mut().unwrap().remove("seed");
            }
            assert_eq!(before, after, "nothing else changes");
        }
    }
}
