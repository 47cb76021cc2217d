//! What a client was sent of a stream, so that another worker can go on with it: the same request is answered again from its beginning,
//! what was sent is compared with it and dropped, and the rest follows.

use std::collections::BTreeMap;

use blake3::Hasher;
use bytes::Bytes;
use serde_json::Value;

use super::events::{data, with_data};

/// Fields that differ between two computations of one answer, since they tell how it was computed.
const NOT_COMPARED: [&str; 3] = ["refrain", "prompt_tokens_details", "input_tokens_details"];
/// Fields that tell when an answer was begun.
const TIMES: [&str; 2] = ["created", "created_at"];
/// Fields whose values are drawn at random. They are compared by the order in which they first appear.
const IDS: [&str; 3] = ["id", "item_id", "call_id"];
/// Types of events that end a response.
const LAST: [&str; 3] = ["response.completed", "response.incomplete", "response.failed"];

/// Types of events that begin a response before its first token.
const FIRST: [&str; 2] = ["response.created", "response.in_progress"];

/// What a client was sent of a stream.
#[derive(Debug, Default)]
pub(super) struct Transcript {
    /// The answers of the request by their index, and under `None` what belongs to none of them.
    lanes: BTreeMap<Option<u64>, Lane>,
    /// The time of the first event.
    created: Option<Value>,
    is_replayed: bool,
    /// Whether something of an answer was sent, and not only what a stream begins with.
    pub(super) is_answered: bool,
    /// Whether the last event was sent.
    pub(super) is_over: bool,
}

#[derive(Debug, Default)]
struct Lane {
    sent: Events,
    /// The same events out of the latest replay.
    replayed: Events,
}

/// Events in a row.
#[derive(Debug, Default)]
struct Events {
    number: u64,
    /// Digest of all of them.
    digest: [u8; 32],
    /// Ids in the order in which they first appeared.
    ids: Vec<String>,
}

impl Events {
    fn add(&mut self, event: &Value) {
        let mut hasher = Hasher::new();
        hasher.update(&self.digest);
        digest(event, &mut hasher, &mut self.ids);
        self.digest = hasher.finalize().into();
        self.number += 1;
    }
}

/// A replay gave another event than the client was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Differs;

impl Transcript {
    /// From now on events come from the beginning again, by another worker.
    pub(super) fn replay(&mut self) {
        self.is_replayed = true;
        self.lanes.values_mut().for_each(|lane| lane.replayed = Events::default());
    }

    /// Whether all that was sent has come again.
    pub(super) fn has_caught_up(&self) -> bool {
        !self.is_replayed || self.lanes.values().all(|lane| lane.replayed.number >= lane.sent.number)
    }

    /// Takes the next event, and gives what the client is to be sent: nothing for an event that it has.
    ///
    /// # Errors
    /// If the event is another one than the client was sent in its place.
    pub(super) fn take(&mut self, event: Bytes) -> Result<Option<Bytes>, Differs> {
        let Some(data) = data(&event) else { return Ok(Some(event)) };
        let has_caught_up = self.has_caught_up();
        let Ok(mut value) = serde_json::from_slice::<Value>(data) else {
            // `[DONE]` is no JSON.
            self.is_over = true;
            return if has_caught_up { Ok(Some(event)) } else { Err(Differs) };
        };
        let index = value["choices"][0]["index"].as_u64();
        if index.is_none() && !has_caught_up && !self.lanes.contains_key(&None) {
            // What belongs to no answer comes after all of them.
            return Err(Differs);
        }
        let lane = self.lanes.entry(index).or_default();
        if self.is_replayed {
            lane.replayed.add(&value);
            if lane.replayed.number < lane.sent.number {
                return Ok(None);
            }
            if lane.replayed.number == lane.sent.number {
                return if lane.replayed.digest == lane.sent.digest { Ok(None) } else { Err(Differs) };
            }
            self.rename(&mut value);
        }
        self.is_answered |= !is_beginning(&value);
        self.is_over = value["type"].as_str().is_some_and(|kind| LAST.contains(&kind));
        self.created = self.created.take().or_else(|| created(&value).cloned());
        self.lanes.entry(index).or_default().sent.add(&value);
        Ok(Some(if self.is_replayed { with_data(&event, &value.to_string()) } else { event }))
    }

