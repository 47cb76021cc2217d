use std::cell::Cell;

use proptest::prelude::*;

use super::*;

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

fn split(text: &str, max: usize, size: impl Fn(&str) -> usize) -> Vec<Piece> {
    super::split(text, max, 0, |range| size(&text[range]))
}

fn cut(text: &str, max: usize) -> Vec<(Vec<&'static str>, String)> {
    split(text, max, words)
        .into_iter()
        .map(|piece| (piece.headings.into_iter().map(|h| &*h.leak()).collect(), piece.text))
        .collect()
}

#[test]
fn a_text_that_fits_is_one_piece() {
    assert_eq!(
        cut("# A\n\none two\n\n## B\n\nthree\n", 9),
        [(vec![], "# A\n\none two\n\n## B\n\nthree".to_owned())]
    );
    assert!(split(" \n\n ", 5, words).is_empty());
}

#[test]
fn cuts_follow_headings_and_the_path_is_kept() {
    let text = "# Handbook\n\nIntro here.\n\n## Brakes\n\nGeneral words on brakes.\n\n### Front\n\nfront text that is long enough\n\n### Rear wheel\n\nrear text that is long enough\n\n## Lights\n\nlamp\n\n## Bell\n\nring\n";
    let pieces = cut(text, 13);
    let expected = [
        (vec![], "# Handbook\n\nIntro here."),
        (vec!["Handbook"], "## Brakes\n\nGeneral words on brakes."),
        (vec!["Handbook", "Brakes"], "### Front\n\nfront text that is long enough"),
        (vec!["Handbook", "Brakes"], "### Rear wheel\n\nrear text that is long enough"),
        (vec!["Handbook"], "## Lights\n\nlamp\n\n## Bell\n\nring"),
    ];
    assert_eq!(pieces, expected.map(|(path, text)| (path, text.to_owned())));
}

#[test]
fn headings_without_text_go_with_the_text_below_them() {
    let text = "# A\n\n## B\n\none two three four five six. Seven eight nine ten.\n";
    let expected =
        [(vec![], "# A\n\n## B\n\none two three four five six."), (vec!["A", "B"], "Seven eight nine ten.")];
    assert_eq!(cut(text, 10), expected.map(|(path, text)| (path, text.to_owned())));
}

#[test]
fn sentences_stay_whole_while_they_fit() {
    let text = "Dr. Smith has e.g. two bikes. He rides them daily. It rains a lot.";
    let pieces: Vec<String> = split(text, 7, words).into_iter().map(|piece| piece.text).collect();
    assert_eq!(pieces, ["Dr. Smith has e.g. two bikes.", "He rides them daily.", "It rains a lot."]);
    let pieces: Vec<String> = split(text, 8, words).into_iter().map(|piece| piece.text).collect();
    assert_eq!(pieces, ["Dr. Smith has e.g. two bikes.", "He rides them daily. It rains a lot."]);
}

#[test]
fn long_sentences_are_cut_between_words_and_long_words_between_characters() {
    let pieces: Vec<String> =
        split("one two three four five", 2, words).into_iter().map(|piece| piece.text).collect();
    assert_eq!(pieces, ["one two", "three four", "five"]);
    let pieces: Vec<String> =
        split("äöüäöüä", 3, |text| text.chars().count()).into_iter().map(|piece| piece.text).collect();
    assert_eq!(pieces, ["äöü", "äöü", "ä"]);
    // Nothing fits, and each character is a piece all the same.
    assert_eq!(split("ab c", 0, str::len).len(), 3);
}

#[test]
fn code_and_tables_stay_whole_and_are_cut_between_lines() {
    let code = "```\n# no heading\nlet a = 1;\n\nlet b = 2;\n```";
    let text = format!("Some words that fill up the first piece here.\n\n{code}\n\nAfter.");
    let pieces: Vec<String> = split(&text, 13, words).into_iter().map(|piece| piece.text).collect();
    assert_eq!(pieces, ["Some words that fill up the first piece here.", code, "After."]);
    let table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |";
    let pieces: Vec<String> = split(table, 10, words).into_iter().map(|piece| piece.text).collect();
    assert_eq!(pieces, ["| a | b |\n| --- | --- |", "| 1 | 2 |\n| 3 | 4 |", "| 5 | 6 |"]);
}

