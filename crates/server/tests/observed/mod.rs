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
