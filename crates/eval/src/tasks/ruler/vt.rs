//! Variable tracking (RULER `variable_tracking.py`): which variables have a value, of a chain of assignments in noise.

use std::ops::RangeInclusive;

use super::fit::{LengthBudget, Recipe, text};
use super::niah::NOISE;
use super::random::Random;
use super::task::fill;
use crate::{Gold, Sample};

const BEFORE: &str =
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n";
const QUESTION: &str =
    "\nQuestion: Find all variables that are assigned the value {query} in the text above.";
const ANSWER_PREFIX: &str = " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are \
                             assigned the value {query}, they are: ";
/// Names in the chain: RULER's 4 hops.
const NAMES: usize = 5;
/// Most tokens of the worked example.
const EXAMPLE_LENGTH: usize = 500;

/// A chain in lines of noise, the units.
struct Chain {
    step: usize,
    /// Letters of a name.
    letters: usize,
}

impl Recipe for Chain {
    fn step(&self) -> usize {
        self.step
    }

    fn range(&self) -> RangeInclusive<usize> {
        // Each statement stands before a line of its own.
        NAMES..=usize::MAX
    }

    fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
        let names = draw.distinct(NAMES, |draw| draw.letters(b'A', self.letters));
        let value = (10_000 + draw.below(89_999)).to_string();
        let mut places = draw.places(NAMES, units);
        places.sort_unstable();
        let mut lines: Vec<String> = vec![NOISE.into(); units];
        for (i, place) in places.iter().enumerate() {
            // RULER's space at the end is part of the text.
            let statement = if i == 0 {
                format!("VAR {} = {value}", names[0])
            } else {
                format!("VAR {} = VAR {} ", names[i], names[i - 1])
            };
            lines.insert(place + i, statement);
        }
        let places = [("{query}", value.as_str()), ("{num_v}", &NAMES.to_string())];
        Sample {
            before: BEFORE.into(),
            documents: vec![lines.join("\n")],
            question: fill(QUESTION, &places),
            answer_prefix: fill(ANSWER_PREFIX, &places),
            gold: Gold { answers: names, ..Gold::default() },
            ..Sample::default()
        }
    }
}

/// Makes prompts: a small worked example, then the chain of the question.
pub(super) struct Tracking {
    example: Chain,
    /// Lines of noise in the example.
    example_lines: usize,
    chain: Chain,
}

impl Tracking {
    pub(super) fn new(budget: &LengthBudget<'_>) -> Tracking {
        let example = Chain { step: 5, letters: 3 };
        // Never more than half: RULER's example is made for lengths of 4096 and more.
        let length = EXAMPLE_LENGTH.min(budget.length() / 2);
        let example_lines = budget.largest(&example, length).unwrap_or(*example.range().start());
        let step = if budget.length() < 4096 { 5 } else { 10 };
        Tracking { example, example_lines, chain: Chain { step, letters: 5 } }
    }
}

impl Recipe for Tracking {
    fn step(&self) -> usize {
        self.chain.step()
    }

    fn range(&self) -> RangeInclusive<usize> {
        self.chain.range()
    }

    fn prompt(&self, units: usize, draw: &mut Random) -> Sample {
        let example = self.example.prompt(self.example_lines, draw);
        let sample = self.chain.prompt(units, draw);
        let before = format!("{} {}\n\n{}", text(&example), example.gold.answers.join(" "), sample.before);
        Sample { before, ..sample }
    }
}
