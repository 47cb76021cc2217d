//! The tools that a request lets the model call, and whether it must.

use refrain::engine::{Engine, StructuredOutput, with_closed_objects, without_unreadable};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, OneOfBuilder, Schema, Type};

use super::objects::read_from_objects;
use crate::api_error::{ApiError, Result};

/// Most tools of a request.
const MAX_TOOLS: usize = 128;
/// The choices that are objects, in the notations of chats and of responses.
const CHOICES: &str = concat!(
    r#"{"type": "function", "function": {"name": "..."}} (in a response {"type": "function", "name": "..."}), "#,
    r#"or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}} "#,
    r#"(in a response {"type": "allowed_tools", "mode": "...", "tools": [...]}), whose tools are functions as above"#
);
/// Most characters of a tool's name.
pub(crate) const MAX_TOOL_NAME: usize = 64;

/// A tool that the model may call.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct ToolDefinition {
    /// `function`
    #[serde(default, rename = "type")]
    #[schema(required = true)]
    pub(crate) kind: String,
    #[serde(default)]
    #[schema(required = true)]
    pub(crate) function: FunctionDefinition,
}

#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct FunctionDefinition {
    /// Letters, digits, `_` and `-`.
    #[serde(default)]
    #[schema(required = true, min_length = 1, max_length = 64)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) description: Option<String>,
    /// The JSON Schema of the arguments, which are an object; without it they are empty.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub(crate) parameters: Option<Value>,
    /// Has no effect. Where the answer must call a tool, the arguments are always of their schema; elsewhere the model is free.
    #[serde(default, rename = "strict")]
    pub(crate) _strict: Option<bool>,
}

read_from_objects!(ToolDefinition, FunctionDefinition);

/// Schema of `tool_choice`, which is read as any value so that a wrong one gets a clear error.
pub(in crate::api) fn tool_choice_schema() -> Schema {
    let types = [Type::String, Type::Object].map(Object::with_type);
    types.into_iter().fold(OneOfBuilder::new(), OneOfBuilder::item).build().into()
}

/// The tools of a request that the model is told of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ToolUse {
    /// The tools in OpenAI's notation, as chat templates read it.
    pub(crate) tools: Vec<Value>,
    pub(crate) names: Vec<String>,
    must: Must,
    /// Whether an answer may call several tools.
    pub(crate) parallel: bool,
}

/// What an answer must call.
#[derive(Clone, Debug, PartialEq)]
enum Must {
    Nothing,
    Any,
    Tool(String),
}

impl ToolUse {
    /// The tools that `tool_choice` leaves; none where the model is told of no tool.
    ///
    /// # Errors
    /// If a tool or the choice is wrong.
    pub(crate) fn of(
        tools: &[ToolDefinition],
        choice: Option<&Value>,
        parallel: Option<bool>,
    ) -> Result<Option<ToolUse>> {
        let mut names = names(tools)?;
        let wrong = |message: String| Err(ApiError::field("tool_choice", message));
        let must = match choice {
            None | Some(Value::Null) => Must::Nothing,
            Some(Value::String(choice)) => match choice.as_str() {
                "auto" => Must::Nothing,
                "none" => return Ok(None),
                "required" => Must::Any,
                other => {
                    return wrong(format!("{other:?} is no choice: none, auto, required or a function"));
                }
            },
            Some(choice) => match (function_name(choice), allowed_tools(choice)) {
                (Some(name), _) => Must::Tool(name.to_owned()),
                (None, Some((must, allowed))) => {
                    if let Some(name) = allowed.iter().find(|name| !names.iter().any(|known| known == *name))
                    {
                        return wrong(format!("there is no tool {name:?} among tools"));
                    }
                    names.retain(|name| allowed.contains(&name.as_str()));
                    must
                }
                (None, None) => return wrong(format!("tool_choice is none, auto, required, {CHOICES}")),
            },
        };
        match &must {
            Must::Any if names.is_empty() => return wrong("there are no tools to call".to_owned()),
            Must::Tool(name) if !names.contains(name) => {
                return wrong(format!("there is no tool {name:?} among tools"));
            }
            _ => {}
        }
        if names.is_empty() {
            return Ok(None);
        }
        let tools = tools.iter().filter(|tool| names.contains(&tool.function.name));
        let tools = tools.map(ToolDefinition::as_json).collect();
        // Clients that name a function read one call of it.
        let parallel = parallel.unwrap_or(!matches!(must, Must::Tool(_)));
        Ok(Some(ToolUse { tools, names, must, parallel }))
    }

