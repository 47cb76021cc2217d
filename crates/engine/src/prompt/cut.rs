//! Documents cut into chunks, by their structure.

use std::ops::Range;

use refrain_documents::split;
use refrain_model::Tokenizer;

use super::document::{Document, prompt_text};
use super::layout::PromptChunk;
use crate::Result;
use crate::engine::Engine;

/// Most characters of a title that name its chunks.
const LABEL: usize = 60;
/// Most characters of a title that stand above the texts of its chunks.
const TITLE: usize = 200;
/// Ends each chunk of a document.
const END: &str = "\n\n";
/// The part of a chunk, one in so many, that is left free: a text alone may have a few more tokens than within its document.
const MARGIN: usize = 64;

impl Engine {
    /// Cuts documents into chunks of at most [`Settings::chunk_tokens`](crate::Settings::chunk_tokens); a chunk never crosses a document.
    ///
    /// A document that fits is one chunk. Any other is cut between its sections, paragraphs and sentences ([`split()`]), and above each chunk
    /// stand the document's title and the headings that it is from, so that it is found and understood alone.
    ///
    /// # Errors
    /// If a text cannot be tokenised.
    pub fn chunks(&self, documents: &[Document]) -> Result<Vec<PromptChunk>> {
        let mut chunks = Vec::new();
        for (index, document) in documents.iter().enumerate() {
            let heading =
                || document.text.trim().lines().next().unwrap_or_default().trim_start_matches('#').trim();
            let title = match (document.title.trim(), heading()) {
                ("", "") => format!("document {}", index + 1),
                ("", heading) => first_characters(heading, LABEL),
                (title, _) => first_characters(title, LABEL),
            };
            self.add_chunks(index, &title, self.cut_document(document)?, &mut chunks);
        }
        Ok(chunks)
    }

    /// The tokens of a document's chunks.
    fn cut_document(&self, document: &Document) -> Result<Vec<Vec<u32>>> {
        let text = prompt_text(document);
        let tokens = self.tokenize(&text)?;
        if tokens.len() <= self.settings().chunk_tokens {
            return Ok(vec![tokens]);
        }
        let body = document.text.trim();
        if body.is_empty() {
            return Ok(self.in_even_parts(&tokens));
        }
        let most = self.most_tokens().saturating_sub(self.tokenize(END)?.len()).max(1);
        let title = first_characters(document.title.trim(), TITLE);
        let above = if title.is_empty() { 0 } else { self.tokenize(&format!("{title}{END}"))?.len() };
        // A title that leaves no room for text stands above none of the chunks.
        let (title, above) = if above <= most / 4 { (title, above) } else { (String::new(), 0) };
        let places = TokenPlaces::new(self.tokenizer(), &tokens, text.len());
        let start = text.trim_end().len() - body.len();
        let pieces = split(body, most, above, |range| places.count(start + range.start..start + range.end));
        let mut cut = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let tokens = self.tokenize(&(piece.headed(&title) + END))?;
            cut.extend(self.in_even_parts(&tokens));
        }
        Ok(cut)
    }

    /// Cuts a text into chunks that together hold its tokens as they are: by its structure, or every
    /// [`Settings::chunk_tokens`](crate::Settings::chunk_tokens), as papers cut texts without bounds.
    ///
    /// # Errors
    /// If the text cannot be tokenised.
    pub(super) fn cut_text(
        &self,
        document: usize,
        text: &str,
        by_structure: bool,
    ) -> Result<Vec<PromptChunk>> {
        let (tokens, most) = (self.tokenize(text)?, self.settings().chunk_tokens);
        let mut bounds: Vec<usize> = Vec::new();
        if by_structure && tokens.len() > most {
            let places = TokenPlaces::new(self.tokenizer(), &tokens, text.len());
            let pieces = split(text, self.most_tokens(), 0, |range| places.count(range));
            bounds.extend(pieces.iter().skip(1).map(|piece| places.before(piece.range.start)));
        } else {
            bounds.extend((most..tokens.len()).step_by(most));
        }
        bounds.push(tokens.len());
        let mut from = 0;
        let parts = bounds.into_iter().flat_map(|to| {
            let part = &tokens[from..to.max(from)];
            from = to.max(from);
            self.in_even_parts(part)
        });
        let mut chunks = Vec::new();
        self.add_chunks(document, &format!("document {}", document + 1), parts.collect(), &mut chunks);
        Ok(chunks)
    }

    fn add_chunks(&self, document: usize, title: &str, cut: Vec<Vec<u32>>, chunks: &mut Vec<PromptChunk>) {
        let named = |chunk| PromptChunk { title: title.to_owned(), document, ..chunk };
        chunks.extend(self.whole_document(cut).into_iter().map(named));
    }

    /// The tokens that a chunk is filled up to.
    fn most_tokens(&self) -> usize {
        let most = self.settings().chunk_tokens;
        most - most / MARGIN
    }

    /// A chunk, or as many even parts of one that is too long as are needed.
    fn in_even_parts(&self, tokens: &[u32]) -> Vec<Vec<u32>> {
        let parts = tokens.len().div_ceil(self.settings().chunk_tokens).max(1);
        tokens.chunks(tokens.len().div_ceil(parts).max(1)).map(<[u32]>::to_vec).collect()
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

fn first_characters(text: &str, count: usize) -> String {
    text.chars().take(count).collect()
}

/// Where the tokens of a text end in it.
struct TokenPlaces {
    /// The byte at which each token ends, ascending.
    ends: Vec<usize>,
}

impl TokenPlaces {
    /// The places of the `tokens` of a text of `bytes`. They are near, not exact, where the tokenizer normalises the text.
    fn new(tokenizer: &Tokenizer, tokens: &[u32], bytes: usize) -> TokenPlaces {
        let mut at = 0;
        let mut ends: Vec<usize> = tokens
            .iter()
            .map(|token| {
                at += tokenizer.bytes_of(*token).len();
                at
            })
            .collect();
        if at != bytes {
            ends.iter_mut()
                .for_each(|end| *end = (*end as u128 * bytes as u128 / at.max(1) as u128) as usize);
        }
        TokenPlaces { ends }
    }

    /// Tokens that end at a byte or before it.
    fn before(&self, byte: usize) -> usize {
        self.ends.partition_point(|end| *end <= byte)
    }

    /// Tokens that end in a range.
    fn count(&self, range: Range<usize>) -> usize {
        self.before(range.end) - self.before(range.start)
    }
}
