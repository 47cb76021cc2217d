//! Files that are added as documents, in JSON and as forms.

use std::path::PathBuf;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{app, ask, events, post, refused, router, schema, server, value};

/// A sample of the crate that reads documents.
fn sample(name: &str) -> Vec<u8> {
    let samples = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../documents/tests/files");
    std::fs::read(samples.join(name)).unwrap()
}

fn file(name: &str, bytes: &[u8]) -> Value {
    json!({ "file": { "name": name, "data": STANDARD.encode(bytes) } })
}

/// A form of parts: name, file name and content.
fn form(parts: &[(&str, Option<&str>, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, file, content) in parts {
        let file = file.map_or(String::new(), |file| format!("; filename=\"{file}\""));
        let head = format!("--edge\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n");
        body.extend_from_slice(&[head.as_bytes(), content, b"\r\n"].concat());
    }
    body.extend_from_slice(b"--edge--\r\n");
    body
}

async fn send(router: &Router, headers: &[(&str, &str)], body: Vec<u8>) -> Response {
    let mut request =
        Request::post("/v1/documents").header(header::CONTENT_TYPE, "multipart/form-data; boundary=edge");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    router.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap()
}

#[tokio::test]
async fn files_of_all_kinds_are_read_and_found() {
    let router = server();
    let mut word = file("C:\\mine\\word.docx", &sample("handbook-word.docx"));
    word["title"] = json!("My handbook");
    let body = json!({ "documents": [
        file("handbook.pdf", &sample("handbook-chromium.pdf")),
        word,
        { "title": "Pumps", "text": "A tyre takes 6 bar." },
        file("page", &sample("handbook.html")),
        file("two.jsonl", b"{\"text\": \"A bell is needed.\"}\n{\"text\": \"Lights too.\"}"),
    ]});
    let added = post(&router, "/v1/documents", body).await;
    let titles: Vec<&str> =
        added["data"].as_array().unwrap().iter().map(|of| of["title"].as_str().unwrap()).collect();
    assert_eq!((titles.len(), titles[1], titles[2]), (6, "My handbook", "Pumps"), "{titles:?}");
    assert_eq!(added["failures"], json!([]));
    let path = format!("/v1/documents/{}", added["data"][0]["id"].as_str().unwrap());
    let shown = value(ask(&router, "GET", &path, None, Value::Null).await).await;
    assert!(shown["text"].as_str().unwrap().contains("## "), "{shown}");
    let alone = post(&router, "/v1/documents", file("note.txt", b"One note.")).await;
    assert_eq!(alone["data"][0]["title"], "note");
}

#[tokio::test]
async fn a_file_that_cannot_be_read_is_named_and_the_others_are_stored() {
    let router = server();
    let scanned = file("scan.pdf", &sample("scanned.pdf"));
    let (status, error) = refused(ask(&router, "POST", "/v1/documents", None, scanned.clone()).await).await;
    assert_eq!((status, &error["code"], &error["param"]), (422, &json!("unreadable_file"), &json!("file")));
    assert!(error["message"].as_str().unwrap().starts_with("scan.pdf: has no text"), "{error}");
    let mut body = json!({ "documents": [scanned, file("secret.pdf", &sample("encrypted.pdf"))] });
    let (status, error) = refused(ask(&router, "POST", "/v1/documents", None, body.clone()).await).await;
    assert_eq!((status, &error["param"]), (422, &json!("documents[0].file")));
    assert!(error["message"].as_str().unwrap().contains("secret.pdf: encrypted"), "{error}");
    let further = [file("good.md", b"# Good\n\nIt is read."), file("blank.txt", b" \n")];
    body["documents"].as_array_mut().unwrap().extend(further);
    let added = post(&router, "/v1/documents", body.clone()).await;
    assert_eq!((added["data"].as_array().unwrap().len(), &added["ingest"]["documents"]), (1, &json!(1)));
    let failures = added["failures"].as_array().unwrap();
    let names: Vec<&str> = failures.iter().map(|of| of["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["scan.pdf", "secret.pdf", "blank.txt"]);
    assert_eq!(failures[1]["param"], "documents[1].file");
    assert_eq!(failures[1]["message"], "encrypted; save it without a password first");
    body["stream"] = json!(true);
    let events = events(ask(&router, "POST", "/v1/documents", None, body).await).await;
    assert_eq!(events.last().unwrap()["failures"], added["failures"]);
}

#[tokio::test]
async fn wrong_and_large_requests_of_files_are_refused() {
    let router = router(app(|options| (options.max_body, options.max_documents_per_request) = (6000, 3)));
    let many = b"{\"text\": \"a\"}\n".repeat(4);
    for (body, status, named) in [
        (json!({ "file": { "name": "a.txt", "data": "?!" } }), 400, "base64"),
        (json!({ "file": { "name": "a.txt" } }), 400, "data"),
        (json!({ "file": { "name": "a.txt", "data": "YQ==" }, "text": "b" }), 400, "not both"),
        (json!({ "documents": [{ "title": "a" }] }), 400, "give a text, a file"),
        (json!({ "documents": [], "text": "a" }), 400, "beside"),
        (file("many.jsonl", &many), 400, "4 documents"),
        (file("long.txt", &[b'a'; 6000]), 413, "6000"),
    ] {
        let response = ask(&router, "POST", "/v1/documents", None, body).await;
        let (found, error) = refused(response).await;
        assert_eq!(found, status, "{error}");
        assert!(error["message"].as_str().unwrap().contains(named), "{error}");
    }
}

#[tokio::test]
async fn text_that_files_hold_is_bounded_as_that_of_bodies_is() {
    let router = router(app(|options| options.max_body = 60_000));
    let mut utf16 = vec![0xFF, 0xFE];
    // Each unit of two bytes is three bytes of UTF-8.
    utf16.extend("螺".repeat(21_000).encode_utf16().flat_map(u16::to_le_bytes));
    let (status, error) =
        refused(ask(&router, "POST", "/v1/documents", None, file("a.txt", &utf16)).await).await;
    assert_eq!((status, &error["code"]), (413, &json!("too_large")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("60000 bytes of text"), "{error}");
}

#[tokio::test]
async fn titles_that_files_hold_count_as_their_text_does() {
    let router = router(app(|options| options.max_body = 60_000));
    let mut utf16 = vec![0xFF, 0xFE];
    let records = format!("{{\"title\":\"{}\",\"text\":\"a\"}}\n", "螺".repeat(1000)).repeat(21);
    utf16.extend(records.encode_utf16().flat_map(u16::to_le_bytes));
    let (status, error) =
        refused(ask(&router, "POST", "/v1/documents", None, file("a.jsonl", &utf16)).await).await;
    assert_eq!((status, &error["code"]), (413, &json!("too_large")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("60000 bytes of text"), "{error}");
}

#[tokio::test]
async fn forms_bring_files_with_their_options() {
    let router = server();
    let pdf = sample("handbook-chromium.pdf");
    let parts = [
        ("file", Some("handbook.pdf"), pdf.as_slice()),
        ("file", Some("note.txt"), b"One note."),
        ("method", None, b"pie"),
    ];
    let added = value(send(&router, &[], form(&parts)).await).await;
    assert_eq!((added["data"].as_array().unwrap().len(), &added["data"][1]["title"]), (2, &json!("note")));
    let streamed = form(&[("file", Some("note.txt"), b"One note."), ("stream", None, b"true")]);
    assert_eq!(events(send(&router, &[], streamed).await).await.last().unwrap()["ingest"]["computed"], 0);
    for (body, status, named) in [
        (form(&[]), 400, "1 to 256"),
        (form(&[("files", Some("a.txt"), b"a")]), 400, "files"),
        (form(&[("file", Some("a.txt"), b"a"), ("method", None, b"magic")]), 400, "magic"),
        (form(&[("file", Some("a.txt"), b"a"), ("stream", None, b"maybe")]), 400, "true or false"),
        (form(&[("file", Some("scan.pdf"), &sample("scanned.pdf"))]), 422, "scan.pdf: has no text"),
        (b"--edge\r\nbroken".to_vec(), 400, "not a form"),
    ] {
        let (found, error) = refused(send(&router, &[], body).await).await;
        assert_eq!(found, status, "{error}");
        assert!(error["message"].as_str().unwrap().contains(named), "{error}");
    }
    let small = super::router(app(|options| options.max_body = 1000));
    assert_eq!(refused(send(&small, &[], form(&parts)).await).await.0, 413);
}

/// A browser sends forms of other origins' pages without asking first: they are not taken.
#[tokio::test]
async fn forms_of_other_origins_are_refused() {
    let router = server();
    let planted = || form(&[("file", Some("planted.txt"), b"planted")]);
    let host = ("host", "127.0.0.1:8000");
    for headers in [
        [host, ("origin", "https://evil.example")].as_slice(),
        &[host, ("origin", "null")],
        &[host, ("origin", "http://127.0.0.1:9000")],
        &[host, ("origin", "http://127.0.0.1:8000.evil.example")],
        &[host, ("sec-fetch-site", "cross-site")],
        &[host, ("sec-fetch-site", "same-site"), ("origin", "http://localhost:9000")],
        &[host, ("sec-fetch-site", "cross-site"), ("origin", "http://127.0.0.1:8000")],
        &[("host", "evil.example"), ("origin", "http://evil.example")],
    ] {
        assert_eq!(send(&router, headers, planted()).await.status(), 403, "{headers:?}");
    }
    let listed = value(ask(&router, "GET", "/v1/documents", None, Value::Null).await).await;
    assert_eq!(listed["data"], json!([]));
    for headers in [[host, ("origin", "http://127.0.0.1:8000")], [host, ("sec-fetch-site", "same-origin")]] {
        assert_eq!(send(&router, &headers, planted()).await.status(), 200, "{headers:?}");
    }
    let open =
        super::router(app(|options| options.allowed_origins = vec!["https://good.example".to_owned()]));
    let headers = [("sec-fetch-site", "cross-site"), ("origin", "https://good.example")];
    assert_eq!(send(&open, &headers, form(&[("file", Some("a.txt"), b"a")])).await.status(), 200);
}

#[tokio::test]
async fn requests_of_files_fit_their_description() {
    let router = server();
    let described = value(ask(&router, "GET", "/openapi.json", None, Value::Null).await).await;
    let operation = &described["paths"]["/v1/documents"]["post"];
    let content = &operation["requestBody"]["content"];
    let body = json!({ "documents": [file("good.md", b"Good."), file("scan.pdf", &sample("scanned.pdf"))] });
    let answer = post(&router, "/v1/documents", body.clone()).await;
    let response = &operation["responses"]["200"]["content"]["application/json"]["schema"];
    let request = &content["application/json"]["schema"];
    let form = &content["multipart/form-data"]["schema"];
    let sent = json!({ "file": ["bytes"], "method": "pie" });
    for (schema, value) in
        [(request, &body), (request, &file("a.txt", b"a")), (response, &answer), (form, &sent)]
    {
        assert!(!schema.is_null(), "{operation}");
        let faults = schema::faults(&described, schema, value, "files");
        assert!(faults.is_empty(), "{faults:#?}");
    }
    let file = &described["components"]["schemas"]["FileForm"]["properties"]["file"];
    assert_eq!(file["items"]["format"], "binary", "{file}");
}
