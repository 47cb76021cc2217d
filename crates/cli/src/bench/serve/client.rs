//! A client of the server, and what it sees of an answer.

use std::io::{BufRead, BufReader};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};

use crate::http::config_for;

/// The kind of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// An answer.
    #[default]
    Chat,
    /// The call of a tool.
    Tools,
    /// A new document, which is removed afterwards.
    Ingest,
}

/// A request of the traffic.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) body: Value,
    /// Index of the API key that it comes with.
    pub(super) key: usize,
    /// Whether turns of a conversation went before.
    pub(super) later: bool,
    /// Tokens after which the client goes away; none where it stays.
    pub(super) leaves_after: Option<usize>,
}

/// The outcome of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) kind: Kind,
    pub(super) key: usize,
    pub(super) later: bool,
    /// Tokens of the answer; 0 for a request without one.
    pub(super) status: u16,
    /// Seconds to the first token, between the others, and to the end.
    pub(super) ttft: Option<f64>,
    pub(super) gaps: Vec<f64>,
    pub(super) latency: Option<f64>,
    /// Seconds a token after the first, over the whole answer.
    pub(super) tpot: Option<f64>,
    /// Tokens that came.
    pub(super) tokens: usize,
    pub(super) whole: bool,
    pub(super) left: bool,
    /// Counts of a whole answer, as the server tells them.
    pub(super) counts: Counts,
    /// Text of the answer; of one that failed, why.
    pub(super) text: String,
}

/// Tokens of answers, as the server tells them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) prompt: usize,
    /// `usage.prompt_tokens_details.cached_tokens`
    pub(super) cached: usize,
    /// Cached tokens that came out of the prefix cache.
    pub(super) prefix: usize,
    pub(super) answer: usize,
    pub(super) drafted: usize,
    pub(super) accepted: usize,
}

/// A client with a key, or without one.
pub(super) struct Client<'a> {
    pub(super) url: &'a str,
    pub(super) key: Option<&'a str>,
}

/// The data of the server-sent events of a response.
fn events(response: ureq::http::Response<ureq::Body>) -> impl Iterator<Item = String> {
    let lines = BufReader::new(response.into_body().into_reader()).lines().map_while(std::io::Result::ok);
    lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned))
}

impl Client<'_> {
    /// The response to a body at a path; none where none came.
    pub(super) fn post(&self, path: &str, body: &Value) -> Option<ureq::http::Response<ureq::Body>> {
        let request = agent(self.url).post(format!("{}{path}", self.url)).content_type("application/json");
        let request = match self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        request.send(body.to_string()).ok()
    }

    /// Sends a request, and reads its answer to the end or until the client leaves.
    pub(super) fn send(&self, request: &Request) -> Outcome {
        let mut outcome =
            Outcome { kind: request.kind, key: request.key, later: request.later, ..Outcome::default() };
        let started = Instant::now();
        let path = if request.kind == Kind::Ingest { "/v1/documents" } else { "/v1/chat/completions" };
        let Some(response) = self.post(path, &request.body) else { return outcome };
        outcome.status = response.status().as_u16();
        if outcome.status != 200 {
            outcome.text = message(&response.into_body().read_to_string().unwrap_or_default());
            return outcome;
        }
        match request.kind {
            Kind::Ingest => self.follow_ingest(&mut outcome, response, request.leaves_after.is_some()),
            Kind::Chat | Kind::Tools => follow_answer(&mut outcome, response, request.leaves_after, started),
        }
        outcome.latency = outcome.whole.then(|| started.elapsed().as_secs_f64());
        if request.kind == Kind::Ingest && outcome.whole {
            // Documents that stayed would be memory that never comes back.
            self.remove(&outcome.text);
        }
        outcome
    }

    /// Follows an ingest; its text is the id of the document.
    fn follow_ingest(&self, outcome: &mut Outcome, response: ureq::http::Response<ureq::Body>, leaves: bool) {
        for data in events(response) {
            let event: Value = serde_json::from_str(&data).unwrap_or_default();
            if let Some(id) = event["data"][0]["id"].as_str() {
                (outcome.whole, outcome.text) = (true, id.to_owned());
            } else if event["error"].is_object() {
                outcome.text = message(&data);
            } else if leaves {
                outcome.left = true;
                return;
            }
        }
    }

    fn remove(&self, id: &str) {
        let request = agent(self.url).delete(format!("{}/v1/documents/{id}", self.url));
        let request = match self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        };
        let _ = request.call();
    }
}

