//! Classification (LongBench `classification_score`).

/// One over the classes that the prediction names, if the right one is among them.
///
/// Of those named, proper parts of the right one do not count. The reference removes them from the list while it walks it, so
/// that the class after a removed one is not looked at; that is kept.
pub(crate) fn classification(prediction: &str, answer: &str, classes: &[String]) -> f64 {
    let mut named: Vec<&str> =
        classes.iter().map(String::as_str).filter(|class| prediction.contains(class)).collect();
    let mut at = 0;
    while let Some(&class) = named.get(at) {
        if class != answer && answer.contains(class) {
            let first = named.iter().position(|other| *other == class).unwrap_or(at);
            named.remove(first);
        }
        at += 1;
    }
    if named.contains(&answer) { 1.0 / named.len() as f64 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_classes_share_the_point() {
        for (prediction, answer, classes, expected) in [
            ("Other location", "Other location", &["location", "Other location", "City"][..], 1.0),
            ("City or State", "City", &["City", "State"], 0.5),
            ("city", "City", &["City"], 0.0),
            ("State", "City", &["City", "State"], 0.0),
            // `b` is passed over, because the removal of `a` moves it to where the walk has been.
            ("a b c", "a b c", &["a", "b", "c", "a b c"], 0.5),
            ("ab", "ab", &["a", "b", "ab"], 0.5),
        ] {
            let classes: Vec<String> = classes.iter().map(ToString::to_string).collect();
            assert_eq!(classification(prediction, answer, &classes), expected, "{prediction} {answer}");
        }
    }
}
