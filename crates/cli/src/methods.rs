//! Fusion methods and eviction policies as they are selected on the command line, and the list of them.

use std::sync::Arc;

use anyhow::Result;
use refrain::eviction::{Eviction, POLICIES};
use refrain::fusion::{FusionMethod, METHODS};
use refrain::registry::{Entry, Error, Registry, Selected, value_text};
use serde_json::Value;

use crate::args;
use crate::output::{Fail, broken, print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// A fusion method with its options.
pub(crate) type Method = Selected<Arc<dyn FusionMethod>>;
/// An eviction policy with its options.
pub(crate) type Policy = Selected<Eviction>;

/// The fusion method that a text selects.
pub(crate) fn method(text: &str) -> Result<Method> {
    select(&METHODS, text)
}

/// The fusion method that an option selects; `auto` is the model's choice.
pub(crate) fn asked(context: &Context, text: &str) -> Result<Method> {
    method(&context.method_text(text)?)
}

/// The eviction policy that a text selects.
pub(crate) fn policy(text: &str) -> Result<Policy> {
    select(&POLICIES, text)
}

/// The fusion methods that texts select.
pub(crate) fn methods<S: AsRef<str>>(texts: &[S]) -> Result<Vec<Method>> {
    texts.iter().map(|text| method(text.as_ref())).collect()
}

/// The eviction policies that texts select.
pub(crate) fn policies<S: AsRef<str>>(texts: &[S]) -> Result<Vec<Policy>> {
    texts.iter().map(|text| policy(text.as_ref())).collect()
}

fn select<T>(registry: &Registry<T>, text: &str) -> Result<Selected<T>> {
    registry
        .select(text)
        .map_err(|error| Fail::usage(error.to_string()).hint(hint(registry, text, &error)).into())
}

/// Advice on a text that selects nothing.
fn hint<T>(registry: &Registry<T>, text: &str, error: &Error) -> &'static str {
    match (error, text.split_once(',')) {
        (Error::UnknownOption { owner: "full", .. }, _) => {
            "choose an eviction policy, for example --evict morph_kv"
        }
        (_, Some((first, _))) if registry.entry(first).is_ok() => {
            "several are separated by `;`, as in 'pie;a3:ratio=0.2,smoothing=3'"
        }
        _ if text == "auto" => "auto is a choice of one command: name the methods, such as drift or pie",
        _ => "`refrain methods` shows methods and policies with their options",
    }
}

/// `refrain methods`
pub(crate) fn run(context: &Context, args: &args::Methods) -> Result<()> {
    if let Some(name) = &args.name {
        return match (METHODS.entry(name), POLICIES.entry(name)) {
            (Ok(entry), _) => show(context, entry, "fusion", "--method"),
            (_, Ok(entry)) => show(context, entry, "eviction", "--evict"),
            _ => {
                let known = [names(&METHODS), names(&POLICIES)].concat().join(", ");
                let message = format!("unknown method or policy `{name}`; known are: {known}");
                Err(Fail::usage(message).into())
            }
        };
    }
    if context.json {
        let methods = METHODS.entries.iter().map(|entry| as_json(entry, "fusion"));
        let policies = POLICIES.entries.iter().map(|entry| as_json(entry, "eviction"));
        return print_json(&methods.chain(policies).collect::<Vec<_>>());
    }
    let before = list("<fusion method (--method)", &METHODS);
    let after = list("<eviction policy (--evict)", &POLICIES);
    print(&format!(
        "{before}\n{after}\n`refrain methods NAME` shows a method's or policy's options and source.\n"
    ))
}

fn names<T>(registry: &Registry<T>) -> Vec<&'static str> {
    registry.entries.iter().map(|entry| entry.name).collect()
}

fn show<T>(context: &Context, entry: &Entry<T>, kind: &str, flag: &str) -> Result<()> {
    if context.json { print_json(&as_json(entry, kind)) } else { print(&in_full(entry, flag)) }
}

/// All methods of a registry, with their options at their defaults.
fn list<T>(heading: &'static str, registry: &Registry<T>) -> String {
    let mut table = Table::new(&[heading, "<what it does, and its options"]);
    for entry in registry.entries {
        table.push(vec![entry.name.to_owned(), entry.description.to_owned()]);
        let options = entry.options();
        let options = options.iter().map(|option| format!("{}={}", option.name, value_text(&option.default)));
        let options = options.collect::<Vec<_>>();
        if !options.is_empty() {
            table.push(vec![String::new(), options.join(" ")]);
        }
    }
    table.text()
}

/// A method with all that its options say of themselves.
fn in_full<T>(entry: &Entry<T>, flag: &str) -> String {
    let about = format!("{}: {}\n{}", entry.name, entry.description, entry.source);
    let mut text = format!("{}\n", broken(about.trim_end(), &std::io::stdout()));
    let options = entry.options();
    let Some(first) = options.first() else { return text + "\nIt has no options.\n" };
    let mut table = Table::new(&["<option", "<default", "<value", "<what it does"]);
    for option in &options {
        let (default, value) = (value_text(&option.default), option.value_type.to_string());
        table.push(vec![option.name.clone(), default, value, option.help.clone()]);
    }
    let example = format!("{}:{}={}", entry.name, first.name, value_text(&first.default));
    text.push_str(&format!("\n{}\nOptions stand after the name: {flag} {example}\n", table.text()));
    text
}

fn as_json<T>(entry: &Entry<T>, kind: &str) -> Value {
    let mut json = entry.to_json();
    json["kind"] = kind.into();
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_with_commas_is_told_how_methods_are_separated() {
        let hint = |text: &str| hint(&METHODS, text, &METHODS.select(text).unwrap_err());
        assert!(hint("pie,a3").contains("separated by `;`"));
        assert!(hint("a4").contains("refrain methods"));
        let methods = methods(&["pie", "a3:ratio=0.5", "cache-blend:ratio=0.15"]).unwrap();
        let specs: Vec<&str> = methods.iter().map(|method| method.spec.as_str()).collect();
        assert_eq!(specs, ["pie", "a3:ratio=0.5", "cache_blend"]);
    }
}
