//! Chunks are fetched or computed by what each is expected to take, and none is waited for once it is late.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use object_store::ObjectStoreExt;
use tempfile::{TempDir, tempdir};

use super::held_objects::HeldObjects;
use super::library::{object, sent, wait_for};
use super::numbered;
use crate::{Chunk, FetchPolicy, Fetched, RemoteOptions, RemoteStats, Store, WantedChunk};

const SECOND: Duration = Duration::from_secs(1);
/// Too short for what is held.
const SHORT: Duration = Duration::from_millis(20);

/// Objects of three chunks that a machine has computed, and the chunks.
fn library() -> (HeldObjects, [Chunk; 3]) {
    let (objects, chunks) = (HeldObjects::new(), [1, 2, 3].map(|first| numbered(first, 3)));
    let (_folder, first) = machine(&objects, FetchPolicy::Auto);
    for chunk in &chunks {
        first.put(chunk.clone()).unwrap();
    }
    sent(&first);
    (objects, chunks)
}

fn machine(objects: &HeldObjects, policy: FetchPolicy) -> (TempDir, Store) {
    let folder = tempdir().unwrap();
    let mut options = RemoteOptions::new("memory:///library");
    (options.timeout, options.policy) = (60 * SECOND, policy);
    options.objects = Some(Arc::new(objects.clone()));
    let store = Store::open_shared(folder.path(), 64 << 20, &options).unwrap();
    (folder, store)
}

fn prefetch(store: &Store, chunks: &[Chunk], compute: Option<Duration>) -> Fetched {
    let wanted = |chunk: &Chunk| WantedChunk { compute, ..chunk.id().into() };
    store.prefetch(&chunks.iter().map(wanted).collect::<Vec<_>>(), &[], true)
}

fn stats(store: &Store) -> RemoteStats {
    store.remote_stats().unwrap()
}

/// The store has measured this latency, so long ago.
fn measured(store: &Store, latency: Duration, ago: Duration) {
    store.has_measured(latency, Instant::now().checked_sub(ago).unwrap());
}

/// Nothing is on its way any more.
fn ended(store: &Store) {
    wait_for("nothing travels", || store.chunks_in_flight() == 0);
}

#[test]
fn chunks_that_are_computed_in_less_time_are_not_asked_for() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    measured(&store, 10 * SECOND, Duration::ZERO);
    let fetched = prefetch(&store, &chunks, Some(SECOND));
    assert_eq!((fetched.chunks, fetched.passed_over), (0, 3));
    assert_eq!((objects.reads(), stats(&store).passed_over), (0, 3));
    // Together they take a turn, and thirty times three seconds to compute.
    let fetched = prefetch(&store, &chunks, Some(30 * SECOND));
    assert_eq!((fetched.chunks, fetched.passed_over), (3, 0));
    assert_eq!((objects.reads(), stats(&store).passed_over, stats(&store).fetched), (3, 3, 3));
}

/// A chunk under its two names is one chunk, and one that is here under either is not asked for.
#[test]
fn a_chunk_of_two_names_counts_once() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    let [one, two, _] = &chunks;
    measured(&store, 10 * SECOND, Duration::ZERO);
    let both = WantedChunk { ids: vec![one.id().clone(), two.id().clone()], compute: Some(SECOND) };
    assert_eq!(store.prefetch(std::slice::from_ref(&both), &[], true).passed_over, 1);
    store.put(two.clone()).unwrap();
    assert_eq!(store.prefetch(&[both], &[], true), Fetched::default());
}

#[test]
fn a_policy_fetches_or_computes_whatever_it_takes() {
    let (objects, chunks) = library();
    for (policy, chunks_fetched) in [(FetchPolicy::Fetch, 3), (FetchPolicy::Compute, 0)] {
        let (_folder, store) = machine(&objects, policy);
        measured(&store, 10 * SECOND, Duration::ZERO);
        let fetched = prefetch(&store, &chunks, Some(SHORT));
        assert_eq!((fetched.chunks, fetched.passed_over), (chunks_fetched, 3 - chunks_fetched));
    }
    let named = |name: &str| name.parse::<FetchPolicy>().unwrap();
    assert_eq!(
        ["auto", "fetch", "compute"].map(named),
        [FetchPolicy::Auto, FetchPolicy::Fetch, FetchPolicy::Compute]
    );
    let error = "never".parse::<FetchPolicy>().unwrap_err();
    assert_eq!(error.to_string(), "unknown policy \"never\": use auto, fetch or compute");
}

/// What is not measured is fetched.
#[test]
fn a_machine_that_knows_nothing_yet_fetches() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    assert_eq!(prefetch(&store, &chunks, Some(60 * SECOND)).chunks, 3);
    assert_eq!(stats(&store).passed_over, 0);
}

