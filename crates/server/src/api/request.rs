//! Requests for an answer: `/v1/chat/completions` and `/v1/completions`.

use std::collections::BTreeMap;

use refrain_engine::{Document, Sampling};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa::openapi::Ref;
use utoipa::openapi::schema::{Object, OneOfBuilder, Schema, Type};

use super::messages::{ChatMessage, Conversation};
use crate::api_error::{ApiError, Result};

/// Most stop texts.
const MAX_STOPS: usize = 16;
/// Most bytes of a stop text.
const MAX_STOP_BYTES: usize = 1024;
/// Most alternatives of a token.
const MAX_TOP_LOGPROBS: usize = 20;

/// A request for an answer: to `messages` in a chat, or to a `prompt`. Unknown fields are ignored. OpenAI's fields that are
/// not supported, such as `tools`, are refused by name.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CompletionRequest {
    /// The model's name as in `/v1/models`.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// The conversation; the last message is the user's. `/v1/chat/completions` needs it.
    #[serde(default)]
    messages: Vec<ChatMessage>,
    /// The text to continue. `/v1/completions` needs it.
    #[serde(default)]
    prompt: Option<OneOrMany>,
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
    /// Most tokens of the answer; 512, or what the context leaves, by default.
    #[schema(minimum = 1)]
    max_tokens: Option<usize>,
    /// Goes before `max_tokens`.
    #[schema(minimum = 1)]
    max_completion_tokens: Option<usize>,
    /// Tokens before which nothing ends the answer.
    min_tokens: Option<usize>,
    /// 0 takes the most likely token.
    #[schema(minimum = 0, maximum = 100, default = 0)]
    temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f32>,
    /// -1 and 0 keep all tokens.
    #[schema(minimum = -1, default = 0)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1, default = 0)]
    min_p: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 100, default = 1)]
    repetition_penalty: Option<f32>,
    /// The same request with the same seed gets the same answer, whatever else is computed. Without a seed, a random one is
    /// drawn where `temperature` is above 0, and the answer's `refrain.seed` tells it.
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    /// In a chat, whether to give the log probabilities of tokens; in a completion, of how many alternatives.
    #[schema(schema_with = logprobs_schema)]
    logprobs: Option<Value>,
    /// Number of alternatives to each token of a chat.
    #[schema(maximum = 20)]
    top_logprobs: Option<usize>,
    // Fields of OpenAI's interface that are refused, unless their value asks for nothing.
    #[schema(ignore)]
    audio: Option<Value>,
    #[schema(ignore)]
    best_of: Option<Value>,
    #[schema(ignore)]
    echo: Option<Value>,
    #[schema(ignore)]
    frequency_penalty: Option<Value>,
    #[schema(ignore)]
    function_call: Option<Value>,
    #[schema(ignore)]
    functions: Option<Value>,
    #[schema(ignore)]
    logit_bias: Option<Value>,
    #[schema(ignore)]
    modalities: Option<Value>,
    #[schema(ignore)]
    n: Option<Value>,
    #[schema(ignore)]
    prediction: Option<Value>,
    #[schema(ignore)]
    presence_penalty: Option<Value>,
    #[schema(ignore)]
    response_format: Option<Value>,
    #[schema(ignore)]
    suffix: Option<Value>,
    #[schema(ignore)]
    tool_choice: Option<Value>,
    #[schema(ignore)]
    tools: Option<Value>,
    #[schema(ignore)]
    web_search_options: Option<Value>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
struct StreamOptions {
    /// Whether a stream ends with the usage of tokens.
    #[serde(default)]
    include_usage: bool,
}

/// Schema of `logprobs`, which is read as any value so that a wrong one gets a clear error.
fn logprobs_schema() -> Schema {
    let types = [Type::Boolean, Type::Integer].map(Object::with_type);
    types.into_iter().fold(OneOfBuilder::new(), OneOfBuilder::item).build().into()
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// The documents to answer from.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Documents {
    /// `"search"`: the stored chunks that match the question best.
    Search(String),
    /// A list of documents.
    List(Vec<DocumentReference>),
}

