//! Several servers over one object store: what one of them is given all of them answer for, and what one removes is gone from all.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use axum::Router;
use refrain::store::{Limits, NamespaceKey, Store};
use refrain_server::{ApiKeys, App, Options, router};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use super::deletion::s3::S3;
use super::deletion::{everything, sent, traces};
use super::{MODEL, ask, chat, engine, post, refused, text, value};

/// A server with a folder of its own.
struct Replica {
    router: Router,
    store: Store,
    folder: TempDir,
}

impl Replica {
    fn new(s3: &S3, change: impl FnOnce(&mut Options)) -> Replica {
        let folder = tempdir().unwrap();
        let store = Store::open_shared(folder.path(), Limits::memory(1 << 26), &s3.options()).unwrap();
        let mut options = Options::new(MODEL);
        options.folder = Some(folder.path().to_owned());
        options.sync_interval = Some(Duration::from_millis(100));
        change(&mut options);
        Replica { router: router(App::new(engine(store.clone()), options).unwrap()), store, folder }
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    async fn get(&self, path: &str) -> Value {
        value(ask(&self.router, "GET", path, None, Value::Null).await).await
    }

    async fn status(&self, path: &str) -> u16 {
        ask(&self.router, "GET", path, None, Value::Null).await.status().as_u16()
    }

    async fn listed(&self) -> Value {
        self.get("/v1/documents").await["data"].clone()
    }

    /// The value of a metric.
    async fn metric(&self, name: &str) -> f64 {
        let metrics = text(ask(&self.router, "GET", "/metrics", None, Value::Null).await).await;
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name} in {metrics}")).parse().unwrap()
    }
}

