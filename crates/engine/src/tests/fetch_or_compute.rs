//! Chunks that come late from an object store are computed beside that. Whichever is first, the answer is the same to the bit.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use refrain_eviction::Eviction;
use refrain_fusion::{A3, FusionMethod, Pie, SamKv};
use refrain_kernels::Dtype;
use refrain_store::{ChunkId, FetchPolicy, Limits, RemoteOptions, RemoteStats, Store, WantedChunk};
use tempfile::{TempDir, tempdir};

use super::held_objects::HeldObjects;
use super::{device, exact, prefill, random_prompt, shared, tiny};
use crate::advance::{Advance, PATIENCE};
use crate::prefill::{AttentionCapture, PrefillJob, PrefillRequest};
use crate::{Engine, Prompt};

/// The parts of the prompt: a system part and two chunks.
const PARTS: usize = 3;

struct Machine {
    _folder: TempDir,
    engine: Engine,
}

/// What one prefill gave and took.
struct Outcome {
    logits: Vec<f32>,
    prefilled: usize,
    unfetched: usize,
}

impl Machine {
    fn new(objects: &HeldObjects, policy: FetchPolicy) -> Machine {
        let folder = tempdir().unwrap();
        let mut options = RemoteOptions::new("memory:///library");
        (options.timeout, options.policy) = (Duration::from_secs(60), policy);
        options.objects = Some(Arc::new(objects.clone()));
        let store = Store::open_shared(folder.path(), Limits::memory(1 << 26), &options).unwrap();
        let engine = Engine::open_on(&device(), &tiny("llama"), store, exact(Dtype::F16), |_, _| ()).unwrap();
        Machine { _folder: folder, engine }
    }

    /// A machine that knows the link, and takes a second to compute the prompt's parts.
    fn that_measured(objects: &HeldObjects, prompt: &Prompt) -> Machine {
        let machine = Machine::new(objects, FetchPolicy::Auto);
        let other = random_prompt(&machine.engine, 6, &[20], 4, 99);
        machine.run(&other, &Pie);
        let tokens =
            prompt.system.len() + prompt.chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
        (0..100).for_each(|_| machine.engine.prefill_rate().learn(tokens, Duration::from_secs(1)));
        machine
    }

