//! `refrain ingest`: documents are prefilled once and kept.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use refrain::Library;
use refrain::corpus::{DocumentStore, StoredDocument};
use refrain::documents::files;
use refrain::engine::{
    Advance, Document, Engine, Ingest, IngestProgress, IngestReport, Prompt, PromptChunk, rate,
};
use serde_json::json;

use crate::args;
use crate::documents::{Documents, read_documents, unread};
use crate::methods::{self, Method};
use crate::output::{
    self, Exit, Fail, SOME_FAILED, STOPPED, broken, bytes, count, one_line, print, print_json, seconds, show,
};
use crate::settings::Context;
use crate::signals::{Interrupt, Interrupted, Interruptible};
use refrain::folders::tilde;

/// `refrain ingest`
pub(crate) fn run(context: &Context, args: &args::Ingest) -> Result<()> {
    let method = methods::asked(context, &args.method)?;
    let Documents { documents, failures, left_out, empty } = read_documents(context.console, &args.paths)?;
    let engine = context.open_engine(&args.instructions())?;
    let interrupt = Interrupt::listen_to_all().context("cannot wait for signals")?;
    let work = engine.start_ingest(&documents, &method.built)?;
    let (report, is_whole) = ingest_until_stopped(context, work, &interrupt.running())?;
    if !is_whole {
        return stopped(context, &engine, (&documents, &args.paths), &method, &report);
    }
    let kept = keep(context, &engine, &documents, &args.paths);
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
                value["empty"] = json!(empty);
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

/// Records documents of files and folders, so that searches find them. Their chunks are of use without it, so that a failure is a warning.
fn keep(
    context: &Context,
    engine: &Engine,
    documents: &[Document],
    paths: &[PathBuf],
) -> Option<Vec<StoredDocument>> {
    let record = |store: Box<dyn DocumentStore>| {
        let (before, _) = store.local().list(&engine.settings().namespace, "", usize::MAX)?;
        let kept = Library::keep(engine, store, documents)?;
        if let Some(said) = of_same_titles(&before, &kept, &file_names(paths)) {
            context.say(&said);
        }
        Ok(kept)
    };
    let kept = context.documents(engine.store()).and_then(record);
    let warn = |error: &_| {
        output::warn(&format!("`refrain ask --search` does not find these documents: {error}"));
    };
    kept.inspect_err(warn).ok()
}

/// Names of files, and of those in folders, without their extensions: a document whose file has no title has this one.
fn file_names(paths: &[PathBuf]) -> Vec<String> {
    let files = paths.iter().flat_map(|path| files(path).found);
    files.filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned())).collect()
}

/// Names the documents of `before` that are none of `kept` and have the title of one, or one of the names: an edited file is another document beside
/// them, and so is one that an earlier version of the program has read otherwise.
fn of_same_titles(
    before: &[StoredDocument],
    kept: &[StoredDocument],
    file_names: &[String],
) -> Option<String> {
    let ids: HashSet<&str> = kept.iter().map(|document| document.id.as_str()).collect();
    let titles = kept.iter().map(|document| document.title.as_str());
    let titles: HashSet<&str> = titles.chain(file_names.iter().map(String::as_str)).collect();
    let is_same = |document: &&StoredDocument| {
        titles.contains(document.title.as_str()) && !ids.contains(document.id.as_str())
    };
    let mut others = before.iter().filter(|document| !document.title.is_empty()).filter(is_same);
    let first = others.next()?;
    let more = match others.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(one_line(&format!(
        "searches also find the document {} of the same title or file name, {:?}{more}: if its text is an older one, remove it with \
         `refrain documents rm {}`",
        first.id, first.title, first.id
    )))
}

/// A progress bar of an ingest, which is there until the returned function is dropped.
pub(crate) fn progress_bar(context: &Context) -> impl Fn(IngestProgress) + use<> {
    let bar = context.bar("ingesting", "{pos}/{len} tokens, {rate}{left}");
    move |progress| show(&bar, progress.done as u64, progress.total as u64)
}

