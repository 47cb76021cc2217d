//! Tools for models whose templates know none.

use super::environment::json_text;
use super::message::{Message, ToolCall};
use super::split::Layout;

impl Layout {
    /// The conversation with tools, calls and results as text, for a template that does not write tools
    /// ([`ModelError::ToolsIgnored`](crate::ModelError::ToolsIgnored)): the tools are told in the system message, calls
    /// are the assistant's text, and results the user's, all in the words of Qwen2.5's template. The model then calls
    /// tools in the format [`ToolCallFormat::Hermes`](crate::ToolCallFormat::Hermes), as far as it is able to.
    #[must_use]
    pub fn with_tools_as_text(&self) -> Layout {
        let mut system = self.system.clone();
        if !self.tools.is_empty() {
            let said = system.filter(|system| !system.is_empty());
            let said = said.map(|system| format!("{system}\n\n")).unwrap_or_default();
            system = Some(format!(
                "{said}{}",
                instructions(&self.tools.iter().map(json_text).collect::<Vec<_>>())
            ));
        }
        let mut history = as_text(&self.history);
        let mut before_documents = self.before_documents.clone();
        // The documents stand in a user's turn, which would follow another one.
        if self.history.last().is_some_and(|turn| turn.role == "tool")
            && let Some(results) = history.pop()
        {
            before_documents = format!("{}\n{before_documents}", results.content);
        }
        let (question, after) = (self.question.clone(), as_text(&self.after));
        Layout {
            system,
            tools: Vec::new(),
            history,
            before_documents,
            question,
            after,
            thinking: self.thinking,
        }
    }
}

fn instructions(tools: &[String]) -> String {
    format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
         signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json \
         object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": \
         <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
        tools.join("\n")
    )
}

/// The turns as text. Results that follow one another are one turn, and so is the user's text after them.
fn as_text(turns: &[Message]) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::new();
    let mut after_result = false;
    for turn in turns {
        let is_result = turn.role == "tool";
        let mut lines: Vec<String> = Vec::new();
        if !turn.content.is_empty() || turn.tool_calls.is_empty() {
            lines.push(turn.content.clone());
        }
        lines.extend(turn.tool_calls.iter().map(call));
        let mut text = lines.join("\n");
        if is_result {
            text = format!("<tool_response>\n{text}\n</tool_response>");
        }
        match out.last_mut() {
            Some(last) if after_result && matches!(turn.role.as_str(), "tool" | "user") => {
                last.content = format!("{}\n{text}", last.content);
            }
            _ => out.push(Message::text(if is_result { "user" } else { &turn.role }, &text)),
        }
        after_result = is_result;
    }
    out
}

fn call(call: &ToolCall) -> String {
    let (name, arguments) = (json_text(&call.name), json_text(&call.arguments));
    format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
}
