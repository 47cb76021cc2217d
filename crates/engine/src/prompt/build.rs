//! Prompts from documents and a question, and from parts that benchmarks give as they are.

use refrain_model::{Layout, Message, ModelError, Piece, PromptParts, Specials};
use serde_json::Value as Json;

use super::document::Document;
use super::layout::{Prompt, PromptChunk};
use crate::engine::Engine;
use crate::{Error, Result};

/// The texts around documents and question in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instructions {
    /// The system message; none leaves it to the model's template.
    pub system: Option<String>,
    /// Said before the documents.
    pub before_documents: String,
    /// Said between the documents and the question.
    pub before_question: String,
    /// The tools that the model may call, in OpenAI's notation. A model whose template knows no tools is told of them in the system message.
    pub tools: Vec<Json>,
    /// Earlier turns of the conversation.
    pub history: Vec<Message>,
    /// Whether a model that can do both thinks before it answers, where its chat template has `enable_thinking`. Its thoughts are text
    /// of the answer, and a grammar holds for the text behind them.
    pub thinking: bool,
}

impl Default for Instructions {
    fn default() -> Self {
        Instructions {
            system: None,
            before_documents: "Answer the question from these documents.\n\n".to_owned(),
            before_question:
                "Answer the question from the documents above, in one short sentence.\nQuestion: ".to_owned(),
            tools: Vec::new(),
            history: Vec::new(),
            thinking: false,
        }
    }
}

/// A prompt's parts as text. Nothing is trimmed, and nothing put between them but what the chat template says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts<'a> {
    /// Text before the documents.
    pub before: &'a str,
    /// Documents, with whatever separates them.
    pub documents: &'a [String],
    /// Whether documents are cut every so many tokens, and each chunk counts as a document of its own: papers measure texts
    /// without bounds so. Otherwise they are cut by their structure.
    pub apart: bool,
    /// Text after the documents.
    pub question: &'a str,
    /// How the answer begins, after the chat template's tail.
    pub answer_prefix: &'a str,
    /// Whether the model's chat template goes around it, if it has one.
    pub chat: bool,
}

impl Engine {
    /// The prompt of a question over documents. Each part is tokenised once, alone.
    ///
    /// # Errors
    /// If the question is empty, or the chat template or tokenizer refuses a part.
    pub fn prompt(&self, documents: &[Document], question: &str, around: &Instructions) -> Result<Prompt> {
        self.prompt_of_chunks(self.chunks(documents)?, question, around)
    }

    /// The prompt of a question over documents that are cut into chunks already, as [`Engine::chunks`] cuts them.
    ///
    /// # Errors
    /// If the question is empty, or the chat template or tokenizer refuses a part.
    pub fn prompt_of_chunks(
        &self,
        chunks: Vec<PromptChunk>,
        question: &str,
        around: &Instructions,
    ) -> Result<Prompt> {
        if question.trim().is_empty() {
            return Err(Error::EmptyQuestion);
        }
        let asked = Message::text("user", question);
        let turns: Vec<Message> = around.history.iter().cloned().chain([asked]).collect();
        self.prompt_of_turns(chunks, &turns, around)
    }

    /// The prompt of a conversation over documents that are cut into chunks already, up to where the assistant's next
    /// turn begins. The documents stand in the user's first turn, so that a further turn leaves all that comes before it
    /// as it was. Of `around`, the history does not count.
    ///
    /// # Errors
    /// If no turn is the user's, all turns and the system message are empty, or the chat template or tokenizer refuses a
    /// part.
    pub fn prompt_of_turns(
        &self,
        chunks: Vec<PromptChunk>,
        turns: &[Message],
        around: &Instructions,
    ) -> Result<Prompt> {
        let mut texts = turns.iter().map(|turn| &turn.content).chain(&around.system);
        let says =
            texts.any(|text| !text.trim().is_empty()) || turns.iter().any(|turn| !turn.tool_calls.is_empty());
        let first = turns.iter().position(|turn| turn.role == "user").filter(|_| says);
        let Some(first) = first else { return Err(Error::EmptyQuestion) };
        // A question is the same text whether it is the last one or not.
        let trimmed = |turn: &Message| match turn.role.as_str() {
            "user" => Message { content: turn.content.trim().to_owned(), ..turn.clone() },
            _ => turn.clone(),
        };
        let asked = turns[first].content.trim();
        let (before_documents, question) = if chunks.is_empty() {
            (String::new(), asked.to_owned())
        } else {
            (around.before_documents.clone(), format!("{}{asked}", around.before_question))
        };
        let layout = Layout {
            system: around.system.clone(),
            tools: around.tools.clone(),
            history: turns[..first].iter().map(trimmed).collect(),
            before_documents,
            question,
            after: turns[first + 1..].iter().map(trimmed).collect(),
            thinking: around.thinking,
        };
        let calls = turns.iter().any(|turn| turn.role == "tool" || !turn.tool_calls.is_empty());
        let has_tools = calls || !layout.tools.is_empty();
        let layout = match has_tools && self.template_calls().is_none() {
            true => layout.with_tools_as_text(),
            false => layout,
        };
        let parts = match self.template() {
            Some(template) => match template.split(&layout) {
                // Phi-4's template writes calls of tools only where it is given the tools.
                Err(ModelError::ToolsIgnored) if layout.tools.is_empty() => {
                    template.split(&layout.with_tools_as_text())?
                }
                parts => parts?,
            },
            None => plain(layout.with_system_joined().unwrap_or(layout)),
        };
        let ends = self.around(&parts)?;
        Ok(Prompt { system_reusable: first == 0, chunks, ..ends })
    }

