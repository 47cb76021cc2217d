//! The interface `/v1/responses`.

use super::tools::{checked, server_with};
use super::*;

const PATH: &str = "/v1/responses";

fn server() -> Router {
    server_with(None, "<|im_start|>")
}

fn asked(more: Value) -> Value {
    let mut body = json!({
        "model": MODEL, "input": "How tight is a stem bolt?", "max_output_tokens": 8, "instructions": "Be brief.",
        "documents": [{ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." }],
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The tools of a chat in the flat notation.
fn functions() -> Value {
    let flat = |tool: &Value| {
        let mut function = tool["function"].clone();
        function["type"] = json!("function");
        function
    };
    json!(super::tools::tools().as_array().unwrap().iter().map(flat).collect::<Vec<_>>())
}

/// The events of a stream, whose names and numbers are checked.
async fn streamed(router: &Router, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let response = ask(router, "POST", PATH, None, body).await;
    assert_eq!(response.status(), StatusCode::OK);
    let text = text(response).await;
    let mut events: Vec<Value> = Vec::new();
    for event in text.split("\n\n").filter(|event| !event.is_empty()) {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], events.len());
        events.push(data);
    }
    events
}

/// The output of a response without its ids.
fn without_ids(output: &Value) -> Value {
    let mut output = output.clone();
    for item in output.as_array_mut().unwrap() {
        let item = item.as_object_mut().unwrap();
        let (prefix, call_id) = match item["type"].as_str().unwrap() {
            "message" => ("msg_", None),
            _ => ("fc_", item.remove("call_id")),
        };
        assert!(item.remove("id").unwrap().as_str().unwrap().starts_with(prefix));
        assert!(call_id.is_none_or(|id| id.as_str().unwrap().starts_with("call_")));
    }
    output
}

#[tokio::test]
async fn a_response_is_the_answer_of_a_chat() {
    let router = server();
    let whole = post(&router, PATH, asked(json!({ "metadata": { "a": "b" } }))).await;
    let mut body = chat(json!({ "max_tokens": 8 }));
    body["messages"] = json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "How tight is a stem bolt?" }]);
    body["documents"].as_array_mut().unwrap().pop();
    let chat = post(&router, "/v1/chat/completions", body).await;
    let item = &whole["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["content"][0]["type"]),
        (&json!("message"), &json!("assistant"), &json!("output_text"))
    );
    assert_eq!(item["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(
        (&whole["object"], &whole["status"], &whole["store"]),
        (&json!("response"), &json!("incomplete"), &json!(false))
    );
    assert_eq!(
        (&whole["incomplete_details"]["reason"], &item["status"]),
        (&json!("max_output_tokens"), &json!("incomplete"))
    );
    assert_eq!((&whole["metadata"]["a"], &whole["instructions"]), (&json!("b"), &json!("Be brief.")));
    assert_eq!(whole["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(whole["usage"]["output_tokens"], 8);
    assert_eq!(whole["refrain"]["documents"][0]["title"], "Torque");

    let events = streamed(&router, asked(json!({}))).await;
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let begin = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ];
    let end = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert!(kinds.starts_with(&begin) && kinds.ends_with(&end), "{kinds:?}");
    assert!(kinds[4..kinds.len() - 4].iter().all(|kind| *kind == "response.output_text.delta"), "{kinds:?}");
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(json!(text), item["content"][0]["text"]);
    let last = &events.last().unwrap()["response"];
    assert_eq!(without_ids(&last["output"]), without_ids(&whole["output"]));
    assert_eq!((&last["id"], &last["usage"]["output_tokens"]), (&events[0]["response"]["id"], &json!(8)));
    assert_eq!(
        (&events[0]["response"]["status"], &events[0]["response"]["usage"]),
        (&json!("in_progress"), &Value::Null)
    );
}

#[tokio::test]
async fn a_response_calls_functions_and_follows_formats() {
    let router = server();
    let more = json!({ "tools": functions(), "tool_choice": "required", "parallel_tool_calls": false, "max_output_tokens": 100 });
    let whole = post(&router, PATH, asked(more.clone())).await;
    let call = &whole["output"][0];
    checked(&call["name"], &call["arguments"]);
    assert_eq!(
        (&call["type"], &call["status"], &whole["status"]),
        (&json!("function_call"), &json!("completed"), &json!("completed"))
    );
    assert_eq!(
        (whole["output"].as_array().unwrap().len(), &whole["tools"][0]["name"]),
        (1, &json!("torque"))
    );
    let events = streamed(&router, asked(more)).await;
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let end = ["response.function_call_arguments.done", "response.output_item.done", "response.completed"];
    assert!(kinds[2] == "response.output_item.added" && kinds.ends_with(&end), "{kinds:?}");
    let arguments: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(json!(arguments), call["arguments"]);
    assert_eq!(
        (&events[2]["item"]["arguments"], &events[2]["item"]["status"]),
        (&json!(""), &json!("in_progress"))
    );
    assert_eq!(without_ids(&events.last().unwrap()["response"]["output"]), without_ids(&whole["output"]));
    // The call goes back with its output.
    let input = json!([
        { "role": "user", "content": [{ "type": "input_text", "text": "How tight is a stem bolt?" }] },
        call, { "type": "function_call_output", "call_id": call["call_id"], "output": "5 Nm" },
    ]);
    let next = post(&router, PATH, asked(json!({ "input": input, "tools": functions() }))).await;
    let longer = next["usage"]["input_tokens"].as_u64().unwrap();
    assert!(longer > whole["usage"]["input_tokens"].as_u64().unwrap() + 20);
    let named = json!({ "tools": functions(), "tool_choice": { "type": "function", "name": "count_spokes" }, "max_output_tokens": 100 });
    assert_eq!(post(&router, PATH, asked(named)).await["output"][0]["name"], "count_spokes");
    let allowed = json!({ "type": "allowed_tools", "mode": "required", "tools": [{ "type": "function", "name": "count_spokes" }] });
    let more = json!({ "tools": functions(), "tool_choice": allowed, "parallel_tool_calls": false, "max_output_tokens": 100 });
    let answer = post(&router, PATH, asked(more)).await;
    assert_eq!((&answer["output"][0]["name"], &answer["tool_choice"]), (&json!("count_spokes"), &allowed));
    let schema =
        json!({ "type": "object", "properties": { "tight": { "type": "boolean" } }, "required": ["tight"] });
    let format =
        json!({ "format": { "type": "json_schema", "name": "x", "strict": true, "schema": schema } });
    let answer = post(&router, PATH, asked(json!({ "text": format, "max_output_tokens": 40 }))).await;
    let text: Value =
        serde_json::from_str(answer["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(text["tight"].is_boolean());
    assert_eq!((&answer["text"], &answer["status"]), (&format, &json!("completed")));
}

#[tokio::test]
async fn what_a_response_does_not_take_is_refused_by_name() {
    let router = server();
    for (more, param) in [
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "conversation": "conv_1" }), "conversation"),
        (json!({ "background": true }), "background"),
        (json!({ "reasoning": { "effort": "high", "summary": "auto" } }), "reasoning"),
        (json!({ "include": ["file_search_call.results"] }), "include"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "top_logprobs": 2 }), "top_logprobs"),
        (json!({ "prompt": { "id": "pmpt_1" } }), "prompt"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tools": [{ "type": "function", "name": "a b" }] }), "tools[0].name"),
        (json!({ "input": Value::Null }), "input"),
        (json!({ "input": [] }), "input"),
        (
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_image", "image_url": "x" }] }] }),
            "input[0].content",
        ),
        (json!({ "input": [{ "role": "critic", "content": "x" }] }), "input[0].role"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
        (json!({ "temperature": -1 }), "temperature"),
        (
            json!({ "text": { "format": { "type": "json_schema", "name": "x", "schema": { "type": "wrong" } } } }),
            "text.format",
        ),
        (json!({ "model": "gpt-4o" }), "model"),
        (json!({ "stream": true, "max_output_tokens": 90_000 }), "max_output_tokens"),
        (json!({ "tools": [["function", "torque"]] }), "tools[0]"),
        (json!({ "text": { "format": ["text"] } }), "text.format"),
    ] {
        let (status, error) = refused(ask(&router, "POST", PATH, None, asked(more.clone())).await).await;
        assert_eq!((status / 100, &error["param"]), (4, &json!(param)), "{more} {error}");
    }
    let harmless = json!({ "store": true, "previous_response_id": null, "include": [], "truncation": "disabled", "user": "x",
        "reasoning": { "effort": "high", "summary": null } });
    post(&router, PATH, asked(harmless)).await;
}

#[tokio::test]
async fn metadata_is_as_small_as_openai_has_it() {
    let router = server();
    let many: serde_json::Map<String, Value> = (0..17).map(|i| (format!("k{i}"), json!("v"))).collect();
    for metadata in [
        json!([[], []]),
        json!({ "a": 1 }),
        json!({ "a": "x".repeat(513) }),
        json!({ "k".repeat(65): "" }),
        json!(many),
    ] {
        let (status, error) =
            refused(ask(&router, "POST", PATH, None, asked(json!({ "metadata": metadata }))).await).await;
        assert_eq!((status, &error["param"]), (400, &json!("metadata")), "{error}");
    }
    let most: serde_json::Map<String, Value> =
        (0..16).map(|i| (format!("{i:064}"), json!("é".repeat(512)))).collect();
    let whole = post(&router, PATH, asked(json!({ "metadata": most }))).await;
    assert_eq!(whole["metadata"], json!(most));
}
