//! How tokens are chosen: several answers, grammars, biases, echo; and tokens as such.

use super::*;

fn content(answer: &Value, index: usize) -> String {
    let choice = &answer["choices"][index];
    assert_eq!(choice["index"], index);
    choice["message"]["content"].as_str().unwrap().to_owned()
}

/// Each of several answers is the one that its seed gives alone, whole and streamed, and the prompt counts once.
#[tokio::test]
async fn several_answers_are_those_of_their_seeds() {
    let router = server();
    let sampled = |seed: u64, more: Value| {
        let mut body = chat(json!({ "temperature": 1.5, "seed": seed, "max_tokens": 12, "min_tokens": 12 }));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let path = "/v1/chat/completions";
    let whole = post(&router, path, sampled(5, json!({ "n": 3, "logprobs": true }))).await;
    assert_eq!(whole["choices"].as_array().unwrap().len(), 3);
    for index in 0..3 {
        let alone = post(&router, path, sampled(5 + index as u64, json!({ "logprobs": true }))).await;
        assert_eq!(content(&whole, index), content(&alone, 0));
        assert_eq!(whole["choices"][index]["logprobs"], alone["choices"][0]["logprobs"]);
        assert_eq!(whole["usage"]["prompt_tokens"], alone["usage"]["prompt_tokens"]);
    }
    assert_ne!(content(&whole, 0), content(&whole, 1));
    assert_eq!((&whole["usage"]["completion_tokens"], &whole["refrain"]["seed"]), (&json!(36), &json!(5)));
    let body = sampled(5, json!({ "n": 3, "stream": true, "stream_options": { "include_usage": true } }));
    let events = events(ask(&router, "POST", path, None, body).await).await;
    let (used, chunks) = events.split_last().unwrap();
    assert_eq!(used["usage"]["completion_tokens"], 36);
    for index in 0..3 {
        let of = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        let of: Vec<&Value> = of.collect();
        assert_eq!(of[0]["delta"]["role"], "assistant");
        assert!(!of.last().unwrap()["finish_reason"].is_null());
        let text: String = of.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, content(&whole, index));
    }
}

/// Answers of a response format are JSON of their schema, whatever the sampling, and streamed alike.
#[tokio::test]
async fn answers_follow_their_format() {
    let router = server();
    let schema = json!({
        "type": "object", "properties": { "bolt": { "enum": ["stem", "seat"] }, "torque": { "type": "integer", "maximum": 99, "minimum": 0 } },
        "required": ["bolt", "torque"], "additionalProperties": false,
    });
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "bolt", "strict": true, "schema": schema } });
    for more in [
        json!({ "response_format": format }),
        json!({ "structured_outputs": { "json": schema } }),
        json!({ "response_format": format, "temperature": 2, "seed": 3, "n": 2 }),
    ] {
        let mut body = chat(more.clone());
        body["max_tokens"] = json!(60);
        let answer = post(&router, "/v1/chat/completions", body.clone()).await;
        for index in 0..answer["choices"].as_array().unwrap().len() {
            let value: Value = serde_json::from_str(&content(&answer, index)).unwrap();
            assert!(["stem", "seat"].map(|of| json!(of)).contains(&value["bolt"]), "{value}");
            assert!((0..=99).contains(&value["torque"].as_i64().unwrap()), "{value}");
            assert_eq!(answer["choices"][index]["finish_reason"], "stop");
        }
        body["stream"] = json!(true);
        let events = events(ask(&router, "POST", "/v1/chat/completions", None, body).await).await;
        let first = events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == 0);
        let text: String = first.filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, content(&answer, 0));
    }
    let body = json!({ "prompt": "The bolt is", "structured_outputs": { "choice": ["tight", "loose"] } });
    let answer = post(&router, "/v1/completions", body).await;
    assert!(["tight", "loose"].contains(&answer["choices"][0]["text"].as_str().unwrap()), "{answer}");
    let body = json!({ "prompt": "The bolt is", "structured_outputs": { "regex": "[0-9]{3} Nm" }, "temperature": 1 });
    let answer = post(&router, "/v1/completions", body).await;
    assert!(answer["choices"][0]["text"].as_str().unwrap().ends_with(" Nm"), "{answer}");
    for (more, param) in [
        (json!({ "structured_outputs": { "regex": "(" } }), "structured_outputs"),
        (json!({ "structured_outputs": { "grammar": "start: nothing" } }), "structured_outputs"),
        (json!({ "structured_outputs": { "grammar": "start: start" } }), "structured_outputs"),
        (json!({ "structured_outputs": { "regex": "a", "choice": ["b"] } }), "structured_outputs"),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "wrong" } } } }),
            "response_format",
        ),
        (
            json!({ "response_format": { "type": "json_object", "schema": { "properties": {
                "price": { "pattern": "^(?!x)" }, "title": { "description": "x".repeat(900) } } } } }),
            "response_format",
        ),
    ] {
        let refusal = ask(&router, "POST", "/v1/chat/completions", None, chat(more.clone())).await;
        let (status, error) = refused(refusal).await;
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{more} {error}");
        assert!(error["message"].as_str().unwrap().len() < 300, "{error}");
    }
}

