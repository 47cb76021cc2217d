//! The messages of a chat.

use refrain_model::Message;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::api_error::{ApiError, Result};

#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct ChatMessage {
    /// `system` or `developer` (before the others), `user` or `assistant`.
    role: String,
    #[serde(default)]
    content: Option<Content>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize, ToSchema)]
struct ContentPart {
    /// `text` alone is supported.
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

/// A conversation, taken apart.
#[derive(Debug, PartialEq)]
pub(super) struct Conversation {
    /// The system messages, joined.
    pub(super) system: Option<String>,
    /// The turns before the question.
    pub(super) history: Vec<Message>,
    /// The user's last message.
    pub(super) question: String,
}

impl Conversation {
    /// Takes the messages of a chat apart.
    ///
    /// # Errors
    /// If a role or content is not supported, or the last message is not the user's.
    pub(super) fn of(messages: &[ChatMessage]) -> Result<Conversation> {
        let mut system: Vec<String> = Vec::new();
        let mut turns: Vec<Message> = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let content = message.text(index)?;
            match message.role.as_str() {
                "system" | "developer" if turns.is_empty() => system.push(content),
                "system" | "developer" => {
                    let message = "a system message stands before the others";
                    return Err(ApiError::field(&format!("messages[{index}].role"), message));
                }
                "user" | "assistant" => turns.push(Message { role: message.role.clone(), content }),
                role => {
                    let message =
                        format!("role {role:?} is not supported: system, developer, user or assistant");
                    return Err(ApiError::field(&format!("messages[{index}].role"), message));
                }
            }
        }
        match turns.pop() {
            Some(last) if last.role == "user" => {
                let system = (!system.is_empty()).then(|| system.join("\n\n"));
                Ok(Conversation { system, history: turns, question: last.content })
            }
            _ => Err(ApiError::field("messages", "the last message must be the user's")),
        }
    }
}

impl ChatMessage {
    /// The text of the message, which is the `index`-th.
    fn text(&self, index: usize) -> Result<String> {
        let wrong = |what: &str| ApiError::field(&format!("messages[{index}].content"), what.to_owned());
        match &self.content {
            None => Err(wrong("a message has no content")),
            Some(Content::Text(text)) => Ok(text.clone()),
            Some(Content::Parts(parts)) => {
                let text = |part: &ContentPart| match (part.kind.as_str(), &part.text) {
                    ("text", Some(text)) => Ok(text.clone()),
                    (kind, _) => {
                        Err(wrong(&format!("content of type {kind:?} is not supported: text alone is")))
                    }
                };
                parts.iter().map(text).collect()
            }
        }
    }
}
