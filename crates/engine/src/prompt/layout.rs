//! A prompt `S ‖ D1..Dk ‖ Q` as token ids, and the positions of its parts.

use refrain_kv::Span;
use refrain_model::Thinking;

/// A document chunk: at most a chunk size of tokens of one document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptChunk {
    /// Token ids, without BOS.
    pub tokens: Vec<u32>,
    /// The tokens right before them in the document that they are prefilled behind, beside the engine's prefix.
    pub left: Vec<u32>,
    /// Title of its document, for people.
    pub title: String,
    /// Index of its document among those of the prompt.
    pub document: usize,
    /// Which part of its document it is, from 0, and of how many.
    pub part: (usize, usize),
}

impl PromptChunk {
    /// A whole document.
    pub fn whole(document: usize, title: impl Into<String>, tokens: Vec<u32>) -> PromptChunk {
        PromptChunk { tokens, left: Vec::new(), title: title.into(), document, part: (0, 1) }
    }

    /// Title of its document and which part of it this is, for people.
    pub fn label(&self) -> String {
        match self.part {
            (_, 1) => self.title.clone(),
            (part, parts) => format!("{} ({}/{parts})", self.title, part + 1),
        }
    }
}

/// Typed parts of a prompt, each tokenised once, alone. Every method gets the same ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// System part with BOS, where the model uses one, and the chat template's head.
    pub system: Vec<u32>,
    /// Whether the system part may be kept in the store: it holds no earlier turns of a conversation.
    pub system_reusable: bool,
    /// Document chunks, in order.
    pub chunks: Vec<PromptChunk>,
    /// Question part with the chat template's tail.
    pub question: Vec<u32>,
    /// Tokens at the question's end, behind the token that ends its last message. They begin the answer, and the chat template may write
    /// others there once the answer stands in a later prompt. 0 where no token of the template alone tells where the message ends.
    pub tail: usize,
    /// Whether the answer continues the prompt's text, so that a space at its beginning is text. Otherwise the answer is
    /// a text of its own, as a turn of a chat is.
    pub continues_text: bool,
    /// Whether the answer begins with thoughts, which a grammar does not count for.
    pub thinking: Thinking,
}

impl Prompt {
    /// Tokens in all.
    pub fn len(&self) -> usize {
        self.system.len() + self.document_tokens() + self.question.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of all chunks.
    pub fn document_tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens.len()).sum()
    }

    /// Document tokens behind the first `tokens` ones of the prompt.
    pub(crate) fn documents_behind(&self, tokens: usize) -> usize {
        (self.len() - self.question.len()).saturating_sub(tokens).min(self.document_tokens())
    }

    /// The question part without its [tail](Prompt::tail), which further turns begin their question with.
    pub(crate) fn asked(&self) -> &[u32] {
        &self.question[..self.question.len().saturating_sub(self.tail)]
    }

    /// All ids in order.
    pub fn ids(&self) -> Vec<u32> {
        let chunks = self.chunks.iter().flat_map(|chunk| &chunk.tokens);
        self.system.iter().chain(chunks).chain(&self.question).copied().collect()
    }

    /// Positions of the system part.
    pub fn system_span(&self) -> Span {
        Span::new(0, self.system.len())
    }

    /// Positions of each chunk.
    pub fn chunk_spans(&self) -> Vec<Span> {
        let mut start = self.system.len();
        let mut place = |chunk: &PromptChunk| {
            let span = Span::new(start, start + chunk.tokens.len());
            start += chunk.tokens.len();
            span
        };
        self.chunks.iter().map(&mut place).collect()
    }

    /// The prompt with neighbouring chunks of a document joined into contexts of at most `most` tokens. Chunks with others
    /// missing between them stay apart.
    pub fn contexts(&self, most: usize) -> Prompt {
        let mut chunks: Vec<PromptChunk> = Vec::new();
        let mut next = None;
        for chunk in &self.chunks {
            let follows = next == Some((chunk.document, chunk.part.0));
            next = Some((chunk.document, chunk.part.0 + 1));
            match chunks.last_mut() {
                Some(last) if follows && last.tokens.len() + chunk.tokens.len() <= most => {
                    last.tokens.extend_from_slice(&chunk.tokens);
                }
                _ => chunks.push(PromptChunk { part: (0, 1), left: Vec::new(), ..chunk.clone() }),
            }
        }
        Prompt { chunks, ..self.clone() }
    }

    /// The prompt with its chunks in another order, each named once.
    pub fn in_order(&self, order: &[usize]) -> Prompt {
        let chunks = order.iter().map(|chunk| self.chunks[*chunk].clone()).collect();
        Prompt { chunks, ..self.clone() }
    }

    /// Positions of the question part.
    pub fn question_span(&self) -> Span {
        Span::new(self.len() - self.question.len(), self.len())
    }
}
