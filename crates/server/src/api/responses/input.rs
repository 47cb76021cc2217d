//! The items of a response's input, as messages of a chat.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::messages::ChatMessage;
use crate::api::request::read_from_objects;
use crate::api_error::{ApiError, Result};

/// A question, or the items of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "input takes a text or a list of messages, calls of functions and their outputs"
)]
pub(super) enum ResponseInput {
    Text(String),
    Items(Vec<InputItem>),
}

/// A message, a call of a function, or its output.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(super) struct InputItem {
    /// `message`, which is the default, `function_call` or `function_call_output`.
    #[serde(default, rename = "type")]
    kind: Option<String>,
    /// Role of a message: `system` or `developer`, `user` or `assistant`.
    #[serde(default)]
    role: Option<String>,
    /// Of a message.
    #[serde(default)]
    content: Option<ItemContent>,
    /// Of a call and of its output.
    #[serde(default)]
    call_id: Option<String>,
    /// The function's name, of a call.
    #[serde(default)]
    name: Option<String>,
    /// The text of a JSON object, of a call. The model is told of other text as `{"arguments": "..."}`.
    #[serde(default)]
    arguments: Option<String>,
    /// What a function returned.
    #[serde(default)]
    output: Option<ItemContent>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "content and output take a text or a list of parts, each {\"type\", \"text\"}")]
enum ItemContent {
    Text(String),
    Parts(Vec<ItemPart>),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct ItemPart {
    /// `input_text` or `output_text`, or of the assistant `refusal`.
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

read_from_objects!(InputItem, ItemPart);

impl InputItem {
    /// A user's message.
    pub(super) fn user(text: String) -> InputItem {
        let (role, content) = (Some("user".to_owned()), Some(ItemContent::Text(text)));
        InputItem { role, content, ..InputItem::default() }
    }
}

/// The messages of a chat.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) messages: Vec<ChatMessage>,
    /// For each message, the index of the item that it begins with; none for the instructions.
    items: Vec<Option<usize>>,
}

impl Messages {
    /// # Errors
    /// If an item is wrong or not supported.
    pub(super) fn of(instructions: Option<&str>, items: Vec<InputItem>) -> Result<Messages> {
        let mut messages = Messages::default();
        if let Some(instructions) = instructions {
            messages.push(None, ChatMessage::said("system", instructions.to_owned()));
        }
        let mut calls = false;
        for (index, item) in items.into_iter().enumerate() {
            let wrong =
                |field: &str, message: &str| ApiError::field(&format!("input[{index}].{field}"), message);
            let missing = |field: &str| wrong(field, &format!("{field} is missing"));
            let kind = item.kind.as_deref().unwrap_or("message");
            let follows_assistant = std::mem::replace(&mut calls, false);
            match kind {
                "message" => {
                    let role = item.role.ok_or_else(|| missing("role"))?;
                    let content = item.content.ok_or_else(|| missing("content"))?;
                    calls = role == "assistant";
                    let text = content.text(calls).map_err(|message| wrong("content", &message))?;
                    messages.push(Some(index), ChatMessage::said(&role, text));
                }
                "function_call" => {
                    let id = item.call_id.ok_or_else(|| missing("call_id"))?;
                    let name = item.name.ok_or_else(|| missing("name"))?;
                    let arguments = Value::String(item.arguments.unwrap_or_default());
                    // Text and calls that follow one another are one turn.
                    if !follows_assistant {
                        messages.push(Some(index), ChatMessage::calling());
                    }
                    if let Some(turn) = messages.messages.last_mut() {
                        turn.add_call(id, name, arguments);
                    }
                    calls = true;
                }
                "function_call_output" => {
                    let id = item.call_id.ok_or_else(|| missing("call_id"))?;
                    let output = item.output.ok_or_else(|| missing("output"))?;
                    let text = output.text(false).map_err(|message| wrong("output", &message))?;
                    messages.push(Some(index), ChatMessage::result(id, text));
                }
                other => {
                    let message = format!(
                        "an item of type {other:?} is not supported: message, function_call and function_call_output are"
                    );
                    return Err(wrong("type", &message));
                }
            }
        }
        Ok(messages)
    }

    fn push(&mut self, item: Option<usize>, message: ChatMessage) {
        self.messages.push(message);
        self.items.push(item);
    }

