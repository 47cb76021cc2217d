//! Calls of tools, on a tiny model with room for the prompts that tell of them.

use super::*;

const PATH: &str = "/v1/chat/completions";

/// A server of the tiny model with a longer context, whose chat template and the text of whose special token 2 may be others.
pub(crate) fn server_with(template: Option<&str>, special: &str) -> Router {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let folder = TempDir::new().unwrap();
    for entry in std::fs::read_dir(golden.join("tiny/llama")).unwrap() {
        let from = entry.unwrap().path();
        let to = folder.path().join(from.file_name().unwrap());
        if from.extension().is_some_and(|extension| extension == "safetensors") {
            std::fs::copy(&from, &to).unwrap();
            continue;
        }
        let text = std::fs::read_to_string(&from).unwrap();
        let mut value: Value = serde_json::from_str(&text.replace("<|im_start|>", special)).unwrap();
        if to.ends_with("config.json") {
            value["max_position_embeddings"] = json!(8192);
        }
        if let Some(template) = template.filter(|_| to.ends_with("tokenizer_config.json")) {
            let path = golden.join("tools").join(format!("{template}.jinja"));
            value["chat_template"] = json!(std::fs::read_to_string(path).unwrap());
        }
        std::fs::write(&to, value.to_string()).unwrap();
    }
    let settings = Settings { chunk_tokens: 64, ..Settings::default() };
    let engine = Engine::open(folder.path(), Store::in_memory(1 << 28), settings, |_, _| ()).unwrap();
    router(App::new(engine, Options::new(MODEL)).unwrap())
}

/// Servers of models that call tools as JSON between tags, told of them in the system message, and behind a special token.
fn servers() -> [Router; 2] {
    [server_with(None, "<|im_start|>"), server_with(Some("mistral_nemo"), "[TOOL_CALLS]")]
}

fn tool(name: &str, properties: Value) -> Value {
    let required: Vec<&String> = properties.as_object().unwrap().keys().collect();
    let parameters = json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
    json!({ "type": "function", "function": { "name": name, "description": "Looks it up.", "parameters": parameters, "strict": true } })
}

/// Two tools, of which any arguments are few tokens.
pub(crate) fn tools() -> Value {
    let torque = json!({ "bolt": { "enum": ["stem", "seat"] }, "newton": { "type": "integer", "minimum": 0, "maximum": 99 } });
    json!([tool("torque", torque), tool("count_spokes", json!({ "wheel": { "enum": ["front", "rear"] } }))])
}

fn asked(more: Value) -> Value {
    let mut body = chat(json!({ "tools": tools(), "max_tokens": 200 }));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Name and arguments of a call, which fit a tool.
pub(crate) fn checked(name: &Value, arguments: &Value) -> (String, Value) {
    let arguments: Value = serde_json::from_str(arguments.as_str().unwrap()).unwrap();
    match name.as_str().unwrap() {
        "torque" => {
            assert!(["stem", "seat"].contains(&arguments["bolt"].as_str().unwrap()), "{arguments}");
            assert!((0..=99).contains(&arguments["newton"].as_i64().unwrap()), "{arguments}");
        }
        "count_spokes" => assert!(["front", "rear"].contains(&arguments["wheel"].as_str().unwrap())),
        other => panic!("{other}"),
    }
    (name.as_str().unwrap().to_owned(), arguments)
}

fn calls(choice: &Value) -> Vec<(String, Value)> {
    let calls = choice["message"]["tool_calls"].as_array().map(Vec::as_slice).unwrap_or_default();
    let call = |call: &Value| {
        assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function", "{call}");
        checked(&call["function"]["name"], &call["function"]["arguments"])
    };
    calls.iter().map(call).collect()
}

/// An answer's chunks put together: its text, its calls with ids, and the reason for its end.
fn streamed(events: &[Value], index: usize) -> (String, Vec<(String, Value)>, Value) {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let choices: Vec<&Value> = choices.filter(|choice| choice["index"] == index).collect();
    let (mut text, mut calls): (String, Vec<(Value, String)>) = Default::default();
    assert_eq!(choices[0]["delta"], json!({ "role": "assistant", "content": null }));
    for choice in &choices[1..] {
        let delta = choice["delta"].as_object().unwrap();
        text.push_str(delta.get("content").and_then(Value::as_str).unwrap_or_default());
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            if call["id"].is_null() {
                assert_eq!(call.as_object().unwrap().len(), 2, "{call}");
                assert_eq!(call["index"], calls.len() - 1);
                calls.last_mut().unwrap().1.push_str(call["function"]["arguments"].as_str().unwrap());
            } else {
                assert_eq!((&call["type"], &call["function"]["arguments"]), (&json!("function"), &json!("")));
                assert_eq!(call["index"], calls.len());
                calls.push((call["function"]["name"].clone(), String::new()));
            }
        }
    }
    let calls = calls.iter().map(|(name, arguments)| checked(name, &json!(arguments))).collect();
    (text, calls, choices.last().unwrap()["finish_reason"].clone())
}

