//! The fields of a call's object.

use serde_json::{Map, Value as Json};

use super::scanner::ObjectScanner;

/// The key of the tool's name.
pub(super) const NAME: &str = "name";
/// The keys of the arguments.
pub(super) const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// The name in an object's text, if it is read; empty if it is no string.
pub(super) fn name(scanner: &ObjectScanner, text: &str) -> Option<String> {
    let mut fields = scanner.fields.iter().rev();
    let (_, value) = fields.find(|(key, _)| string(&text[key.clone()]).as_deref() == Some(NAME))?;
    Some(string(&text[value.clone()]).unwrap_or_default())
}

/// Name and arguments of a call of one of the tools `names`, in the whole text of its object.
pub(super) fn call(scanner: &ObjectScanner, text: &str, names: &[String]) -> Option<(String, String)> {
    serde_json::from_str::<Map<String, Json>>(text).ok()?;
    let name = name(scanner, text).filter(|name| names.contains(name))?;
    let is_arguments = |key: &str| string(key).is_some_and(|key| ARGUMENTS.contains(&key.as_str()));
    let (_, value) = scanner.fields.iter().find(|(key, _)| is_arguments(&text[key.clone()]))?;
    let value = &text[value.clone()];
    // Some models write the arguments' JSON as a string.
    let arguments = string(value).unwrap_or_else(|| value.to_owned());
    serde_json::from_str::<Map<String, Json>>(&arguments).ok()?;
    Some((name, arguments))
}

/// The string that a JSON text is.
pub(super) fn string(json: &str) -> Option<String> {
    serde_json::from_str(json).ok()
}
