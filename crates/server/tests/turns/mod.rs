//! Conversations over several turns.

use refrain::kernels::Precision;

use super::*;

/// Bytes of the prefix cache.
const BOUND: usize = 1 << 26;

/// A server with a prefix cache of so many bytes. In f32 a row's bits do not depend on the rows computed beside it.
fn caching(bytes: usize, change: impl FnOnce(&mut Options)) -> Router {
    let mut options = Options::new(MODEL);
    change(&mut options);
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let settings = Settings { chunk_tokens: 64, precision: Some(Precision::F32), ..Settings::default() };
    let engine = Engine::open(&path, Store::in_memory(1 << 28), settings, |_, _| ()).unwrap();
    router(App::new(engine.with_prefix_cache(bytes), options).unwrap())
}

fn turns(said: &[&str], more: Value) -> Value {
    let roles = ["user", "assistant"].iter().cycle();
    let messages = said.iter().zip(roles).map(|(text, role)| json!({ "role": role, "content": text }));
    let mut body = chat(more);
    body["messages"] = json!(messages.collect::<Vec<_>>());
    body
}

fn said(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

fn prefix_tokens(answer: &Value) -> u64 {
    answer["refrain"]["stats"]["prefix_tokens"].as_u64().unwrap()
}

/// A conversation whose documents a search has found goes on with the same chunks, named as the answer told them.
#[tokio::test]
async fn a_further_turn_keeps_the_chunks_that_a_search_found() {
    let (router, path) = (caching(BOUND, |_| ()), "/v1/chat/completions");
    let text = "The rear wheel has 28 spokes. The rim is drilled. ".repeat(12);
    post(&router, "/v1/documents", json!({ "documents": [{ "title": "Wheels", "text": text }] })).await;
    let more = |documents| json!({ "documents": documents, "refrain": { "search": 2 }, "max_tokens": 4 });
    let question = "How many spokes has the rear wheel?";
    let one = post(&router, path, turns(&[question], more(json!("search")))).await;
    let found = one["refrain"]["documents"][0].clone();
    let parts: Vec<&Value> = found["chunks"].as_array().unwrap().iter().map(|chunk| &chunk["part"]).collect();
    assert!(found["chunks"][0]["of"].as_u64().unwrap() > 2 && parts.len() == 2, "{found}");
    let named = json!([{ "id": found["id"], "parts": parts }]);
    let two = post(&router, path, turns(&[question, said(&one), "And the front wheel?"], more(named))).await;
    let before = one["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prefix_tokens(&two) >= before / 16 * 16, "{two}");
    // Nothing of a removed document is taken over, though the same text comes again.
    let removed = format!("/v1/documents/{}", found["id"].as_str().unwrap());
    assert_eq!(value(ask(&router, "DELETE", &removed, None, Value::Null).await).await["deleted"], true);
    assert!(metrics_of(&router).await.contains("refrain_prefix_cache_bytes 0\n"));
    post(&router, "/v1/documents", json!({ "documents": [{ "title": "Wheels", "text": text }] })).await;
    let anew = post(&router, path, turns(&[question], more(json!("search")))).await;
    assert_eq!((prefix_tokens(&anew), said(&anew)), (0, said(&one)));
}

/// A further turn over documents takes over all that the turns before it have computed, whatever the method, and its answer is the one
/// of a server that keeps nothing where the method is vanilla.
#[tokio::test]
async fn a_further_turn_computes_what_is_new() {
    for method in ["vanilla", "a3", "drift:charge=0.3", "pie"] {
        let (router, plain) = (caching(BOUND, |_| ()), caching(0, |_| ()));
        let more = json!({ "refrain": { "method": method }, "max_tokens": 20, "min_tokens": 20, "temperature": 0.4, "seed": 3 });
        let path = "/v1/chat/completions";
        let first = turns(&["How tight is a stem bolt?"], more.clone());
        let one = post(&router, path, first.clone()).await;
        assert_eq!(prefix_tokens(&one), 0);
        assert_eq!(said(&one), said(&post(&plain, path, first.clone()).await));
        let next = turns(&["How tight is a stem bolt?", said(&one), "And what else?"], more.clone());
        let two = post(&router, path, next.clone()).await;
        let before = one["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(prefix_tokens(&two) >= before / 16 * 16, "{method}: {two}");
        let cached = &two["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(
            (cached, &two["refrain"]["stats"]["recomputed_tokens"]),
            (&json!(prefix_tokens(&two)), &json!(0))
        );
        // The same question again finds all but its last block.
        let again = post(&router, path, first).await;
        assert_eq!(prefix_tokens(&again), (before - 1) / 16 * 16);
        assert_eq!(said(&again), said(&one));
        let metrics = metrics_of(&router).await;
        let hits = prefix_tokens(&two) + prefix_tokens(&again);
        assert!(metrics.contains(&format!("refrain_prefix_cache_hits_total {hits}\n")), "{metrics}");
    }
}

/// What one key's requests have computed serves no other key.
#[tokio::test]
async fn nothing_is_shared_across_keys() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("keys");
    let keys = ["one", "two"].map(|name| ApiKeys::add(&file, name).unwrap());
    let router = caching(BOUND, |options| {
        options.api_keys = ApiKeys::read(&file).unwrap();
        options.namespace_key = Some(NamespaceKey::of_folder(folder.path()).unwrap());
    });
    let body = chat(json!({ "refrain": { "method": "vanilla" } }));
    let mut taken = Vec::new();
    for key in [&keys[0], &keys[1], &keys[0], &keys[1]] {
        let response = ask(&router, "POST", "/v1/chat/completions", Some(key), body.clone()).await;
        taken.push(prefix_tokens(&value(response).await));
    }
    assert!(taken[0] == 0 && taken[1] == 0 && taken[2] > 0 && taken[3] > 0, "{taken:?}");
}

/// Several answers to one prompt compute it once.
#[tokio::test]
async fn several_answers_share_their_prompt() {
    let router = caching(BOUND, |_| ());
    let body = chat(json!({ "n": 3, "temperature": 1, "seed": 1, "refrain": { "method": "vanilla" } }));
    let answer = post(&router, "/v1/chat/completions", body).await;
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let metrics = metrics_of(&router).await;
    let hits = 2 * ((prompt - 1) / 16 * 16);
    assert!(metrics.contains(&format!("refrain_prefix_cache_hits_total {hits}\n")), "{metrics}");
}

/// The turns of a conversation that calls a tool reach the model, and the last one may be the tool's result.
#[tokio::test]
async fn a_conversation_goes_on_from_the_result_of_a_tool() {
    let router = server();
    let call = json!({ "id": "call-1", "type": "function", "function": { "name": "torque", "arguments": "{\"bolt\": \"stem\"}" } });
    let mut body = chat(json!({}));
    body["messages"] = json!([
        { "role": "user", "content": "How tight is a stem bolt?" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "call-1", "content": "5 Nm" },
    ]);
    let answer = post(&router, "/v1/chat/completions", body.clone()).await;
    let longer = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let asked = post(&router, "/v1/chat/completions", chat(json!({}))).await;
    assert!(longer > asked["usage"]["prompt_tokens"].as_u64().unwrap() + 10);
    body["messages"][2]["tool_call_id"] = Value::Null;
    let (status, error) = refused(ask(&router, "POST", "/v1/chat/completions", None, body).await).await;
    assert_eq!((status, &error["param"]), (400, &json!("messages[2].tool_call_id")));
}

/// A conversation may end with a turn of the assistant or an empty one of the user. A search then looks for the user's
/// last text.
#[tokio::test]
async fn a_conversation_may_end_with_any_message() {
    let router = server();
    let document = json!({ "title": "Torque", "text": "A stem bolt is tightened to 5 Nm." });
    post(&router, "/v1/documents", json!({ "documents": [document] })).await;
    let said = |role: &str, content: &str| json!({ "role": role, "content": content });
    let (asked, answered) = (said("user", "How tight is a stem bolt?"), said("assistant", "Very."));
    let mut before = 0;
    for messages in [json!([asked]), json!([asked, answered]), json!([asked, answered, said("user", "")])] {
        let body = json!({ "messages": messages, "documents": "search", "max_tokens": 2 });
        let answer = post(&router, "/v1/chat/completions", body.clone()).await;
        assert_eq!(answer["refrain"]["documents"][0]["title"], "Torque", "{messages}");
        let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(tokens > before + 4, "{tokens} {before}");
        before = tokens;
    }
    for messages in [json!([answered]), json!([said("user", " ")])] {
        let refusal =
            ask(&router, "POST", "/v1/chat/completions", None, json!({ "messages": messages })).await;
        let (status, error) = refused(refusal).await;
        assert_eq!((status, &error["param"]), (400, &json!("messages")), "{error}");
    }
}

/// A system message that comes after the first turn, last or alone is part of the prompt, also where the chat template refuses it there.
#[tokio::test]
async fn system_messages_stand_anywhere() {
    for router in [server(), tools::server_with(Some("mistral_nemo"), "[TOOL_CALLS]")] {
        let tokens = async |messages: Value| {
            let body = json!({ "messages": messages, "max_tokens": 2 });
            let answer = post(&router, "/v1/chat/completions", body).await;
            answer["usage"]["prompt_tokens"].as_u64().unwrap()
        };
        let said = |role: &str, content: &str| json!({ "role": role, "content": content });
        let (asked, system) =
            (said("user", "How tight is a stem bolt?"), said("system", "Answer in newton metres."));
        let without = tokens(json!([asked])).await;
        for messages in [json!([asked, system]), json!([asked, said("assistant", "Five."), system, asked])] {
            assert!(tokens(messages).await > without + 5);
        }
        assert!(tokens(json!([system])).await > 0);
    }
}
