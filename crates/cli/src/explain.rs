//! The tokens that the question attends to most, for people.

use refrain::engine::{AttendedToken, Explanation};

use unicode_width::UnicodeWidthStr as _;

use crate::output::one_line;

/// Longest label shown, in characters.
const LABEL: usize = 28;

/// The question's most attended tokens in their context, those that were recomputed marked.
pub(crate) fn explained(explanation: &Explanation, colour: bool) -> String {
    if explanation.tokens.is_empty() {
        return "there is no document whose tokens could be shown\n".to_owned();
    }
    let recomputed = mark("recomputed", true, colour);
    let cached = mark("taken from the cache", false, colour);
    let mut text = format!("What the question attends to most ({recomputed}, {cached}):\n");
    let labels: Vec<String> = explanation.tokens.iter().map(|token| short(&token.label)).collect();
    let width = labels.iter().map(|label| label.width()).max().unwrap_or(0);
    for (token, label) in explanation.tokens.iter().zip(&labels) {
        let space = " ".repeat(width - label.width());
        let share = format!("{:.1} %", 100.0 * token.share);
        let share = if share == "0.0 %" { "<0.1 %".to_owned() } else { share };
        text.push_str(&format!("{share:>7}  {label}{space}  {}\n", in_context(token, colour)));
    }
    let share = 100.0 * explanation.recomputed_share;
    text.push_str(&format!(
        "Recomputed tokens have {share:.0} % of the question's attention to the documents.\n"
    ));
    text
}

fn in_context(token: &AttendedToken, colour: bool) -> String {
    // Spaces stay outside the mark, and line ends do not break the list.
    let text = one_line(&token.text);
    let (before, after) = (one_line(&token.before), one_line(&token.after));
    let word = if text.trim().is_empty() { "␣" } else { text.trim() };
    let lead = if text.starts_with(' ') && !before.ends_with(' ') { " " } else { "" };
    format!("…{}{lead}{}{after}…", before.trim_start(), mark(word, token.recomputed, colour))
}

fn mark(word: &str, recomputed: bool, colour: bool) -> String {
    match (colour, recomputed) {
        (true, true) => format!("\x1b[1;4;32m{word}\x1b[0m"),
        (true, false) => format!("\x1b[1;36m{word}\x1b[0m"),
        (false, true) => format!("[{word}]"),
        (false, false) => format!("‹{word}›"),
    }
}

/// The beginning and the end of a label: parts of one document differ at the end.
fn short(label: &str) -> String {
    let label = one_line(label);
    let all: Vec<char> = label.chars().collect();
    if all.len() <= LABEL {
        return label;
    }
    let end = 8;
    let head: String = all[..LABEL - end - 1].iter().collect();
    format!("{head}…{}", all[all.len() - end..].iter().collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recomputed_tokens_stand_in_brackets_where_there_is_no_colour() {
        let token = |text: &str, recomputed| AttendedToken {
            position: 7,
            share: 0.25,
            chunk: 0,
            label: "A manual of considerable length (2/3)".to_owned(),
            before: "the bolt\ntakes".to_owned(),
            text: text.to_owned(),
            after: " Nm\x1b[2J, no more".to_owned(),
            recomputed,
        };
        let tokens = vec![token(" 5", true), token("\n", false)];
        let text = explained(&Explanation { tokens, recomputed_share: 0.5, chunks: Vec::new() }, false);
        assert!(
            text.contains(" 25.0 %  A manual of conside…th (2/3)  …the bolt takes [5] Nm [2J, no more…"),
            "{text}"
        );
        assert!(text.contains("‹␣›") && text.contains("have 50 %"), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        let none = Explanation { tokens: Vec::new(), recomputed_share: 0.0, chunks: Vec::new() };
        assert_eq!(explained(&none, false), "there is no document whose tokens could be shown\n");
    }
}
