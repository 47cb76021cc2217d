//! The messages of a chat.

use std::collections::HashMap;

use refrain::model::{Message, ToolCall};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::request::{MAX_TOOL_NAME, null_is_default, read_from_objects};
use crate::api_error::{ApiError, Result};

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct ChatMessage {
    /// `system` or `developer`, `user`, `assistant` or `tool`. A chat template that has no place for a system message after others gets it before
    /// them.
    role: String,
    /// The text; between its parts are line breaks. A message of the assistant that calls tools may have none.
    #[serde(default)]
    content: Option<Content>,
    /// The tools that the assistant called.
    #[serde(default)]
    tool_calls: Option<Vec<CalledTool>>,
    /// The call whose result a message of the role `tool` is.
    #[serde(default)]
    tool_call_id: Option<String>,
    /// The tool's name, in a message of the role `tool`.
    #[serde(default)]
    name: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "content takes a text or a list of parts, each {\"type\": \"text\", \"text\"}")]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct ContentPart {
    /// `text`, or of the assistant `refusal`.
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

/// A call of a tool by the assistant.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct CalledTool {
    #[serde(default, deserialize_with = "null_is_default")]
    id: String,
    /// `function`
    #[serde(default, rename = "type")]
    _kind: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct CalledFunction {
    name: String,
    /// A JSON object, as its text or as it is. The model is told of anything else as `{"arguments": ...}`.
    #[serde(default)]
    arguments: Value,
}

read_from_objects!(ChatMessage, ContentPart, CalledTool, CalledFunction);

/// A conversation, taken apart.
#[derive(Debug, PartialEq)]
pub(super) struct Conversation {
    /// The system messages before all turns, joined.
    pub(super) system: Option<String>,
    /// The turns, of which one is the user's.
    pub(super) turns: Vec<Message>,
}

impl Conversation {
    /// Bytes of what the messages add to the prompt: their texts, and the calls of tools.
    pub(super) fn bytes(&self) -> usize {
        let call = |call: &ToolCall| call.id.len() + call.name.len() + call.arguments.to_string().len();
        let turn = |turn: &Message| {
            let result = turn.tool_call_id.iter().chain(&turn.name).map(String::len).sum::<usize>();
            turn.content.len() + result + turn.tool_calls.iter().map(call).sum::<usize>()
        };
        self.system.as_ref().map_or(0, String::len) + self.turns.iter().map(turn).sum::<usize>()
    }

    /// Takes the messages of a chat apart. Where none is the user's, the last system message is taken for it.
    ///
    /// # Errors
    /// If a role or content is not supported, or no message is the user's or the system's.
    pub(super) fn of(messages: &[ChatMessage]) -> Result<Conversation> {
        let mut system: Vec<String> = Vec::new();
        let mut turns: Vec<Message> = Vec::new();
        // The name of the tool that the latest call of an id called; of calls in one message it is the first.
        let mut names: HashMap<&str, &str> = HashMap::new();
        for (index, message) in messages.iter().enumerate() {
            let wrong = |field: &str, message: String| {
                Err(ApiError::field(&format!("messages[{index}].{field}"), message))
            };
            // Each result of a call has a copy of the name.
            if message.tool_calls.iter().flatten().any(|call| call.function.name.len() > MAX_TOOL_NAME) {
                return wrong("tool_calls", format!("a tool's name has at most {MAX_TOOL_NAME} characters"));
            }
            let content = message.text(index)?;
            let tool_calls = message.tool_calls();
            let role = message.role.as_str();
            match role {
                "system" | "developer" if turns.is_empty() => system.push(content),
                "system" | "developer" => turns.push(Message::text("system", &content)),
                "tool" if message.tool_call_id.is_none() => {
                    return wrong("tool_call_id", "the result of a tool names its call".to_owned());
                }
                "user" | "tool" | "assistant" if role == "assistant" || tool_calls.is_empty() => {
                    let calls = message.tool_calls.iter().flatten().rev();
                    names.extend(calls.map(|call| (call.id.as_str(), call.function.name.as_str())));
                    let called = message.tool_call_id.as_deref().and_then(|id| names.get(id).copied());
                    let name = message.name.as_deref().or(called).filter(|_| role == "tool");
                    turns.push(Message {
                        role: role.to_owned(),
                        content,
                        tool_calls,
                        tool_call_id: message.tool_call_id.clone().filter(|_| role == "tool"),
                        name: name.map(str::to_owned),
                    });
                }
                "user" | "tool" => return wrong("tool_calls", "the assistant alone calls tools".to_owned()),
                role => {
                    let known = "system, developer, user, assistant or tool";
                    return wrong("role", format!("role {role:?} is not supported: {known}"));
                }
            }
        }
        let is_user = |turn: &Message| turn.role == "user";
        if !turns.iter().any(is_user) {
            if let Some(last) = turns.iter_mut().rev().find(|turn| turn.role == "system") {
                last.role = "user".to_owned();
            } else if let Some(text) = system.pop() {
                turns.insert(0, Message::text("user", &text));
            }
        }
        if !turns.iter().any(is_user) {
            let message = "no message is the user's or the system's: ask something";
            return Err(ApiError::field("messages", message));
        }
        let system = (!system.is_empty()).then(|| system.join("\n\n"));
        Ok(Conversation { system, turns })
    }

    /// The user's last message that has text.
    pub(super) fn question(&self) -> &str {
        let asks = |turn: &&Message| turn.role == "user" && !turn.content.trim().is_empty();
        let asked = self.turns.iter().rev().find(asks);
        asked.map_or("", |turn| turn.content.as_str())
    }
}

impl ChatMessage {
    /// A message of this role.
    pub(super) fn said(role: &str, text: String) -> ChatMessage {
        ChatMessage { role: role.to_owned(), content: Some(Content::Text(text)), ..ChatMessage::default() }
    }

    /// A message of the assistant for calls alone.
    pub(super) fn calling() -> ChatMessage {
        ChatMessage { role: "assistant".to_owned(), ..ChatMessage::default() }
    }

    /// Adds a call of a tool.
    pub(super) fn add_call(&mut self, id: String, name: String, arguments: Value) {
        let call = CalledTool { id, _kind: None, function: CalledFunction { name, arguments } };
        self.tool_calls.get_or_insert_default().push(call);
    }

    /// The result of the call `id`.
    pub(super) fn result(id: String, text: String) -> ChatMessage {
        ChatMessage { tool_call_id: Some(id), ..ChatMessage::said("tool", text) }
    }

    /// The text of the message, which is the `index`-th.
    fn text(&self, index: usize) -> Result<String> {
        let wrong = |what: &str| ApiError::field(&format!("messages[{index}].content"), what.to_owned());
        match &self.content {
            // The assistant's answer may have been nothing, or calls alone.
            None if self.role == "assistant" => Ok(String::new()),
            None => Err(wrong("a message has no content")),
            Some(Content::Text(text)) => Ok(text.clone()),
            Some(Content::Parts(parts)) => {
                let text = |part: &ContentPart| match (part.kind.as_str(), &part.text, &part.refusal) {
                    ("text", Some(text), _) => Ok(text.clone()),
                    ("refusal", _, Some(text)) if self.role == "assistant" => Ok(text.clone()),
                    (kind, ..) => {
                        Err(wrong(&format!("content of type {kind:?} is not supported: text alone is")))
                    }
                };
                Ok(parts.iter().map(text).collect::<Result<Vec<String>>>()?.join("\n"))
            }
        }
    }

    /// The tools that the message calls. Templates write arguments as an object: what is none, such as arguments that `max_tokens` has cut off,
    /// stands in one.
    fn tool_calls(&self) -> Vec<ToolCall> {
        let call = |call: &CalledTool| {
            let arguments = match &call.function.arguments {
                Value::Null => json!({}),
                Value::String(text) if text.trim().is_empty() => json!({}),
                Value::String(text) => serde_json::from_str(text)
                    .ok()
                    .filter(Value::is_object)
                    .unwrap_or_else(|| json!({ "arguments": text })),
                Value::Object(_) => call.function.arguments.clone(),
                other => json!({ "arguments": other }),
            };
            ToolCall { id: call.id.clone(), name: call.function.name.clone(), arguments }
        };
        self.tool_calls.iter().flatten().map(call).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn calling(calls: impl IntoIterator<Item = (String, String)>) -> ChatMessage {
        let mut message = ChatMessage::calling();
        calls.into_iter().for_each(|(id, name)| message.add_call(id, name, Value::Null));
        message
    }

    #[test]
    fn a_result_is_of_the_latest_call_of_its_id() {
        let calls = |calls: &[(&str, &str)]| {
            calling(calls.iter().map(|(id, name)| (id.to_string(), name.to_string())))
        };
        let result = |id: &str| ChatMessage::result(id.to_owned(), "5 Nm".to_owned());
        let messages = [
            ChatMessage::said("user", "How tight?".to_owned()),
            calls(&[("a", "first"), ("a", "second"), ("b", "third")]),
            result("a"),
            calls(&[("b", "fourth"), ("b", "fifth")]),
            result("b"),
            result("a"),
            result("c"),
            ChatMessage { name: Some("own".to_owned()), ..result("a") },
        ];
        let turns = Conversation::of(&messages).unwrap().turns;
        let results = turns.iter().filter(|turn| turn.role == "tool");
        let names: Vec<Option<&str>> = results.map(|turn| turn.name.as_deref()).collect();
        assert_eq!(names, [Some("first"), Some("fourth"), Some("first"), None, Some("own")]);
    }

    #[test]
    fn results_copy_no_long_names() {
        let call =
            |name: String| [calling([("a".to_owned(), name)]), ChatMessage::said("user", "?".to_owned())];
        assert!(Conversation::of(&call("x".repeat(MAX_TOOL_NAME))).is_ok());
        let error = Conversation::of(&call("x".repeat(MAX_TOOL_NAME + 1))).map(|_| ()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].tool_calls"));
    }

    #[test]
    fn results_find_their_calls_among_many() {
        let id = |index: usize| format!("call-{index}");
        let mut messages = vec![calling((0..100_000).map(|index| (id(index), "torque".to_owned())))];
        messages.extend((0..100_000).map(|index| ChatMessage::result(id(index), String::new())));
        messages.push(ChatMessage::said("user", "How tight?".to_owned()));
        let began = Instant::now();
        let turns = Conversation::of(&messages).unwrap().turns;
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        assert_eq!(turns[100_000].name.as_deref(), Some("torque"));
    }
}