    /// An error of a chat's request, with the names of this route's fields.
    pub(super) fn named(&self, error: ApiError) -> ApiError {
        let Some(param) = &error.param else { return error };
        let of_message = || {
            let (index, rest) = param.strip_prefix("messages[")?.split_once(']')?;
            match self.items.get(index.parse::<usize>().ok()?)? {
                Some(item) => Some(format!("input[{item}]{rest}")),
                None => Some("instructions".to_owned()),
            }
        };
        let named = match param.as_str() {
            "messages" => "input".to_owned(),
            "response_format" => "text.format".to_owned(),
            "max_tokens" | "max_completion_tokens" => return error.renamed("max_output_tokens"),
            tool if tool.starts_with("tools[") => tool.replace(".function", ""),
            other => of_message().unwrap_or_else(|| other.to_owned()),
        };
        ApiError { param: Some(named), ..error }
    }
}

impl ItemContent {
    /// The text of all parts, which may be refusals where they are the assistant's, with line breaks between them; an error is its message.
    fn text(self, is_assistants: bool) -> std::result::Result<String, String> {
        let parts = match self {
            ItemContent::Text(text) => return Ok(text),
            ItemContent::Parts(parts) => parts,
        };
        let text = |part: ItemPart| match (part.kind.as_str(), part.text, part.refusal) {
            ("input_text" | "output_text" | "text", Some(text), _) => Ok(text),
            ("refusal", _, Some(text)) if is_assistants => Ok(text),
            (kind, ..) => Err(format!("content of type {kind:?} is not supported: text alone is")),
        };
        Ok(parts.into_iter().map(text).collect::<std::result::Result<Vec<String>, String>>()?.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::messages::Conversation;

    fn messages(items: Value) -> Result<Messages> {
        Messages::of(Some("Be brief."), serde_json::from_value(items).unwrap())
    }

    #[test]
    fn items_are_messages_of_a_chat() {
        let read = messages(json!([
            { "role": "developer", "content": "Say Nm." },
            { "role": "user", "content": [{ "type": "input_text", "text": "How" }, { "type": "input_text", "text": "tight?" }] },
            { "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
              "content": [{ "type": "output_text", "text": "I look.", "annotations": [] }, { "type": "refusal", "refusal": "Sorry." }] },
            { "type": "function_call", "id": "fc_1", "call_id": "a", "name": "torque", "arguments": "{\"bolt\": \"stem\"}" },
            { "type": "function_call", "call_id": "b", "name": "torque", "arguments": "{\"bolt\": \"se" },
            { "type": "function_call_output", "call_id": "a", "output": "5" },
            { "type": "function_call_output", "call_id": "b", "output": [{ "type": "input_text", "text": "7" }] },
        ]));
        let read = read.unwrap();
        let conversation = Conversation::of(&read.messages).unwrap();
        assert_eq!(conversation.system.as_deref(), Some("Be brief.\n\nSay Nm."));
        let turns: Vec<(&str, &str, usize)> = conversation
            .turns
            .iter()
            .map(|turn| (turn.role.as_str(), turn.content.as_str(), turn.tool_calls.len()))
            .collect();
        assert_eq!(
            turns,
            [
                ("user", "How\ntight?", 0),
                ("assistant", "I look.\nSorry.", 2),
                ("tool", "5", 0),
                ("tool", "7", 0)
            ]
        );
        assert_eq!(conversation.turns[3].name.as_deref(), Some("torque"));
        let arguments = conversation.turns[1].tool_calls.iter().map(|call| call.arguments.clone());
        let cut_off = json!({ "arguments": "{\"bolt\": \"se" });
        assert_eq!(arguments.collect::<Vec<_>>(), [json!({ "bolt": "stem" }), cut_off]);
        for (param, named) in [
            ("messages[2].content", "input[1].content"),
            ("messages[0].content", "instructions"),
            ("messages[4].tool_call_id", "input[5].tool_call_id"),
            ("messages", "input"),
            ("tools[1].function.name", "tools[1].name"),
            ("max_tokens", "max_output_tokens"),
            ("seed", "seed"),
        ] {
            assert_eq!(read.named(ApiError::field(param, "x")).param.as_deref(), Some(named));
        }
    }

    #[test]
    fn wrong_items_name_their_field() {
        for (item, named) in [
            (json!({ "role": "user" }), "input[0].content"),
            (json!({ "content": "x" }), "input[0].role"),
            (json!({ "type": "reasoning" }), "input[0].type"),
            (json!({ "type": "item_reference", "id": "msg_1" }), "input[0].type"),
            (json!({ "role": "user", "content": [{ "type": "input_image" }] }), "input[0].content"),
            (
                json!({ "role": "user", "content": [{ "type": "refusal", "refusal": "x" }] }),
                "input[0].content",
            ),
            (json!({ "type": "function_call", "name": "f" }), "input[0].call_id"),
            (json!({ "type": "function_call_output", "call_id": "a" }), "input[0].output"),
        ] {
            assert_eq!(messages(json!([item])).unwrap_err().param.as_deref(), Some(named), "{item}");
        }
    }
}
