//! Errors of the command line, with what helps a person on.

use std::ffi::OsString;

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
        let tip = format!("it is the value of the environment variable {variable}").into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// Commands that other programs have, the commands below which they are looked for, and those that do it here.
const ELSEWHERE: [(&str, &[&str], &str); 2] = [
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

/// An error of the words of the command line, with what helps a person on.
pub(crate) fn explained(error: clap::Error, given: &[OsString]) -> clap::Error {
    with_search(with_command(with_list(without_variables(with_variable(error, given), given))), given)
}
