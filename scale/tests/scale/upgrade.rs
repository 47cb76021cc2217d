//! Workers of two models at once, as while a fleet is upgraded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::failures::{DOCUMENTS, REQUESTS, load, request, right_answers};
use crate::harness::{Client, PATIENCE, Plane, Workers, content};
use crate::sharing::files;

/// Each worker is drained and followed by one of another model, under load: no request fails, every answer is one of either model as a whole,
/// and no model uses the other's chunks.
pub(crate) async fn workers_are_upgraded_one_by_one(plane: &Plane) {
    let simulation = |model: u8| format!("prefill=400,decode=200,bytes=64,model={model}");
    let (old, new) = (Arc::new(right_answers(1).await), Arc::new(right_answers(2).await));
    assert!((0..REQUESTS).all(|index| old[&index] != new[&index]));
    let mut workers = Workers::start(plane, 3, &["--simulate", &simulation(1)]);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let client = Client::of(&gateway.url);
    client.workers(3).await;
    let over = Arc::new(AtomicBool::new(false));
    let loaded = tokio::spawn({
        let (client, over, old, new) = (client.clone(), over.clone(), old.clone(), new.clone());
        async move { load(&client, 6, &over, &[&old, &new]).await }
    });
    for index in 0..3 {
        tokio::time::sleep(Duration::from_secs(2)).await;
        // The runtime's threads go on meanwhile.
        workers = tokio::task::spawn_blocking(move || {
            workers.replace(index, &["--simulate", &simulation(2)]);
            workers
        })
        .await
        .unwrap();
        client.workers(3).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    over.store(true, Relaxed);
    let outcome = loaded.await.unwrap();
    eprintln!("three of three workers upgraded: {outcome:?}");
    assert!(outcome.whole.load(Relaxed) > 50 && outcome.streams.load(Relaxed) > 50, "{outcome:?}");
    for (index, wanted) in new.iter() {
        let (status, answer) = client.chat(&request(*index, false)).await;
        assert_eq!((status, content(&answer)), (200, wanted.as_str()));
    }
    let (deadline, library) = (Instant::now() + PATIENCE, workers.library());
    while files(&library, ".safetensors").len() < 2 * DOCUMENTS {
        assert!(Instant::now() < deadline, "{:?}", files(&library, ".safetensors"));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(files(&library, ".safetensors").len(), 2 * DOCUMENTS, "each model has chunks of its own");
}
