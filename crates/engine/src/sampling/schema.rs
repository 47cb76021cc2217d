//! JSON schemas before they become grammars: what says nothing of an answer is left out, and patterns that no grammar reads are found.

use llguidance::derivre::RegexBuilder;
use llguidance::regex_to_lark;
use serde_json::{Map, Value};

use super::limits::{check_expression, check_text};

/// The formats of strings that answers are held to.
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Keywords whose values are no schemas.
const DATA: [&str; 4] = ["const", "default", "enum", "examples"];

/// Keywords whose schemas hold beside the other keywords of an object.
const BESIDE: [&str; 4] = ["$ref", "anyOf", "oneOf", "properties"];

/// Keywords under which an object may have properties that `properties` does not name.
const FURTHER: [&str; 2] = ["additionalProperties", "patternProperties"];

/// Keywords whose values are schemas by name.
const NAMED: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// Leaves out keywords of null and formats that are not [`FORMATS`], which are annotations.
///
/// # Errors
/// If a pattern is too long or cannot be read; the error is its message.
pub(super) fn prepare(schema: &mut Value) -> Result<(), String> {
    each(schema, "", &mut |name, fields| {
        leave_out_nulls(fields);
        if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
            fields.remove("format");
        }
        let named = fields.get("patternProperties").and_then(Value::as_object);
        let named = named.into_iter().flat_map(Map::keys).map(String::as_str);
        let pattern = fields.get("pattern").and_then(Value::as_str);
        let patterns = pattern.into_iter().chain(named);
        for pattern in patterns {
            check_readable(pattern)
                .map_err(|reason| format!("the pattern of {name:?}: {reason}: {pattern:?}"))?;
        }
        Ok(())
    })
}

/// Leaves out of a schema that need not hold in full, as that of a tool's arguments, keywords of null and patterns that no grammar reads:
/// those with look-around or references, and those that are too long or have too many Unicode classes.
pub fn without_unreadable(mut schema: Value) -> Value {
    let is_within_limits = check_text(&schema.to_string()).is_ok();
    let is_kept = |pattern: &str| is_within_limits && check_readable(pattern).is_ok();
    let left_out = each(&mut schema, "", &mut |_, fields| {
        leave_out_nulls(fields);
        if fields.get("pattern").and_then(Value::as_str).is_some_and(|pattern| !is_kept(pattern)) {
            fields.remove("pattern");
        }
        if let Some(named) = fields.get_mut("patternProperties").and_then(Value::as_object_mut) {
            named.retain(|pattern, _| is_kept(pattern));
        }
        Ok(())
    });
    debug_assert!(left_out.is_ok(), "nothing is refused");
    schema
}

/// Closes the objects of a schema: one that names its `properties`, and does not say whether there may be others, has no others, as models take
/// it. A schema in which several parts describe one object together, each of them some of its properties, stays as it is.
pub fn with_closed_objects(mut schema: Value) -> Value {
    let mut composes = false;
    let seen = each(&mut schema, "", &mut |_, fields| {
        let all = fields.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
        composes |= all + BESIDE.iter().filter(|key| fields.contains_key(**key)).count() > 1;
        Ok(())
    });
    let closed = each(&mut schema, "", &mut |_, fields| {
        let is_said = FURTHER.iter().any(|key| fields.get(*key).is_some_and(|value| !value.is_null()));
        let Some(named) = fields.get("properties").and_then(Value::as_object) else { return Ok(()) };
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
        let are_named = required.filter_map(Value::as_str).all(|name| named.contains_key(name));
        if are_named && !is_said && !composes {
            fields.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        Ok(())
    });
    debug_assert!(seen.is_ok() && closed.is_ok(), "nothing is refused");
    schema
}

fn leave_out_nulls(fields: &mut Map<String, Value>) {
    fields.retain(|key, value| !value.is_null() || DATA.contains(&key.as_str()));
}

/// Whether a grammar can be made of a pattern, which is read as `llguidance` reads it; the error says why not.
fn check_readable(pattern: &str) -> Result<(), String> {
    check_expression(pattern)?;
    match RegexBuilder::new().mk_regex_for_serach(&regex_to_lark(pattern, "dw")) {
        Ok(_) => Ok(()),
        Err(_) => Err("it is no regular expression without look-around and references".to_owned()),
    }
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
    fn objects_are_closed_unless_they_say_otherwise_or_are_composed() {
        let point =
            json!({ "type": "object", "properties": { "x": { "type": "integer" } }, "required": ["x"] });
        let mut closed = point.clone();
        closed["additionalProperties"] = json!(false);
        for (given, expected) in [
            (json!({ "properties": {} }), json!({ "properties": {}, "additionalProperties": false })),
            (
                json!({ "$defs": { "P": point }, "anyOf": [{ "$ref": "#/$defs/P" }, { "type": "null" }] }),
                json!({ "$defs": { "P": closed }, "anyOf": [{ "$ref": "#/$defs/P" }, { "type": "null" }] }),
            ),
            (
                json!({ "type": "array", "items": { "allOf": [point] }, "default": [point] }),
                json!({ "type": "array", "items": { "allOf": [closed] }, "default": [point] }),
            ),
        ] {
            assert_eq!(with_closed_objects(given), expected);
        }
        for open in [
            json!({ "type": "object" }),
            json!({ "properties": {}, "additionalProperties": true }),
            json!({ "properties": {}, "patternProperties": { "^x_": {} } }),
            json!({ "properties": { "a": {} }, "required": ["b"] }),
            json!({ "allOf": [point, { "properties": { "y": {} } }] }),
            json!({ "properties": { "a": {} }, "anyOf": [{ "properties": { "b": {} } }] }),
            json!({ "enum": [point] }),
        ] {
            assert_eq!(with_closed_objects(open.clone()), open);
        }
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
        for long in ["a".repeat(8193), r"\w".repeat(1025)] {
            assert_eq!(without_unreadable(json!({ "pattern": long })), json!({}));
        }
    }
}
