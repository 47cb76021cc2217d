//! Turns of a conversation.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

/// One turn of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The role of its author: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text.
    #[serde(default)]
    pub content: String,
    /// The tools that an assistant called in this turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Of a tool's result: the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Of a tool's result: the tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A call of a tool by the assistant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The call's name in the conversation, which the tool's result repeats. Templates may insist on nine letters and
    /// digits; they are then given nine that are made from this id.
    #[serde(default)]
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments: an object.
    #[serde(default = "no_arguments")]
    pub arguments: Json,
}

fn no_arguments() -> Json {
    Json::Object(Map::new())
}

impl Message {
    /// A turn that is text alone.
    #[must_use]
    pub fn text(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned(), ..Message::default() }
    }
}

/// The name of a tool in OpenAI's notation; none if the object has no place for one.
pub(crate) fn tool_name(tool: &Json) -> Option<&str> {
    function_of(tool)["name"].as_str()
}

/// The function of a tool: `tool.function`, or the object itself where it is the function.
pub(crate) fn function_of(tool: &Json) -> &Json {
    tool.get("function").unwrap_or(tool)
}
