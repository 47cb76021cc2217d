//! Printing: standard output that may be a broken pipe, errors with hints, progress bars, colours, quantities.

use std::borrow::Cow;
use std::io::{self, BufRead, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use refrain_server::shows_colours;
use serde::Serialize;
use serde_json::{Value, json};

use crate::signals::Interrupted;
use crate::table::{columns, whole_words};

mod quantities;

pub(crate) use self::quantities::{age, bytes, count, number, percent, seconds};

/// An error of the program itself, with a hint.
#[derive(Debug)]
pub(crate) struct Fail {
    message: String,
    hint: Option<String>,
    status: u8,
}

impl Fail {
    pub(crate) fn new(message: impl Into<String>) -> Fail {
        Fail { message: message.into(), hint: None, status: FAILED }
    }

    /// An error of the command line, not of the world.
    pub(crate) fn usage(message: impl Into<String>) -> Fail {
        Fail::new(message).status(USAGE)
    }

    pub(crate) fn status(self, status: u8) -> Fail {
        Fail { status, ..self }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Fail {
        Fail { hint: Some(hint.into()), ..self }
    }
}

impl std::fmt::Display for Fail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fail {}

/// An exit status that is no error of its own: what there is to say was said.
#[derive(Debug)]
pub(crate) struct Exit(pub(crate) u8);

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit status {}", self.0)
    }
}

impl std::error::Error for Exit {}

/// The exit status of an error, and that of a wrong command line.
const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// The exit status where all was done, and some files, documents, samples or answers failed.
pub(crate) const SOME_FAILED: u8 = 3;

/// The exit status of `refrain job run` where the same command on the same machine would end in the same way: the job cannot be done there, or
/// not as it was planned.
pub(crate) const LASTING: u8 = 4;

/// The exit status of a program that Ctrl-C or SIGTERM has stopped.
pub(crate) const STOPPED: u8 = 130;

/// Text or JSON that standard output does not take.
#[derive(Debug)]
pub(crate) struct NotPrinted(pub(crate) io::Error);

impl NotPrinted {
    /// Whether the reader of standard output has ended, as one does that has seen enough.
    fn is_unread(&self) -> bool {
        self.0.kind() == ErrorKind::BrokenPipe
    }
}

impl std::fmt::Display for NotPrinted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cannot write to standard output")
    }
}

impl std::error::Error for NotPrinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Prints an error and returns the exit code.
pub(crate) fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    // A reader that has seen enough is no error. One of an archive needs all of it, and one of a socket is none of this program's output.
    if error.downcast_ref().is_some_and(NotPrinted::is_unread) {
        return ExitCode::SUCCESS;
    }
    if let Some(Exit(status)) = error.downcast_ref() {
        return ExitCode::from(*status);
    }
    if error.is::<Interrupted>() {
        if json {
            let _ = print_json(&json!({ "error": error.to_string(), "hint": null }));
        }
        say(&error.to_string());
        return ExitCode::from(STOPPED);
    }
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        if usage.use_stderr() && json {
            let _ = print_json(&usage_json(usage));
        }
        let _ = usage.print();
        return ExitCode::from(u8::try_from(usage.exit_code()).unwrap_or(USAGE));
    }
    let told = Told::of(error);
    if json {
        let _ = print_json(&told.add_to(json!({})));
    }
    told.say();
    ExitCode::from(told.status)
}

/// An error of the command line as JSON has it.
fn usage_json(usage: &clap::Error) -> Value {
    // The text of this kind is the help.
    if usage.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return json!({ "error": "a command is missing", "hint": "--help lists the commands" });
    }
    let text = usage.to_string();
    // The first paragraph is the error; tips and the usage follow.
    let wrong = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    let wrong = wrong.split_whitespace().collect::<Vec<_>>().join(" ");
    let tips: Vec<&str> = text.lines().filter_map(|line| line.trim_start().strip_prefix("tip: ")).collect();
    json!({ "error": wrong, "hint": (!tips.is_empty()).then(|| tips.join("; ")) })
}

/// An error as it is told.
struct Told {
    causes: Vec<String>,
    hint: Option<String>,
    status: u8,
}

impl Told {
    fn of(error: &anyhow::Error) -> Told {
        // `anyhow` finds the outermost one, be it the error or its context.
        let fail = error.downcast_ref::<Fail>();
        let hint = match error.downcast_ref::<refrain::Error>() {
            Some(error) => error.hint(),
            None => fail.and_then(|fail| fail.hint.clone()),
        };
        let is_usage = matches!(error.downcast_ref(), Some(refrain::Error::Address { .. }))
            || matches!(error.downcast_ref(), Some(refrain_eval::Error::Usage(_)));
        let status = if is_usage { USAGE } else { fail.map_or(FAILED, |fail| fail.status) };
        Told { causes: causes(error), hint, status }
    }

