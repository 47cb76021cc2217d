//! The metrics count requests by their outcome.

use futures_util::poll;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_by_the_status_of_their_responses() {
    let router = server();
    post(&router, "/v1/completions", json!({ "prompt": "The bolt", "max_tokens": 2 })).await;
    for path in ["/nothing", "/health", "/ready"] {
        ask(&router, "GET", path, None, Value::Null).await;
    }
    let long = json!({ "prompt": "x", "max_tokens": 500, "min_tokens": 500 });
    {
        let left = Box::pin(ask(&router, "POST", "/v1/completions", None, long));
        assert!(poll!(left).is_pending());
    }
    let metrics = metrics_of(&router).await;
    let mut counts: Vec<&str> =
        metrics.lines().filter_map(|line| line.strip_prefix("refrain_http_requests_total")).collect();
    counts.sort_unstable();
    assert_eq!(counts, [r#"{status="200"} 1"#, r#"{status="404"} 1"#, r#"{status="499"} 1"#]);
}

/// The head of the stream has status 200.
#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_ingest_that_cannot_be_stored_counts_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let router = router(app(|options| options.folder = Some(folder.path().to_owned())));
    std::fs::rename(folder.path().join("documents.redb"), folder.path().join("moved")).unwrap();
    let body = json!({ "stream": true, "documents": [{ "text": "A bolt." }] });
    let events = events(ask(&router, "POST", "/v1/documents", None, body).await).await;
    assert!(events.iter().any(|event| event["error"]["type"] == "server_error"), "{events:?}");
    let metrics = metrics_of(&router).await;
    assert!(metrics.contains(r#"refrain_request_failed_total{code="server_error"} 1"#), "{metrics}");
}