/// A document given by its text, or by the id of a stored one.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum DocumentReference {
    // First, so that an object with both fields is read as a text: its id is the client's own.
    Text(DocumentText),
    Id { id: String },
}

/// A document as a text.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct DocumentText {
    #[serde(default)]
    pub(crate) title: String,
    #[schema(min_length = 1)]
    pub(crate) text: String,
}

impl From<DocumentText> for Document {
    fn from(document: DocumentText) -> Document {
        Document { title: document.title, text: document.text }
    }
}

/// How the prompt is prefilled and its cache kept.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct RefrainOptions {
    #[serde(default)]
    #[schema(schema_with = fusion_method)]
    pub(crate) method: Option<Value>,
    #[serde(default)]
    #[schema(schema_with = eviction_policy)]
    pub(crate) evict: Option<Value>,
    #[serde(default)]
    pub(crate) explain: Explain,
    /// Most chunks that a search finds. A method that needs whole documents gets those that the chunks belong to, as many as
    /// fit into the context.
    #[serde(default)]
    #[schema(maximum = 64, default = 5)]
    pub(crate) search: Option<usize>,
    /// Unknown fields, which are refused.
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, Value>,
}

/// Schema of a fusion method: its text, or an object with its name and options.
pub(super) fn fusion_method() -> Ref {
    Ref::from_schema_name("FusionMethod")
}

/// Schema of an eviction policy: its text, or an object with its name and options.
fn eviction_policy() -> Ref {
    Ref::from_schema_name("EvictionPolicy")
}

/// Whether the answer reports the question's attention: for the most attended tokens (`true`), or for every token of the
/// documents (`"tokens"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Explain {
    MostAttended(bool),
    Tokens(EveryToken),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
pub(crate) enum EveryToken {
    #[serde(rename = "tokens")]
    Tokens,
}

impl Default for Explain {
    fn default() -> Explain {
        Explain::MostAttended(false)
    }
}

impl Explain {
    pub(crate) fn is_wanted(self) -> bool {
        self != Explain::MostAttended(false)
    }
}

impl RefrainOptions {
    /// Refuses unknown fields. An option that is written beside its method would have no effect.
    fn check(&self) -> Result<()> {
        let Some(name) = self.unknown.keys().next() else { return Ok(()) };
        let message = format!(
            "refrain.{name} is not known: method, evict, explain, search; an option stands with its method, as in \
             {{\"method\": {{\"name\": \"a3\", \"ratio\": 0.2}}}}"
        );
        Err(ApiError::field(&format!("refrain.{name}"), message))
    }
}

