//! F1 of words (LongBench `qa_f1_score`) and of token ids (CacheBlend's `compute_f1`).

use std::collections::HashMap;
use std::hash::Hash;

use super::text;

/// The words that answers are compared by, one space between: lowercase, without ASCII punctuation, without articles.
pub fn normalise(answer: &str) -> String {
    let mut bare = answer.to_lowercase();
    bare.retain(|c| !c.is_ascii_punctuation());
    let without_articles: String =
        text::runs(&bare).map(|run| if is_article(run) { " " } else { run }).collect();
    text::split(&without_articles).collect::<Vec<_>>().join(" ")
}

fn is_article(run: &str) -> bool {
    matches!(run, "a" | "an" | "the")
}

/// F1 of the words of two answers.
pub(crate) fn words_f1(prediction: &str, reference: &str) -> f64 {
    let [prediction, reference] = [prediction, reference].map(normalise);
    let [prediction, reference] = [&prediction, &reference].map(|text| text::split(text).collect::<Vec<_>>());
    f1(&prediction, &reference)
}

/// F1 of two multisets; 0 where they share nothing.
pub(crate) fn f1<T: Eq + Hash>(prediction: &[T], reference: &[T]) -> f64 {
    let same = overlap(prediction, reference) as f64;
    if same == 0.0 {
        return 0.0;
    }
    let precision = same / prediction.len() as f64;
    let recall = same / reference.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

/// Items that two multisets have in common.
pub(crate) fn overlap<T: Eq + Hash>(a: &[T], b: &[T]) -> usize {
    let mut left: HashMap<&T, usize> = HashMap::new();
    b.iter().for_each(|item| *left.entry(item).or_default() += 1);
    a.iter()
        .filter(|item| match left.get_mut(item) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            _ => false,
        })
        .count()
}

/// F1 of the tokenizer's ids of two normalised answers, without special tokens; 1 where neither has any (CacheBlend's
/// `compute_f1`; the prediction goes through [`cacheblend_answer`], the reference through [`normalise`]).
pub fn token_f1(prediction_ids: &[u32], reference_ids: &[u32]) -> f64 {
    if prediction_ids.is_empty() && reference_ids.is_empty() {
        return 1.0;
    }
    f1(prediction_ids, reference_ids)
}

/// The part of a prediction that CacheBlend compares: its first line, or only `yes` or `no` where it begins so, normalised.
///
/// As in its `parse_generation`, `yes` must be the very beginning, `no` that of the first word, and a word that only begins
/// with either (`North`) counts as it too.
pub fn cacheblend_answer(prediction: &str) -> String {
    let line = text::first_line(prediction);
    let begins = |text: &str, with: [&str; 2]| with.iter().any(|prefix| text.starts_with(prefix));
    if begins(line, ["Yes", "yes"]) {
        "yes".into()
    } else if text::split(line).next().is_some_and(|word| begins(word, ["No", "no"])) {
        "no".into()
    } else {
        normalise(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_as_the_reference_counts_them() {
        // Values of LongBench's qa_f1_score.
        for (prediction, reference, expected) in [
            ("The U.S.A., a land", "usa land", 1.0),
            ("a the an", "a", 0.0),
            ("", "", 0.0),
            ("don't stop", "dont stop now", 0.8),
            ("a_b", "ab", 1.0),
            ("caf\u{e9} \u{2014} the bar", "CAF\u{c9} bar", 0.8),
            ("the cat the cat", "cat", 2.0 / 3.0),
            ("a\u{2019}s", "\u{2019}s", 1.0),
            ("b x x x", "x b b", 4.0 / 7.0),
        ] {
            let got = words_f1(prediction, reference);
            assert!((got - expected).abs() < 1e-12, "{prediction:?} {reference:?}: {got}");
        }
    }

    #[test]
    fn ids_that_are_missing_on_both_sides_agree() {
        assert_eq!(token_f1(&[], &[]), 1.0);
        assert_eq!(token_f1(&[1], &[]), 0.0);
        assert_eq!(token_f1(&[], &[1]), 0.0);
        assert!((token_f1(&[5, 6, 7], &[6, 5, 9, 5]) - 4.0 / 7.0).abs() < 1e-12);
    }

    #[test]
    fn answers_that_begin_with_yes_or_no_are_collapsed() {
        for (prediction, expected) in [
            ("\nYes, it is.\nNo", "yes"),
            ("yesterday", "yes"),
            (" Yes it", "yes it"),
            (" No idea", "no"),
            ("Not the one", "no"),
            ("The Beatles!\nQuestion: who", "beatles"),
            ("  ", ""),
            ("", ""),
        ] {
            assert_eq!(cacheblend_answer(prediction), expected, "{prediction:?}");
        }
    }
}
