//! Scores of answers: by metrics of the text, by the model's tokens, and by a judge.

use std::collections::BTreeMap;

use crate::judge::{Judge, JudgeOptions};
use crate::metrics::longgen::{CheckKind, Plan, Sections, judge_prompt, keyword_presence, verdict};
use crate::metrics::{self, longwriter};
use crate::{Error, Gold, Result, Sample, Scoring};

/// How LongGenBench asks its judge, Meta-Llama-3.1-8B-Instruct.
const CHECKING: JudgeOptions =
    JudgeOptions { temperature: 0.95, top_p: Some(0.95), max_tokens: 50, seed: Some(42) };
/// How LongWriter asks its own, GPT-4o (`eval_quality.py`).
const GRADING: JudgeOptions = JudgeOptions { temperature: 0.5, top_p: None, max_tokens: 1024, seed: None };
/// How often it asks for grades that can be read.
const TRIES: usize = 5;

/// Scores answers.
#[derive(Clone, Copy)]
pub struct Scorer<'a> {
    /// Judges long outputs, if there is one.
    pub judge: Option<&'a Judge>,
    /// The prompt of LongWriter's judge ([`judge_template`](crate::tasks::longwriter::judge_template)); without it
    /// quality is not graded.
    pub quality: Option<&'a str>,
    /// Ids of a text by the model's tokenizer, no BOS.
    pub encode: &'a dyn Fn(&str) -> Vec<u32>,
}

/// Scores by name.
type Scores = BTreeMap<String, f64>;