    /// Gives the ids and the time of a replay the values that the client was sent.
    fn rename(&self, value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(id) if IDS.contains(&name.as_str()) => {
                            if let Some(known) = self.known_as(id) {
                                *id = known.to_owned();
                            }
                        }
                        Value::Number(_) if TIMES.contains(&name.as_str()) => {
                            if let Some(created) = &self.created {
                                value.clone_from(created);
                            }
                        }
                        value => self.rename(value),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.rename(value)),
            _ => {}
        }
    }

    /// The id that the client was sent in the place of a replay's id.
    fn known_as(&self, id: &str) -> Option<&str> {
        self.lanes.values().find_map(|lane| {
            let at = lane.replayed.ids.iter().position(|replayed| replayed == id)?;
            lane.sent.ids.get(at).map(String::as_str)
        })
    }
}

/// Whether an event comes before the first token, with which a stream begins that has waited for it: the role of a chat's author, or a
/// response without output.
fn is_beginning(value: &Value) -> bool {
    let delta = &value["choices"][0]["delta"];
    let is_role = delta["role"].is_string() && delta["content"].as_str().is_none_or(str::is_empty);
    is_role || value["type"].as_str().is_some_and(|kind| FIRST.contains(&kind))
}

/// The time of an event.
fn created(value: &Value) -> Option<&Value> {
    value.get("created").or_else(|| value.get("response")?.get("created_at"))
}

/// Feeds a value to a hasher, without what is not compared. Ids are their places in `ids`, which has those that are new afterwards.
fn digest(value: &Value, hasher: &mut Hasher, ids: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            hasher.update(b"{");
            for (name, value) in fields {
                if NOT_COMPARED.contains(&name.as_str()) || TIMES.contains(&name.as_str()) {
                    continue;
                }
                hasher.update(name.as_bytes()).update(b":");
                match value {
                    Value::String(id) if IDS.contains(&name.as_str()) => {
                        let at = ids.iter().position(|known| known == id).unwrap_or_else(|| {
                            ids.push(id.clone());
                            ids.len() - 1
                        });
                        hasher.update(&at.to_le_bytes());
                    }
                    value => digest(value, hasher, ids),
                }
            }
            hasher.update(b"}");
        }
        Value::Array(values) => {
            hasher.update(b"[");
            values.iter().for_each(|value| digest(value, hasher, ids));
            hasher.update(b"]");
        }
        Value::String(text) => _ = hasher.update(&text.len().to_le_bytes()).update(text.as_bytes()),
        other => _ = hasher.update(other.to_string().as_bytes()).update(b","),
    }
}