    /// The prompt of these parts, each tokenised once, alone.
    ///
    /// # Errors
    /// If nothing follows the documents, or the chat template or tokenizer refuses a part.
    pub fn compose(&self, parts: &Parts<'_>) -> Result<Prompt> {
        let text = |text: &str| Piece { text: text.to_owned(), literal: false };
        let mut around = match self.template().filter(|_| parts.chat) {
            Some(template) => template.split(&Layout {
                before_documents: parts.before.to_owned(),
                question: parts.question.to_owned(),
                ..Layout::default()
            })?,
            None => PromptParts {
                system: vec![text(parts.before)],
                question: vec![text(parts.question)],
                ..PromptParts::default()
            },
        };
        around.question.push(text(parts.answer_prefix));
        let mut prompt = self.around(&around)?;
        if prompt.question.is_empty() {
            return Err(Error::EmptyQuestion);
        }
        for (document, text) in parts.documents.iter().enumerate() {
            prompt.chunks.extend(self.cut_text(document, text, !parts.apart)?);
        }
        if parts.apart {
            for (index, chunk) in prompt.chunks.iter_mut().enumerate() {
                chunk.document = index;
            }
        }
        Ok(prompt)
    }

    /// The system and question parts of a prompt, with BOS where the model uses one.
    pub(crate) fn around(&self, parts: &PromptParts) -> Result<Prompt> {
        let mut system = self.tokenizer().encode_pieces(&parts.system)?;
        if let Some(bos) = self.tokenizer().bos().filter(|bos| system.first() != Some(bos)) {
            system.insert(0, bos);
        }
        let question = self.tokenizer().encode_pieces(&parts.question)?;
        let (tail, thinking) = (self.tail_of(&parts.question, &question)?, parts.thinking);
        Ok(Prompt { system, system_reusable: true, question, tail, thinking, ..Prompt::default() })
    }

    /// The [tail](Prompt::tail) of a question of these pieces: the tokens behind the first one of the template's last piece that no message
    /// can have.
    fn tail_of(&self, pieces: &[Piece], question: &[u32]) -> Result<usize> {
        let tokenizer = self.tokenizer();
        let last = pieces.iter().rfind(|piece| !piece.text.is_empty()).filter(|piece| piece.literal);
        let Some(last) = last else { return Ok(0) };
        let is_reserved = |id: &u32| tokenizer.is_reserved(*id);
        let reserved = tokenizer.encode(&last.text, Specials::Parse)?.into_iter().filter(is_reserved).count();
        let mut from_end = question.iter().rev().enumerate().filter(|(_, id)| is_reserved(id));
        let end = reserved.checked_sub(1).and_then(|others| from_end.nth(others));
        Ok(end.map_or(0, |(behind, _)| behind))
    }
}

/// The parts for a model without a chat template.
fn plain(layout: Layout) -> PromptParts {
    let text = |text: String| Piece { text, literal: false };
    let mut system: Vec<Piece> = layout.system.iter().map(|system| text(format!("{system}\n\n"))).collect();
    system.extend(layout.history.iter().map(|turn| text(format!("{}: {}\n", turn.role, turn.content))));
    system.push(text(layout.before_documents));
    let mut question = vec![text(format!("{}\nAnswer:", layout.question))];
    let answers_again = layout.after.last().is_some_and(|turn| turn.role == "assistant");
    question.extend(layout.after.into_iter().map(|turn| match turn.role.as_str() {
        "assistant" => text(turn.content),
        _ => text(format!("\n{}\nAnswer:", turn.content)),
    }));
    question.extend(answers_again.then(|| text("\nAnswer:".to_owned())));
    for pieces in [&mut system, &mut question] {
        pieces.retain(|piece| !piece.text.is_empty());
    }
    PromptParts { system, question, ..PromptParts::default() }
}
