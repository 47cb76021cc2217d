//! JSON schemas before they become grammars: what says nothing of an answer is left out, and patterns that no grammar reads are found.

use llguidance::derivre::RegexBuilder;
use llguidance::regex_to_lark;
use serde_json::{Map, Value};

/// The formats of strings that answers are held to.
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Keywords whose values are no schemas.
const DATA: [&str; 4] = ["const", "default", "enum", "examples"];

/// Keywords whose values are schemas by name.
const NAMED: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// Leaves out keywords of null and formats that are not [`FORMATS`], which are annotations.
///
/// # Errors
/// If a pattern cannot be read; the error is its message.
pub(super) fn prepare(schema: &mut Value) -> Result<(), String> {
    each(schema, "", &mut |name, fields| {
        leave_out_nulls(fields);
        if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
            fields.remove("format");
        }
        let named = fields.get("patternProperties").and_then(Value::as_object);
        let named = named.into_iter().flat_map(Map::keys).map(String::as_str);
        let pattern = fields.get("pattern").and_then(Value::as_str);
        match pattern.into_iter().chain(named).find(|pattern| !is_readable(pattern)) {
            Some(pattern) => Err(format!(
                "the pattern {pattern:?} of {name:?} is no regular expression without look-around and references"
            )),
            None => Ok(()),
        }
    })
}

/// Leaves out of a schema that need not hold in full, as that of a tool's arguments, keywords of null and patterns that no grammar reads:
/// those with look-around or references.
pub fn without_unreadable(mut schema: Value) -> Value {
    let left_out = each(&mut schema, "", &mut |_, fields| {
        leave_out_nulls(fields);
        if fields.get("pattern").and_then(Value::as_str).is_some_and(|pattern| !is_readable(pattern)) {
            fields.remove("pattern");
        }
        if let Some(named) = fields.get_mut("patternProperties").and_then(Value::as_object_mut) {
            named.retain(|pattern, _| is_readable(pattern));
        }
        Ok(())
    });
    debug_assert!(left_out.is_ok(), "nothing is refused");
    schema
}

fn leave_out_nulls(fields: &mut Map<String, Value>) {
    fields.retain(|key, value| !value.is_null() || DATA.contains(&key.as_str()));
}

/// Whether a grammar can be made of a pattern, which is read as `llguidance` reads it.
fn is_readable(pattern: &str) -> bool {
    RegexBuilder::new().mk_regex_for_serach(&regex_to_lark(pattern, "dw")).is_ok()
}

/// A visitor of a schema and of the name that the schema stands under. Its error refuses the schema.
type Visit<'a> = dyn FnMut(&str, &mut Map<String, Value>) -> Result<(), String> + 'a;

/// Visits a schema and all schemas in it, each with the name that it stands under, until one is refused.
fn each(schema: &mut Value, name: &str, visit: &mut Visit<'_>) -> Result<(), String> {
    let fields = match schema {
        Value::Object(fields) => fields,
        Value::Array(schemas) => {
            return schemas.iter_mut().try_for_each(|schema| each(schema, name, &mut *visit));
        }
        _ => return Ok(()),
    };
    visit(name, fields)?;
    for (key, value) in fields {
        match value {
            _ if DATA.contains(&key.as_str()) => {}
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.iter_mut().try_for_each(|(name, schema)| each(schema, name, &mut *visit))?;
            }
            value => each(value, name, &mut *visit)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The pattern of pydantic's `Decimal`.
    const DECIMAL: &str = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$";

    fn prepared(mut schema: Value) -> Result<Value, String> {
        prepare(&mut schema).map(|()| schema)
    }

    #[test]
    fn what_says_nothing_of_an_answer_is_left_out() {
        let schema = json!({
            "type": "object", "required": null,
            "properties": {
                "format": { "type": "string", "format": "phone" },
                "pattern": { "anyOf": [{ "format": "date" }, { "format": "int32" }], "default": null },
                "kept": { "const": null, "examples": [{ "format": "phone" }] },
            },
        });
        let left = json!({
            "type": "object",
            "properties": {
                "format": { "type": "string" },
                "pattern": { "anyOf": [{ "format": "date" }, {}], "default": null },
                "kept": { "const": null, "examples": [{ "format": "phone" }] },
            },
        });
        assert_eq!(prepared(schema).unwrap(), left);
    }

    #[test]
    fn patterns_with_look_around_are_refused_by_name_or_left_out() {
        let item = json!({ "type": "string", "pattern": DECIMAL });
        let schema = json!({ "properties": {
            "price": { "anyOf": [{ "type": "number" }, item] }, "code": { "pattern": r"^\d{3}/[a-z]+$" },
        }});
        let error = prepared(schema.clone()).unwrap_err();
        assert!(error.contains("\"price\"") && error.contains("look-around"), "{error}");
        let left = without_unreadable(schema);
        assert_eq!(left["properties"]["price"]["anyOf"][1], json!({ "type": "string" }));
        assert_eq!(left["properties"]["code"]["pattern"], r"^\d{3}/[a-z]+$");
        let by_name = json!({ "patternProperties": { DECIMAL: {}, "^x_": { "required": null } } });
        assert!(prepared(by_name.clone()).is_err());
        assert_eq!(without_unreadable(by_name), json!({ "patternProperties": { "^x_": {} } }));
        assert_eq!(without_unreadable(json!({ "required": null })), json!({}));
    }
}
