mod unmarked;

use proptest::prelude::*;
use serde_json::Map;

use super::*;
use crate::files::ModelFiles;
use crate::testing::real_model;

const NAMES: [&str; 3] = ["get_weather", "get", "f-2.x"];

/// Parts of an answer, put together.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    Text(String),
    Call(String, String),
}

fn text(text: &str) -> Said {
    Said::Text(text.to_owned())
}

fn called(name: &str, arguments: &str) -> Said {
    Said::Call(name.to_owned(), arguments.to_owned())
}

fn merged(deltas: Vec<Delta>) -> Vec<Said> {
    let (mut said, mut calls) = (Vec::new(), 0);
    for delta in deltas {
        match (delta, said.last_mut()) {
            (Delta::Text(text), Some(Said::Text(last))) => last.push_str(&text),
            (Delta::Text(text), _) => said.push(Said::Text(text)),
            (Delta::CallBegin { index, name }, _) => {
                assert_eq!(index, calls);
                calls += 1;
                said.push(Said::Call(name, String::new()));
            }
            (Delta::Arguments { index, json_fragment }, Some(Said::Call(_, arguments))) => {
                assert_eq!(index + 1, calls);
                arguments.push_str(&json_fragment);
            }
            (delta, last) => panic!("{delta:?} behind {last:?}"),
        }
    }
    said
}

/// Text and calls of an answer that comes in parts.
fn parse<'a>(mut parser: ToolCallParser, parts: impl IntoIterator<Item = &'a str>) -> Vec<Said> {
    let mut deltas: Vec<Delta> = parts.into_iter().flat_map(|part| parser.push(part)).collect();
    deltas.extend(parser.finish());
    merged(deltas)
}

/// Text and calls of an answer: they do not depend on the parts in which it comes.
fn read(format: ToolCallFormat, answer: &str) -> Vec<Said> {
    read_by(|| ToolCallParser::new(format, &NAMES), answer)
}

fn read_by(parser: impl Fn() -> ToolCallParser, answer: &str) -> Vec<Said> {
    let whole = parse(parser(), [answer]);
    assert_eq!(parse(parser(), answer.split("").filter(|c| !c.is_empty())), whole);
    whole
}

#[test]
fn calls_are_found_in_every_notation() {
    use ToolCallFormat::{Functools, Hermes, Llama3, Mistral, MistralNamed, Phi4};
    let one = called("get_weather", r#"{"city": "Zürich", "days": [1, 2.50]}"#);
    let two = [one.clone(), called("get", "{}")];
    for (format, answer, wanted) in [
        (
            Hermes,
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}}\n</tool_call>\n<tool_call>{\"arguments\":{},\"name\":\"get\"}</tool_call>\n",
            &two[..],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}}",
            &two[..1],
        ),
        (Hermes, "\n\n<tool_call>{\"name\": \"get\", \"arguments\": \"{}\"}\n", &two[1..]),
        (
            Llama3,
            "\n{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}}",
            &two[..1],
        ),
        (
            Llama3,
            "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}}; {\"type\": \"function\", \"name\": \"get\", \"parameters\": {}}",
            &two,
        ),
        (
            Llama3,
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}}\n{\"name\": \"get\", \"parameters\": {}}",
            &two,
        ),
        (
            Mistral,
            "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}, \"id\": \"123456789\"}, {\"name\": \"get\", \"arguments\": {}}]",
            &two,
        ),
        (
            MistralNamed,
            "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Zürich\", \"days\": [1, 2.50]}[TOOL_CALLS]get[CALL_ID]a1b2c3d4e[ARGS]{}",
            &two,
        ),
        (
            Phi4,
            "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2.50]}},{\"name\": \"get\", \"arguments\": {}}]<|/tool_call|>",
            &two,
        ),
        (Phi4, "<|tool_call|>{\"name\": \"get\", \"arguments\": {}}<|/tool_call|>", &two[1..]),
        (Functools, "functools[{\"name\": \"get\", \"arguments\": {}}]", &two[1..]),
    ] {
        assert_eq!(read(format, answer), wanted, "{format:?} {answer}");
    }
    // Text before, between and behind calls.
    assert_eq!(
        read(
            Hermes,
            "I look.\n<tool_call>{\"name\": \"get\", \"arguments\": {}}</tool_call> And <tool_call>\n{\"name\": \"get\", \"arguments\": {}}\n</tool_call>\nso."
        ),
        [text("I look.\n"), called("get", "{}"), text(" And "), called("get", "{}"), text("\nso.")]
    );
}

