//! How a request asks for tokens to be chosen.

use std::collections::BTreeMap;

use refrain::engine::{Sampling, StructuredOutput};
use serde_json::Value;

use super::format::{ResponseFormat, StructuredOutputs};
use super::numbers::whole;
use super::{CompletionRequest, OneOrMany};
use crate::api_error::{ApiError, Result};

/// Most stop texts.
const MAX_STOPS: usize = 16;
/// Most bytes of a stop text.
const MAX_STOP_BYTES: usize = 1024;
/// Most alternatives of a token.
const MAX_TOP_LOGPROBS: usize = 20;
/// Most tokens with a bias.
const MAX_BIASES: usize = 4096;

impl CompletionRequest {
    /// The form that the answer is held to, and the field that says so.
    ///
    /// # Errors
    /// If two fields say so, or one of them is wrong.
    pub(crate) fn structured_output(&self) -> Result<Option<(&'static str, StructuredOutput)>> {
        let format = self.response_format.as_ref().map(ResponseFormat::output).transpose()?.flatten();
        let structured =
            self.structured_outputs.as_ref().map(StructuredOutputs::output).transpose()?.flatten();
        match (format, structured) {
            (Some(_), Some(_)) => {
                let message = "response_format and structured_outputs cannot both be given";
                Err(ApiError::field("structured_outputs", message))
            }
            (Some(format), None) => Ok(Some(("response_format", format))),
            (None, structured) => Ok(structured.map(|output| ("structured_outputs", output))),
        }
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
        // -1 draws a seed, as in vLLM and llama.cpp.
        let seed = match self.seed.filter(|seed| *seed != -1) {
            Some(seed) => seed as u64,
            None if temperature > 0.0 => random_seed().into(),
            None => 0,
        };
        let sampling = Sampling {
            temperature,
            // -1 keeps all tokens, as in vLLM.
            top_k: if top_k == -1 { 0 } else { usize::try_from(top_k).map_err(|_| negative("top_k"))? },
            // 0 keeps the likeliest token alone, as in OpenAI's interface.
            top_p: self
                .top_p
                .map_or(default.top_p, |top_p| if top_p == 0.0 { f32::MIN_POSITIVE } else { top_p }),
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            logit_bias: self.logit_bias()?,
            seed,
            max_tokens: self.max_tokens()?.unwrap_or(max_tokens),
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
            None | Some(Value::Null | Value::Bool(false)) if self.top_logprobs.is_some_and(|top| top > 0) => {
                Err(ApiError::field("top_logprobs", "top_logprobs needs \"logprobs\": true"))
            }
            None | Some(Value::Null | Value::Bool(false)) => Ok(None),
            Some(Value::Bool(true)) => {
                let top = self.top_logprobs.unwrap_or(0);
                if top <= MAX_TOP_LOGPROBS { Ok(Some(top)) } else { Err(wrong("top_logprobs")) }
            }
            Some(Value::Number(top)) => {
                let top = whole(top).and_then(|top| usize::try_from(top).ok());
                top.filter(|top| *top <= MAX_TOP_LOGPROBS).map(Some).ok_or_else(|| wrong("logprobs"))
            }
            Some(_) => Err(ApiError::field("logprobs", "logprobs is true, false or a number")),
        }
    }