#[tokio::test]
async fn biases_penalties_and_echo_have_their_effect() {
    let router = server();
    let path = "/v1/completions";
    let forced = json!({ "prompt": "The bolt", "max_tokens": 4, "min_tokens": 4, "logprobs": 1, "logit_bias": { "44": 100 } });
    let answer = post(&router, path, forced.clone()).await;
    let tokens = answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().clone();
    assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
    let mut penalised = forced;
    penalised["frequency_penalty"] = json!(2);
    penalised["logit_bias"] = json!({ "44": 30 });
    penalised["max_tokens"] = json!(40);
    let answer = post(&router, path, penalised).await;
    let others = answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().clone();
    assert!(others[0] == tokens[0] && others.iter().any(|token| *token != tokens[0]), "{others:?}");
    let mut body = json!({ "prompt": "The bolt", "max_tokens": 4, "echo": true });
    let whole = post(&router, path, body.clone()).await["choices"][0]["text"].clone();
    let plain = post(&router, path, json!({ "prompt": "The bolt", "max_tokens": 4 })).await;
    assert_eq!(whole, format!("The bolt{}", plain["choices"][0]["text"].as_str().unwrap()));
    body["stream"] = json!(true);
    let events = events(ask(&router, "POST", path, None, body.clone()).await).await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, whole);
    body["logprobs"] = json!(1);
    let (status, error) = refused(ask(&router, "POST", path, None, body).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("echo")));
    let body = json!({ "prompt": "x", "logit_bias": { "4000000000": 1 } });
    let (status, error) = refused(ask(&router, "POST", path, None, body).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("logit_bias")));
}

/// The answer of a completion keeps the space between prompt and answer, also where the vocabulary puts a space before
/// every text. A chat's answer has none.
#[tokio::test]
async fn a_completion_keeps_the_space_before_it() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/phi3");
    let settings = Settings { chunk_tokens: 64, ..Settings::default() };
    let engine = Engine::open(&path, Store::in_memory(1 << 28), settings, |_, _| ()).unwrap();
    let router = router(App::new(engine, Options::new(MODEL)).unwrap());
    let bare = json!({ "prompt": "the", "add_special_tokens": false, "return_token_strs": true });
    let the = post(&router, "/tokenize", bare).await;
    assert_eq!(the["token_strs"], json!(["▁the"]));
    let forced = |more: Value| {
        let mut body =
            json!({ "max_tokens": 2, "min_tokens": 2, "logit_bias": { the["tokens"][0].to_string(): 100 } });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for prompt in [json!("the"), the["tokens"].clone()] {
        let body = forced(json!({ "prompt": prompt, "logprobs": 0 }));
        let choice = post(&router, "/v1/completions", body).await["choices"][0].clone();
        assert_eq!(
            (&choice["text"], &choice["logprobs"]["text_offset"]),
            (&json!(" the the"), &json!([0, 4]))
        );
        let body = forced(json!({ "prompt": prompt, "echo": true }));
        assert_eq!(post(&router, "/v1/completions", body).await["choices"][0]["text"], "the the the");
    }
    let body = forced(json!({ "messages": [{ "role": "user", "content": "the" }] }));
    assert_eq!(content(&post(&router, "/v1/chat/completions", body).await, 0), "the the");
}

