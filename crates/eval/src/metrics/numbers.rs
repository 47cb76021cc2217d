//! Counting and retrieval (LongBench `count_score`, `retrieval_score`, `retrieval_zh_score`).

use super::text::{digits_after, is_digit};

/// Share of the prediction's numbers that are the answer, as text.
pub(crate) fn count(prediction: &str, answer: &str) -> f64 {
    let (mut right, mut all) = (0usize, 0usize);
    for number in prediction.split(|c| !is_digit(c)).filter(|number| !number.is_empty()) {
        right += usize::from(number == answer);
        all += 1;
    }
    if all == 0 { 0.0 } else { right as f64 / all as f64 }
}

/// The score of the number that follows `label` in the answer; 0 if none does.
pub(crate) fn retrieval(prediction: &str, answer: &str, label: &str) -> f64 {
    digits_after(answer, label).map_or(0.0, |number| count(prediction, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_compared_as_text() {
        // Runs are 12, 012 and one of an ASCII and a full-width digit.
        assert_eq!(count("There are 12 of 012 and 1\u{ff12}.", "12"), 1.0 / 3.0);
        assert_eq!(count("none", "1"), 0.0);
        assert_eq!(retrieval("Paragraph 7, not 8", "Paragraph 7", "Paragraph "), 0.5);
        assert_eq!(retrieval("7", "7", "Paragraph "), 0.0);
        assert_eq!(retrieval("是段落13", "段落13", "段落"), 1.0);
    }
}
