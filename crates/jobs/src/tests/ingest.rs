//! Ingest as a job, on a tiny model, through a folder that machines share.

use std::collections::BTreeSet;
use std::path::Path;

use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use refrain::corpus::open_documents;
use refrain::fusion::{FusionMethod, METHODS};
use refrain::store::{Limits, Store};
use refrain::{Document, Engine, EngineOptions, Prefix};
use tempfile::TempDir;

use super::*;
use crate::IngestWork;

const MODEL: &str = "../../tests/golden/tiny/llama";

/// A machine with a folder of its own, before an object store that others share.
struct Machine {
    _folder: TempDir,
    engine: Engine,
}

impl Machine {
    fn new(shared: &Path) -> Machine {
        Machine::before(&folder(shared), u64::MAX)
    }

    fn before(options: &RemoteOptions, disk: u64) -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let mut limits = Limits::memory(0);
        limits.disk = disk;
        let store = Store::open_shared(folder.path().join("chunks"), limits, options).unwrap();
        let settings = refrain::Settings { chunk_tokens: 32, ..refrain::Settings::default() };
        let options =
            EngineOptions::new(MODEL).data_folder(Some(folder.path().to_owned())).settings(settings);
        let engine = options.prefix(Prefix::None).method("vanilla").open_on(store).unwrap();
        Machine { _folder: folder, engine }
    }

    fn run(&self, job: &Job, method: &str) -> RunReport {
        let method: Arc<dyn FusionMethod> = METHODS.parse(method).unwrap();
        let mut work =
            IngestWork::new(&self.engine, method, true, Duration::from_secs(20), |why| panic!("{why}"));
        job.run(&mut work, &options(), &stop_flag(false), |_| ()).unwrap()
    }
}

fn documents(number: usize) -> Vec<Document> {
    let text = |index: usize| format!("Bearing {index} runs {} km before it is greased again. ", 100 * index);
    let document = |index| Document { title: format!("Bearing {index}"), text: text(index).repeat(4) };
    (0..number).map(document).collect()
}

fn planned_ingest(name: &str, documents: Vec<Document>) -> Job {
    let objects = Objects::open(&RemoteOptions::new(format!("memory:///{name}"))).unwrap();
    let mut plan = Plan::new(objects, ShardSize { items: 3, weight: u64::MAX }).unwrap();
    for document in documents {
        plan.add("", &Item::of_document(document, 50)).unwrap();
    }
    plan.finish("ingest", settings("f32")).unwrap().job
}

fn folder(shared: &Path) -> RemoteOptions {
    let mut options = RemoteOptions::new(format!("file://{}", shared.display()));
    // A busy machine may be slow.
    options.timeout = Duration::from_secs(60);
    options
}

/// The names of all chunks in an object store.
fn chunks(shared: &RemoteOptions) -> BTreeSet<String> {
    let objects = Objects::open(shared).unwrap();
    let names = objects.list("", None).unwrap().into_iter().map(|object| object.name);
    names.filter(|name| name.ends_with(".safetensors") || name.ends_with(".summary")).collect()
}

/// The titles of the documents that a machine which has done nothing finds.
fn found(shared: &Path) -> Vec<String> {
    let machine = Machine::new(shared);
    let store = open_documents(machine.engine.store(), None, u64::MAX).unwrap();
    store.sync(None, &mut |_| Ok(())).unwrap();
    let mut titles: Vec<String> =
        store.local().list("", "", 100).unwrap().0.into_iter().map(|document| document.title).collect();
    titles.sort();
    titles
}

#[test]
fn a_job_leaves_what_one_ingest_leaves_and_keeps_the_documents() {
    for method in ["drift", "sam_kv"] {
        let [single, shared] = [0, 1].map(|_| tempfile::tempdir().unwrap());
        let machine = Machine::new(single.path());
        let built: Arc<dyn FusionMethod> = METHODS.parse(method).unwrap();
        machine.engine.ingest_for(&documents(8), &built, |_| ()).unwrap();
        wait_for("the single ingest", || machine.engine.store().remote_stats().unwrap().pending == 0);

        let job = planned_ingest("once", documents(8));
        let report = Machine::new(shared.path()).run(&job, method);
        assert!(report.complete && report.shards == 3 && report.tally.items == 8, "{report:?}");
        assert_eq!(chunks(&folder(shared.path())), chunks(&folder(single.path())), "{method}");
        assert!(chunks(&folder(shared.path())).len() >= 8);
        assert_eq!(found(shared.path()).len(), 8);
        assert!(job.failed().unwrap().is_empty());

        // Another job over the same documents finds all of them there, and fetches none to see it.
        let again = planned_ingest("again", documents(9));
        let second = Machine::new(shared.path());
        let report = second.run(&again, method);
        assert_eq!((report.complete, report.shards, report.tally.items), (true, 3, 1));
        assert_eq!(second.engine.store().remote_stats().unwrap().fetched, 0, "{method}");
        let computed: u64 = again
            .results()
            .unwrap()
            .iter()
            .map(|(_, done)| done.result["computed_chunks"].as_u64().unwrap())
            .sum();
        assert!((1..10).contains(&computed), "{computed}");
    }
}

