//! Text that needles are hidden in: essays, read or built in, and its sentences.

use std::path::Path;

use serde::Deserialize;
use unicode_segmentation::UnicodeSegmentation;

use crate::{Error, Result};

/// Prose of our own, for runs without the essays.
const BUILT_IN: &str = include_str!("haystack/essay.txt");

/// Prose to hide needles in.
#[derive(Clone, Debug)]
pub(crate) struct Essays {
    /// The text, never blank.
    pub(crate) text: String,
    /// Where it comes from.
    pub(crate) source: &'static str,
    /// BLAKE3 of the text, hexadecimal; none of the built-in one, which the program's version tells.
    pub(crate) hash: Option<String>,
}

impl Essays {
    pub(crate) fn built_in() -> Essays {
        Essays { text: BUILT_IN.into(), source: "essays: built in", hash: None }
    }

    /// RULER's `PaulGrahamEssays.json`.
    pub(crate) fn from_json(path: &Path) -> Result<Essays> {
        #[derive(Deserialize)]
        struct File {
            text: String,
        }
        let file: File = serde_json::from_str(&read(path)?)
            .map_err(|error| Error::data(path, format!("no object with a `text`: {error}")))?;
        Essays::graham(path, file.text)
    }

    /// Every `.txt` of a folder, in the order of names: the originals take the file system's, which is any.
    pub(crate) fn from_folder(folder: &Path) -> Result<Essays> {
        let unreadable = |error| Error::data(folder, error);
        let mut paths = Vec::new();
        for entry in folder.read_dir().map_err(unreadable)? {
            paths.push(entry.map_err(unreadable)?.path());
        }
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
        paths.sort();
        let texts = paths.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
        Essays::graham(folder, texts.concat())
    }

    fn graham(path: &Path, text: String) -> Result<Essays> {
        if text.trim().is_empty() {
            let reason =
                "no text in it: essays are needed; `refrain eval fetch` explains where data comes from";
            return Err(Error::data(path, reason));
        }
        let hash = Some(blake3::hash(text.as_bytes()).to_hex().to_string());
        Ok(Essays { text, source: "essays: Paul Graham", hash })
    }

    /// At least `bytes` bytes of the text, which is repeated as needed.
    pub(crate) fn prefix(&self, bytes: usize) -> String {
        let mut prefix = self.text.repeat(bytes / self.text.len());
        prefix.push_str(&self.text[..self.text.ceil_char_boundary(bytes % self.text.len())]);
        prefix
    }
}

pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| Error::data(path, error))
}

/// The sentences of a text with one space between its words; joined by a space they are that text.
///
/// UAX #29 finds them. RULER's Punkt differs in which full stops it takes for those of abbreviations.
pub(crate) fn sentences(text: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    let mut start = 0;
    for (at, piece) in text.split_sentence_bound_indices() {
        let Some(sentence) = piece.strip_suffix(' ') else { continue };
        if !ends_in_abbreviation(sentence) {
            sentences.push(&text[start..at + sentence.len()]);
            start = at + piece.len();
        }
    }
    if start < text.len() {
        sentences.push(&text[start..]);
    }
    sentences
}

fn ends_in_abbreviation(text: &str) -> bool {
    let Some(text) = text.strip_suffix('.') else { return false };
    let word = text.rsplit([' ', '(', '"']).next().unwrap_or_default();
    let mut letters = word.chars();
    let initial = matches!((letters.next(), letters.next()), (Some(letter), None) if letter.is_uppercase() && letter != 'I');
    let abbreviations = ["Dr", "Jr", "Mr", "Mrs", "Ms", "Prof", "Sr", "St", "cf", "e.g", "i.e", "vs", "viz"];
    initial || abbreviations.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_end_at_full_stops_but_not_at_abbreviations() {
        let text = "Mr. Paul saw 3.5 km of it. \"Why?\" he asked. Few (e.g. J. Doe) know! So be it";
        let expected =
            ["Mr. Paul saw 3.5 km of it.", "\"Why?\"", "he asked.", "Few (e.g. J. Doe) know!", "So be it"];
        assert_eq!(sentences(text), expected);
    }

    #[test]
    fn sentences_joined_are_the_text() {
        // Sentences that no space parts stay one: to join them would put one in.
        let text = "It ends.Then more?Yes. A. B. C. End.";
        assert_eq!(sentences(text), ["It ends.Then more?Yes.", "A. B. C. End."]);
        let essay = BUILT_IN.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(sentences(&essay).join(" "), essay);
        assert!(sentences(&essay).len() > 100);
        assert_eq!(sentences(""), [""; 0]);
    }

    #[test]
    fn a_prefix_repeats_the_text() {
        let essays = Essays { text: "aßc".into(), source: "", hash: None };
        assert_eq!(essays.prefix(6), "aßcaß");
        assert_eq!(essays.prefix(8), "aßcaßc");
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_names() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("b.txt", "two"), ("a.txt", "one "), ("c.md", "three")] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        assert_eq!(Essays::from_folder(folder.path()).unwrap().text, "one two");
        assert!(Essays::from_folder(&folder.path().join("none")).is_err());
    }
}
