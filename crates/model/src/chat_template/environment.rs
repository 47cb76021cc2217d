//! The Jinja environment that chat templates expect: that of transformers.
//!
//! <https://github.com/huggingface/transformers/blob/main/src/transformers/utils/chat_template_utils.py>

use chrono::format::StrftimeItems;
use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;

use super::bounds::{FUEL, charge_json};
use super::placeholder::marked_json;

/// The name of the one template.
pub(super) const NAME: &str = "chat_template";

/// An environment with the template in it. Where `marks` is set, JSON is written with [marks](marked_json), so that a
/// rendered text can be cut at users' texts.
pub(super) fn environment(source: &str, marks: bool) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: String| strftime(&format, Utc::now()));
    let json = move |state: &State<'_, '_>, value: &Value, indent: Option<usize>| {
        charge_json(state, value)?;
        let json = to_json(value, indent)?;
        Ok(if marks { marked_json(&json) } else { json })
    };
    environment.add_filter("tojson", move |state: &State<'_, '_>, value: &Value, kwargs: Kwargs| {
        json(state, value, kwargs.get("indent")?)
    });
    environment.add_filter("string", move |state: &State<'_, '_>, value: &Value| match is_json(value) {
        true => json(state, value, None),
        false => Ok::<String, Error>(value.to_string()),
    });
    // As in Python, none is not iterable: templates ask so whether there are tools.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.set_formatter(move |out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| {
        match is_json(value) {
            true => out.write_str(&json(state, value, None)?).map_err(Error::from),
            false => escape_formatter(out, state, value),
        }
    });
    environment.add_template_owned(NAME, without_generation_blocks(source))?;
    Ok(environment)
}

/// The function that templates call to refuse a conversation.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// `{% generation %}` marks the answer for training; here it is a block that is always there.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inner = &tag[..end];
        let block = match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        let sign =
            |c: Option<char>| c.filter(|c| matches!(c, '-' | '+')).map(String::from).unwrap_or_default();
        let (open, close) = (sign(inner.chars().next()), sign(inner.chars().last()));
        out.push_str(&format!("{open} {block} {close}"));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// Whether a value is written as JSON where a template puts it as it is. Python would write its own notation there.
fn is_json(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Map | ValueKind::Seq)
}

/// `tojson` as Python writes it: `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: &Value, indent: Option<usize>) -> Result<String, Error> {
    let wrong = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let Some(indent) = indent else { return python_json(value).map_err(wrong) };
    let indent = " ".repeat(indent.min(16));
    let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
    let mut out = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(wrong)?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// JSON on one line as Python writes it; empty for a value that JSON cannot say.
pub(crate) fn json_text(value: &impl Serialize) -> String {
    python_json(value).unwrap_or_default()
}

fn python_json(value: &impl Serialize) -> serde_json::Result<String> {
    let mut out = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Python))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// JSON on one line, with spaces after commas and colons.
struct Python;

impl serde_json::ser::Formatter for Python {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

/// Python's `strftime` with English names.
fn strftime(format: &str, now: DateTime<Utc>) -> Result<String, Error> {
    let items = StrftimeItems::new(format).parse().map_err(|_| {
        let message = format!("strftime_now cannot write '{format}': a code in it is unknown");
        Error::new(ErrorKind::InvalidOperation, message)
    })?;
    Ok(now.format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_python_does() {
        let strftime =
            |format: &str, seconds| strftime(format, DateTime::from_timestamp(seconds, 0).unwrap());
        let format = "%d %b %Y|%A, %-d %B %y|%H:%M:%S|%I %p|%j|%F|%e|%%|%h %T|%Z %z";
        assert_eq!(
            strftime(format, 1_709_210_096).unwrap(),
            "29 Feb 2024|Thursday, 29 February 24|12:34:56|12 PM|060|2024-02-29|29|%|Feb 12:34:56|UTC +0000"
        );
        assert_eq!(strftime("%a %F %-I %p %e %-m %-j", 0).unwrap(), "Thu 1970-01-01 12 AM  1 1 1");
        assert!(strftime("%Q", 0).unwrap_err().to_string().contains("%Q"));
        assert!(strftime("%", 0).is_err() && strftime("%-", 0).is_err());
    }

    #[test]
    fn generation_blocks_are_always_there() {
        let source = "a{%- generation -%} b {% endgeneration %}{% if x %}{%generation%}{%endgeneration%}{% endif %}{% c";
        assert_eq!(
            without_generation_blocks(source),
            "a{%- if true -%} b {% endif %}{% if x %}{% if true %}{% endif %}{% endif %}{% c"
        );
    }
}
