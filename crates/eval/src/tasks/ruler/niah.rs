//! Needles in a haystack (RULER `niah.py`): sentences that say a key's value, in noise, essays or sentences like them.

use std::ops::RangeInclusive;

use super::fit::Recipe;
use super::lexicon::Lexicon;
use super::random::Random;
use super::task::fill;
use crate::tasks::haystack::sentences;
use crate::{Gold, Sample};

pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";
const NEEDLE: &str = "One of the special magic {type} for {key} is: {value}.";
const BEFORE: &str = "Some special magic {type} are hidden within the following text. Make sure to memorize it. I will quiz you \
                      about the {type} afterwards.\n";
const QUESTION: &str = "\nWhat are all the special magic {type} for {query} mentioned in the provided text?";
const ANSWER_PREFIX: &str = " The special magic {type} for {query} mentioned in the provided text are";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Haystack {
    /// Lines of [`NOISE`].
    Noise,
    /// Prose.
    Essay,
    /// Lines that are needles themselves, of other keys.
    Needles,
}

/// The kind of a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Words,
    Numbers,
    Uuids,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Words => "words",
            Kind::Numbers => "numbers",
            Kind::Uuids => "uuids",
        }
    }

    fn draw(self, lexicon: &Lexicon, draw: &mut Random) -> String {
        match self {
            Kind::Words => lexicon.pair(draw),
            Kind::Numbers => (1_000_000 + draw.below(9_000_000)).to_string(),
            Kind::Uuids => draw.uuid(),
        }
    }
}

/// The parameters of one task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needles {
    haystack: Haystack,
    keys: Kind,
    values: Kind,
    /// Keys that have values (RULER `num_needle_k`).
    num_keys: usize,
    /// Values a key (`num_needle_v`).
    num_values: usize,
    /// Number of keys in the question (`num_needle_q`).
    num_queries: usize,
}

impl Needles {
    /// The needles of `niah_single_2`, with the changes of another task.
    pub(super) fn of(task: &str) -> Needles {
        let single = Needles {
            haystack: Haystack::Essay,
            keys: Kind::Words,
            values: Kind::Numbers,
            num_keys: 1,
            num_values: 1,
            num_queries: 1,
        };
        match task {
            "niah_single_1" => Needles { haystack: Haystack::Noise, ..single },
            "niah_single_3" => Needles { values: Kind::Uuids, ..single },
            "niah_multikey_1" => Needles { num_keys: 4, ..single },
            "niah_multikey_2" => Needles { haystack: Haystack::Needles, ..single },
            "niah_multikey_3" => {
                Needles { haystack: Haystack::Needles, keys: Kind::Uuids, values: Kind::Uuids, ..single }
            }
            "niah_multivalue" => Needles { num_values: 4, ..single },
            "niah_multiquery" => Needles { num_keys: 4, num_queries: 4, ..single },
            _ => single,
        }
    }

    /// A part of the template. For one value RULER makes the singular by these replacements.
    fn word(&self, template: &str, query: &str) -> String {
        let plural = self.values.name();
        if self.num_queries * self.num_values > 1 {
            return fill(template, &[("{type}", plural), ("{query}", query)]);
        }
        let singular = [("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")];
        let template = fill(template, &singular);
        fill(&template, &[("{type}", plural.trim_end_matches('s')), ("{query}", query)])
    }
}

/// Makes the prompts of one task.
pub(super) struct Niah<'a> {
    pub(super) needles: Needles,
    /// The essays' words.
    pub(super) essay: &'a [String],
    pub(super) lexicon: &'a Lexicon,
}

impl Recipe for Niah<'_> {
    fn step(&self) -> usize {
        if self.needles.haystack == Haystack::Essay { 500 } else { 25 }
    }

    fn range(&self) -> RangeInclusive<usize> {
        // Each needle has a line of the haystack of its own.
        self.needles.num_keys * self.needles.num_values..=usize::MAX
    }

    fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
        let Needles { keys, values, num_keys, num_values, num_queries, .. } = self.needles;
        let keys = draw.distinct(num_keys, |draw| keys.draw(self.lexicon, draw));
        let values: Vec<Vec<String>> = (0..num_keys)
            .map(|_| (0..num_values).map(|_| values.draw(self.lexicon, draw)).collect())
            .collect();
        let pairs =
            keys.iter().zip(&values).flat_map(|(key, values)| values.iter().map(move |value| (key, value)));
        let mut needles: Vec<String> = pairs.map(|(key, value)| self.needle(key, value)).collect();
        draw.shuffle(&mut needles);
        let (context, depth) = match self.needles.haystack {
            Haystack::Essay => self.in_essay(units, needles, draw),
            Haystack::Noise => in_lines(vec![NOISE.into(); units], needles, draw),
            Haystack::Needles => in_lines(self.distractors(units, &keys, draw), needles, draw),
        };
        let asked = draw.places(num_queries, num_keys);
        let query = enumerate(asked.iter().map(|key| keys[*key].as_str()).collect());
        Sample {
            before: self.needles.word(BEFORE, &query),
            documents: vec![context],
            question: self.needles.word(QUESTION, &query),
            answer_prefix: self.needles.word(ANSWER_PREFIX, &query),
            depth,
            gold: Gold {
                answers: asked.iter().flat_map(|key| values[*key].clone()).collect(),
                ..Gold::default()
            },
            ..Sample::default()
        }
    }
}

