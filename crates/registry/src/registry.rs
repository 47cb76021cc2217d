//! Lists of methods, and the selection of one of them by text or JSON.

use serde_json::{Map, Value, json};

use crate::{Error, OptionSpec, Result, value_text};

/// A method that can be selected by name; `T` is what it builds.
#[derive(Debug)]
pub struct Entry<T> {
    /// The name.
    pub name: &'static str,
    /// One line on what the method does.
    pub description: &'static str,
    /// Where the method is published; empty if nowhere.
    pub source: &'static str,
    options: fn() -> Vec<OptionSpec>,
    build: fn(&Map<String, Value>) -> Result<T>,
}

/// All methods of one kind, in the order in which they are shown.
#[derive(Debug)]
pub struct Registry<T: 'static> {
    /// The noun for an entry, in the singular: `fusion method`.
    pub what: &'static str,
    /// The methods.
    pub entries: &'static [Entry<T>],
}

/// A method selected with options.
#[derive(Clone, Debug)]
pub struct Selected<T> {
    /// The method's name.
    pub name: &'static str,
    /// The text that selects the same: the name with the options that are not at their defaults.
    pub spec: String,
    /// The method.
    pub built: T,
}

impl<T> Entry<T> {
    /// An entry whose `build` is called with checked values of the options given, which are among `options`.
    pub const fn new(
        name: &'static str,
        description: &'static str,
        source: &'static str,
        options: fn() -> Vec<OptionSpec>,
        build: fn(&Map<String, Value>) -> Result<T>,
    ) -> Entry<T> {
        Entry { name, description, source, options, build }
    }

    /// The options, in the order in which they are shown.
    pub fn options(&self) -> Vec<OptionSpec> {
        (self.options)()
    }

    /// The method for machines: name, description, source, and each option as its schema with its name.
    pub fn to_json(&self) -> Value {
        let option = |option: OptionSpec| {
            let mut schema = option.schema();
            schema["name"] = json!(option.name);
            schema
        };
        let options: Vec<Value> = self.options().into_iter().map(option).collect();
        json!({
            "name": self.name, "description": self.description, "source": self.source, "options": options,
        })
    }

    /// The JSON schema of an object that selects the method.
    fn schema(&self) -> Value {
        let name = json!({ "const": self.name });
        let options = self.options();
        let options = options.iter().map(|option| (option.name.clone(), option.schema()));
        let properties: Map<String, Value> = [("name".to_owned(), name)].into_iter().chain(options).collect();
        json!({
            "type": "object", "title": self.name, "description": self.description, "properties": properties,
            "required": ["name"], "additionalProperties": false,
        })
    }

    /// Builds the method with options as text, the others at their defaults. The last value of an option counts.
    ///
    /// # Errors
    /// If an option is unknown, or a value does not fit.
    pub fn with<'a>(&self, given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<T> {
        self.select_text(given).map(|selected| selected.built)
    }

    fn select_text<'a>(&self, given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Selected<T>> {
        let (specs, mut values) = (self.options(), Map::new());
        for (name, text) in given {
            let spec = self.find(&specs, name.trim())?;
            let value = spec.value_type.parse(text.trim());
            let value = value.ok_or_else(|| self.refuse(spec, text.trim()))?;
            values.insert(spec.name.clone(), value);
        }
        self.select(&specs, values)
    }

    fn select_json(&self, given: &Map<String, Value>) -> Result<Selected<T>> {
        let (specs, mut values) = (self.options(), Map::new());
        for (name, value) in given {
            let spec = self.find(&specs, name)?;
            let value = spec.value_type.accept(value).ok_or_else(|| self.refuse(spec, value))?;
            values.insert(spec.name.clone(), value);
        }
        self.select(&specs, values)
    }

    fn select(&self, specs: &[OptionSpec], values: Map<String, Value>) -> Result<Selected<T>> {
        let built = (self.build)(&values)?;
        let changed = specs.iter().filter_map(|spec| {
            let value = values.get(&spec.name).filter(|value| **value != spec.default)?;
            Some(format!("{}={}", spec.name, value_text(value)))
        });
        let spec = join(self.name, changed);
        Ok(Selected { name: self.name, spec, built })
    }

    fn find<'a>(&self, specs: &'a [OptionSpec], name: &str) -> Result<&'a OptionSpec> {
        let wanted = name.replace('-', "_");
        specs.iter().find(|spec| spec.name == wanted).ok_or_else(|| {
            let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            Error::UnknownOption { owner: self.name, option: name.to_owned(), known }
        })
    }

    fn refuse(&self, spec: &OptionSpec, value: impl ToString) -> Error {
        Error::bad_value(self.name, &spec.name, value, &spec.value_type)
    }
}