#[test]
fn what_is_no_call_is_text_to_the_last_byte() {
    use ToolCallFormat::{Functools, Hermes, Llama3, Mistral, MistralNamed, Phi4};
    for (format, answer) in [
        (Hermes, "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {}}\n</tool_call>"),
        (Hermes, "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": \"cut"),
        (Hermes, "<tool_call>\n{\"name\": \"get\", \"arguments\": [1]}\n</tool_call>"),
        (Hermes, "<tool_call>\n{\"name\": \"get\"}\n</tool_call>"),
        (Hermes, "<tool_call>\n{\"name\": 3, \"arguments\": {}}"),
        (Hermes, "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": \"\\ud800\"}}"),
        (Hermes, "a <tool_call"),
        (Hermes, "  \n"),
        (Hermes, "<tool_call>"),
        (Llama3, "{\"name\": \"get\", \"parameters\": {}, \"more\": 1}"),
        (Llama3, "{\"answer\": {\"name\": \"get\", \"parameters\": {}}}"),
        (Llama3, "Well: {\"name\": \"get\", \"parameters\": {}}"),
        (Llama3, "<|python_tag|>get.call(x=\"1\")"),
        (Mistral, "[TOOL_CALLS] [{\"name\": \"unknown\", \"arguments\": {}}]"),
        (Mistral, "[TOOL_CALLS] []"),
        (Mistral, "[TOOL_CALLS]"),
        (MistralNamed, "[TOOL_CALLS]gets[ARGS]{}"),
        (MistralNamed, "[TOOL_CALLS]get[ARG]{}"),
        (MistralNamed, "[TOOL_CALLS]get[ARGS]"),
        (MistralNamed, "[TOOL_CALLS]get[ARGS]3"),
        (MistralNamed, "[TOOL_CALLS]get"),
        (Phi4, "<|tool_call|> none"),
        (Functools, "Use functools.partial or functools[0]."),
    ] {
        assert_eq!(read(format, answer), [text(answer)], "{format:?}");
    }
    // The text behind a malformed call is read on, and so is the text behind a good one.
    assert_eq!(
        read(Hermes, "<tool_call>{x <tool_call>{\"name\": \"get\", \"arguments\": {}}"),
        [text("<tool_call>{x "), called("get", "{}")]
    );
    assert_eq!(
        read(Mistral, "[TOOL_CALLS][{\"name\": \"get\", \"arguments\": {}}, {\"name\": \"no\"}]"),
        [called("get", "{}"), text(", {\"name\": \"no\"}]")]
    );
    assert_eq!(
        read(Llama3, "{\"name\": \"get\", \"parameters\": {}}; and"),
        [called("get", "{}"), text("; and")]
    );
}

#[test]
fn text_is_passed_on_at_once() {
    let mut parser = ToolCallParser::new(ToolCallFormat::Hermes, &NAMES);
    let mut push = |part: &str| merged(parser.push(part));
    assert_eq!(push("Hello"), [text("Hello")]);
    assert_eq!(push(" 1 <"), [text(" 1 ")]);
    assert_eq!(push(" 2 <tool"), [text("< 2 ")]);
    assert_eq!(push("_call>{\"name\": \"get\", \"arguments\": {"), []);
    assert_eq!(push("}"), []);
    assert_eq!(push("}"), [called("get", "{}")]);
    assert_eq!(push("\n</tool"), []);
    assert_eq!(push("_call>\nBye"), [text("\nBye")]);
    assert_eq!(parser.finish(), []);

    let mut parser = ToolCallParser::new(ToolCallFormat::Llama3, &NAMES);
    assert_eq!(merged(parser.push("{\"name\": \"other\",")), [text("{\"name\": \"other\",")]);
    let mut parser = ToolCallParser::new(ToolCallFormat::Llama3, &NAMES);
    assert_eq!(merged(parser.push("{\"key\":")), [text("{\"key\":")]);
}

#[test]
fn arguments_are_given_as_they_come() {
    let mut parser = ToolCallParser::new(ToolCallFormat::Hermes, &NAMES).incremental();
    let arguments = |json: &str| Delta::Arguments { index: 0, json_fragment: json.to_owned() };
    assert_eq!(parser.push("<tool_call>{\"name\": \"get\", \"argum"), []);
    assert_eq!(parser.push("ents\": "), []);
    let begin = Delta::CallBegin { index: 0, name: "get".to_owned() };
    assert_eq!(parser.push("{\"a\": [1"), [begin.clone(), arguments("{\"a\": [1")]);
    assert_eq!(parser.push(", \"x "), [arguments(", \"x")]);
    assert_eq!(parser.push("y\"]} "), [arguments(" y\"]}")]);
    assert_eq!(parser.push("}</tool_call>"), []);
    assert_eq!(parser.finish(), []);
    // The given part of a call that breaks off stays; the rest is text.
    let mut parser = ToolCallParser::new(ToolCallFormat::MistralNamed, &NAMES).incremental();
    assert_eq!(parser.push("[TOOL_CALLS]get[ARGS]{\"a\": 1"), [begin, arguments("{\"a\": 1")]);
    assert_eq!(merged(parser.push(" oh")), [text(" oh")]);
}