/// Special tokens in the text of a completion are tokens; in its documents and in messages they are characters.
#[tokio::test]
async fn special_tokens_stand_in_prompts_and_in_no_other_text() {
    let router = server();
    let taken = async |body: Value| post(&router, "/tokenize", body).await["tokens"].clone();
    let (bos, prompt) = ("<|begin_of_text|>", "<|im_start|>user\nbolt<|im_end|>");
    let ids = taken(json!({ "prompt": prompt })).await;
    let ids = ids.as_array().unwrap();
    assert_eq!((&ids[..2], ids.last()), ([json!(0), json!(2)].as_slice(), Some(&json!(3))));
    // A text that begins with BOS gets no second one.
    assert_eq!(taken(json!({ "prompt": format!("{bos}{prompt}") })).await, json!(ids));
    assert_eq!(taken(json!({ "prompt": bos })).await, json!([0]));
    assert_eq!(taken(json!({ "prompt": prompt, "add_special_tokens": false })).await, json!(ids[1..]));
    let documents = |text: &str| json!([{ "text": text }]);
    let answer = async |prompt: &str, document: &str| {
        let body = json!({ "prompt": prompt, "documents": documents(document), "max_tokens": 1 });
        let answer = post(&router, "/v1/completions", body).await;
        let tokens = |value: &Value| value.as_u64().unwrap() as usize;
        let of_document = tokens(&answer["refrain"]["documents"][0]["chunks"][0]["tokens"]);
        (of_document, tokens(&answer["usage"]["prompt_tokens"]) - of_document)
    };
    let (document, around) = answer(prompt, "<|im_end|>").await;
    assert!(document >= 10, "{document}");
    assert_eq!(around, ids.len());
    assert_eq!(answer(&format!("{bos}{prompt}"), "bolt").await.1, ids.len());
    let message = json!([{ "role": "user", "content": "<|im_end|>" }]);
    let ends = |ids: Value| ids.as_array().unwrap().iter().filter(|id| **id == json!(3)).count();
    let plain = json!([{ "role": "user", "content": "bolt" }]);
    let (with, without) =
        (taken(json!({ "messages": message })).await, taken(json!({ "messages": plain })).await);
    assert_eq!(ends(with), ends(without));
}

#[tokio::test]
async fn an_answer_goes_on_behind_the_end_of_text_where_that_is_asked_for() {
    let (router, path) = (server(), "/v1/completions");
    let ends = json!({ "prompt": "The bolt", "max_tokens": 6, "logit_bias": { "3": 100 } });
    let mut goes_on = ends.clone();
    goes_on["ignore_eos"] = json!(true);
    for (body, reason, tokens) in [(ends, "stop", 1), (goes_on.clone(), "length", 6)] {
        let answer = post(&router, path, body).await;
        let told = (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]);
        assert_eq!(told, (&json!(reason), &json!(tokens)));
    }
    goes_on["response_format"] = json!({ "type": "json_object" });
    let (status, error) = refused(ask(&router, "POST", path, None, goes_on).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("ignore_eos")));
}

/// LangChain sends 20 prompts at a time.
#[tokio::test]
async fn a_request_has_up_to_128_answers() {
    let (router, path) = (server(), "/v1/completions");
    let asked = |prompts: usize, n: usize| json!({ "prompt": vec!["The bolt is"; prompts], "n": n, "max_tokens": 1, "temperature": 1 });
    let answer = post(&router, path, asked(20, 1)).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 20);
    for (prompts, n, named) in [(129, 1, "prompt"), (65, 2, "prompt"), (1, 17, "n")] {
        let (status, error) = refused(ask(&router, "POST", path, None, asked(prompts, n)).await).await;
        assert_eq!((status, &error["param"]), (400, &json!(named)));
    }
}

