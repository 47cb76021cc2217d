use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use redb::{Builder, ConcurrencyMode};
use refrain::engine::{Document, Engine};
use refrain::fusion::METHODS;
use refrain::store::{Scope, Store};
use tempfile::tempdir;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::metrics::Metrics;
use crate::options::Limits;
use crate::queue::JobBytes;
use crate::testing::{blocked_store, engine_of, question, question_over, tiny_engine};

/// A compute thread whose turns the test takes, and its queue.
fn compute() -> (Arc<Shared>, Compute) {
    let metrics = Metrics::new(tiny_engine().numerics(), "none");
    let shared = Arc::new(Shared::new(Limits::default(), metrics, String::new()));
    (shared.clone(), Compute::new(shared))
}

/// Puts a job into the queue.
fn push(shared: &Shared, engine: &Engine, job: Job) -> UnboundedReceiver<Event> {
    let (sender, events) = unbounded_channel();
    let jobs = vec![(job, sender, JobBytes { kv: 7, prompt: 0 })];
    shared.push(engine, jobs, (Instant::now(), Duration::from_secs(3600))).unwrap();
    events
}

/// Takes turns until `done`.
fn turns_until(compute: &mut Compute, mut done: impl FnMut(&mut Compute) -> bool) {
    for _ in 0..10_000 {
        compute.turn();
        if done(compute) {
            return;
        }
    }
    panic!("it never happened");
}

/// A decode step that took an hour has just ended, so that no further one is due beside what computes.
fn rest(compute: &mut Compute) {
    compute.last_step = Some((Instant::now(), Duration::from_secs(3600)));
}

fn tokens(events: &mut UnboundedReceiver<Event>) -> usize {
    std::iter::from_fn(|| events.try_recv().ok()).filter(|event| matches!(event, Event::Token(_))).count()
}

/// A prompt whose client has left makes room at once, and not when those before it are done.
#[test]
fn a_prompt_that_nobody_waits_for_goes_wherever_it_stands() {
    let (engine, (shared, mut compute)) = (tiny_engine(), compute());
    let job = question(&engine);
    let job = || Job::Generate(Box::new(job.clone()));
    let mut clients: Vec<_> = (0..3).map(|_| push(&shared, &engine, job())).collect();
    compute.admit();
    assert_eq!(compute.held().map(|(_, bytes)| bytes).sum::<usize>(), 21);
    clients.remove(1);
    compute.prefills[2].client.deadline = Instant::now();
    compute.drop_over();
    assert_eq!((compute.prefills.len(), shared.metrics.requests.cancelled.get()), (1, 2));
    assert_eq!(compute.held().map(|(_, bytes)| bytes).sum::<usize>(), 7);
    let told = clients[1].try_recv().unwrap();
    assert!(matches!(&told, Event::Failed(error) if error.code == Some("timeout")), "{told:?}");
    assert!(clients[0].try_recv().is_err(), "the first goes on");
}

/// Routers take the prompts under way for work that a further request waits for.
#[test]
fn a_request_counts_as_waiting_until_its_first_token() {
    let (engine, (shared, mut compute)) = (tiny_engine(), compute());
    let load = || {
        let (running, waiting, _) = shared.load();
        (running, waiting)
    };
    let mut events = push(&shared, &engine, Job::Generate(Box::new(question(&engine))));
    assert_eq!(load(), (0, 1), "it is in the queue");
    compute.admit();
    assert_eq!((load(), compute.prefills.len()), ((0, 1), 1));
    compute.publish();
    assert_eq!((load(), shared.metrics.requests.running.get()), ((0, 1), 1));
    turns_until(&mut compute, |_| tokens(&mut events) > 0);
    assert_eq!(load(), (1, 0));
}

/// Reading and tokenising a request is no part of its time in the queue.
#[test]
fn the_time_in_the_queue_begins_with_the_queue() {
    let (engine, (shared, mut compute)) = (tiny_engine(), compute());
    let (sender, _events) = unbounded_channel();
    let job = Job::Generate(Box::new(question(&engine)));
    let hour = Duration::from_secs(3600);
    let arrived = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    shared.push(&engine, vec![(job, sender, JobBytes::default())], (arrived, hour)).unwrap();
    compute.admit();
    let (mut registry, mut text) = (Registry::default(), String::new());
    registry.register("queue", "", shared.metrics.requests.queue_seconds.clone());
    encode(&mut text, &registry).unwrap();
    let sum = text.lines().find_map(|line| line.strip_prefix("queue_sum ")).unwrap();
    assert!(text.contains("queue_count 1") && sum.parse::<f64>().unwrap() < 60.0, "{text}");
}