#[test]
fn templates_tell_their_notation() {
    let folder = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tools");
    for (name, format) in [
        // Gemma 3 and SmolLM3 write no calls, or Python's: they are told of tools in their system message.
        ("gemma3", None),
        ("gemma3_pythonic", None),
        ("smollm3", None),
        ("hermes_2_pro", Some(ToolCallFormat::Hermes)),
        ("llama3_1", Some(ToolCallFormat::Llama3)),
        ("llama3_2", Some(ToolCallFormat::Llama3)),
        ("mistral_nemo", Some(ToolCallFormat::Mistral)),
        ("mistral_small_3_2", Some(ToolCallFormat::MistralNamed)),
        ("qwen3", Some(ToolCallFormat::Hermes)),
    ] {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source, Some("<s>"), Some("</s>")).unwrap();
        assert_eq!(ToolCallFormat::of_template(&template), format, "{name}");
    }
    let of = |source: &str| ToolCallFormat::of_template(&ChatTemplate::new(source, None, None).unwrap());
    assert_eq!(of("{% for m in messages %}{{ m.content }}{% endfor %}"), None);
    let tools = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}";
    let end = "{% endfor %}{% endfor %}";
    let call = "{{ c.function.name }}({{ c.function.arguments | tojson }})";
    assert_eq!(of(&format!("{tools}{call}{end}")), None);
    let phi = "<|tool_call|>{{ c.function | tojson }}<|/tool_call|>";
    assert_eq!(of(&format!("{tools}{phi}{end}")), Some(ToolCallFormat::Phi4));
}

#[test]
fn real_models_tell_their_notation() {
    for (name, format) in [
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", Some(ToolCallFormat::Hermes)),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", None),
    ] {
        let Some(path) = real_model(name) else { continue };
        let files = ModelFiles::open(&path).unwrap();
        let template = ChatTemplate::open(&files).unwrap().unwrap();
        assert_eq!(ToolCallFormat::of_template(&template), format, "{name}");
        // `<tool_call>` is a token of Qwen2.5, and no control token.
        let tokenizer = Tokenizer::open(&files).unwrap();
        assert_eq!(tokenizer.token_id("<tool_call>").is_some(), format.is_some());
        assert_eq!(ToolCallFormat::Hermes.special_tokens(&tokenizer), []);
        let ids = tokenizer.encode("<tool_call>\n{", crate::Specials::Parse).unwrap();
        assert_eq!(tokenizer.decode(&ids, true), "<tool_call>\n{");
    }
}

#[test]
fn grammars_name_the_tools_that_may_be_called() {
    let tool = |name: &str, parameters: Json| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let schema = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}});
    let tools = [tool("f", Json::Null), tool("g", schema)];
    let no_token = |_: &str| None;
    let grammar =
        |format: ToolCallFormat, which, parallel| format.grammar(&tools, which, parallel, &no_token);
    let text = grammar(ToolCallFormat::Hermes, Some("f"), false).unwrap();
    assert!(text.starts_with("start: call\ncall: \"<tool_call>\" \"\\n\" %json {"), "{text}");
    assert!(text.contains("\"const\":\"f\"") && !text.contains("\"g\""), "{text}");
    let text = grammar(ToolCallFormat::Llama3, None, true).unwrap();
    assert!(text.starts_with("start: call (\"; \" call)*\n") && text.contains("anyOf"), "{text}");
    assert!(
        text.contains("\"parameters\":{\"$ref\":\"#/$defs/1\"}") && text.contains("#/$defs/1/$defs/A"),
        "{text}"
    );
    let token = |text: &str| (text == "[TOOL_CALLS]").then_some(5);
    let text = ToolCallFormat::MistralNamed.grammar(&tools, None, false, &token).unwrap();
    assert!(text.contains("call: <[5]> \"f\" \"[ARGS]\" %json") && text.contains(" | <[5]> \"g\""), "{text}");
    let error = grammar(ToolCallFormat::Phi4, Some("h"), false).unwrap_err().to_string();
    assert_eq!(error, "there is no tool \"h\" to call; the tools are: f, g");
}

