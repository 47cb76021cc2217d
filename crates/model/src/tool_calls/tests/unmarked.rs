//! Calls without the marks of their notation.

use super::*;

const CALL: &str = r#"{"name": "get", "arguments": {"a": [1, "}"]}}"#;
const OTHER: &str = r#"{"arguments":{},"name":"f-2.x"}"#;

fn parser(format: ToolCallFormat) -> ToolCallParser {
    ToolCallParser::new(format, &NAMES).with_unmarked()
}

fn read_unmarked(format: ToolCallFormat, answer: &str) -> Vec<Said> {
    read_by(|| parser(format), answer)
}

#[test]
fn an_answer_that_is_calls_alone_needs_no_marks() {
    let two = [called("get", r#"{"a": [1, "}"]}"#), called("f-2.x", "{}")];
    for format in ToolCallFormat::ALL {
        for (answer, wanted) in [
            (CALL.to_owned(), &two[..1]),
            (format!("\n {CALL}\n"), &two[..1]),
            (format!("```json\n{CALL}\n```"), &two[..1]),
            (format!("\n```\n{CALL}```\n"), &two[..1]),
            (format!("{CALL}\n{OTHER}"), &two),
            (format!("[{CALL}, {OTHER}]"), &two),
            (format!("```json\n[\n{CALL},\n{OTHER}\n]\n```"), &two),
            (format!("```json\n{CALL}\n{OTHER}\n```"), &two),
            (format!("```json\n{CALL}\n```\n```json\n{OTHER}\n```"), &two),
            (r#"{"n\u0061me": "g\u0065t", "arguments": "{\"a\": [1, \"}\"]}"}"#.to_owned(), &two[..1]),
        ] {
            assert_eq!(read_unmarked(format, &answer), wanted, "{format:?} {answer}");
        }
    }
    let parameters = r#"{"name": "get", "parameters": {"type": "object"}}"#;
    let fenced = format!("```json\n{parameters}\n```");
    assert_eq!(read_unmarked(ToolCallFormat::Llama3, &fenced), [called("get", r#"{"type": "object"}"#)]);
    assert_eq!(read_unmarked(ToolCallFormat::Hermes, &fenced), [text(&fenced)]);
    assert_eq!(read_unmarked(ToolCallFormat::Hermes, parameters), [text(parameters)]);
}

#[test]
fn any_other_answer_is_text_without_marks() {
    let unknown = r#"{"name": "no", "arguments": {}}"#;
    for answer in [
        unknown.to_owned(),
        format!("{CALL}\n{unknown}"),
        format!("[{CALL}, {unknown}]"),
        format!("```json\n{unknown}\n```"),
        // Text before or behind calls.
        format!("{CALL}\nSo."),
        format!("```json\n{CALL}\n```\nSo."),
        format!("Sure:\n```json\n{CALL}\n```"),
        format!("{CALL}, {OTHER}"),
        format!("```python\n{CALL}\n```"),
        format!("```json\n```\n{CALL}"),
        // JSON that a user has asked for.
        r#"{"name": "Bob", "age": 5}"#.to_owned(),
        r#"{"name": "get", "arguments": {}, "id": "1"}"#.to_owned(),
        r#"{"name": "get", "name": "get"}"#.to_owned(),
        r#"{"name": "get"}"#.to_owned(),
        r#"{"name": "get", "arguments": [1]}"#.to_owned(),
        r#"{"name": "get", "arguments": "a"}"#.to_owned(),
        r#"{"name": "get", "arguments": {"a": "\ud800"}}"#.to_owned(),
        r#"{"name": ["get"], "arguments": {}}"#.to_owned(),
        "[1, 2]".to_owned(),
        "[]".to_owned(),
        "```json\n[]\n```".to_owned(),
        "```json\n```".to_owned(),
        " \n".to_owned(),
        // Calls that a limit cut off.
        CALL[..CALL.len() - 1].to_owned(),
        format!("{CALL}\n{}", &OTHER[..9]),
        format!("[{CALL}"),
        format!("[{CALL},"),
        format!("```json\n{CALL}\n"),
        format!("```json\n{CALL}\n``"),
        "```js".to_owned(),
        "``".to_owned(),
    ] {
        assert_eq!(read_unmarked(ToolCallFormat::Hermes, &answer), [text(&answer)]);
    }
    // The marks of the notation hold as ever.
    let marked = format!("{CALL}\n<tool_call>{OTHER}</tool_call>");
    let wanted = [text(&format!("{CALL}\n")), called("f-2.x", "{}")];
    assert_eq!(read_unmarked(ToolCallFormat::Hermes, &marked), wanted);
    let bare = r#"{"name": "get", "parameters": {}}; and"#;
    assert_eq!(read_unmarked(ToolCallFormat::Llama3, bare), [called("get", "{}"), text("; and")]);
}

/// Each answer comes in pieces, of which the last makes it text.
#[test]
fn text_is_held_back_as_long_as_it_can_be_calls() {
    for pieces in [
        &["Hello"][..],
        &["\n", "Hello"],
        &["{", "\"", "na", "mer"],
        &["{\"", "answ"],
        &["{\"name\"", ": \"g", "o"],
        &["{\"name\": ", "[\"get\""],
        &["{\"name\": \"get\", \"arguments\": ", "3"],
        &["{\"name\": \"get\", \"arguments\": {}", ","],
        &["[", "1"],
        &["``", "`", "p"],
        &["```", "js", "o", "n\n", "{", "\"x"],
        &[CALL, "\n", "S"],
        &["```json\n", CALL, "\n`", "``", " S"],
    ] {
        let mut parser = parser(ToolCallFormat::Hermes);
        let (last, held) = pieces.split_last().unwrap();
        for piece in held {
            assert_eq!(parser.push(piece), [], "{pieces:?}");
        }
        assert_eq!(merged(parser.push(last)), [text(&pieces.concat())]);
        assert_eq!(merged(parser.push(" {")), [text(" {")]);
    }
    let mut parser = parser(ToolCallFormat::Hermes);
    assert_eq!(parser.push(CALL), []);
    assert_eq!(merged(parser.finish()), [called("get", r#"{"a": [1, "}"]}"#)]);
}
