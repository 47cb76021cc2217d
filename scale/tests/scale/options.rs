//! Options and variables of the program.

use crate::harness::{Client, Process};

#[tokio::test(flavor = "multi_thread")]
async fn variables_that_are_empty_count_as_not_set() {
    let folder = tempfile::tempdir().unwrap();
    let variables = ["COMPUTE", "DISCOVERY", "HOST", "PREFIX", "QUOTA", "STRICT_NUMERICS", "TTL"];
    let names: Vec<String> = variables.iter().map(|name| format!("REFRAIN_{name}")).collect();
    let environment: Vec<_> = names.iter().map(|name| (name.as_str(), String::new())).collect();
    let store = folder.path().to_str().unwrap();
    let arguments = ["worker", "--port=0", "--store", store, "--simulate", "prefill=400,decode=200,bytes=64"];
    let worker = Process::start(&arguments, &environment);
    assert_eq!(Client::of(&worker.url).text("GET", "/ready", &serde_json::Value::Null).await.0, 200);
}
