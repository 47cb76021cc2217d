//! API keys are checked at the gateway, and nobody else says whose a request is.

use serde_json::{Value, json};

use crate::harness::{Client, KEY, Plane, Workers, tiny_model};

pub(crate) async fn tenants_see_their_own_documents(plane: &Plane) {
    let model = tiny_model();
    let options =
        ["--model", &model, "--chunk-tokens", "64", "--threads", "1", "--served-model-name", "tiny"];
    let workers = Workers::start(plane, 1, &options);
    let keys = workers.folder.path().join("keys");
    let anna_key = refrain_server::ApiKeys::add(&keys, "anna").unwrap();
    let bob = refrain_server::ApiKeys::add(&keys, "bob").unwrap();
    let gateway = plane.gateway(&workers.refs(), &["--api-key-file", keys.to_str().unwrap()]);
    let open = Client::of(&gateway.url);
    let (anna, bob) = (
        open.with("authorization", format!("Bearer {anna_key}")),
        open.with("authorization", format!("Bearer {bob}")),
    );
    anna.workers(1).await;
    let (status, added) = anna
        .value("POST", "/v1/documents", &json!({ "title": "Torque", "text": "A stem bolt takes 5 Nm." }))
        .await;
    assert_eq!(status, 200, "{added}");
    let path = format!("/v1/documents/{}", added["data"][0]["id"].as_str().unwrap());
    assert_eq!(anna.text("GET", &path, &Value::Null).await.0, 200);
    assert_eq!(bob.text("GET", &path, &Value::Null).await.0, 404);
    // A client says nothing of tenants: not with a key, not without, not with what a gateway signs elsewhere.
    let other: refrain::store::NamespaceKey = "00".repeat(32).parse().unwrap();
    // A forger may know a namespace, and not the key.
    let key: refrain::store::NamespaceKey = KEY.parse().unwrap();
    let namespace = key.namespace(Some(&anna_key));
    for forged in [
        refrain_server::sign_tenant(&other, "anna", &namespace),
        format!("00:{namespace}:anna"),
        String::new(),
    ] {
        let forger = bob.with("x-refrain-tenant", forged.clone());
        assert_eq!(forger.text("GET", &path, &Value::Null).await.0, 404, "{forged}");
        let forger = open.with("x-refrain-tenant", forged.clone());
        assert_eq!(forger.text("GET", &path, &Value::Null).await.0, 401, "{forged}");
        let direct = Client::of(&workers.running[0].url).with("x-refrain-tenant", forged.clone());
        assert_eq!(direct.text("GET", &path, &Value::Null).await.0, 401, "{forged}");
    }
    // Without a key: what is public, and nothing else. What gateways ask of workers is not passed on.
    let direct = Client::of(&workers.running[0].url);
    assert_eq!(direct.text("GET", &path, &Value::Null).await.0, 404);
    assert_eq!(direct.text("GET", "/internal/report", &Value::Null).await.0, 401);
    for (path, wanted) in
        [("/v1/models", 401), ("/workers", 401), ("/", 200), ("/openapi.json", 200), ("/health", 200)]
    {
        assert_eq!(open.text("GET", path, &Value::Null).await.0, wanted, "{path}");
    }
    assert_eq!(anna.text("GET", "/internal/report", &Value::Null).await.0, 404);
    // A removal reaches all workers.
    assert_eq!(anna.text("DELETE", &path, &Value::Null).await.0, 200);
    assert_eq!(anna.text("GET", &path, &Value::Null).await.0, 404);
}