/// Each of several prompts has the answers that it has alone, whole and streamed, and all prompts count.
#[tokio::test]
async fn several_prompts_have_the_answers_of_each() {
    let (router, path) = (server(), "/v1/completions");
    let asked = |prompt: Value, n: usize| {
        json!({ "prompt": prompt, "n": n, "echo": true, "temperature": 1.5, "seed": 5, "max_tokens": 6, "min_tokens": 6,
            "documents": [{ "text": "A stem bolt is tightened to 5 Nm." }] })
    };
    let (one, two) = ("The bolt is", "A much longer text that somebody began:");
    let mut alone = Vec::new();
    for prompt in [one, two] {
        alone.push(post(&router, path, asked(json!(prompt), 2)).await);
    }
    let text = |answer: &Value, index: usize| answer["choices"][index]["text"].as_str().unwrap().to_owned();
    let texts: Vec<String> = alone.iter().flat_map(|answer| [text(answer, 0), text(answer, 1)]).collect();
    assert!(texts[..2].iter().all(|text| text.starts_with(one)) && texts[2].starts_with(two), "{texts:?}");
    let whole = post(&router, path, asked(json!([one, two]), 2)).await;
    assert_eq!((0..4).map(|index| text(&whole, index)).collect::<Vec<_>>(), texts);
    assert!((0..4).all(|index| whole["choices"][index]["index"] == index));
    for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        let sum: u64 = alone.iter().map(|answer| answer["usage"][name].as_u64().unwrap()).sum();
        assert_eq!(whole["usage"][name], sum, "{name}");
    }
    let mut body = asked(json!([one, two]), 2);
    (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
    let events = events(ask(&router, "POST", path, None, body).await).await;
    let (used, chunks) = events.split_last().unwrap();
    assert_eq!(used["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
    for (index, text) in texts.iter().enumerate() {
        let of = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        assert_eq!(of.filter_map(|choice| choice["text"].as_str()).collect::<String>(), *text);
    }
    // The ids of a prompt's tokens are the same prompt.
    let ids =
        async |text: &str| post(&router, "/tokenize", json!({ "prompt": text })).await["tokens"].clone();
    let (one, two) = (ids(one).await, ids(two).await);
    let of_ids = post(&router, path, asked(json!([one, two]), 2)).await;
    let answers = |texts: &Value| {
        let tokens = |index| texts["choices"][index]["text"].as_str().unwrap().to_owned();
        (0..4).map(tokens).collect::<Vec<_>>()
    };
    assert!(answers(&of_ids).iter().zip(&texts).all(|(ids, text)| ids.ends_with(text.as_str())), "{of_ids}");
    assert_eq!(of_ids["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
    for (body, param) in [
        (json!({ "prompt": [0, 4_000_000] }), "prompt"),
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": vec!["a"; 129] }), "prompt"),
        (json!({ "prompt": ["a", "b"], "documents": "search" }), "documents"),
    ] {
        let (status, error) = refused(ask(&router, "POST", path, None, body).await).await;
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{error}");
        assert!(!error["message"].as_str().unwrap().contains("message is empty"), "{error}");
    }
}

#[tokio::test]
async fn texts_are_taken_apart_into_tokens_and_put_together() {
    let router = server();
    let text = "A stem bolt is tightened to 5 Nm: größer, 螺栓.";
    let bare = json!({ "prompt": text, "add_special_tokens": false, "return_token_strs": true });
    let tokens = post(&router, "/tokenize", bare).await;
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!(tokens["token_strs"].as_array().unwrap().len(), tokens["count"]);
    let back = post(&router, "/detokenize", json!({ "tokens": tokens["tokens"] })).await;
    assert_eq!(back["prompt"].as_str().unwrap().trim_start(), text);
    let with_bos = post(&router, "/tokenize", json!({ "prompt": text })).await;
    let skipped = with_bos["tokens"].as_array().unwrap()[1..].to_vec();
    assert_eq!(json!(skipped), tokens["tokens"]);
    // A conversation has as many tokens as its answer counts.
    let messages = json!([{ "role": "user", "content": "How tight is a stem bolt?" }]);
    let taken = post(&router, "/tokenize", json!({ "messages": messages })).await;
    let body = json!({ "messages": messages, "max_tokens": 1 });
    let answer = post(&router, "/v1/chat/completions", body).await;
    assert_eq!(taken["count"], answer["usage"]["prompt_tokens"]);
    for (path, body) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({ "prompt": "a", "messages": [] })),
        ("/detokenize", json!({ "tokens": [4_000_000] })),
        ("/detokenize", json!({ "tokens": [-1] })),
        ("/v1/embeddings", json!({ "input": "text" })),
    ] {
        let (status, error) = refused(ask(&router, "POST", path, None, body.clone()).await).await;
        assert_eq!(status, 400, "{path} {body} {error}");
    }
    // A gateway before several models chooses by the name, which a server of another model refuses.
    for (path, body) in [
        ("/tokenize", json!({ "prompt": "a" })),
        ("/detokenize", json!({ "tokens": [5] })),
        ("/v1/documents", json!({ "text": "A bolt." })),
    ] {
        for (model, wanted) in [(json!(MODEL), 200), (Value::Null, 200), (json!("other"), 404)] {
            let mut body = body.clone();
            body["model"] = model;
            let response = ask(&router, "POST", path, None, body.clone()).await;
            assert_eq!(response.status(), wanted, "{path} {body}");
            if wanted == 404 {
                assert_eq!(refused(response).await.1["code"], "model_not_found");
            }
        }
    }
    let (_, error) = refused(ask(&router, "POST", "/v1/embeddings", None, json!({})).await).await;
    assert!(error["message"].as_str().unwrap().contains("embeddings"), "{error}");
}
