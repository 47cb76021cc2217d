//! LongWriter's metrics (LongBench-Write): length score and the judge's quality score.

use serde_json::{Map, Value};

use super::text;

/// The dimensions that the judge grades from 1 to 5, by the names of its reply.
pub const DIMENSIONS: [&str; 6] =
    ["Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience"];

/// Words of a response: Chinese characters (U+4E00..U+9FFF), and words that are all ASCII letters.
pub fn words(response: &str) -> usize {
    let chinese = response.chars().filter(|c| matches!(c, '\u{4e00}'..='\u{9fff}')).count();
    chinese + text::runs(response).filter(|run| run.bytes().all(|b| b.is_ascii_alphabetic())).count()
}

/// Length score `S_l`, 0..1: 1 for as many words as required, falling to 0 at four times as many or a third.
pub fn length_score(required: usize, words: usize) -> f64 {
    if required == 0 || words == 0 {
        return 0.0;
    }
    let (x, y) = (required as f64, words as f64);
    let off = if y > x { (y / x - 1.0) / 3.0 } else { (x / y - 1.0) / 2.0 };
    (1.0 - off).max(0.0)
}

/// The judge's prompt: its template with the prompt and the response filled in.
pub fn judge_prompt(template: &str, prompt: &str, response: &str) -> String {
    template.replace("$INST$", prompt).replace("$RESPONSE$", response)
}

/// The judge's grades, in the order of [`DIMENSIONS`]. None if the reply is not the demanded JSON; the judge is then
/// asked again (the reference tries five times, then leaves the item out).
pub fn judgement(reply: &str) -> Option<[f64; 6]> {
    let json = match reply.contains("```json") {
        true => reply.split_once("```json\n")?.1.split_once("\n```")?.0,
        false => reply,
    };
    let scores: Map<String, Value> = serde_json::from_str(&json.replace('\n', "")).ok()?;
    let mut given = [0.0; 6];
    for (given, dimension) in given.iter_mut().zip(DIMENSIONS) {
        let grade = scores.get(dimension)?;
        // Some judges write numbers as strings.
        let grade = grade.as_f64().or_else(|| grade.as_str()?.trim().parse().ok());
        *given = grade.filter(|grade| (1.0..=5.0).contains(grade))?;
    }
    Some(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_characters_and_whole_latin_words() {
        // Not: the digit's, the underscore's, and the one that touches a Chinese character.
        assert_eq!(words("Hello, world2 don't a_b 你好ok，ok"), 6);
        assert_eq!(words(""), 0);
    }

    #[test]
    fn length_score_falls_on_both_sides() {
        for (required, words, expected) in [
            (1000, 1000, 1.0),
            (1000, 2500, 0.5),
            (1000, 4000, 0.0),
            (1000, 9000, 0.0),
            (1000, 500, 0.5),
            (900, 300, 0.0),
            (900, 0, 0.0),
            (0, 5, 0.0),
        ] {
            assert_eq!(length_score(required, words), expected, "{required} {words}");
        }
    }

    #[test]
    fn judgements_are_read_from_json_in_a_fence_or_bare() {
        let json = r#"{"Analysis": "so
so", "Relevance": 5, "Accuracy": 4, "Coherence": 3, "Clarity": 2, "Breadth and Depth": 1, "Reading Experience": 5}"#;
        let given = Some([5.0, 4.0, 3.0, 2.0, 1.0, 5.0]);
        assert_eq!(judgement(json), given);
        assert_eq!(judgement(&format!("Here:\n```json\n{json}\n```\nDone")), given);
        assert_eq!(judgement(&json.replace("\"Clarity\": 2", "\"Clarity\": \" 2\"")), given);
        assert_eq!(judgement(&json.replace("\"Clarity\": 2", "\"Clarity\": \"good\"")), None);
        assert_eq!(judgement(&format!("Here: {json}")), None);
        assert_eq!(judgement(&json.replace("Clarity", "Clearness")), None);
        assert_eq!(judgement(&json.replace("\"Clarity\": 2", "\"Clarity\": 7")), None);
        assert_eq!(judgement("```json\n{"), None);
    }

    #[test]
    fn the_prompt_has_both_texts() {
        assert_eq!(judge_prompt("<$INST$> <$RESPONSE$>", "ask", "say"), "<ask> <say>");
    }
}