    /// A JSON object with the error's text and hint as `error` and `hint`.
    fn add_to(&self, mut object: Value) -> Value {
        object["error"] = json!(self.causes.join(": "));
        object["hint"] = json!(self.hint);
        object
    }

    /// Tells it on standard error.
    fn say(&self) {
        let mut text = format!("{} {}", paint("1;31", "error:", &io::stderr()), plain(&self.causes[0]));
        for cause in &self.causes[1..] {
            text.push_str(&format!("\n  because: {}", plain(cause).replace('\n', "\n  ")));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("\n{} {}", paint("1;36", "hint:", &io::stderr()), plain(hint)));
        }
        say(&text);
    }
}

/// Prints the JSON object of a result. An error that came with the result stands in the object, as `error` and `hint`, and on standard error,
/// so that standard output has one value.
///
/// # Errors
/// [`NotPrinted`], and the [`Exit`] status of the error, which also tells of it where nobody reads the output.
pub(crate) fn print_result(result: Value, outcome: Result<()>) -> Result<()> {
    let Err(error) = outcome else { return print_json(&result) };
    let told = Told::of(&error);
    let _ = print_json(&told.add_to(result));
    told.say();
    Err(Exit(told.status).into())
}

/// The messages of the chain, without those that the one before contains.
fn causes(error: &anyhow::Error) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    for cause in error.chain().map(ToString::to_string) {
        if !said.last().is_some_and(|last| last.contains(&cause)) {
            said.push(cause);
        }
    }
    said
}

/// Prints to standard output.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(NotPrinted)?)
}

/// Prints one JSON value: on lines of its own for a terminal, on one line for machines.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    let text = if io::stdout().is_terminal() {
        serde_json::to_string_pretty(value)?
    } else {
        serde_json::to_string(value)?
    };
    print(&format!("{text}\n"))
}

/// A path as JSON has it, whose strings are Unicode: other bytes are replaced.
pub(crate) fn json_path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// [`json_path`] of each.
pub(crate) fn json_paths(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|path| json_path(path)).collect()
}

/// Asks before `number` things are removed, where somebody can answer. Where nobody can, what was named is removed, and `all` only with
/// `--yes`.
pub(crate) fn confirmed(json: bool, all: bool, number: usize, question: &str) -> Result<()> {
    if json || !io::stdin().is_terminal() {
        return if all {
            Err(Fail::new("nothing was removed: --all asks first, and nobody can answer")
                .hint("give --yes")
                .into())
        } else {
            Ok(())
        };
    }
    if number == 0 {
        return Ok(());
    }
    // Standard output may be a file or another program, where nobody would see the question.
    write!(io::stderr(), "{}", paint("1", &format!("{question} [y/N] "), &io::stderr()))?;
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    if matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes") {
        Ok(())
    } else {
        Err(Fail::new("nothing was removed").into())
    }
}

/// Prints a line to standard error, broken between words where that is a narrower terminal. A closed standard error is no failure.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{}", broken(text, &io::stderr()));
}

/// Text whose lines are broken between words where `stream` is a terminal that is narrower.
pub(crate) fn broken<'a>(text: &'a str, stream: &impl AsFd) -> Cow<'a, str> {
    match columns(stream) {
        Some(columns) => Cow::Owned(textwrap::fill(text, whole_words(columns))),
        None => Cow::Borrowed(text),
    }
}

/// Progress and remarks on standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Console {
    /// Neither bars nor remarks are shown.
    pub(crate) quiet: bool,
    /// Remarks and warnings are entries of the log, so that every line of it is JSON where one is.
    pub(crate) logs: bool,
}

impl Console {
    /// A progress bar; hidden where standard error is no terminal.
    pub(crate) fn bar(&self, what: &'static str, rest: &str) -> ProgressBar {
        if self.quiet { ProgressBar::hidden() } else { bar(what, rest) }
    }

    /// A progress bar with its percentage and a message that changes; hidden where standard error is no terminal.
    pub(crate) fn message_bar(&self) -> ProgressBar {
        if self.quiet { ProgressBar::hidden() } else { styled(MESSAGE_BAR) }
    }

