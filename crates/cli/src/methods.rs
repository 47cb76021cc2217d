//! Fusion methods as they are asked for, and the list of them.

use std::sync::Arc;

use anyhow::Result;
use clap::ArgMatches;
use clap::parser::ValueSource;
use refrain_fusion::{Entry, FusionMethod, registry};
use serde_json::{Value, json};

use crate::args;
use crate::output::{Fail, print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// A method with its options.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// As it could be asked for: `a3:ratio=0.3`.
    pub(crate) spec: String,
    pub(crate) method: Arc<dyn FusionMethod>,
}

impl Asked {
    /// The value of an option, as given or by default.
    pub(crate) fn option(&self, name: &str) -> Option<String> {
        let mut words = self.spec.split(':');
        let entry = refrain_fusion::entry(words.next()?).ok()?;
        let default = entry.options.iter().find(|option| option.name == name)?.default;
        let mut given = words.filter_map(|word| word.split_once('=').or(Some((word, "true"))));
        let given = given.rfind(|(key, _)| key.replace('-', "_") == name);
        Some(given.map_or(default, |(_, value)| value).to_owned())
    }

    /// The method's name.
    pub(crate) fn name(&self) -> &str {
        self.spec.split(':').next().unwrap_or_default()
    }
}

/// Method options given as flags.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags(Vec<Flag>);

#[derive(Clone, Debug)]
struct Flag {
    name: &'static str,
    value: String,
    /// Whether it was given on the command line, and not by environment or file, which speak for many commands.
    typed: bool,
}

impl Flags {
    pub(crate) fn of(matches: &ArgMatches) -> Flags {
        let flag = |(spec, _): (refrain_fusion::OptionSpec, _)| {
            let value = matches.try_get_one::<String>(spec.name).ok().flatten()?.clone();
            let typed = matches.value_source(spec.name) == Some(ValueSource::CommandLine);
            Some(Flag { name: spec.name, value, typed })
        };
        Flags(refrain_fusion::options().into_iter().filter_map(flag).collect())
    }

    /// The same, but a flag that no method has is no error.
    pub(crate) fn lenient(&self) -> Flags {
        Flags(self.0.iter().map(|flag| Flag { typed: false, ..flag.clone() }).collect())
    }

    /// The methods, each with the flags that it has and does not set itself.
    pub(crate) fn apply(&self, specs: &[String]) -> Result<Vec<Asked>> {
        let mut asked = Vec::new();
        let mut used = vec![false; self.0.len()];
        for spec in specs {
            let (name, rest) =
                spec.split_once(':').map_or((spec.as_str(), None), |(name, rest)| (name, Some(rest)));
            let entry = refrain_fusion::entry(name.trim()).map_err(wrong)?;
            let mut full = rest.map_or(entry.name.to_owned(), |rest| format!("{}:{rest}", entry.name));
            for (flag, used) in self.0.iter().zip(&mut used) {
                if entry.options.iter().any(|option| option.name == flag.name) {
                    *used = true;
                    if !sets(rest, flag.name) {
                        full.push_str(&format!(":{}={}", flag.name, flag.value));
                    }
                }
            }
            let method = refrain_fusion::parse(&full).map_err(wrong)?;
            asked.push(Asked { spec: full, method });
        }
        for (flag, used) in self.0.iter().zip(used) {
            if flag.typed && !used {
                for spec in specs {
                    let entry =
                        refrain_fusion::entry(spec.split(':').next().unwrap_or_default()).map_err(wrong)?;
                    entry.build([(flag.name, flag.value.as_str())]).map_err(wrong)?;
                }
            }
        }
        Ok(asked)
    }

    pub(crate) fn apply_one(&self, spec: &str) -> Result<Asked> {
        let mut asked = self.apply(&[spec.to_owned()])?;
        asked.pop().ok_or_else(|| Fail::usage("no method was given").into())
    }
}

fn sets(rest: Option<&str>, name: &str) -> bool {
    let key = |word: &str| word.split('=').next().unwrap_or_default().trim().replace('-', "_");
    rest.is_some_and(|rest| rest.split(':').any(|word| key(word) == name))
}

