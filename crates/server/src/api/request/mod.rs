//! Requests for an answer: `/v1/chat/completions` and `/v1/completions`.

mod documents;
mod format;
mod null;
mod numbers;
mod objects;
mod prompt;
mod sampling;
mod tools;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

pub(super) use self::documents::{
    DocumentReference, Documents, EveryToken, Explain, RefrainOptions, fusion_method,
};
pub(super) use self::format::{NamedSchema, ResponseFormat};
use self::format::{StructuredOutputs, logprobs_schema};
pub(super) use self::null::null_is_default;
pub(super) use self::numbers::whole_number;
pub(super) use self::objects::{ObjectDeserializer, read_from_objects, write_as_derived};
use self::prompt::Prompts;
pub(super) use self::prompt::{Continued, text_ids};
pub(super) use self::tools::{
    FunctionDefinition, MAX_TOOL_NAME, ToolDefinition, ToolUse, tool_choice_schema,
};
use super::messages::{ChatMessage, Conversation};
use crate::api_error::{ApiError, Result};

/// Most answers to a prompt.
const MAX_ANSWERS: usize = 16;
/// Most answers of a request to all of its prompts: LangChain sends 20 prompts at a time.
const MAX_ANSWERS_TO_ALL: usize = 128;

/// A request for an answer: to `messages` in a chat, or to a `prompt`. Unknown fields are ignored. OpenAI's fields that are
/// not supported, such as `audio`, are refused by name.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct CompletionRequest {
    /// The model's name as in `/v1/models`.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// The conversation, with a message of the user or the system; a last message of the assistant is a finished turn.
    /// `/v1/chat/completions` needs it.
    #[serde(default, deserialize_with = "null_is_default")]
    pub(super) messages: Vec<ChatMessage>,
    /// The text to continue or several, in which special tokens are recognised, or the ids of their tokens, to which
    /// nothing is added; each has `n` answers, 128 together. `/v1/completions` needs it.
    #[serde(default)]
    prompt: Option<Prompts>,
    /// The documents to answer from.
    #[serde(default)]
    pub(crate) documents: Option<Documents>,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(crate) refrain: RefrainOptions,
    /// Whether the answer is sent as server-sent events, of which the last is `[DONE]`.
    #[serde(default)]
    pub(crate) stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    /// Most tokens of the answer; by default, and where it is -1, what the context and the server's memory leave.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = -1)]
    max_tokens: Option<i64>,
    /// Goes before `max_tokens`.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = -1)]
    pub(super) max_completion_tokens: Option<i64>,
    /// The name that llama.cpp has for `max_tokens`, which goes before it.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = -1)]
    n_predict: Option<i64>,
    /// Tokens before which nothing ends the answer.
    #[serde(default, deserialize_with = "whole_number")]
    min_tokens: Option<usize>,
    /// Whether the answer goes on behind the model's end of text, to `max_tokens` or a stop text. Not together with a form, or calls, that the
    /// answer is held to.
    #[schema(default = false)]
    pub(super) ignore_eos: Option<bool>,
    /// 0 takes the most likely token.
    #[schema(minimum = 0, maximum = 100, default = 0)]
    pub(super) temperature: Option<f32>,
    /// 0 takes the most likely token.
    #[schema(minimum = 0, maximum = 1, default = 1)]
    pub(super) top_p: Option<f32>,
    /// -1 and 0 keep all tokens.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = -1, default = 0)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1, default = 0)]
    min_p: Option<f32>,
    #[schema(minimum = 0.01, maximum = 100, default = 1)]
    repetition_penalty: Option<f32>,
    /// Lowers the logit of a token by this for each time that it stands in the answer.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f32>,
    /// Lowers the logits of tokens that stand in the answer by this.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f32>,
    /// Is added to the logits of tokens; the keys are ids of tokens, the values -100 to 100.
    logit_bias: Option<BTreeMap<String, f32>>,
    /// Answers to a prompt. Each after the first has a seed one higher than the one before.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(minimum = 1, maximum = 16, default = 1)]
    n: Option<usize>,
    /// In a completion, whether the answer begins with the prompt. Not together with `logprobs`.
    #[schema(default = false)]
    echo: Option<bool>,
    /// The tools that the model may call, 128 at most. In a chat.
    #[serde(default)]
    pub(super) tools: Option<Vec<ToolDefinition>>,
    /// `none` leaves the tools out of the prompt, `auto` leaves it to the model whether it calls one, `required` makes the answer calls,
    /// `{"type": "function", "function": {"name"}}` a call of this function, and `{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}` is
    /// `auto` or `required` with these tools alone.
    #[schema(schema_with = tool_choice_schema)]
    pub(super) tool_choice: Option<Value>,
    /// Whether an answer may have several calls.
    #[schema(default = true)]
    pub(super) parallel_tool_calls: Option<bool>,
    /// Variables of the chat template. In a chat.
    pub(super) chat_template_kwargs: Option<ChatTemplateKwargs>,
    /// Whether a model that can do both thinks before it answers: with `none` and `minimal` it does not, with all other texts it does.
    /// `chat_template_kwargs` goes before it. In a chat.
    pub(super) reasoning_effort: Option<String>,
    /// The form that the answer is held to. With tools, an answer that calls none.
    pub(super) response_format: Option<ResponseFormat>,
    /// The form that the answer is held to, as vLLM takes it.
    structured_outputs: Option<StructuredOutputs>,
    /// With a seed a request has one answer, whatever else is computed, as long as it finds the same in the prefix cache: what is taken over
    /// from there may round otherwise, and a further turn that finds nothing has its documents repaired for its own question. Without a
    /// seed, or with -1, a random one is drawn where `temperature` is above 0, and the answer's `refrain.seed` tells it.
    #[serde(default, deserialize_with = "whole_number")]
    pub(super) seed: Option<i64>,
    stop: Option<OneOrMany>,
    /// In a chat, whether to give the log probabilities of tokens; in a completion, of how many alternatives.
    #[schema(schema_with = logprobs_schema)]
    logprobs: Option<Value>,
    /// Number of alternatives to each token of a chat.
    #[serde(default, deserialize_with = "whole_number")]
    #[schema(maximum = 20)]
    top_logprobs: Option<usize>,
    // Fields of OpenAI, vLLM and llama.cpp that are refused, unless their value asks for nothing.
    #[schema(ignore)]
    allowed_token_ids: Option<Value>,
    #[schema(ignore)]
    audio: Option<Value>,
    #[schema(ignore)]
    bad_words: Option<Value>,
    #[schema(ignore)]
    best_of: Option<Value>,
    #[schema(ignore)]
    continue_final_message: Option<Value>,
    #[schema(ignore)]
    function_call: Option<Value>,
    #[schema(ignore)]
    functions: Option<Value>,
    #[schema(ignore)]
    grammar: Option<Value>,
    #[schema(ignore)]
    guided_choice: Option<Value>,
    #[schema(ignore)]
    guided_grammar: Option<Value>,
    #[schema(ignore)]
    guided_json: Option<Value>,
    #[schema(ignore)]
    guided_regex: Option<Value>,
    #[schema(ignore)]
    json_schema: Option<Value>,
    #[schema(ignore)]
    modalities: Option<Value>,
    #[schema(ignore)]
    prediction: Option<Value>,
    #[schema(ignore)]
    stop_token_ids: Option<Value>,
    #[schema(ignore)]
    suffix: Option<Value>,
    #[schema(ignore)]
    web_search_options: Option<Value>,
}

