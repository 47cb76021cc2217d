//! Work beside a store that cannot write: what waits for a disk never holds up the computing thread.

use std::fs;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use redb::{Builder, ConcurrencyMode, Database};
use refrain_eviction::Eviction;
use refrain_fusion::Pie;
use refrain_kernels::Dtype;
use refrain_store::{Limits, Scope, Store};
use tempfile::tempdir;

use super::fetch_or_compute::wait_for;
use super::{device, exact, prefill, random_prompt, shared, tiny, tiny_engine};
use crate::advance::{Advance, PATIENCE};
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest};
use crate::{Document, Engine, IngestReport, Prompt, Settings};

fn open(folder: &Path) -> Engine {
    let mut limits = Limits::memory(1 << 24);
    limits.time_to_live = Some(Duration::from_secs(3600));
    let store = Store::open(folder, limits).unwrap();
    // The index is opened first: opening it waits for those who write.
    assert!(store.list(Scope::All).unwrap().chunks.is_empty());
    let settings = Settings { chunk_tokens: 64, ..exact(Dtype::F16) };
    Engine::open_on(&device(), &tiny("llama"), store, settings, |_, _| ()).unwrap()
}

/// The index of a store as another process has it.
fn index(folder: &Path) -> Database {
    let mut index = Builder::new();
    index.set_concurrency_mode(ConcurrencyMode::MultiWriter).create(folder.join("index.redb")).unwrap()
}

fn pie(engine: &Engine, prompt: &Prompt) -> PrefillJob {
    let (eviction, max_seq_len) = (Eviction::full().clone(), prompt.len());
    let request =
        PrefillRequest { method: shared(Pie), eviction, max_seq_len, capture: AttentionCapture::Nothing };
    PrefillJob::start(engine, prompt, request).unwrap()
}

/// The outcome of work that tells of each of its steps, and whose disk stands still until it waits: none of its steps waits for the disk by itself.
fn beside_a_disk_that_stands_still<T: Send + 'static>(
    folder: &Path,
    work: impl FnOnce(&dyn Fn(Advance)) -> T + Send + 'static,
) -> T {
    let index = index(folder);
    let other_writer = index.begin_write().unwrap();
    let (steps, told) = channel();
    let worker = thread::spawn(move || work(&|advance| _ = steps.send(advance)));
    let next = || told.recv_timeout(Duration::from_secs(60)).expect("a step waits for the disk");
    let waits = std::iter::repeat_with(next).find(|advance| *advance != Advance::Progress);
    assert_eq!(waits, Some(Advance::Waiting));
    other_writer.abort().unwrap();
    worker.join().unwrap()
}

/// The logits of a prompt whose prefill tells of each of its steps.
fn logits(engine: &Engine, prompt: &Prompt, step: &dyn Fn(Advance)) -> Vec<f32> {
    let mut job = pie(engine, prompt);
    loop {
        let advance = job.advance(PATIENCE).unwrap();
        step(advance);
        if advance == Advance::Done {
            return job.finish().unwrap().logits;
        }
    }
}

/// The report of an ingest that is ended by a step with this end.
fn ingest_until(end: Advance, engine: &Engine, document: Document, step: &dyn Fn(Advance)) -> IngestReport {
    let mut ingest = engine.start_ingest(&[document], &shared(Pie)).unwrap();
    loop {
        let advance = ingest.advance().unwrap();
        step(advance);
        if advance == end {
            return ingest.finish();
        }
    }
}

#[test]
fn a_prompts_chunks_serve_while_they_are_stored() {
    let folder = tempdir().unwrap();
    let engine = open(folder.path());
    let prompt = random_prompt(&engine, 5, &[64, 33], 9, 11);
    let in_memory = tiny_engine("llama", exact(Dtype::F16));
    let expected = prefill(&in_memory, &prompt, &Pie, prompt.len()).logits;
    let store = engine.store().clone();
    let found = beside_a_disk_that_stands_still(folder.path(), move |step| logits(&engine, &prompt, step));
    assert!(found == expected);
    assert_eq!(store.list(Scope::All).unwrap().chunks.len(), 3, "all is stored before the first token");
}

#[test]
fn chunks_that_are_broken_are_computed_while_another_process_writes() {
    let folder = tempdir().unwrap();
    let engine = open(folder.path());
    let prompt = random_prompt(&engine, 5, &[64, 33], 9, 11);
    let expected = prefill(&engine, &prompt, &Pie, prompt.len()).logits;
    for stored in engine.store().list(Scope::All).unwrap().chunks {
        fs::write(stored.path.unwrap(), "broken").unwrap();
    }
    let engine = open(folder.path());
    let store = engine.store().clone();
    let found = beside_a_disk_that_stands_still(folder.path(), move |step| logits(&engine, &prompt, step));
    assert!(found == expected);
    assert_eq!(store.verify(|_| ()).unwrap().whole, 3);
}

/// Chunks of a question that was given up do not wait in memory for a slow disk.
#[test]
fn a_question_that_is_given_up_stores_the_chunk_that_is_being_written_alone() {
    let folder = tempdir().unwrap();
    let engine = open(folder.path());
    let prompt = random_prompt(&engine, 5, &[64, 33], 9, 11);
    let index = index(folder.path());
    let other_writer = index.begin_write().unwrap();
    let mut job = pie(&engine, &prompt);
    while job.advance(PATIENCE).unwrap() == Advance::Progress {}
    drop(job);
    other_writer.abort().unwrap();
    let stored = || engine.store().list(Scope::All).unwrap().chunks.len();
    wait_for("a chunk is stored", || stored() > 0);
    thread::sleep(Duration::from_millis(100));
    assert_eq!(stored(), 1);
}

#[test]
fn documents_that_are_stored_are_renewed_beside_the_computing_thread() {
    let folder = tempdir().unwrap();
    let engine = open(folder.path());
    let document =
        Document { title: String::new(), text: (0..100).map(|n| format!("Bolt {n} is tight. ")).collect() };
    let stored = engine.ingest_for(std::slice::from_ref(&document), &shared(Pie), |_| ()).unwrap();
    assert!(stored.computed > 2, "{stored:?}");
    let again = beside_a_disk_that_stands_still(folder.path(), move |step| {
        ingest_until(Advance::Done, &engine, document, step)
    });
    assert_eq!((again.chunks, again.computed), (stored.chunks, 0));
}

/// Only a chunk that is in the folder is counted.
#[test]
fn an_ingest_that_is_stopped_waits_for_the_chunk_that_is_being_stored() {
    let folder = tempdir().unwrap();
    let engine = open(folder.path());
    let document = Document { title: String::new(), text: "A bolt is tight. ".repeat(100) };
    let report = beside_a_disk_that_stands_still(folder.path(), move |step| {
        ingest_until(Advance::Waiting, &engine, document, step)
    });
    assert!(report.bytes > 0, "{report:?}");
}
