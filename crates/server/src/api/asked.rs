//! What a request for an answer says.

use std::collections::BTreeMap;

use refrain_engine::{Document, Sampling};
use refrain_model::Message;
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Problem, Result};

/// Most stop texts.
const STOPS: usize = 16;
/// Most bytes of a stop text.
const STOP: usize = 1024;
/// Most likeliest tokens that are told.
const TOP: usize = 20;

/// A request for an answer, of either kind. Fields that nobody knows are passed over.
#[derive(Debug, Deserialize)]
pub(crate) struct Asked {
    #[serde(default)]
    pub(crate) model: Option<String>,
    #[serde(default)]
    messages: Vec<Said>,
    #[serde(default)]
    prompt: Option<OneOrMany>,
    #[serde(default)]
    pub(crate) documents: Option<Documents>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) refrain: Extra,
    #[serde(default)]
    pub(crate) stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    min_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    logprobs: Option<Value>,
    top_logprobs: Option<usize>,
    // Not supported, unless they ask for nothing; they are named when they are refused.
    audio: Option<Value>,
    best_of: Option<Value>,
    echo: Option<Value>,
    frequency_penalty: Option<Value>,
    function_call: Option<Value>,
    functions: Option<Value>,
    logit_bias: Option<Value>,
    modalities: Option<Value>,
    n: Option<Value>,
    prediction: Option<Value>,
    presence_penalty: Option<Value>,
    response_format: Option<Value>,
    suffix: Option<Value>,
    tool_choice: Option<Value>,
    tools: Option<Value>,
    web_search_options: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
struct Said {
    role: String,
    #[serde(default)]
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

/// What to answer from.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Documents {
    /// `"search"`: the stored chunks that fit the question best.
    Search(String),
    /// These.
    These(Vec<Named>),
}

/// A document by its id, or as it is.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Named {
    /// One that has both is as it is: its id is the client's own.
    Text(Document),
    Id {
        id: String,
    },
}

/// `refrain: {…}`: how the prompt is computed and kept.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Extra {
    /// The fusion method: its text, or an object with its name and options.
    #[serde(default)]
    pub(crate) method: Option<Value>,
    /// The eviction policy: its text, or an object with its name and options.
    #[serde(default)]
    pub(crate) evict: Option<Value>,
    #[serde(default)]
    pub(crate) explain: Explain,
    /// Most chunks of a search.
    #[serde(default)]
    pub(crate) search: Option<usize>,
    /// Fields that are refused.
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

/// Whether to tell what the question attends to: its most attended tokens, or every token (`"tokens"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Explain {
    Most(bool),
    All(Every),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum Every {
    #[serde(rename = "tokens")]
    Tokens,
}

impl Default for Explain {
    fn default() -> Explain {
        Explain::Most(false)
    }
}

impl Extra {
    /// Refuses fields that are not known: an option that is written beside its method would be lost.
    fn check(&self) -> Result<()> {
        let Some(name) = self.unknown.keys().next() else { return Ok(()) };
        let message = format!(
            "refrain.{name} is not known: method, evict, explain, search; an option stands with its method, as in \
             {{\"method\": {{\"name\": \"a3\", \"ratio\": 0.2}}}}"
        );
        Err(Problem::field(&format!("refrain.{name}"), message))
    }
}

/// What is null is as if it were not there.
fn or_default<'de, D: serde::Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// A conversation: what the system says, earlier turns, and the question.
#[derive(Debug, PartialEq)]
pub(crate) struct Conversation {
    pub(crate) system: Option<String>,
    pub(crate) history: Vec<Message>,
    pub(crate) question: String,
}

impl Asked {
    /// Refuses what is not supported, by its name.
    pub(crate) fn check(&self, model: &str) -> Result<()> {
        for (name, value, nothing) in self.unsupported() {
            let asked = value.as_ref().filter(|value| !value.is_null()).map(Value::to_string);
            if asked.is_some_and(|asked| !nothing.contains(&asked.as_str())) {
                let problem = Problem::field(name, format!("{name} is not supported"));
                return Err(Problem { code: Some("unsupported_parameter"), ..problem });
            }
        }
        self.refrain.check()?;
        match &self.model {
            Some(name) if name != model => Err(Problem {
                code: Some("model_not_found"),
                param: Some("model".to_owned()),
                ..Problem::not_found("model", name)
            }),
            _ => Ok(()),
        }
    }

    /// OpenAI's fields that are not supported, as they are given, and the values of them that ask for nothing.
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

