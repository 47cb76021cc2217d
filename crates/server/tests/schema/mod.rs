//! A check of values against the schemas of an OpenAPI description, as far as the server's description uses them.

use serde_json::Value;

/// The faults of `value` under `schema`, each with its place. A property that the schema does not name is a fault.
pub(crate) fn faults(description: &Value, schema: &Value, value: &Value, place: &str) -> Vec<String> {
    let schema = resolved(description, schema);
    if let Some(choices) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
        let all = choices.iter().map(|choice| faults(description, choice, value, place));
        return all.min_by_key(Vec::len).unwrap_or_default();
    }
    if schema["enum"].as_array().is_some_and(|allowed| !allowed.contains(value)) {
        return vec![format!("{place}: {value} is none of {}", schema["enum"])];
    }
    if !has_type(&schema["type"], value) {
        return vec![format!("{place}: {value} is no {}", schema["type"])];
    }
    match value {
        Value::Array(items) => {
            let item =
                |(index, item)| faults(description, &schema["items"], item, &format!("{place}[{index}]"));
            items.iter().enumerate().flat_map(item).collect()
        }
        Value::Object(fields) => {
            let parts = parts(description, schema);
            // An object without properties is open.
            if parts.iter().all(|part| part["properties"].is_null()) {
                return Vec::new();
            }
            let mut found = Vec::new();
            for required in parts.iter().filter_map(|part| part["required"].as_array()).flatten() {
                let name = required.as_str().unwrap();
                if !fields.contains_key(name) {
                    found.push(format!("{place}.{name} is missing"));
                }
            }
            for (name, field) in fields {
                match parts.iter().find_map(|part| part["properties"].get(name)) {
                    Some(property) => {
                        found.extend(faults(description, property, field, &format!("{place}.{name}")));
                    }
                    None if parts.iter().any(|part| is_open(&part["additionalProperties"])) => {}
                    None => found.push(format!("{place}.{name} is not described")),
                }
            }
            found
        }
        _ => Vec::new(),
    }
}

fn resolved<'a>(description: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        None => schema,
        Some(reference) => {
            let target = description.pointer(reference.trim_start_matches('#'));
            resolved(description, target.unwrap_or_else(|| panic!("{reference} is not defined")))
        }
    }
}

/// Whether an object may have further properties, by its `additionalProperties`.
fn is_open(additional: &Value) -> bool {
    !additional.is_null() && *additional != false
}

/// The schemas that describe an object together.
fn parts<'a>(description: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    let schema = resolved(description, schema);
    let inner = schema["allOf"].as_array().into_iter().flatten();
    [schema].into_iter().chain(inner.flat_map(|part| parts(description, part))).collect()
}

fn has_type(of: &Value, value: &Value) -> bool {
    match of {
        Value::Null => true,
        Value::Array(types) => types.iter().any(|of| has_type(of, value)),
        of => match of.as_str().unwrap() {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("unknown type {other}"),
        },
    }
}
