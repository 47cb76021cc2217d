//! A removed document leaves no byte: not in the server's folder, and not in the bucket that machines share.

#[path = "../../../../tests/common/moto.rs"]
mod moto;
pub(crate) mod s3;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use axum::Router;
use refrain::store::{Limits, Store};
use refrain_server::{App, Options, router};
use serde_json::{Value, json};

use self::s3::S3;
use super::{MODEL, ask, chat, engine, files, post, refused, value};

/// What is recognised of a document, each as runs of bytes at every offset.
pub(crate) struct Traces {
    /// Runs of 16 bytes of title and text.
    text: HashSet<Vec<u8>>,
    /// Runs of 8 token ids, and of 32 bytes of keys and values.
    rows: HashSet<Vec<u8>>,
}

/// All runs of so many bytes that begin at multiples of `step`. Runs of few different bytes stand anywhere.
fn runs(bytes: &[u8], length: usize, step: usize) -> impl Iterator<Item = Vec<u8>> {
    let all = bytes.windows(length).step_by(step);
    all.filter(|run| run.iter().collect::<HashSet<_>>().len() >= 8).map(<[u8]>::to_vec)
}

impl Traces {
    /// Whether text, and whether token ids or rows stand in these bytes.
    pub(crate) fn found(&self, bytes: &[u8]) -> [bool; 2] {
        let any = |runs: &HashSet<Vec<u8>>, length| bytes.windows(length).any(|run| runs.contains(run));
        [any(&self.text, 16), any(&self.rows, 32)]
    }
}

/// Every file of a folder and every object of a bucket.
pub(crate) fn everything(folder: &Path, s3: &S3) -> Vec<(String, Vec<u8>)> {
    let file = |path: PathBuf| (path.display().to_string(), std::fs::read(&path).unwrap());
    files(folder).into_iter().map(file).chain(s3.objects()).collect()
}

fn server(folder: &Path, s3: Option<&S3>) -> (Router, Store) {
    let store = match s3 {
        Some(s3) => Store::open_shared(folder, Limits::memory(1 << 26), &s3.options()).unwrap(),
        None => Store::open(folder, 1 << 26).unwrap(),
    };
    let mut options = Options::new(MODEL);
    options.folder = Some(folder.to_owned());
    (router(App::new(engine(store.clone()), options).unwrap()), store)
}

async fn shown(router: &Router, id: &str) -> Value {
    value(ask(router, "GET", &format!("/v1/documents/{id}"), None, Value::Null).await).await
}

/// Names of a document's chunks, without their endings.
async fn names(router: &Router, id: &str) -> Vec<String> {
    let keys = shown(router, id).await["chunk_keys"].as_array().unwrap().clone();
    let name = |key: &Value| format!("{}/{}", &key.as_str().unwrap()[..2], key.as_str().unwrap());
    keys.iter().map(name).collect()
}

/// The traces of a document that do not stand in the folder `control` of a server that never had it: rows of the first layer follow
/// from one token alone, and common words stand anywhere.
pub(crate) async fn traces(router: &Router, folder: &Path, id: &str, control: &Path) -> Traces {
    let document = shown(router, id).await;
    let text = format!("{}\n{}", document["title"].as_str().unwrap(), document["text"].as_str().unwrap());
    let body = json!({ "prompt": document["text"], "add_special_tokens": false });
    let tokens = post(router, "/tokenize", body).await["tokens"].as_array().unwrap().clone();
    let tokens = tokens.iter().flat_map(|token| (token.as_u64().unwrap() as u32).to_le_bytes());
    let mut rows: HashSet<Vec<u8>> = runs(&tokens.collect::<Vec<u8>>(), 32, 4).collect();
    for name in names(router, id).await {
        // Keys, not files, are listed: those of a chunk that comes first in a prompt have none where it is the same chunk.
        let Ok(file) = std::fs::read(folder.join(format!("{name}.safetensors"))) else { continue };
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        rows.extend(runs(&file[8 + header..], 32, 1));
    }
    let mut text: HashSet<Vec<u8>> = runs(text.as_bytes(), 16, 1).collect();
    for file in files(control) {
        let file = std::fs::read(file).unwrap();
        file.windows(16).for_each(|run| _ = text.remove(run));
        file.windows(32).for_each(|run| _ = rows.remove(run));
    }
    assert!(text.len() > 100 && rows.len() > 1000, "{} {}", text.len(), rows.len());
    Traces { text, rows }
}

pub(crate) fn sent(store: &Store) {
    let began = Instant::now();
    while store.remote_stats().unwrap().pending > 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", store.remote_stats());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn asked(id: &str) -> Value {
    chat(json!({ "documents": [{ "id": id }], "max_tokens": 2 }))
}