    /// Bytes of what the tools add to the prompt.
    pub(crate) fn bytes(&self) -> usize {
        self.tools.iter().map(|tool| tool.to_string().len()).sum()
    }

    /// Whether the answer must be calls.
    pub(crate) fn is_forced(&self) -> bool {
        self.must != Must::Nothing
    }

    /// What an answer of calls looks like in the notation of the engine's model.
    ///
    /// # Errors
    /// If there is no such tool.
    pub(crate) fn output(&self, engine: &Engine) -> Result<StructuredOutput> {
        let format = engine.tool_call_format();
        let special = format.special_tokens(engine.tokenizer());
        let id = |mark: &str| special.iter().find(|(_, text)| *text == mark).map(|(id, _)| *id);
        let which = match &self.must {
            Must::Tool(name) => Some(name.as_str()),
            Must::Nothing | Must::Any => None,
        };
        let readable = |tool: &Value| {
            let mut tool = tool.clone();
            let parameters = &mut tool["function"]["parameters"];
            *parameters = with_closed_objects(without_unreadable(parameters.take()));
            tool
        };
        let tools: Vec<Value> = self.tools.iter().map(readable).collect();
        let grammar = format.grammar(&tools, which, self.parallel, &id);
        let grammar = grammar.map_err(|error| ApiError::field("tool_choice", error.to_string()))?;
        Ok(StructuredOutput::Lark(grammar))
    }
}

impl ToolDefinition {
    /// The tool as chat templates read it. Some of them need `parameters`.
    fn as_json(&self) -> Value {
        let FunctionDefinition { name, description, parameters, .. } = &self.function;
        let mut function = json!({ "name": name });
        if let Some(description) = description {
            function["description"] = json!(description);
        }
        let none = || json!({ "type": "object", "properties": {} });
        function["parameters"] = parameters.clone().unwrap_or_else(none);
        json!({ "type": "function", "function": function })
    }
}

/// The name of the function that a choice names.
fn function_name(choice: &Value) -> Option<&str> {
    choice["function"]["name"].as_str().filter(|_| choice["type"] == "function")
}

/// The calls that a choice of `allowed_tools` asks for, and the names of these tools.
fn allowed_tools(choice: &Value) -> Option<(Must, Vec<&str>)> {
    let allowed = Some(&choice["allowed_tools"]).filter(|_| choice["type"] == "allowed_tools")?;
    let must = match allowed["mode"].as_str()? {
        "auto" => Must::Nothing,
        "required" => Must::Any,
        _ => return None,
    };
    let names = allowed["tools"].as_array()?.iter().map(function_name).collect::<Option<_>>()?;
    Some((must, names))
}

