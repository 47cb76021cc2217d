//! Parts of an answer, text and calls of tools, as its tokens come.

use std::collections::VecDeque;

use refrain::engine::Engine;
use refrain::model::{Delta, Detokenizer, THOUGHT_MARKS, Thinking, Tokenizer, ToolCallParser};

use super::request::ToolUse;
use crate::job::Token;
use crate::random::random_id;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Part {
    Text(String),
    /// A call of a tool begins. Calls are counted from 0.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// A part of the JSON text of a call's arguments.
    Arguments {
        index: usize,
        json: String,
    },
}

/// Reads the tokens of one answer.
#[derive(Debug)]
pub(super) struct AnswerReader(Option<CallReader>);

#[derive(Debug)]
struct CallReader {
    engine: Engine,
    /// None once the answer is at its end.
    parser: Option<ToolCallParser>,
    marks: Marks,
    thoughts: Thoughts,
    /// Whether the answer is calls alone, without thoughts. Text is then the beginning of a call that a limit cut off.
    only_calls: bool,
    /// Whether the answer may have several calls; all after the first are left out otherwise.
    parallel: bool,
    calls: usize,
}

impl AnswerReader {
    /// A reader of an answer by a model that is told of `tools`, and may think before it answers. `has_form` says whether a
    /// grammar holds the answer.
    pub(super) fn new(
        engine: &Engine,
        tools: Option<&ToolUse>,
        thinking: Thinking,
        has_form: bool,
    ) -> AnswerReader {
        AnswerReader(tools.map(|tools| {
            let format = engine.tool_call_format();
            let names: Vec<&str> = tools.names.iter().map(String::as_str).collect();
            let parser = ToolCallParser::new(format, &names);
            CallReader {
                engine: engine.clone(),
                // Arguments of a free answer come when the call is whole, since a malformed one is text.
                parser: Some(if tools.is_forced() {
                    parser.incremental()
                } else if has_form {
                    // JSON without marks is of the response's format.
                    parser
                } else {
                    parser.with_unmarked()
                }),
                marks: Marks::new(format.special_tokens(engine.tokenizer())),
                thoughts: Thoughts::new(thinking),
                only_calls: tools.is_forced() && thinking == Thinking::None,
                parallel: tools.parallel,
                calls: 0,
            }
        }))
    }

    /// Whether the answer may have calls.
    pub(super) fn has_tools(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the answer has had a call.
    pub(super) fn has_calls(&self) -> bool {
        self.0.as_ref().is_some_and(|reader| reader.calls > 0)
    }

    /// The parts that are known with the next token.
    pub(super) fn read(&mut self, token: &Token) -> Vec<Part> {
        let Some(reader) = &mut self.0 else { return vec![Part::Text(token.text.clone())] };
        let text = reader.marks.text(reader.engine.tokenizer(), token);
        let (thoughts, rest) = reader.thoughts.split(text);
        let mut parts = Vec::from_iter((!thoughts.is_empty()).then_some(Part::Text(thoughts)));
        let deltas = reader.parser.as_mut().map(|parser| parser.push(&rest)).unwrap_or_default();
        parts.extend(reader.parts(deltas));
        parts
    }

    /// The parts that were held back until the answer's end.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let Some(reader) = &mut self.0 else { return Vec::new() };
        let Some(mut parser) = reader.parser.take() else { return Vec::new() };
        let mut deltas = parser.push(&reader.thoughts.finish());
        deltas.extend(parser.finish());
        reader.parts(deltas)
    }
}

impl CallReader {
    fn parts(&mut self, deltas: Vec<Delta>) -> Vec<Part> {
        let mut parts = Vec::with_capacity(deltas.len());
        for delta in deltas {
            match delta {
                Delta::Text(text) if !self.only_calls => parts.push(Part::Text(text)),
                Delta::Text(_) => {}
                Delta::CallBegin { index, .. } | Delta::Arguments { index, .. }
                    if index > 0 && !self.parallel => {}
                Delta::CallBegin { index, name } => {
                    self.calls += 1;
                    parts.push(Part::Call { index, id: random_id("call_"), name });
                }
                Delta::Arguments { index, json_fragment } => {
                    parts.push(Part::Arguments { index, json: json_fragment });
                }
            }
        }
        parts
    }
}

