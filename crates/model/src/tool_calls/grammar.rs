//! Grammars of calls in the Lark dialect of the crate `llguidance`.
//!
//! <https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>

use serde_json::{Map, Value as Json, json};

/// A tool as a grammar needs it.
#[derive(Debug, Clone)]
pub(super) struct Tool {
    pub(super) name: String,
    /// The JSON Schema of its arguments: of an object.
    pub(super) parameters: Json,
    /// The schema that `parameters` refers to, and its key in the `$defs` of the whole schema.
    definition: Option<(String, Json)>,
}

impl Tool {
    /// The tool `index` with the schema of its parameters. References in that schema are to its own root, which will
    /// be none in a grammar: such a schema is moved to `#/$defs/<index>`.
    pub(super) fn new(index: usize, name: &str, parameters: Option<&Json>) -> Tool {
        let mut schema = match parameters {
            Some(schema @ Json::Object(fields)) if !fields.is_empty() => schema.clone(),
            _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        };
        if let Some(fields) = schema.as_object_mut().filter(|fields| !fields.contains_key("type")) {
            fields.insert("type".to_owned(), json!("object"));
        }
        let (parameters, definition) = match redirect(&mut schema, index) {
            true => (json!({"$ref": format!("#/$defs/{index}")}), Some((index.to_string(), schema))),
            false => (schema, None),
        };
        Tool { name: name.to_owned(), parameters, definition }
    }
}

/// The rules of a grammar.
pub(super) struct Grammar<'a> {
    tools: Vec<Tool>,
    special: &'a dyn Fn(&str) -> Option<u32>,
    rules: Vec<String>,
}

impl<'a> Grammar<'a> {
    pub(super) fn new(tools: Vec<Tool>, special: &'a dyn Fn(&str) -> Option<u32>) -> Grammar<'a> {
        Grammar { tools, special, rules: Vec::new() }
    }

    pub(super) fn tools(&self) -> &[Tool] {
        &self.tools
    }

    pub(super) fn rule(&mut self, name: &str, body: &str) {
        self.rules.push(format!("{name}: {body}"));
    }

    /// A mark: the special token that it is in the vocabulary, or its text.
    pub(super) fn token(&self, text: &str) -> String {
        (self.special)(text).map_or_else(|| quoted(text), |id| format!("<[{id}]>"))
    }

    /// JSON of a schema, written as models were trained to: on one line, with a space behind each comma and colon.
    /// Keywords of JSON Schema that `llguidance` does not know are ignored.
    pub(super) fn json(&self, schema: &Json) -> String {
        let mut schema = schema.clone();
        let definitions: Map<String, Json> =
            self.tools.iter().filter_map(|tool| tool.definition.clone()).collect();
        if !definitions.is_empty() {
            schema["$defs"] = Json::Object(definitions);
        }
        schema["x-guidance"] = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", "lenient": true});
        format!("%json {schema}")
    }

    /// The grammar's text: the rule `start` first.
    pub(super) fn join(mut self) -> String {
        self.rules.reverse();
        self.rules.push(String::new());
        self.rules.join("\n")
    }
}

/// A text in the quotes of a grammar, whose escapes are those of JSON.
pub(super) fn quoted(text: &str) -> String {
    Json::from(text).to_string()
}

/// A call of one of the tools, with the arguments under `key`.
pub(super) fn alternatives(tools: &[Tool], key: &str) -> Json {
    let call = |tool: &Tool| {
        json!({
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: tool.parameters},
            "required": ["name", key],
            "additionalProperties": false,
        })
    };
    match tools {
        [tool] => call(tool),
        tools => json!({"anyOf": tools.iter().map(call).collect::<Vec<Json>>()}),
    }
}

/// A list of at least one call, and of one alone unless they may be `parallel`.
pub(super) fn list(call: Json, parallel: bool) -> Json {
    let mut list = json!({"type": "array", "items": call, "minItems": 1});
    if !parallel {
        list["maxItems"] = json!(1);
    }
    list
}

/// Leads references to the schema's root to `#/$defs/<index>`; whether there are any.
fn redirect(schema: &mut Json, index: usize) -> bool {
    match schema {
        Json::Object(fields) => {
            let field = |(key, value): (&String, &mut Json)| match value {
                Json::String(to) if key == "$ref" && to.starts_with('#') => {
                    *to = format!("#/$defs/{index}{}", &to[1..]);
                    true
                }
                value => redirect(value, index),
            };
            fields.iter_mut().map(field).filter(|found| *found).count() > 0
        }
        Json::Array(values) => {
            values.iter_mut().map(|value| redirect(value, index)).filter(|found| *found).count() > 0
        }
        _ => false,
    }
}