    fn start(&self, prompt: &Prompt, method: &(impl FusionMethod + Clone + 'static)) -> PrefillJob {
        let (eviction, max_seq_len) = (Eviction::full().clone(), prompt.len());
        let (method, capture) = (shared(method.clone()), AttentionCapture::Nothing);
        let request = PrefillRequest { method, eviction, max_seq_len, capture };
        PrefillJob::start(&self.engine, prompt, request).unwrap()
    }

    fn run(&self, prompt: &Prompt, method: &(impl FusionMethod + Clone + 'static)) -> Outcome {
        outcome(self.start(prompt, method))
    }

    fn stats(&self) -> RemoteStats {
        self.engine.store().remote_stats().unwrap()
    }

    fn ids(&self, prompt: &Prompt) -> Vec<ChunkId> {
        let chunks = (0..prompt.chunks.len()).map(|index| self.engine.chunk_id_in(prompt, index));
        chunks.chain([self.engine.system_id(&prompt.system)]).collect()
    }

    /// Waits until nothing of the prompt travels.
    fn ended(&self, prompt: &Prompt) {
        let (ids, store) = (self.ids(prompt), self.engine.store());
        wait_for("nothing travels", || !ids.iter().any(|id| store.is_late(id)));
    }
}

fn outcome(mut job: PrefillJob) -> Outcome {
    while job.advance(PATIENCE).unwrap() != Advance::Done {}
    let prefilled = job.finish().unwrap();
    let reused = &prefilled.load.reused;
    let (computed, unfetched) = (reused.prefilled, reused.unfetched);
    Outcome { logits: prefilled.logits.clone(), prefilled: computed, unfetched }
}

pub(super) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The objects of a prompt's parts, the prompt, and what the machine that computed them answered.
fn library(method: &(impl FusionMethod + Clone + 'static)) -> (HeldObjects, Prompt, Vec<f32>) {
    let objects = HeldObjects::new();
    let machine = Machine::new(&objects, FetchPolicy::Auto);
    let prompt = random_prompt(&machine.engine, 5, &[100, 73], 9, 11);
    let logits = prefill(&machine.engine, &prompt, method, prompt.len()).logits;
    wait_for("all is sent", || machine.stats().pending == 0);
    (objects, prompt, logits)
}

fn fetched_or_computed(method: &(impl FusionMethod + Clone + 'static)) {
    let (objects, prompt, expected) = library(method);
    for (policy, computed) in [(FetchPolicy::Fetch, 0), (FetchPolicy::Compute, PARTS)] {
        let machine = Machine::new(&objects, policy);
        let found = machine.run(&prompt, method);
        assert!(found.logits == expected, "{policy:?}");
        assert_eq!((found.prefilled, found.unfetched), (computed, computed), "{policy:?}");
        assert_eq!(machine.stats().passed_over, computed as u64);
    }
}

#[test]
fn fetched_and_computed_chunks_give_the_same_bits() {
    fetched_or_computed(&Pie);
    fetched_or_computed(&A3::default());
}

/// The object store answers after so many steps of the prefill: before it is late, while a part is computed, and after all.
#[test]
fn a_race_ends_with_the_same_bits_with_either_winner_at_any_time() {
    let (objects, prompt, expected) = library(&Pie);
    let mut won = 0;
    for release_after in (1..9).chain([usize::MAX]) {
        let machine = Machine::that_measured(&objects, &prompt);
        objects.hold(0);
        let (mut job, mut steps) = (machine.start(&prompt, &Pie), 0);
        loop {
            let advance = job.advance(PATIENCE).unwrap();
            steps += usize::from(advance == Advance::Progress);
            if steps == release_after {
                objects.release();
                machine.ended(&prompt);
            }
            if advance == Advance::Done {
                break;
            }
        }
        let stats = machine.stats();
        let found = outcome(job);
        assert!(found.logits == expected, "{release_after}");
        assert_eq!(found.prefilled, found.unfetched, "{release_after}");
        assert!(found.prefilled as u64 == stats.races_lost, "{release_after}: {stats:?}");
        won += stats.races_won;
        if release_after == usize::MAX {
            assert_eq!((stats.races_won, stats.races_lost), (0, PARTS as u64));
        }
        objects.release();
        machine.ended(&prompt);
        // What came too late is here all the same, or was computed.
        let again = machine.run(&prompt, &Pie);
        assert!(again.logits == expected && again.prefilled == 0);
    }
    assert!(won > 0, "no fetch has won a race");
}

/// Headers and some layers come, the rest does not: layers that a pass waits for are computed.
#[test]
fn what_stops_half_way_is_computed() {
    let (objects, prompt, expected) = library(&Pie);
    let machine = Machine::that_measured(&objects, &prompt);
    let sizes = sizes(&objects);
    objects.hold(sizes.iter().max().unwrap() - 1);
    let found = machine.run(&prompt, &Pie);
    assert!(found.logits == expected);
    assert!(found.prefilled > 0 && machine.stats().races_lost > 0, "{:?}", machine.stats());
    objects.release();
    machine.ended(&prompt);
}

#[test]
fn what_turns_out_broken_in_a_race_is_computed() {
    let (objects, prompt, expected) = library(&Pie);
    let machine = Machine::that_measured(&objects, &prompt);
    break_all(&objects);
    objects.hold(0);
    let (mut job, ids) = (machine.start(&prompt, &Pie), machine.ids(&prompt));
    wait_for("it is late", || {
        job.advance(PATIENCE).unwrap();
        ids.iter().any(|id| machine.engine.store().is_late(id))
    });
    job.advance(PATIENCE).unwrap();
    objects.release();
    machine.ended(&prompt);
    let found = outcome(job);
    assert!(found.logits == expected);
    assert_eq!(found.prefilled, PARTS);
    wait_for("all are found broken", || machine.stats().broken == PARTS as u64);
    assert_eq!(machine.stats().races_won, 0);
}

/// No step waits for the object store by itself, so that running answers decode meanwhile.
#[test]
fn a_pass_over_selected_tokens_waits_for_layers_step_by_step() {
    let method = SamKv::default();
    let (objects, prompt, expected) = library(&method);
    let machine = Machine::new(&objects, FetchPolicy::Fetch);
    objects.hold(sizes(&objects).iter().max().unwrap() - 1);
    let (steps, told) = channel();
    let (waits, found) = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut job = machine.start(&prompt, &method);
            loop {
                let advance = job.advance(PATIENCE).unwrap();
                steps.send(advance).unwrap();
                if advance == Advance::Done {
                    return outcome(job);
                }
            }
        });
        let (mut waits, mut progress) = (false, 0);
        while !waits && let Ok(advance) = told.recv_timeout(Duration::from_secs(20)) {
            progress += usize::from(advance == Advance::Progress);
            // The parts are asked for, fetched and opened, and the pass is planned.
            waits = progress >= 4 && advance == Advance::Waiting;
        }
        objects.release();
        (waits, worker.join().unwrap())
    });
    assert!(waits, "a step waits for the object store");
    assert!(found.logits == expected && found.prefilled == 0);
}