/// Variables of the model's chat template.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct ChatTemplateKwargs {
    /// Whether a model that can do both thinks before it answers. Its thoughts are text of the answer.
    #[serde(default)]
    #[schema(default = false)]
    enable_thinking: Option<bool>,
    /// Other variables, which are refused unless they are null.
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, Value>,
}

impl ChatTemplateKwargs {
    /// Whether the model is to think, if that is said.
    ///
    /// # Errors
    /// If another variable has a value.
    pub(super) fn thinking(&self) -> Result<Option<bool>> {
        match self.unknown.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(self.enable_thinking),
            Some((name, _)) => {
                let message = format!("chat_template_kwargs.{name} is not supported: enable_thinking is");
                Err(ApiError::field("chat_template_kwargs", message))
            }
        }
    }
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
struct StreamOptions {
    /// Whether a stream ends with the usage of tokens.
    #[serde(default, deserialize_with = "null_is_default")]
    include_usage: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "stop takes a text or a list of texts")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

read_from_objects!(CompletionRequest, StreamOptions);

/// Refuses a request that names another model than the one that is `served`.
pub(crate) fn check_model(named: Option<&str>, served: &str) -> Result<()> {
    match named {
        Some(name) if name != served => Err(ApiError {
            code: Some("model_not_found"),
            param: Some("model".to_owned()),
            ..ApiError::not_found("model", name)
        }),
        _ => Ok(()),
    }
}