/// Reads `null` as the default.
fn null_is_default<'de, D: serde::Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl CompletionRequest {
    /// Refuses fields that are not supported, and another model than `model`.
    pub(crate) fn check(&self, model: &str) -> Result<()> {
        for (name, value, harmless) in self.unsupported() {
            let given = value.as_ref().filter(|value| !value.is_null()).map(Value::to_string);
            if given.is_some_and(|given| !harmless.contains(&given.as_str())) {
                let error = ApiError::field(name, format!("{name} is not supported"));
                return Err(ApiError { code: Some("unsupported_parameter"), ..error });
            }
        }
        self.refrain.check()?;
        match &self.model {
            Some(name) if name != model => Err(ApiError {
                code: Some("model_not_found"),
                param: Some("model".to_owned()),
                ..ApiError::not_found("model", name)
            }),
            _ => Ok(()),
        }
    }

    /// OpenAI's fields that are not supported, with their values here and the values that ask for nothing.
    fn unsupported(&self) -> [(&'static str, &Option<Value>, &'static [&'static str]); 16] {
        [
            ("audio", &self.audio, &[]),
            ("best_of", &self.best_of, &["1"]),
            ("echo", &self.echo, &["false"]),
            ("frequency_penalty", &self.frequency_penalty, &["0", "0.0"]),
            ("function_call", &self.function_call, &["\"none\""]),
            ("functions", &self.functions, &["[]"]),
            ("logit_bias", &self.logit_bias, &["{}"]),
            ("modalities", &self.modalities, &["[\"text\"]"]),
            ("n", &self.n, &["1"]),
            ("prediction", &self.prediction, &[]),
            ("presence_penalty", &self.presence_penalty, &["0", "0.0"]),
            ("response_format", &self.response_format, &["{\"type\":\"text\"}"]),
            ("suffix", &self.suffix, &["\"\""]),
            ("tool_choice", &self.tool_choice, &["\"none\"", "\"auto\""]),
            ("tools", &self.tools, &["[]"]),
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

    /// Whether a stream ends with the usage of tokens.
    pub(crate) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    /// The conversation of a chat.
    ///
    /// # Errors
    /// If a role or content is not supported, or the last message is not the user's.
    pub(crate) fn conversation(&self) -> Result<Conversation> {
        Conversation::of(&self.messages)
    }

    /// The text to continue.
    pub(crate) fn prompt(&self) -> Result<&str> {
        match &self.prompt {
            Some(OneOrMany::One(prompt)) => Ok(prompt),
            Some(OneOrMany::Many(prompts)) if prompts.len() == 1 => Ok(&prompts[0]),
            Some(OneOrMany::Many(_)) => Err(ApiError::field("prompt", "one prompt at a time is supported")),
            None => Err(ApiError::field("prompt", "prompt is missing")),
        }
    }

    /// The number of tokens that the request asks for.
    pub(crate) fn max_tokens(&self) -> Option<usize> {
        self.max_completion_tokens.or(self.max_tokens)
    }

    /// The sampling parameters: greedy unless a temperature is given. `max_tokens` is for requests that ask for no number, and
    /// `random_seed` draws the seed of those that sample without one.
    ///
    /// # Errors
    /// If a value is out of its range.
    pub(crate) fn sampling(&self, max_tokens: usize, random_seed: impl FnOnce() -> u32) -> Result<Sampling> {
        let default = Sampling::default();
        let top_k = self.top_k.unwrap_or(0);
        let temperature = self.temperature.unwrap_or(0.0);
        let seed = match self.seed {
            Some(seed) => seed as u64,
            None if temperature > 0.0 => random_seed().into(),
            None => 0,
        };
        let sampling = Sampling {
            temperature,
            // -1 keeps all tokens, as in vLLM.
            top_k: if top_k == -1 { 0 } else { usize::try_from(top_k).map_err(|_| negative("top_k"))? },
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            seed,
            max_tokens: self.max_tokens().unwrap_or(max_tokens),
            min_tokens: self.min_tokens.unwrap_or(0),
            stop: match &self.stop {
                None => Vec::new(),
                Some(OneOrMany::One(stop)) => vec![stop.clone()],
                Some(OneOrMany::Many(stops)) => stops.clone(),
            },
            logprobs: self.logprobs()?,
        };
        if sampling.stop.len() > MAX_STOPS || sampling.stop.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
            let message = format!("{MAX_STOPS} stop texts of {MAX_STOP_BYTES} bytes at most");
            return Err(ApiError::field("stop", message));
        }
        sampling.check()?;
        Ok(sampling)
    }

    /// The number of alternatives whose log probabilities are given with each token; `None` gives no log probabilities.
    fn logprobs(&self) -> Result<Option<usize>> {
        let wrong = |name: &str| ApiError::field(name, format!("{name} is at most {MAX_TOP_LOGPROBS}"));
        match &self.logprobs {
            None | Some(Value::Null | Value::Bool(false)) => Ok(None),
            Some(Value::Bool(true)) => {
                let top = self.top_logprobs.unwrap_or(0);
                if top <= MAX_TOP_LOGPROBS { Ok(Some(top)) } else { Err(wrong("top_logprobs")) }
            }
            Some(Value::Number(top)) => {
                let top = top
                    .as_u64()
                    .filter(|top| *top <= MAX_TOP_LOGPROBS as u64)
                    .ok_or_else(|| wrong("logprobs"))?;
                Ok(Some(top as usize))
            }
            Some(_) => Err(ApiError::field("logprobs", "logprobs is true, false or a number")),
        }
    }
}

fn negative(name: &str) -> ApiError {
    ApiError::field(name, format!("{name} is negative"))
}

#[cfg(test)]
mod tests {
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
                {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]}"#,
        );
        request.check("m").unwrap();
        let Conversation { system, history, question } = request.conversation().unwrap();
        assert_eq!((system.as_deref(), question.as_str()), (Some("Be brief."), "d"));
        assert_eq!(history.iter().map(|turn| turn.content.as_str()).collect::<Vec<_>>(), ["ab", "c"]);
        assert_eq!(request.sampling(9, || 7).unwrap(), Sampling { max_tokens: 9, ..Sampling::default() });
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (json, named) in [
            (r#"{"tools": [{"type": "function"}]}"#, "tools"),
            (r#"{"n": 2}"#, "n"),
            (r#"{"response_format": {"type": "json_object"}}"#, "response_format"),
            (r#"{"logit_bias": {"5": 1}}"#, "logit_bias"),
            (r#"{"presence_penalty": 0.5}"#, "presence_penalty"),
        ] {
            assert_eq!(request(json).check("m").unwrap_err().param.as_deref(), Some(named));
        }
        let harmless =
            r#"{"tools": [], "n": 1, "response_format": {"type": "text"}, "logit_bias": null, "user": "x"}"#;
        request(harmless).check("m").unwrap();
        assert_eq!(request(r#"{"model": "other"}"#).check("m").unwrap_err().status, 404);
    }

    #[test]
    fn wrong_messages_and_numbers_name_their_field() {
        let param = |error: ApiError| error.param.unwrap();
        for (json, named) in [
            (r#"{"messages": []}"#, "messages"),
            (r#"{"messages": [{"role": "assistant", "content": "x"}]}"#, "messages"),
            (r#"{"messages": [{"role": "tool", "content": "x"}]}"#, "messages[0].role"),
            (r#"{"messages": [{"role": "user"}]}"#, "messages[0].content"),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}"#,
                "messages[0].content",
            ),
        ] {
            assert_eq!(param(request(json).conversation().unwrap_err()), named, "{json}");
        }
        for (json, named) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"max_tokens": 0}"#, "max_tokens"),
            (r#"{"logprobs": true, "top_logprobs": 21}"#, "top_logprobs"),
            (r#"{"logprobs": "yes"}"#, "logprobs"),
        ] {
            assert_eq!(param(request(json).sampling(9, || 7).unwrap_err()), named, "{json}");
        }
        assert_eq!(
            request(r#"{"logprobs": true, "top_logprobs": 3}"#).sampling(9, || 7).unwrap().logprobs,
            Some(3)
        );
        assert_eq!(request(r#"{"stop": "x", "top_k": -1}"#).sampling(9, || 7).unwrap().stop, ["x"]);
    }

    #[test]
    fn documents_are_named_given_or_searched() {
        let request = request(
            r#"{"documents": [{"id": "doc-1"}, {"title": "t", "text": "x"}, {"text": "y"}],
                "refrain": {"method": {"name": "a3", "ratio": 0.3}, "evict": "h2o"}}"#,
        );
        let Some(Documents::List(documents)) = &request.documents else { panic!() };
        assert!(matches!(&documents[0], DocumentReference::Id { id } if id == "doc-1"));
        assert!(matches!(&documents[2], DocumentReference::Text(document) if document.text == "y"));
        request.check("m").unwrap();
        assert_eq!(request.refrain.method, Some(serde_json::json!({ "name": "a3", "ratio": 0.3 })));
        let beside: CompletionRequest =
            serde_json::from_str(r#"{"refrain": {"method": "a3", "ratio": 0.3}}"#).unwrap();
        let error = beside.check("m").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("refrain.ratio"));
        assert!(error.message.contains("stands with its method"), "{}", error.message);
    }

    #[test]
    fn a_seed_is_drawn_where_tokens_are_sampled_without_one() {
        for (json, seed) in [
            (r#"{"temperature": 0.5}"#, 7),
            (r#"{"temperature": 0.5, "seed": 3}"#, 3),
            (r#"{"temperature": 0.5, "seed": null}"#, 7),
            (r#"{"temperature": 0}"#, 0),
            (r#"{}"#, 0),
        ] {
            assert_eq!(request(json).sampling(9, || 7).unwrap().seed, seed, "{json}");
        }
    }
}