#[test]
fn what_stands_above_a_piece_has_its_room() {
    let text = "# One\n\n## Two\n\n### Three\n\none two three four five six. Seven eight nine ten.\n";
    let counted = |max, title| super::split(text, max, title, |range| words(&text[range]));
    let pieces = counted(10, 0);
    assert_eq!(
        pieces[0].text, "# One\n\n## Two\n\n### Three\n\none two three four",
        "a heading stays with words below it"
    );
    assert_eq!(pieces[1].text, "five six. Seven eight nine ten.");
    assert_eq!(pieces[1].headings, ["Two", "Three"], "the innermost that take half of it");
    assert_eq!(counted(10, 3).last().unwrap().headings, ["Three"]);
    for (max, title) in [(8, 0), (10, 0), (10, 4), (14, 3)] {
        for piece in counted(max, title) {
            let above = piece.headings.len() * 2;
            assert!(words(&piece.text) + above + title <= max, "{max} {title} {piece:?}");
        }
    }
}

#[test]
fn underlined_headings_are_headings() {
    let text = "Handbook\n========\n\nSome text here.\n\nBrakes\n------\n\nMore text here.\n";
    assert_eq!(
        cut(text, 7),
        [
            (vec![], "Handbook\n========\n\nSome text here.".to_owned()),
            (vec!["Handbook"], "Brakes\n------\n\nMore text here.".to_owned())
        ]
    );
}

#[test]
fn a_piece_alone_begins_with_its_path() {
    let text = "# Handbook\n\n## Brakes\n\nOne two three four five six.\n\n### Rear wheel\n\nTurn the screw to the left.\n";
    let headed: Vec<String> = split(text, 14, words).iter().map(|piece| piece.headed("Handbook")).collect();
    assert_eq!(
        headed,
        [
            "Handbook > Brakes\n\nOne two three four five six.",
            "Handbook > Brakes > Rear wheel\n\nTurn the screw to the left."
        ]
        .map(str::to_owned)
    );
    let piece = Piece {
        headings: vec!["A".into()],
        opening: String::new(),
        text: "## B\n\nb\n\n## C\n\nc".into(),
        range: 0..0,
    };
    assert_eq!(piece.headed("T"), "T > A\n\n## B\n\nb\n\n## C\n\nc");
    let piece = Piece { headings: vec![], opening: String::new(), text: "plain".into(), range: 0..0 };
    assert_eq!(piece.headed(""), "plain");
    assert_eq!(piece.headed("T"), "T\n\nplain");
    let piece = Piece {
        headings: vec![],
        opening: String::new(),
        text: "# T\n\n## B\n\nb\n\n# C\n\nc".into(),
        range: 0..0,
    };
    assert_eq!(piece.headed("T"), "# T\n\n## B\n\nb\n\n# C\n\nc");
}

#[test]
fn the_size_is_counted_sparingly() {
    let paragraph = "These are some words of a paragraph, nothing more. ".repeat(8);
    let text = format!("# Part\n\n{paragraph}\n\n").repeat(200);
    let (calls, bytes) = (Cell::new(0), Cell::new(0));
    let pieces = split(&text, 300, |text| {
        calls.set(calls.get() + 1);
        bytes.set(bytes.get() + text.len());
        words(text)
    });
    let blocks = 400;
    assert!(calls.get() < blocks + 6 * pieces.len(), "{} calls for {} pieces", calls.get(), pieces.len());
    assert!(bytes.get() < 8 * text.len(), "{} bytes counted of {}", bytes.get(), text.len());
    // Pieces are filled: 72 words a paragraph leave room for four.
    assert_eq!(pieces.len(), 200_usize.div_ceil(4));
}

#[test]
fn lines_that_end_no_sentence_are_cut_between_lines() {
    let rows: Vec<String> = (0..9).map(|row| format!("{row} bolt M5 blue")).collect();
    for piece in split(&rows.join("\n"), 10, words) {
        assert!(piece.text.lines().all(|line| rows.iter().any(|row| row == line)), "{piece:?}");
    }
    let text = |text: &str| split(text, 4, words).into_iter().map(|piece| piece.text).collect::<Vec<_>>();
    assert_eq!(text("पहला वाक्य है। दूसरा वाक्य है।"), ["पहला वाक्य है।", "दूसरा वाक्य है।"]);
    assert_eq!(text("یہ ایک ہے۔ وہ دو ہیں۔"), ["یہ ایک ہے۔", "وہ دو ہیں۔"]);
    let pieces = split("「一つの文です。」二つの文です。", 12, |text| text.chars().count());
    assert_eq!(
        pieces.iter().map(|piece| &*piece.text).collect::<Vec<_>>(),
        ["「一つの文です。」", "二つの文です。"]
    );
}

