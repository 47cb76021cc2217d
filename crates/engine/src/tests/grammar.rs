//! Answers that follow a grammar.

use refrain_fusion::Vanilla;
use serde_json::{Value, json};

use super::*;
use crate::{Answer, Error, FinishReason, GenerateRequest, Instructions, Sampling, StructuredOutput};

fn answer(engine: &Engine, output: &StructuredOutput, sampling: Sampling) -> Result<Answer> {
    let prompt = engine.prompt(&[], "Write a record of a person as JSON.", &Instructions::default()).unwrap();
    let grammar = Some(engine.grammar(output)?);
    let request = GenerateRequest { grammar, ..GenerateRequest::new(shared(Vanilla), sampling) };
    engine.answer(&prompt, &request, |_| true)
}

/// A tiny model of random weights, whose answers without a grammar are noise, and SmolLM2 where it is there.
fn engines() -> Vec<Engine> {
    let real = real(SMOLLM2).map(|path| engine(&path, Settings::default()));
    [engine(&tiny("llama"), exact(Dtype::F32))].into_iter().chain(real).collect()
}

/// All ways to choose a token.
fn samplings() -> Vec<Sampling> {
    let base = Sampling { max_tokens: 160, ..Sampling::default() };
    let drawn = |seed| Sampling { temperature: 1.2, seed, ..base.clone() };
    vec![
        base.clone(),
        drawn(1),
        Sampling { top_k: 20, ..drawn(2) },
        Sampling { top_p: 0.7, ..drawn(3) },
        Sampling { min_p: 0.2, logprobs: Some(2), ..drawn(4) },
        Sampling { repetition_penalty: 1.3, frequency_penalty: 1.0, presence_penalty: 1.0, ..drawn(5) },
        Sampling { min_tokens: 60, logit_bias: [(5, 50.0), (6, -100.0)].into(), ..drawn(6) },
    ]
}

/// The whole text, or the beginning of one where the limit of tokens cut it.
fn text(answer: &Answer) -> Option<&str> {
    assert_ne!(answer.finish, FinishReason::Failed);
    (answer.finish == FinishReason::Stop).then_some(answer.text.as_str())
}

#[test]
fn an_answer_is_json_of_its_schema_with_every_sampling_option() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "role": {"enum": ["reader", "writer"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": false,
        "$defs": {"tag": {"type": "string", "maxLength": 8}},
    });
    let output = StructuredOutput::JsonSchema(schema);
    for engine in engines() {
        let mut whole = 0;
        for sampling in samplings() {
            let answer = answer(&engine, &output, sampling.clone()).unwrap();
            let Some(text) = text(&answer) else { continue };
            whole += 1;
            let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
            let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
            assert_eq!(keys, ["name", "age", "role", "tags"], "{text}");
            assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{text}");
            assert!((0..=130).contains(&value["age"].as_i64().unwrap()), "{text}");
            assert!(["reader", "writer"].contains(&value["role"].as_str().unwrap()), "{text}");
            let tags = value["tags"].as_array().unwrap();
            assert!((1..=2).contains(&tags.len()) && tags.iter().all(Value::is_string), "{text}");
        }
        assert!(whole >= 5, "{whole} whole answers");
    }
}

/// Pydantic writes a union that is told apart by a field as `oneOf` of references.
#[test]
fn one_of_is_followed_as_any_of() {
    let part = |kind: &str| {
        json!({ "type": "object", "properties": { "kind": { "const": kind, "type": "string" } },
            "required": ["kind"], "additionalProperties": false })
    };
    let schema = json!({
        "type": "object",
        "$defs": { "Cat": part("cat"), "Dog": part("dog") },
        "properties": { "pet": {
            "discriminator": { "mapping": { "cat": "#/$defs/Cat", "dog": "#/$defs/Dog" }, "propertyName": "kind" },
            "oneOf": [{ "$ref": "#/$defs/Cat" }, { "$ref": "#/$defs/Dog" }],
        } },
        "required": ["pet"],
        "additionalProperties": false,
    });
    let output = StructuredOutput::JsonSchema(schema);
    for engine in engines() {
        let answers = samplings().into_iter().map(|sampling| answer(&engine, &output, sampling).unwrap());
        let whole: Vec<Value> =
            answers.filter_map(|answer| Some(serde_json::from_str(text(&answer)?).unwrap())).collect();
        assert!(whole.len() >= 5, "{} whole answers", whole.len());
        for value in whole {
            assert!(["cat", "dog"].contains(&value["pet"]["kind"].as_str().unwrap()), "{value}");
        }
    }
}

