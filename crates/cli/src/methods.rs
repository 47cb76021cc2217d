//! Fusion methods and eviction policies as they are asked for, and the list of them.

use std::sync::Arc;

use anyhow::Result;
use clap::ArgMatches;
use clap::parser::ValueSource;
use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::{FusionMethod, METHODS};
use refrain_registry::{Entry, OptionSpec, Registry};
use serde_json::{Value, json};

use crate::args;
use crate::output::{Fail, print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// Something of a registry, with its options.
#[derive(Clone, Debug)]
pub(crate) struct Asked<T> {
    /// As it could be asked for: `a3:ratio=0.3`.
    pub(crate) spec: String,
    pub(crate) built: T,
}

/// A fusion method.
pub(crate) type Method = Asked<Arc<dyn FusionMethod>>;
/// An eviction policy.
pub(crate) type Policy = Asked<Eviction>;

impl<T> Asked<T> {
    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.spec.split(':').next().unwrap_or_default()
    }
}

impl Method {
    /// The value of an option, as given or by default.
    pub(crate) fn option(&self, name: &str) -> Option<String> {
        let mut words = self.spec.split(':');
        let entry = METHODS.entry(words.next()?).ok()?;
        let default = entry.options.iter().find(|option| option.name == name)?.default;
        let mut given = words.filter_map(|word| word.split_once('=').or(Some((word, "true"))));
        let given = given.rfind(|(key, _)| key.replace('-', "_") == name);
        Some(given.map_or(default, |(_, value)| value).to_owned())
    }
}

/// Every option of any method or policy, once a name, with all that take it: `(owner, option)`, methods first.
pub(crate) fn options() -> Vec<Vec<(&'static str, OptionSpec)>> {
    fn owned<T>(entry: &'static Entry<T>) -> impl Iterator<Item = (&'static str, OptionSpec)> {
        entry.options.iter().map(|option| (entry.name, *option))
    }
    let mut all: Vec<Vec<(&'static str, OptionSpec)>> = Vec::new();
    for (owner, option) in
        METHODS.entries.iter().flat_map(owned).chain(POLICIES.entries.iter().flat_map(owned))
    {
        match all.iter_mut().find(|known| known[0].1.name == option.name) {
            Some(known) => known.push((owner, option)),
            None => all.push(vec![(owner, option)]),
        }
    }
    all
}

/// Options of methods and policies given as flags.
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
        let flag = |option: Vec<(&'static str, OptionSpec)>| {
            let name = option[0].1.name;
            let value = matches.try_get_one::<String>(name).ok().flatten()?.clone();
            let typed = matches.value_source(name) == Some(ValueSource::CommandLine);
            Some(Flag { name, value, typed })
        };
        Flags(options().into_iter().filter_map(flag).collect())
    }

    /// The same, but a flag that nothing takes is no error.
    pub(crate) fn lenient(&self) -> Flags {
        Flags(self.0.iter().map(|flag| Flag { typed: false, ..flag.clone() }).collect())
    }

    /// Methods and policies, each with the flags that it has and does not set itself.
    pub(crate) fn apply(
        &self,
        methods: &[String],
        policies: &[String],
    ) -> Result<(Vec<Method>, Vec<Policy>)> {
        let asked = (self.given_to(&METHODS, methods)?, self.given_to(&POLICIES, policies)?);
        for flag in self.0.iter().filter(|flag| flag.typed) {
            if !takes(&METHODS, methods, flag.name) && !takes(&POLICIES, policies, flag.name) {
                // The error that says what is taken instead.
                let given = [(flag.name, flag.value.as_str())];
                if takes(&METHODS, &all(&METHODS), flag.name) {
                    refused(&METHODS, methods, given)?;
                }
                refused(&POLICIES, policies, given)?;
            }
        }
        Ok(asked)
    }

    /// One of each.
    pub(crate) fn apply_one(&self, method: &str, policy: &str) -> Result<(Method, Policy)> {
        let (mut methods, mut policies) = self.apply(&[method.to_owned()], &[policy.to_owned()])?;
        methods.pop().zip(policies.pop()).ok_or_else(|| Fail::usage("no method was given").into())
    }

    fn given_to<T>(&self, registry: &Registry<T>, specs: &[String]) -> Result<Vec<Asked<T>>> {
        let asked = |spec: &String| {
            let (name, rest) =
                spec.split_once(':').map_or((spec.as_str(), None), |(name, rest)| (name, Some(rest)));
            let entry = registry.entry(name.trim()).map_err(wrong)?;
            let mut full = rest.map_or(entry.name.to_owned(), |rest| format!("{}:{rest}", entry.name));
            for flag in &self.0 {
                if entry.options.iter().any(|option| option.name == flag.name) && !sets(rest, flag.name) {
                    full.push_str(&format!(":{}={}", flag.name, flag.value));
                }
            }
            let built = registry.parse(&full).map_err(wrong)?;
            Ok(Asked { spec: full, built })
        };
        specs.iter().map(asked).collect()
    }
}

fn name(spec: &str) -> &str {
    spec.split(':').next().unwrap_or_default().trim()
}

fn all<T>(registry: &Registry<T>) -> Vec<String> {
    registry.entries.iter().map(|entry| entry.name.to_owned()).collect()
}

/// Whether one of these has the option.
fn takes<T>(registry: &Registry<T>, specs: &[String], option: &str) -> bool {
    let entries = specs.iter().filter_map(|spec| registry.entry(name(spec)).ok());
    entries.flat_map(|entry| entry.options).any(|known| known.name == option)
}

fn refused<T>(registry: &Registry<T>, specs: &[String], given: [(&str, &str); 1]) -> Result<()> {
    specs.iter().try_for_each(|spec| {
        let built = registry.entry(name(spec)).and_then(|entry| entry.with(given));
        built.map(drop).map_err(|error| wrong(error).into())
    })
}

