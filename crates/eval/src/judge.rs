//! A judge of answers: a model behind an OpenAI-compatible endpoint.

use std::fmt;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

use crate::{Error, Result};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Before the first retry; each further one waits twice as long.
const PAUSE: Duration = Duration::from_secs(1);
const RETRIES: usize = 3;
/// Most characters of a reply's body in an error.
const EXCERPT: usize = 300;

/// An endpoint and the model asked there.
pub struct Judge {
    endpoint: String,
    model: String,
    key: Option<String>,
    agent: ureq::Agent,
    pause: Duration,
}

/// Sampling options of a judge's reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct JudgeOptions {
    /// Temperature; 0 is greedy.
    pub temperature: f64,
    /// Nucleus; the endpoint's own if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Most new tokens.
    pub max_tokens: usize,
    /// Seed of the random choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

#[derive(Serialize)]
struct Request<'a> {
    model: &'a str,
    messages: [Message<'a>; 1],
    #[serde(flatten)]
    options: &'a JudgeOptions,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: &'a str,
}

#[derive(Deserialize)]
struct Reply {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    message: Content,
}

#[derive(Deserialize)]
struct Content {
    /// None where the model refuses.
    content: Option<String>,
}

/// Why there is no reply.
struct Failure {
    reason: String,
    /// Whether the request may succeed later.
    passing: bool,
}

impl Judge {
    /// A judge: a model of the endpoint `url`, as OpenAI's clients take it, such as `http://127.0.0.1:8080/v1`. `config` has the
    /// client's proxy and the authorities that it trusts.
    pub fn new(url: &str, model: &str, key: Option<String>, config: ConfigBuilder<AgentScope>) -> Judge {
        let config = config.timeout_global(Some(TIMEOUT)).http_status_as_error(false).build();
        Judge {
            endpoint: format!("{}/chat/completions", url.trim_end_matches('/')),
            model: model.into(),
            key,
            agent: config.into(),
            pause: PAUSE,
        }
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Asks for one word, before answers are made that are to be graded.
    ///
    /// # Errors
    /// Those of [`Judge::ask`].
    pub fn check(&self) -> Result<()> {
        // A model that reasons before it replies needs room for that.
        let options = JudgeOptions { max_tokens: 1024, ..JudgeOptions::default() };
        self.ask("Reply with the word yes.", &options).map(|_| ())
    }

    /// The model's reply. A busy or failing endpoint is asked again, after growing pauses.
    ///
    /// # Errors
    /// If the endpoint cannot be reached, refuses, or replies with something else than a chat completion.
    pub fn ask(&self, prompt: &str, options: &JudgeOptions) -> Result<String> {
        let messages = [Message { role: "user", content: prompt }];
        let body = serde_json::to_vec(&Request { model: &self.model, messages, options })
            .map_err(|error| self.error(Failure { reason: error.to_string(), passing: false }))?;
        let mut pause = self.pause;
        for _ in 0..RETRIES {
            match self.post(&body) {
                Err(failure) if failure.passing => thread::sleep(pause),
                reply => return reply.map_err(|failure| self.error(failure)),
            }
            pause *= 2;
        }
        self.post(&body).map_err(|failure| self.error(failure))
    }

    fn post(&self, body: &[u8]) -> std::result::Result<String, Failure> {
        let mut request = self.agent.post(&self.endpoint).content_type("application/json");
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let mut response = request.send(body).map_err(|error| Failure::of(&error))?;
        let status = response.status();
        let text = response.body_mut().read_to_string().map_err(|error| Failure::of(&error))?;
        let excerpt = self.excerpt(&text);
        if !status.is_success() {
            let passing = status.as_u16() == 429 || status.is_server_error();
            return Err(Failure { reason: format!("status {status}: {excerpt}"), passing });
        }
        let reply: Reply = serde_json::from_str(&text).map_err(|error| Failure {
            reason: format!("status {status}, but no chat completion ({error}): {excerpt}"),
            passing: false,
        })?;
        let first = reply.choices.into_iter().next();
        first.and_then(|choice| choice.message.content).ok_or_else(|| Failure {
            reason: format!("status {status}, but no reply in it: {excerpt}"),
            passing: false,
        })
    }

    /// The beginning of a body, without the key: an endpoint may quote it.
    fn excerpt(&self, body: &str) -> String {
        let key = self.key.as_deref().filter(|key| !key.is_empty());
        let body = key.map_or_else(|| body.into(), |key| body.replace(key, "***"));
        body.chars().take(EXCERPT).collect()
    }

    fn error(&self, Failure { reason, passing }: Failure) -> Error {
        Error::Judge { url: self.endpoint.clone(), reason, passing }
    }
}

impl Failure {
    /// The failure of a request without a reply. Faults of the request, such as a malformed URL, are not retried.
    fn of(error: &ureq::Error) -> Failure {
        use ureq::Error::{ConnectionFailed, HostNotFound, Io, Protocol, Timeout};
        let passing = matches!(error, ConnectionFailed | HostNotFound | Io(_) | Protocol(_) | Timeout(_));
        Failure { reason: error.to_string(), passing }
    }
}

impl fmt::Debug for Judge {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Judge")
            .field("endpoint", &self.endpoint)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests;
