//! LongGenBench's metrics: the sections of a long output, and whether a judge finds the demanded content in them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{needle, text};

/// Stands before each section.
const SEPARATOR: &str = "#*#";

/// The demands of a prompt: the fields of its record that the metrics need.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of a section, such as `Week` or `Floor`.
    #[serde(rename = "type")]
    pub kind: String,
    /// How the output begins; it stands in the prompt.
    pub prefix: String,
    /// Sections expected, numbered from 1.
    pub number: usize,
    /// Content of single sections, by their number.
    pub checks_once: BTreeMap<String, String>,
    /// Content of runs of sections.
    pub checks_range: BTreeMap<String, String>,
    /// Content of sections at a period.
    pub checks_periodic: BTreeMap<String, String>,
}

impl Plan {
    /// The output that is scored: the prefix and the generated text.
    pub fn output(&self, generation: &str) -> String {
        format!("{}{generation}", self.prefix)
    }
}

/// Which of a plan's three maps a check comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckKind {
    /// Of a single section.
    Once,
    /// Of a run of sections.
    Range,
    /// Sections at a period.
    Periodic,
}

/// One thing that a section must describe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Check<'t> {
    /// Where it comes from.
    pub kind: CheckKind,
    /// The section's number.
    pub section: usize,
    /// The content that is demanded.
    pub description: &'t str,
    /// The section; none if the output has no such section. Then the judge is not asked.
    pub block: Option<&'t str>,
}

/// An output by its sections.
#[derive(Clone, Debug, PartialEq)]
pub struct Sections<'t> {
    output: &'t str,
    /// The first block of each number.
    numbered: BTreeMap<usize, &'t str>,
}

impl<'t> Sections<'t> {
    /// The sections of `output`, which is the plan's prefix and the generation after it: blocks between separators `#*#` that
    /// have the name of a section and a number anywhere in them.
    pub fn of(plan: &Plan, output: &'t str) -> Sections<'t> {
        let label = format!("{} ", plan.kind);
        let mut numbered = BTreeMap::new();
        for block in output.split(SEPARATOR) {
            if let Some(number) = text::digits_after(block, &label).and_then(|digits| digits.parse().ok()) {
                numbered.entry(number).or_insert(block);
            }
        }
        Sections { output, numbered }
    }

    /// Completion rate, 0..1: share of the expected sections that the output has.
    pub fn completion(&self, plan: &Plan) -> f64 {
        let there = self.numbered.keys().filter(|section| (1..=plan.number).contains(section)).count();
        there as f64 / plan.number.max(1) as f64
    }

    /// Words of the output.
    pub fn words(&self) -> usize {
        text::split(self.output).count()
    }

    /// Whether the output counts for the average number of words: more than 40 blocks and 2000 words.
    pub fn is_long(&self) -> bool {
        self.output.split(SEPARATOR).count() > 40 && self.words() > 2000
    }

    /// Everything that the plan wants of a section.
    pub fn checks(&self, plan: &'t Plan) -> Vec<Check<'t>> {
        let maps = [
            (CheckKind::Once, &plan.checks_once),
            (CheckKind::Range, &plan.checks_range),
            (CheckKind::Periodic, &plan.checks_periodic),
        ];
        let all = maps
            .into_iter()
            .flat_map(|(kind, map)| map.iter().map(move |(section, text)| (kind, section, text)));
        all.filter_map(|(kind, section, description)| {
            let section = section.parse().ok()?;
            Some(Check { kind, section, description, block: self.numbered.get(&section).copied() })
        })
        .collect()
    }
}

/// The judge's prompt about a block.
pub fn judge_prompt(block: &str, description: &str) -> String {
    format!(
        "Context: {block}### Instruction: Does this context include the {description}? Please answer with 'yes' or 'no' only."
    )
}

/// The judge's verdict: whether its reply says yes anywhere.
pub fn verdict(reply: &str) -> bool {
    reply.to_lowercase().contains("yes")
}

/// A stand-in where there is no judge, and no score of the benchmark: share of the description's keywords that are in the
/// block, 0..1. Keywords are its words of more than three letters, case aside, by their Porter stems; all its words if it has
/// none so long.
pub fn keyword_presence(block: &str, description: &str) -> f64 {
    let block = needle::tokens(block);
    let mut keywords = needle::tokens(description);
    if keywords.iter().any(|word| word.len() > 3) {
        keywords.retain(|word| word.len() > 3);
    }
    let present = keywords.iter().filter(|word| block.contains(word)).count();
    present as f64 / keywords.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        serde_json::from_str(
            r##"{"type": "Week", "prefix": "#*# Week 1:", "number": 4, "prompt": "Write",
                "checks_once": {"2": "my wife birthday"}, "checks_range": {"001": "fashion week", "3": "fashion week"},
                "checks_periodic": {"4": "yoga"}}"##,
        )
        .unwrap()
    }

    const OUTPUT: &str = "#*# Week 1: shows\n#*# The Week of Week 2 (January)\n#*# again Week 2\n#*# Week x\n#*# Week 4 Yoga\n#*# Week 9";

    #[test]
    fn the_first_block_of_a_number_is_its_section() {
        let plan = plan();
        let sections = Sections::of(&plan, OUTPUT);
        assert_eq!(sections.completion(&plan), 0.75);
        assert_eq!(sections.words(), 25);
        let checks = sections.checks(&plan);
        let got: Vec<_> = checks.iter().map(|check| (check.kind, check.section, check.block)).collect();
        assert_eq!(
            got,
            [
                (CheckKind::Once, 2, Some(" The Week of Week 2 (January)\n")),
                (CheckKind::Range, 1, Some(" Week 1: shows\n")),
                (CheckKind::Range, 3, None),
                (CheckKind::Periodic, 4, Some(" Week 4 Yoga\n")),
            ]
        );
        assert_eq!(Sections::of(&plan, "").completion(&plan), 0.0);
        assert_eq!(Sections::of(&Plan::default(), " 1").completion(&Plan::default()), 0.0);
    }

    #[test]
    fn long_outputs_have_many_blocks_and_words() {
        let plan = plan();
        let blocks = |count: usize, words: usize| vec!["word ".repeat(words); count].join("#*#");
        for (count, words, expected) in [(41, 50, true), (40, 60, false), (41, 48, false)] {
            assert_eq!(Sections::of(&plan, &blocks(count, words)).is_long(), expected, "{count} {words}");
        }
    }

    #[test]
    fn the_judge_is_asked_and_read_as_in_the_reference() {
        assert_eq!(
            judge_prompt(" Week 1\n", "yoga"),
            "Context:  Week 1\n### Instruction: Does this context include the yoga? Please answer with 'yes' or 'no' only."
        );
        assert!(verdict(" Yes, it does.") && !verdict("No."));
    }

    #[test]
    fn keywords_are_found_by_their_stems() {
        assert_eq!(keyword_presence("We attended a Parenting workshop.", "Attend a parenting workshop"), 1.0);
        assert_eq!(keyword_presence("The gym and the garden", "sky garden"), 1.0);
        assert_eq!(keyword_presence("The gym", "gym"), 1.0);
        assert_eq!(keyword_presence("my wife", "my wife birthday, my mother birthday"), 0.25);
        assert_eq!(keyword_presence("", ""), 0.0);
    }
}