#[test]
fn json_objects_expressions_choices_and_lark_are_followed() {
    for engine in engines() {
        for sampling in samplings() {
            let answer = |output: StructuredOutput| answer(&engine, &output, sampling.clone()).unwrap();
            let object = answer(StructuredOutput::JsonObject);
            assert!(object.text.starts_with('{'), "{}", object.text);
            if let Some(text) = text(&object) {
                assert!(serde_json::from_str::<Value>(text).unwrap().is_object());
            }
            let date = answer(StructuredOutput::Regex(r"20[0-9]{2}-[01][0-9]".to_owned()));
            let bytes = date.text.as_bytes();
            assert!(date.text.len() == 7 && date.text.starts_with("20") && bytes[4] == b'-', "{}", date.text);
            let choices = ["yes", "no", "\"perhaps\"\n"].map(str::to_owned);
            let chosen = answer(StructuredOutput::Choice(choices.to_vec()));
            assert!(choices.contains(&chosen.text), "{:?}", chosen.text);
            let lark = "start: NUMBER (\" + \" NUMBER){1,2}\nNUMBER: /[1-9][0-9]?/".to_owned();
            let sum = answer(StructuredOutput::Lark(lark));
            let numbers: Vec<u32> = sum.text.split(" + ").map(|number| number.parse().unwrap()).collect();
            assert!((2..=3).contains(&numbers.len()), "{}", sum.text);
            let lark = StructuredOutput::Lark("start: <[5]> | \"call \" /[a-f]/".to_owned());
            let kinds = vec![lark, StructuredOutput::JsonSchema(json!({ "type": "boolean" }))];
            let either = answer(StructuredOutput::Either(kinds));
            let text = either.text.as_str();
            assert!(
                either.tokens[0] == 5 || text.starts_with("call ") || ["true", "false"].contains(&text),
                "{text}"
            );
            // A text that nothing can follow ends the answer at once.
            assert_eq!((date.finish, chosen.finish), (FinishReason::Stop, FinishReason::Stop));
        }
    }
}

/// A line of JSON is indented by spaces or by tabs, and neither goes on without end.
#[test]
fn white_space_of_json_is_bounded() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let grammar = engine.grammar(&StructuredOutput::JsonObject).unwrap();
    let takes = |text: &str| {
        let mut grammar = grammar.clone();
        let mut logits = vec![0.0; engine.tokenizer().vocab_size()];
        engine.tokenize(text).unwrap().into_iter().all(|id| {
            logits.fill(0.0);
            grammar.mask(&mut logits).unwrap();
            let is_allowed = logits[id as usize] == 0.0;
            is_allowed && grammar.push(id).is_ok()
        })
    };
    let line = |indent: &str, times: usize| format!("\n{}", indent.repeat(times));
    for (space, is_taken) in [
        (String::new(), true),
        (" ".repeat(4), true),
        (" ".repeat(5), false),
        ("\t".to_owned(), false),
        (line(" ", 64), true),
        (line(" ", 65), false),
        (line("\t", 16), true),
        (line("\t", 17), false),
        (line("  \t", 1), false),
        (line("\t ", 1), false),
        (line("\n", 1), false),
    ] {
        assert_eq!(takes(&format!("{{{space}\"")), is_taken, "{space:?}");
    }
}

/// The only beginning that the grammar allows is a token that is a stop text.
#[test]
fn a_stop_text_that_the_grammar_needs_is_chosen_before_the_least_tokens() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    assert_eq!(engine.tokenize("{").unwrap().len(), 1);
    let output = StructuredOutput::Choice(vec!["{x".to_owned()]);
    for temperature in [0.0, 1.0] {
        let sampling =
            Sampling { stop: vec!["{".to_owned()], min_tokens: 1, temperature, ..Sampling::default() };
        let answer = answer(&engine, &output, sampling).unwrap();
        assert_eq!((answer.text.as_str(), answer.finish), ("{x", FinishReason::Stop));
    }
}

