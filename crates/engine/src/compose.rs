//! Prompts of parts that are taken as they are: what benchmarks ask for.

use refrain_fusion::{FusionMethod, Summarize};
use refrain_model::{Layout, Piece, PromptParts};

use crate::{Engine, Error, Prompt, PromptChunk, Result};

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
    /// The prompt of these parts, each tokenised once, alone.
    ///
    /// # Errors
    /// If nothing follows the documents, or the chat template or tokenizer refuses a part.
    pub fn compose(&self, parts: &Parts<'_>) -> Result<Prompt> {
        let text = |text: &str| Piece { text: text.to_owned(), literal: false };
        let mut around = match self.template.as_ref().filter(|_| parts.chat) {
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
        let mut system = self.tokenizer.encode_pieces(&parts.system)?;
        if let Some(bos) = self.tokenizer.bos().filter(|bos| system.first() != Some(bos)) {
            system.insert(0, bos);
        }
        let question = self.tokenizer.encode_pieces(&parts.question)?;
        Ok(Prompt { system, system_reusable: true, chunks: Vec::new(), question })
    }

    /// Cuts a document's tokens into chunks.
    pub(crate) fn cut(&self, document: usize, title: &str, tokens: &[u32], chunks: &mut Vec<PromptChunk>) {
        let parts = tokens.len().div_ceil(self.settings.chunk_tokens);
        for (part, tokens) in tokens.chunks(self.settings.chunk_tokens).enumerate() {
            let (title, tokens) = (title.to_owned(), tokens.to_vec());
            chunks.push(PromptChunk { tokens, title, document, part: (part, parts) });
        }
    }

    /// Computes and stores what methods reuse of a prompt and the store does not have: its system part, its documents with
    /// their summaries for methods that keep parts of them, and its chunks for the others. What is both is computed once.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn ingest_prompt(&self, prompt: &Prompt, methods: &[&dyn FusionMethod]) -> Result<()> {
        if !methods.iter().any(|method| method.reuses()) {
            return Ok(());
        }
        self.ingest_system(prompt)?;
        let mut summaries: Vec<&dyn Summarize> = Vec::new();
        for summary in methods.iter().flat_map(|method| method.summarizes()) {
            if summaries.iter().all(|known| known.kind() != summary.kind()) {
                summaries.push(summary);
            }
        }
        if !summaries.is_empty() {
            let contexts = prompt.contexts(self.longest_context());
            self.ingest_parts(&contexts.chunks, 0, &summaries, true, |_| ())?;
        }
        if methods.iter().any(|method| method.reuses() && method.summarizes().is_empty()) {
            self.ingest_parts(&prompt.chunks, 0, &[], true, |_| ())?;
        }
        Ok(())
    }
}
