//! Chat templates: the Jinja programs that models bring along to write a conversation as one text.
//!
//! A prompt is made of parts that different people wrote, and a user's text must not be able to pass for the
//! template's. So the template is rendered once with placeholders for all that is not its own, and cut at them
//! ([`ChatTemplate::split`]); a rendered text is never searched for a user's. Definitions, calls and results of
//! tools are users' texts as well, also where a template writes them as JSON. Of an answer, the marks around thoughts alone
//! are taken for the template's.

mod bounds;
mod environment;
mod message;
mod pieces;
mod placeholder;
mod split;
mod switches;
mod thoughts;
mod tools_as_text;
mod values;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use minijinja::{Environment, Value, context};
use serde::Deserialize;
use serde_json::Value as Json;

use self::bounds::LateThreads;
pub(crate) use self::environment::json_text;
pub use self::message::{Message, ToolCall};
pub(crate) use self::message::{function_of, tool_name};
pub use self::split::{Layout, PromptParts};
use self::thoughts::Thoughts;
pub use self::thoughts::{THOUGHT_MARKS, Thinking};
use self::values::{Texts, Turn, TurnText};
use crate::error::{ModelError, Result, template_error};
use crate::files::ModelFiles;
use crate::gguf::Gguf;
use crate::safetensors::read_json;
use crate::tokenizer::{BosEos, bos_eos};

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    environment: Arc<Environment<'static>>,
    /// The environment whose JSON marks users' texts.
    marking: Arc<Environment<'static>>,
    bos_eos: BosEos,
    /// Renderings that have passed their deadline.
    late: LateThreads,
    /// The part of an earlier answer with thoughts that it writes, once that was asked for.
    thoughts: OnceLock<Thoughts>,
    /// The template of conversations with tools, where it is another.
    tool_use: Option<Box<ChatTemplate>>,
}

/// The name of the template of conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The sources of a model's templates.
#[derive(Debug, PartialEq, Eq)]
struct Sources {
    default: String,
    tool_use: Option<String>,
}

/// A chat template in a file: one, or several by name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Source {
    One(String),
    Named(Vec<NamedSource>),
}

#[derive(Debug, Deserialize)]
struct NamedSource {
    name: String,
    template: String,
}

/// `tokenizer_config.json` or `chat_template.json`, as far as the template goes.
#[derive(Debug, Deserialize)]
struct TemplateFile {
    chat_template: Option<Source>,
}

impl ChatTemplate {
    /// The template of an opened model: `tokenizer.chat_template` of a GGUF file; of a folder `chat_template.jinja`,
    /// `chat_template.json` or the entry in `tokenizer_config.json`. `None` if the model has none. A model that has another one
    /// named `tool_use` beside it gets that one for conversations with tools.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] if it is no valid template, and the errors of reading the files.
    pub fn open(files: &ModelFiles) -> Result<Option<Self>> {
        let sources = match files.gguf() {
            Some(gguf) => gguf_sources(gguf)?,
            None => folder_sources(files.path())?,
        };
        let Some(Sources { default, tool_use }) = sources else { return Ok(None) };
        let BosEos { bos, eos } = bos_eos(files)?;
        let new = |source: &str| Self::new(source, bos.as_deref(), eos.as_deref());
        let tool_use = tool_use.as_deref().map(new).transpose()?.map(Box::new);
        Ok(Some(Self { tool_use, ..new(&default)? }))
    }

