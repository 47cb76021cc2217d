//! Options that need or exclude each other.
//!
//! They are held against the values of the command line, the environment and the configuration file together. Clap's own relations see no value
//! of the file, and would refuse a command for a variable that is meant for another one.

use std::collections::BTreeSet;
use std::ffi::OsString;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory as _};

use super::errors::explained;
use super::{Cli, innermost, variable};
use crate::output::Fail;

/// An option that has a use together with another one alone.
struct Need {
    option: &'static str,
    other: &'static str,
    /// Whether its value must not be left unused wherever it stands, since the server would be less protected than it was meant to be. Values
    /// of other options, of the environment and the file, wait for commands that have both.
    is_strict: bool,
}

const NEEDS: [Need; 5] = [
    Need { option: "metrics_auth", other: "api_key_file", is_strict: true },
    Need { option: "ssl_certfile", other: "ssl_keyfile", is_strict: true },
    Need { option: "ssl_keyfile", other: "ssl_certfile", is_strict: true },
    Need { option: "judge_model", other: "judge", is_strict: false },
    Need { option: "api_key", other: "url", is_strict: false },
];

/// Groups of options of which one alone is used: the one with the strongest source. Two of the same source are an error.
const ALTERNATIVES: [&[&[&str]]; 3] = [
    &[&["json_object"], &["json_schema"], &["regex"], &["choice"], &["grammar"]],
    &[&["url"], &["compare", "keys"]],
    &[
        &["forget"],
        &["questions", "samples", "tokens", "bound", "methods", "prefixes", "time_budget", "out", "output"],
    ],
];

/// The source of a value, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    File,
    Environment,
    CommandLine,
}

/// The options of the configuration file by the names of their commands and their own, such as `serve.ssl_certfile`.
#[derive(Debug, Default)]
pub(crate) struct FileOptions(BTreeSet<String>);

impl FileOptions {
    /// Notes an option of the command of a dotted name.
    pub(crate) fn insert(&mut self, command: &str, option: &str) {
        self.0.insert(format!("{command}.{option}"));
    }
}

/// The values of the command that was given, and the source of each.
struct Given<'a> {
    matches: &'a ArgMatches,
    /// The names of the command, below that of the program.
    command: Vec<&'a str>,
    file: &'a FileOptions,
}

impl Given<'_> {
    /// The source of an option's value. An option that is switched off counts as not given.
    fn source(&self, option: &str) -> Option<Source> {
        if !self.matches.try_contains_id(option).ok()?
            || matches!(self.matches.try_get_one::<bool>(option), Ok(Some(false)))
        {
            return None;
        }
        match self.matches.value_source(option)? {
            ValueSource::CommandLine => Some(Source::CommandLine),
            ValueSource::EnvVariable => Some(Source::Environment),
            _ => {
                let name = format!("{}.{option}", self.command.join("."));
                self.file.0.contains(&name).then_some(Source::File)
            }
        }
    }

    /// The strongest option of a group, with its source.
    fn strongest(&self, group: &[&'static str]) -> Option<(Source, &'static str)> {
        group
            .iter()
            .filter_map(|option| Some((self.source(option)?, *option)))
            .max_by_key(|(source, _)| *source)
    }

    /// # Errors
    /// If an option lacks the one that it needs.
    fn check_needs(&self) -> Result<()> {
        for Need { option, other, is_strict } in NEEDS {
            let Some(source) = self.source(option) else { continue };
            if self.source(other).is_none() && (is_strict || source == Source::CommandLine) {
                let message = format!("{} needs {}", named(option, source), long(other));
                return Err(Fail::usage(message)
                    .hint(format!("give {}, or leave {} out", long(other), long(option)))
                    .into());
            }
        }
        Ok(())
    }

    /// The options whose values give way to those of stronger sources.
    ///
    /// # Errors
    /// If options of one source exclude each other.
    fn excluded(&self) -> Result<Vec<&'static str>> {
        let mut excluded = Vec::new();
        for groups in ALTERNATIVES {
            let mut given: Vec<_> = groups
                .iter()
                .filter_map(|group| self.strongest(group).map(|(source, option)| (source, option, *group)))
                .collect();
            // The sort is stable: of one source, the first stays first.
            given.sort_by_key(|(source, ..)| std::cmp::Reverse(*source));
            if let [(source, one, _), (same, other, _), ..] = given[..]
                && source == same
            {
                let message = format!("{} cannot be used with {}", named(one, source), named(other, same));
                return Err(Fail::usage(message).hint("leave one of them out").into());
            }
            let weaker = given.iter().skip(1).flat_map(|(_, _, group)| group.iter());
            excluded.extend(weaker.filter(|option| self.source(option).is_some()));
        }
        Ok(excluded)
    }
}

/// An option as it is typed.
fn long(option: &str) -> String {
    format!("--{}", option.replace('_', "-"))
}

/// An option with the place of its value, where that is not the command line.
fn named(option: &str, source: Source) -> String {
    match source {
        Source::CommandLine => long(option),
        Source::Environment => format!("{} of the environment variable {}", long(option), variable(option)),
        Source::File => format!("{} of the configuration file", long(option)),
    }
}

/// The values of a command line, of a command that has those of the environment and the configuration file.
///
/// # Errors
/// If the words are no command line, or options do not go together.
pub(crate) fn parsed(command: Command, file: &FileOptions, words: &[OsString]) -> Result<ArgMatches> {
    let parse =
        |command: Command| command.try_get_matches_from(words).map_err(|error| explained(error, words));
    let found = parse(command.clone())?;
    let given = Given { matches: innermost(&found), command: names(&found), file };
    given.check_needs()?;
    let excluded = given.excluded()?;
    if excluded.is_empty() {
        return Ok(found);
    }
    Ok(parse(without(command, &Cli::command(), &given.command, &excluded))?)
}

/// The names of the command that was given, below that of the program.
fn names(matches: &ArgMatches) -> Vec<&str> {
    let below = matches.subcommand();
    below.map_or_else(Vec::new, |(name, below)| [vec![name], names(below)].concat())
}

/// A command whose subcommand `path` has `options` as the `plain` one has them: with neither variables nor values of the file.
fn without(command: Command, plain: &Command, path: &[&str], options: &[&str]) -> Command {
    let Some((name, path)) = path.split_first() else {
        let plain = plain.get_arguments().filter(|arg| options.contains(&arg.get_id().as_str()));
        return plain.fold(command, |command, plain| command.mut_arg(plain.get_id(), |_| plain.clone()));
    };
    let Some(plain) = plain.find_subcommand(name) else { return command };
    command.mut_subcommand(name, |below| without(below, plain, path, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_related_option_is_one_of_a_command() {
        fn has(command: &Command, option: &str) -> bool {
            let is_it =
                |arg: &clap::Arg| arg.get_id() == option && arg.get_long() == Some(&long(option)[2..]);
            command.get_arguments().any(is_it) || command.get_subcommands().any(|below| has(below, option))
        }
        let command = super::super::command();
        let needs = NEEDS.iter().flat_map(|need| [need.option, need.other]);
        for option in needs.chain(ALTERNATIVES.iter().flat_map(|groups| groups.concat())) {
            assert!(has(&command, option), "{option}");
        }
    }
}
