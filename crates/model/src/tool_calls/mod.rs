//! Calls of tools as models write them: the notations of model families, a parser for generated text, and grammars for
//! answers that must call a tool.
//!
//! A server asks [`ToolCallFormat::of_template`] once for a model. With a format, [`ChatTemplate::split`] takes the tools as
//! they are; without, it takes [`Layout::with_tools_as_text`](crate::Layout::with_tools_as_text), and the format is
//! [`ToolCallFormat::Hermes`]. The answer's text, and the text of its [special tokens](ToolCallFormat::special_tokens), go
//! through a [`ToolCallParser`].

mod fields;
mod grammar;
mod hermes;
mod llama3;
mod marks;
mod mistral;
mod parser;
mod phi4;
mod scanner;
mod spec;
mod unmarked;

use serde_json::{Value as Json, json};

pub use self::parser::{Delta, ToolCallParser};
use self::spec::Spec;
use crate::chat_template::{ChatTemplate, Message, ToolCall, function_of, json_text, tool_name};
use crate::error::{ModelError, Result};
use crate::tokenizer::Tokenizer;

/// The notation in which a model calls tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each call: Hermes 2 Pro, Qwen2.5, Qwen3, and any model
    /// that is told its tools by [`Layout::with_tools_as_text`](crate::Layout::with_tools_as_text).
    Hermes,
    /// `{"name": …, "parameters": {…}}`, alone or behind `<|python_tag|>`, several with `;` between them: Llama 3.1 and
    /// later.
    Llama3,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`: Mistral 7B 0.3, Nemo, Small up to 3.1.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{…}` for each call: Mistral Small 3.2 and later.
    MistralNamed,
    /// `<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`: Phi-4-mini.
    Phi4,
    /// `functools[{"name": …, "arguments": {…}}, …]`: Phi-4-mini with vLLM's template.
    Functools,
}

impl ToolCallFormat {
    /// All notations.
    pub const ALL: [ToolCallFormat; 6] = [
        ToolCallFormat::MistralNamed,
        ToolCallFormat::Mistral,
        ToolCallFormat::Phi4,
        ToolCallFormat::Functools,
        ToolCallFormat::Hermes,
        ToolCallFormat::Llama3,
    ];

    /// The notation of a template: the one in which it writes an assistant's call. `None` if it writes no tools or its
    /// notation is another: the model is then best told its tools by
    /// [`Layout::with_tools_as_text`](crate::Layout::with_tools_as_text), and calls them in [`ToolCallFormat::Hermes`].
    #[must_use]
    pub fn of_template(template: &ChatTemplate) -> Option<ToolCallFormat> {
        const NAME: &str = "some_tool";
        let template = template.with_tools();
        if !template.supports_tools() {
            return None;
        }
        if template.source().contains("functools[") {
            return Some(ToolCallFormat::Functools);
        }
        if template.source().contains("<|tool|>") {
            return Some(ToolCallFormat::Phi4);
        }
        let tool = json!({"type": "function", "function": {"name": NAME, "description": "d", "parameters": {"type": "object", "properties": {}}}});
        let arguments = json!({"a": "b"});
        let call =
            ToolCall { id: "000000000".to_owned(), name: NAME.to_owned(), arguments: arguments.clone() };
        let answer = Message { tool_calls: vec![call], ..Message::text("assistant", "") };
        let messages = [Message::text("user", "q"), answer];
        let written = template.render(&messages, &[tool], false).ok()?;
        let reads = |format: &ToolCallFormat, text: &str| {
            let mut parser = ToolCallParser::new(*format, &[NAME]);
            let mut deltas = parser.push(text);
            deltas.extend(parser.finish());
            deltas.iter().any(|delta| match delta {
                Delta::Arguments { json_fragment, .. } => {
                    json_fragment.parse().ok().as_ref() == Some(&arguments)
                }
                _ => false,
            })
        };
        let marked = ToolCallFormat::ALL.into_iter().filter(|format| !format.spec().bare);
        if let Some(format) = marked.into_iter().find(|format| reads(format, &written)) {
            let is_named = written.contains(spec::ARGS);
            return Some(match format {
                ToolCallFormat::MistralNamed if !is_named => ToolCallFormat::Mistral,
                format => format,
            });
        }
        let (_, bare) = written.split_once(&format!("{{\"name\": \"{NAME}\", \"parameters\": {{\"a\""))?;
        let bare = format!("{{\"name\": \"{NAME}\", \"parameters\": {{\"a\"{bare}");
        reads(&ToolCallFormat::Llama3, &bare).then_some(ToolCallFormat::Llama3)
    }