    /// A template from its source, and the text of the BOS and EOS tokens that it may write.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] if it is no valid template, or has more than 64 KiB.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self> {
        bounds::check_size(source.len() as u64)?;
        placeholder::check_source(source)?;
        let (source, late) = (source.to_owned(), LateThreads::default());
        let compiled = source.clone();
        let environment = move |marks| {
            let environment = environment::environment(&compiled, marks);
            let wrong = |e| template_error(format!("is not valid: {}", describe(&e)));
            environment.map(Arc::new).map_err(wrong)
        };
        let (environment, marking) =
            bounds::on_large_stack(&late, move || Ok((environment(false)?, environment(true)?)))?;
        let bos_eos = BosEos { bos: bos.map(str::to_owned), eos: eos.map(str::to_owned) };
        Ok(Self { source, environment, marking, bos_eos, late, thoughts: OnceLock::new(), tool_use: None })
    }

    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The part of an earlier answer with thoughts that the template writes. A template that could not be rendered, for want of a thread for
    /// instance, is asked again the next time.
    fn thoughts(&self) -> Thoughts {
        if let Some(known) = self.thoughts.get() {
            return *known;
        }
        match self.render(&Thoughts::probe(), &[], true) {
            Ok(written) => *self.thoughts.get_or_init(|| Thoughts::of(&written)),
            Err(_) => Thoughts::Kept,
        }
    }

    /// The template of conversations with tools.
    pub(crate) fn with_tools(&self) -> &ChatTemplate {
        self.tool_use.as_deref().unwrap_or(self)
    }

    /// The whole conversation as one text, as the model's authors would write it. Nothing in it tells the template's
    /// text from a user's: for prompts there is [`ChatTemplate::split`].
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] if the template refuses the conversation.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Json],
        add_generation_prompt: bool,
    ) -> Result<String> {
        if !tools.is_empty()
            && let Some(tool_use) = &self.tool_use
        {
            return tool_use.render(messages, tools, add_generation_prompt);
        }
        let turn = |message| Turn::new(message, TurnText::Said(message.content.clone()));
        let turns: Vec<Turn<'_>> = messages.iter().map(turn).collect();
        self.write(&self.environment, &mut Texts::plain(), (&turns, tools), true, add_generation_prompt)
    }

    /// The text of turns and tools in one of the environments.
    fn write(
        &self,
        environment: &Arc<Environment<'static>>,
        texts: &mut Texts,
        (turns, tools): (&[Turn<'_>], &[Json]),
        thinking: bool,
        add_generation_prompt: bool,
    ) -> Result<String> {
        // As in transformers: absent tools are none, not undefined; an absent token is undefined.
        let text = |token: &Option<String>| token.as_deref().map_or(Value::UNDEFINED, Value::from);
        let context = context! {
            messages => texts.messages(turns, tools),
            add_generation_prompt => add_generation_prompt,
            enable_thinking => thinking,
            bos_token => text(&self.bos_eos.bos),
            eos_token => text(&self.bos_eos.eos),
            tools => texts.tools(tools),
            documents => Value::from(()),
        };
        let environment = environment.clone();
        bounds::on_large_stack(&self.late, move || {
            let template = environment.get_template(environment::NAME);
            let written = template.and_then(|template| template.render(context));
            written.map_err(|e| template_error(format!("cannot write this conversation: {}", describe(&e))))
        })
    }
}

/// The template engine's message, with the errors behind it.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

fn gguf_sources(gguf: &Gguf) -> Result<Option<Sources>> {
    let source = |key: &str| Ok(gguf.opt_str(key)?.map(str::to_owned));
    let Some(default) = source("tokenizer.chat_template")? else { return Ok(None) };
    Ok(Some(Sources { default, tool_use: source(&format!("tokenizer.chat_template.{TOOL_USE}"))? }))
}

fn folder_sources(folder: &Path) -> Result<Option<Sources>> {
    if let Some(default) = jinja(&folder.join("chat_template.jinja"))? {
        let tool_use = jinja(&folder.join("additional_chat_templates").join(format!("{TOOL_USE}.jinja")))?;
        return Ok(Some(Sources { default, tool_use }));
    }
    for name in ["chat_template.json", "tokenizer_config.json"] {
        let path = folder.join(name);
        if path.is_file()
            && let Some(source) = read_json::<TemplateFile>(&path)?.chat_template
        {
            return chosen(source, &path).map(Some);
        }
    }
    Ok(None)
}

/// The template in a file of its own, if there is one.
fn jinja(path: &Path) -> Result<Option<String>> {
    if !path.is_file() {
        return Ok(None);
    }
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    bounds::check_size(std::fs::metadata(path).map_err(io)?.len())?;
    std::fs::read_to_string(path).map_err(io).map(Some)
}

/// The templates for conversations, of those that a file has.
fn chosen(source: Source, path: &Path) -> Result<Sources> {
    let mut named = match source {
        Source::One(default) => return Ok(Sources { default, tool_use: None }),
        Source::Named(named) => named,
    };
    let mut take = |name: &str| {
        let at = named.iter().position(|source| source.name == name)?;
        Some(named.swap_remove(at).template)
    };
    let default = take("default")
        .ok_or_else(|| template_error(format!("in {} has no variant named 'default'", path.display())))?;
    Ok(Sources { default, tool_use: take(TOOL_USE) })
}

#[cfg(test)]
#[path = "chat_template_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "chat_template/bounds_tests.rs"]
mod bounds_tests;

#[cfg(test)]
#[path = "chat_template/tools_tests.rs"]
mod tools_tests;
