//! What an installation puts beside the program: completion scripts and manual pages.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::builder::PossibleValuesParser;
use clap::{Arg, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;
use refrain::{AUTO, KNOWN};
use serde_json::json;

use crate::args;
use crate::output::{json_paths, print, print_json};
use crate::settings::Context;

/// Where things are unless options say otherwise, for the manual page of the whole program.
const FILES: [(&str, &str); 4] = [
    ("~/.config/refrain/config.toml", "defaults of options (--config)"),
    ("~/.cache/refrain/models", "models that were pulled by name (--models)"),
    ("~/.local/share/refrain/chunks", "stored chunks and documents (--store)"),
    ("~/.local/share/refrain", "what `refrain tune` and `refrain calibrate` found, model by model"),
];

const EXIT_STATUS: [(&str, &str); 6] = [
    ("0", "what was asked for was done"),
    ("1", "it failed, and standard error says why"),
    (
        "2",
        "the command line, an environment variable, the configuration file or the matrix of an evaluation is wrong",
    ),
    (
        "3",
        "of `refrain ingest`, `eval run`, `job plan ingest` and `job run`: files, documents, samples or answers failed, and the others were done",
    ),
    (
        "4",
        "of `refrain job run`: the machine has another version, model or other settings than the job was planned with, or objects of the plan are missing or broken. The same command would end in the same way",
    ),
    (
        "130",
        "Ctrl-C stopped it, or SIGTERM stopped `refrain ingest`, `generate`, `bench` or `job run` at work",
    ),
];

/// `refrain completions`
pub(crate) fn completions(context: &Context, args: &args::Completions) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut with_values(args::command()), "refrain", &mut script);
    let script = String::from_utf8(script)?;
    if context.json {
        return print_json(&json!({ "shell": args.shell.to_string(), "script": script }));
    }
    print(&script)
}

/// A command whose arguments list the values that completions offer. Arguments accept others too, such as a method with options, so that
/// the command line itself lists none.
fn with_values(command: Command) -> Command {
    let name = command.get_name().to_owned();
    let command = command.mut_args(|arg| {
        let values = values(&name, arg.get_id().as_str());
        if values.is_empty() { arg } else { arg.value_parser(PossibleValuesParser::new(values)) }
    });
    command.mut_subcommands(with_values)
}

/// Known values of an argument of a command. An argument that may be a path has none: shells offer no paths beside values.
fn values(command: &str, arg: &str) -> Vec<&'static str> {
    let models = || KNOWN.iter().map(|known| known.name.as_str());
    let methods = || METHODS.entries.iter().map(|entry| entry.name);
    let policies = || POLICIES.entries.iter().map(|entry| entry.name);
    match (command, arg) {
        ("pull", "name") => models().collect(),
        ("methods", "name") => methods().chain(policies()).collect(),
        (_, "method") => methods().chain([AUTO]).collect(),
        (_, "evict") => policies().collect(),
        (_, "prefix") => vec!["none", "bos", "system", "averaged", AUTO],
        (_, "device") => vec!["cpu", "cuda", AUTO],
        _ => Vec::new(),
    }
}

/// `refrain man`
pub(crate) fn man(context: &Context, args: &args::Man) -> Result<()> {
    let folder = &args.folder;
    let pages = write_pages(folder)
        .with_context(|| format!("cannot write the manual pages into {}", folder.display()))?;
    if context.json {
        return print_json(&json!({ "pages": json_paths(&pages) }));
    }
    let lines: Vec<String> = pages.iter().map(|page| format!("{}\n", page.display())).collect();
    print(&lines.concat())
}

fn write_pages(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fs::create_dir_all(folder)?;
    let mut program = args::command().disable_help_subcommand(true);
    program.build();
    let mut pages = Vec::new();
    let mut left = vec![program];
    while let Some(command) = left.pop() {
        left.extend(command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned());
        let file = folder.join(format!("{}.1", name(&command)));
        let mut out = BufWriter::new(File::create(&file)?);
        write_page(command, &mut out)?;
        out.flush()?;
        pages.push(file);
    }
    pages.sort();
    Ok(pages)
}

