//! Answers: `/v1/chat/completions` and `/v1/completions`, whole or as a stream of server-sent events.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::convert::Infallible;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use refrain_engine::{Answer, Document, Engine, Finish, Parts, Prompt};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::asked::{Asked, Documents, Every, Explain, Named};
use super::{Json, json as answer_json, random_id};
use crate::app::{App, Caller, instructions, seconds, title};
use crate::error::{Problem, Result};
use crate::library::id_of;
use crate::work::{Asked as Scheduled, Event, Token, Work};

/// Chunks that a search takes if the request says nothing.
const SEARCHED: usize = 5;
/// Most chunks that a search may take.
const MOST_SEARCHED: usize = 64;
/// Tokens of an answer that is bounded by nothing else.
const TOKENS: usize = 512;

/// Which of the two it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Text,
}

/// `POST /v1/chat/completions`
pub(super) async fn chat(
    State(app): State<App>,
    caller: Caller,
    Json(asked): Json<Asked>,
) -> Result<Response> {
    answer(app, caller, asked, Kind::Chat).await
}

/// `POST /v1/completions`
pub(super) async fn completions(
    State(app): State<App>,
    caller: Caller,
    Json(asked): Json<Asked>,
) -> Result<Response> {
    let named = |problem: Problem| match problem.param.as_deref() {
        Some("messages") => Problem { param: Some("prompt".to_owned()), ..problem },
        _ => problem,
    };
    answer(app, caller, asked, Kind::Text).await.map_err(named)
}

/// A document that an answer is drawn from.
struct Source {
    document: Document,
    id: String,
    /// Parts that a search has chosen, with their scores; all of them if there was none.
    parts: Vec<(usize, f32)>,
}

/// An answer's frame.
struct Frame {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    method: String,
    evict: String,
    sources: Vec<Value>,
    engine: Engine,
    logprobs: bool,
    usage: bool,
    explain: Explain,
    /// Characters of the tokens whose likelihoods are told.
    told: Cell<usize>,
}

async fn answer(app: App, caller: Caller, asked: Asked, kind: Kind) -> Result<Response> {
    asked.check(&app.0.options.model)?;
    let method = app.method("refrain.method", asked.refrain.method.as_ref())?;
    let policy = app.policy("refrain.evict", asked.refrain.evict.as_ref())?;
    app.0.scheduler.has_room()?;
    let (streams, usage, explain) = (asked.streams(), asked.wants_usage(), asked.refrain.explain);
    // Tokenising and searching take their time.
    let of = app.clone();
    let (engine, prompt, sampling, sources) =
        app.prepared(move || prepare(&of, caller, &asked, kind)).await?;
    let frame = Frame {
        kind,
        id: random_id(if kind == Kind::Chat { "chatcmpl" } else { "cmpl" }),
        created: seconds(),
        model: app.0.options.model.clone(),
        method: method.spec,
        evict: policy.spec,
        sources,
        engine: engine.clone(),
        logprobs: sampling.logprobs.is_some(),
        usage,
        explain,
        told: Cell::new(0),
    };
    let (events, mut received) = unbounded_channel();
    let work = Scheduled {
        prompt,
        method: method.built,
        eviction: policy.built,
        sampling,
        explain: explain != Explain::Most(false),
    };
    let (method, evict, documents) = (&frame.method, &frame.evict, frame.sources.len());
    tracing::info!(method, evict, documents, tokens = work.prompt.len(), "asked");
    tracing::trace!(target: crate::TEXTS, prompt = app.0.engine.tokenizer().decode(&work.prompt.ids(), false));
    app.0.scheduler.submit(engine, Work::Answer(Box::new(work)), events, None)?;
    if streams {
        // What goes wrong before the first token has a status of its own.
        let first = received.recv().await.ok_or_else(|| Problem::internal(&"an answer was lost"))?;
        if let Event::Failed(problem) = first {
            return Err(problem);
        }
        let stream = frame.stream(first, received);
        return Ok(Sse::new(stream).keep_alive(KeepAlive::default()).into_response());
    }
    let mut tokens = Vec::new();
    while let Some(event) = received.recv().await {
        match event {
            Event::Token(token) => tokens.extend(frame.logprobs.then_some(token)),
            Event::Done(answer) => return Ok(answer_json(frame.whole(&answer, &tokens))),
            Event::Failed(problem) => return Err(problem),
            Event::Ingested(_) | Event::Kept(_) => {}
        }
    }
    Err(Problem::internal(&"an answer was lost"))
}

