//! Tables, JSON, progress and errors.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::scenario::{Case, Scenario};
use crate::statistics::Summary;
use crate::table::Table;
use crate::timing::ChoiceTime;

/// How results are printed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Format {
    Text,
    Markdown,
    Json,
}

/// A simulation's result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) scenario: String,
    #[serde(flatten)]
    pub(crate) case: Case,
    #[serde(flatten)]
    pub(crate) summary: Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) choice: Option<ChoiceTime>,
}

/// The rows of all scenarios.
///
/// # Errors
/// If they cannot be written as JSON.
pub(crate) fn render(results: &[(Scenario, Vec<Row>)], format: Format) -> Result<String> {
    let rows = || results.iter().flat_map(|(_, rows)| rows);
    if let Format::Json = format {
        let scenarios: Vec<_> = results
            .iter()
            .map(|(scenario, rows)| serde_json::json!({ "values": scenario, "rows": rows }))
            .collect();
        return Ok(format!("{}\n", serde_json::to_string_pretty(&scenarios)?));
    }
    let mut table = Table::new(&[
        "<scenario",
        "workers",
        "<rate",
        "delay",
        "<rule",
        "TTFT p50",
        "p95",
        "p99",
        "memory",
        "disk",
        "fetched",
        "prefilled",
        "gets",
        "bytes",
        "utilisation",
        "busiest",
    ]);
    rows().for_each(|row| table.push(cells(row)));
    let mut text = match format {
        Format::Markdown => table.markdown(),
        _ => table.text(),
    };
    if rows().any(|row| row.choice.is_some()) {
        let mut times =
            Table::new(&["<scenario", "workers", "<rule", "µs a choice: least", "median", "pairs"]);
        for row in rows() {
            let Some(ChoiceTime { least, median, pairs }) = row.choice else { continue };
            let (scenario, rule) = (row.scenario.clone(), row.case.rule.name());
            let (least, median) = (format!("{least:.1}"), format!("{median:.1}"));
            times.push(vec![scenario, row.case.workers.to_string(), rule, least, median, pairs.to_string()]);
        }
        text.push('\n');
        text.push_str(&if let Format::Markdown = format { times.markdown() } else { times.text() });
    }
    Ok(text)
}

fn cells(row: &Row) -> Vec<String> {
    let Summary {
        ttft_p50,
        ttft_p95,
        ttft_p99,
        memory_share,
        disk_share,
        fetched_share,
        prefilled_share,
        gets,
        remote_bytes,
        utilisation,
        busiest,
        ..
    } = row.summary;
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    vec![
        row.scenario.clone(),
        row.case.workers.to_string(),
        row.case.rate.to_string(),
        format!("{} s", row.case.delay),
        row.case.rule.name(),
        milliseconds(ttft_p50),
        milliseconds(ttft_p95),
        milliseconds(ttft_p99),
        percent(memory_share),
        percent(disk_share),
        percent(fetched_share),
        percent(prefilled_share),
        format!("{gets:.2}"),
        format!("{:.1} MB", remote_bytes / 1e6),
        percent(utilisation),
        format!("{busiest:.2}"),
    ]
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.0} ms", seconds * 1e3)
}

/// Prints to standard output. A reader that has gone away is no failure.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// A bar of the requests that have come, on standard error; hidden where that is no terminal.
pub(crate) fn bar(quiet: bool, what: String, requests: u64) -> ProgressBar {
    if quiet || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template("{msg} {bar:30.cyan} {human_pos} of {human_len} requests, {eta} left");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸ ");
    ProgressBar::new(requests).with_style(style).with_message(what)
}

/// Tells an error, or prints the help that was asked for.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if let Some(error) = error.downcast_ref::<clap::Error>() {
        let _ = error.print();
        return ExitCode::from(error.exit_code() as u8);
    }
    let _ = writeln!(io::stderr(), "error: {error:#}");
    ExitCode::FAILURE
}
