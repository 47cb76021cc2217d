//! The chunks that a question's words point at.

use std::collections::{HashMap, HashSet};

/// The words of a text that are longer than two characters.
pub(super) fn words_of(text: &str) -> HashSet<String> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| word.chars().count() > 2);
    words.map(str::to_lowercase).collect()
}

/// Chunks by the weight of the question's words that they hold, rare words weighing more; the chunk that a question was made of
/// comes first.
pub(super) fn rank(chunks: &[HashSet<String>], question: &str, source: Option<usize>) -> Vec<usize> {
    let asked = words_of(question);
    let weight: HashMap<&String, f64> = asked
        .iter()
        .map(|word| (word, chunks.iter().filter(|chunk| chunk.contains(word)).count()))
        .map(|(word, holding)| (word, (1.0 + chunks.len() as f64 / (1.0 + holding as f64)).ln()))
        .collect();
    let score = |index: usize| -> f64 {
        let own =
            weight.iter().filter(|(word, _)| chunks[index].contains(**word)).map(|(_, weight)| weight).sum();
        if source == Some(index) { f64::INFINITY } else { own }
    };
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    order.sort_by(|a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_ranked_by_the_rare_words_of_the_question() {
        let chunks: Vec<HashSet<String>> =
            ["the bolt of the stem", "the wheel and the chain", "a waxed chain"].map(words_of).into();
        assert_eq!(rank(&chunks, "How is a waxed chain kept?", None), [2, 1, 0]);
        assert_eq!(rank(&chunks, "How is a waxed chain kept?", Some(0)), [0, 2, 1]);
    }
}
