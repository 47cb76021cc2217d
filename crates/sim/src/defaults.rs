//! Values of a scenario as the defaults of options, so that options of the command line go before them.

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, Command};
use toml::Value;

use crate::presets::Values;

/// The command with a scenario's values as its defaults.
///
/// # Errors
/// If a key is no option, or a value is none of its option's.
pub(crate) fn with_values(mut command: Command, values: &Values) -> Result<Command> {
    for (key, value) in &values.table {
        let is_key = |arg: &&Arg| is_value(arg) && arg.get_long() == Some(key.replace('_', "-").as_str());
        let Some(arg) = command.get_arguments().find(is_key).cloned() else {
            let known = command.get_arguments().filter(|arg| is_value(arg)).filter_map(Arg::get_long);
            let known = known.collect::<Vec<_>>().join(", ");
            bail!("{}: unknown key '{key}'; known are base, {known}", values.from);
        };
        let Some(texts) = texts(value) else {
            bail!(
                "{}: key '{key}' has a wrong value: a {} is none of an option",
                values.from,
                value.type_str()
            );
        };
        let words = texts.iter().map(|text| format!("--{}={text}", arg.get_long().unwrap_or_default()));
        if let Err(error) =
            Command::new("refrain-sim").no_binary_name(true).arg(arg.clone()).try_get_matches_from(words)
        {
            let error = error.to_string();
            let first = error.lines().next().unwrap_or_default().trim_start_matches("error: ");
            bail!("{}: key '{key}' has a wrong value: {first}", values.from);
        }
        command = command.mut_arg(arg.get_id(), |arg| arg.default_values(texts));
    }
    Ok(command)
}

/// Whether an option is a value of scenarios: those of the program itself have no heading.
fn is_value(arg: &Arg) -> bool {
    arg.get_help_heading().is_some() && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

/// The words that would stand on the command line.
fn texts(value: &Value) -> Option<Vec<String>> {
    Some(match value {
        Value::String(text) => vec![text.clone()],
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => vec![value.to_string()],
        Value::Array(values) => values.iter().map(texts).collect::<Option<Vec<_>>>()?.concat(),
        _ => return None,
    })
}
