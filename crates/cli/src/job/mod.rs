//! `refrain job`: ingest and evaluation on many machines, over shards in an object store.

mod eval;
mod ingest;
mod kind;
mod planned;
mod runner;
mod settings;
mod status;

use anyhow::Result;

use self::kind::{EVAL, INGEST};
use self::planned::open_patiently;
use self::runner::Runner;
use crate::args::{Job as Command, JobPlan, JobRun};
use crate::output::{Fail, LASTING, one_line};
use crate::settings::Context;

/// `refrain job`
pub(crate) fn run(context: &Context, command: &Command) -> Result<()> {
    match command {
        Command::Plan(JobPlan::Ingest(args)) => ingest::plan(context, args),
        Command::Plan(JobPlan::Eval(args)) => eval::plan(context, args),
        Command::Run(args) => run_shards(context, args),
        Command::Status(args) => status::run(context, args),
        Command::Results(args) => eval::results(context, args),
    }
}

/// `refrain job run`
fn run_shards(context: &Context, args: &JobRun) -> Result<()> {
    let runner = Runner::new(args)?;
    let ended = open_patiently(context, &runner).and_then(|job| match job.manifest().kind.as_str() {
        INGEST => ingest::run(context, &job, &runner),
        EVAL => eval::run(context, &job, &runner),
        kind => {
            let fail = Fail::new(format!("this program does no jobs of the kind {}", one_line(kind)));
            Err(fail.status(LASTING).into())
        }
    });
    // The status tells launchers that another start would end in the same way.
    ended.map_err(|error| match error.downcast_ref::<refrain_jobs::Error>() {
        Some(lasting) if lasting.is_lasting() => Fail::new(lasting.to_string()).status(LASTING).into(),
        _ => error,
    })
}