fn sets(rest: Option<&str>, name: &str) -> bool {
    let key = |word: &str| word.split('=').next().unwrap_or_default().trim().replace('-', "_");
    rest.is_some_and(|rest| rest.split(':').any(|word| key(word) == name))
}

fn wrong(error: refrain_registry::Error) -> Fail {
    let full = matches!(&error, refrain_registry::Error::UnknownOption { owner, .. } if *owner == "full");
    Fail::usage(error.to_string()).hint(match full {
        true => "choose an eviction policy, for example --evict morph_kv",
        false => "`refrain methods` shows methods and policies with their options",
    })
}

/// `refrain methods`
pub(crate) fn run(context: &Context, args: &args::Methods) -> Result<()> {
    if let Some(name) = &args.name {
        return match (METHODS.entry(name), POLICIES.entry(name)) {
            (Ok(entry), _) => show(context, entry, "fusion", "--method"),
            (_, Ok(entry)) => show(context, entry, "eviction", "--evict"),
            _ => {
                let known = [all(&METHODS), all(&POLICIES)].concat().join(", ");
                let message = format!("unknown method or policy `{name}`; known are: {known}");
                Err(Fail::usage(message).into())
            }
        };
    }
    if context.json {
        let methods = METHODS.entries.iter().map(|entry| as_json(entry, "fusion"));
        return print_json(
            &methods.chain(POLICIES.entries.iter().map(|e| as_json(e, "eviction"))).collect::<Vec<_>>(),
        );
    }
    let before = list("<fusion method (--method)", &METHODS);
    let after = list("<eviction policy (--evict)", &POLICIES);
    print(&format!(
        "{before}\n{after}\n`refrain methods NAME` shows a method's or policy's options and paper.\n"
    ))
}

fn show<T>(context: &Context, entry: &Entry<T>, kind: &str, flag: &str) -> Result<()> {
    if context.json { print_json(&as_json(entry, kind)) } else { print(&in_full(entry, flag)) }
}

fn list<T>(heading: &'static str, registry: &Registry<T>) -> String {
    let mut table = Table::new(&[heading, "<what it does, and its options"]);
    for entry in registry.entries {
        table.push(vec![entry.name.to_owned(), entry.summary.to_owned()]);
        let options: Vec<_> =
            entry.options.iter().map(|option| format!("{}={}", option.name, option.default)).collect();
        for options in options.chunks(5) {
            table.push(vec![String::new(), options.join(" ")]);
        }
    }
    table.text()
}

fn in_full<T>(entry: &Entry<T>, flag_name: &str) -> String {
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
        "As flags, {flag_name} {} --{flag} {default}; in one word, {}:{}={default}.\n",
        entry.name, entry.name, first.name
    ));
    text
}

fn as_json<T>(entry: &Entry<T>, kind: &str) -> Value {
    let option = |option: &OptionSpec| {
        json!({
            "name": option.name,
            "help": option.help,
            "value": option.kind.to_string(),
            "default": option.default,
        })
    };
    let options: Vec<Value> = entry.options.iter().map(option).collect();
    json!({
        "name": entry.name, "kind": kind, "summary": entry.summary, "paper": entry.paper, "options": options
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(flags: &[(&'static str, &str)], typed: bool) -> Flags {
        Flags(flags.iter().map(|(name, value)| Flag { name, value: (*value).to_owned(), typed }).collect())
    }

    #[test]
    fn flags_hold_for_what_has_them_and_does_not_set_them() {
        let given = flags(&[("ratio", "0.3"), ("window", "12")], true);
        let specs = |specs: &[&str]| specs.iter().map(|spec| (*spec).to_owned()).collect::<Vec<_>>();
        let (methods, policies) = given
            .apply(
                &specs(&["pie", "a3", "a3:ratio=0.5", "cache-blend"]),
                &specs(&["full", "morph_kv:window=9", "snap_kv"]),
            )
            .unwrap();
        let methods: Vec<String> = methods.into_iter().map(|asked| asked.spec).collect();
        let policies: Vec<String> = policies.into_iter().map(|asked| asked.spec).collect();
        assert_eq!(methods, ["pie", "a3:ratio=0.3", "a3:ratio=0.5", "cache_blend:ratio=0.3"]);
        assert_eq!(policies, ["full", "morph_kv:window=9", "snap_kv:window=12"]);
        let error = |method, policy| given.apply_one(method, policy).unwrap_err().to_string();
        assert!(error("pie", "morph_kv").contains("pie") && error("pie", "morph_kv").contains("ratio"));
        assert!(error("a3", "full").contains("`a3` takes no option `window`"), "{}", error("a3", "full"));
        let capacity = flags(&[("capacity", "600")], true).apply_one("a3", "full").unwrap_err().to_string();
        assert!(capacity.contains("`full` takes no option `capacity`"), "{capacity}");
        let clash = flags(&[("capacity", "20")], true).apply_one("a3", "morph_kv").unwrap_err().to_string();
        assert!(clash.contains("capacity 20") && clash.contains("window of 30"), "{clash}");
        assert!(
            flags(&[("ratio", "0.3")], false).apply_one("pie", "full").is_ok(),
            "defaults for other methods are no error"
        );
    }

    #[test]
    fn options_are_known_given_or_by_default() {
        let (asked, _) = Flags::default().apply_one("lego-link:head-only", "full").unwrap();
        assert_eq!((asked.name(), asked.option("head_only").as_deref()), ("lego_link", Some("true")));
        assert_eq!((asked.option("window").as_deref(), asked.option("ratio")), (Some("20"), None));
    }
}
