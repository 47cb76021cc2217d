//! The `refrain-sim` program.

mod defaults;
mod gateway;
mod output;
mod presets;
mod scenario;
mod simulation;
mod statistics;
// The table of the `refrain` program.
#[path = "../../cli/src/table.rs"]
mod table;
mod tiers;
mod timing;
mod traffic;
mod worker;

#[cfg(test)]
mod tests;

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{CommandFactory, FromArgMatches, Parser};

use crate::output::{Format, Row};
use crate::scenario::Scenario;
use crate::simulation::Simulation;
use crate::traffic::{Arrival, Corpus, Traffic};

const EXAMPLES: &str = "\
Examples:
  refrain-sim --list
  refrain-sim small-fleet
  refrain-sim smollm2-a3 8b-a3 --workers 100,1000 --rules tessera,cost --markdown
  refrain-sim smollm2-a3 --delay 0,1,10,60 --rules cost
  refrain-sim smollm2-a3 --show > mine.toml && refrain-sim mine.toml --workers 8

A scenario is a set of values for the options: a preset (--list), or a TOML file with options as keys (remote-rate = 0.4) \
and, if wanted, base = \"PRESET\", whose values hold where the file has none. Options of the command line go before the scenario's \
values. --show prints all of them. The same scenario gives the same table.";

/// Simulates a fleet of workers: how long requests wait for their first token under rules that choose a worker.
///
/// The rules `tessera` and `cost` are those of the gateway, by its own code. Requests come by chance (Poisson), each for some chunks,
/// of which few are asked for often; workers queue them, keep chunks in memory and on disk, the least recently used leaving first, and get
/// what is missing from an object store or prefill it. Each rule gets the same requests.
#[derive(Debug, Parser)]
#[command(name = "refrain-sim", version, after_help = EXAMPLES)]
struct Cli {
    /// Presets, or TOML files, each of which is simulated
    #[arg(value_name = "SCENARIO", default_value = "small-fleet")]
    scenarios: Vec<String>,
    /// List the presets
    #[arg(long)]
    list: bool,
    /// Print the values of a scenario as TOML, and simulate nothing
    #[arg(long)]
    show: bool,
    /// Print the requests of a scenario with one number of workers and one rate, and simulate nothing: a JSON object a line, with the time
    /// in seconds, the chunks by number, and the gateway
    #[arg(long)]
    arrivals: bool,
    /// Print a Markdown table
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Print JSON for machines: the scenarios with all their values, and the rows in seconds and bytes
    #[arg(long)]
    json: bool,
    /// Print no progress
    #[arg(long)]
    quiet: bool,
    /// Measure besides how long a choice of the rules tessera and cost takes on this machine, with what the workers hold at the end:
    /// choices a measurement
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "10000", value_parser = clap::value_parser!(u32).range(100..))]
    time_choices: Option<u32>,
    #[command(flatten)]
    scenario: Scenario,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => output::report(&error),
    }
}

fn run() -> Result<()> {
    let given = Cli::try_parse()?;
    if given.list {
        return output::print(&presets::list());
    }
    let mut results = Vec::new();
    for name in &given.scenarios {
        let scenario = parse(name)?.scenario;
        scenario.validate()?;
        if given.show {
            output::print(&format!("# {name}\n{}", toml::to_string(&scenario)?))?;
            continue;
        }
        if given.arrivals {
            output::print(&arrivals(&scenario)?)?;
            continue;
        }
        let rows = simulate(name, &scenario, &given)?;
        results.push((scenario, rows));
    }
    if given.show || given.arrivals {
        return Ok(());
    }
    let format = match (given.markdown, given.json) {
        (true, _) => Format::Markdown,
        (_, true) => Format::Json,
        _ => Format::Text,
    };
    output::print(&output::render(&results, format)?)
}

/// The command line over the values of a scenario.
fn parse(name: &str) -> Result<Cli> {
    let command = defaults::with_values(Cli::command(), &presets::read(name)?)?;
    Ok(Cli::from_arg_matches(&command.try_get_matches_from(std::env::args_os())?)?)
}

/// The requests of a scenario, one a line.
///
/// # Errors
/// If the scenario has requests of several fleets.
fn arrivals(scenario: &Scenario) -> Result<String> {
    let ([workers], [rate]) = (&scenario.workers[..], &scenario.rate[..]) else {
        bail!("--arrivals: give one number of workers and one rate");
    };
    let corpus = Corpus::new(scenario, *workers);
    let lines = Traffic::new(scenario, *workers, *rate, &corpus).map(|arrival| {
        let Arrival { time, chunks, gateway, .. } = arrival;
        format!("{}\n", serde_json::json!({ "time": time, "chunks": chunks, "gateway": gateway }))
    });
    Ok(lines.collect())
}

/// One row for each number of workers, rate, delay and rule.
fn simulate(name: &str, scenario: &Scenario, given: &Cli) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for workers in &scenario.workers {
        let corpus = Corpus::new(scenario, *workers);
        for case in scenario.cases(*workers) {
            let what = format!("{name}, {workers} workers, {}", case.rule.name());
            let bar = output::bar(given.quiet, what, scenario.requests * *workers as u64);
            let simulation = Simulation::new(scenario, &case, &corpus)?;
            let (statistics, mut gateways) = simulation.run(&mut |done| bar.set_position(done))?;
            bar.finish_and_clear();
            let choice = match given.time_choices {
                Some(choices) if case.rule.is_of_the_router() => {
                    Some(timing::choices(&mut gateways[0], scenario, &case, &corpus, choices))
                }
                _ => None,
            };
            let (scenario, summary) = (name.to_owned(), statistics.summary(scenario.chunk_bytes()));
            rows.push(Row { scenario, case, summary, choice });
        }
    }
    Ok(rows)
}