fn wrong(error: refrain_fusion::Error) -> Fail {
    Fail::usage(error.to_string()).hint("`refrain methods` shows the methods and their options")
}

/// `refrain methods`
pub(crate) fn run(context: &Context, args: &args::Methods) -> Result<()> {
    let entries: Vec<&Entry> = match &args.name {
        Some(name) => vec![refrain_fusion::entry(name).map_err(wrong)?],
        None => registry().iter().collect(),
    };
    if context.json {
        let all: Vec<Value> = entries.iter().map(|entry| as_json(entry)).collect();
        return match &args.name {
            Some(_) => print_json(&all[0]),
            None => print_json(&all),
        };
    }
    if args.name.is_some() {
        return print(&entries.iter().map(|entry| in_full(entry)).collect::<String>());
    }
    let mut table = Table::new(&["<method", "<what it does, and its options"]);
    for entry in entries {
        table.push(vec![entry.name.to_owned(), entry.summary.to_owned()]);
        if !entry.options.is_empty() {
            let options = entry.options.iter().map(|option| format!("{}={}", option.name, option.default));
            table.push(vec![String::new(), options.collect::<Vec<_>>().join(" ")]);
        }
    }
    print(&format!("{}\n`refrain methods NAME` shows a method's options and paper.\n", table.text()))
}

fn in_full(entry: &Entry) -> String {
    let mut text = format!("{}: {}\n", entry.name, entry.summary);
    if !entry.paper.is_empty() {
        text.push_str(&format!("{}\n", entry.paper));
    }
    if entry.options.is_empty() {
        return text + "\nIt has no options.\n";
    }
    let mut table = Table::new(&["<option", "<default", "<value", "<what it does"]);
    for option in entry.options {
        let words = [option.name, option.default, &option.kind.to_string(), option.help];
        table.push(words.map(str::to_owned).to_vec());
    }
    let first = &entry.options[0];
    let (flag, default) = (first.name.replace('_', "-"), first.default);
    text.push_str(&format!("\n{}\n", table.text()));
    text.push_str(&format!(
        "As flags, --method {} --{flag} {default}; in one word, {}:{}={default}.\n",
        entry.name, entry.name, first.name
    ));
    text
}

fn as_json(entry: &Entry) -> Value {
    let option = |option: &refrain_fusion::OptionSpec| {
        json!({
            "name": option.name,
            "help": option.help,
            "value": option.kind.to_string(),
            "default": option.default,
        })
    };
    let options: Vec<Value> = entry.options.iter().map(option).collect();
    json!({ "name": entry.name, "summary": entry.summary, "paper": entry.paper, "options": options })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(flags: &[(&'static str, &str)], typed: bool) -> Flags {
        Flags(flags.iter().map(|(name, value)| Flag { name, value: (*value).to_owned(), typed }).collect())
    }

    #[test]
    fn flags_hold_for_the_methods_that_have_them_and_do_not_set_them() {
        let given = flags(&[("ratio", "0.3")], true);
        let specs = ["pie", "a3", "a3:ratio=0.5", "cache-blend"].map(str::to_owned);
        let asked: Vec<String> = given.apply(&specs).unwrap().into_iter().map(|asked| asked.spec).collect();
        assert_eq!(asked, ["pie", "a3:ratio=0.3", "a3:ratio=0.5", "cache_blend:ratio=0.3"]);
        let error = given.apply_one("pie").unwrap_err().to_string();
        assert!(error.contains("pie") && error.contains("ratio"), "{error}");
        assert!(
            flags(&[("ratio", "0.3")], false).apply_one("pie").is_ok(),
            "defaults for other methods are no error"
        );
    }

    #[test]
    fn options_are_known_given_or_by_default() {
        let asked = Flags::default().apply_one("lego-link:head-only").unwrap();
        assert_eq!((asked.name(), asked.option("head_only").as_deref()), ("lego_link", Some("true")));
        assert_eq!((asked.option("window").as_deref(), asked.option("ratio")), (Some("20"), None));
    }
}