#[test]
fn a_device_that_fails_is_the_machines_fault_and_a_long_text_is_the_documents() {
    use crate::ingest::at_fault;
    use refrain::engine::{DeviceFailure, Error};
    let device = || "a GPU".to_owned();
    let broken = || DeviceFailure::Broken { device: device(), reason: "x".to_owned() };
    let full = || DeviceFailure::OutOfMemory { device: device(), bytes: 2, free: 1 };
    let small = || Error::DeviceMemory { device: device(), tokens: 3, kv: 2, activations: 1, free: 1 };
    for error in [Error::from(broken()), Error::from(full()), small()] {
        assert!(matches!(at_fault(error, false), Undone::Runner(_)));
    }
    assert!(matches!(at_fault(Error::from(broken()), true), Undone::Runner(_)));
    // A document that is prefilled whole needs more memory the longer it is.
    for error in [Error::from(full()), small()] {
        assert!(matches!(at_fault(error, true), Undone::Item(_)));
    }
    let long = || Error::PromptTooLong { prompt: 9, answer: 0, context: 8 };
    assert!(matches!(at_fault(long(), false), Undone::Item(_)));
}

#[test]
fn chunks_that_go_to_make_room_are_prefilled_again() {
    let config =
        ThrottleConfig { wait_put_per_call: Duration::from_millis(100), ..ThrottleConfig::default() };
    let mut slow = RemoteOptions::new("memory:///library");
    slow.objects = Some(Arc::new(ThrottledStore::new(InMemory::new(), config)));
    let whole = tempfile::tempdir().unwrap();
    Machine::new(whole.path()).run(&planned_ingest("whole", documents(6)), "drift");
    let size =
        std::fs::metadata(whole.path().join(chunks(&folder(whole.path())).first().unwrap())).unwrap().len();
    // The folder has room for a few chunks, and the next ones are there before these are sent.
    let machine = Machine::before(&slow, 4 * size);
    let job = planned_ingest("small", documents(6));
    assert!(machine.run(&job, "drift").complete);
    assert_eq!(chunks(&slow), chunks(&folder(whole.path())));
    let computed: u64 =
        job.results().unwrap().iter().map(|(_, done)| done.result["computed_chunks"].as_u64().unwrap()).sum();
    assert!(computed as usize > chunks(&slow).len(), "{computed}: none went before it was sent");
}

/// Another program whose chunks wait for the object store does not keep a job from seeing what it has lost.
#[test]
fn chunks_of_others_are_not_waited_for() {
    let config = ThrottleConfig { wait_put_per_call: Duration::from_secs(3600), ..ThrottleConfig::default() };
    let mut options = RemoteOptions::new("memory:///library");
    options.timeout = Duration::from_secs(3600);
    options.objects = Some(Arc::new(ThrottledStore::new(InMemory::new(), config)));
    let machine = Machine::before(&options, u64::MAX);
    let (engine, documents) = (&machine.engine, documents(2));
    let method: Arc<dyn FusionMethod> = METHODS.parse("drift").unwrap();
    engine.ingest_for(&documents[..1], &method, |_| ()).unwrap();
    let pending = engine.are_pending(&[&documents[0], &documents[1]], &method).unwrap();
    assert_eq!(pending, [true, false]);
    let (stop, lost) = (stop_flag(false), stop_flag(false));
    let control = Control { stop: &stop, lost: &lost };
    let mut work = IngestWork::new(engine, method, true, Duration::ZERO, |why| panic!("{why}"));
    assert_eq!(work.lost(&[&documents[1]], &control).unwrap(), [&documents[1]]);
}

#[test]
fn a_document_that_cannot_be_shared_is_listed_and_the_others_are_kept() {
    let shared = tempfile::tempdir().unwrap();
    let mut all = documents(4);
    all[1].text = "x".repeat((16 << 20) + 1);
    all[2].title = String::new();
    let job = planned_ingest("large", all);
    assert!(Machine::new(shared.path()).run(&job, "drift").complete);
    let failed = job.failed().unwrap();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].name == "Bearing 1" && failed[0].reason.contains("divide it"), "{failed:?}");
    assert_eq!(found(shared.path()).len(), 3);
}
