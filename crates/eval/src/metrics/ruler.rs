//! RULER's metrics (`string_match_all`, `string_match_part`).

use super::text;

/// Share of the references that stand in the prediction, case aside; 0 if there are none.
pub(crate) fn match_all(prediction: &str, references: &[String]) -> f64 {
    matched(prediction, references) as f64 / references.len().max(1) as f64
}

/// Whether any of them does.
pub(crate) fn match_part(prediction: &str, references: &[String]) -> f64 {
    if matched(prediction, references) > 0 { 1.0 } else { 0.0 }
}

fn matched(prediction: &str, references: &[String]) -> usize {
    let printable = text::strip(prediction).replace(|c| c < ' ', "\n");
    let prediction = text::strip(&printable).to_lowercase();
    references.iter().filter(|reference| prediction.contains(&reference.to_lowercase())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_looked_for_in_printable_lowercase() {
        let references = ["abc", "c\nd", "xyz"].map(String::from);
        assert_eq!(match_all("\x07 Abc\x01DEF ", &references), 2.0 / 3.0);
        assert_eq!(match_part("\x07 Abc\x01DEF ", &references), 1.0);
        assert_eq!(match_part("", &references), 0.0);
        assert_eq!(match_all("abc", &[]), 0.0);
    }
}