type Made = (Engine, Prompt, refrain_engine::Sampling, Vec<Value>);

/// The prompt of a request, and what its answer will be drawn from.
fn prepare(app: &App, caller: Caller, asked: &Asked, kind: Kind) -> Result<Made> {
    let conversation = (kind == Kind::Chat).then(|| asked.conversation()).transpose()?;
    let question = match &conversation {
        Some(conversation) => conversation.question.clone(),
        None => asked.prompt()?.to_owned(),
    };
    let sources = sources(app, &caller, asked, &question)?;
    let documents: Vec<Document> = sources.iter().map(|source| source.document.clone()).collect();
    let mut prompt = match conversation {
        Some(conversation) => caller.engine.prompt(
            &documents,
            &question,
            &instructions(conversation.system, conversation.history),
        )?,
        None => {
            let texts: Vec<String> = documents.iter().map(Document::prompt_text).collect();
            caller.engine.compose(&Parts { documents: &texts, question: &question, ..Parts::default() })?
        }
    };
    prompt.chunks.retain(|chunk| {
        let parts = &sources[chunk.document].parts;
        parts.is_empty() || parts.iter().any(|(part, _)| *part == chunk.part.0)
    });
    let context = caller.engine.decoder().config().context;
    let most = context.saturating_sub(prompt.len()).clamp(1, TOKENS);
    let sampling = asked.sampling(most)?;
    let told = sources.iter().enumerate().map(|(index, source)| {
        let chunks = prompt.chunks.iter().filter(|chunk| chunk.document == index).map(|chunk| {
            let score = source.parts.iter().find(|(part, _)| *part == chunk.part.0).map(|(_, score)| score);
            json!({ "part": chunk.part.0, "of": chunk.part.1, "tokens": chunk.tokens.len(), "score": score })
        });
        json!({ "id": source.id, "title": title(&source.document), "chunks": chunks.collect::<Vec<_>>() })
    });
    let told = told.collect();
    Ok((caller.engine, prompt, sampling, told))
}

/// The documents that are asked for.
fn sources(app: &App, caller: &Caller, asked: &Asked, question: &str) -> Result<Vec<Source>> {
    let whole = |document: Document| Source { id: id_of(&document), document, parts: Vec::new() };
    match &asked.documents {
        None => Ok(Vec::new()),
        Some(Documents::These(named)) => {
            let most = app.0.options.documents;
            if named.len() > most {
                return Err(Problem::field("documents", format!("a request may have {most} documents")));
            }
            let context = caller.engine.decoder().config().context;
            let mut tokens = 0;
            let mut source = |named: &Named| match named {
                Named::Id { id } => {
                    let kept = app.0.library.get(caller.namespace(), id)?;
                    tokens += kept.tokens;
                    if tokens > context {
                        let message =
                            format!("the documents have more tokens than the model's context of {context}");
                        let problem = Problem::field("documents", message);
                        return Err(Problem { code: Some("context_length_exceeded"), ..problem });
                    }
                    Ok(whole(kept.document))
                }
                Named::Text(document) if document.text.trim().is_empty() => {
                    Err(Problem::field("documents", "a document has no text"))
                }
                Named::Text(document) => Ok(whole(document.clone())),
            };
            named.iter().map(&mut source).collect()
        }
        Some(Documents::Search(word)) if word == "search" => {
            let most = asked.refrain.search.unwrap_or(SEARCHED).min(MOST_SEARCHED);
            let hits = app.0.search.best(caller.namespace(), question, most)?;
            let mut sources: Vec<Source> = Vec::new();
            let mut seen = BTreeSet::new();
            for hit in hits {
                if seen.insert(hit.document.clone()) {
                    // It may have been removed since.
                    match app.0.library.get(caller.namespace(), &hit.document) {
                        Ok(kept) => sources.push(whole(kept.document)),
                        Err(problem) if problem.status == StatusCode::NOT_FOUND => {}
                        Err(problem) => return Err(problem),
                    }
                }
                if let Some(source) = sources.iter_mut().find(|source| source.id == hit.document) {
                    source.parts.push((hit.part, hit.score));
                }
            }
            Ok(sources)
        }
        Some(Documents::Search(word)) => {
            Err(Problem::field("documents", format!("documents is \"search\" or a list, not {word:?}")))
        }
    }
}

