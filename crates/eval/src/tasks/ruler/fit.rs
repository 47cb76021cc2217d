//! How much haystack a length has room for (RULER's `generate_samples`).

use std::ops::RangeInclusive;

use super::random::Random;
use super::task::{RulerOptions, Task};
use crate::{Error, Result, Sample};

/// How a task makes a prompt of any size.
pub(super) trait Recipe {
    /// By how many units a prompt that came out too long is made shorter.
    fn step(&self) -> usize;

    /// The fewest units that make a prompt and the most that there are; empty if no number does.
    fn range(&self) -> RangeInclusive<usize>;

    /// A prompt of `units` units: its parts, its answers and its depth.
    fn prompt(&self, units: usize, draw: &mut Random) -> Sample;
}

/// The length that a task's samples must fit.
pub(super) struct LengthBudget<'a> {
    task: &'static Task,
    length: usize,
    /// Tokens that prompt and answer may take, `length` at most.
    room: usize,
    seed: u64,
    tokens: &'a dyn Fn(&str) -> usize,
    /// New tokens: they count into the length.
    pub(super) max_tokens: usize,
}

impl<'a> LengthBudget<'a> {
    pub(super) fn new(
        task: &'static Task,
        length: usize,
        seed: u64,
        tokens: &'a dyn Fn(&str) -> usize,
        options: &RulerOptions,
    ) -> LengthBudget<'a> {
        let max_tokens = options.max_tokens.unwrap_or(task.tokens_to_generate);
        let room = options.room.map_or(length, |room| room.min(length));
        LengthBudget { task, length, room, seed, tokens, max_tokens }
    }

    /// The length that the task's parameters depend on.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// How many units every sample begins with.
    pub(super) fn units(&self, recipe: &dyn Recipe) -> Result<usize> {
        self.largest(recipe, self.room).ok_or_else(|| self.too_short())
    }

    /// The most units whose prompt fits a length, if any does: RULER's binary search, with bounds found by doubling. Each try
    /// is drawn anew, so that prompts of as many units may be some tokens longer.
    pub(super) fn largest(&self, recipe: &dyn Recipe, length: usize) -> Option<usize> {
        let mut draw = self.draw("fit");
        let mut fits = |units| self.size(&recipe.prompt(units, &mut draw)) <= length;
        // A unit is a token or more.
        let (fewest, most) = (*recipe.range().start(), length.min(*recipe.range().end()));
        if fewest > most {
            return None;
        }
        let mut fitting = None;
        let mut next = recipe.step().clamp(fewest, most);
        while fits(next) {
            fitting = Some(next);
            if next == most {
                return fitting;
            }
            next = next.saturating_mul(2).min(most);
        }
        let mut unknown = fitting.map_or(fewest, |units| units + 1)..next;
        while !unknown.is_empty() {
            let middle = unknown.start + unknown.len() / 2;
            if fits(middle) {
                fitting = Some(middle);
                unknown.start = middle + 1;
            } else {
                unknown.end = middle;
            }
        }
        fitting
    }

    /// The sample number `index`, of `units` units or as many fewer as it takes to fit.
    pub(super) fn sample(&self, recipe: &dyn Recipe, mut units: usize, index: usize) -> Result<Sample> {
        let mut draw = self.draw(&index.to_string());
        loop {
            let prompt = recipe.prompt(units, &mut draw);
            if self.size(&prompt) <= self.room {
                return Ok(Sample {
                    id: format!("{}-{}-{index}", self.task.name, self.length),
                    // The chat template does not count into the length.
                    chat: true,
                    max_tokens: self.max_tokens,
                    length: Some(self.length),
                    ..prompt
                });
            }
            if units <= *recipe.range().start() {
                return Err(self.too_short());
            }
            units = fewer(units, recipe.step()).max(*recipe.range().start());
        }
    }

    /// Random choices for something of this task at this length.
    fn draw(&self, what: &str) -> Random {
        Random::named(&format!("{} {} {} {what}", self.task.name, self.length, self.seed))
    }

    /// Tokens of a prompt and of the answer.
    fn size(&self, prompt: &Sample) -> usize {
        (self.tokens)(&text(prompt)) + self.max_tokens
    }

    fn too_short(&self) -> Error {
        let LengthBudget { task, room, max_tokens, .. } = self;
        Error::Invalid(format!(
            "ruler: {room} tokens are too few for {}, whose answer has {max_tokens} of them: give it more",
            task.name
        ))
    }
}

/// A step fewer; a tenth where RULER's steps, made for 4096 tokens and more, would leave next to nothing.
fn fewer(units: usize, step: usize) -> usize {
    units - if units >= 2 * step { step } else { (units / 10).max(1) }
}

/// The whole prompt, as RULER has it.
pub(super) fn text(prompt: &Sample) -> String {
    [&prompt.before, &prompt.documents.concat(), &prompt.question, &prompt.answer_prefix]
        .map(String::as_str)
        .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::ruler::QA;

    /// A unit is a word; the random choice is a word more or less.
    struct Words(RangeInclusive<usize>);

    impl Recipe for Words {
        fn step(&self) -> usize {
            10
        }

        fn range(&self) -> RangeInclusive<usize> {
            self.0.clone()
        }

        fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
            Sample { before: "word ".repeat(units + draw.below(2)), ..Sample::default() }
        }
    }

    fn budget(length: usize) -> LengthBudget<'static> {
        let options = RulerOptions { max_tokens: Some(20), ..RulerOptions::default() };
        LengthBudget::new(&QA, length, 1, &|text| text.split_whitespace().count(), &options)
    }

    #[test]
    fn the_most_units_that_fit() {
        for length in [22, 30, 31, 100, 1000] {
            let units = budget(length).units(&Words(1..=usize::MAX)).unwrap();
            assert!((length - 21..=length - 20).contains(&units), "{length}: {units}");
        }
        assert_eq!(budget(1000).units(&Words(1..=70)).unwrap(), 70);
        assert_eq!(budget(1000).units(&Words(70..=70)).unwrap(), 70);
    }

    #[test]
    fn a_length_too_short_is_an_error() {
        for (length, range) in [(20, 1..=99), (40, 30..=99), (5, 1..=99), (1000, RangeInclusive::new(2, 1))] {
            let error = budget(length).units(&Words(range)).unwrap_err().to_string();
            assert!(error.contains("qa") && error.contains("20"), "{error}");
        }
        assert!(budget(40).sample(&Words(30..=99), 30, 0).is_err());
    }

    #[test]
    fn a_sample_too_long_is_made_again_with_fewer_units() {
        let sample = budget(100).sample(&Words(1..=usize::MAX), 95, 0).unwrap();
        let words = sample.before.split_whitespace().count();
        assert!((75..=76).contains(&words), "two steps fewer: {words}");
        assert_eq!((fewer(20, 10), fewer(19, 10), fewer(5, 10)), (10, 18, 4));
    }
}