/// Takes the thoughts off the beginning of an answer. A call that a model writes there is a draft, and text.
#[derive(Debug)]
enum Thoughts {
    /// The beginning of an answer, as long as it may be that of thoughts.
    Start(String),
    /// Within thoughts, whose last bytes these are: fewer than `</think>` has.
    Within(Vec<u8>),
    Behind,
}

impl Thoughts {
    fn new(thinking: Thinking) -> Thoughts {
        match thinking {
            Thinking::Begun => Thoughts::Within(Vec::new()),
            Thinking::None | Thinking::Optional => Thoughts::Start(String::new()),
        }
    }

    /// Divides the next text of the answer into that of thoughts, to the end of `</think>`, and what stands behind them.
    fn split(&mut self, text: String) -> (String, String) {
        let [begin, end] = THOUGHT_MARKS;
        match self {
            Thoughts::Start(start) => {
                start.push_str(&text);
                let said = start.trim_start();
                if said.starts_with(begin) {
                    let start = std::mem::take(start);
                    *self = Thoughts::Within(Vec::new());
                    return self.split(start);
                }
                if begin.starts_with(said) {
                    return Default::default();
                }
                (String::new(), self.finish())
            }
            Thoughts::Within(last) => {
                let before = last.len();
                last.extend(text.bytes());
                let Some(at) = last.windows(end.len()).position(|bytes| bytes == end.as_bytes()) else {
                    last.drain(..last.len().saturating_sub(end.len() - 1));
                    return (text, String::new());
                };
                let (thoughts, rest) = text.split_at(at + end.len() - before);
                *self = Thoughts::Behind;
                (thoughts.to_owned(), rest.to_owned())
            }
            Thoughts::Behind => (String::new(), text),
        }
    }

    /// The text that was held back, which begins no thoughts.
    fn finish(&mut self) -> String {
        match std::mem::replace(self, Thoughts::Behind) {
            Thoughts::Start(start) => start,
            Thoughts::Within(_) | Thoughts::Behind => String::new(),
        }
    }
}

