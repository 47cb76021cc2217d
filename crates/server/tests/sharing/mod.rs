//! Servers that share an object store.

use std::path::Path;
use std::time::{Duration, Instant};

use axum::Router;
use refrain::store::{FetchPolicy, Limits, RemoteOptions, Store};
use refrain_server::{App, Options, router};
use serde_json::{Value, json};
use tempfile::tempdir;

use super::{MODEL, ask, chat, engine, metrics_of, post, value};

/// The store of a server of its own folder, on the object store in another folder.
fn store(folder: &Path, library: &Path) -> Store {
    let mut options = RemoteOptions::new(format!("file://{}", library.display()));
    // A busy machine may be slow.
    (options.timeout, options.policy) = (Duration::from_secs(60), FetchPolicy::Fetch);
    Store::open_shared(folder, Limits::memory(1 << 26), &options).unwrap()
}

fn server(folder: &Path, store: Store, change: impl FnOnce(&mut Options)) -> Router {
    let mut options = Options::new(MODEL);
    options.folder = Some(folder.to_owned());
    change(&mut options);
    router(App::new(engine(store), options).unwrap())
}

fn sent(store: &Store) {
    let began = Instant::now();
    while store.remote_stats().unwrap().pending > 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", store.remote_stats());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The value of a metric without labels.
async fn metric(router: &Router, name: &str) -> u64 {
    let metrics = metrics_of(router).await;
    let value = metrics.lines().find_map(|line| line.strip_prefix(&format!("refrain_{name} ")));
    value.unwrap_or_else(|| panic!("no {name}: {metrics}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_tell_what_goes_to_the_object_store_and_comes_from_it() {
    let (library, folders) = (tempdir().unwrap(), [tempdir().unwrap(), tempdir().unwrap()]);
    let question =
        chat(json!({ "documents": [{ "text": "The rear wheel has 28 spokes." }], "max_tokens": 2 }));
    let first_store = store(folders[0].path(), library.path());
    let first = server(folders[0].path(), first_store.clone(), |_| ());
    post(&first, "/v1/chat/completions", question.clone()).await;
    sent(&first_store);
    let objects = metric(&first, "store_remote_sent_total").await;
    assert!(objects > 0 && metric(&first, "store_remote_fetched_total").await == 0);
    let second_store = store(folders[1].path(), library.path());
    let second = server(folders[1].path(), second_store.clone(), |_| ());
    post(&second, "/v1/chat/completions", question).await;
    // An answer may end before its last download is counted.
    let began = Instant::now();
    while metric(&second, "store_remote_fetched_total").await < objects {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", second_store.remote_stats());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(metric(&second, "store_remote_fetched_total").await, objects);
    let bytes = [
        metric(&first, "store_remote_sent_bytes_total").await,
        metric(&second, "store_remote_fetched_bytes_total").await,
    ];
    assert_eq!(bytes[0], bytes[1]);
    for (router, store) in [(&first, &first_store), (&second, &second_store)] {
        let stats = store.remote_stats().unwrap();
        let told = [
            ("failures_total", stats.failures),
            ("broken_total", stats.broken),
            ("replaced_total", stats.replaced),
            ("already_there_total", stats.already_there),
            ("passed_over_total", stats.passed_over),
            ("races_won_total", stats.races_won),
            ("races_lost_total", stats.races_lost),
            ("pending", stats.pending),
        ];
        for (name, value) in told {
            assert_eq!(metric(router, &format!("store_remote_{name}")).await, value, "{name}");
        }
    }
}

#[tokio::test]
async fn the_model_and_the_metrics_tell_the_numerics() {
    let folder = tempdir().unwrap();
    let engine = engine(Store::open(folder.path(), 1 << 26).unwrap());
    let (precision, kernels) = engine.numerics().split_once('-').unwrap();
    assert_eq!(precision, engine.decoder().precision().to_string());
    assert_eq!(kernels, engine.decoder().device().name());
    let router = router(App::new(engine.clone(), Options::new(MODEL)).unwrap());
    let models = value(ask(&router, "GET", "/v1/models", None, Value::Null).await).await;
    let told = &models["data"][0]["refrain"];
    assert_eq!((&told["numerics"], &told["strict_numerics"]), (&json!(engine.numerics()), &json!(false)));
    let line = format!("refrain_engine_info{{numerics=\"{}\"}} 1\n", engine.numerics());
    assert!(metrics_of(&router).await.contains(&line), "{line}");
    let line = format!("refrain_device_info{{name=\"{kernels}\"}} 1\n");
    assert!(metrics_of(&router).await.contains(&line), "{line}");
}
