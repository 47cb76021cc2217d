//! `refrain ingest`: documents are prefilled once and kept.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, Result};
use indicatif::ProgressBar;
use refrain::Library;
use refrain::engine::{Advance, Document, Engine, IngestProgress, IngestReport, PromptChunk, rate};
use serde_json::json;

use crate::args;
use crate::documents::{Documents, read_documents, unread};
use crate::methods::{self, Method};
use crate::output::{
    self, Exit, Fail, SOME_FAILED, STOPPED, broken, bytes, count, print, print_json, seconds, show,
};
use crate::settings::Context;
use crate::signals::Interrupt;
use refrain::folders::tilde;

/// `refrain ingest`
pub(crate) fn run(context: &Context, args: &args::Ingest) -> Result<()> {
    let method = methods::asked(context, &args.method)?;
    let Documents { documents, failures, left_out } = read_documents(context.console, &args.paths)?;
    let engine = context.open_engine(&args.instructions())?;
    let (report, is_whole) = ingest_until_stopped(context, &engine, &documents, &method)?;
    if !is_whole {
        return stopped(context, &engine, &documents, &method, &report);
    }
    // Chunks are of use without it, so that the command goes on.
    let kept = context.documents(engine.store()).and_then(|store| Library::keep(&engine, store, &documents));
    let kept = kept
        .map_err(|error| {
            output::warn(&format!("`refrain ask --search` does not find these documents: {error}"));
        })
        .ok();
    let unpublished = kept.iter().flatten().filter(|document| document.published == Some(false)).count();
    if unpublished > 0 {
        output::warn(&format!(
            "{} not shared yet: ingest again, or start `refrain serve` here, once the object store answers",
            count(unpublished, "document")
        ));
    }
    if !context.json {
        let said = format!("{}{}", line(context, &report), unread(failures.len()));
        print(&format!("{}\n", broken(&said, &io::stdout())))?;
    }
    #[cfg(feature = "remote")]
    share(context, engine.store());
    match &report.not_stored {
        None => {
            if context.json {
                let mut value = json!(report);
                value["failures"] = json!(failures);
                value["left_out"] = json!(left_out);
                value["searchable"] = json!(kept.is_some());
                value["unpublished"] = json!(unpublished);
                print_json(&value)?;
            }
            // The status tells of failures where nobody reads the output, too.
            if failures.is_empty() && kept.is_some() { Ok(()) } else { Err(Exit(SOME_FAILED).into()) }
        }
        Some(reason) => Err(anyhow::anyhow!("{reason}").context(
            Fail::new(format!("not all chunks are in {}", tilde(&context.store))).hint(
                "mend that, or give another folder with --store, and ingest again: what is stored stays",
            ),
        )),
    }
}

/// Computes the chunks that the store lacks, with a progress bar, until all are there or Ctrl-C comes; tells whether all are there.
fn ingest_until_stopped(
    context: &Context,
    engine: &Engine,
    documents: &[Document],
    method: &Method,
) -> Result<(IngestReport, bool)> {
    let interrupt = Interrupt::listen().context("cannot wait for signals")?;
    let (running, bar) = (interrupt.running(), bar(context));
    let mut work = engine.start_ingest(documents, &method.built)?;
    loop {
        let is_done = work.advance()? == Advance::Done;
        if let Some(progress) = work.new_progress() {
            show(&bar, progress.done as u64, progress.total as u64);
        }
        if is_done || running.is_interrupted() {
            return Ok((work.finish(), is_done));
        }
    }
}

/// Records the documents of which an ingest that was stopped has stored all chunks, and says what is kept.
fn stopped(
    context: &Context,
    engine: &Engine,
    documents: &[Document],
    method: &Method,
    report: &IngestReport,
) -> Result<()> {
    let (held, mut keys) = (engine.store().held()?, report.keys.iter());
    let in_one_piece = !method.built.statistics().is_empty();
    let (mut whole, mut kept) = (Vec::new(), 0);
    for document in documents {
        let chunks = engine.chunks(std::slice::from_ref(document))?.len();
        let chunks = if in_one_piece { chunks.min(1) } else { chunks };
        let stored = keys.by_ref().take(chunks).filter(|key| held.contains(key)).count();
        kept += stored;
        if stored == chunks {
            whole.push(document.clone());
        }
    }
    let documents = Library::keep(engine, context.documents(engine.store())?, &whole)?.len();
    let said = format!(
        "stopped; {} of {} are kept, and {} whole; the same command goes on there",
        kept,
        count(report.chunks, "chunk"),
        if documents == 1 { "1 document is".to_owned() } else { format!("{documents} documents are") }
    );
    if context.json {
        print_json(&json!({ "error": said, "hint": null }))?;
    }
    output::say(&said);
    Err(Exit(STOPPED).into())
}

/// The progress bar of an ingest.
fn bar(context: &Context) -> ProgressBar {
    context.bar("ingesting", "{pos}/{len} tokens, {rate}{left}")
}

/// Computes the chunks that the store lacks, with a progress bar.
fn ingest(
    context: &Context,
    work: impl FnOnce(&mut dyn FnMut(IngestProgress)) -> refrain::engine::Result<IngestReport>,
) -> Result<IngestReport> {
    let bar = bar(context);
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