/// An answer that must call tools does, with arguments of their schema, whatever is sampled; streamed alike.
#[tokio::test]
async fn answers_that_must_call_tools_do() {
    for router in servers() {
        let named = json!({ "type": "function", "function": { "name": "count_spokes" } });
        for (more, names) in [
            (json!({ "tool_choice": named }), vec!["count_spokes"]),
            (json!({ "tool_choice": "required" }), vec!["count_spokes", "torque"]),
            (
                json!({ "tool_choice": "required", "n": 2, "temperature": 3, "seed": 5, "stop": ["}zz"] }),
                vec!["count_spokes", "torque"],
            ),
            (
                json!({ "tool_choice": "required", "response_format": { "type": "json_object" } }),
                vec!["count_spokes", "torque"],
            ),
        ] {
            let mut body = asked(more.clone());
            body["parallel_tool_calls"] = json!(false);
            let whole = post(&router, PATH, body.clone()).await;
            body["stream"] = json!(true);
            let events = events(ask(&router, "POST", PATH, None, body).await).await;
            for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
                let calls = calls(choice);
                assert!(calls.len() == 1 && names.contains(&calls[0].0.as_str()), "{more} {choice}");
                assert_eq!(
                    (&choice["message"]["content"], &choice["finish_reason"]),
                    (&Value::Null, &json!("tool_calls"))
                );
                assert_eq!(streamed(&events, index), (String::new(), calls, json!("tool_calls")));
            }
            // Arguments come in parts.
            let fragments =
                events.iter().filter(|event| !event["choices"][0]["delta"]["tool_calls"].is_null());
            assert!(fragments.count() > 3, "{events:?}");
        }
    }
}

#[tokio::test]
async fn several_calls_are_one_answer_and_a_limit_cuts_calls_off() {
    for router in servers() {
        let mut most = 0;
        for seed in 0..6 {
            let body = asked(json!({ "tool_choice": "required", "temperature": 4, "seed": seed }));
            let answer = post(&router, PATH, body).await;
            let choice = &answer["choices"][0];
            if choice["finish_reason"] == "tool_calls" {
                most = most.max(calls(choice).len());
            }
        }
        assert!(most > 1, "{most} calls");
        // A function that is named is called once, unless several calls are asked for.
        let named = json!({ "type": "function", "function": { "name": "torque" } });
        let mut most = [0; 2];
        for seed in 0..6 {
            for (most, several) in most.iter_mut().zip([Value::Null, json!(true)]) {
                let mut body = asked(json!({ "tool_choice": named, "temperature": 4, "seed": seed }));
                body["parallel_tool_calls"] = several;
                let answer = post(&router, PATH, body).await;
                let choice = &answer["choices"][0];
                if choice["finish_reason"] == "tool_calls" {
                    *most = calls(choice).len().max(*most);
                }
            }
        }
        assert!(most[0] == 1 && most[1] > 1, "{most:?} calls");
        for max_tokens in [3, 40] {
            let mut body = asked(json!({ "tool_choice": "required", "max_tokens": max_tokens }));
            let choice = post(&router, PATH, body.clone()).await["choices"][0].clone();
            assert_eq!(
                (&choice["finish_reason"], &choice["message"]["content"].as_str().unwrap_or_default()),
                (&json!("length"), &""),
                "{choice}"
            );
            // A stream's last word on the text is that of the whole answer: null beside calls alone.
            body["stream"] = json!(true);
            let events = events(ask(&router, "POST", PATH, None, body).await).await;
            let delta = |event: &Value| event["choices"][0]["delta"].get("content").cloned();
            assert_eq!(events.iter().rev().find_map(delta), Some(choice["message"]["content"].clone()));
        }
    }
}

