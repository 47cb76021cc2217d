//! The words that keys and lists are made of.

use std::collections::HashSet;
use std::path::Path;

use super::random::Random;
use crate::{Error, Result};

const ADJECTIVES: &str = include_str!("lexicon/adjectives.txt");
const NOUNS: &str = include_str!("lexicon/nouns.txt");
const VERBS: &str = include_str!("lexicon/verbs.txt");

/// Lists of words, each of ten or more.
#[derive(Clone, Debug)]
pub(super) struct Lexicon {
    adjectives: Vec<String>,
    nouns: Vec<String>,
    /// Adjectives, nouns and verbs, each once, sorted.
    all: Vec<String>,
    pub(super) source: &'static str,
    /// BLAKE3 of the lists, hexadecimal; none of built-in ones, which the program's version tells.
    pub(super) hash: Option<String>,
}

impl Lexicon {
    pub(super) fn built_in() -> Lexicon {
        let [adjectives, nouns, verbs] = [ADJECTIVES, NOUNS, VERBS].map(lines);
        Lexicon { hash: None, ..Lexicon::new(adjectives, nouns, verbs, "words: built in") }
    }

    /// The lists of the `wonderwords` package.
    pub(super) fn read(folder: &Path) -> Result<Lexicon> {
        let list = |name: &str| {
            let path = folder.join(name);
            let explained = |error| {
                let what = "`refrain eval fetch` explains where data comes from";
                Error::data(&path, format!("{error}; {what}"))
            };
            let list = lines(&std::fs::read_to_string(&path).map_err(explained)?);
            // Keys that differ have to be found among the pairs.
            if list.len() < 10 { Err(Error::data(path, "fewer than 10 words, one a line")) } else { Ok(list) }
        };
        let (adjectives, nouns, verbs) =
            (list("adjectivelist.txt")?, list("nounlist.txt")?, list("verblist.txt")?);
        Ok(Lexicon::new(adjectives, nouns, verbs, "words: wonderwords"))
    }

    fn new(adjectives: Vec<String>, nouns: Vec<String>, verbs: Vec<String>, source: &'static str) -> Lexicon {
        let lists = [&adjectives, &nouns, &verbs].map(|list| list.join("\n")).join("\n\n");
        let hash = Some(blake3::hash(lists.as_bytes()).to_hex().to_string());
        let all = sorted([&adjectives[..], &nouns[..], &verbs[..]].concat());
        Lexicon { adjectives, nouns, all, source, hash }
    }

    /// An adjective and a noun.
    pub(super) fn pair(&self, draw: &mut Random) -> String {
        format!("{}-{}", draw.pick(&self.adjectives), draw.pick(&self.nouns))
    }

    /// `count` different words, in random order. Words beyond the lists are made up, where RULER has a longer list.
    pub(super) fn words(&self, count: usize, draw: &mut Random) -> Vec<String> {
        let places = draw.places(count, self.all.len());
        let mut words: Vec<String> = places.into_iter().map(|place| self.all[place].clone()).collect();
        if words.len() < count {
            let known: HashSet<&String> = self.all.iter().collect();
            words.extend(draw.distinct(count - words.len(), |draw| {
                loop {
                    let word = made_up(draw);
                    if !known.contains(&word) {
                        return word;
                    }
                }
            }));
            draw.shuffle(&mut words);
        }
        words
    }
}

/// Four syllables: sixteen million words.
fn made_up(draw: &mut Random) -> String {
    let syllable = |draw: &mut Random| [*draw.pick(b"bdfgklmnprstvz"), *draw.pick(b"aeiou")].map(char::from);
    (0..4).flat_map(|_| syllable(draw)).collect()
}

fn lines(text: &str) -> Vec<String> {
    sorted(text.lines().map(str::trim).filter(|word| !word.is_empty()).map(String::from).collect())
}

fn sorted(mut words: Vec<String>) -> Vec<String> {
    words.sort();
    words.dedup();
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_beyond_the_lists_are_made_up() {
        let lexicon = Lexicon::built_in();
        let known = lexicon.all.len();
        let words = lexicon.words(known + 100, &mut Random::named("words"));
        assert_eq!(words.iter().collect::<HashSet<_>>().len(), known + 100);
        assert_eq!(words.iter().filter(|word| lexicon.all.contains(word)).count(), known);
        assert!(words.iter().all(|word| word.bytes().all(|byte| byte.is_ascii_lowercase())));
    }

    #[test]
    fn a_list_of_few_words_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["adjectivelist.txt", "nounlist.txt", "verblist.txt"] {
            std::fs::write(folder.path().join(name), "one\n \n").unwrap();
        }
        assert!(Lexicon::read(folder.path()).unwrap_err().to_string().contains("adjectivelist.txt"));
    }
}