/// Nobody waits for it longer than is said beforehand, the requests behind it do not ask at all, and what comes in the end is kept.
#[test]
fn what_does_not_answer_is_late_and_makes_others_compute() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    let [one, two, _] = &chunks;
    objects.hold(0);
    assert_eq!(prefetch(&store, &chunks[..1], Some(SHORT)), Fetched { chunks: 0, passed_over: 0 });
    assert!(store.is_late(one.id()) && store.reader_at_hand(one.id()).unwrap().is_none());
    // A busy machine may ask later than the first request has waited.
    wait_for("it is asked for", || objects.reads() == 1);
    thread::sleep(2 * SHORT);
    assert_eq!(prefetch(&store, &chunks[1..2], Some(SHORT)).passed_over, 1);
    assert!(!store.is_late(two.id()) && objects.reads() == 1);
    objects.release();
    wait_for("it comes", || store.contains(one.id()));
    assert_eq!(store.get(one.id()).unwrap().unwrap().to_bytes(), one.to_bytes());
    ended(&store);
    assert!(!store.is_late(one.id()));
}

#[test]
fn an_object_that_stops_half_way_is_late() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    let chunk = &chunks[0];
    objects.hold(chunk.to_bytes().len() - 1);
    let wanted = WantedChunk { compute: Some(2 * SECOND), ..chunk.id().into() };
    store.prefetch(&[wanted], &[], false);
    assert!(!store.awaits_header(chunk.id(), None));
    let reader = store.reader_at_hand(chunk.id()).unwrap().expect("its header comes in two seconds");
    let last = chunk.id().layers - 1;
    assert!(reader.layer(0).is_some() && reader.layer(last).is_none() && reader.chunk().is_none());
    assert!(store.is_late(chunk.id()));
    objects.release();
    wait_for("it comes", || store.contains(chunk.id()));
    assert!(reader.chunk().is_some(), "what has come is read however late it is");
    ended(&store);
}

#[test]
fn a_chunk_whose_header_is_still_to_come_is_not_at_hand() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Fetch);
    let id = chunks[0].id();
    objects.hold(0);
    store.prefetch(&[id.into()], &[], false);
    assert!(store.reader_at_hand(id).unwrap().is_none() && !store.is_in_flight(id));
    assert!(store.awaits_header(id, Some(Instant::now())));
    objects.release();
    assert!(!store.awaits_header(id, None));
    assert!(store.reader_at_hand(id).unwrap().is_some());
    ended(&store);
}

#[test]
fn two_requests_for_a_chunk_are_one_fetch() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    let fetched = thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| prefetch(&store, &chunks[..1], Some(60 * SECOND))));
        both.map(|one| one.join().unwrap().chunks)
    });
    assert!(fetched.contains(&1) && store.contains(chunks[0].id()));
    assert_eq!(stats(&store).fetched, 1);
    assert_eq!(objects.reads(), 1);
    ended(&store);
}

/// Beside the computing one chunk at a time is fetched to measure again; it is kept, and once the link is fast chunks are fetched.
#[test]
fn an_object_store_that_is_fast_again_is_noticed() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    measured(&store, 10 * SECOND, 60 * SECOND);
    assert_eq!(prefetch(&store, &chunks, Some(SECOND)).passed_over, 2);
    wait_for("one is fetched", || store.contains(chunks[0].id()));
    assert_eq!((objects.reads(), stats(&store).passed_over), (1, 2));
    let more: Vec<Chunk> = (10..200).map(|first| numbered(first, 3)).collect();
    for chunk in &more {
        store.put(chunk.clone()).unwrap();
    }
    sent(&store);
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    measured(&store, 10 * SECOND, 60 * SECOND);
    let mut rest = more.iter();
    // Two objects that are fast make a latency of ten seconds one of less than a second.
    wait_for("it is fetched from", || {
        let chunk = std::slice::from_ref(rest.next().unwrap());
        thread::sleep(Duration::from_millis(100));
        let fetched = prefetch(&store, chunk, Some(SECOND));
        fetched.passed_over == 0 && store.contains(chunk[0].id())
    });
    ended(&store);
}

#[test]
fn a_broken_object_that_was_late_is_not_there() {
    let (objects, chunks) = library();
    let (_folder, store) = machine(&objects, FetchPolicy::Auto);
    let mut bytes = chunks[0].to_bytes();
    *bytes.last_mut().unwrap() ^= 1;
    let path = object(&chunks[0].key());
    let write = objects.put(&path, bytes.into());
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(write).unwrap();
    objects.hold(0);
    prefetch(&store, &chunks[..1], Some(SHORT));
    assert!(store.is_late(chunks[0].id()));
    objects.release();
    wait_for("it is found broken", || stats(&store).broken == 1);
    ended(&store);
    assert!(!store.is_late(chunks[0].id()) && store.reader_at_hand(chunks[0].id()).unwrap().is_none());
}
