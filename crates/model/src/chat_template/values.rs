//! Conversations and tools as the values that a template sees, with placeholders for the texts of users.

use std::collections::HashMap;

use minijinja::Value;
use serde_json::{Value as Json, json};

use super::environment::json_text;
use super::message::{Message, ToolCall, function_of, tool_name};
use super::placeholder::{PAD, marked, placeholder};
use super::switches::apart;

/// A turn as the template is given it.
#[derive(Debug, Clone)]
pub(super) struct Turn<'a> {
    pub(super) role: &'a str,
    pub(super) text: TurnText,
    pub(super) calls: &'a [ToolCall],
    pub(super) call_id: Option<&'a str>,
    pub(super) name: Option<&'a str>,
}

impl<'a> Turn<'a> {
    /// A message with `text` in the place of its content.
    pub(super) fn new(message: &'a Message, text: TurnText) -> Turn<'a> {
        Turn {
            text,
            role: &message.role,
            calls: &message.tool_calls,
            call_id: message.tool_call_id.as_deref(),
            name: message.name.as_deref(),
        }
    }

    /// The turn with its calls as text.
    pub(super) fn with_calls_in_text(&self) -> Turn<'a> {
        let text = match &self.text {
            TurnText::Said(text) if !self.calls.is_empty() => {
                let call = |call: &ToolCall| json!({"name": call.name, "arguments": call.arguments});
                let calls = json_text(&self.calls.iter().map(call).collect::<Vec<Json>>());
                TurnText::Calls { text: text.clone(), calls }
            }
            text => text.clone(),
        };
        Turn { text, calls: &[], ..self.clone() }
    }

    /// A turn of text alone.
    pub(super) fn text(role: &'a str, text: TurnText) -> Turn<'a> {
        Turn { role, text, calls: &[], call_id: None, name: None }
    }
}

/// The text of a turn. The turn of the documents has two, around them.
#[derive(Debug, Clone)]
pub(super) enum TurnText {
    Said(String),
    Documents {
        before: String,
        question: String,
    },
    /// An assistant's text with its calls behind it, as a JSON list.
    Calls {
        text: String,
        calls: String,
    },
}

/// A user's text in place of a placeholder.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) text: TurnText,
    /// Whether it belongs to a tool: a definition, a call with the text beside it, or a result.
    pub(super) of_tool: bool,
    /// Whether it is an assistant's, which may hold thoughts.
    pub(super) of_assistant: bool,
}

/// The values of a conversation. Where `marks` is set, users' texts are kept in `slots` and their placeholders stand in
/// the values; else the values hold the texts.
#[derive(Debug, Default)]
pub(super) struct Texts {
    marks: bool,
    /// Whether ids of calls are brought to nine letters and digits.
    short_ids: bool,
    /// The switches that the template takes out of the system message.
    switches: Vec<&'static str>,
    pub(super) slots: Vec<Slot>,
    /// The slots of texts that may stand at many places.
    shared: HashMap<String, usize>,
    /// The slots of messages' contents, with their names in errors and the number of times that they must be written.
    pub(super) contents: Vec<(usize, String, usize)>,
    /// The slots of the tools' names in calls.
    pub(super) call_names: Vec<usize>,
    /// The slots of the tools' names.
    pub(super) tool_names: Vec<usize>,
    /// The slot of all tools in one text, which stands in the system message.
    pub(super) system_tools: Option<usize>,
}

/// Strings of tools and arguments that templates look at: the names in OpenAI's tool objects and in JSON Schema. They
/// are too few and too plain to pass for anything, and keep their text.
const KEYWORDS: [&str; 42] = [
    "$defs",
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "arguments",
    "array",
    "boolean",
    "const",
    "default",
    "definitions",
    "description",
    "enum",
    "examples",
    "format",
    "function",
    "integer",
    "items",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "name",
    "not",
    "null",
    "nullable",
    "number",
    "object",
    "oneOf",
    "parameters",
    "pattern",
    "prefixItems",
    "properties",
    "required",
    "return",
    "returns",
    "strict",
    "string",
    "title",
    "type",
];

impl Texts {
    /// Values with the texts themselves.
    pub(super) fn plain() -> Texts {
        Texts::default()
    }

    /// Values with placeholders.
    pub(super) fn marked(short_ids: bool, switches: Vec<&'static str>) -> Texts {
        Texts { marks: true, short_ids, switches, ..Texts::default() }
    }

    /// The tools; none where there are none, as in transformers.
    pub(super) fn tools(&mut self, tools: &[Json]) -> Value {
        if tools.is_empty() {
            return Value::from(());
        }
        let tool = |tool: &Json| {
            let (before, name) = (self.slots.len(), tool_name(tool).unwrap_or_default());
            self.tool_text(name);
            let value = self.tool(tool, before);
            self.tool_names.extend(self.marks.then_some(before));
            value
        };
        tools.iter().map(tool).collect::<Vec<Value>>().into()
    }

    /// A tool whose name has the slot `name` of its own.
    fn tool(&mut self, tool: &Json, name: usize) -> Value {
        let is_function = std::ptr::eq(function_of(tool), tool);
        let fields = tool.as_object().into_iter().flatten().map(|(key, value)| {
            let value = match key.as_str() {
                "name" if is_function && value.is_string() => {
                    self.at(name, value.as_str().unwrap_or_default())
                }
                "function" if !is_function => self.tool(value, name),
                _ => self.json(value),
            };
            (self.shared_text(key), value)
        });
        Value::from_pairs(fields.collect::<Vec<(String, Value)>>())
    }