impl Scorer<'_> {
    /// Scores by name. `score` is the task's own, 0..1; others depend on the task: see [`Record::scores`].
    ///
    /// [`Record::scores`]: crate::Record::scores
    ///
    /// # Errors
    /// If the sample's gold lacks what the metric compares with, or the judge fails.
    pub fn scores(
        &self,
        scoring: Scoring,
        first_line: bool,
        sample: &Sample,
        answer: &str,
    ) -> Result<Scores> {
        let answer = if first_line { metrics::first_line(answer) } else { answer };
        let own = match scoring {
            Scoring::TokenF1 => Some(self.token_f1(answer, &sample.gold)),
            _ => metrics::score(scoring, answer, &sample.gold),
        };
        let own = own.ok_or_else(|| {
            Error::Invalid(format!("sample {}: its gold has nothing to score {scoring:?} by", sample.id))
        })?;
        let mut scores = Scores::from([("score".into(), own)]);
        let extra = metrics::extra(scoring, answer, &sample.gold);
        scores.extend(extra.into_iter().map(|(name, score)| (name.into(), score)));
        match (scoring, &sample.gold.plan) {
            (Scoring::LongGen, Some(plan)) => self.sections(plan, answer, &mut scores)?,
            // Of LongWrite-Ruler only lengths count.
            (Scoring::LongWriter, _) if sample.id.starts_with("longwrite_ruler") => {
                scores.insert("words".into(), longwriter::words(answer) as f64);
            }
            (Scoring::LongWriter, _) => self.writing(&sample.question, answer, &mut scores)?,
            _ => {}
        }
        Ok(scores)
    }

    /// CacheBlend's F1, the best over the answers.
    fn token_f1(&self, answer: &str, gold: &Gold) -> f64 {
        let ids = (self.encode)(&metrics::cacheblend_answer(answer));
        let references = gold.answers.iter().map(|answer| (self.encode)(&metrics::normalise(answer)));
        references.map(|reference| metrics::token_f1(&ids, &reference)).fold(0.0, f64::max)
    }

    /// The counts of LongGenBench's tables. Without a judge the names of the checks' counts begin with `proxy_`.
    fn sections(&self, plan: &Plan, generation: &str, scores: &mut Scores) -> Result<()> {
        let output = plan.output(generation);
        let sections = Sections::of(plan, &output);
        scores.insert("words".into(), sections.words() as f64);
        scores.insert("long".into(), f64::from(u8::from(sections.is_long())));
        let prefix = if self.judge.is_some() { "" } else { "proxy_" };
        let mut count = |name: &str, more: f64| {
            *scores.entry(format!("{prefix}{name}")).or_default() += more;
        };
        for kind in ["once", "range", "periodic"] {
            count(&format!("{kind}_yes"), 0.0);
            count(&format!("{kind}_asked"), 0.0);
        }
        count("checks", 0.0);
        for check in sections.checks(plan) {
            count("checks", 1.0);
            let Some(block) = check.block else { continue };
            let kind = match check.kind {
                CheckKind::Once => "once",
                CheckKind::Range => "range",
                CheckKind::Periodic => "periodic",
            };
            let yes = match self.judge {
                Some(judge) => {
                    let reply = judge.ask(&judge_prompt(block, check.description), &CHECKING)?;
                    f64::from(u8::from(verdict(&reply)))
                }
                None => keyword_presence(block, check.description),
            };
            count(&format!("{kind}_asked"), 1.0);
            count(&format!("{kind}_yes"), yes);
        }
        Ok(())
    }

    /// LongWriter's length and, if the judge grades it in a form that can be read, quality.
    fn writing(&self, prompt: &str, response: &str, scores: &mut Scores) -> Result<()> {
        scores.insert("words".into(), longwriter::words(response) as f64);
        let (Some(judge), Some(template)) = (self.judge, self.quality) else { return Ok(()) };
        let question = longwriter::judge_prompt(template, prompt, response);
        for _ in 0..TRIES {
            if let Some(grades) = longwriter::judgement(&judge.ask(&question, &GRADING)?) {
                let names = longwriter::DIMENSIONS.map(|name| name.to_lowercase().replace(' ', "_"));
                // From 1..5 to 0..1: S_q is the mean of the six.
                let grades = grades.map(|grade| (grade - 1.0) / 4.0);
                let named = names.iter().zip(grades).map(|(name, grade)| (format!("quality_{name}"), grade));
                scores.extend(named);
                scores.insert("quality".into(), grades.iter().sum::<f64>() / grades.len() as f64);
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::tests::{judge, says, server};

    /// A token a word.
    fn encode(text: &str) -> Vec<u32> {
        text.split_whitespace().map(|word| word.bytes().map(u32::from).sum()).collect()
    }

    fn scorer<'a>(judge: Option<&'a Judge>) -> Scorer<'a> {
        Scorer { judge, quality: Some("Grade $INST$: $RESPONSE$"), encode: &encode }
    }

    fn sample(answers: &[&str]) -> Sample {
        let answers = answers.iter().map(ToString::to_string).collect();
        Sample {
            id: "s".into(),
            question: "Write".into(),
            gold: Gold { answers, ..Gold::default() },
            ..Sample::default()
        }
    }

    fn named(scores: &[(&str, f64)]) -> Scores {
        scores.iter().map(|(name, score)| (name.to_string(), *score)).collect()
    }

    #[test]
    fn the_score_is_the_metrics_with_what_it_reports_beside() {
        let got = scorer(None).scores(Scoring::QaF1, true, &sample(&["red"]), "\n\nred\nblue").unwrap();
        assert_eq!(got, named(&[("score", 1.0)]));
        let got = scorer(None).scores(Scoring::QaF1, false, &sample(&["red"]), "red\nblue").unwrap();
        assert_eq!(got, named(&[("score", 2.0 / 3.0)]));
        let got = scorer(None).scores(Scoring::CodeSim, false, &sample(&["ba"]), "ab").unwrap();
        assert_eq!(got, named(&[("levenshtein", 0.5), ("score", 0.5)]));
        let error = scorer(None).scores(Scoring::LongGen, false, &sample(&["a"]), "ab").unwrap_err();
        assert!(error.to_string().contains("sample s: its gold has nothing to score LongGen by"));
    }

    #[test]
    fn token_f1_is_of_the_best_answer() {
        let score = |answers: &[&str], answer| {
            scorer(None).scores(Scoring::TokenF1, false, &sample(answers), answer).unwrap()["score"]
        };
        assert_eq!(score(&["no", "The Red Sea!"], " red sea\nQuestion: what"), 1.0);
        assert_eq!(score(&["red sea and more"], "red sea"), 2.0 / 3.0);
        assert_eq!(score(&["yes"], "Yes, it is"), 1.0);
        assert_eq!(score(&[], "red"), 0.0);
    }

    fn planned() -> Sample {
        let plan = serde_json::from_str(
            r##"{"type": "Week", "prefix": "#*# Week 1:", "number": 4, "checks_once": {"1": "yoga", "2": "opera"},
                "checks_range": {"2": "fashion week", "4": "fashion week"}, "checks_periodic": {}}"##,
        );
        let gold = Gold { plan: Some(plan.unwrap()), ..Gold::default() };
        Sample { gold, ..sample(&[]) }
    }

    const GENERATION: &str = " yoga\n#*# Week 2: fashion";

    #[test]
    fn sections_are_checked_by_the_judge() {
        let (url, server) = server(vec![says("Yes."), says("No."), says("yes")]);
        let judge = judge(&url, None);
        let got = scorer(Some(&judge)).scores(Scoring::LongGen, false, &planned(), GENERATION).unwrap();
        let expected = [
            ("score", 0.5),
            ("words", 8.0),
            ("long", 0.0),
            ("checks", 4.0),
            ("once_yes", 1.0),
            ("once_asked", 2.0),
            ("range_yes", 1.0),
            ("range_asked", 1.0),
            ("periodic_yes", 0.0),
            ("periodic_asked", 0.0),
        ];
        assert_eq!(got, named(&expected));
        let asked = server.join().unwrap();
        let first = "Context:  Week 1: yoga\n### Instruction: Does this context include the yoga?";
        assert!(asked[0].body["messages"][0]["content"].as_str().unwrap().starts_with(first));
        assert_eq!(asked[0].body["max_tokens"], 50);
    }

    #[test]
    fn without_a_judge_keywords_stand_in_under_names_of_their_own() {
        let got = scorer(None).scores(Scoring::LongGen, false, &planned(), GENERATION).unwrap();
        let expected = [
            ("score", 0.5),
            ("words", 8.0),
            ("long", 0.0),
            ("proxy_checks", 4.0),
            ("proxy_once_yes", 1.0),
            ("proxy_once_asked", 2.0),
            ("proxy_range_yes", 1.0),
            ("proxy_range_asked", 1.0),
            ("proxy_periodic_yes", 0.0),
            ("proxy_periodic_asked", 0.0),
        ];
        assert_eq!(got, named(&expected));
    }

    #[test]
    fn writing_is_graded_until_the_grades_can_be_read() {
        let grades = r#"{"Relevance": 5, "Accuracy": 4, "Coherence": 3, "Clarity": 2, "Breadth and Depth": 1, "Reading Experience": 5}"#;
        let (url, asked) = server(vec![says("Well written."), says(grades)]);
        let got = {
            let judge = judge(&url, None);
            scorer(Some(&judge)).scores(Scoring::LongWriter, false, &sample(&["4"]), "two words").unwrap()
        };
        let expected = [
            ("score", 0.5),
            ("words", 2.0),
            ("quality", 3.5 / 6.0),
            ("quality_relevance", 1.0),
            ("quality_accuracy", 0.75),
            ("quality_coherence", 0.5),
            ("quality_clarity", 0.25),
            ("quality_breadth_and_depth", 0.0),
            ("quality_reading_experience", 1.0),
        ];
        assert_eq!(got, named(&expected));
        assert_eq!(asked.join().unwrap()[1].body["messages"][0]["content"], "Grade Write: two words");

        let (url, asked) = server(vec![says("?"); 5]);
        let got =
            scorer(Some(&judge(&url, None))).scores(Scoring::LongWriter, false, &sample(&["4"]), "two words");
        assert_eq!(got.unwrap(), named(&[("score", 0.5), ("words", 2.0)]));
        assert_eq!(asked.join().unwrap().len(), 5);
    }

    #[test]
    fn a_judge_that_fails_fails_the_score() {
        let (url, asked) = server(vec![(400, "no".into())]);
        let got = scorer(Some(&judge(&url, None))).scores(Scoring::LongGen, false, &planned(), GENERATION);
        assert!(got.unwrap_err().to_string().contains("400"));
        asked.join().unwrap();
    }
}
