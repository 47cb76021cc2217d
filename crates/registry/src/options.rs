//! Options of a method: a struct whose fields, doc comments and declared ranges are the options, their help and their
//! limits.

use std::fmt;

use schemars::{JsonSchema, generate::SchemaSettings};
use serde::de::{DeserializeOwned, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// The largest value of an option that counts tokens, blocks or layers, for `#[schemars(range(max = …))]`.
pub const MAX_COUNT: usize = 1 << 20;

/// A struct of options. Each field is one option: a boolean, a number, or an enum of unit variants.
///
/// The struct derives `Serialize`, `Deserialize` with `#[serde(default, deny_unknown_fields)]`, and `JsonSchema`. The doc
/// comment of a field is the option's help, `#[schemars(range(…))]` its range, and [`Default`] its default.
pub trait Options: Default + Serialize + DeserializeOwned + JsonSchema {
    /// The name of the method in its registry and in errors.
    const NAME: &'static str;

    /// Checks what ranges of single fields cannot say.
    ///
    /// # Errors
    /// If a value does not fit, or two of them contradict one another.
    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

/// The type and range of an option's value.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionType {
    /// `true` or `false`; in text the option's name alone means `true`.
    Boolean,
    /// A whole number.
    Integer {
        /// The smallest value.
        min: u64,
        /// The largest value.
        max: u64,
    },
    /// A number.
    Number {
        /// The smallest value.
        min: f64,
        /// The largest value.
        max: f64,
    },
    /// One of these words.
    Choice(Vec<String>),
}

/// One option, as its struct declares it.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionSpec {
    /// The name, as in `a3:ratio=0.2`.
    pub name: String,
    /// The option's effect.
    pub help: String,
    /// Type and range of the value.
    pub value_type: OptionType,
    /// The value of an option that is not given.
    pub default: Value,
}

impl OptionSpec {
    /// The option as a property of a JSON schema: description, type with its bounds, default.
    pub fn schema(&self) -> Value {
        let mut schema = match &self.value_type {
            OptionType::Boolean => json!({ "type": "boolean" }),
            OptionType::Integer { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
            OptionType::Number { min, max } => json!({ "type": "number", "minimum": min, "maximum": max }),
            OptionType::Choice(words) => json!({ "type": "string", "enum": words }),
        };
        schema["description"] = json!(self.help);
        schema["default"] = self.default.clone();
        schema
    }
}

/// The options of a struct, in the order of its fields.
///
/// # Panics
/// If a field is neither a boolean, a bounded number nor an enum of unit variants.
pub fn option_specs<O: Options>() -> Vec<OptionSpec> {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<O>();
    let defaults = serde_json::to_value(O::default()).unwrap_or_default();
    let spec = |name: String| {
        let property = &schema.as_value()["properties"][&name];
        let value_type = OptionType::of(property)
            .unwrap_or_else(|| panic!("option `{name}` of `{}` has no type that text can give", O::NAME));
        let help = property["description"].as_str().unwrap_or_default();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        OptionSpec { help, value_type, default: defaults[&name].clone(), name }
    };
    field_names::<O>().into_iter().map(spec).collect()
}

/// The struct of checked values; values of other structs' options are left out.
///
/// # Errors
/// If the struct does not take a value, or [`Options::validate`] refuses them.
pub fn read_options<O: Options>(values: &Map<String, Value>) -> Result<O> {
    let names = field_names::<O>();
    let own = values.iter().filter(|(name, _)| names.contains(name));
    let own: Map<String, Value> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
    let options = match own.is_empty() {
        // A struct without fields is not read from an object.
        true => O::default(),
        false => serde_json::from_value(Value::Object(own))
            .map_err(|error| Error::conflict(O::NAME, error.to_string()))?,
    };
    options.validate()?;
    Ok(options)
}

/// Names of a struct's fields as serde writes them, in their order. Objects of `serde_json` would sort them.
fn field_names<O: Options>() -> Vec<String> {
    let text = serde_json::to_string(&O::default()).unwrap_or_default();
    // A unit struct is written as null.
    serde_json::from_str(&text).map(|Keys(names)| names).unwrap_or_default()
}

/// The keys of an object, in their order.
struct Keys(Vec<String>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Keys, D::Error> {
        struct KeysVisitor;
        impl<'de> Visitor<'de> for KeysVisitor {
            type Value = Keys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Keys, A::Error> {
                let mut keys = Vec::new();
                while let Some((key, IgnoredAny)) = map.next_entry()? {
                    keys.push(key);
                }
                Ok(Keys(keys))
            }
        }
        from.deserialize_map(KeysVisitor)
    }
}

impl OptionType {
    /// The type that a property's schema describes; none if text cannot give such a value.
    fn of(property: &Value) -> Option<OptionType> {
        let bound = |name: &str| property.get(name);
        match property["type"].as_str() {
            Some("boolean") => Some(OptionType::Boolean),
            Some("integer") => Some(OptionType::Integer {
                min: bound("minimum").map_or(Some(0), Value::as_u64)?,
                max: bound("maximum").map_or(Some(u64::MAX), Value::as_u64)?,
            }),
            Some("number") => Some(OptionType::Number {
                min: bound("minimum")?.as_f64()?,
                max: bound("maximum")?.as_f64()?,
            }),
            _ => words(property).map(OptionType::Choice),
        }
    }

