//! The configuration file: its values become the defaults of options.
//!
//! ```toml
//! model = "qwen2.5-coder-0.5b"
//! memory = "4GiB"
//! [ask]
//! method = "a3:ratio=0.2"
//! ```

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};
use toml::{Table, Value};

use crate::args::{FileOptions, is_setting, with_expected};
use crate::output::Fail;
use refrain::folders::{config_folder, expand_tilde};

/// The command with the defaults of the configuration file, if there is one, and the options that have them.
pub(crate) fn configured(command: Command, given: &[OsString]) -> Result<(Command, FileOptions)> {
    let mut options = FileOptions::default();
    let named = named(given).or_else(|| std::env::var_os("REFRAIN_CONFIG").filter(|name| !name.is_empty()));
    let path = match &named {
        Some(name) => expand_tilde(PathBuf::from(name)),
        None => match config_folder() {
            Some(folder) => folder.join("config.toml"),
            None => return Ok((command, options)),
        },
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((command, options));
        }
        Err(error) => {
            return Err(error).with_context(|| {
                Fail::usage(format!("cannot read the configuration file {}", path.display()))
            });
        }
    };
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| anyhow::anyhow!("{}", error.to_string().trim_end()))
        .with_context(|| {
            Fail::usage(format!("the configuration file {} is not valid TOML", path.display()))
        })?;
    let command = with_defaults(command, table, (&path, ""), &mut options)?;
    Ok((command, options))
}

/// The file that the command line names; clap cannot tell before the defaults are known.
fn named(given: &[OsString]) -> Option<OsString> {
    let mut words = given.iter().skip(1).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().cloned();
        }
        if let Some(name) = word.as_bytes().strip_prefix(b"--config=") {
            return Some(OsStr::from_bytes(name).to_owned());
        }
    }
    None
}

/// `table` holds options of `command`, and tables of its subcommands. `at` is the dotted name of the table. The options are added to `options`.
fn with_defaults(
    mut command: Command,
    table: Table,
    (path, at): (&Path, &str),
    options: &mut FileOptions,
) -> Result<Command> {
    for (key, value) in table {
        let full = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        match value {
            Value::Table(inner) if command.find_subcommand(&key).is_some() => {
                let mut result = Ok(());
                command = command.mut_subcommand(&key, |sub| {
                    with_defaults(sub.clone(), inner, (path, &full), options).unwrap_or_else(|error| {
                        result = Err(error);
                        sub
                    })
                });
                result?;
            }
            value => {
                let found = command.get_arguments().find(|arg| is_key(arg, &key)).cloned();
                let Some(arg) = found else {
                    let message =
                        format!("{}: unknown key '{full}'; {}", path.display(), known(&command, &key));
                    return Err(Fail::usage(message).into());
                };
                let values =
                    texts(&value).and_then(|values| check(&arg, &values).map(|()| values)).with_context(
                        || Fail::usage(format!("{}: key '{full}' has a wrong value", path.display())),
                    )?;
                options.insert(at, arg.get_id().as_str());
                command = command.mut_arg(arg.get_id(), |arg| arg.required(false).default_values(values));
            }
        }
    }
    Ok(command)
}

fn is_key(arg: &Arg, key: &str) -> bool {
    let name = arg.get_long().filter(|name| is_setting(arg) && *name != "config");
    name.is_some_and(|name| name == key.replace('_', "-"))
}

/// The place of an unknown key: the tables that it belongs into, or the names that are known where it stands, with the nearest one first.
fn known(command: &Command, key: &str) -> String {
    let tables = tables_with(command, key, "");
    if !tables.is_empty() {
        return format!("it belongs into {}", tables.join(" or "));
    }
    let nearest = nearest(command, key).map(|name| format!("did you mean '{name}'? ")).unwrap_or_default();
    let options = command.get_arguments().filter(|arg| is_setting(arg)).filter_map(Arg::get_long);
    let tables =
        command.get_subcommands().filter(|sub| has_settings(sub)).map(|sub| format!("[{}]", sub.get_name()));
    let options = options.filter(|name| *name != "config").map(str::to_owned);
    format!("{nearest}known here are {}", options.chain(tables).collect::<Vec<_>>().join(", "))
}

/// The tables of the subcommands that have an option of this name, below the dotted name `at`.
fn tables_with(command: &Command, key: &str, at: &str) -> Vec<String> {
    let below = |sub: &Command| {
        let full = if at.is_empty() { sub.get_name().to_owned() } else { format!("{at}.{}", sub.get_name()) };
        let own = sub.get_arguments().any(|arg| is_key(arg, key)).then(|| format!("[{full}]"));
        own.into_iter().chain(tables_with(sub, key, &full)).collect::<Vec<_>>()
    };
    command.get_subcommands().flat_map(below).collect()
}

/// The name of the option that is nearest to a key, as clap finds it for a word of the command line.
fn nearest(command: &Command, key: &str) -> Option<String> {
    let alone = command.clone().no_binary_name(true);
    let error = alone.try_get_matches_from([format!("--{key}")]).err()?;
    let Some(ContextValue::String(option)) = error.get(ContextKind::SuggestedArg) else { return None };
    let name = option.trim_start_matches('-');
    command.get_arguments().any(|arg| is_key(arg, name)).then(|| name.to_owned())
}

