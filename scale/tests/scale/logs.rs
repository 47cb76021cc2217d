//! What workers log.

use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::harness::{Client, KEY, Plane, Process, tiny_model};

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_logs_requests_of_clients_alone() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_refrain-scale"));
    command.args(["worker", "--port=0", "--threads=1", "--served-model-name=tiny", "--model", &tiny_model()]);
    command.arg("--store").arg(folder.path().join("store"));
    command.env("REFRAIN_NAMESPACE_KEY", KEY).env_remove("REFRAIN_LOG");
    let worker = Process::listening(command.stderr(std::fs::File::create(&log).unwrap()));
    let gateway = Plane::List.gateway(&[&worker], &[]);
    let client = Client::of(&gateway.url);
    client.workers(1).await;
    let documents = json!([{ "title": "Torque", "text": "A stem bolt takes 5 Nm." }]);
    let question = json!([{ "role": "user", "content": "How tight?" }]);
    let chat = json!({ "messages": question, "documents": documents, "max_tokens": 2 });
    let (status, answer) = client.chat(&chat).await;
    assert_eq!(status, 200, "{answer}");
    // Some more reports.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("/v1/chat/completions") && log.contains("responded"), "{log}");
    assert!(!log.contains("/internal/"), "{log}");
}
