//! Errors of the command line, with what helps a person on.

use std::error::Error as _;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::{Cli, is_set, variable};

/// Commands with an argument that another command lists, and the remark of its absence.
const LISTS: [(&str, &str); 4] = [
    ("refrain store rm ", "`refrain store ls` lists the keys; --all stands for all of them"),
    ("refrain store pin ", "`refrain store ls` lists the keys; --all stands for all of them"),
    ("refrain documents rm ", "`refrain documents ls` lists the ids; --all stands for all of them"),
    ("refrain pull ", "`refrain pull --list` lists the known names; a model of the hub is hf:ORG/NAME"),
];

/// The error of a missing argument, which names the command that lists some.
fn with_list(mut error: clap::Error) -> clap::Error {
    if error.kind() == ErrorKind::MissingRequiredArgument
        && let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage)
        && let usage = usage.to_string()
        && let Some((_, tip)) = LISTS.iter().find(|(command, _)| usage.contains(command))
    {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![(*tip).into()]));
    }
    error
}

/// The error of a wrong value, which names its environment variable where the words of the command line do not give the option.
fn with_variable(mut error: clap::Error, given: &[OsString]) -> clap::Error {
    let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg) else { return error };
    let option = arg.split([' ', '[', '=']).next().unwrap_or_default().to_owned();
    let variable = variable(option.trim_start_matches('-'));
    let is_typed = given.iter().any(|word| word.to_string_lossy().starts_with(&option));
    if !is_typed && is_set(&variable) {
        add_tip(&mut error, format!("it is the value of the environment variable {variable}"));
    }
    error
}

/// Adds a tip to those that an error has.
fn add_tip(error: &mut clap::Error, tip: String) {
    let mut tips = match error.remove(ContextKind::Suggested) {
        Some(ContextValue::StyledStrs(tips)) => tips,
        _ => Vec::new(),
    };
    tips.push(tip.into());
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
}

/// The reason that clap gives where a value is no boolean.
const NO_BOOLEAN: &str = "value was not a boolean";

/// The values to give in place of one that a parser of the standard library or of clap refuses in its own words.
fn expected(error: &clap::Error) -> Option<&'static str> {
    let reason = error.source()?;
    if let Some(reason) = reason.downcast_ref::<ParseIntError>() {
        let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return None };
        return Some(match reason.kind() {
            IntErrorKind::PosOverflow => "give a smaller number",
            _ if value.parse::<i64>().is_ok() => "give a whole number of 0 or more",
            _ => "give a whole number",
        });
    }
    if reason.is::<ParseFloatError>() {
        return Some("give a number");
    }
    (reason.to_string() == NO_BOOLEAN).then_some("give true or false")
}

/// The error of a wrong value with a tip in place of the words of a parser. Other reasons say themselves which values are right.
pub(crate) fn with_expected(error: clap::Error) -> clap::Error {
    let Some(expected) = expected(&error) else { return error };
    // An error's reason cannot be removed.
    let mut plain = clap::Error::new(error.kind()).with_cmd(&Cli::command());
    for (kind, value) in error.context() {
        plain.insert(kind, value.clone());
    }
    add_tip(&mut plain, expected.to_owned());
    plain
}

/// Commands that other programs have, the commands below which they are looked for, and those that do it here.
const ELSEWHERE: [(&str, &[&str], &str); 3] = [
    (
        "list",
        &["", "documents", "store"],
        "`refrain models` lists models, `refrain documents ls` documents and `refrain store ls` chunks",
    ),
    (
        "run",
        &[""],
        "`refrain ask` answers a question, `refrain chat` talks, and `refrain serve` answers by HTTP",
    ),
    ("version", &[""], "`refrain --version` tells it"),
];

/// The words of the command in a usage, which begins with `Usage:` and the program's name.
fn command_of(usage: &str) -> String {
    let words = usage.split_whitespace().skip(2);
    words.take_while(|word| !word.starts_with(['[', '<', '-'])).collect::<Vec<_>>().join(" ")
}