#[test]
fn pieces_inside_a_table_have_its_header_and_those_inside_code_its_fence() {
    let rows: String = (0..12).map(|row| format!("| bolt{row} | {row} |\n")).collect();
    let text = format!("# Parts\n\n| Part | Count |\n| --- | --- |\n{rows}\nAfter.");
    let pieces = split(&text, 30, words);
    assert!(pieces.len() > 2);
    for piece in &pieces {
        let headed = piece.headed("");
        assert!(headed.starts_with("Parts\n\n| Part | Count |\n| --- | --- |\n| bolt"), "{headed}");
        assert_eq!(headed.matches("Count").count(), 1, "{headed}");
        assert!(words(&headed) <= 30, "{headed}");
    }
    let code =
        "```sh\n# step 1\nrun a b c\n\n# step 2\nrun d e f\n\n# step 3\nrun g h i\n```\n\n# Next\n\nText.";
    let headed: Vec<String> = split(code, 10, words).iter().map(|piece| piece.headed("T")).collect();
    assert_eq!(
        headed,
        [
            "T\n\n```sh\n# step 1\nrun a b c",
            "T\n\n```sh\n# step 2\nrun d e f",
            "T\n\n```sh\n# step 3\nrun g h i\n```",
            "T > Next\n\nText."
        ]
    );
}

fn markdown() -> impl Strategy<Value = String> {
    let block = prop_oneof![
        (1..7_usize, "[a-zA-Z ]{0,12}").prop_map(|(level, text)| format!("{} {text}\n\n", "#".repeat(level))),
        "([a-zA-Zäß一二]{1,9}[ .!?\n]{1,2}){0,30}\n\n",
        "```\n[a-z# \n]{0,40}\n```\n",
        "(\\| [a-z]{0,5} \\| [0-9]{0,4} \\|\n){1,6}\n",
        "(- [a-z ]{0,20}\n){1,5}",
        "[^\\n]{0,40}\n[=-]{0,5}\n",
        "\\PC{0,60}",
        Just("\n\n".to_owned()),
    ];
    prop::collection::vec(block, 0..14).prop_map(|blocks| blocks.concat())
}

fn check(text: &str, max: usize, size: impl Fn(&str) -> usize) {
    let pieces = split(text, max, &size);
    let solid = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    assert_eq!(solid(text), pieces.iter().map(|piece| solid(&piece.text)).collect::<String>());
    let mut end = 0;
    for piece in &pieces {
        assert!(piece.range.start >= end && piece.range.end <= text.len());
        end = piece.range.end;
        assert_eq!(&text[piece.range.clone()], piece.text);
        assert_eq!(piece.text.trim(), piece.text);
        assert!(!piece.text.is_empty());
        let single = blocks::graphemes(&piece.text, 0..piece.text.len()).len() == 1;
        assert!(size(&piece.text) <= max || single, "{} > {max}: {:?}", size(&piece.text), piece.text);
        let _ = piece.headed("Title");
    }
}

proptest! {
    #[test]
    fn all_text_is_in_one_piece_in_order(text in markdown(), max in 0..60_usize) {
        check(&text, max, words);
        check(&text, max, |text| text.chars().count());
        // A tokenizer that puts a mark before each text, and one whose tokens do not add up.
        check(&text, max, |text| words(text) + 1);
        check(&text, max, |text| text.len() * text.len() / 50);
    }

    #[test]
    fn any_text_can_be_cut(text in "\\PC{0,200}", max in 0..40_usize) {
        check(&text, max, str::len);
    }
}

/// The time that a text takes grows with its length, not with its square: an hour would have passed here.
#[test]
fn long_gaps_and_underlined_paragraphs_are_cut_at_once() {
    let gap = format!("A.{}x", " ".repeat(2_000_000));
    let quotes = format!("A.{}x", "\"".repeat(2_000_000));
    let underlined = format!("a\nb\n{}", "===\n".repeat(500_000));
    let began = std::time::Instant::now();
    for text in [gap, quotes, underlined] {
        assert!(!split(&text, 10, |text| text.len() / 4).is_empty());
    }
    assert!(began.elapsed().as_secs() < 120, "{:?}", began.elapsed());
}

#[test]
fn a_sentence_with_a_long_gap_stays_one() {
    let text = format!("One long{}sentence. Another one.", " ".repeat(1000));
    let sentences = super::blocks::sentences(&text, 0..text.len());
    assert_eq!(sentences.len(), 2);
    assert!(text[sentences[1].clone()].starts_with("Another"));
}