pub(super) fn agent(url: &str) -> ureq::Agent {
    config_for(url).timeout_global(None).http_status_as_error(false).build().new_agent()
}

/// The message of an error.
fn message(body: &str) -> String {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    body["error"]["message"].as_str().unwrap_or_default().to_owned()
}

/// Reads the tokens of an answer.
fn follow_answer(
    outcome: &mut Outcome,
    response: ureq::http::Response<ureq::Body>,
    leaves_after: Option<usize>,
    started: Instant,
) {
    let (mut last, mut broken) = (started, false);
    for data in events(response) {
        // An error comes before the end as well.
        if data.starts_with("{\"error\"") {
            (broken, outcome.text) = (true, message(&data));
        }
        outcome.whole |= data == "[DONE]" && !broken;
        if data.contains("\"stats\"") || data.contains("\"prompt_tokens_details\"") {
            outcome.counts.read(&serde_json::from_str(&data).unwrap_or_default());
        } else if data.contains("\"retained\"") {
            // Every token has an event of its own but where a character takes several.
            let now = Instant::now();
            match outcome.ttft {
                None => outcome.ttft = Some((now - started).as_secs_f64()),
                Some(_) => outcome.gaps.push((now - last).as_secs_f64()),
            }
            last = now;
            outcome.tokens += 1;
            let event: Value = serde_json::from_str(&data).unwrap_or_default();
            outcome.text += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            if leaves_after.is_some_and(|most| outcome.tokens >= most) {
                outcome.left = true;
                return;
            }
        }
    }
    let further = outcome.counts.answer.max(outcome.tokens).saturating_sub(1);
    if let (Some(ttft), 1..) = (outcome.ttft, further) {
        outcome.tpot = Some(((last - started).as_secs_f64() - ttft) / further as f64);
    }
}

impl Counts {
    /// Reads the event of a stream that has the usage, or the statistics.
    fn read(&mut self, event: &Value) {
        let count = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let (usage, stats) = (&event["usage"], &event["refrain"]["stats"]);
        for (value, into) in [
            (&usage["prompt_tokens"], &mut self.prompt),
            (&usage["completion_tokens"], &mut self.answer),
            (&usage["prompt_tokens_details"]["cached_tokens"], &mut self.cached),
            (&stats["prefix_tokens"], &mut self.prefix),
            (&stats["draft_tokens"], &mut self.drafted),
            (&stats["accepted_draft_tokens"], &mut self.accepted),
        ] {
            if let Some(n) = count(value) {
                *into = n;
            }
        }
    }

    /// The sum of many.
    pub(super) fn sum<'a>(all: impl Iterator<Item = &'a Counts>) -> Counts {
        all.fold(Counts::default(), |sum, one| Counts {
            prompt: sum.prompt + one.prompt,
            cached: sum.cached + one.cached,
            prefix: sum.prefix + one.prefix,
            answer: sum.answer + one.answer,
            drafted: sum.drafted + one.drafted,
            accepted: sum.accepted + one.accepted,
        })
    }
}

/// The tool that requests of [`Kind::Tools`] have the model call.
pub(super) fn tool() -> Value {
    json!({ "type": "function", "function": {
        "name": "look_up", "description": "Looks a word up in the documents.",
        "parameters": {
            "type": "object", "required": ["word", "exact"],
            "properties": { "word": { "type": "string", "maxLength": 40 }, "exact": { "type": "boolean" } },
        },
    } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_usage_and_statistics() {
        let mut counts = Counts::default();
        counts.read(
            &json!({ "refrain": { "stats": { "prefix_tokens": 5, "draft_tokens": 4, "accepted_draft_tokens": 3 } } }),
        );
        counts.read(&json!({ "usage": {
            "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": { "cached_tokens": 7 } } }));
        let whole = Counts { prompt: 9, cached: 7, prefix: 5, answer: 2, drafted: 4, accepted: 3 };
        assert_eq!(counts, whole);
        assert_eq!(Counts::sum([&whole, &counts].into_iter()).cached, 14);
    }
}
