//! Chat templates, rendered once with placeholders and split into the parts of a prompt.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};
use crate::files::ModelFiles;
use crate::tokenizer::{read_json, special_name};

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A piece of a part of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its text.
    pub text: String,
    /// Whether it comes from the template, whose special tokens count; if not, a user wrote it.
    pub literal: bool,
}

/// The two parts of a prompt between which its documents stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptParts {
    /// Everything before the documents.
    pub system: Vec<Piece>,
    /// Everything after them, with the template's tail.
    pub question: Vec<Piece>,
}

/// What a prompt says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The system message; none leaves it to the template.
    pub system: Option<String>,
    /// Said before the documents, in the same turn.
    pub before_documents: String,
    /// Said after them.
    pub question: String,
    /// Earlier turns.
    pub history: Vec<Message>,
}

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// Placeholders are `OPEN`, a letter for the part or a number for a turn, `CLOSE`: private-use characters, which no
/// template trims, and no template contains.
const OPEN: char = '\u{F8F0}';
const CLOSE: char = '\u{F8F1}';
/// Steps after which a template that does not end is given up.
const FUEL: u64 = 10_000_000;

impl ChatTemplate {
    /// The template of a model's files, if they have one.
    ///
    /// # Errors
    /// If it does not parse.
    pub fn open(files: &ModelFiles) -> Result<Option<ChatTemplate>> {
        let source = match (files.gguf(), files.folder()) {
            (Some(gguf), _) => gguf.opt_str("tokenizer.chat_template")?.map(|source| {
                let token = |key: &str| {
                    let id = gguf.opt_u32(key).ok().flatten()? as usize;
                    gguf.opt_strings("tokenizer.ggml.tokens").ok().flatten()?.get(id).cloned()
                };
                let bos = token("tokenizer.ggml.bos_token_id").unwrap_or_default();
                (source.to_owned(), bos, token("tokenizer.ggml.eos_token_id").unwrap_or_default())
            }),
            (None, Some(folder)) => {
                let config = read_json(&folder.join("tokenizer_config.json"))?;
                let name = |key| special_name(&config, key).unwrap_or_default();
                let file = std::fs::read_to_string(folder.join("chat_template.jinja")).ok();
                let source = match file.or_else(|| pick(config.get("chat_template")?)) {
                    Some(source) => Some(source),
                    None => {
                        read_json(&folder.join("chat_template.json"))?.get("chat_template").and_then(pick)
                    }
                };
                source.map(|source| (source, name("bos_token"), name("eos_token")))
            }
            (None, None) => None,
        };
        source.map(|(source, bos, eos)| ChatTemplate::new(&source, &bos, &eos)).transpose()
    }

    /// A template from its Jinja source and the texts of the BOS and EOS tokens.
    ///
    /// # Errors
    /// If it does not parse.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        if source.contains([OPEN, CLOSE]) {
            return Err(fail(&"it contains U+F8F0 or U+F8F1, which mark the parts of a prompt"));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| fail(&error))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| date(&format, SystemTime::now()));
        environment.add_template_owned("chat", source.to_owned()).map_err(|error| fail(&error))?;
        Ok(ChatTemplate { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// If the template refuses it.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let template = self.environment.get_template("chat").map_err(|error| fail(&error))?;
        let pair = |turn: &Message| {
            Value::from_pairs([("role", turn.role.clone()), ("content", turn.content.clone())])
        };
        let messages: Vec<Value> = messages.iter().map(pair).collect();
        let (bos_token, eos_token) = (&self.bos, &self.eos);
        template
            .render(context! { messages, add_generation_prompt, bos_token, eos_token })
            .map_err(|error| fail(&error))
    }

    /// The parts of a prompt. The template sees placeholders only, so no text of a user is ever searched.
    ///
    /// A template that refuses a system message, or leaves it out, gets it at the beginning of the user's turn.
    ///
    /// # Errors
    /// If the template refuses the conversation, or does not pass a part through once and whole.
    pub fn split(&self, layout: &Layout) -> Result<PromptParts> {
        let mark = |name: &str| format!("{OPEN}{name}{CLOSE}");
        let user = ["b", "d", "q"].map(mark).concat();
        let message = |role: &str, content: String| Message { role: role.to_owned(), content };
        let history = layout.history.iter().enumerate();
        let mut turns: Vec<Message> =
            history.map(|(i, turn)| message(&turn.role, mark(&i.to_string()))).collect();
        turns.push(message("user", user));
        let mut before = layout.before_documents.clone();
        if let Some(system) = &layout.system {
            let mut with_system = turns.clone();
            with_system.insert(0, message("system", mark("s")));
            match self.render(&with_system, true) {
                Ok(text) if text.contains(&mark("s")) => return parts(&text, layout, &before),
                _ => before = format!("{system}\n\n{before}"),
            }
        }
        parts(&self.render(&turns, true)?, layout, &before)
    }
}

/// Cuts a rendered template at its placeholders.
fn parts(rendered: &str, layout: &Layout, before: &str) -> Result<PromptParts> {
    let lost = || fail(&"it does not pass every message through once and unchanged");
    let text = |text: &str, literal| Piece { text: text.to_owned(), literal };
    let mut pieces = rendered.split(OPEN);
    let mut parts = [vec![text(pieces.next().unwrap_or_default(), true)], Vec::new()];
    let (mut part, mut seen) = (0, Vec::new());
    for piece in pieces {
        let (name, tail) = piece.split_once(CLOSE).ok_or_else(lost)?;
        if seen.contains(&name) {
            return Err(lost());
        }
        seen.push(name);
        match name {
            "d" => part = 1,
            "s" => parts[part].push(text(layout.system.as_deref().unwrap_or_default(), false)),
            "b" => parts[part].push(text(before, false)),
            "q" => parts[part].push(text(&layout.question, false)),
            turn => {
                let turn = turn.parse().ok().and_then(|i: usize| layout.history.get(i)).ok_or_else(lost)?;
                parts[part].push(text(&turn.content, false));
            }
        }
        parts[part].push(text(tail, true));
    }
    if seen.len() != 3 + layout.history.len() + usize::from(seen.contains(&"s")) {
        return Err(lost());
    }
    let [system, question] = parts.map(|mut pieces| {
        pieces.retain(|piece| !piece.text.is_empty());
        pieces
    });
    Ok(PromptParts { system, question })
}

fn fail(message: &dyn std::fmt::Display) -> ModelError {
    ModelError::ChatTemplate { message: message.to_string() }
}

/// A template is a string, or a list of named ones of which `default` counts.
fn pick(value: &serde_json::Value) -> Option<String> {
    let named = |value: &serde_json::Value| {
        let list = value.as_array()?;
        let default = list.iter().find(|entry| entry.get("name").is_some_and(|name| name == "default"));
        Some(default.or_else(|| list.first())?.get("template")?.as_str()?.to_owned())
    };
    value.as_str().map(str::to_owned).or_else(|| named(value))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// `strftime` of a time in UTC, for the fields that templates use.
fn date(format: &str, time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Days to a civil date, by eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let name = MONTHS[(month - 1) as usize];
    format
        .replace("%d", &format!("{day:02}"))
        .replace("%B", name)
        .replace("%b", &name[..3])
        .replace("%m", &format!("{month:02}"))
        .replace("%Y", &year.to_string())
        .replace("%H", &format!("{:02}", second / 3600))
        .replace("%M", &format!("{:02}", second / 60 % 60))
        .replace("%S", &format!("{:02}", second % 60))
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