/// Waits for what the servers do in the background.
macro_rules! until {
    ($what:expr, $done:expr) => {{
        let began = Instant::now();
        while !$done {
            assert!(began.elapsed() < Duration::from_secs(60), "{}", $what);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }};
}

fn about(documents: Value) -> Value {
    chat(json!({ "documents": documents, "refrain": { "method": "pie" }, "max_tokens": 6 }))
}

const QUOKKA: &str = "What did the quokka hide beneath the birch?";

/// A question that is answered from what a search finds.
fn searched(question: &str) -> Value {
    json!({
        "messages": [{ "role": "user", "content": question }],
        "documents": "search", "refrain": { "method": "pie", "search": 3 }, "max_tokens": 6,
    })
}

/// What an answer says, without its costs.
fn answer(response: &Value) -> (Value, Value) {
    let documents = response["refrain"]["documents"].clone();
    (response["choices"][0]["message"]["content"].clone(), documents)
}

#[tokio::test(flavor = "multi_thread")]
async fn any_replica_answers_for_any_document_and_forgets_what_one_removes() {
    let Some(s3) = S3::start() else { return };
    let (one, two) = (Replica::new(&s3, |_| ()), Replica::new(&s3, |_| ()));
    until!("they are ready", one.status("/ready").await == 200 && two.status("/ready").await == 200);
    let secret = (1..7).map(|n| format!("Quokka {n} hid {} opals beneath birch #{n}. ", n * 7919));
    let secret = json!({ "title": "The Zanzibar ledger", "text": secret.collect::<String>() });
    let other = (1..5).map(|n| format!("The rear wheel {n} has 28 spokes, and the front wheel 24. "));
    let other = json!({ "title": "Wheels", "text": other.collect::<String>() });
    let added =
        post(&one.router, "/v1/documents", json!({ "documents": [secret, other], "method": "pie" })).await;
    let added = added["data"].as_array().unwrap();
    assert!(added.iter().all(|document| document["published"] == true), "{added:?}");
    let id = added[0]["id"].as_str().unwrap();
    let path = format!("/v1/documents/{id}");
    // At once, before it has come by itself.
    assert_eq!(two.get(&path).await, one.get(&path).await);
    let first = post(&one.router, "/v1/chat/completions", about(json!([{ "id": id }]))).await;
    sent(&one.store);
    let there = post(&two.router, "/v1/chat/completions", about(json!([{ "id": id }]))).await;
    assert_eq!(answer(&there), answer(&first));
    assert_eq!(there["refrain"]["stats"]["prefilled_chunks"], 0, "its chunks are shared as well");
    until!("all has come", two.listed().await.as_array().unwrap().len() == 2);
    assert_eq!(two.listed().await, one.listed().await);
    let mut found = Vec::new();
    // Scores depend on all documents that are indexed, and a document is indexed after it is listed: the other one is found first.
    for (question, of) in
        [("How many spokes has the rear wheel?", &added[1]["id"]), (QUOKKA, &added[0]["id"])]
    {
        let question = searched(question);
        for replica in [&one, &two] {
            until!("it is found", {
                let response = post(&replica.router, "/v1/chat/completions", question.clone()).await;
                let is_found = response["refrain"]["documents"][0]["id"] == *of;
                if is_found {
                    found.push(answer(&response));
                }
                is_found
            });
        }
    }
    assert_eq!(found[2], found[3], "chunks, scores and answer");
    let pinned = post(&two.router, &format!("{path}/pin"), json!({ "pinned": true })).await;
    assert_eq!(pinned["pinned"], true);
    until!("it is pinned there", one.get(&path).await["pinned"] == true);
    assert_eq!(two.metric("refrain_documents").await, 2.0);
    assert!(two.metric("refrain_documents_last_sync_timestamp_seconds").await > 1.7e9);
    assert!(two.metric("refrain_documents_sync_interval_seconds").await > 0.0);
    assert_eq!(two.metric("refrain_documents_sync_failures_total").await, 0.0);

    let control = Replica::new(&S3::start().unwrap(), |_| ());
    post(&control.router, "/v1/documents", json!({ "documents": [other], "method": "pie" })).await;
    post(&control.router, "/v1/chat/completions", about(json!([{ "id": added[1]["id"] }]))).await;
    let traces = traces(&two.router, two.folder(), id, control.folder()).await;
    let in_bucket = |(_, bytes): &(String, Vec<u8>)| traces.found(bytes)[0];
    assert!(s3.objects().iter().any(in_bucket), "the text is in the bucket");

    let deleted = value(ask(&two.router, "DELETE", &path, None, Value::Null).await).await;
    assert_eq!(deleted["deleted"], true);
    assert_eq!(two.status(&path).await, 404);
    until!("it is gone there", one.status(&path).await == 404);
    until!("its removal is finished there", !s3.names().iter().any(|name| name.contains("removal-")));
    for replica in [&one, &two] {
        sent(&replica.store);
        let response = post(&replica.router, "/v1/chat/completions", searched(QUOKKA)).await;
        let documents = response["refrain"]["documents"].as_array().unwrap();
        assert!(documents.iter().all(|document| document["id"] != id), "{documents:?}");
        let asked =
            ask(&replica.router, "POST", "/v1/chat/completions", None, about(json!([{ "id": id }]))).await;
        assert_eq!(asked.status(), 404);
    }
    until!("no byte of it is left on any replica, or in the bucket", {
        let folders = [everything(one.folder(), &s3), everything(two.folder(), &s3)].concat();
        folders.iter().all(|(_, bytes)| traces.found(bytes) == [false; 2])
    });
    assert_eq!(one.listed().await, two.listed().await);
    assert_eq!(one.listed().await.as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_its_object_store_goes_on_and_says_what_the_others_lack() {
    let Some(s3) = S3::start() else { return };
    let (one, two) = (Replica::new(&s3, |_| ()), Replica::new(&s3, |_| ()));
    let torque = json!({ "documents": [{ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." }] });
    let known = post(&one.router, "/v1/documents", torque).await["data"][0].clone();
    until!("it has come", two.listed().await.as_array().unwrap().len() == 1);
    s3.is_away.store(true, Relaxed);
    let late = json!({ "documents": [{ "title": "Late", "text": "A brake lever is tightened to 6 Nm." }] });
    let late = post(&one.router, "/v1/documents", late).await["data"][0].clone();
    assert_eq!((&known["published"], &late["published"]), (&json!(true), &json!(false)));
    let documents = json!([{ "id": known["id"] }, { "id": late["id"] }]);
    post(&one.router, "/v1/chat/completions", about(documents.clone())).await;
    // The other server cannot tell whether there is such a document.
    let path = format!("/v1/documents/{}", late["id"].as_str().unwrap());
    for (method, path) in [("GET", &path), ("DELETE", &path)] {
        let (status, error) = refused(ask(&two.router, method, path, None, Value::Null).await).await;
        assert_eq!((status, &error["code"]), (503, &json!("documents_unavailable")), "{error}");
    }
    until!("the failure is counted", one.metric("refrain_documents_sync_failures_total").await as u64 > 0);
    assert_eq!(one.metric("refrain_documents_unsent").await, 1.0);
    // A server that starts now serves what its folder has.
    let three = Replica::new(&s3, |_| ());
    until!("it is ready", three.status("/ready").await == 200);
    s3.is_away.store(false, Relaxed);
    for replica in [&one, &two, &three] {
        until!("it has come", replica.listed().await.as_array().unwrap().len() == 2);
    }
    until!("it is published", one.get(&path).await["published"] == true);
    post(&two.router, "/v1/chat/completions", about(documents)).await;
    assert_eq!(one.metric("refrain_documents_unsent").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_see_their_own_documents_on_every_replica() {
    let Some(s3) = S3::start() else { return };
    let folder = tempdir().unwrap();
    let file = folder.path().join("keys");
    let [ada, bob] = ["ada", "bob"].map(|name| ApiKeys::add(&file, name).unwrap());
    let namespace_key = NamespaceKey::of_folder(folder.path()).unwrap();
    let with_keys = |options: &mut Options| {
        options.api_keys = ApiKeys::read(&file).unwrap();
        options.namespace_key = Some(namespace_key.clone());
    };
    let (one, two) = (Replica::new(&s3, with_keys), Replica::new(&s3, with_keys));
    let texts = json!({ "documents": [{ "text": "A stem bolt is tightened to 5 Nm." }] });
    let added = value(ask(&one.router, "POST", "/v1/documents", Some(&ada), texts).await).await;
    let path = format!("/v1/documents/{}", added["data"][0]["id"].as_str().unwrap());
    let status = |key| ask(&two.router, "GET", &path, Some(key), Value::Null);
    assert_eq!(status(&bob).await.status(), 404);
    assert_eq!(status(&ada).await.status(), 200);
    assert_eq!(status(&bob).await.status(), 404);
    let listed = value(ask(&two.router, "GET", "/v1/documents", Some(&bob), Value::Null).await).await;
    assert_eq!(listed["data"], json!([]));
    // Nobody removes what is another's.
    assert_eq!(ask(&two.router, "DELETE", &path, Some(&bob), Value::Null).await.status(), 404);
    assert_eq!(ask(&one.router, "GET", &path, Some(&ada), Value::Null).await.status(), 200);
}