/// The name of a page: the words of the command with hyphens between them.
fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn write_page(command: Command, out: &mut impl Write) -> io::Result<()> {
    let name = name(&command).to_owned();
    let is_program = name == "refrain";
    let examples = command.get_after_help().map(ToString::to_string);
    let has_subcommands = command.has_subcommands();
    let man = Man::new(command.mut_args(|arg| shown(arg, is_program)))
        .title(name.to_uppercase())
        // The version in place of a date: the same source makes the same page on any day.
        .date(concat!("refrain ", env!("CARGO_PKG_VERSION")))
        .source("Refrain");
    man.render_title(out)?;
    // Lines of long words, of which these pages have many, are torn apart by an even margin.
    writeln!(out, ".ad l")?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    let mut options = Vec::new();
    man.render_options_section(&mut options)?;
    // A list of methods has no space to break its line at, so one may break behind any of them.
    out.write_all(String::from_utf8_lossy(&options).replace(';', ";\\:").as_bytes())?;
    if has_subcommands {
        man.render_subcommands_section(out)?;
    }
    let mut roff = Roff::new();
    if !is_program {
        roff.control("SH", ["GLOBAL OPTIONS"]);
        let text =
            " has the options of every command: the model, folders, limits of memory and disk, precision.";
        roff.text([bold("refrain"), roman("(1)"), roman(text)]);
    }
    if let Some(text) = examples {
        examples_section(&mut roff, &text);
    }
    if is_program {
        list(&mut roff, "FILES", &FILES);
        list(&mut roff, "EXIT STATUS", &EXIT_STATUS);
    } else {
        // Of `refrain-store-ls`: `refrain-store`.
        roff.control("SH", ["SEE ALSO"]);
        let above = name.rsplit_once('-').map_or("refrain", |(above, _)| above);
        roff.text([bold(above), roman("(1)")]);
    }
    roff.to_writer(out)
}

/// An option as its page shows it. Those of all commands stand in the program's page alone: on forty pages nobody finds
/// the command's own between them.
fn shown(arg: Arg, is_program: bool) -> Arg {
    let is_elsewhere = arg.is_global_set() && !is_program;
    // What `-h` leaves out for want of room would stand without its text.
    arg.hide(is_elsewhere).hide_short_help(false)
}

/// Lines that are indented are shown as they are, the others are paragraphs.
fn examples_section(roff: &mut Roff, text: &str) {
    roff.control("SH", ["EXAMPLES"]);
    let mut as_is = false;
    for line in text.lines().filter(|line| *line != "Examples:") {
        let command = line.strip_prefix("  ");
        if as_is != command.is_some() {
            as_is = command.is_some();
            roff.control(if as_is { "nf" } else { "fi" }, []);
        }
        match command.unwrap_or(line) {
            "" => roff.control("PP", []),
            line => roff.text([roman(line)]),
        };
    }
    if as_is {
        roff.control("fi", []);
    }
}

fn list(roff: &mut Roff, heading: &str, entries: &[(&str, &str)]) {
    roff.control("SH", [heading]);
    for (term, text) in entries {
        roff.control("TP", []);
        roff.text([bold(*term)]);
        roff.text([roman(*text)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_statuses_are_those_of_the_page_of_json() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/json.md");
        let page = std::fs::read_to_string(page).unwrap();
        let rows =
            page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
        let told: Vec<(&str, &str)> = rows.filter(|(status, _)| status.parse::<u8>().is_ok()).collect();
        // Errors are a field there.
        let told: Vec<(&str, String)> = told
            .into_iter()
            .map(|(status, text)| (status, text.replace("`error`", "standard error")))
            .collect();
        assert_eq!(told, EXIT_STATUS.map(|(status, text)| (status, text.to_owned())));
    }
}