    /// A spinner for work of unknown length; hidden where standard error is no terminal.
    pub(crate) fn spinner(&self, what: &'static str) -> ProgressBar {
        if self.quiet { ProgressBar::hidden() } else { spinner(what) }
    }

    /// Prints a remark.
    pub(crate) fn say(&self, text: &str) {
        if self.logs {
            tracing::info!("{text}");
        } else if !self.quiet {
            say(text);
        }
    }

    /// Warns, even with --quiet.
    pub(crate) fn warn(&self, text: &str) {
        if self.logs { tracing::warn!("{text}") } else { warn(text) }
    }
}

/// Sets a bar's length and position.
pub(crate) fn show(bar: &ProgressBar, done: u64, total: u64) {
    // A bar without a length is empty, and one of length 0 is full.
    if total > 0 {
        bar.set_length(total);
    }
    bar.set_position(done);
}

/// Warns on standard error, even with --quiet.
pub(crate) fn warn(text: &str) {
    say(&format!("{} {text}", paint("1;33", "warning:", &io::stderr())));
}

/// Text in an ANSI style where `stream` is a terminal that shows it.
pub(crate) fn paint(style: &str, text: &str, stream: &impl IsTerminal) -> String {
    if shows_colours(stream) { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Text of a model or a document as a stream gets it: a terminal would obey its control characters.
pub(crate) fn stream_text(text: &str, to_terminal: bool) -> Cow<'_, str> {
    if to_terminal { Cow::Owned(plain(text)) } else { Cow::Borrowed(text) }
}

/// Text without control characters other than line ends and tabs.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { ' ' } else { c }).collect()
}

/// Text without control characters.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A bar whose message is cut at the terminal's width.
const MESSAGE_BAR: &str = "{bar:20.cyan} {percent}% {wide_msg}";

/// A progress bar on standard error, as wide as the terminal leaves room. `{rate}` in `rest` is tokens a second, `{left}` the time that is left, once that can be told.
fn bar(what: &'static str, rest: &str) -> ProgressBar {
    styled(&format!("{{msg}} {{wide_bar:.cyan}} {rest}")).with_message(what)
}

fn styled(template: &str) -> ProgressBar {
    let rate = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let _ = write!(out, "{:.0} tokens/s", state.per_sec());
    };
    let left = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        if state.pos() > 0 {
            let _ = write!(out, ", {:#} left", HumanDuration(state.eta()));
        }
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let style = style.with_key("rate", rate).with_key("left", left).progress_chars("━╸ ");
    let bar = ProgressBar::no_length().with_style(style);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn spinner(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner:.cyan} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    let spinner = ProgressBar::new_spinner().with_style(style).with_message(what);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// An exit code has no equality of its own.
    fn code(error: impl Into<anyhow::Error>) -> String {
        format!("{:?}", report(&error.into(), false))
    }

    #[test]
    fn only_a_reader_of_printed_text_may_stop_early() {
        let broken = || io::Error::from(ErrorKind::BrokenPipe);
        let (good, bad) = (format!("{:?}", ExitCode::SUCCESS), format!("{:?}", ExitCode::from(1)));
        assert_eq!(code(NotPrinted(broken())), good);
        assert_eq!(code(anyhow::Error::new(NotPrinted(broken())).context("an answer")), good);
        assert_eq!(code(NotPrinted(ErrorKind::StorageFull.into())), bad);
        assert_eq!(code(broken()), bad);
        assert_eq!(code(anyhow::Error::new(broken()).context("the archive")), bad);
    }
    #[test]
    fn errors_of_the_command_line_are_told_with_their_tips_and_never_as_the_help() {
        let of = |words: &[&str]| {
            let words = ["refrain"].iter().chain(words);
            usage_json(&crate::args::Cli::command().try_get_matches_from(words).unwrap_err())
        };
        let none = of(&[]);
        assert_eq!(
            (&none["error"], &of(&["store"])["error"]),
            (&json!("a command is missing"), &none["error"])
        );
        let near = of(&["store", "lst"]);
        assert!(near["error"].as_str().unwrap().contains("'lst'"), "{near}");
        assert!(near["hint"].as_str().unwrap().contains("'ls'"), "{near}");
        assert_eq!(of(&["ask", "why", "--kv", "f8"])["hint"], Value::Null);
    }

    #[test]
    fn a_terminal_gets_no_control_characters() {
        assert_eq!(stream_text("a\u{1b}[2Jb\n", true), "a [2Jb\n");
        assert_eq!(stream_text("a\u{1b}[2Jb\n", false), "a\u{1b}[2Jb\n");
    }
}
