//! Prompts from documents and a question, and from parts that benchmarks give as they are.

use refrain_model::{Layout, Message, Piece, PromptParts};

use super::document::Document;
use super::layout::{Prompt, PromptChunk};
use crate::engine::Engine;
use crate::{Error, Result};

/// Most characters of a title that name its chunks.
const LABEL: usize = 60;

/// The texts around documents and question in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instructions {
    /// The system message; none leaves it to the model's template.
    pub system: Option<String>,
    /// Said before the documents.
    pub before_documents: String,
    /// Said between the documents and the question.
    pub before_question: String,
    /// Earlier turns of the conversation.
    pub history: Vec<Message>,
}

impl Default for Instructions {
    fn default() -> Self {
        Instructions {
            system: None,
            before_documents: "Answer the question from these documents.\n\n".to_owned(),
            before_question:
                "Answer the question from the documents above, in one short sentence.\nQuestion: ".to_owned(),
            history: Vec::new(),
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
    /// Whether each chunk of a document counts as a document of its own: of a text whose parts have no bounds of theirs.
    pub apart: bool,
    /// Text after the documents.
    pub question: &'a str,
    /// How the answer begins, after the chat template's tail.
    pub answer_prefix: &'a str,
    /// Whether the model's chat template goes around it, if it has one.
    pub chat: bool,
}

impl Engine {
    /// Cuts documents into chunks of at most [`Settings::chunk_tokens`](crate::Settings::chunk_tokens); a chunk
    /// never crosses a document.
    ///
    /// # Errors
    /// If a text cannot be tokenised.
    pub fn chunks(&self, documents: &[Document]) -> Result<Vec<PromptChunk>> {
        let mut chunks = Vec::new();
        for (index, document) in documents.iter().enumerate() {
            let tokens = self.tokenize(&document.prompt_text())?;
            let heading =
                || document.text.trim().lines().next().unwrap_or_default().trim_start_matches('#').trim();
            let title = match (document.title.trim(), heading()) {
                ("", "") => format!("document {}", index + 1),
                ("", heading) => heading.chars().take(LABEL).collect(),
                (title, _) => title.chars().take(LABEL).collect(),
            };
            self.cut(index, &title, &tokens, &mut chunks);
        }
        Ok(chunks)
    }

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
        let question = question.trim();
        if question.is_empty() {
            return Err(Error::EmptyQuestion);
        }
        let (before, asked) = if chunks.is_empty() {
            (String::new(), question.to_owned())
        } else {
            (around.before_documents.clone(), format!("{}{question}", around.before_question))
        };
        let parts = match self.template() {
            Some(template) => template.split(&Layout {
                system: around.system.clone(),
                before_documents: before,
                question: asked,
                history: around.history.clone(),
            })?,
            None => plain(around, before, asked),
        };
        let ends = self.around(&parts)?;
        Ok(Prompt { system_reusable: around.history.is_empty(), chunks, ..ends })
    }

    /// The prompt of these parts, each tokenised once, alone.
    ///
    /// # Errors
    /// If nothing follows the documents, or the chat template or tokenizer refuses a part.
    pub fn compose(&self, parts: &Parts<'_>) -> Result<Prompt> {
        let text = |text: &str| Piece { text: text.to_owned(), literal: false };
        let mut around = match self.template().filter(|_| parts.chat) {
            Some(template) => template.split(&Layout {
                system: None,
                before_documents: parts.before.to_owned(),
                question: parts.question.to_owned(),
                history: Vec::new(),
            })?,
            None => PromptParts { system: vec![text(parts.before)], question: vec![text(parts.question)] },
        };
        around.question.push(text(parts.answer_prefix));
        let mut prompt = self.around(&around)?;
        if prompt.question.is_empty() {
            return Err(Error::EmptyQuestion);
        }
        for (document, text) in parts.documents.iter().enumerate() {
            let title = format!("document {}", document + 1);
            self.cut(document, &title, &self.tokenize(text)?, &mut prompt.chunks);
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
        Ok(Prompt { system, system_reusable: true, chunks: Vec::new(), question })
    }

    /// Cuts a document's tokens into chunks.
    pub(crate) fn cut(&self, document: usize, title: &str, tokens: &[u32], chunks: &mut Vec<PromptChunk>) {
        let cut = tokens.chunks(self.settings().chunk_tokens).map(<[u32]>::to_vec).collect();
        let named = |chunk| PromptChunk { title: title.to_owned(), document, ..chunk };
        chunks.extend(self.whole_document(cut).into_iter().map(named));
    }

    /// The chunks of a document, all in order, by their tokens.
    pub fn whole_document(&self, chunks: Vec<Vec<u32>>) -> Vec<PromptChunk> {
        let (parts, mut before) = (chunks.len(), Vec::new());
        let chunk = |(part, tokens): (usize, Vec<u32>)| {
            let left = self.left_of(tokens.len(), &before).to_vec();
            before.extend_from_slice(&tokens);
            PromptChunk { left, part: (part, parts), ..PromptChunk::whole(0, "", tokens) }
        };
        chunks.into_iter().enumerate().map(chunk).collect()
    }

    /// The last of the tokens `before` a chunk of so many tokens that it is prefilled behind: as many as the
    /// [setting](crate::Settings::left_tokens) says, and the context leaves room for.
    pub fn left_of<'t>(&self, tokens: usize, before: &'t [u32]) -> &'t [u32] {
        let room = self.longest_context().saturating_sub(tokens);
        &before[before.len() - before.len().min(self.settings().left_tokens).min(room)..]
    }
}

/// The parts for a model without a chat template.
fn plain(around: &Instructions, before: String, asked: String) -> PromptParts {
    let text = |text: String| Piece { text, literal: false };
    let mut system: Vec<Piece> = around.system.iter().map(|system| text(format!("{system}\n\n"))).collect();
    system.extend(around.history.iter().map(|turn| text(format!("{}: {}\n", turn.role, turn.content))));
    system.push(text(before));
    system.retain(|piece| !piece.text.is_empty());
    PromptParts { system, question: vec![text(format!("{asked}\nAnswer:"))] }
}
