//! The explicit list of methods with their options; flags, help and conformance tests are made from it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use refrain_kv::stats::Softmax;

use crate::{A3, CacheBlend, Error, FullReuse, FusionMethod, LegoLink, Mask, Metric, Pie, Result, Vanilla};

/// What an option's value looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number from 0 to 1.
    Ratio,
    /// A whole number.
    Count,
    /// `true` or `false`; as a flag it needs no value.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// An option of a method.
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

/// A method of the registry.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// One line on what it does.
    pub summary: &'static str,
    /// Where it is published.
    pub paper: &'static str,
    /// Its options.
    pub options: &'static [OptionSpec],
    /// Builds it; called with checked options.
    build: fn(&Options<'_>) -> Result<Arc<dyn FusionMethod>>,
}

const RATIO: OptionSpec = OptionSpec {
    name: "ratio",
    help: "share of the tokens before the question that is recomputed",
    kind: Kind::Ratio,
    default: "0.15",
};

const ENTRIES: &[Entry] = &[
    Entry {
        name: "vanilla",
        summary: "full prefill, nothing reused; what the others are measured against",
        paper: "",
        options: &[],
        build: |_| Ok(Arc::new(Vanilla)),
    },
    Entry {
        name: "full_reuse",
        summary: "reuse every chunk as it was cached, positions included",
        paper: "https://arxiv.org/abs/2511.17560",
        options: &[],
        build: |_| Ok(Arc::new(FullReuse)),
    },
    Entry {
        name: "pie",
        summary: "reuse every chunk, keys rotated to their places in the prompt",
        paper: "https://arxiv.org/abs/2407.03157",
        options: &[],
        build: |_| Ok(Arc::new(Pie)),
    },
    Entry {
        name: "lego_link",
        summary: "recompute both ends of every chunk",
        paper: "https://arxiv.org/abs/2410.15332",
        options: &[
            OptionSpec {
                name: "window",
                help: "tokens recomputed at each end of a chunk",
                kind: Kind::Count,
                default: "20",
            },
            OptionSpec {
                name: "head_only",
                help: "recompute only the first tokens of a chunk",
                kind: Kind::Switch,
                default: "false",
            },
        ],
        build: |options| {
            Ok(Arc::new(LegoLink { window: options.get("window")?, head_only: options.get("head_only")? }))
        },
    },
    Entry {
        name: "cache_blend",
        summary: "recompute the tokens whose values at layer 1 deviate most from the cache",
        paper: "https://arxiv.org/abs/2405.16444",
        options: &[
            RATIO,
            OptionSpec {
                name: "metric",
                help: "what deviation is measured on",
                kind: Kind::Choice(&["v_l2", "k_l2", "k_l1"]),
                default: "v_l2",
            },
            OptionSpec {
                name: "gradual",
                help: "shrink the recomputed set with depth, from 1.25 to 0.75 of the ratio",
                kind: Kind::Switch,
                default: "false",
            },
            OptionSpec {
                name: "mask",
                help: "causal mask; bottom_right lets rows see later keys, only to compare with published code",
                kind: Kind::Choice(&["absolute", "bottom_right"]),
                default: "absolute",
            },
        ],
        build: |options| {
            Ok(Arc::new(CacheBlend {
                ratio: options.get("ratio")?,
                metric: options.pick("metric", &[Metric::ValueL2, Metric::KeyL2, Metric::KeyL1]),
                gradual: options.get("gradual")?,
                mask: options.pick("mask", &[Mask::Absolute, Mask::BottomRight]),
            }))
        },
    },
    Entry {
        name: "a3",
        summary: "recompute the tokens that the question attends to at layer 1",
        paper: "https://arxiv.org/abs/2511.17560",
        options: &[
            RATIO,
            OptionSpec {
                name: "smoothing",
                help: "tokens of the moving average over scores (odd; 1 for none)",
                kind: Kind::Count,
                default: "5",
            },
            OptionSpec {
                name: "softmax",
                help: "one softmax over concatenated heads, or one a head",
                kind: Kind::Choice(&["concatenated", "per_head"]),
                default: "concatenated",
            },
            OptionSpec {
                name: "check_layer",
                help: "the layer whose attention is scored, from 0",
                kind: Kind::Count,
                default: "1",
            },
        ],
        build: |options| {
            let smoothing: usize = options.get("smoothing")?;
            if smoothing.is_multiple_of(2) {
                return Err(options.bad("smoothing", "an odd number of tokens"));
            }
            Ok(Arc::new(A3 {
                ratio: options.get("ratio")?,
                smoothing,
                softmax: options.pick("softmax", &[Softmax::Concatenated, Softmax::PerHead]),
                check_layer: options.get("check_layer")?,
            }))
        },
    },
];

/// All methods, in the order in which they are shown.
pub fn registry() -> &'static [Entry] {
    ENTRIES
}

