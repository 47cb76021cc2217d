//! Needle in a haystack (gkamradt/LLMTest_NeedleInAHaystack @7b90d28): one sentence in essays, at each length and depth.

use std::path::Path;

use super::TokenText;
use super::haystack::Essays;
use crate::{Error, Gold, Result, Sample};

/// The sentence that is hidden.
pub const NEEDLE: &str =
    "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n";

/// Folder of the essays, in the needle's folder of the data.
const ESSAYS: &str = "PaulGrahamEssays";

/// Protocol of inserting the needle and asking for it. Each uses the chat template, except with a base model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NeedleStyle {
    /// As papers on KV caches do (FranxYao/Long-Context-Data-Engineering, Zefan-Cai/PyramidKV @5d4e2e1): a story book whose
    /// question is the needle's own beginning. Without their literal `<|im_start|>`, which the chat template stands for.
    #[default]
    KvPapers,
    /// The context of NVIDIA/kvpress @8bb29b9: the needle at the exact token, 150 tokens left for the rest of the
    /// prompt.
    Kvpress,
    /// Greg Kamradt's: instruction, essays, question. His system message begins the prompt, and the judge is not his.
    Kamradt,
}

/// The prompt of a style around the essays.
struct Wording {
    before: &'static str,
    question: &'static str,
    max_tokens: usize,
    stop: &'static [&'static str],
}

const STORY_BOOK: Wording = Wording {
    before: "This is a very long story book: <book> ",
    question: " </book>.\n Based on the content of the book, Question: The best thing to do in San Francisco is: \nAnswer:",
    max_tokens: 30,
    stop: &["\n"],
};

const KAMRADT: Wording = Wording {
    before: "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n",
    question: "\n\nWhat is the best thing to do in San Francisco? Don't give information outside the document or repeat \
               your findings",
    max_tokens: 300,
    stop: &[],
};

impl NeedleStyle {
    fn wording(self) -> &'static Wording {
        match self {
            NeedleStyle::KvPapers | NeedleStyle::Kvpress => &STORY_BOOK,
            NeedleStyle::Kamradt => &KAMRADT,
        }
    }

    /// Tokens of the length that are left to question and answer.
    fn buffer(self) -> usize {
        if self == NeedleStyle::Kvpress { 150 } else { 200 }
    }
}

/// Makes the benchmark's samples.
#[derive(Clone, Debug)]
pub struct Needle {
    essays: Essays,
}

impl Needle {
    /// With the essays of a folder (its `PaulGrahamEssays/*.txt`), or with the built-in one where there is no such folder.
    ///
    /// # Errors
    /// If the essays' folder has none or they cannot be read.
    pub fn open(data: Option<&Path>) -> Result<Needle> {
        let essays = data.map(|folder| folder.join(ESSAYS)).filter(|essays| essays.is_dir());
        let essays = essays.map_or_else(|| Ok(Essays::built_in()), |essays| Essays::from_folder(&essays))?;
        Ok(Needle { essays })
    }

    /// Parts of the folder that built-in text stands in for.
    pub(crate) fn missing(&self) -> &'static [&'static str] {
        if self.essays.hash.is_none() { &[ESSAYS] } else { &[] }
    }

    /// BLAKE3 of the essays, hexadecimal, unless they are built in.
    pub(crate) fn hash(&self) -> Option<String> {
        self.essays.hash.clone()
    }

    /// Which essays these are, for a report.
    pub fn source(&self) -> &'static str {
        self.essays.source
    }

    /// The sample of `length` tokens with the needle at `depth` percent of the context.
    ///
    /// # Errors
    /// If the length leaves no room for essays, or the tokenizer fails.
    pub fn sample(
        &self,
        length: usize,
        depth: f64,
        tokenizer: &dyn TokenText,
        style: NeedleStyle,
    ) -> Result<Sample> {
        let needle = tokenizer.encode(NEEDLE)?;
        let room =
            length.checked_sub(style.buffer() + needle.len()).filter(|room| *room > 0).ok_or_else(|| {
                Error::Invalid(format!(
                    "needle: {length} tokens leave no room for essays beside needle and question"
                ))
            })?;
        let mut context = self.tokens(room, tokenizer)?;
        let mut at = (room as f64 * depth.clamp(0.0, 100.0) / 100.0) as usize;
        if style != NeedleStyle::Kvpress && at < room {
            while at > 0 && !ends_sentence(context[at - 1], tokenizer) {
                at -= 1;
            }
        }
        context.splice(at..at, needle);
        let wording = style.wording();
        Ok(Sample {
            id: format!("needle-{length}-{depth}"),
            before: wording.before.into(),
            documents: vec![tokenizer.decode(&context)],
            question: wording.question.into(),
            chat: true,
            max_tokens: wording.max_tokens,
            stop: wording.stop.iter().map(|stop| (*stop).into()).collect(),
            length: Some(length),
            depth: Some(depth),
            gold: Gold { answers: vec![NEEDLE.into()], ..Gold::default() },
            ..Sample::default()
        })
    }

    /// The first tokens of the essays.
    fn tokens(&self, count: usize, tokenizer: &dyn TokenText) -> Result<Vec<u32>> {
        // A little more text than is needed: cutting a text can change its last token.
        for bytes_a_token in [6, 12, 24, 48] {
            let mut ids = tokenizer.encode(&self.essays.prefix(bytes_a_token * (count + 16)))?;
            if ids.len() > count {
                ids.truncate(count);
                return Ok(ids);
            }
        }
        Err(Error::Invalid(format!("needle: the tokenizer makes no {count} tokens of the essays")))
    }
}

/// Whether a token is or ends with a full stop. The originals know the tokens of `.` only: others such as `.\n` came later.
fn ends_sentence(token: u32, tokenizer: &dyn TokenText) -> bool {
    tokenizer.decode(&[token]).trim_end().ends_with('.')
}

/// `count` depths from 0 to 100 percent, evenly spaced and rounded.
pub fn depths(count: usize) -> Vec<f64> {
    let intervals = count.saturating_sub(1).max(1) as f64;
    (0..count).map(|i| (100.0 * i as f64 / intervals).round_ties_even()).collect()
}

#[cfg(test)]
mod tests;