/// Prefills documents for two methods, asks about each, and gives their ids.
async fn fill(router: &Router, documents: Value) -> Vec<String> {
    let mut ids = Vec::new();
    for method in ["sam_kv:block=16", "pie"] {
        let added = post(router, "/v1/documents", json!({ "documents": documents, "method": method })).await;
        let id = |document: &Value| document["id"].as_str().unwrap().to_owned();
        ids = added["data"].as_array().unwrap().iter().map(id).collect();
    }
    for id in &ids {
        post(router, "/v1/chat/completions", asked(id)).await;
    }
    ids
}

/// Two documents are prefilled for two methods, one with aux tensors and whole documents, and one of them is asked about. The
/// object store refuses its deletion at first, and the server is started anew before it is repeated.
#[tokio::test(flavor = "multi_thread")]
async fn no_byte_of_a_removed_document_is_left_in_any_tier() {
    let Some(s3) = S3::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (router, store) = server(folder, Some(&s3));
    let secret = (1..7).map(|n| format!("Quokka {n} hid {} opals beneath birch #{n}. ", n * 7919));
    let secret = json!({ "title": "The Zanzibar ledger", "text": secret.collect::<String>() });
    let other = (1..5).map(|n| format!("The rear wheel {n} has 28 spokes, and the front wheel 24. "));
    let other = json!({ "title": "Wheels", "text": other.collect::<String>() });
    let ids = fill(&router, json!([secret, other])).await;
    let control = tempfile::tempdir().unwrap();
    fill(&server(control.path(), None).0, json!([other])).await;
    sent(&store);
    let traces = traces(&router, folder, &ids[0], control.path()).await;
    let (gone, kept) = (names(&router, &ids[0]).await, names(&router, &ids[1]).await);
    let objects_of = |names: &[String]| {
        let all = s3.names();
        all.into_iter().filter(|object| names.iter().any(|name| object.contains(name))).count()
    };
    let kept_objects = objects_of(&kept);
    assert!(objects_of(&gone) > 4 && kept_objects > 4, "{:?}", s3.names());
    assert!(s3.names().iter().any(|name| name.ends_with(".summary")), "{:?}", s3.names());
    let there: Vec<_> =
        everything(folder, &s3).into_iter().map(|(name, bytes)| (traces.found(&bytes), name)).collect();
    let in_database = there.iter().find(|(_, name)| name.ends_with("documents.redb")).unwrap();
    assert_eq!(in_database.0, [true, true]);
    let in_bucket = |(found, name): &([bool; 2], String)| found[1] && name.starts_with("library/");
    assert!(there.iter().any(in_bucket));

    let path = format!("/v1/documents/{}", ids[0]);
    s3.refuses_deletions.store(true, Relaxed);
    for _ in 0..2 {
        let (status, error) = refused(ask(&router, "DELETE", &path, None, Value::Null).await).await;
        assert_eq!((status, &error["code"]), (503, &json!("removal_incomplete")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("object store"), "{error}");
    }
    // It is gone here already.
    assert_eq!(ask(&router, "GET", &path, None, Value::Null).await.status(), 404);
    assert_eq!(ask(&router, "POST", "/v1/chat/completions", None, asked(&ids[0])).await.status(), 404);
    for file in files(folder) {
        assert_eq!(traces.found(&std::fs::read(&file).unwrap()), [false; 2], "{}", file.display());
    }
    assert!(objects_of(&gone) > 0);
    drop((router, store));

    let (router, store) = server(folder, Some(&s3));
    s3.refuses_deletions.store(false, Relaxed);
    let deleted = value(ask(&router, "DELETE", &path, None, Value::Null).await).await;
    assert_eq!(deleted, json!({ "id": ids[0], "object": "document.deleted", "deleted": true }));
    sent(&store);
    for (name, bytes) in everything(folder, &s3) {
        assert_eq!(traces.found(&bytes), [false; 2], "{name}");
    }
    assert_eq!((objects_of(&gone), objects_of(&kept)), (0, kept_objects));
    assert_eq!(ask(&router, "DELETE", &path, None, Value::Null).await.status(), 404);
    let answer = post(&router, "/v1/chat/completions", asked(&ids[1])).await;
    assert_eq!(answer["refrain"]["stats"]["prefilled_chunks"], 0, "{answer}");
    // A document that is brought again is there again.
    fill(&router, json!([secret])).await;
    sent(&store);
    assert!(objects_of(&gone) > 4);
}