/// Another request begins to fetch the parts while the first of them is computed.
#[test]
fn a_part_whose_fetch_begins_while_another_is_computed_is_waited_for_step_by_step() {
    let (objects, prompt, expected) = library(&Pie);
    let machine = Machine::that_measured(&objects, &prompt);
    break_all(&objects);
    objects.hold(0);
    let (store, ids) = (machine.engine.store(), machine.ids(&prompt));
    let mut job = machine.start(&prompt, &Pie);
    wait_for("it is late", || {
        job.advance(PATIENCE).unwrap();
        ids.iter().any(|id| store.is_late(id))
    });
    job.advance(PATIENCE).unwrap();
    objects.release();
    machine.ended(&prompt);
    objects.hold(0);
    let compute = Some(Duration::from_secs(60));
    let wanted: Vec<WantedChunk> = ids.iter().map(|id| WantedChunk { compute, ..id.into() }).collect();
    store.prefetch(&wanted, &[], false);
    let mut advance = Advance::Progress;
    while advance == Advance::Progress {
        advance = job.advance(Duration::ZERO).unwrap();
    }
    let awaited = ids.iter().any(|id| store.awaits_header(id, Some(Instant::now())));
    assert!(advance == Advance::Waiting && awaited, "a step has waited for the object store");
    objects.release();
    machine.ended(&prompt);
    let found = outcome(job);
    assert!(found.logits == expected && found.prefilled == PARTS);
}

/// Both wait for the same fetch, and either computes what does not come.
#[test]
fn two_requests_for_chunks_that_do_not_come_are_answered() {
    let (objects, prompt, expected) = library(&Pie);
    let machine = Machine::that_measured(&objects, &prompt);
    let before = objects.reads();
    objects.hold(0);
    let mut jobs = [(); 2].map(|()| machine.start(&prompt, &Pie));
    while jobs
        .iter_mut()
        .map(|job| job.advance(PATIENCE).unwrap())
        .filter(|end| *end == Advance::Done)
        .count()
        < 2
    {}
    for job in jobs {
        assert!(outcome(job).logits == expected);
    }
    assert!(objects.reads() - before <= PARTS, "an object is asked for once");
    objects.release();
    machine.ended(&prompt);
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

/// Paths and bytes of all objects.
fn all(objects: &HeldObjects) -> Vec<(Path, Vec<u8>)> {
    use futures_util::TryStreamExt;
    run(async {
        let listed: Vec<_> = objects.list(None).try_collect().await.unwrap();
        let mut all = Vec::new();
        for object in listed {
            let bytes = objects.get(&object.location).await.unwrap().bytes().await.unwrap();
            all.push((object.location, bytes.to_vec()));
        }
        all
    })
}

fn sizes(objects: &HeldObjects) -> Vec<usize> {
    all(objects).iter().map(|(_, bytes)| bytes.len()).collect()
}

/// Turns a bit at the end of each object.
fn break_all(objects: &HeldObjects) {
    for (path, mut bytes) in all(objects) {
        *bytes.last_mut().unwrap() ^= 1;
        run(objects.put(&path, bytes.into())).unwrap();
    }
}
