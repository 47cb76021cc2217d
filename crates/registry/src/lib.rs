//! Explicit lists of what can be asked for by name, with options: `a3:ratio=0.2:softmax=per_head`. Flags, JSON, help and
//! conformance tests are made from them.

mod error;

use std::fmt;
use std::str::FromStr;

pub use error::{Error, Result};

/// What an option's value looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number from 0 to 1.
    Ratio,
    /// A number from 0 to 10⁹.
    Number,
    /// A whole number up to 2²⁰.
    Count,
    /// `true` or `false`; as a flag it needs no value.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// An option of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionSpec {
    /// Its name, as in `a3:ratio=0.2`; as a flag with `-` for `_`.
    pub name: &'static str,
    /// What it does.
    pub help: &'static str,
    /// What its value looks like.
    pub kind: Kind,
    /// The value if it is not given.
    pub default: &'static str,
}

/// Something that can be asked for by name; `T` is what is built.
#[derive(Debug)]
pub struct Entry<T> {
    /// Its name.
    pub name: &'static str,
    /// One line on what it does.
    pub summary: &'static str,
    /// Where it is published.
    pub paper: &'static str,
    /// Its options.
    pub options: &'static [OptionSpec],
    /// Builds it; called with checked options.
    pub build: fn(&Options<'_>) -> Result<T>,
}

/// All entries of one kind, in the order in which they are shown.
#[derive(Debug)]
pub struct Registry<T: 'static> {
    /// What they are, in the singular: `fusion method`.
    pub what: &'static str,
    /// The entries.
    pub entries: &'static [Entry<T>],
}

impl<T> Registry<T> {
    /// The entry of this name.
    ///
    /// # Errors
    /// [`Error::UnknownName`], naming all that are known.
    pub fn entry(&self, name: &str) -> Result<&'static Entry<T>> {
        let known = || self.entries.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
        let found = self.entries.iter().find(|entry| entry.name == name.replace('-', "_"));
        found.ok_or_else(|| Error::UnknownName { what: self.what, name: name.to_owned(), known: known() })
    }

    /// Reads `NAME[:OPTION=VALUE]…`.
    ///
    /// # Errors
    /// If the name or an option is unknown, or a value does not fit.
    pub fn parse(&self, text: &str) -> Result<T> {
        let mut words = text.split(':');
        let entry = self.entry(words.next().unwrap_or_default().trim())?;
        entry.with(words.map(|word| word.split_once('=').unwrap_or((word, "true"))))
    }
}

impl<T> Entry<T> {
    /// Builds it with these options, the others at their defaults.
    ///
    /// # Errors
    /// If an option is not one of its own, or a value does not fit.
    pub fn with<'a>(&self, given: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<T> {
        let mut options = Options {
            owner: self.name,
            values: self.options.iter().map(|spec| (*spec, spec.default)).collect(),
        };
        for (name, value) in given {
            options.set(name.trim(), value.trim())?;
        }
        (self.build)(&options)
    }
}

/// Checked values of an entry's options.
#[derive(Debug)]
pub struct Options<'a> {
    owner: &'static str,
    values: Vec<(OptionSpec, &'a str)>,
}

impl<'a> Options<'a> {
    fn set(&mut self, name: &str, value: &'a str) -> Result<()> {
        let wanted = name.replace('-', "_");
        let Some(index) = self.values.iter().position(|(spec, _)| spec.name == wanted) else {
            let names: Vec<_> = self.values.iter().map(|(spec, _)| spec.name).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(Error::UnknownOption { owner: self.owner, option: name.to_owned(), known });
        };
        self.values[index].1 = value;
        let (spec, _) = self.values[index];
        let fits = match spec.kind {
            Kind::Ratio => value.parse::<f64>().is_ok_and(|ratio| (0.0..=1.0).contains(&ratio)),
            Kind::Number => value.parse::<f64>().is_ok_and(|number| (0.0..=1e9).contains(&number)),
            Kind::Count => value.parse::<usize>().is_ok_and(|count| count <= 1 << 20),
            Kind::Switch => value.parse::<bool>().is_ok(),
            Kind::Choice(words) => words.contains(&value),
        };
        if fits { Ok(()) } else { Err(self.bad(spec.name, &spec.kind.to_string())) }
    }

    fn find(&self, name: &str) -> (OptionSpec, &'a str) {
        *self
            .values
            .iter()
            .find(|(spec, _)| spec.name == name)
            .expect("an entry builds only from its own options")
    }

    /// The value of an option.
    ///
    /// # Errors
    /// If it is not of this type.
    ///
    /// # Panics
    /// If the entry has no such option.
    pub fn get<T: FromStr>(&self, name: &str) -> Result<T> {
        let (spec, value) = self.find(name);
        value.parse().map_err(|_| self.bad(spec.name, &spec.kind.to_string()))
    }

    /// The one of `of` that stands where the value does among the words of a [`Kind::Choice`].
    ///
    /// # Panics
    /// If the entry has no such option.
    pub fn pick<T: Copy>(&self, name: &str, of: &[T]) -> T {
        let (spec, value) = self.find(name);
        let Kind::Choice(words) = spec.kind else { return of[0] };
        of[words.iter().position(|word| *word == value).unwrap_or(0)]
    }

    /// The error for an option's value that is not `expected`.
    ///
    /// # Panics
    /// If the entry has no such option.
    pub fn bad(&self, name: &str, expected: &str) -> Error {
        let (spec, value) = self.find(name);
        let (value, expected) = (value.to_owned(), expected.to_owned());
        Error::BadValue { owner: self.owner, option: spec.name, value, expected }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Ratio => write!(f, "a number from 0 to 1"),
            Kind::Number => write!(f, "a number from 0 to 1000000000"),
            Kind::Count => write!(f, "a whole number up to 1048576"),
            Kind::Switch => write!(f, "true or false"),
            Kind::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}
