//! Metrics, each equal to its reference library: LongBench's (THUDM/LongBench 2e00731), RULER's, the needle's, LongGenBench's
//! and LongWriter's.

mod chinese;
mod classes;
mod code;
mod lcs;
pub mod longgen;
pub mod longwriter;
pub mod needle;
mod numbers;
mod porter;
mod qa;
mod rouge;
mod ruler;
mod text;

use crate::{Gold, Scoring};

pub use qa::{cacheblend_answer, normalise, token_f1};
pub use rouge::Rouge;
pub use text::first_line;

/// Score of a prediction, 0..1. None for [`Scoring::TokenF1`], which is [`token_f1`] and needs a tokenizer, and if
/// the gold lacks what the metric compares with.
///
/// LongBench's metrics take the best over the answers. The needle is the first answer, LongWriter's required length too.
pub fn score(scoring: Scoring, prediction: &str, gold: &Gold) -> Option<f64> {
    let first = || gold.answers.first();
    let metric: &dyn Fn(&str) -> f64 = match scoring {
        Scoring::QaF1 => &|answer| qa::words_f1(prediction, answer),
        Scoring::QaF1Zh => &|answer| chinese::words_f1(prediction, answer),
        Scoring::RougeL => &|answer| rouge::rouge_l(prediction, answer).f,
        Scoring::RougeLZh => &|answer| chinese::rouge_l(prediction, answer),
        Scoring::Classification => &|answer| classes::classification(prediction, answer, &gold.classes),
        Scoring::Count => &|answer| numbers::count(prediction, answer),
        Scoring::Retrieval => &|answer| numbers::retrieval(prediction, answer, "Paragraph "),
        Scoring::RetrievalZh => &|answer| numbers::retrieval(prediction, answer, "段落"),
        Scoring::CodeSim => &|answer| code::by_difflib(prediction, answer),
        Scoring::MatchAll => return Some(ruler::match_all(prediction, &gold.answers)),
        Scoring::MatchPart => return Some(ruler::match_part(prediction, &gold.answers)),
        Scoring::Needle => return Some(needle::stemmed(first()?, prediction).rouge_1),
        Scoring::LongWriter => {
            let required = first()?.parse().ok()?;
            return Some(longwriter::length_score(required, longwriter::words(prediction)));
        }
        Scoring::LongGen => {
            let plan = gold.plan.as_ref()?;
            return Some(longgen::Sections::of(plan, &plan.output(prediction)).completion(plan));
        }
        Scoring::TokenF1 => return None,
    };
    Some(best(gold, metric))
}

/// Further scores by name, 0..1, reported beside the task's own.
pub fn extra(scoring: Scoring, prediction: &str, gold: &Gold) -> Vec<(&'static str, f64)> {
    match (scoring, gold.answers.first()) {
        (Scoring::CodeSim, _) => {
            vec![("levenshtein", best(gold, &|answer| code::by_levenshtein(prediction, answer)))]
        }
        (Scoring::Needle, Some(needle)) => vec![
            ("rouge_l", needle::stemmed(needle, prediction).rouge_l),
            ("kvpress", needle::kvpress(needle, prediction).rouge_l.f),
            ("substring", f64::from(u8::from(needle::substring(needle, prediction)))),
        ],
        _ => Vec::new(),
    }
}

/// The best over the answers, 0 if there are none.
fn best(gold: &Gold, metric: &dyn Fn(&str) -> f64) -> f64 {
    gold.answers.iter().map(|answer| metric(answer)).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gold(answers: &[&str]) -> Gold {
        Gold {
            answers: answers.iter().map(ToString::to_string).collect(),
            classes: vec!["City".into(), "State".into()],
            ..Gold::default()
        }
    }

    #[test]
    fn the_best_answer_counts() {
        let two = gold(&["red", "blue sky"]);
        assert_eq!(score(Scoring::QaF1, "a blue sky", &two), Some(1.0));
        assert_eq!(score(Scoring::QaF1, "a blue sky", &gold(&[])), Some(0.0));
        assert_eq!(score(Scoring::Classification, "City", &gold(&["City"])), Some(1.0));
        assert_eq!(score(Scoring::MatchAll, "blue sky", &two), Some(0.5));
        assert_eq!(score(Scoring::MatchPart, "blue sky", &two), Some(1.0));
        assert_eq!(score(Scoring::RetrievalZh, "段落2", &gold(&["段落2"])), Some(1.0));
    }

    #[test]
    fn what_text_does_not_tell_has_no_score() {
        assert_eq!(score(Scoring::TokenF1, "a", &gold(&["a"])), None);
        assert_eq!(score(Scoring::LongGen, "a", &gold(&["a"])), None);
        assert_eq!(score(Scoring::Needle, "a", &gold(&[])), None);
        assert_eq!(score(Scoring::LongWriter, "a", &gold(&["many"])), None);
        let plan = longgen::Plan {
            kind: "Week".into(),
            prefix: "#*# Week 1:".into(),
            number: 4,
            ..Default::default()
        };
        let planned = Gold { plan: Some(plan), ..Gold::default() };
        assert_eq!(score(Scoring::LongGen, " so\n#*# Week 3: and", &planned), Some(0.5));
        assert_eq!(score(Scoring::LongWriter, "two words", &gold(&["4"])), Some(0.5));
    }

    #[test]
    fn further_scores_have_names() {
        assert_eq!(extra(Scoring::CodeSim, "ab", &gold(&["x", "ba"])), [("levenshtein", 0.5)]);
        let names = |scoring| {
            extra(scoring, "a", &gold(&["a"])).into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(Scoring::Needle), ["rouge_l", "kvpress", "substring"]);
        assert!(names(Scoring::QaF1).is_empty());
    }
}