fn has_settings(command: &Command) -> bool {
    command.get_arguments().any(is_setting) || command.get_subcommands().any(has_settings)
}

/// The words that would stand on the command line.
fn texts(value: &Value) -> Result<Vec<String>> {
    Ok(match value {
        Value::String(text) => vec![text.clone()],
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => vec![value.to_string()],
        Value::Array(values) => values.iter().map(texts).collect::<Result<Vec<_>>>()?.concat(),
        other => bail!("a {} is no value of an option", other.type_str()),
    })
}

/// Lets clap parse the words as if they were given on the command line.
fn check(arg: &Arg, values: &[String]) -> Result<()> {
    let words = values.iter().map(|value| format!("--{}={value}", arg.get_long().unwrap_or_default()));
    let alone = Command::new("refrain").no_binary_name(true).arg(arg.clone().global(false).required(false));
    alone.try_get_matches_from(words).map(|_| ()).map_err(|error| {
        let text = with_expected(error).to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        match text.lines().find_map(|line| line.trim_start().strip_prefix("tip: ")) {
            Some(tip) => anyhow::anyhow!("{first}: {tip}"),
            None => anyhow::anyhow!("{first}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(text: &str) -> Result<Command> {
        let at = (Path::new("refrain.toml"), "");
        with_defaults(crate::args::command(), text.parse().unwrap(), at, &mut FileOptions::default())
    }

    fn message(text: &str) -> String {
        format!("{:#}", apply(text).unwrap_err())
    }

    #[test]
    fn values_become_defaults_below_the_command_line() {
        let file = "chunk-tokens = 100\njson = true\n[ask]\nmethod = \"a3:ratio=0.3\"\nstop = [\"a\", \"b\"]\n[bench.ttft]\nruns = 2";
        let matches = apply(file).unwrap().try_get_matches_from(["refrain", "ask", "why"]).unwrap();
        let ask = crate::args::innermost(&matches);
        assert_eq!(ask.get_one::<usize>("chunk_tokens"), Some(&100));
        assert_eq!(ask.get_one::<bool>("json"), Some(&true));
        assert_eq!(ask.get_one::<String>("method").unwrap(), "a3:ratio=0.3");
        assert_eq!(ask.get_many::<String>("stop").unwrap().collect::<Vec<_>>(), ["a", "b"]);
        let words = ["refrain", "ask", "why", "--chunk-tokens", "7", "--json=false"];
        let matches = apply(file).unwrap().try_get_matches_from(words).unwrap();
        let ask = crate::args::innermost(&matches);
        assert_eq!(ask.get_one::<usize>("chunk_tokens"), Some(&7));
        assert_eq!(ask.get_one::<bool>("json"), Some(&false));
    }

    #[test]
    fn an_unknown_key_is_told_with_its_table_or_the_nearest_name() {
        for (text, told) in [
            ("max-tokens = 3", "'max-tokens'; it belongs into [ask] or [chat] or [tune]"),
            ("max_tokens = 3", "it belongs into [ask]"),
            ("modle = \"x\"", "'modle'; did you mean 'model'? known here are"),
            ("[ask]\nmax-token = 3", "'ask.max-token'; did you mean 'max-tokens'? known here are"),
            ("colour = 1", "'colour'; known here are"),
        ] {
            assert!(message(text).contains(told), "{}", message(text));
        }
        let told = message("threads = 2.5");
        assert!(told.contains("'2.5'") && told.ends_with(": give a whole number"), "{told}");
    }

    /// No shell expands a path of the file.
    #[test]
    fn paths_may_begin_with_the_home_folder() {
        let home = std::env::home_dir().unwrap();
        let file = "store = \"~/st\"\nmodel = \"~/m.gguf\"\n[serve]\ndocs = [\"~/a\", \"b/~\"]";
        let words = ["refrain", "serve", "--models=~/models"];
        let matches = apply(file).unwrap().try_get_matches_from(words).unwrap();
        let serve = crate::args::innermost(&matches);
        assert_eq!(serve.get_one::<PathBuf>("store"), Some(&home.join("st")));
        assert_eq!(serve.get_one::<PathBuf>("models"), Some(&home.join("models")));
        assert_eq!(serve.get_one::<String>("model"), Some(&home.join("m.gguf").display().to_string()));
        let docs: Vec<_> = serve.get_many::<PathBuf>("docs").unwrap().collect();
        assert_eq!(docs, [&home.join("a"), &PathBuf::from("b/~")]);
    }

    #[test]
    fn errors_name_file_and_key() {
        for (text, key) in [
            ("colour = 1", "colour"),
            ("[ask]\ncolour = 1", "ask.colour"),
            ("[store.rm]\nall = true", "store.rm.all"),
            ("kv = \"f8\"", "kv"),
            ("threads = \"many\"", "threads"),
            ("threads = 2020-01-01", "threads"),
            ("config = \"other.toml\"", "config"),
            ("[ask]\nsoftmax = \"hard\"", "ask.softmax"),
        ] {
            let message = message(text);
            assert!(message.contains("refrain.toml") && message.contains(&format!("'{key}'")), "{message}");
        }
    }
}