/// The names of tools.
///
/// # Errors
/// If there are too many tools, or one is wrong.
fn names(tools: &[ToolDefinition]) -> Result<Vec<String>> {
    if tools.len() > MAX_TOOLS {
        return Err(ApiError::field("tools", format!("a request may have {MAX_TOOLS} tools")));
    }
    let mut names: Vec<String> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let wrong =
            |field: &str, message: String| Err(ApiError::field(&format!("tools[{index}].{field}"), message));
        let FunctionDefinition { name, parameters, .. } = &tool.function;
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if tool.kind != "function" {
            return wrong(
                "type",
                format!("a tool of type {:?} is not supported: function alone is", tool.kind),
            );
        }
        if !(1..=MAX_TOOL_NAME).contains(&name.len()) || !name.chars().all(is_allowed) {
            let rule = format!("a tool's name is 1 to {MAX_TOOL_NAME} letters, digits, _ and -");
            return wrong("function.name", rule);
        }
        if names.contains(name) {
            return wrong("function.name", format!("there are two tools {name:?}"));
        }
        if parameters.as_ref().is_some_and(|parameters| !parameters.is_object()) {
            return wrong("function.parameters", "the parameters are a JSON Schema, an object".to_owned());
        }
        names.push(name.clone());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool_use(tools: Value, choice: Value) -> Result<Option<ToolUse>> {
        let tools: Vec<ToolDefinition> = serde_json::from_value(tools).unwrap();
        ToolUse::of(&tools, Some(&choice), None)
    }

    #[test]
    fn a_choice_of_allowed_tools_leaves_these() {
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let tools = json!([tool("torque"), tool("count_spokes"), tool("true_wheel")]);
        let choice = |mode: &str, names: &[&str]| {
            let allowed: Vec<Value> = names.iter().map(|name| tool(name)).collect();
            json!({ "type": "allowed_tools", "allowed_tools": { "mode": mode, "tools": allowed } })
        };
        for (mode, is_forced) in [("auto", false), ("required", true)] {
            let left = tool_use(tools.clone(), choice(mode, &["true_wheel", "torque"])).unwrap().unwrap();
            assert_eq!(
                (left.is_forced(), left.names.as_slice()),
                (is_forced, &["torque", "true_wheel"].map(str::to_owned)[..])
            );
            let told = left.tools.iter().map(|tool| tool["function"]["name"].as_str());
            assert!(told.eq([Some("torque"), Some("true_wheel")]));
        }
        assert_eq!(tool_use(tools.clone(), choice("auto", &[])).unwrap(), None);
        for (wrong, reason) in [
            (choice("required", &[]), "no tools to call"),
            (choice("auto", &["other"]), "no tool \"other\""),
            (choice("none", &["torque"]), "\"mode\": \"auto\" or \"required\""),
            (json!({ "type": "allowed_tools", "mode": "auto", "tools": [] }), "\"allowed_tools\": {"),
        ] {
            let error = tool_use(tools.clone(), wrong.clone()).unwrap_err();
            assert!(
                error.param.as_deref() == Some("tool_choice") && error.message.contains(reason),
                "{wrong} {error}"
            );
        }
    }

    #[test]
    fn wrong_tools_and_choices_name_their_field() {
        let tool = |function: Value| json!([{ "type": "function", "function": function }]);
        let good = tool(json!({ "name": "torque" }));
        let twice = json!([good[0], good[0]]);
        let many: Vec<Value> =
            (0..129).map(|i| tool(json!({ "name": format!("t{i}") }))[0].clone()).collect();
        for (tools, choice, named) in [
            (json!([{ "type": "web_search" }]), Value::Null, "tools[0].type"),
            (json!([{ "function": { "name": "a" } }]), Value::Null, "tools[0].type"),
            (json!([{ "type": "function" }]), Value::Null, "tools[0].function.name"),
            (tool(json!({ "name": "two words" })), Value::Null, "tools[0].function.name"),
            (tool(json!({ "name": "x".repeat(65) })), Value::Null, "tools[0].function.name"),
            (tool(json!({ "name": "a", "parameters": [] })), Value::Null, "tools[0].function.parameters"),
            (twice, Value::Null, "tools[1].function.name"),
            (json!(many), Value::Null, "tools"),
            (json!([]), json!("required"), "tool_choice"),
            (good.clone(), json!("any"), "tool_choice"),
            (good.clone(), json!({ "type": "function" }), "tool_choice"),
            (good.clone(), json!({ "type": "function", "function": { "name": "other" } }), "tool_choice"),
            (good.clone(), json!(3), "tool_choice"),
        ] {
            let error = tool_use(tools.clone(), choice.clone()).unwrap_err();
            assert_eq!(
                (error.status.as_u16(), error.param.as_deref()),
                (400, Some(named)),
                "{tools} {choice}"
            );
        }
        assert_eq!(tool_use(good.clone(), json!("none")).unwrap(), None);
        assert_eq!(tool_use(json!([]), json!("auto")).unwrap(), None);
        assert!(!tool_use(good.clone(), Value::Null).unwrap().unwrap().is_forced());
        let named = json!({ "type": "function", "function": { "name": "torque" } });
        let forced = tool_use(good, named).unwrap().unwrap();
        assert!(forced.is_forced() && !forced.parallel, "a function that is named is called once");
        let whole = json!({ "type": "function", "function": { "name": "torque", "parameters": { "type": "object", "properties": {} } } });
        assert_eq!(forced.tools, [whole]);
    }
}
