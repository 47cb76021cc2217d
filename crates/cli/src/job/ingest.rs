//! Ingest as a job.

use anyhow::Result;
use refrain::Document;
use refrain::corpus::check_shareable;
use refrain::engine::Instructions;
use refrain::model::{ModelFiles, Specials, Tokenizer};
use refrain_jobs::{IngestWork, Item, Job, ShardSize};

use super::kind::INGEST;
use super::planned::{new_plan, tell, to_map};
use super::runner::Runner;
use super::settings::IngestSettings;

use crate::args;
use crate::documents::each_document;
use crate::methods;
use crate::output::{Exit, SOME_FAILED, warn};
use crate::settings::Context;

/// `refrain job plan ingest`
pub(super) fn plan(context: &Context, args: &args::PlanIngest) -> Result<()> {
    context.warn_of_unused_key();
    let method = methods::asked(context, &args.method)?;
    let settings = IngestSettings::of(context, method.spec, args.system.clone())?;
    let files = ModelFiles::open(refrain::resolve(&context.global.model, &context.models)?)?;
    let tokenizer = Tokenizer::open(&files)?;
    let size = ShardSize { items: args.shard_documents as usize, weight: args.shard_tokens };
    let mut plan = new_plan(context, &args.job, size)?;
    let mut duplicates = 0;
    let (failures, ..) = each_document(context.console, &args.paths, |document| {
        let tokens = tokens(&tokenizer, &document);
        duplicates += usize::from(!plan.add("", &Item::of_document(document, tokens))?);
        Ok(())
    })?;
    let planned = plan.finish(INGEST, to_map(&settings)?)?;
    tell(context, &args.job, &planned, &failures, duplicates)?;
    // The status tells of failures where nobody reads the output, too.
    if failures.is_empty() { Ok(()) } else { Err(Exit(SOME_FAILED).into()) }
}

/// Tokens of a document. One that cannot be tokenised is listed as failed when it is its turn.
fn tokens(tokenizer: &Tokenizer, document: &Document) -> u64 {
    /// Bytes of a token, roughly.
    const BYTES: usize = 4;
    // One that is too large to be kept is listed as failed as well.
    let is_shareable = check_shareable(document).is_ok();
    let count = |text: &str| {
        let ids = is_shareable.then(|| tokenizer.encode(text, Specials::Plain).ok());
        ids.flatten().map_or(text.len() / BYTES, |ids| ids.len())
    };
    (count(&document.title) + count(&document.text)) as u64
}

/// `refrain job run` of an ingest.
pub(super) fn run(context: &Context, job: &Job, runner: &Runner<'_>) -> Result<()> {
    context.warn_of_unused_key();
    let planned: IngestSettings = job.settings(INGEST)?;
    let (context, settings) = planned.of_runner(context)?;
    job.manifest().check_settings(INGEST, &to_map(&settings)?)?;
    let method = methods::method(&settings.method)?;
    let instructions = Instructions { system: settings.system.clone(), ..Instructions::default() };
    let engine = context.open_engine(&instructions)?;
    let patience = runner.options.patience;
    let mut work = IngestWork::new(&engine, method.built, settings.documents, patience, warn);
    runner.run(&context, job, &mut work)
}