impl CompletionRequest {
    /// Refuses fields that are not supported, and another model than `model`.
    pub(crate) fn check(&self, model: &str) -> Result<()> {
        for (name, value, harmless) in self.unsupported() {
            let given = value.as_ref().filter(|value| !value.is_null()).map(Value::to_string);
            if given.is_some_and(|given| !harmless.contains(&given.as_str())) {
                let instead = match name {
                    "json_schema" => ": response_format is",
                    "grammar" => ": structured_outputs is",
                    name if name.starts_with("guided_") => ": structured_outputs is",
                    _ => "",
                };
                let error = ApiError::field(name, format!("{name} is not supported{instead}"));
                return Err(error.with_code("unsupported_parameter"));
            }
        }
        if !(1..=MAX_ANSWERS).contains(&self.answers()) {
            return Err(ApiError::field("n", format!("n is 1 to {MAX_ANSWERS}")));
        }
        self.refrain.check()?;
        self.thinking()?;
        check_model(self.model.as_deref(), model)
    }

    /// Fields that are not supported, with their values here and the values that ask for nothing.
    fn unsupported(&self) -> [(&'static str, &Option<Value>, &'static [&'static str]); 18] {
        [
            ("allowed_token_ids", &self.allowed_token_ids, &[]),
            ("audio", &self.audio, &[]),
            ("bad_words", &self.bad_words, &["[]"]),
            ("best_of", &self.best_of, &["1"]),
            ("continue_final_message", &self.continue_final_message, &["false"]),
            ("function_call", &self.function_call, &["\"none\""]),
            ("functions", &self.functions, &["[]"]),
            ("grammar", &self.grammar, &["\"\""]),
            ("guided_choice", &self.guided_choice, &[]),
            ("guided_grammar", &self.guided_grammar, &[]),
            ("guided_json", &self.guided_json, &[]),
            ("guided_regex", &self.guided_regex, &[]),
            ("json_schema", &self.json_schema, &[]),
            ("modalities", &self.modalities, &["[\"text\"]"]),
            ("prediction", &self.prediction, &[]),
            ("stop_token_ids", &self.stop_token_ids, &["[]"]),
            ("suffix", &self.suffix, &["\"\""]),
            ("web_search_options", &self.web_search_options, &[]),
        ]
    }

    pub(crate) fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// Whether the documents are those that a search finds.
    pub(crate) fn searches(&self) -> bool {
        matches!(self.documents, Some(Documents::Search(_)))
    }

    /// The number of answers to a prompt that the request asks for.
    pub(crate) fn answers(&self) -> usize {
        self.n.unwrap_or(1)
    }

    /// Whether a stream ends with the usage of tokens.
    pub(crate) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    /// The conversation of a chat.
    ///
    /// # Errors
    /// If a role or content is not supported, or no message is the user's or the system's.
    pub(crate) fn conversation(&self) -> Result<Conversation> {
        Conversation::of(&self.messages)
    }

    /// The tools that the model is told of, and whether it must call one.
    ///
    /// # Errors
    /// If a tool or the choice is wrong.
    pub(crate) fn tool_use(&self) -> Result<Option<ToolUse>> {
        let tools = self.tools.as_deref().unwrap_or_default();
        ToolUse::of(tools, self.tool_choice.as_ref(), self.parallel_tool_calls)
    }

    /// Whether the model thinks before it answers.
    ///
    /// # Errors
    /// If a variable of the chat template is not supported.
    pub(crate) fn thinking(&self) -> Result<bool> {
        let asked = self.chat_template_kwargs.as_ref().map(ChatTemplateKwargs::thinking).transpose()?;
        let by_effort = |effort: &String| !matches!(effort.as_str(), "none" | "minimal");
        Ok(asked.flatten().or(self.reasoning_effort.as_ref().map(by_effort)).unwrap_or(false))
    }

    /// The texts to continue.
    ///
    /// # Errors
    /// If there is none, one is empty, or all their answers are too many.
    pub(crate) fn prompts(&self) -> Result<Vec<Continued<'_>>> {
        let prompts = self.prompt.as_ref().map(Prompts::texts).unwrap_or_default();
        let wrong = |message: String| Err(ApiError::field("prompt", message));
        if prompts.is_empty() {
            return wrong("prompt is missing".to_owned());
        }
        if prompts.iter().any(Continued::is_empty) {
            return wrong("the prompt is empty: give a text to continue".to_owned());
        }
        let answers = prompts.len() * self.answers();
        if answers > MAX_ANSWERS_TO_ALL {
            let most = MAX_ANSWERS_TO_ALL;
            return wrong(format!("{answers} answers are asked for, and a request may have {most}"));
        }
        Ok(prompts)
    }

    /// Whether a completion's answers begin with their prompts.
    ///
    /// # Errors
    /// If log probabilities are asked for, since the prompt's own are not computed.
    pub(crate) fn echoes(&self) -> Result<bool> {
        let echo = self.echo.unwrap_or(false);
        if echo && !matches!(self.logprobs, None | Some(Value::Null | Value::Bool(false))) {
            let message =
                "echo is not supported together with logprobs: those of the prompt are not computed";
            return Err(ApiError::field("echo", message));
        }
        Ok(echo)
    }

    /// The field that says how many tokens the request asks for, or else would.
    pub(crate) fn max_tokens_field(&self) -> &'static str {
        self.given_max_tokens().map_or("max_tokens", |(name, _)| name)
    }