    /// The biases of tokens; their ids are keys of a JSON object, and so texts.
    fn logit_bias(&self) -> Result<BTreeMap<u32, f32>> {
        let biases = self.logit_bias.iter().flatten();
        let read = |(token, bias): (&String, &f32)| match token.parse() {
            Ok(token) => Ok((token, *bias)),
            Err(_) => Err(ApiError::field("logit_bias", format!("{token:?} is no id of a token"))),
        };
        let biases: BTreeMap<u32, f32> = biases.map(read).collect::<Result<_>>()?;
        if biases.len() > MAX_BIASES {
            return Err(ApiError::field("logit_bias", format!("{MAX_BIASES} tokens may have a bias")));
        }
        Ok(biases)
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
    fn wrong_numbers_name_their_field() {
        let param = |error: ApiError| error.param.unwrap();
        for (json, named) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": -0.1}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"max_tokens": 0}"#, "max_tokens"),
            (r#"{"max_tokens": -2}"#, "max_tokens"),
            (r#"{"max_completion_tokens": 0, "max_tokens": 5}"#, "max_completion_tokens"),
            (r#"{"logprobs": true, "top_logprobs": 21}"#, "top_logprobs"),
            (r#"{"logprobs": "yes"}"#, "logprobs"),
            (r#"{"top_logprobs": 5}"#, "top_logprobs"),
            (r#"{"logprobs": false, "top_logprobs": 1}"#, "top_logprobs"),
            (r#"{"presence_penalty": 2.5}"#, "presence_penalty"),
            (r#"{"frequency_penalty": -3}"#, "frequency_penalty"),
            (r#"{"logit_bias": {"x": 1}}"#, "logit_bias"),
            (r#"{"logit_bias": {"5": 101}}"#, "logit_bias"),
        ] {
            assert_eq!(param(request(json).sampling(9, || 7).unwrap_err()), named, "{json}");
        }
        assert_eq!(
            request(r#"{"logprobs": true, "top_logprobs": 3}"#).sampling(9, || 7).unwrap().logprobs,
            Some(3)
        );
        let logprobs = |json| request(json).sampling(9, || 7).unwrap().logprobs;
        assert_eq!((logprobs(r#"{"top_logprobs": 0}"#), logprobs(r#"{"top_logprobs": null}"#)), (None, None));
        assert_eq!((logprobs(r#"{"logprobs": 5}"#), logprobs(r#"{"logprobs": 5.0}"#)), (Some(5), Some(5)));
        let top_p = |json| request(json).sampling(9, || 7).unwrap().top_p;
        assert_eq!((top_p(r#"{"top_p": 0}"#), top_p(r#"{"top_p": 0.5}"#)), (f32::MIN_POSITIVE, 0.5));
        for (json, most) in [
            (r#"{"max_tokens": -1}"#, 9),
            (r#"{"max_completion_tokens": -1, "max_tokens": 5}"#, 5),
            (r#"{"max_completion_tokens": 4, "max_tokens": 5}"#, 4),
            (r#"{"n_predict": 4}"#, 4),
            (r#"{"max_tokens": 5.0}"#, 5),
            (r#"{"n_predict": 4, "max_tokens": 5}"#, 5),
        ] {
            assert_eq!(request(json).sampling(9, || 7).unwrap().max_tokens, most, "{json}");
        }
        assert_eq!(request(r#"{"stop": "x", "top_k": -1}"#).sampling(9, || 7).unwrap().stop, ["x"]);
    }

    #[test]
    fn a_seed_is_drawn_where_tokens_are_sampled_without_one() {
        for (json, seed) in [
            (r#"{"temperature": 0.5}"#, 7),
            (r#"{"temperature": 0.5, "seed": 3}"#, 3),
            (r#"{"temperature": 0.5, "seed": null}"#, 7),
            (r#"{"temperature": 0.5, "seed": -1}"#, 7),
            (r#"{"temperature": 0.5, "seed": -2}"#, u64::MAX - 1),
            (r#"{"seed": -1}"#, 0),
            (r#"{"temperature": 0}"#, 0),
            (r#"{}"#, 0),
        ] {
            assert_eq!(request(json).sampling(9, || 7).unwrap().seed, seed, "{json}");
        }
    }

    #[test]
    fn one_field_says_what_the_answer_looks_like() {
        use serde_json::json;
        let output = |json: Value| {
            let request: CompletionRequest = serde_json::from_value(json).unwrap();
            request.structured_output().map(|output| output.map(|(_, output)| output))
        };
        let schema = json!({"type": "integer"});
        let object = json!({"type": "object", "properties": {"a": schema}});
        let closed = json!({"type": "object", "properties": {"a": schema}, "additionalProperties": false});
        for (given, expected) in [
            (json!({"response_format": {"type": "text"}}), None),
            (json!({"response_format": null}), None),
            (json!({"response_format": {"type": "json_object"}}), Some(StructuredOutput::JsonObject)),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}}}),
                Some(StructuredOutput::JsonSchema(schema.clone())),
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"strict": true, "schema": object}}}),
                Some(StructuredOutput::JsonSchema(closed)),
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"strict": false, "schema": object}}}),
                Some(StructuredOutput::JsonSchema(object.clone())),
            ),
            (
                json!({"response_format": {"type": "json_object", "schema": schema}}),
                Some(StructuredOutput::JsonSchema(schema.clone())),
            ),
            (
                json!({"response_format": {"type": "json_schema", "schema": schema}}),
                Some(StructuredOutput::JsonSchema(schema.clone())),
            ),
            (
                json!({"structured_outputs": {"json": schema.to_string()}}),
                Some(StructuredOutput::JsonSchema(schema.clone())),
            ),
            (
                json!({"structured_outputs": {"choice": ["a", "b"]}}),
                Some(StructuredOutput::Choice(vec!["a".into(), "b".into()])),
            ),
            (json!({"structured_outputs": {"regex": "a+"}}), Some(StructuredOutput::Regex("a+".into()))),
            // All fields of vLLM's class.
            (
                json!({"structured_outputs": {"json": null, "regex": "a+", "choice": null, "grammar": null,
                    "json_object": null, "disable_fallback": false, "whitespace_pattern": null, "structural_tag": null}}),
                Some(StructuredOutput::Regex("a+".into())),
            ),
        ] {
            assert_eq!(output(given.clone()).unwrap(), expected, "{given}");
        }
        for given in [
            json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
            json!({"structured_outputs": {"json": "{"}}),
            json!({"structured_outputs": {"regex": "a", "disable_fallback": true}}),
            json!({"structured_outputs": {"structural_tag": "x"}}),
            json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
        ] {
            assert_eq!(output(given).unwrap_err().param.as_deref(), Some("structured_outputs"));
        }
        let none = json!({"response_format": {"type": "json_schema"}});
        assert_eq!(output(none).unwrap_err().param.as_deref(), Some("response_format"));
    }
}