#[cfg(test)]
impl Transcript {
    /// The digests of all that was sent, in the order of the answers.
    pub(super) fn digests(&self) -> Vec<(u64, [u8; 32])> {
        self.lanes.values().map(|lane| (lane.sent.number, lane.sent.digest)).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chunk(id: &str, index: u64, delta: Value) -> Bytes {
        let created = id.len();
        let choice = json!({ "index": index, "delta": delta });
        format!(
            "data: {}\n\n",
            json!({ "id": id, "created": created, "choices": [choice], "refrain": { "kv_bytes": created } })
        )
        .into()
    }

    fn text(id: &str, index: u64, text: &str) -> Bytes {
        chunk(id, index, json!({ "content": text }))
    }

    fn call(id: &str, call: &str) -> Bytes {
        chunk(id, 0, json!({ "tool_calls": [{ "id": call }] }))
    }

    fn usage(id: &str, cached: usize) -> Bytes {
        let usage = json!({ "total_tokens": 3, "prompt_tokens_details": { "cached_tokens": cached } });
        format!("data: {}\n\n", json!({ "id": id, "created": id.len(), "choices": [], "usage": usage }))
            .into()
    }

    const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

    /// What a client gets of a stream that is lost after `sent` events of the first computation, and replayed by others, each of which
    /// is lost after so many events.
    fn replayed(runs: &[&[Bytes]], sent: &[usize]) -> Result<Vec<Bytes>, Differs> {
        let (mut transcript, mut client) = (Transcript::default(), Vec::new());
        for (number, (events, sent)) in runs.iter().zip(sent).enumerate() {
            if number > 0 {
                transcript.replay();
            }
            for event in &events[..*sent] {
                client.extend(transcript.take(event.clone())?);
            }
        }
        assert!(transcript.has_caught_up());
        Ok(client)
    }

    #[test]
    fn a_stream_goes_on_under_the_names_that_its_client_knows() {
        let run = |id: &str, tool: &str, cached| {
            [text(id, 0, "a"), call(id, tool), text(id, 0, "b"), usage(id, cached), DONE]
        };
        let [first, second, third] = [run("A", "c1", 0), run("BB", "c2", 7), run("CCC", "c3", 9)];
        let values = |events: &[Bytes]| -> Vec<Value> {
            let json = |event: &Bytes| serde_json::from_slice(data(event).unwrap()).unwrap_or_default();
            let mut values: Vec<Value> = events.iter().map(json).collect();
            for value in &mut values {
                if let Some(fields) = value.as_object_mut() {
                    fields.remove("refrain");
                    fields.remove("usage");
                }
            }
            values
        };
        for cut in 0..5 {
            for again in 0..5 {
                let client = replayed(&[&first, &second, &third], &[cut, again, 5]).unwrap();
                let (got, mut wanted) = (values(&client), values(&first));
                // Where the call's id was not sent before, it is that of the worker that went on.
                let renamed = if cut > 1 {
                    "c1"
                } else if again > 1 {
                    "c2"
                } else {
                    "c3"
                };
                if cut > 0 {
                    wanted[1]["choices"][0]["delta"]["tool_calls"][0]["id"] = json!(renamed);
                    assert_eq!(got, wanted, "{cut} {again}");
                }
                assert_eq!(got.len(), 5);
            }
        }
    }

    #[test]
    fn answers_may_come_in_another_order() {
        let first = [text("A", 0, "a"), text("A", 0, "b"), text("A", 1, "c"), DONE];
        let second = [text("B", 1, "c"), text("B", 0, "a"), text("B", 0, "b"), DONE];
        for cut in 0..4 {
            assert_eq!(replayed(&[&first, &second], &[cut, 4]).unwrap().len(), 4, "{cut}");
        }
    }

    #[test]
    fn another_text_is_seen() {
        let first = [text("A", 0, "a"), text("A", 0, "b"), usage("A", 0), DONE];
        for other in [
            vec![text("B", 0, "a"), text("B", 0, "x"), text("B", 0, "c")],
            vec![text("B", 0, "ab"), text("B", 0, ""), text("B", 0, "c")],
            vec![text("B", 0, "a"), usage("B", 0)],
            vec![text("B", 0, "a"), DONE],
            vec![text("B", 0, "a"), Bytes::from_static(b"data: {\"error\": {\"code\": \"x\"}}\n\n")],
        ] {
            assert_eq!(replayed(&[&first, &other], &[2, other.len()]), Err(Differs), "{other:?}");
        }
    }

    #[test]
    fn ids_of_a_response_are_compared_by_their_order() {
        let run = |id: &str| {
            let response = json!({ "id": id, "created_at": id.len(), "metadata": { "id": "own" } });
            let item = format!("msg{id}");
            [
                json!({ "type": "response.created", "response": response }),
                json!({ "type": "response.output_item.added", "item": { "id": item } }),
                json!({ "type": "response.output_text.delta", "item_id": item, "delta": "a" }),
                json!({ "type": "response.completed", "response": { "id": id, "created_at": id.len(), "output": [{ "id": item }] } }),
            ]
            .map(|value| Bytes::from(format!("event: x\ndata: {value}\n\n")))
        };
        let (first, second) = (run("A"), run("BB"));
        for cut in 2..=4 {
            let client = replayed(&[&first, &second], &[cut, 4]).unwrap();
            assert_eq!(client, first, "{cut}");
        }
    }
}
