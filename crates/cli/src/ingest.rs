//! `refrain ingest`: documents are prefilled once and kept.

use std::time::Duration;

use anyhow::Result;
use refrain::Library;
use refrain::corpus::Error as CorpusError;
use refrain::engine::{Engine, IngestProgress, IngestReport, PromptChunk, rate};
use serde_json::json;

use crate::args;
use crate::documents::{Documents, read_documents, unread};
use crate::methods::{self, Method};
use crate::output::{self, Exit, Fail, SOME_FAILED, bytes, count, print, print_json, seconds, show};
use crate::settings::Context;
use refrain::folders::tilde;

/// `refrain ingest`
pub(crate) fn run(context: &Context, args: &args::Ingest) -> Result<()> {
    let method = methods::asked(context, &args.method)?;
    let Documents { documents, failures } = read_documents(context.console, &args.paths)?;
    let engine = context.open_engine(&args.instructions())?;
    let report = ingest(context, |progress| engine.ingest_for(&documents, &method.built, progress))?;
    // Chunks are of use without it, so that the command goes on.
    let kept = context.documents(engine.store()).and_then(|store| Library::keep(&engine, store, &documents));
    // A server keeps the store's documents to itself while it runs, and this command shares its chunks.
    let is_missed = kept.as_ref().is_err_and(|error| !matches!(error, CorpusError::InUse { .. }));
    let kept = kept
        .map_err(|error| {
            output::warn(&format!("`refrain ask --search` does not find these documents: {error}"));
        })
        .ok();
    let unpublished = kept.iter().flatten().filter(|document| document.published == Some(false)).count();
    if unpublished > 0 {
        output::warn(&format!(
            "{} not shared yet, the next server or `refrain ask --search` here tries again",
            count(unpublished, "document")
        ));
    }
    if !context.json {
        print(&format!("{}{}\n", line(context, &report), unread(failures.len())))?;
    }
    #[cfg(feature = "remote")]
    share(context, engine.store());
    match &report.not_stored {
        None => {
            if context.json {
                let mut value = json!(report);
                value["failures"] = json!(failures);
                value["searchable"] = json!(kept.is_some());
                value["unpublished"] = json!(unpublished);
                print_json(&value)?;
            }
            // The status tells of failures where nobody reads the output, too.
            if failures.is_empty() && !is_missed { Ok(()) } else { Err(Exit(SOME_FAILED).into()) }
        }
        Some(reason) => Err(anyhow::anyhow!("{reason}").context(
            Fail::new(format!("not all chunks are in {}", tilde(&context.store))).hint(
                "mend that, or give another folder with --store, and ingest again: what is stored stays",
            ),
        )),
    }
}

/// Computes the chunks that the store lacks, with a progress bar.
fn ingest(
    context: &Context,
    work: impl FnOnce(&mut dyn FnMut(IngestProgress)) -> refrain::engine::Result<IngestReport>,
) -> Result<IngestReport> {
    let bar = context.bar("ingesting", "{pos}/{len} tokens, {rate}{left}");
    let report = work(&mut |progress| show(&bar, progress.done as u64, progress.total as u64))?;
    bar.finish_and_clear();
    Ok(report)
}

/// Waits until the stored chunks are in the object store, or cannot be sent now.
#[cfg(feature = "remote")]
fn share(context: &Context, store: &refrain::store::Store) {
    let bar = context.bar("sharing", "{pos}/{len} chunks{left}");
    let mut most = 0;
    while let Some(stats) = store.remote_stats() {
        most = most.max(stats.pending);
        show(&bar, most - stats.pending, most);
        if let Some(why) = stats.down.or(stats.stuck).filter(|_| stats.pending > 0) {
            bar.finish_and_clear();
            output::warn(&format!(
                "{} not shared yet, the next command tries again: {why}",
                count(stats.pending as usize, "chunk")
            ));
            return;
        }
        if stats.pending == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bar.finish_and_clear();
}

/// Ingest on the way to an answer: a disk that takes nothing is a warning, since chunks serve from memory.
pub(crate) fn ingest_to_answer(
    context: &Context,
    engine: &Engine,
    chunks: &[PromptChunk],
    method: &Method,
) -> Result<IngestReport> {
    let report = ingest(context, |progress| engine.ingest_to_answer(chunks, &method.built, progress))?;
    if let Some(reason) = &report.not_stored {
        output::warn(&format!("chunks could not be stored, the next answer computes them again: {reason}"));
    } else if report.computed > 0 && !context.json {
        context.say(&line(context, &report));
    }
    Ok(report)
}

fn line(context: &Context, report: &IngestReport) -> String {
    let mut all = format!(
        "{} in {}, {}",
        count(report.documents, "document"),
        count(report.chunks, "chunk"),
        count(report.tokens, "token")
    );
    if report.repaired > 0 {
        all.push_str(&format!(", {} broken and computed again", count(report.repaired, "chunk")));
    }
    if report.evicted > 0 {
        all.push_str(&format!(", {} removed to make room", count(report.evicted, "chunk")));
    }
    if report.summarised > 0 {
        all.push_str(&format!(", {} already there and summarised now", count(report.summarised, "document")));
    }
    if report.computed == 0 {
        return format!("{all}: nothing new");
    }
    let speed = rate(report.computed_tokens, Duration::from_secs_f64(report.seconds));
    let place = tilde(&context.store);
    format!(
        "{all}: {} new, {} in {} ({speed:.0} tokens/s), {} {} {place}",
        count(report.computed - report.summarised, "chunk"),
        count(report.computed_tokens, "token"),
        seconds(report.seconds),
        bytes(report.bytes),
        if report.not_stored.is_none() { "added to" } else { "but not all of it stored in" },
    )
}