    fn given_max_tokens(&self) -> Option<(&'static str, i64)> {
        let fields = [
            ("max_completion_tokens", self.max_completion_tokens),
            ("max_tokens", self.max_tokens),
            ("n_predict", self.n_predict),
        ];
        let mut given = fields.into_iter().filter_map(|(name, tokens)| Some((name, tokens?)));
        given.find(|(_, tokens)| *tokens != -1)
    }

    /// The number of tokens that the request asks for. -1 asks for none, as in llama.cpp.
    ///
    /// # Errors
    /// If it is 0, or negative otherwise.
    pub(crate) fn max_tokens(&self) -> Result<Option<usize>> {
        let Some((name, tokens)) = self.given_max_tokens() else { return Ok(None) };
        match usize::try_from(tokens) {
            Ok(tokens) if tokens > 0 => Ok(Some(tokens)),
            _ => Err(ApiError::field(
                name,
                "the number of an answer's tokens is at least 1, or -1 for none given",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use refrain::engine::Sampling;
    use serde_json::json;

    use super::*;

    fn request(json: &str) -> CompletionRequest {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_conversation_is_taken_apart() {
        let request = request(
            r#"{"model": "m", "temperature": null, "whatever": {"x": 1}, "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "c"}]}, {"role": "user", "content": "d"}]}"#,
        );
        request.check("m").unwrap();
        let conversation = request.conversation().unwrap();
        assert_eq!((conversation.system.as_deref(), conversation.question()), (Some("Be brief."), "d"));
        let turns = conversation.turns.iter().map(|turn| turn.content.as_str());
        assert_eq!(turns.collect::<Vec<_>>(), ["a\nb", "c", "d"]);
        assert_eq!(request.sampling(9, || 7).unwrap(), Sampling { max_tokens: 9, ..Sampling::default() });
    }

    #[test]
    fn models_think_where_it_is_asked_for() {
        for (json, thinking) in [
            ("{}", false),
            (r#"{"chat_template_kwargs": null}"#, false),
            (r#"{"chat_template_kwargs": {}}"#, false),
            (r#"{"chat_template_kwargs": {"enable_thinking": false}}"#, false),
            (r#"{"chat_template_kwargs": {"enable_thinking": true, "thinking": null}}"#, true),
            (r#"{"reasoning_effort": "none"}"#, false),
            (r#"{"reasoning_effort": "minimal"}"#, false),
            (r#"{"reasoning_effort": null}"#, false),
            (r#"{"reasoning_effort": "low"}"#, true),
            (r#"{"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false}}"#, false),
            (r#"{"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}}"#, true),
        ] {
            assert_eq!(request(json).thinking().unwrap(), thinking, "{json}");
        }
        let error = request(r#"{"chat_template_kwargs": {"thinking": true}}"#).check("m").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("chat_template_kwargs"));
        assert!(error.message.contains("thinking is not supported: enable_thinking is"), "{}", error.message);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (json, named) in [
            (r#"{"functions": [{"name": "f"}]}"#, "functions"),
            (r#"{"function_call": "auto"}"#, "function_call"),
            (r#"{"n": 0}"#, "n"),
            (r#"{"n": 17}"#, "n"),
            (r#"{"best_of": 2}"#, "best_of"),
            (r#"{"suffix": "x"}"#, "suffix"),
            (r#"{"guided_json": {"type": "object"}}"#, "guided_json"),
            (r#"{"guided_regex": "a+"}"#, "guided_regex"),
            (r#"{"guided_choice": ["a"]}"#, "guided_choice"),
            (r#"{"guided_grammar": "start: \"a\""}"#, "guided_grammar"),
            (r#"{"grammar": "root ::= \"a\""}"#, "grammar"),
            (r#"{"json_schema": {}}"#, "json_schema"),
            (r#"{"allowed_token_ids": [1]}"#, "allowed_token_ids"),
            (r#"{"stop_token_ids": [1]}"#, "stop_token_ids"),
            (r#"{"bad_words": ["a"]}"#, "bad_words"),
            (r#"{"continue_final_message": true}"#, "continue_final_message"),
        ] {
            assert_eq!(request(json).check("m").unwrap_err().param.as_deref(), Some(named));
        }
        let harmless = r#"{"tools": [], "n": 1, "response_format": {"type": "text"}, "logit_bias": null, "user": "x", "grammar": "",
            "stop_token_ids": [], "bad_words": [], "continue_final_message": false}"#;
        request(harmless).check("m").unwrap();
        assert_eq!(request(r#"{"model": "other"}"#).check("m").unwrap_err().status, 404);
    }

    #[test]
    fn wrong_messages_and_numbers_name_their_field() {
        let param = |error: ApiError| error.param.unwrap();
        for (json, named) in [
            (r#"{"messages": []}"#, "messages"),
            (r#"{"messages": [{"role": "assistant", "content": "x"}]}"#, "messages"),
            (r#"{"messages": [{"role": "tool", "content": "x"}]}"#, "messages[0].tool_call_id"),
            (r#"{"messages": [{"role": "critic", "content": "x"}]}"#, "messages[0].role"),
            (r#"{"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}"#, "messages"),
            (
                r#"{"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]}"#,
                "messages[0].tool_calls",
            ),
            (r#"{"messages": [{"role": "user"}]}"#, "messages[0].content"),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}"#,
                "messages[0].content",
            ),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}"#,
                "messages[0].content",
            ),
        ] {
            assert_eq!(param(request(json).conversation().unwrap_err()), named, "{json}");
        }
    }

    #[test]
    fn system_messages_stand_anywhere_and_may_be_the_question() {
        for (messages, system, turns) in [
            ("system a, developer b, user c, system d", Some("a\n\nb"), "user c, system d"),
            ("user a, assistant b, developer c, user d", None, "user a, assistant b, system c, user d"),
            ("system a", None, "user a"),
            ("system a, developer b", Some("a"), "user b"),
            ("system a, assistant b, system c", Some("a"), "assistant b, user c"),
            ("system a, assistant b", None, "user a, assistant b"),
        ] {
            let message = |of: &str| {
                let (role, content) = of.split_once(' ').unwrap();
                json!({ "role": role, "content": content })
            };
            let given: Vec<Value> = messages.split(", ").map(message).collect();
            let read = request(&json!({ "messages": given }).to_string()).conversation().unwrap();
            let said = read.turns.iter().map(|turn| format!("{} {}", turn.role, turn.content));
            assert_eq!(
                (read.system.as_deref(), said.collect::<Vec<_>>().join(", ")),
                (system, turns.to_owned())
            );
        }
    }

    #[test]
    fn the_question_is_the_users_last_message_with_text() {
        for (messages, question) in [
            (json!([["user", "a"], ["assistant", "b"]]), "a"),
            (json!([["user", "a"], ["assistant", "b"], ["user", "c"], ["assistant", "d"]]), "c"),
            (json!([["user", "a"], ["assistant", "b"], ["user", " "]]), "a"),
            (json!([["system", "a"], ["user", ""]]), ""),
        ] {
            let message = |of: &Value| json!({ "role": of[0], "content": of[1] });
            let given: Vec<Value> = messages.as_array().unwrap().iter().map(message).collect();
            let read = request(&json!({ "messages": given }).to_string()).conversation().unwrap();
            assert_eq!(read.question(), question, "{messages}");
        }
    }

    #[test]
    fn arguments_that_are_no_object_are_told_in_one() {
        for (given, told) in [
            (json!("{\"a\": 1}"), json!({ "a": 1 })),
            (json!({ "a": 1 }), json!({ "a": 1 })),
            (json!(" "), json!({})),
            (Value::Null, json!({})),
            (json!("{\"a\": \"cut of"), json!({ "arguments": "{\"a\": \"cut of" })),
            (json!("[1]"), json!({ "arguments": "[1]" })),
            (json!([1]), json!({ "arguments": [1] })),
        ] {
            let calls = json!([{ "function": { "name": "f", "arguments": given } }]);
            let messages = json!([{ "role": "user", "content": "x" }, { "role": "assistant", "tool_calls": calls },
                { "role": "tool", "tool_call_id": "", "content": "y" }]);
            let turns = request(&json!({ "messages": messages }).to_string()).conversation().unwrap().turns;
            assert_eq!(turns[1].tool_calls[0].arguments, told);
        }
    }

    #[test]
    fn prompts_are_texts_or_ids() {
        let prompts = |prompt: Value| {
            let request: CompletionRequest =
                serde_json::from_value(json!({ "prompt": prompt, "n": 2 })).unwrap();
            request.prompts().map(|prompts| format!("{prompts:?}")).map_err(|error| error.message)
        };
        for (given, read) in [
            (json!("a"), r#"[Text("a")]"#),
            (json!(["a", "b"]), r#"[Text("a"), Text("b")]"#),
            (json!([1, 2]), "[Ids([1, 2])]"),
            (json!([[1, 2], [3]]), "[Ids([1, 2]), Ids([3])]"),
        ] {
            assert_eq!(prompts(given).as_deref(), Ok(read));
        }
        for (given, why) in [
            (Value::Null, "missing"),
            (json!([]), "missing"),
            (json!(""), "empty"),
            (json!([[1], []]), "empty"),
            (json!(vec!["a"; 65]), "130 answers are asked for, and a request may have 128"),
        ] {
            let error = prompts(given).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let error = serde_json::from_value::<CompletionRequest>(json!({ "prompt": [1, "a"] })).unwrap_err();
        assert!(error.to_string().contains("a list of token ids"), "{error}");
    }

    #[test]
    fn documents_are_named_given_or_searched() {
        let request = request(
            r#"{"documents": [{"id": "doc-1"}, {"title": "t", "text": "x"}, {"text": "y"}],
                "refrain": {"method": {"name": "a3", "ratio": 0.3}, "evict": "h2o"}}"#,
        );
        let Some(Documents::List(documents)) = &request.documents else { panic!() };
        assert!(matches!(&documents[0], DocumentReference::Id { id, parts: None } if id == "doc-1"));
        assert!(matches!(&documents[2], DocumentReference::Text(document) if document.text == "y"));
        request.check("m").unwrap();
        assert_eq!(request.refrain.method, Some(json!({ "name": "a3", "ratio": 0.3 })));
        let beside: CompletionRequest =
            serde_json::from_str(r#"{"refrain": {"method": "a3", "ratio": 0.3}}"#).unwrap();
        let error = beside.check("m").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("refrain.ratio"));
        assert!(error.message.contains("stands with its method"), "{}", error.message);
        for (limit, is_right) in [(0, false), (1, true), (64, true), (65, false)] {
            let searching = json!({ "refrain": { "search": limit } });
            let searching: CompletionRequest = serde_json::from_value(searching).unwrap();
            let refused = searching.check("m").err().and_then(|error| error.param);
            assert_eq!(refused.as_deref(), (!is_right).then_some("refrain.search"), "{limit}");
        }
    }
}