    /// Whether a stream ends with what the answer took.
    pub(crate) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }

    /// The conversation of a chat.
    pub(crate) fn conversation(&self) -> Result<Conversation> {
        let mut system: Vec<String> = Vec::new();
        let mut turns: Vec<Message> = Vec::new();
        for (index, said) in self.messages.iter().enumerate() {
            let content = said.text(index)?;
            match said.role.as_str() {
                "system" | "developer" if turns.is_empty() => system.push(content),
                "system" | "developer" => {
                    let message = "a system message stands before the others";
                    return Err(Problem::field(&format!("messages[{index}].role"), message));
                }
                "user" | "assistant" => turns.push(Message { role: said.role.clone(), content }),
                role => {
                    let message =
                        format!("role {role:?} is not supported: system, developer, user or assistant");
                    return Err(Problem::field(&format!("messages[{index}].role"), message));
                }
            }
        }
        match turns.pop() {
            Some(last) if last.role == "user" => {
                let system = (!system.is_empty()).then(|| system.join("\n\n"));
                Ok(Conversation { system, history: turns, question: last.content })
            }
            _ => Err(Problem::field("messages", "the last message must be the user's")),
        }
    }

    /// The text that is to be gone on with.
    pub(crate) fn prompt(&self) -> Result<&str> {
        match &self.prompt {
            Some(OneOrMany::One(prompt)) => Ok(prompt),
            Some(OneOrMany::Many(prompts)) if prompts.len() == 1 => Ok(&prompts[0]),
            Some(OneOrMany::Many(_)) => Err(Problem::field("prompt", "one prompt at a time is supported")),
            None => Err(Problem::field("prompt", "prompt is missing")),
        }
    }

    /// How tokens are chosen: greedy unless a temperature is given. `most` tokens if no number is.
    pub(crate) fn sampling(&self, most: usize) -> Result<Sampling> {
        let default = Sampling::default();
        let top_k = self.top_k.unwrap_or(0);
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(0.0),
            // -1 is all, as in vLLM.
            top_k: if top_k == -1 { 0 } else { usize::try_from(top_k).map_err(|_| negative("top_k"))? },
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            seed: self.seed.unwrap_or(0) as u64,
            max_tokens: self.max_completion_tokens.or(self.max_tokens).unwrap_or(most),
            min_tokens: self.min_tokens.unwrap_or(0),
            stop: match &self.stop {
                None => Vec::new(),
                Some(OneOrMany::One(stop)) => vec![stop.clone()],
                Some(OneOrMany::Many(stops)) => stops.clone(),
            },
            logprobs: self.likeliest()?,
        };
        if sampling.stop.len() > STOPS || sampling.stop.iter().any(|stop| stop.len() > STOP) {
            return Err(Problem::field("stop", format!("{STOPS} stop texts of {STOP} bytes at most")));
        }
        sampling.check()?;
        Ok(sampling)
    }

    /// How many of the likeliest tokens are told with each; none tells nothing.
    fn likeliest(&self) -> Result<Option<usize>> {
        let wrong = |name: &str| Problem::field(name, format!("{name} is at most {TOP}"));
        match &self.logprobs {
            None | Some(Value::Null | Value::Bool(false)) => Ok(None),
            Some(Value::Bool(true)) => {
                let top = self.top_logprobs.unwrap_or(0);
                if top <= TOP { Ok(Some(top)) } else { Err(wrong("top_logprobs")) }
            }
            Some(Value::Number(top)) => {
                let top = top.as_u64().filter(|top| *top <= TOP as u64).ok_or_else(|| wrong("logprobs"))?;
                Ok(Some(top as usize))
            }
            Some(_) => Err(Problem::field("logprobs", "logprobs is true, false or a number")),
        }
    }
}

fn negative(name: &str) -> Problem {
    Problem::field(name, format!("{name} is negative"))
}

impl Said {
    fn text(&self, index: usize) -> Result<String> {
        let wrong = |what: &str| Problem::field(&format!("messages[{index}].content"), what.to_owned());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(json: &str) -> Asked {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_conversation_is_taken_apart() {
        let asked = asked(
            r#"{"model": "m", "temperature": null, "whatever": {"x": 1}, "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]}"#,
        );
        asked.check("m").unwrap();
        let Conversation { system, history, question } = asked.conversation().unwrap();
        assert_eq!((system.as_deref(), question.as_str()), (Some("Be brief."), "d"));
        assert_eq!(history.iter().map(|turn| turn.content.as_str()).collect::<Vec<_>>(), ["ab", "c"]);
        assert_eq!(asked.sampling(9).unwrap(), Sampling { max_tokens: 9, ..Sampling::default() });
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
            assert_eq!(asked(json).check("m").unwrap_err().param.as_deref(), Some(named));
        }
        let harmless =
            r#"{"tools": [], "n": 1, "response_format": {"type": "text"}, "logit_bias": null, "user": "x"}"#;
        asked(harmless).check("m").unwrap();
        assert_eq!(asked(r#"{"model": "other"}"#).check("m").unwrap_err().status, 404);
    }

    #[test]
    fn wrong_messages_and_numbers_name_their_field() {
        let param = |problem: Problem| problem.param.unwrap();
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
            assert_eq!(param(asked(json).conversation().unwrap_err()), named, "{json}");
        }
        for (json, named) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"max_tokens": 0}"#, "max_tokens"),
            (r#"{"logprobs": true, "top_logprobs": 21}"#, "top_logprobs"),
            (r#"{"logprobs": "yes"}"#, "logprobs"),
        ] {
            assert_eq!(param(asked(json).sampling(9).unwrap_err()), named, "{json}");
        }
        assert_eq!(asked(r#"{"logprobs": true, "top_logprobs": 3}"#).sampling(9).unwrap().logprobs, Some(3));
        assert_eq!(asked(r#"{"stop": "x", "top_k": -1}"#).sampling(9).unwrap().stop, ["x"]);
    }

    #[test]
    fn documents_are_named_given_or_searched() {
        let asked = asked(
            r#"{"documents": [{"id": "doc-1"}, {"title": "t", "text": "x"}, {"text": "y"}],
                "refrain": {"method": {"name": "a3", "ratio": 0.3}, "evict": "h2o"}}"#,
        );
        let Some(Documents::These(documents)) = &asked.documents else { panic!() };
        assert!(matches!(&documents[0], Named::Id { id } if id == "doc-1"));
        assert!(matches!(&documents[2], Named::Text(document) if document.text == "y"));
        asked.check("m").unwrap();
        assert_eq!(asked.refrain.method, Some(serde_json::json!({ "name": "a3", "ratio": 0.3 })));
        let beside: Asked = serde_json::from_str(r#"{"refrain": {"method": "a3", "ratio": 0.3}}"#).unwrap();
        let problem = beside.check("m").unwrap_err();
        assert_eq!(problem.param.as_deref(), Some("refrain.ratio"));
        assert!(problem.message.contains("stands with its method"), "{}", problem.message);
    }
}