    fn spec(self) -> &'static Spec {
        match self {
            ToolCallFormat::Hermes => &hermes::SPEC,
            ToolCallFormat::Llama3 => &llama3::SPEC,
            ToolCallFormat::Mistral | ToolCallFormat::MistralNamed => &mistral::SPEC,
            ToolCallFormat::Phi4 => &phi4::SPEC,
            ToolCallFormat::Functools => &phi4::FUNCTOOLS,
        }
    }

    /// The control tokens of a vocabulary that belong to this notation, with their text. A
    /// [`Detokenizer`](crate::Detokenizer) gives nothing for them: the caller pushes the text to the
    /// [`ToolCallParser`] where it samples the id. A mark that is no control token of the vocabulary comes as text by
    /// itself.
    #[must_use]
    pub fn special_tokens(self, tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
        let id = |text: &&'static str| {
            let id = tokenizer.token_id(text).filter(|id| tokenizer.is_special(*id))?;
            Some((id, *text))
        };
        self.spec().special.iter().filter_map(id).collect()
    }

    /// The text of calls in this notation, as a model would write it.
    #[must_use]
    pub fn write(self, calls: &[ToolCall]) -> String {
        let call = |call: &ToolCall| (json_text(&call.name), json_text(&call.arguments));
        let calls: Vec<(String, String)> = calls.iter().map(call).collect();
        match self {
            ToolCallFormat::Hermes => hermes::write(&calls),
            ToolCallFormat::Llama3 => llama3::write(&calls),
            ToolCallFormat::Mistral => mistral::write(&calls),
            ToolCallFormat::MistralNamed => mistral::write_named(&calls),
            ToolCallFormat::Phi4 => phi4::write(&calls),
            ToolCallFormat::Functools => phi4::write_functools(&calls),
        }
    }

    /// A grammar, in the Lark dialect of the crate `llguidance`, of an answer that is one call, or several where they
    /// may be `parallel`, of the tool `which`, or any of `tools` (in OpenAI's notation), with arguments of the tool's
    /// schema. `special` gives the id of a mark that is a control token of the vocabulary, as in
    /// [`ToolCallFormat::special_tokens`]; other marks are written as text.
    ///
    /// # Errors
    /// [`ModelError::UnknownTool`] if there is no tool, or none of the name `which`.
    pub fn grammar(
        self,
        tools: &[Json],
        which: Option<&str>,
        parallel: bool,
        special: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<String> {
        let tool = |(index, tool): (usize, &Json)| {
            let name = tool_name(tool).filter(|name| which.is_none_or(|which| which == *name))?;
            Some(grammar::Tool::new(index, name, function_of(tool).get("parameters")))
        };
        let chosen: Vec<grammar::Tool> = tools.iter().enumerate().filter_map(tool).collect();
        if chosen.is_empty() {
            let known = tools.iter().filter_map(tool_name).collect::<Vec<_>>().join(", ");
            return Err(ModelError::UnknownTool { name: which.unwrap_or_default().to_owned(), known });
        }
        let mut grammar = grammar::Grammar::new(chosen, special);
        match self {
            ToolCallFormat::Hermes => hermes::grammar(&mut grammar, parallel),
            ToolCallFormat::Llama3 => llama3::grammar(&mut grammar, parallel),
            ToolCallFormat::Mistral => mistral::grammar(&mut grammar, parallel),
            ToolCallFormat::MistralNamed => mistral::grammar_named(&mut grammar, parallel),
            ToolCallFormat::Phi4 => phi4::grammar(&mut grammar, parallel),
            ToolCallFormat::Functools => phi4::grammar_functools(&mut grammar, parallel),
        }
        Ok(grammar.join())
    }
}

impl ToolCallParser {
    /// A parser of an answer in this notation, by a model that may call the tools of these names.
    #[must_use]
    pub fn new(format: ToolCallFormat, known_tool_names: &[&str]) -> ToolCallParser {
        ToolCallParser::of_spec(format.spec(), known_tool_names)
    }
}

#[cfg(test)]
mod tests;