    /// The value that a text means.
    pub(crate) fn parse(&self, text: &str) -> Option<Value> {
        let value = match self {
            OptionType::Boolean => text.parse::<bool>().ok()?.into(),
            OptionType::Integer { .. } => text.parse::<u64>().ok()?.into(),
            OptionType::Number { .. } => text.parse::<f64>().ok()?.into(),
            OptionType::Choice(_) => text.into(),
        };
        self.accept(&value)
    }

    /// The value in the form that the struct's own is written in; none if it has another type or is out of range.
    pub(crate) fn accept(&self, value: &Value) -> Option<Value> {
        match self {
            OptionType::Boolean => value.as_bool().map(Value::from),
            OptionType::Integer { min, max } => {
                value.as_u64().filter(|count| (min..=max).contains(&count)).map(Value::from)
            }
            OptionType::Number { min, max } => {
                value.as_f64().filter(|number| (min..=max).contains(&number)).map(Value::from)
            }
            OptionType::Choice(words) => {
                value.as_str().filter(|word| words.iter().any(|known| known == word)).map(Value::from)
            }
        }
    }
}

/// The words of an enum: `enum` where its variants have no doc comments, `oneOf` constants where they have.
fn words(property: &Value) -> Option<Vec<String>> {
    let own = |value: &Value| value.as_str().map(str::to_owned);
    if let Some(words) = property["enum"].as_array() {
        return words.iter().map(own).collect();
    }
    let groups = property["oneOf"].as_array()?;
    let group = |group: &Value| match group.get("const") {
        Some(word) => own(word).map(|word| vec![word]),
        None => words(group),
    };
    Some(groups.iter().map(group).collect::<Option<Vec<_>>>()?.concat())
}

impl fmt::Display for OptionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionType::Boolean => write!(f, "true or false"),
            OptionType::Integer { min: 0, max } => write!(f, "a whole number up to {max}"),
            OptionType::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            OptionType::Number { min, max } => write!(f, "a number from {min} to {max}"),
            OptionType::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

/// A value as it stands in text: words without quotes, whole numbers without a fraction.
pub fn value_text(value: &Value) -> String {
    match value {
        Value::String(word) => word.clone(),
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
        other => other.to_string(),
    }
}

/// For `#[serde(with = "refrain_registry::zero_is_none")]`: an optional count whose 0 means that it is not given.
pub mod zero_is_none {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes the count, 0 for none.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(count: &Option<usize>, to: S) -> Result<S::Ok, S::Error> {
        count.unwrap_or(0).serialize(to)
    }

    /// Reads a count, none of 0.
    ///
    /// # Errors
    /// If it is not a count.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
        usize::deserialize(from).map(|count| (count > 0).then_some(count))
    }
}