/// Computes the chunks that the store lacks, with a progress bar, until all are there or a signal stops it; tells whether all are there.
fn ingest_until_stopped(
    context: &Context,
    mut work: Ingest,
    running: &Interruptible<'_>,
) -> Result<(IngestReport, bool)> {
    let show_progress = progress_bar(context);
    loop {
        let is_done = work.advance()? == Advance::Done;
        if let Some(progress) = work.new_progress() {
            show_progress(progress);
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
    (documents, paths): (&[Document], &[PathBuf]),
    method: &Method,
    report: &IngestReport,
) -> Result<()> {
    if let Some(reason) = &report.not_stored {
        output::warn(&format!("not all chunks are in {}: {reason}", tilde(&context.store)));
    }
    let (whole, stored) = stored_documents(engine, documents, !method.built.statistics().is_empty())?;
    if !whole.is_empty() {
        keep(context, engine, &whole, paths);
    }
    let said = format!(
        "stopped; {stored} of {} are kept, and {} whole; the same command goes on there",
        count(report.chunks, "chunk"),
        if whole.len() == 1 { "1 document is".to_owned() } else { format!("{} documents are", whole.len()) }
    );
    if context.json {
        print_json(&json!({ "error": said, "hint": null }))?;
    }
    output::say(&said);
    Err(Exit(STOPPED).into())
}

/// The documents all of whose chunks are in the store's folder, and the number of chunks that are there. Methods that keep statistics have
/// documents `in_one_piece`, as far as the model's context goes.
pub(crate) fn stored_documents(
    engine: &Engine,
    documents: &[Document],
    in_one_piece: bool,
) -> Result<(Vec<Document>, usize)> {
    // Chunks in memory end with the program.
    engine.store().forget_memory();
    let held = engine.store().held()?;
    let (mut whole, mut stored) = (Vec::new(), 0);
    for document in documents {
        let chunks = engine.chunks(std::slice::from_ref(document))?;
        let keys = engine.keys_in(&Prompt { chunks, ..Prompt::default() }, in_one_piece);
        let of_document = keys.iter().filter(|(key, _)| held.contains(key)).count();
        stored += of_document;
        if of_document == keys.len() {
            whole.push(document.clone());
        }
    }
    Ok((whole, stored))
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
///
/// # Errors
/// [`Interrupted`] where a signal stops it: the chunks that are stored stay.
pub(crate) fn ingest_to_answer(
    context: &Context,
    engine: &Engine,
    chunks: &[PromptChunk],
    method: &Method,
    running: &Interruptible<'_>,
) -> Result<IngestReport> {
    let work = engine.start_ingest_to_answer(chunks, &method.built)?;
    let (report, is_whole) = ingest_until_stopped(context, work, running)?;
    if !is_whole {
        return Err(Interrupted.into());
    }
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

#[cfg(test)]
mod tests {
    use refrain::corpus::LocalDocuments;
    use refrain::engine::Settings;
    use refrain::store::Store;

    use super::*;

    /// Earlier readers gave the document the name of its file as the title, and front matter as text.
    #[test]
    fn a_document_that_an_earlier_version_has_read_otherwise_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("vacation.md");
        std::fs::write(&file, "---\ntitle: Vacation policy\n---\n\nTake it.").unwrap();
        let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let engine = Engine::open(&model, Store::in_memory(1 << 20), Settings::default(), |_, _| ()).unwrap();
        let keep = |title: &str, text: &str| {
            let document = Document { title: title.to_owned(), text: text.to_owned() };
            let store = Box::new(LocalDocuments::open(None, u64::MAX).unwrap());
            Library::keep(&engine, store, &[document]).unwrap()
        };
        let earlier = keep("vacation", "---\ntitle: Vacation policy\n---\n\nTake it.");
        let kept = keep("Vacation policy", "Take it.");
        let said = of_same_titles(&earlier, &kept, &file_names(&[folder.path().to_owned()])).unwrap();
        assert!(said.contains(&format!("`refrain documents rm {}`", earlier[0].id)), "{said}");
        assert_eq!(of_same_titles(&earlier, &kept, &[]), None);
    }

    /// The first document is longer than the model's context, so that it is of several pieces.
    #[test]
    fn a_stored_document_is_told_by_its_own_chunks_in_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let store = Store::open(folder.path(), 1 << 30).unwrap();
        let engine = Engine::open(&model, store, Settings::default(), |_, _| ()).unwrap();
        let context = engine.decoder().config().context;
        let texts = ["A bolt is tight. ".repeat(context), "A bell.".to_owned(), "A lamp.".to_owned()];
        let documents = texts.map(|text| Document { title: String::new(), text });
        let method = methods::method("sam_kv").unwrap();
        engine.ingest_for(&documents[1..2], &method.built, |_| ()).unwrap();
        let stored = || stored_documents(&engine, &documents, true).unwrap();
        assert_eq!(stored(), (documents[1..2].to_vec(), 1));
        // A chunk for which the folder has no room is in memory alone.
        for shard in 0..=255 {
            let _ = std::fs::write(folder.path().join(format!("{shard:02x}")), "");
        }
        let report = engine.ingest_for(&documents, &method.built, |_| ()).unwrap();
        assert!(report.chunks > 4 && report.not_stored.is_some(), "{report:?}");
        assert_eq!(stored().0, documents[1..2]);
    }
}
