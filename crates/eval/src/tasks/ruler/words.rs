//! Which words are the most common: of a numbered list (RULER `common_words_extraction.py`) and of a coded text
//! (`freq_words_extraction.py`).

use std::f64::consts::PI;
use std::ops::RangeInclusive;

use super::fit::{Recipe, text};
use super::lexicon::Lexicon;
use super::random::Random;
use crate::{Gold, Sample};

/// Words that are common in a list.
const COMMON: usize = 10;

/// A numbered list in which ten words stand more often than the others; the units are its different words.
pub(super) struct Common<'a> {
    pub(super) lexicon: &'a Lexicon,
    /// Tokens that the task is for: short ones repeat less.
    pub(super) length: usize,
}

impl Recipe for Common<'_> {
    fn step(&self) -> usize {
        10
    }

    fn range(&self) -> RangeInclusive<usize> {
        COMMON + 1..=usize::MAX
    }

    fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
        let short = self.length < 4096;
        let (example_words, example_repeats) = if short { (20, [3, 1]) } else { (40, [10, 3]) };
        let example = self.list(example_words, example_repeats, draw);
        let sample = self.list(units, if short { [6, 1] } else { [30, 3] }, draw);
        let before = format!("{} {}\n{}", text(&example), numbered(&example.gold.answers), sample.before);
        Sample { before, ..sample }
    }
}

impl Common<'_> {
    /// A list of `count` different words; `repeats` are those of the common words and of the others.
    fn list(&self, count: usize, repeats: [usize; 2], draw: &mut Random) -> Sample {
        let words = self.lexicon.words(count, draw);
        let (common, others) = words.split_at(COMMON);
        let mut list: Vec<&String> = [(common, repeats[0]), (others, repeats[1])]
            .into_iter()
            .flat_map(|(words, times)| words.iter().flat_map(move |word| std::iter::repeat_n(word, times)))
            .collect();
        draw.shuffle(&mut list);
        Sample {
            before: "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones \
                     that appear most often.\n"
                .into(),
            documents: vec![numbered(list)],
            question: "\nQuestion: What are the 10 most common words in the above list?".into(),
            answer_prefix: " Answer: The top 10 words that appear most often in the list are:".into(),
            gold: Gold { answers: common.to_vec(), ..Gold::default() },
            ..Sample::default()
        }
    }
}

fn numbered<'a>(words: impl IntoIterator<Item = &'a String>) -> String {
    let items: Vec<String> =
        words.into_iter().zip(1..).map(|(word, number)| format!("{number}. {word}")).collect();
    items.join(" ")
}

/// Words of six random letters, as often as Zipf's law with exponent 2 has it; the most frequent is noise, and the
/// question is for the three after it. A unit is RULER's step, a 32nd of the room.
pub(super) struct Frequent {
    /// Tokens of the prompt.
    pub(super) room: usize,
}

impl Frequent {
    fn vocabulary(&self) -> usize {
        self.room / 50
    }

    /// Words of a text, those too rare for one occurrence included: RULER counts up from a sixth of the room.
    fn words(&self, units: usize) -> usize {
        self.room / 6 % self.step_words() + units * self.step_words()
    }

    fn step_words(&self) -> usize {
        (self.room / 32).max(1)
    }
}

/// Fewest words with one of rank 4: 16 ζ(2).
const LEAST_WORDS: usize = 27;

/// How often the word of a rank occurs in a text of this many words.
fn times(words: usize, rank: usize) -> usize {
    let zeta = PI * PI / 6.0;
    (words as f64 / (rank * rank) as f64 / zeta) as usize
}

impl Recipe for Frequent {
    fn step(&self) -> usize {
        1
    }

    fn range(&self) -> RangeInclusive<usize> {
        if self.vocabulary() < 4 {
            return RangeInclusive::new(1, 0);
        }
        // The last word of the answer stands in the text.
        let fewest = LEAST_WORDS.saturating_sub(self.words(0)).div_ceil(self.step_words());
        fewest.max(1)..=usize::MAX
    }

    fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
        let mut vocabulary = draw.distinct(self.vocabulary(), |draw| draw.letters(b'a', 6));
        vocabulary[0] = "...".into();
        let words = self.words(units);
        let counted = vocabulary.iter().zip(1..);
        let mut coded: Vec<&str> =
            counted.flat_map(|(word, rank)| std::iter::repeat_n(word.as_str(), times(words, rank))).collect();
        draw.shuffle(&mut coded);
        Sample {
            before: "Read the following coded text and track the frequency of each coded word. Find the three most frequently \
                     appeared coded words. "
                .into(),
            documents: vec![coded.join(" ")],
            question: "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most \
                       frequently appeared words in the above coded text?"
                .into(),
            answer_prefix: " Answer: According to the coded text above, the three most frequently appeared words are:".into(),
            gold: Gold { answers: vocabulary[1..4].to_vec(), ..Gold::default() },
            ..Sample::default()
        }
    }
}