impl Niah<'_> {
    fn needle(&self, key: &str, value: &str) -> String {
        fill(NEEDLE, &[("{type}", self.needles.values.name()), ("{key}", key), ("{value}", value)])
    }

    /// Needles of other keys. RULER does not look whether they are others: with its six million it need not.
    fn distractors(&self, count: usize, keys: &[String], draw: &mut Random) -> Vec<String> {
        let other = |draw: &mut Random| {
            loop {
                let key = self.needles.keys.draw(self.lexicon, draw);
                if !keys.contains(&key) {
                    return key;
                }
            }
        };
        (0..count)
            .map(|_| {
                let key = other(draw);
                self.needle(&key, &self.needles.values.draw(self.lexicon, draw))
            })
            .collect()
    }

    /// The essays' first words with needles between their sentences, and the depth of a needle that is alone.
    fn in_essay(&self, units: usize, needles: Vec<String>, draw: &mut Random) -> (String, Option<f64>) {
        let words: Vec<&str> = self.essay.iter().cycle().take(units).map(String::as_str).collect();
        let text = words.join(" ");
        let sentences = sentences(&text);
        // 40 depths evenly spaced, rounded.
        let mut depths = draw.places(needles.len(), 40);
        depths.sort_unstable();
        let depths: Vec<usize> =
            depths.into_iter().map(|i| (i as f64 * 100.0 / 39.0).round() as usize).collect();
        let mut pieces = Vec::new();
        let mut start = 0;
        for (needle, depth) in needles.into_iter().zip(&depths) {
            let end = sentences.len() * depth / 100;
            pieces.extend([sentences[start..end].join(" "), needle]);
            start = end;
        }
        pieces.push(sentences[start..].join(" "));
        (pieces.join(" "), alone(&depths).map(|depth| depth as f64))
    }
}

/// Lines with needles between them, and the depth of a needle that is alone.
fn in_lines(mut lines: Vec<String>, needles: Vec<String>, draw: &mut Random) -> (String, Option<f64>) {
    let count = lines.len();
    let mut places = draw.places(needles.len(), count);
    places.sort_unstable_by(|a, b| b.cmp(a));
    for (place, needle) in places.iter().zip(needles) {
        lines.insert(*place, needle);
    }
    (lines.join("\n"), alone(&places).map(|place| place as f64 * 100.0 / count as f64))
}

fn alone(places: &[usize]) -> Option<usize> {
    if let [place] = places { Some(*place) } else { None }
}

/// `a`; `a, and b`; `a, b, and c`.
fn enumerate(mut items: Vec<&str>) -> String {
    match items.pop() {
        Some(last) if !items.is_empty() => format!("{}, and {last}", items.join(", ")),
        last => last.unwrap_or_default().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asked_for_one_value_the_template_is_in_the_singular() {
        let single = Needles::of("niah_single_1");
        assert_eq!(
            [BEFORE, QUESTION, ANSWER_PREFIX].map(|part| single.word(part, "K")).concat(),
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the \
             number afterwards.\n\nWhat is the special magic number for K mentioned in the provided text? The special magic \
             number for K mentioned in the provided text is"
        );
        let several = Needles::of("niah_multivalue");
        assert_eq!(
            [BEFORE, QUESTION, ANSWER_PREFIX].map(|part| several.word(part, "K")).concat(),
            "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about \
             the numbers afterwards.\n\nWhat are all the special magic numbers for K mentioned in the provided text? The \
             special magic numbers for K mentioned in the provided text are"
        );
    }

    #[test]
    fn keys_are_enumerated_as_rulers_are() {
        assert_eq!(enumerate(vec!["a"]), "a");
        assert_eq!(enumerate(vec!["a", "b"]), "a, and b");
        assert_eq!(enumerate(vec!["a", "b", "c"]), "a, b, and c");
    }

    #[test]
    fn a_needle_in_an_essay_stands_at_its_depth() {
        let essay: Vec<String> = (0..200).map(|i| format!("S{i}.")).collect();
        let niah =
            Niah { needles: Needles::of("niah_single_2"), essay: &essay, lexicon: &Lexicon::built_in() };
        let mut seen = std::collections::BTreeSet::new();
        for index in 0..200 {
            let (text, depth) =
                niah.in_essay(400, vec!["NEEDLE".into()], &mut Random::named(&index.to_string()));
            let depth = depth.unwrap() as usize;
            let before = text.split("NEEDLE").next().unwrap().split_whitespace().count();
            assert_eq!(before, 400 * depth / 100);
            seen.insert(depth);
        }
        assert_eq!((seen.first(), seen.last()), (Some(&0), Some(&100)));
        assert!(seen.contains(&3) && seen.contains(&97), "{seen:?}");
    }

    #[test]
    fn nothing_but_the_needle_speaks_of_its_key() {
        let niah =
            Niah { needles: Needles::of("niah_multikey_2"), essay: &[], lexicon: &Lexicon::built_in() };
        for index in 0..20 {
            let sample = niah.prompt(5000, &mut Random::named(&index.to_string()));
            let key = sample.question.split(" for ").nth(1).unwrap().split(' ').next().unwrap();
            let lines: Vec<&str> =
                sample.documents[0].lines().filter(|line| line.contains(&format!(" {key} "))).collect();
            assert!(matches!(lines[..], [line] if line.contains(&sample.gold.answers[0])), "{lines:?}");
        }
    }
}
