//! The form that a request wants its answer to have.

use std::collections::BTreeMap;

use refrain::engine::{StructuredOutput, with_closed_objects};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, OneOfBuilder, Schema, Type};

use super::objects::read_from_objects;
use crate::api_error::{ApiError, Result};

/// Schema of `logprobs`, which is read as any value so that a wrong one gets a clear error.
pub(super) fn logprobs_schema() -> Schema {
    let types = [Type::Boolean, Type::Integer].map(Object::with_type);
    types.into_iter().fold(OneOfBuilder::new(), OneOfBuilder::item).build().into()
}

/// Schema of a JSON schema that may be given as its text. The description takes the place of the field's comment, which `schema_with` drops.
fn schema_or_text() -> Schema {
    let types = [Type::Object, Type::String].map(Object::with_type);
    let either = types.into_iter().fold(OneOfBuilder::new(), OneOfBuilder::item);
    either.description(Some("A JSON schema, as an object or as its text.")).build().into()
}

/// The form that the answer is held to.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self", tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseFormat {
    /// Any text.
    Text,
    /// A JSON object, of a schema if there is one.
    JsonObject {
        /// The schema, where clients of llama.cpp put it.
        #[serde(default)]
        #[schema(value_type = Option<Object>)]
        schema: Option<Value>,
    },
    /// A JSON value of a schema.
    JsonSchema {
        #[serde(default)]
        json_schema: Option<NamedSchema>,
        /// In the place of `json_schema`, as llama.cpp takes it.
        #[serde(default)]
        #[schema(value_type = Option<Object>)]
        schema: Option<Value>,
    },
}

impl ResponseFormat {
    /// # Errors
    /// If there is no schema where one must be.
    pub(super) fn output(&self) -> Result<Option<StructuredOutput>> {
        let of_schema = |schema: &Option<Value>| match schema {
            Some(schema) => StructuredOutput::JsonSchema(schema.clone()),
            None => StructuredOutput::JsonObject,
        };
        match self {
            ResponseFormat::Text => Ok(None),
            ResponseFormat::JsonObject { schema } => Ok(Some(of_schema(schema))),
            ResponseFormat::JsonSchema { json_schema: Some(named), .. } if named.strict == Some(true) => {
                Ok(Some(of_schema(&named.schema.clone().map(with_closed_objects))))
            }
            ResponseFormat::JsonSchema { json_schema: Some(named), .. } => Ok(Some(of_schema(&named.schema))),
            ResponseFormat::JsonSchema { json_schema: None, schema: schema @ Some(_) } => {
                Ok(Some(of_schema(schema)))
            }
            ResponseFormat::JsonSchema { json_schema: None, schema: None } => {
                Err(ApiError::field("response_format", "a format of type json_schema has json_schema.schema"))
            }
        }
    }
}

/// A JSON schema with a name. The answer is always of the schema, `strict` or not.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct NamedSchema {
    /// Has no effect.
    #[serde(default, rename = "name")]
    _name: Option<String>,
    /// Whether objects that name their `properties`, and do not say whether there may be others, have no others.
    #[serde(default)]
    strict: Option<bool>,
    /// Has no effect.
    #[serde(default, rename = "description")]
    _description: Option<String>,
    #[serde(default)]
    #[schema(value_type = Object)]
    schema: Option<Value>,
}

read_from_objects!(ResponseFormat, NamedSchema);

impl NamedSchema {
    pub(in crate::api) fn of(schema: Value, strict: Option<bool>) -> NamedSchema {
        NamedSchema { _name: None, strict, _description: None, schema: Some(schema) }
    }
}

/// The form that the answer is held to, as vLLM takes it: one of these.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema, as an object or as its text.
    #[serde(default)]
    #[schema(schema_with = schema_or_text)]
    json: Option<Value>,
    /// Whether the answer is a JSON object.
    #[serde(default)]
    json_object: Option<bool>,
    /// A regular expression (syntax of the Rust crate `regex`) that matches the whole answer.
    #[serde(default)]
    regex: Option<String>,
    /// Texts, of which the answer is one.
    #[serde(default)]
    choice: Option<Vec<String>>,
    /// A grammar in llguidance's dialect of Lark.
    #[serde(default)]
    grammar: Option<String>,
    /// Unknown fields, which are refused unless their value asks for nothing: vLLM's clients may write every field of its class.
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, Value>,
}

impl StructuredOutputs {
    /// # Errors
    /// If several are given, a schema is no JSON, or a field is not known.
    pub(super) fn output(&self) -> Result<Option<StructuredOutput>> {
        let wrong = |message: String| ApiError::field("structured_outputs", message);
        let is_given = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        if let Some((name, _)) = self.unknown.iter().find(|(_, value)| is_given(value)) {
            let known = "json, json_object, regex, choice, grammar";
            return Err(wrong(format!("structured_outputs.{name} is not supported: {known}")));
        }
        let schema = match &self.json {
            Some(Value::String(text)) => Some(
                serde_json::from_str(text)
                    .map_err(|error| wrong(format!("structured_outputs.json is no JSON: {error}")))?,
            ),
            other => other.clone(),
        };
        let given = [
            schema.map(StructuredOutput::JsonSchema),
            self.json_object.filter(|wanted| *wanted).map(|_| StructuredOutput::JsonObject),
            self.regex.clone().map(StructuredOutput::Regex),
            self.choice.clone().map(StructuredOutput::Choice),
            self.grammar.clone().map(StructuredOutput::Lark),
        ];
        let mut given = given.into_iter().flatten();
        let first = given.next();
        match given.next() {
            Some(_) => Err(wrong(
                "structured_outputs takes one of json, json_object, regex, choice, grammar".to_owned(),
            )),
            None => Ok(first),
        }
    }
}