/// The error of an unknown command, which names the one that is meant where the nearest name is another one.
fn with_command(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand)
        && let Some((_, below, tip)) = ELSEWHERE.iter().find(|(other, ..)| other == name)
        && let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage)
        && below.contains(&command_of(&usage.to_string()).as_str())
    {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![(*tip).into()]));
    }
    error
}

/// The error of missing words as it is without environment variables. Options whose variables are set would stand in the usage as if
/// they were required, and a command alone would be no request for its help.
fn without_variables(mut error: clap::Error, given: &[OsString]) -> clap::Error {
    if !matches!(error.kind(), ErrorKind::MissingRequiredArgument | ErrorKind::MissingSubcommand) {
        return error;
    }
    let Err(plain) = Cli::command().try_get_matches_from(given) else { return error };
    if plain.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return plain;
    }
    if plain.kind() == error.kind()
        && let Some(usage) = plain.get(ContextKind::Usage)
    {
        error.insert(ContextKind::Usage, usage.clone());
    }
    error
}

/// The error of a number behind `--search`, which is taken for the question, so that the question is one argument too many.
fn with_search(mut error: clap::Error, given: &[OsString]) -> clap::Error {
    let number =
        |pair: &&[OsString]| pair[0] == "--search" && pair[1].to_string_lossy().parse::<u32>().is_ok();
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(pair) = given.windows(2).find(number)
    {
        let tip = format!("write --search={}", pair[1].display()).into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// The error of a question without quotes, of which the first word is taken for the whole.
fn with_quotes(mut error: clap::Error) -> clap::Error {
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && !word.starts_with('-')
        && let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage)
        && let command = command_of(&usage.to_string())
        && ["ask", "generate"].contains(&command.as_str())
    {
        add_tip(&mut error, format!("put the whole text in quotes: refrain {command} \"…\""));
    }
    error
}

/// An error of the words of the command line, with what helps a person on.
pub(crate) fn explained(error: clap::Error, given: &[OsString]) -> clap::Error {
    let error = with_variable(with_expected(error), given);
    let error = with_command(with_list(without_variables(error, given)));
    with_search(with_quotes(error), given)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of a command line.
    fn told(words: &[&str]) -> String {
        let given: Vec<OsString> = ["refrain"].iter().chain(words).map(OsString::from).collect();
        explained(Cli::command().try_get_matches_from(&given).unwrap_err(), &given).to_string()
    }

    #[test]
    fn a_question_without_quotes_is_told_where_they_belong() {
        for command in ["ask", "generate"] {
            let told = told(&[command, "What", "time"]);
            assert!(told.contains(&format!("in quotes: refrain {command} \"…\"")), "{told}");
        }
        for words in [&["ask", "What", "--tme"][..], &["models", "all"]] {
            assert!(!told(words).contains("in quotes"), "{words:?}");
        }
        assert!(told(&["version"]).contains("refrain --version"));
    }

    #[test]
    fn wrong_values_are_told_with_those_that_are_right() {
        for (words, expected) in [
            (&["ask", "why", "--search=x"][..], "give a whole number"),
            (&["ask", "why", "--max-tokens=-5"][..], "give a whole number of 0 or more"),
            (&["models", "--threads=2.5"][..], "give a whole number"),
            (&["models", "--threads=99999999999999999999"][..], "give a smaller number"),
            (&["ask", "why", "--temperature=hot"][..], "give a number"),
            (&["models", "--quiet=maybe"][..], "give true or false"),
        ] {
            let told = told(words);
            assert!(told.contains(&format!("tip: {expected}\n")), "{told}");
            for foreign in ["digit", "literal", "boolean", "target type"] {
                assert!(!told.contains(foreign), "{told}");
            }
        }
        assert!(told(&["models", "--memory=x"]).contains("give a number of bytes"));
    }
}