/// The method of this name.
///
/// # Errors
/// [`Error::UnknownMethod`], naming all that are known.
pub fn entry(name: &str) -> Result<&'static Entry> {
    let known = || ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ");
    let found = ENTRIES.iter().find(|entry| entry.name == name.replace('-', "_"));
    found.ok_or_else(|| Error::UnknownMethod { name: name.to_owned(), known: known() })
}

/// Every option of any method, once a name, with the names of the methods that take it.
pub fn options() -> Vec<(OptionSpec, Vec<&'static str>)> {
    let mut all: Vec<(OptionSpec, Vec<&'static str>)> = Vec::new();
    for entry in ENTRIES {
        for option in entry.options {
            match all.iter_mut().find(|(known, _)| known.name == option.name) {
                Some((_, methods)) => methods.push(entry.name),
                None => all.push((*option, vec![entry.name])),
            }
        }
    }
    all
}

/// Reads `NAME[:OPTION=VALUE]…`, for example `a3:ratio=0.2:softmax=per_head`.
///
/// # Errors
/// If the method or an option is unknown, or a value does not fit.
pub fn parse(text: &str) -> Result<Arc<dyn FusionMethod>> {
    let mut words = text.split(':');
    let entry = entry(words.next().unwrap_or_default().trim())?;
    entry.build(words.map(|word| word.split_once('=').unwrap_or((word, "true"))))
}

impl Entry {
    /// Builds the method with these options, the others at their defaults.
    ///
    /// # Errors
    /// If an option is not one of its own, or a value does not fit.
    pub fn build<'a>(
        &self,
        given: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Arc<dyn FusionMethod>> {
        let mut options = Options {
            method: self.name,
            values: self.options.iter().map(|spec| (*spec, spec.default)).collect(),
        };
        for (name, value) in given {
            options.set(name.trim(), value.trim())?;
        }
        (self.build)(&options)
    }
}

/// Checked values of a method's options.
#[derive(Debug)]
pub struct Options<'a> {
    method: &'static str,
    values: Vec<(OptionSpec, &'a str)>,
}

impl<'a> Options<'a> {
    fn set(&mut self, name: &str, value: &'a str) -> Result<()> {
        let wanted = name.replace('-', "_");
        let Some(index) = self.values.iter().position(|(spec, _)| spec.name == wanted) else {
            let names: Vec<_> = self.values.iter().map(|(spec, _)| spec.name).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            return Err(Error::UnknownOption { method: self.method, option: name.to_owned(), known });
        };
        self.values[index].1 = value;
        let (spec, _) = self.values[index];
        let fits = match spec.kind {
            Kind::Ratio => value.parse::<f64>().is_ok_and(|ratio| (0.0..=1.0).contains(&ratio)),
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

    fn get<T: FromStr>(&self, name: &str) -> Result<T> {
        let (spec, value) = self.find(name);
        value.parse().map_err(|_| self.bad(spec.name, &spec.kind.to_string()))
    }

    fn pick<T: Copy>(&self, name: &str, of: &[T]) -> T {
        let (spec, value) = self.find(name);
        let Kind::Choice(words) = spec.kind else { return of[0] };
        of[words.iter().position(|word| *word == value).unwrap_or(0)]
    }

    fn bad(&self, name: &str, expected: &str) -> Error {
        let (spec, value) = self.find(name);
        let (value, expected) = (value.to_owned(), expected.to_owned());
        Error::BadValue { method: self.method, option: spec.name, value, expected }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Ratio => write!(f, "a number from 0 to 1"),
            Kind::Count => write!(f, "a whole number"),
            Kind::Switch => write!(f, "true or false"),
            Kind::Choice(words) => write!(f, "one of {}", words.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_builds_with_its_defaults_and_refuses_what_is_not_its_own() {
        for entry in registry() {
            entry.build([]).unwrap();
            let error = entry.build([("colour", "red")]).unwrap_err().to_string();
            assert!(error.contains(entry.name) && error.contains("colour"), "{error}");
            for option in entry.options {
                entry.build([(option.name, option.default)]).unwrap();
                assert!(entry.build([(option.name, "-1")]).is_err(), "{}", option.name);
            }
        }
    }

    #[test]
    fn text_gives_method_and_options() {
        let method = parse("a3:ratio=0.3:softmax=per_head:smoothing=1").unwrap();
        assert!(format!("{method:?}").contains("ratio: 0.3, smoothing: 1, softmax: PerHead"), "{method:?}");
        assert!(format!("{:?}", parse("lego-link:head-only").unwrap()).contains("head_only: true"));
        assert!(parse("a4").unwrap_err().to_string().contains("cache_blend"));
        assert!(parse("a3:smoothing=4").unwrap_err().to_string().contains("odd"));
        assert!(parse("a3:ratio=1.5").unwrap_err().to_string().contains("from 0 to 1"));
    }
}