/// Pieces that answers with calls are made of, good and bad.
fn pieces() -> impl Strategy<Value = String> {
    let fixed = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "functools",
        "<|tool_call|>",
        "<|/tool_call|>",
        "[",
        "]",
        "{",
        "}",
        ",",
        ";",
        ":",
        " ",
        "\n",
        "\"",
        "\\",
        "name",
        "\"name\": \"get\"",
        "\"arguments\": {}",
        "\"parameters\": {\"a\": 1}",
        "get",
        "get_weather",
        "é",
        "<",
        "null",
        "{\"name\": \"get\", \"arguments\": {\"a\": \"}\"}}",
        "{\"name\": \"get\", \"parameters\": {}}",
        "{\"name\": \"no\", \"arguments\": {}}",
        "{\"a\": [1, 2]}",
        "get[ARGS]{}",
        "a1",
        "```",
        "```json\n",
    ]);
    prop_oneof![4 => fixed.prop_map(str::to_owned), 1 => "\\PC{0,4}"]
}

fn formats() -> impl Strategy<Value = ToolCallFormat> {
    prop::sample::select(ToolCallFormat::ALL.to_vec())
}

fn arguments() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        (-1e9..1e9f64).prop_map(Json::from),
        ".{0,8}".prop_map(Json::from),
    ];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Json::from),
            prop::collection::vec((".{0,4}", inner), 0..3)
                .prop_map(|fields| Json::Object(fields.into_iter().collect())),
        ]
    });
    prop::collection::vec((".{0,4}", value), 0..3)
        .prop_map(|fields| Json::Object(fields.into_iter().collect::<Map<_, _>>()))
}

/// Cuts a text behind the characters that `cuts` says.
fn cut<'a>(text: &'a str, cuts: &[bool]) -> Vec<&'a str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for ((at, _), cut) in text.char_indices().zip(cuts.iter().cycle()) {
        if *cut {
            parts.push(&text[start..at]);
            start = at;
        }
    }
    parts.push(&text[start..]);
    parts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_chunks_give_the_same(
        format in formats(),
        pieces in prop::collection::vec(pieces(), 0..14),
        cuts in prop::collection::vec(any::<bool>(), 1..9),
        unmarked in any::<bool>(),
    ) {
        let answer = pieces.concat();
        let parser = || {
            let parser = ToolCallParser::new(format, &NAMES);
            if unmarked { parser.with_unmarked() } else { parser }
        };
        let whole = parse(parser(), [answer.as_str()]);
        let chunked = parse(parser(), cut(&answer, &cuts));
        prop_assert_eq!(&chunked, &whole);
        let is_call = |said: &&Said| matches!(said, Said::Call(..));
        if whole.iter().find(is_call).is_none() {
            let wanted: Vec<Said> = (!answer.is_empty()).then(|| Said::Text(answer.clone())).into_iter().collect();
            prop_assert_eq!(&whole, &wanted);
        }
        for said in &whole {
            if let Said::Call(name, arguments) = said {
                prop_assert!(NAMES.contains(&name.as_str()));
                prop_assert!(serde_json::from_str::<Map<String, Json>>(arguments).is_ok());
                prop_assert!(answer.contains(arguments.as_str()));
            }
        }
        // Incremental parsing takes any text as well.
        parse(ToolCallParser::new(format, &NAMES).incremental(), cut(&answer, &cuts));
    }

    #[test]
    fn written_calls_are_read(
        format in formats(),
        calls in prop::collection::vec((prop::sample::select(NAMES.to_vec()), arguments()), 1..4),
        cuts in prop::collection::vec(any::<bool>(), 1..9),
        before in "[a-zA-Z .]{0,12}",
        incremental in any::<bool>(),
    ) {
        let call = |(name, arguments): (&str, Json)| ToolCall { id: String::new(), name: name.to_owned(), arguments };
        let calls: Vec<ToolCall> = calls.into_iter().map(call).collect();
        let before = if format == ToolCallFormat::Llama3 { "" } else { before.trim() };
        let answer = format!("{before}{}", format.write(&calls));
        let mut parser = ToolCallParser::new(format, &NAMES);
        if incremental {
            parser = parser.incremental();
        }
        let mut said = parse(parser, cut(&answer, &cuts));
        if !before.is_empty() {
            prop_assert_eq!(said.remove(0), Said::Text(before.to_owned()));
        }
        prop_assert_eq!(said.len(), calls.len());
        for (said, call) in said.iter().zip(&calls) {
            let Said::Call(name, arguments) = said else { panic!("{said:?}") };
            prop_assert_eq!(name, &call.name);
            prop_assert_eq!(arguments, &json_text(&call.arguments));
        }
    }
}