/// Puts the text of special tokens, which the text of an answer leaves out, back to its place. Text may come later than its tokens:
/// where it may be the beginning of a stop text, or is a part of a character.
#[derive(Debug)]
struct Marks {
    special: Vec<(u32, &'static str)>,
    detokenizer: Detokenizer,
    /// Bytes of text that the tokens so far make.
    decoded: usize,
    /// Bytes of text that came so far.
    received: usize,
    /// Special tokens that stand behind text which did not come yet, with the number of bytes before each.
    waiting: VecDeque<(usize, &'static str)>,
}

impl Marks {
    fn new(special: Vec<(u32, &'static str)>) -> Marks {
        Marks {
            special,
            detokenizer: Detokenizer::default(),
            decoded: 0,
            received: 0,
            waiting: VecDeque::new(),
        }
    }

    /// The text that comes with a token, with that of special tokens.
    fn text(&mut self, tokenizer: &Tokenizer, token: &Token) -> String {
        if self.special.is_empty() {
            return token.text.clone();
        }
        if let Some(id) = token.id {
            match self.special.iter().find(|(special, _)| *special == id) {
                Some((_, mark)) => self.waiting.push_back((self.decoded, mark)),
                None => self.decoded += self.detokenizer.push(tokenizer, id).map_or(0, |text| text.len()),
            }
        }
        let (mut text, mut rest) = (String::new(), token.text.as_str());
        while let Some((at, mark)) = self.waiting.front() {
            let Some((before, after)) = rest.split_at_checked(at.saturating_sub(self.received)) else {
                break;
            };
            text.push_str(before);
            text.push_str(mark);
            self.received += before.len();
            rest = after;
            self.waiting.pop_front();
        }
        self.received += rest.len();
        text.push_str(rest);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use refrain::engine::Settings;
    use refrain::model::{ModelFiles, Specials};
    use refrain::store::Store;
    use serde_json::{Value, json};

    use super::*;

    fn tiny() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama")
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::open(&ModelFiles::open(tiny()).unwrap()).unwrap()
    }

    fn token(id: Option<u32>, text: &str) -> Token {
        Token { text: text.to_owned(), id, logprobs: None, retained: 0, kv_bytes: 0 }
    }

    /// The special token 2 in an answer whose text comes with its tokens, or is held back for any number of tokens.
    #[test]
    fn special_tokens_stand_where_they_were_chosen() {
        let tokenizer = tokenizer();
        let encode = |text: &str| tokenizer.encode(text, Specials::Plain).unwrap();
        let mut ids = encode("äEN");
        ids.push(2);
        ids.extend(encode("D{ö}"));
        ids.push(2);
        let wanted = "äEN[CALLS]D{ö}[CALLS]";
        for held in 0..ids.len() + 2 {
            let mut marks = Marks::new(vec![(2, "[CALLS]")]);
            let mut detokenizer = Detokenizer::default();
            let pieces: Vec<String> =
                ids.iter().map(|id| detokenizer.push(&tokenizer, *id).unwrap_or_default()).collect();
            let mut text = String::new();
            for (at, id) in ids.iter().enumerate() {
                let shown = if at < held { String::new() } else { pieces[at - held].clone() };
                text.push_str(&marks.text(&tokenizer, &token(Some(*id), &shown)));
            }
            text.push_str(
                &marks.text(&tokenizer, &token(None, &pieces[ids.len() - held.min(ids.len())..].concat())),
            );
            assert_eq!(text, wanted, "{held}");
        }
        // A stop text cuts off what stands behind it.
        let mut marks = Marks::new(vec![(2, "[CALLS]")]);
        let mut text = marks.text(&tokenizer, &token(Some(ids[0]), ""));
        for id in &ids[1..] {
            text.push_str(&marks.text(&tokenizer, &token(Some(*id), "")));
        }
        text.push_str(&marks.text(&tokenizer, &token(None, "ä")));
        assert_eq!(text, "ä");
    }

    /// The parts of an answer that comes in pieces of three bytes, and whether it has had calls.
    fn read(engine: &Engine, choice: &Value, parallel: bool, answer: &str) -> (Vec<Part>, bool) {
        read_thoughts(engine, (choice, parallel), Thinking::None, answer)
    }

    fn read_thoughts(
        engine: &Engine,
        (choice, parallel): (&Value, bool),
        thinking: Thinking,
        answer: &str,
    ) -> (Vec<Part>, bool) {
        read_pieces(reader(engine, (choice, parallel), thinking, false), answer, 3)
    }

    fn reader(
        engine: &Engine,
        (choice, parallel): (&Value, bool),
        thinking: Thinking,
        has_form: bool,
    ) -> AnswerReader {
        let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
        let tools =
            ToolUse::of(&serde_json::from_value::<Vec<_>>(tools).unwrap(), Some(choice), Some(parallel));
        AnswerReader::new(engine, tools.unwrap().as_ref(), thinking, has_form)
    }

    fn read_pieces(mut reader: AnswerReader, answer: &str, bytes: usize) -> (Vec<Part>, bool) {
        let mut parts = Vec::new();
        for piece in answer.as_bytes().chunks(bytes) {
            parts.extend(reader.read(&token(Some(5), std::str::from_utf8(piece).unwrap())));
        }
        parts.extend(reader.finish());
        (parts, reader.has_calls())
    }

    /// The text of an answer's parts.
    fn text(parts: &[Part]) -> String {
        parts
            .iter()
            .filter_map(|part| if let Part::Text(text) = part { Some(text.as_str()) } else { None })
            .collect()
    }

    /// The calls of an answer's parts: numbers and arguments.
    fn arguments(parts: &[Part]) -> Vec<(usize, String)> {
        let mut all: Vec<(usize, String)> = Vec::new();
        for part in parts {
            match part {
                Part::Text(_) => {}
                Part::Call { index, id, name } => {
                    assert!(id.starts_with("call_") && name == "f");
                    all.push((*index, String::new()));
                }
                Part::Arguments { index, json } => {
                    let last = all.last_mut().unwrap();
                    assert_eq!(last.0, *index);
                    last.1.push_str(json);
                }
            }
        }
        all
    }

    #[test]
    fn calls_are_taken_out_of_an_answer() {
        let engine =
            Engine::open(&tiny(), Store::in_memory(1 << 20), Settings::default(), |_, _| ()).unwrap();
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
        let one = (0, "{\"a\": 1}".to_owned());
        let auto = json!("auto");
        let (parts, has_calls) = read(&engine, &auto, true, &format!("So: {call}\n{call}"));
        assert_eq!((text(&parts).as_str(), has_calls), ("So: ", true));
        assert_eq!(arguments(&parts), [one.clone(), (1, one.1.clone())]);
        let (parts, _) = read(&engine, &auto, false, &format!("{call}\n{call}"));
        assert_eq!((text(&parts).as_str(), arguments(&parts)), ("", vec![one.clone()]));
        let cut = &call[..call.len() - 14];
        let (parts, has_calls) = read(&engine, &auto, true, cut);
        assert_eq!((text(&parts).as_str(), arguments(&parts).len(), has_calls), (cut, 0, false));
        // The beginning of a call that had to be, cut off by a limit.
        let (parts, _) = read(&engine, &json!("required"), true, cut);
        assert_eq!((text(&parts).as_str(), arguments(&parts)), ("", vec![(0, "{\"a\": 1".to_owned())]));
        // Thoughts before a call that has to be are text.
        let (required, thinks) = (json!("required"), format!("<think>\nf?\n</think>{call}"));
        let (parts, _) = read_thoughts(&engine, (&required, true), Thinking::Optional, &thinks);
        assert_eq!((text(&parts).as_str(), arguments(&parts)), ("<think>\nf?\n</think>", vec![one.clone()]));
        // A call within thoughts is text, be it whole or broken off, and the one behind them is the answer's.
        let named = json!({ "type": "function", "function": { "name": "f" } });
        let draft = call.replace('1', "0");
        for (thinking, begin) in
            [(Thinking::Begun, ""), (Thinking::Optional, "<think>"), (Thinking::None, "\n<think>")]
        {
            for draft in [draft.as_str(), &draft[..draft.len() - 16]] {
                let thoughts = format!("{begin}I could write {draft}, but a is 1.</think>");
                for choice in [&auto, &required, &named] {
                    let answer = format!("{thoughts}\n{call}");
                    let (parts, has_calls) = read_thoughts(&engine, (choice, false), thinking, &answer);
                    assert_eq!((text(&parts), has_calls), (thoughts.clone(), true), "{answer}");
                    assert_eq!(arguments(&parts), std::slice::from_ref(&one), "{answer}");
                }
                let (parts, has_calls) = read_thoughts(&engine, (&auto, true), thinking, &thoughts);
                assert_eq!((text(&parts), has_calls), (thoughts, false));
            }
        }
        // Text that begins as thoughts do comes at the end.
        let (parts, _) = read(&engine, &auto, true, " <thi");
        assert_eq!(text(&parts), " <thi");
        let (parts, has_calls) = read(&engine, &json!("none"), true, call);
        assert_eq!((text(&parts).as_str(), has_calls), (call, false));
    }

    #[test]
    fn calls_without_marks_are_the_whole_of_a_free_answer() {
        let engine =
            Engine::open(&tiny(), Store::in_memory(1 << 20), Settings::default(), |_, _| ()).unwrap();
        let call = "{\"name\": \"f\", \"arguments\": {\"a\": 1}}";
        let fenced = format!("```json\n{call}\n```");
        let calls = [(0, "{\"a\": 1}".to_owned()), (1, "{\"a\": 1}".to_owned())];
        let auto = json!("auto");
        for bytes in [1, 3, 1000] {
            let read = |parallel, thinking, has_form, answer: &str| {
                let reader = reader(&engine, (&auto, parallel), thinking, has_form);
                let (parts, has_calls) = read_pieces(reader, answer, bytes);
                assert_eq!(has_calls, !arguments(&parts).is_empty());
                (text(&parts), arguments(&parts))
            };
            let thought = format!("<think>\n{call}\n</think>\n\n");
            for answer in [call, &fenced] {
                assert_eq!(read(true, Thinking::None, false, answer), (String::new(), calls[..1].to_vec()));
                let answer_behind = format!("{thought}{answer}");
                let (text, found) = read(true, Thinking::Optional, false, &answer_behind);
                assert_eq!((text.as_str(), &found[..]), (thought.trim_end(), &calls[..1]));
                // Text behind it, a limit, or a form that holds the answer: no call.
                let (more, cut) = (format!("{answer}\nSo."), &answer[..answer.len() - 1]);
                for (answer, has_form) in [(more.as_str(), false), (cut, false), (answer, true)] {
                    assert_eq!(read(true, Thinking::None, has_form, answer), (answer.to_owned(), Vec::new()));
                }
            }
            let two = format!("{call}\n{call}");
            assert_eq!(read(true, Thinking::None, false, &two).1, calls);
            assert_eq!(read(false, Thinking::None, false, &two), (String::new(), calls[..1].to_vec()));
        }
    }
}
