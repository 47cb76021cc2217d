//! The attention of the question to the documents, for people.

use refrain_kv::top_k;
use refrain_model::Detokenizer;
use serde::Serialize;

use crate::engine::Engine;
use crate::prompt::{Prompt, PromptChunk};

/// A document token that the question attends to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttendedToken {
    /// Its position in the prompt.
    pub position: u32,
    /// Its share of the question's attention to all document tokens.
    pub share: f32,
    /// Index of its chunk in the prompt.
    pub chunk: usize,
    /// Label of its chunk.
    pub label: String,
    /// Text before it in its chunk.
    pub before: String,
    /// Its text.
    pub text: String,
    /// Text after it in its chunk.
    pub after: String,
    /// Whether it was computed at the deepest layer.
    pub recomputed: bool,
}

/// The question's attention at layer 1, summed over heads, and the rows that were recomputed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The most attended tokens, best first.
    pub tokens: Vec<AttendedToken>,
    /// Share of the question's attention that fell on recomputed tokens.
    pub recomputed_share: f32,
    /// Every document token, by chunk.
    #[serde(skip)]
    pub chunks: Vec<ShadedChunk>,
}

/// A chunk with what the question gives to each of its tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShadedChunk {
    /// Its label.
    pub label: String,
    /// Texts of its tokens.
    pub tokens: Vec<String>,
    /// Of each, its share of the question's attention to all document tokens.
    pub shares: Vec<f32>,
    /// Of each, whether it was computed at the deepest layer.
    pub recomputed: Vec<bool>,
}

/// Most attended tokens that are shown.
const SHOWN: usize = 12;
/// Tokens of context on each side.
const CONTEXT: usize = 8;
/// Shown tokens are this far apart, so that one passage does not fill the list.
const APART: u32 = 8;

impl Engine {
    pub(crate) fn explanation(&self, prompt: &Prompt, attention: &[f32], rows: &[u32]) -> Explanation {
        let start = prompt.system.len() as u32;
        let total: f32 = attention.iter().sum::<f32>().max(f32::MIN_POSITIVE);
        let recomputed = |t: u32| rows.binary_search(&(t + start)).is_ok();
        let share = attention.iter().enumerate().filter(|(t, _)| recomputed(*t as u32)).map(|(_, a)| a);
        let mut order = top_k(attention, SHOWN * 2 * APART as usize);
        order.sort_by(|a, b| attention[*b as usize].total_cmp(&attention[*a as usize]).then(a.cmp(b)));
        let mut shown: Vec<u32> = Vec::new();
        for t in order {
            if shown.len() < SHOWN && shown.iter().all(|s| s.abs_diff(t) >= APART) {
                shown.push(t);
            }
        }
        let attended =
            |t: u32| self.attended(prompt, t + start, attention[t as usize] / total, recomputed(t));
        Explanation {
            recomputed_share: share.fold(0.0, |sum, a| sum + a) / total,
            tokens: shown.into_iter().filter_map(attended).collect(),
            chunks: self.shaded(prompt, |t| attention[t as usize] / total, recomputed),
        }
    }

    /// Every document token, counted from the first, with its share and whether it was recomputed.
    fn shaded(
        &self,
        prompt: &Prompt,
        share: impl Fn(u32) -> f32,
        recomputed: impl Fn(u32) -> bool,
    ) -> Vec<ShadedChunk> {
        let mut first = 0;
        let mut chunk = |chunk: &PromptChunk| {
            let own = first..first + chunk.tokens.len() as u32;
            first = own.end;
            ShadedChunk {
                label: chunk.label(),
                tokens: self.texts(&chunk.tokens),
                shares: own.clone().map(&share).collect(),
                recomputed: own.map(&recomputed).collect(),
            }
        };
        prompt.chunks.iter().map(&mut chunk).collect()
    }

    /// Texts of tokens: together they are the text of all. Where a character takes several, the last one has it.
    fn texts(&self, tokens: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        tokens.iter().map(|token| detokenizer.push(self.tokenizer(), *token).unwrap_or_default()).collect()
    }

    fn attended(
        &self,
        prompt: &Prompt,
        position: u32,
        share: f32,
        recomputed: bool,
    ) -> Option<AttendedToken> {
        let spans = prompt.chunk_spans();
        let chunk = spans.iter().position(|span| span.contains(position))?;
        let tokens = &prompt.chunks[chunk].tokens;
        let at = (position - spans[chunk].start) as usize;
        let texts = self.texts(tokens);
        // The last token of a character has its text.
        let whole = texts[at..].iter().position(|text| !text.is_empty()).map_or(at, |further| at + further);
        let end = (at + 1 + CONTEXT).min(tokens.len()).max(whole + 1);
        Some(AttendedToken {
            position,
            share,
            chunk,
            label: prompt.chunks[chunk].label(),
            before: texts[at.saturating_sub(CONTEXT)..at].concat(),
            text: texts[whole].clone(),
            after: texts[whole + 1..end].concat(),
            recomputed,
        })
    }
}