/// Without a need to call, an answer is text, calls, or with a format either calls or of the format.
#[tokio::test]
async fn answers_may_call_tools() {
    for (router, special) in servers().into_iter().zip([None, Some("2".to_owned())]) {
        let free = post(&router, PATH, asked(json!({ "max_tokens": 12, "logprobs": true }))).await;
        let choice = &free["choices"][0];
        assert!(
            choice["message"]["content"].is_string() && choice["message"]["tool_calls"].is_null(),
            "{choice}"
        );
        assert_eq!(
            choice["logprobs"]["content"].as_array().unwrap().len(),
            free["usage"]["completion_tokens"]
        );
        let body = asked(json!({ "max_tokens": 12, "logprobs": true, "stream": true }));
        let events = events(ask(&router, "POST", PATH, None, body).await).await;
        let (text, none, finish) = streamed(&events, 0);
        assert_eq!(
            (json!(text), none.len(), &finish),
            (choice["message"]["content"].clone(), 0, &choice["finish_reason"])
        );
        let logprobs =
            events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
        assert_eq!(json!(logprobs.flatten().collect::<Vec<_>>()), choice["logprobs"]["content"]);
        // The format's answers begin with a brace, the calls with a mark: a bias decides which it is.
        let schema = json!({ "type": "object", "properties": { "tight": { "type": "boolean" } }, "required": ["tight"], "additionalProperties": false });
        let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
        let first = async |text: &str| {
            let body = json!({ "prompt": text, "add_special_tokens": false });
            post(&router, "/tokenize", body).await["tokens"][0].to_string()
        };
        let mark = match special {
            Some(id) => id,
            None => first("<").await,
        };
        for (token, wanted) in [(first("{").await, 0), (mark, 1)] {
            let more = json!({
                "response_format": format, "logit_bias": { token.clone(): 30 }, "parallel_tool_calls": false, "temperature": 0.5, "seed": 1,
            });
            let answer = post(&router, PATH, asked(more.clone())).await;
            let choice = &answer["choices"][0];
            let calls = calls(choice);
            assert_eq!(calls.len(), wanted, "{token} {choice}");
            if calls.is_empty() {
                let text = choice["message"]["content"].as_str().unwrap();
                assert!(serde_json::from_str::<Value>(text).unwrap()["tight"].is_boolean());
            }
        }
        // An answer of the format stays text where it reads as a call without marks.
        let call = json!({ "name": "torque", "arguments": {} });
        let schema = json!({ "type": "object", "properties": { "name": { "const": "torque" }, "arguments": { "type": "object", "properties": {}, "additionalProperties": false } }, "required": ["name", "arguments"], "additionalProperties": false });
        let brace = first("{").await;
        let body = asked(json!({
            "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } },
            "logit_bias": { brace: 30 }, "temperature": 0.5, "seed": 1, "max_tokens": 1000,
        }));
        let message = post(&router, PATH, body).await["choices"][0]["message"].clone();
        let text = message["content"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), call);
    }
}

#[tokio::test]
async fn tools_stand_in_the_prompt_unless_none_may_be_called() {
    for router in servers() {
        let tokens = async |more: Value| {
            let body = asked(more);
            post(&router, PATH, body).await["usage"]["prompt_tokens"].as_u64().unwrap()
        };
        let without = tokens(json!({ "tools": [], "max_tokens": 1 })).await;
        let with = tokens(json!({ "max_tokens": 1 })).await;
        assert!(with > without + 100, "{with} {without}");
        assert_eq!(tokens(json!({ "tool_choice": "none", "max_tokens": 1 })).await, without);
        let messages = json!([{ "role": "user", "content": "How tight is a stem bolt?" }]);
        let taken = post(&router, "/tokenize", json!({ "messages": messages, "tools": tools() })).await;
        let asked = json!({ "messages": messages, "tools": tools(), "max_tokens": 1 });
        assert_eq!(post(&router, PATH, asked).await["usage"]["prompt_tokens"], taken["count"]);
        // A call and its result can be sent back.
        let call = json!({ "id": "call_1", "type": "function", "function": { "name": "torque", "arguments": "{\"bolt\": \"stem\"}" } });
        let messages = json!([
            { "role": "user", "content": "How tight is a stem bolt?" },
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": "call_1", "content": "5 Nm" },
        ]);
        let body = json!({ "messages": messages, "tools": tools(), "max_tokens": 4 });
        assert!(
            post(&router, PATH, body).await["usage"]["prompt_tokens"].as_u64().unwrap()
                > taken["count"].as_u64().unwrap() + 30
        );
    }
}

