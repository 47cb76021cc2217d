//! Types that are read from JSON objects alone. Derived implementations read lists too, by the order of a type's fields.

use serde::de::{Deserializer, Visitor};
use serde::forward_to_deserialize_any;

/// Reads an object, whatever type asks for one.
pub(in crate::api) struct ObjectDeserializer<D>(pub(in crate::api) D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for ObjectDeserializer<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// Implements `Deserialize` for types of this module that derive it with `#[serde(remote = "Self")]`.
macro_rules! read_from_objects {
    ($($of:ty),+) => {$(
        impl<'de> serde::Deserialize<'de> for $of {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<$of, D::Error> {
                <$of>::deserialize($crate::api::request::ObjectDeserializer(from))
            }
        }
    )+};
}

/// Implements `Serialize` for types of this module that derive it with `#[serde(remote = "Self")]`.
macro_rules! write_as_derived {
    ($($of:ty),+) => {$(
        impl serde::Serialize for $of {
            fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
                <$of>::serialize(self, to)
            }
        }
    )+};
}

pub(in crate::api) use read_from_objects;
pub(in crate::api) use write_as_derived;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::api::request::CompletionRequest;

    #[test]
    fn lists_are_no_objects() {
        for body in [
            json!([]),
            json!({ "messages": [["user", "hi"]] }),
            json!({ "messages": [{ "role": "user", "content": [["text", "hi"]] }] }),
            json!({ "messages": [{ "role": "assistant", "tool_calls": [["a", "function", { "name": "f" }]] }] }),
            json!({ "messages": [{ "role": "assistant", "tool_calls": [{ "function": ["f"] }] }] }),
            json!({ "documents": [["a title", "a text"]] }),
            json!({ "stream_options": [true] }),
            json!({ "tools": [["function", { "name": "f" }]] }),
            json!({ "tools": [{ "type": "function", "function": ["f"] }] }),
            json!({ "response_format": ["text"] }),
            json!({ "response_format": { "type": "json_schema", "json_schema": ["x", true, "", {}] } }),
        ] {
            // Values are read by another deserializer than texts.
            let from_text = serde_json::from_str::<CompletionRequest>(&body.to_string());
            let from_value = serde_json::from_value::<CompletionRequest>(body.clone());
            assert!(from_text.is_err() && from_value.is_err(), "{body}");
        }
        let null = json!({ "stream_options": Value::Null, "response_format": Value::Null });
        assert!(serde_json::from_value::<CompletionRequest>(null).is_ok());
    }
}
