//! Bounds of the gateway's own memory and time.

use refrain::store::NamespaceKey;
use refrain_server::ApiKeys;

use super::*;

#[tokio::test]
async fn bodies_count_until_their_answers_end() {
    let held = |gateway: &Gateway| gateway.0.bytes_in_flight.all();
    for act in [Act::Late("late"), Act::Stream(STREAM[0])] {
        let (gateway, _) = gateway(1, &[act]);
        let body = json!({ "messages": [], "stream": true }).to_string();
        let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.clone())).unwrap();
        let (answer, ()) = tokio::join!(router(gateway.clone()).oneshot(request), async {
            while held(&gateway) == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(held(&gateway), body.len());
        });
        answer.unwrap().into_body().collect().await.unwrap();
        assert_eq!(held(&gateway), 0);
    }
}

#[tokio::test]
async fn more_bodies_than_there_is_room_for_are_refused() {
    let (gateway, script) = gateway(1, &[]);
    let (all, mut others) = (256 << 20, gateway.0.bytes_in_flight.held_by("others"));
    others.resize(all).unwrap();
    let (status, text) = chat(&gateway).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(asked(&script).is_empty());
    assert_eq!(gateway.0.bytes_in_flight.all(), all, "what is refused is not held");
}

#[tokio::test]
async fn a_key_leaves_a_part_of_the_bytes_to_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    let [anna, bob] = ["anna", "bob"].map(|name| ApiKeys::add(&file, name).unwrap());
    let secret: NamespaceKey = "ab".repeat(32).parse().unwrap();
    let namespace = secret.namespace(Some(&anna));
    let mut options = Options::new("");
    options.api_keys = ApiKeys::read(&file).unwrap();
    let gateway = Gateway::new(Arc::new(Script::default()), options, secret, Rule::Cost);
    gateway.0.fleet.apply(WorkerEvent::Reported(WorkerId(0), report(&[], 0)));
    let mut under_way = gateway.0.bytes_in_flight.held_by(&namespace);
    under_way.resize((256 << 20) / 4 * 3).unwrap();
    for (key, status) in [(&anna, StatusCode::SERVICE_UNAVAILABLE), (&bob, StatusCode::OK)] {
        let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
        let request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        let request = request.body(Body::from(json!({ "messages": [] }).to_string())).unwrap();
        assert_eq!(router(gateway.clone()).oneshot(request).await.unwrap().status(), status);
    }
}

#[tokio::test]
async fn forms_of_other_origins_are_refused_however_their_type_is_written() {
    let (gateway, script) = gateway(1, &[]);
    for kind in ["multipart/form-data; boundary=x", "Multipart/Form-Data; boundary=x"] {
        let request = Request::post("/v1/documents").header(header::CONTENT_TYPE, kind);
        let request =
            request.header(header::HOST, "127.0.0.1").header(header::ORIGIN, "http://elsewhere.example");
        let response = router(gateway.clone()).oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{kind}");
    }
    assert!(asked(&script).is_empty());
}

#[tokio::test]
async fn every_route_refuses_names_of_others() {
    let (gateway, _) = gateway(1, &[]);
    for path in ["/health", "/metrics", "/workers", "/v1/models"] {
        for (host, status) in [("rebound.example", StatusCode::FORBIDDEN), ("localhost", StatusCode::OK)] {
            let request = Request::get(path).header(header::HOST, host).body(Body::empty()).unwrap();
            let response = router(gateway.clone()).oneshot(request).await.unwrap();
            assert_eq!(response.status(), status, "{path} of {host}");
        }
    }
}
