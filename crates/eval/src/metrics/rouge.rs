//! ROUGE of the `rouge` package, 1.0.1 (pltrdy/rouge), which is not the textbook's: sets of words and n-grams throughout.

use std::collections::{HashMap, HashSet};

use super::lcs::Pattern;
use super::text;

/// Recall, precision and their harmonic mean.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rouge {
    /// Share of the reference that was met.
    pub recall: f64,
    /// Share of the hypothesis that met it.
    pub precision: f64,
    /// `2PR / (P + R + 1e-8)`.
    pub f: f64,
}

impl Rouge {
    fn of(overlap: usize, hypothesis: usize, reference: usize) -> Rouge {
        let share = |of: usize| if of == 0 { 0.0 } else { overlap as f64 / of as f64 };
        let (precision, recall) = (share(hypothesis), share(reference));
        Rouge { recall, precision, f: 2.0 * (precision * recall / (precision + recall + 1e-8)) }
    }
}

/// ROUGE-L of the summary level: of every two sentences one longest common subsequence, the overlap being the distinct words
/// of all of them. All 0 if either side has no sentence, where the package raises an exception.
pub(crate) fn rouge_l(hypothesis: &str, reference: &str) -> Rouge {
    // Words are compared many times over: numbers do it faster.
    let mut numbers = HashMap::new();
    let [hypothesis, reference] = [hypothesis, reference].map(|text| {
        let mut number = |word| {
            let next = numbers.len();
            *numbers.entry(word).or_insert(next)
        };
        sentences(text).map(|words| words.into_iter().map(&mut number).collect()).collect::<Vec<Vec<usize>>>()
    });
    let distinct = |sentences: &[Vec<usize>]| sentences.iter().flatten().collect::<HashSet<_>>().len();
    let mut union: HashSet<usize> = HashSet::new();
    for sentence in &hypothesis {
        let pattern = Pattern::new(sentence);
        union.extend(reference.iter().flat_map(|other| pattern.common(other)));
    }
    Rouge::of(union.len(), distinct(&hypothesis), distinct(&reference))
}

/// ROUGE-N: distinct n-grams, which also go from one sentence into the next.
pub(crate) fn rouge_n(n: usize, hypothesis: &str, reference: &str) -> Rouge {
    let [hypothesis, reference] =
        [hypothesis, reference].map(|text| sentences(text).flatten().collect::<Vec<_>>());
    let [hypothesis, reference] =
        [&hypothesis, &reference].map(|words| words.windows(n).collect::<HashSet<_>>());
    Rouge::of(hypothesis.intersection(&reference).count(), hypothesis.len(), reference.len())
}

/// Sentences as the package cuts them, at every dot, as words. One that is only whitespace has one word, the empty one.
fn sentences(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.split('.').filter(|sentence| !sentence.is_empty()).map(|sentence| {
        let mut words: Vec<_> = text::split(sentence).collect();
        if words.is_empty() {
            words.push("");
        }
        words
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rouge_l_as_the_package_has_it() {
        // Values of rouge 1.0.1.
        for (hypothesis, reference, expected) in [
            ("", "", 0.0),
            ("...", "a b", 0.0),
            ("a b", "..", 0.0),
            ("a b. c", "a b c", 0.999999995),
            // The blank after the dot is a sentence of one empty word.
            ("a b", "a b. ", 0.7999999952000001),
            (
                "the cat sat on the mat. the dog ran",
                "the dog sat. on the mat the cat ran",
                0.8571428521428571,
            ),
            ("b a", "a b", 0.4999999950000001),
            ("w x y z", "z y x w", 0.24999999500000009),
            ("x a b", "a b x", 0.6666666616666668),
            ("A b c", "a B c", 0.3333333283333334),
            ("a\u{a0}b  c\n d", "a b c d", 0.999999995),
        ] {
            let got = rouge_l(hypothesis, reference).f;
            assert!((got - expected).abs() < 1e-12, "{hypothesis:?} {reference:?}: {got}");
        }
    }

    #[test]
    fn n_grams_are_sets_that_span_sentences() {
        // Bigrams {ab, bb, ba} and {ba, ab}.
        let got = rouge_n(2, "a b b a", "b a. b a b");
        assert_eq!((got.precision, got.recall), (2.0 / 3.0, 1.0));
        assert_eq!(rouge_n(2, "a", "a").f, 0.0);
        assert_eq!(rouge_n(1, "", "a"), Rouge::default());
    }
}