/// Answers do not make room for a computation that stands still.
#[test]
fn decoding_rests_beside_an_ingest_that_computes_and_not_beside_one_that_waits() {
    let folder = tempdir().unwrap();
    let (store, lock) = blocked_store(folder.path());
    let (engine, (shared, mut compute)) = (engine_of(store), compute());
    let mut events = push(&shared, &engine, Job::Generate(Box::new(question(&engine))));
    turns_until(&mut compute, |_| tokens(&mut events) > 0);
    let document = Document { title: String::new(), text: "A bolt.".to_owned() };
    let ingest = engine.start_ingest(&[document], &METHODS.select("pie").unwrap().built).unwrap();
    let _ingest = push(&shared, &engine, Job::Ingest(Box::new(ingest)));
    rest(&mut compute);
    turns_until(&mut compute, |compute| {
        let computes = compute.ingests.iter().any(|running| !running.waits);
        let told = tokens(&mut events);
        assert!(told == 0 || !computes, "{told} tokens in a turn of an ingest that computes");
        rest(compute);
        compute.ingests.front().is_some_and(|running| running.waits)
    });
    for _ in 0..3 {
        rest(&mut compute);
        compute.turn();
        assert_eq!(tokens(&mut events), 1);
    }
    drop(lock);
}

/// A prompt that waits for the disk takes no time of its key or others, keeps its place, and is not computed a second time for another answer.
#[test]
fn a_prompt_that_waits_keeps_its_place_and_takes_no_time() {
    let folder = tempdir().unwrap();
    let store = Store::open(folder.path(), 1 << 28).unwrap();
    // The index is opened first: opening it waits for those who write.
    assert!(store.list(Scope::All).unwrap().chunks.is_empty());
    let (engine, (shared, mut compute)) = (engine_of(store).with_prefix_cache(1 << 24), compute());
    let mut index = Builder::new();
    let index = index.set_concurrency_mode(ConcurrencyMode::MultiWriter);
    let index = index.create(folder.path().join("index.redb")).unwrap();
    let other_writer = index.begin_write().unwrap();
    let waiting = question_over(&engine, &["A bolt.".to_owned()], "pie");
    let answer = |job| push(&shared, &engine, Job::Generate(Box::new(job)));
    let mut answers = [waiting.clone(), waiting].map(answer);
    let mut waits = 0;
    turns_until(&mut compute, |compute| {
        waits = if compute.prefills.front().is_some_and(|first| first.waits) { waits + 1 } else { 0 };
        // Before that it may wait for a thread that loads a layer.
        waits == 200
    });
    let took = compute.prefills[0].took;
    let mut another = answer(question(&engine));
    turns_until(&mut compute, |compute| !compute.sequences.is_empty());
    assert_eq!((answers.each_mut().map(tokens), tokens(&mut another)), ([0, 0], 1));
    assert!(compute.prefills[0].waits && compute.prefills[0].took == took);
    assert!(compute.prefills[0].computed <= took);
    assert_eq!(compute.prefills[1].took, Duration::ZERO);
    // A disk that has the chunk lets both answers go, the second from the prefix cache.
    other_writer.abort().unwrap();
    turns_until(&mut compute, |compute| {
        rest(compute);
        compute.prefills.is_empty()
    });
    let last = compute.sequences.iter().rev().take(2).rev();
    let prefixes = last.map(|running| running.sequence.stats().prefix_tokens > 0);
    assert_eq!(prefixes.collect::<Vec<_>>(), [false, true]);
}

/// A prompt's first token does not wait for the next decode step, and its keys and values serve the next prompt.
#[test]
fn a_first_token_is_sent_in_the_turn_that_chooses_it() {
    let (engine, (shared, mut compute)) = (tiny_engine().with_prefix_cache(1 << 24), compute());
    let job = question(&engine);
    let mut events: Vec<_> =
        (0..3).map(|_| push(&shared, &engine, Job::Generate(Box::new(job.clone())))).collect();
    for (index, events) in events.iter_mut().enumerate() {
        rest(&mut compute);
        turns_until(&mut compute, |compute| {
            rest(compute);
            compute.sequences.len() > index
        });
        assert_eq!(tokens(events), 1);
        assert_eq!(compute.sequences[index].sequence.stats().prefix_tokens > 0, index > 0, "{index}");
    }
}

/// Prompts that are admitted together are computed one after the other, and none has the time of those before it.
#[test]
fn a_prompt_takes_the_time_for_which_it_was_computed() {
    let (engine, (shared, mut compute)) = (tiny_engine(), compute());
    let mut events: Vec<_> =
        (0..2).map(|_| push(&shared, &engine, Job::Generate(Box::new(question(&engine))))).collect();
    compute.admit();
    assert_eq!(compute.prefills.len(), 2);
    compute.prefills[0].computed = Duration::from_secs(1000);
    turns_until(&mut compute, |_| tokens(&mut events[0]) > 0);
    let first = shared.load().2;
    assert!(first.seconds >= 1000.0 && first.tokens_per_second() < 1.0, "{first:?}");
    turns_until(&mut compute, |_| tokens(&mut events[1]) > 0);
    let both = shared.load().2;
    assert!((800.0..820.0).contains(&both.seconds), "{both:?}");
}