/// Each answer of a request has its own place in the grammar.
#[test]
fn a_compiled_grammar_serves_many_answers() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let grammar = engine.grammar(&StructuredOutput::Choice(vec!["north".into(), "south".into()])).unwrap();
    let prompt = engine.prompt(&[], "Where?", &Instructions::default()).unwrap();
    let sampling = |seed| Sampling { temperature: 50.0, seed, ..Sampling::default() };
    let texts: Vec<String> = (0..20)
        .map(|seed| {
            let request = GenerateRequest::new(shared(Vanilla), sampling(seed));
            let request = GenerateRequest { grammar: Some(grammar.clone()), ..request };
            engine.answer(&prompt, &request, |_| true).unwrap().text
        })
        .collect();
    assert!(texts.iter().all(|text| text == "north" || text == "south"), "{texts:?}");
    assert!(texts.iter().any(|text| text == "north") && texts.iter().any(|text| text == "south"));
}

#[test]
fn wrong_grammars_are_refused() {
    const NO_TEXT: &str = "no text satisfies this schema or grammar";
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    for (output, named) in [
        (StructuredOutput::Regex("(".to_owned()), ""),
        (StructuredOutput::Lark("start: missing".to_owned()), "missing"),
        (StructuredOutput::Either(vec![StructuredOutput::Either(Vec::new())]), "alternatives"),
        (StructuredOutput::Choice(Vec::new()), "1 to"),
        (StructuredOutput::JsonSchema(json!("text")), "object"),
        (StructuredOutput::JsonSchema(json!({"type": "unheard-of"})), "unheard-of"),
        (StructuredOutput::JsonSchema(json!({"$ref": "https://example.org/schema"})), "example.org"),
        (StructuredOutput::JsonSchema(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (StructuredOutput::JsonSchema(json!({"properties": {"price": {"pattern": "^(?!a)b"}}})), "\"price\""),
        (StructuredOutput::JsonSchema(json!({"$ref": "#"})), NO_TEXT),
        (StructuredOutput::Regex(r"[^\s\S]".to_owned()), NO_TEXT),
        (StructuredOutput::Lark("start: start".to_owned()), NO_TEXT),
        (StructuredOutput::Lark(format!("start: {}", "missing".repeat(1000))), "missing"),
        (StructuredOutput::JsonSchema(json!({"pattern": "(?!a)b".repeat(1000)})), "pattern"),
    ] {
        match engine.grammar(&output) {
            Err(Error::Grammar { reason }) => {
                assert!(reason.contains(named), "{output:?}: {reason}");
                assert!(reason.chars().count() <= 301 && !reason.contains("<non-verbose/>"), "{reason}");
            }
            other => panic!("{output:?}: {other:?}"),
        }
    }
}

/// Formats of strings hold where they are known, and are annotations otherwise.
#[test]
fn every_format_of_strings_is_taken() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let of = |format| StructuredOutput::JsonSchema(json!({ "type": "string", "format": format }));
    for format in
        ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid", "phone"]
    {
        engine.grammar(&of(format)).unwrap_or_else(|error| panic!("{format}: {error}"));
    }
    let date = answer(&engine, &of("date"), Sampling { max_tokens: 40, ..Sampling::default() }).unwrap();
    let value: Value = serde_json::from_str(&date.text).unwrap();
    assert_eq!(value.as_str().map(|date| date.split('-').count()), Some(3), "{}", date.text);
}

/// Counted parts of an expression are expanded as far as an answer goes: thousands of them cost no more than the tokens that it has.
#[test]
fn counted_parts_are_expanded_as_an_answer_goes() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let counted = StructuredOutput::Regex("(a?){5000}(a|b|c|ab){5000}[a-z]{4000}(x+x+)+y".to_owned());
    let said = answer(&engine, &counted, Sampling { max_tokens: 4, ..Sampling::default() }).unwrap();
    assert!(
        !said.text.is_empty() && said.text.bytes().all(|byte| matches!(byte, b'a'..=b'c')),
        "{}",
        said.text
    );
}
