//! Needle in a haystack: ROUGE between the needle and the response, and whether the response has the needle's answer.

use super::lcs::Pattern;
use super::qa::overlap;
use super::rouge::{Rouge, rouge_l, rouge_n};
use super::{porter, text};

/// F-measures of Google's `rouge_score` 0.1.2 with its stemmer, 0..1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stemmed {
    /// ROUGE-1. Ten times this is the score of the papers' maps (FranxYao/Long-Context-Data-Engineering, PyramidKV).
    pub rouge_1: f64,
    /// ROUGE-L.
    pub rouge_l: f64,
}

/// `rouge_score` of a response, the needle being the target.
pub fn stemmed(needle: &str, response: &str) -> Stemmed {
    let [needle, response] = [needle, response].map(tokens);
    let f = |common: usize| match needle.len() + response.len() {
        0 => 0.0,
        all => 2.0 * common as f64 / all as f64,
    };
    Stemmed { rouge_1: f(overlap(&response, &needle)), rouge_l: f(Pattern::new(&response).length(&needle)) }
}

/// Words of `rouge_score`: runs of a-z and 0-9 of the lowercased text; words of more than three characters are stemmed.
pub(crate) fn tokens(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let words = text.split(|c: char| !matches!(c, 'a'..='z' | '0'..='9')).filter(|word| !word.is_empty());
    words.map(|word| if word.len() > 3 { porter::stem(word) } else { word.into() }).collect()
}

/// The scores that kvpress reports: those of the `rouge` package, with the needle as hypothesis and the response as reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kvpress {
    /// ROUGE-1.
    pub rouge_1: Rouge,
    /// ROUGE-2.
    pub rouge_2: Rouge,
    /// ROUGE-L.
    pub rouge_l: Rouge,
}

/// kvpress's scores of a response. The whitespace around a needle is not its own: after the full stop it would be a sentence.
pub fn kvpress(needle: &str, response: &str) -> Kvpress {
    let needle = text::strip(needle);
    Kvpress {
        rouge_1: rouge_n(1, needle, response),
        rouge_2: rouge_n(2, needle, response),
        rouge_l: rouge_l(needle, response),
    }
}

/// Whether the response has the needle's answer word for word, ignoring case: the text after its first ` is `,
/// without the full stop, or the whole needle if it has no ` is `.
pub fn substring(needle: &str, response: &str) -> bool {
    let needle = text::strip(needle);
    let answer = needle.split_once(" is ").map_or(needle, |(_, answer)| answer).trim_end_matches('.');
    response.to_lowercase().contains(&answer.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDLE: &str =
        "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n";

    #[test]
    fn stemmed_scores_are_googles() {
        // Values of rouge_score 0.1.2.
        for (needle, response, rouge_1, rouge_l) in [
            (
                NEEDLE,
                "eat a sandwich and sit in Dolores Park on a sunny day.",
                0.7272727272727273,
                0.7272727272727273,
            ),
            (NEEDLE, "Eating sandwiches and sitting in Dolores Park on sunny days", 20.0 / 31.0, 20.0 / 31.0),
            ("Running the flies, dying news!", "He was lying: it runs, 3 flies died", 6.0 / 13.0, 6.0 / 13.0),
            ("sky skies", "The SKIES", 0.5, 0.5),
            ("a b", "b a", 1.0, 0.5),
            ("", "", 0.0, 0.0),
        ] {
            let got = stemmed(needle, response);
            assert!((got.rouge_1 - rouge_1).abs() < 1e-12, "{response:?}: {got:?}");
            assert!((got.rouge_l - rouge_l).abs() < 1e-12, "{response:?}: {got:?}");
        }
    }

    #[test]
    fn the_needle_is_kvpress_hypothesis() {
        let got = kvpress(NEEDLE, "sit in Dolores Park");
        assert_eq!((got.rouge_l.precision, got.rouge_l.recall), (4.0 / 19.0, 1.0));
        assert!((got.rouge_1.f - 0.34782608408317583).abs() < 1e-12, "{got:?}");
        assert!((got.rouge_2.f - 0.26086956294896035).abs() < 1e-12, "{got:?}");
        assert_eq!(kvpress(NEEDLE, ""), Kvpress::default());
    }

    #[test]
    fn the_substring_is_the_answer() {
        assert!(substring(
            NEEDLE,
            "You should EAT a sandwich and sit in Dolores Park on a sunny day, it says."
        ));
        assert!(!substring(NEEDLE, "eat a sandwich and sit in the park on a sunny day"));
        assert!(substring("Figs.", "some figs"));
    }
}
