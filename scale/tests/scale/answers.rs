//! Answers do not depend on the worker that gives them.

use serde_json::{Value, json};

use crate::harness::{Client, Plane, Workers, tiny_model};

/// A question about documents of a real model.
pub(crate) fn question(index: usize) -> Value {
    let document = |of: usize| json!({ "title": format!("Part {of}"), "text": format!("Stem bolt number {of} is tightened to {} Nm, and greased.", of + 2) });
    let method = ["vanilla", "pie", "a3", "drift"][index % 4];
    json!({
        "messages": [{ "role": "user", "content": format!("How tight is bolt {}?", index % 7) }],
        "documents": [document(index % 5), document(5 + index % 3)], "max_tokens": 12,
        "temperature": if index.is_multiple_of(2) { 0.0 } else { 0.8 }, "seed": index,
        "refrain": { "method": method },
    })
}

/// An answer without what differs each time: ids and times.
pub(crate) fn comparable(mut answer: Value) -> String {
    for name in ["id", "created", "refrain"] {
        answer.as_object_mut().unwrap().remove(name);
    }
    answer["usage"].as_object_mut().unwrap().remove("prompt_tokens_details");
    answer.to_string()
}

/// The texts of a stream's events.
fn streamed(text: &str) -> String {
    let events = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let events = events.map(|data| serde_json::from_str::<Value>(data).unwrap());
    events
        .map(|event| event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned())
        .collect()
}

pub(crate) async fn every_worker_gives_the_same_answers(plane: &Plane) {
    let model = tiny_model();
    // A prompt whose beginning is in the prefix cache has fewer rows, of which `bf16` tiles may round others: `f32` has the same bits.
    let mut options = vec!["--model", &model, "--compute", "f32", "--chunk-tokens", "64", "--threads", "1"];
    options.extend(["--served-model-name", "tiny"]);
    let alone = Workers::start(&Plane::List, 1, &options);
    let workers = Workers::start(plane, 3, &options);
    let gateway = plane.gateway(&workers.refs(), &[]);
    let (gateway, alone) = (Client::of(&gateway.url), Client::of(&alone.running[0].url).clone());
    gateway.workers(3).await;
    for index in 0..40 {
        let question = question(index);
        let (status, wanted) = alone.chat(&question).await;
        assert_eq!(status, 200, "{wanted}");
        let (status, answer) = gateway.chat(&question).await;
        assert_eq!(status, 200, "{answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        assert_eq!(comparable(answer), comparable(wanted), "question {index}");
        let mut stream = question.clone();
        stream["stream"] = json!(true);
        let (status, events) = gateway.text("POST", "/v1/chat/completions", &stream).await;
        assert_eq!((status, streamed(&events)), (200, text), "question {index}");
    }
}