impl<T> Registry<T> {
    /// The entry of this name; `-` counts as `_`.
    ///
    /// # Errors
    /// [`Error::UnknownName`], with all names.
    pub fn entry(&self, name: &str) -> Result<&'static Entry<T>> {
        let known = || self.entries.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
        let found = self.entries.iter().find(|entry| entry.name == name.replace('-', "_"));
        found.ok_or_else(|| Error::UnknownName { what: self.what, name: name.to_owned(), known: known() })
    }

    /// The JSON schema of what [`Registry::select_json`] takes.
    pub fn schema(&self) -> Value {
        let text = json!({ "type": "string", "title": "text", "description": "NAME or NAME:OPTION=VALUE,…" });
        let all: Vec<Value> = [text].into_iter().chain(self.entries.iter().map(Entry::schema)).collect();
        json!({ "description": self.what, "oneOf": all })
    }

    /// The method that `NAME[:OPTION=VALUE,…]` selects.
    ///
    /// # Errors
    /// If the name or an option is unknown, or a value does not fit.
    pub fn parse(&self, text: &str) -> Result<T> {
        self.select(text).map(|selected| selected.built)
    }

    /// The method that `NAME[:OPTION=VALUE,…]` selects, with its options. An option without a value is `true`.
    ///
    /// # Errors
    /// If the name or an option is unknown, or a value does not fit.
    pub fn select(&self, text: &str) -> Result<Selected<T>> {
        let (name, options) = split(text);
        self.entry(name)?.select_text(options)
    }

    /// The method that a JSON value selects: the text of [`Registry::select`], or an object with `name` and options.
    ///
    /// # Errors
    /// If the value is neither, the name or an option is unknown, or a value does not fit.
    pub fn select_json(&self, value: &Value) -> Result<Selected<T>> {
        if let Some(text) = value.as_str() {
            return self.select(text);
        }
        let mut options = value.as_object().cloned().unwrap_or_default();
        let name = options.remove("name");
        let name = name.as_ref().and_then(Value::as_str).ok_or(Error::NoName { what: self.what })?;
        self.entry(name.trim())?.select_json(&options)
    }
}

/// The name and the options of `NAME[:OPTION=VALUE,…]`. An option without a value is `true`.
pub fn split(text: &str) -> (&str, impl Iterator<Item = (&str, &str)>) {
    let (name, options) = match text.split_once(':') {
        Some((name, options)) => (name, Some(options)),
        None => (text, None),
    };
    let words = options.into_iter().flat_map(|options| options.split(','));
    (name.trim(), words.map(|word| word.split_once('=').unwrap_or((word, "true"))))
}

/// `NAME[:OPTION=VALUE,…]` of a name and its options, each as `OPTION=VALUE`.
pub fn join(name: &str, options: impl IntoIterator<Item = String>) -> String {
    let options: Vec<String> = options.into_iter().collect();
    if options.is_empty() { name.to_owned() } else { format!("{name}:{}", options.join(",")) }
}

/// The text `spec` of a selection with one more option, `OPTION=VALUE`, at its end.
pub fn append(spec: &str, option: &str) -> String {
    format!("{spec}{}{option}", if spec.contains(':') { ',' } else { ':' })
}
