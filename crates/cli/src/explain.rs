//! The tokens that the question attends to most, for people.

use refrain::engine::{AttendedToken, Explanation};

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::output::one_line;

/// Longest label shown, in characters.
const LABEL: usize = 28;

/// The question's most attended tokens in their context, those that were recomputed marked. The context is cut to so many columns.
pub(crate) fn explained(explanation: &Explanation, colour: bool, columns: Option<usize>) -> String {
    if explanation.tokens.is_empty() {
        return "there is no document whose tokens could be shown\n".to_owned();
    }
    let recomputed = mark("recomputed", true, colour);
    let cached = mark("taken from the cache", false, colour);
    let mut text = format!("What the question attends to most ({recomputed}, {cached}):\n");
    let labels: Vec<String> = explanation.tokens.iter().map(|token| short(&token.label)).collect();
    let width = labels.iter().map(|label| label.width()).max().unwrap_or(0);
    // A share of seven columns stands before the label, and two spaces behind each of both.
    let room = columns.map(|columns| columns.saturating_sub(width + 11));
    for (token, label) in explanation.tokens.iter().zip(&labels) {
        let space = " ".repeat(width - label.width());
        let share = format!("{:.1} %", 100.0 * token.share);
        let share = if share == "0.0 %" { "<0.1 %".to_owned() } else { share };
        text.push_str(&format!("{share:>7}  {label}{space}  {}\n", in_context(token, colour, room)));
    }
    let share = 100.0 * explanation.recomputed_share;
    text.push_str(&format!(
        "Recomputed tokens have {share:.0} % of the question's attention to the documents.\n"
    ));
    text
}

/// The token between the texts around it, of which as much is shown as `room` columns hold.
fn in_context(token: &AttendedToken, colour: bool, room: Option<usize>) -> String {
    // Spaces stay outside the mark, and line ends do not break the list.
    let text = one_line(&token.text);
    let (before, after) = (one_line(&token.before), one_line(&token.after));
    let word = if text.trim().is_empty() { "␣" } else { text.trim() };
    let lead = if text.starts_with(' ') && !before.ends_with(' ') { " " } else { "" };
    let (mut before, mut after) = (before.trim_start(), after.as_str());
    if let Some(room) = room {
        let marks = if colour { 0 } else { 2 };
        let around = room.saturating_sub("……".width() + lead.width() + word.width() + marks);
        // A text that is shorter than its half leaves the rest to the other.
        let half = around / 2;
        after = beginning(after, half.max(around.saturating_sub(before.width())));
        before = end(before, around - after.width());
    }
    format!("…{before}{lead}{}{after}…", mark(word, token.recomputed, colour))
}

/// The longest beginning of a text that takes no more than so many columns.
fn beginning(text: &str, columns: usize) -> &str {
    &text[..first_over(text.char_indices(), columns).map_or(text.len(), |(at, _)| at)]
}

/// The longest end of a text that takes no more than so many columns.
fn end(text: &str, columns: usize) -> &str {
    &text[first_over(text.char_indices().rev(), columns).map_or(0, |(at, c)| at + c.len_utf8())..]
}

/// The first character that so many columns have no room for, and its place.
fn first_over(mut chars: impl Iterator<Item = (usize, char)>, columns: usize) -> Option<(usize, char)> {
    let mut width = 0;
    chars.find(|(_, c)| {
        width += c.width().unwrap_or(0);
        width > columns
    })
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
        let explanation = Explanation { tokens, recomputed_share: 0.5, chunks: Vec::new() };
        let text = explained(&explanation, false, None);
        assert!(
            text.contains(" 25.0 %  A manual of conside…th (2/3)  …the bolt takes [5] Nm [2J, no more…"),
            "{text}"
        );
        assert!(text.contains("‹␣›") && text.contains("have 50 %"), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        let none = Explanation { tokens: Vec::new(), recomputed_share: 0.0, chunks: Vec::new() };
        assert_eq!(explained(&none, false, None), "there is no document whose tokens could be shown\n");
    }

    #[test]
    fn contexts_are_cut_around_the_token_to_the_terminal() {
        let row = |before: &str, after: &str, columns| {
            let token = AttendedToken {
                position: 7,
                share: 0.25,
                chunk: 0,
                label: "Bolts".to_owned(),
                before: before.to_owned(),
                text: "Nm".to_owned(),
                after: after.to_owned(),
                recomputed: true,
            };
            let explanation = Explanation { tokens: vec![token], recomputed_share: 0.5, chunks: Vec::new() };
            explained(&explanation, false, Some(columns)).lines().nth(1).unwrap().to_owned()
        };
        let (long, wide) = ("abcdefghij".repeat(8), "日本".repeat(40));
        assert_eq!(row(&long, &long, 36), " 25.0 %  Bolts  …defghij[Nm]abcdefg…");
        assert_eq!(row("a ", &long, 36), " 25.0 %  Bolts  …a [Nm]abcdefghijab…");
        assert_eq!(row(&long, " a", 36), " 25.0 %  Bolts  …ijabcdefghij[Nm] a…");
        for (columns, around) in [(36, &long), (37, &wide), (80, &wide), (10, &long)] {
            let row = row(around, around, columns);
            assert!(row.width() <= columns.max(22) && row.contains("[Nm]"), "{row}");
        }
    }
}