/// A tool without parameters, or with none, is called without arguments, and others with those that they name.
#[tokio::test]
async fn calls_have_the_arguments_of_their_tools_alone() {
    let router = server_with(None, "<|im_start|>");
    let quote = json!({ "prompt": "\"", "add_special_tokens": false });
    let quote = post(&router, "/tokenize", quote).await["tokens"][0].to_string();
    let bolt =
        json!({ "type": "object", "properties": { "bolt": { "enum": ["stem"] } }, "required": ["bolt"] });
    for (parameters, arguments) in [
        (Value::Null, "{}"),
        (json!({ "type": "object", "properties": {} }), "{}"),
        (bolt, "{\"bolt\": \"stem\"}"),
    ] {
        let tool = json!({ "type": "function", "function": { "name": "now", "parameters": parameters } });
        let named = json!({ "type": "function", "function": { "name": "now" } });
        // A quotation mark begins a further argument.
        let more = json!({ "tools": [tool], "tool_choice": named, "logit_bias": { quote.clone(): 30 } });
        let call = post(&router, PATH, asked(more)).await["choices"][0]["message"]["tool_calls"][0].clone();
        assert_eq!(call["function"]["arguments"], arguments);
    }
}

/// A pattern that no grammar reads, as that of pydantic's `Decimal`, does not count, and neither does a keyword of null.
#[tokio::test]
async fn arguments_of_a_tool_may_have_patterns_that_no_grammar_reads() {
    let router = server_with(None, "<|im_start|>");
    let bolt = json!({ "type": "string", "pattern": "^(?!x)[a-z]*$", "enum": ["stem", "seat"] });
    let parameters = json!({ "type": "object", "properties": { "bolt": bolt }, "required": ["bolt"],
        "additionalProperties": false, "$defs": null });
    let function = json!({ "name": "torque", "parameters": parameters });
    let optional = json!({ "name": "count_spokes", "parameters": { "type": "object", "properties": {}, "required": null } });
    let tools =
        json!([{ "type": "function", "function": function }, { "type": "function", "function": optional }]);
    let more = json!({ "tools": tools, "tool_choice": { "type": "function", "function": { "name": "torque" } },
        "parallel_tool_calls": false });
    let answer = post(&router, PATH, asked(more)).await;
    let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["stem", "seat"].map(|of| json!(of)).contains(&arguments["bolt"]), "{call}");
    let more = json!({ "tools": tools, "tool_choice": "required", "max_tokens": 4 });
    post(&router, PATH, asked(more)).await;
}

#[tokio::test]
async fn what_cannot_be_called_is_refused() {
    let router = server_with(None, "<|im_start|>");
    let unknown = json!({ "type": "function", "function": { "name": "unknown" } });
    let wrong =
        json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "wrong" } } }]);
    for (more, param) in [
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tool_choice": unknown }), "tool_choice"),
        (json!({ "tools": [], "tool_choice": "required" }), "tool_choice"),
        (json!({ "tools": wrong, "tool_choice": "required" }), "tools"),
        (json!({ "structured_outputs": { "regex": "a" } }), "structured_outputs"),
        (json!({ "functions": [{ "name": "f" }] }), "functions"),
        (json!({ "function_call": "auto" }), "function_call"),
    ] {
        let (status, error) = refused(ask(&router, "POST", PATH, None, asked(more.clone())).await).await;
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{more} {error}");
    }
    let body = json!({ "prompt": "x", "tools": tools() });
    let (status, error) = refused(ask(&router, "POST", "/v1/completions", None, body).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("tools")));
}

/// The end of the prompt tells a model that can think not to, unless the request asks for it.
#[tokio::test]
async fn a_model_thinks_where_the_request_asks_for_it() {
    let router = server_with(Some("qwen3"), "<|im_start|>");
    let prompt = async |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "Why?" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let taken = post(&router, "/tokenize", body).await;
        let back = post(&router, "/detokenize", json!({ "tokens": taken["tokens"] })).await;
        back["prompt"].as_str().unwrap().to_owned()
    };
    let plain = prompt(json!({})).await;
    let thinking = prompt(json!({ "chat_template_kwargs": { "enable_thinking": true } })).await;
    assert_eq!(plain, format!("{thinking}<think>\n\n</think>\n\n"));
    // An answer's prompt is the same.
    let tokens = async |thinking: bool| {
        let body = chat(json!({ "chat_template_kwargs": { "enable_thinking": thinking }, "max_tokens": 1 }));
        post(&router, PATH, body).await["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let (plain, thinking) = (tokens(false).await, tokens(true).await);
    assert!(plain > thinking);
    for (effort, wanted) in [("none", plain), ("high", thinking)] {
        let body = chat(json!({ "reasoning_effort": effort, "max_tokens": 1 }));
        assert_eq!(post(&router, PATH, body).await["usage"]["prompt_tokens"], wanted);
    }
    let respond = async |effort: &str| {
        let body = json!({ "input": "Why?", "max_output_tokens": 1, "reasoning": { "effort": effort } });
        post(&router, "/v1/responses", body).await["usage"]["input_tokens"].as_u64().unwrap()
    };
    assert_eq!(respond("minimal").await - respond("low").await, plain - thinking);
}