    /// The turns. A system turn at the beginning has besides, as one text, the tools where there are some: one template looks for them
    /// there (Phi-4-mini).
    pub(super) fn messages(&mut self, turns: &[Turn<'_>], tools: &[Json]) -> Vec<Value> {
        let mut messages = Vec::new();
        for (index, turn) in turns.iter().enumerate() {
            let what = format!("message {} ({})", index + 1, turn.role);
            let mut fields = vec![("role", Value::from(turn.role)), ("content", self.content(turn, what))];
            if !turn.calls.is_empty() {
                fields.push(("tool_calls", turn.calls.iter().map(|call| self.call(call)).collect()));
            }
            if let Some(id) = turn.call_id {
                fields.push(("tool_call_id", self.id(id).into()));
            }
            if let Some(name) = turn.name {
                fields.push(("name", self.shared_text(name).into()));
            }
            if index == 0 && turn.role == "system" && self.marks && !tools.is_empty() {
                let functions: Vec<&Json> = tools.iter().map(function_of).collect();
                self.system_tools = Some(self.slots.len());
                let list = json_text(&functions);
                fields.push(("tools", self.tool_text(&list).into()));
            }
            messages.push(Value::from_pairs(fields));
        }
        messages
    }

    /// The text of a turn. Where nothing is said beside calls or switches, it has no placeholder.
    fn content(&mut self, turn: &Turn<'_>, what: String) -> Value {
        let (text, switches) = match &turn.text {
            TurnText::Said(text) if text.is_empty() && !turn.calls.is_empty() => return Value::from(""),
            TurnText::Said(text) if !self.marks => return Value::from(text.as_str()),
            TurnText::Said(text) if turn.role == "system" => {
                let (text, switches) = apart(text, &self.switches);
                if text.trim().is_empty() && !switches.is_empty() {
                    return Value::from(switches);
                }
                (TurnText::Said(text), switches)
            }
            text => (text.clone(), String::new()),
        };
        self.contents.push((self.slots.len(), what, usize::from(turn.calls.is_empty())));
        let of_tool = turn.role == "tool" || !turn.calls.is_empty();
        let slot = self.add(Slot { text, of_tool, of_assistant: turn.role == "assistant" });
        Value::from(slot + &switches)
    }

    fn call(&mut self, call: &ToolCall) -> Value {
        self.call_names.extend(self.marks.then_some(self.slots.len()));
        let name = Value::from(self.tool_text(&call.name));
        let function = [("name", name), ("arguments", self.json(&call.arguments))];
        let mut fields = vec![("type", Value::from("function")), ("function", Value::from_pairs(function))];
        if !call.id.is_empty() {
            fields.insert(0, ("id", self.id(&call.id).into()));
        }
        Value::from_pairs(fields)
    }

    /// A JSON value with its keys in their order.
    fn json(&mut self, value: &Json) -> Value {
        match value {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(number), _) => Value::from(number),
                (None, Some(number)) => Value::from(number),
                (None, None) => Value::from(number.as_f64().unwrap_or_default()),
            },
            Json::String(text) => self.shared_text(text).into(),
            Json::Array(values) => values.iter().map(|value| self.json(value)).collect(),
            Json::Object(fields) => {
                let field = |(key, value): (&String, &Json)| (self.shared_text(key), self.json(value));
                Value::from_pairs(fields.iter().map(field).collect::<Vec<(String, Value)>>())
            }
        }
    }

    /// The id of a call: templates look at its length and cut it, so each of its characters is marked.
    fn id(&mut self, id: &str) -> String {
        let id = if self.short_ids { short_id(id) } else { id.to_owned() };
        match self.marks {
            true if id.is_ascii() => id.chars().map(marked).collect(),
            _ => self.shared_text(&id),
        }
    }

    /// A text of a tool that has a slot of its own.
    fn tool_text(&mut self, text: &str) -> String {
        if !self.marks {
            return text.to_owned();
        }
        self.add(Slot { text: TurnText::Said(text.to_owned()), of_tool: true, of_assistant: false })
    }

    /// A text of a tool: one slot for all places where it stands, so that a template finds it equal to itself.
    fn shared_text(&mut self, text: &str) -> String {
        if text.is_empty() || !self.marks || KEYWORDS.contains(&text) {
            return text.to_owned();
        }
        match self.shared.get(text) {
            Some(slot) => padded(*slot),
            None => {
                self.shared.insert(text.to_owned(), self.slots.len());
                self.tool_text(text)
            }
        }
    }

    /// The text of a slot that is there already.
    fn at(&self, slot: usize, text: &str) -> Value {
        if self.marks { padded(slot).into() } else { text.into() }
    }

    fn add(&mut self, slot: Slot) -> String {
        self.slots.push(slot);
        padded(self.slots.len() - 1)
    }
}

fn padded(slot: usize) -> String {
    format!("{PAD}{}{PAD}", placeholder(slot))
}

/// Nine letters and digits for an id: itself where it is such.
fn short_id(id: &str) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let hash = blake3::hash(id.as_bytes());
    hash.as_bytes()[..9].iter().map(|byte| char::from(DIGITS[usize::from(*byte) % 36])).collect()
}
