//! The `refrain` program.

mod args;
mod ask;
mod bench;
mod calibrate;
mod chat;
mod checksum;
mod config;
mod documents;
mod eval;
mod examples;
mod explain;
mod generate;
mod health;
mod http;
mod hub;
mod ingest;
mod install;
#[cfg(feature = "remote")]
mod job;
mod kept;
mod limits;
mod machine;
mod methods;
mod models;
#[cfg(feature = "otlp")]
mod otlp;
mod output;
mod pull;
mod pypi;
mod serve;
mod settings;
mod signals;
mod store;
mod table;
mod tune;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgMatches, FromArgMatches};
use refrain::engine::{DeviceFailure, keep_large_memory_apart};
use refrain::store::raise_open_files;

use crate::args::{Bench, Cli, Command, Eval};
use crate::output::Fail;
use crate::settings::Context;

fn main() -> ExitCode {
    keep_large_memory_apart();
    refrain_server::end_as_first_process();
    raise_open_files();
    let given: Vec<OsString> = std::env::args_os().collect();
    let (json, result) = match parse(&given) {
        // Errors before the options are known go where the command line, or else the environment, says.
        Err(error) => (args::asks_json(&given), Err(error)),
        Ok((cli, matches)) => {
            let json = cli.global.json;
            // Steps of the engine tell a device's failure as an error; measurements call devices between them.
            (
                json,
                DeviceFailure::catch(|| dispatch(cli, &matches))
                    .unwrap_or_else(|failure| Err(failure.into())),
            )
        }
    };
    result.map_or_else(|error| output::report(&error, json), |()| ExitCode::SUCCESS)
}

/// Reads the configuration file, then the command line over it.
fn parse(given: &[OsString]) -> Result<(Cli, ArgMatches)> {
    let (command, file) = match config::configured(args::command(), given) {
        Ok(configured) => configured,
        // A broken configuration file does not stand between a person and the help.
        Err(error) => match args::command().try_get_matches_from(given) {
            Err(help) if !help.use_stderr() => return Err(help.into()),
            _ => return Err(error),
        },
    };
    let matches = args::parsed(command, &file, given)?;
    Ok((Cli::from_arg_matches(&matches)?, matches))
}

fn dispatch(cli: Cli, matches: &ArgMatches) -> Result<()> {
    // A wrong REFRAIN_CPU is told before anything is computed.
    refrain::kernels::Isa::selected().map_err(|error| Fail::usage(error.to_string()))?;
    let context = Context::new(cli.global, args::innermost(matches))?;
    // A server derives the namespaces of its clients with the key.
    if let Command::Ingest(_)
    | Command::Ask(_)
    | Command::Chat(_)
    | Command::Generate(_)
    | Command::Store(_)
    | Command::Documents(_) = &cli.command
    {
        context.warn_of_unused_key();
    }
    match &cli.command {
        Command::Pull(args) => pull::run(&context, args),
        Command::Models => models::run(&context),
        Command::Ingest(args) => ingest::run(&context, args),
        Command::Ask(args) => ask::run(&context, args),
        Command::Chat(args) => chat::run(&context, args),
        Command::Generate(args) => generate::run(&context, args),
        Command::Store(args) => store::run(&context, args),
        Command::Documents(args) => kept::run(&context, args),
        Command::Tune(args) => tune::run(&context, args),
        Command::Calibrate(args) => calibrate::run(&context, args),
        Command::Bench(Bench::Ttft(args)) => bench::ttft(&context, args),
        Command::Bench(Bench::Decode(args)) => bench::decode(&context, args),
        Command::Bench(Bench::Memory(args)) => bench::memory(&context, args),
        Command::Bench(Bench::Serve(args)) => bench::serve(&context, args),
        Command::Bench(Bench::Store(args)) => bench::store(&context, args),
        Command::Eval(Eval::Run(args)) => eval::run(&context, args),
        Command::Eval(Eval::Report(args)) => eval::report(&context, args),
        Command::Eval(Eval::Tasks) => eval::tasks(&context),
        Command::Eval(Eval::Fetch) => eval::fetch(&context),
        #[cfg(feature = "remote")]
        Command::Job(args) => job::run(&context, args),
        Command::Serve(args) => serve::run(&context, args),
        Command::Key(args) => serve::key(&context, args),
        Command::Methods(args) => methods::run(&context, args),
        Command::Completions(args) => install::completions(&context, args),
        Command::Man(args) => install::man(&context, args),
        Command::Health(args) => health::run(&context, args),
    }
}