impl Frame {
    fn head(&self, object: &str) -> Value {
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model })
    }

    /// An answer that is whole.
    fn whole(&self, answer: &Answer, tokens: &[Token]) -> Value {
        let finish = finish(answer.finish);
        let (object, choice) = match self.kind {
            Kind::Chat => (
                "chat.completion",
                json!({
                    "index": 0, "finish_reason": finish, "logprobs": self.likely(tokens),
                    "message": { "role": "assistant", "content": answer.text, "refusal": null },
                }),
            ),
            Kind::Text => (
                "text_completion",
                json!({ "index": 0, "finish_reason": finish, "logprobs": self.likely(tokens), "text": answer.text }),
            ),
        };
        let mut value = self.head(object);
        value["choices"] = json!([choice]);
        value["usage"] = usage(answer);
        value["refrain"] = self.account(answer);
        value
    }

    /// What the answer took, and what it is drawn from.
    fn account(&self, answer: &Answer) -> Value {
        let mut value = json!({
            "method": self.method, "evict": self.evict, "account": answer.account, "documents": self.sources,
        });
        if let Some(explanation) = &answer.explanation {
            value["explanation"] = json!(explanation);
            if self.explain == Explain::All(Every::Tokens) {
                value["explanation"]["chunks"] = json!(explanation.chunks);
            }
        }
        value
    }

    /// A part of a stream.
    fn chunk(&self, delta: Value, finish: Option<&str>, tokens: &[Token]) -> Value {
        let (object, choice) = match self.kind {
            Kind::Chat => (
                "chat.completion.chunk",
                json!({ "index": 0, "delta": delta, "finish_reason": finish, "logprobs": self.likely(tokens) }),
            ),
            Kind::Text => (
                "text_completion",
                json!({
                    "index": 0, "text": delta["content"].as_str().unwrap_or_default(), "finish_reason": finish,
                    "logprobs": self.likely(tokens),
                }),
            ),
        };
        let mut value = self.head(object);
        value["choices"] = json!([choice]);
        value
    }

    /// How likely tokens were, if it was asked for.
    fn likely(&self, tokens: &[Token]) -> Value {
        let tokens: Vec<(u32, &refrain_engine::Likely)> =
            tokens.iter().filter_map(|token| token.id.zip(token.likely.as_ref())).collect();
        if !self.logprobs || tokens.is_empty() {
            return Value::Null;
        }
        let bytes = |id: u32| self.engine.tokenizer().bytes_of(id);
        match self.kind {
            Kind::Chat => {
                let one = |id: u32, logprob: f32| {
                    let bytes = bytes(id);
                    json!({ "token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes })
                };
                let token = |(id, likely): &(u32, &refrain_engine::Likely)| {
                    let mut value = one(*id, likely.logprob);
                    value["top_logprobs"] =
                        likely.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect();
                    value
                };
                json!({ "content": tokens.iter().map(token).collect::<Vec<_>>(), "refusal": null })
            }
            Kind::Text => {
                // A part of a character is told as OpenAI does.
                let text = |id: u32| {
                    String::from_utf8(bytes(id)).unwrap_or_else(|part| {
                        let hex = part.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
                        format!("bytes:{}", hex.collect::<String>())
                    })
                };
                let top = |likely: &refrain_engine::Likely| -> Value {
                    likely.top.iter().map(|(id, logprob)| (text(*id), Value::from(*logprob))).collect()
                };
                // In characters, of which each counts with its first byte.
                let characters = |id: u32| bytes(id).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
                let offsets =
                    tokens.iter().map(|(id, _)| self.told.replace(self.told.get() + characters(*id)));
                json!({
                    "text_offset": offsets.collect::<Vec<_>>(),
                    "tokens": tokens.iter().map(|(id, _)| text(*id)).collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|(_, likely)| likely.logprob).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(|(_, likely)| top(likely)).collect::<Vec<_>>(),
                })
            }
        }
    }

    /// The events of an answer, `first` among them.
    fn stream(
        self,
        first: Event,
        received: UnboundedReceiver<Event>,
    ) -> impl Stream<Item = std::result::Result<Sent, Infallible>> {
        let role = json!({ "role": "assistant", "content": "" });
        let mut queue: Vec<Sent> = Vec::new();
        if self.kind == Kind::Chat {
            queue.push(data(&self.chunk(role, None, &[])));
        }
        // An answer may end with its first token.
        let (sent, over) = self.sent(first);
        queue.extend(sent);
        queue.extend(over.then(done));
        queue.reverse();
        let start = (self, received, queue, over);
        stream::unfold(start, |(frame, mut received, mut queue, mut over)| async move {
            loop {
                if let Some(next) = queue.pop() {
                    return Some((Ok(next), (frame, received, queue, over)));
                }
                if over {
                    return None;
                }
                let event = received.recv().await;
                let (mut sent, ends) = match event {
                    Some(event) => frame.sent(event),
                    None => (vec![data(&Problem::internal(&"an answer was lost").json())], true),
                };
                if ends {
                    sent.push(done());
                    over = true;
                }
                sent.reverse();
                queue = sent;
            }
        })
    }

    /// What is sent of an event, and whether it is the last.
    fn sent(&self, event: Event) -> (Vec<Sent>, bool) {
        match event {
            Event::Token(token) => {
                let mut value =
                    self.chunk(json!({ "content": token.text }), None, std::slice::from_ref(&token));
                value["refrain"] = json!({ "retained": token.retained, "kv_bytes": token.kv_bytes });
                (vec![data(&value)], false)
            }
            Event::Done(answer) => {
                let mut last = self.chunk(json!({}), Some(finish(answer.finish)), &[]);
                last["refrain"] = self.account(&answer);
                let mut sent = vec![data(&last)];
                if self.usage {
                    let mut value = self.chunk(json!({}), None, &[]);
                    (value["choices"], value["usage"]) = (json!([]), usage(&answer));
                    sent.push(data(&value));
                }
                (sent, true)
            }
            Event::Failed(problem) => (vec![data(&problem.json())], true),
            Event::Ingested(_) | Event::Kept(_) => (Vec::new(), false),
        }
    }
}

pub(super) fn data(value: &Value) -> Sent {
    Sent::default().data(value.to_string())
}

/// The last event of a stream.
pub(super) fn done() -> Sent {
    Sent::default().data("[DONE]")
}

fn finish(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length | Finish::Cancelled => "length",
    }
}

fn usage(answer: &Answer) -> Value {
    let account = &answer.account;
    json!({
        "prompt_tokens": account.prompt_tokens,
        "completion_tokens": account.answer_tokens,
        "total_tokens": account.prompt_tokens + account.answer_tokens,
        "prompt_tokens_details": { "cached_tokens": account.cached_tokens },
    })
}
