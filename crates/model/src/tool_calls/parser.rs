//! Calls of tools in text that is being generated.

use serde_json::{Map, Value as Json};

use super::fields::{ARGUMENTS, NAME, call, name, string};
use super::marks::{Head, head, held_back};
use super::scanner::ObjectScanner;
use super::spec::Spec;
use super::unmarked::Unmarked;

/// A part of an answer. Those of a whole answer, put together, are its text and its calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Text for the reader.
    Text(String),
    /// A call begins. Calls are counted from 0.
    CallBegin {
        /// The call's number.
        index: usize,
        /// The tool's name.
        name: String,
    },
    /// A part of a call's arguments; all of them together are a JSON object.
    Arguments {
        /// The call's number.
        index: usize,
        /// The part of the JSON text.
        json_fragment: String,
    },
}

/// Takes calls of tools out of an answer as it is generated.
///
/// Text that cannot begin a call is passed on at once. A call is given when it is complete, so that a malformed
/// call, or one of an unknown tool, is text to the last byte. White space between calls, and before the first one if nothing else is, is
/// left out.
///
/// The text must have the special tokens of [`ToolCallFormat::special_tokens`] in it. A
/// [`Detokenizer`](crate::Detokenizer) leaves them out, so the caller looks their ids up and pushes their text when they
/// are sampled.
///
/// [`ToolCallFormat::special_tokens`]: super::ToolCallFormat::special_tokens
#[derive(Debug)]
pub struct ToolCallParser {
    spec: &'static Spec,
    names: Vec<String>,
    incremental: bool,
    /// Text that is not decided yet.
    buffer: String,
    stage: Stage,
    calls: usize,
    /// Whether no text came since the beginning or the last call: white space is held back.
    quiet: bool,
    out: Vec<Delta>,
}

#[derive(Debug)]
enum Stage {
    /// An answer that may be calls without marks, of which nothing is given yet.
    Unmarked(Unmarked),
    Text,
    /// A call may begin at `at`; where none does, the first `failed` bytes are text.
    Open {
        at: usize,
        failed: usize,
        in_list: bool,
    },
    Object(Object),
    /// Behind a call in a list.
    InList,
    /// Behind a call, or a list of them.
    Behind,
}

/// An object that is being read, from `at` in the buffer on: a call, or the arguments of the tool `named`.
#[derive(Debug)]
struct Object {
    at: usize,
    failed: usize,
    in_list: bool,
    named: Option<String>,
    scanner: ObjectScanner,
    /// Where the part of the arguments ends that was given already.
    sent: Option<usize>,
}

/// Whether the buffer's text decides the next stage.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Go,
    Wait,
}

/// Keys that a call's object may have beside its name and its arguments.
const OTHERS: [&str; 2] = ["id", "type"];

impl ToolCallParser {
    /// A parser of an answer by a model that may call the tools of these names.
    pub(super) fn of_spec(spec: &'static Spec, names: &[&str]) -> ToolCallParser {
        ToolCallParser {
            spec,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            incremental: false,
            buffer: String::new(),
            stage: Stage::Text,
            calls: 0,
            quiet: true,
            out: Vec::new(),
        }
    }

    /// Gives arguments as they come, as soon as the tool's name is known, not call by call. If such a call breaks off
    /// or turns out to be malformed, the given part stays, and only the rest is text: for answers that a
    /// [grammar](super::ToolCallFormat::grammar) constrains, or for readers who see the end of an answer.
    #[must_use]
    pub fn incremental(self) -> ToolCallParser {
        ToolCallParser { incremental: true, ..self }
    }

    /// Also reads an answer as calls that has none of the notation's marks, and is wholly JSON objects of known tools'
    /// names and their arguments, or lists of them, bare or in fences of Markdown. Such calls are given at the answer's
    /// end, since text behind them makes all of it text.
    #[must_use]
    pub fn with_unmarked(self) -> ToolCallParser {
        ToolCallParser { stage: Stage::Unmarked(Unmarked::default()), ..self }
    }

    /// Takes the next text of the answer.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        self.buffer.push_str(text);
        self.advance(false);
        std::mem::take(&mut self.out)
    }

    /// The parts that were held back, at the answer's end.
    pub fn finish(mut self) -> Vec<Delta> {
        self.advance(true);
        self.out
    }

    fn advance(&mut self, at_end: bool) {
        while !self.buffer.is_empty() {
            let step = match std::mem::replace(&mut self.stage, Stage::Text) {
                Stage::Unmarked(unmarked) => self.unmarked(unmarked, at_end),
                Stage::Text => self.text(at_end),
                Stage::Open { at, failed, in_list } => self.open(at, failed, in_list, at_end),
                Stage::Object(object) => self.object(object, at_end),
                Stage::InList => self.in_list(at_end),
                Stage::Behind => self.behind(at_end),
            };
            if step == Step::Wait {
                break;
            }
        }
    }

    /// Holds an answer back that may be calls without marks. Any other is read from its beginning, as the notation has it.
    fn unmarked(&mut self, mut unmarked: Unmarked, at_end: bool) -> Step {
        let can_be_calls = unmarked.read(&self.buffer, &self.names, self.spec.arguments).is_some();
        if can_be_calls && !at_end {
            return self.wait(Stage::Unmarked(unmarked));
        }
        if can_be_calls && unmarked.is_whole(&self.buffer) {
            for (name, arguments) in unmarked.calls {
                self.give(&name, arguments);
                self.calls += 1;
            }
            self.buffer.clear();
        }
        Step::Go
    }

    /// Passes text on up to where a call may begin.
    fn text(&mut self, at_end: bool) -> Step {
        let blank = self.buffer.len() - self.buffer.trim_start().len();
        if self.spec.bare && self.quiet && self.calls == 0 && self.buffer[blank..].starts_with('{') {
            self.stage = Stage::Open { at: blank, failed: blank + 1, in_list: false };
            return Step::Go;
        }
        let found =
            self.spec.begin.iter().filter_map(|mark| Some((self.buffer.find(mark)?, mark.len()))).min();
        if let Some((at, length)) = found {
            // White space before a call is not passed on until it is known to be none.
            let kept = if self.quiet && at <= blank { at } else { 0 };
            self.pass(at - kept);
            self.stage = Stage::Open { at: kept + length, failed: kept + length, in_list: false };
            return Step::Go;
        }
        let held = if at_end { 0 } else { held_back(&self.buffer, self.spec.begin) };
        let free = self.buffer.len() - held;
        // White space alone is held back until a call or text follows.
        if self.quiet && free <= blank && !at_end {
            return Step::Wait;
        }
        if self.quiet && free <= blank && self.calls > 0 {
            self.buffer.clear();
        }
        self.pass(free.min(self.buffer.len()));
        if self.buffer.is_empty() { Step::Go } else { Step::Wait }
    }

    /// Passes the buffer's first bytes on as text.
    fn pass(&mut self, length: usize) {
        let text: String = self.buffer.drain(..length).collect();
        if text.is_empty() {
            return;
        }
        self.quiet = false;
        match self.out.last_mut() {
            Some(Delta::Text(last)) => last.push_str(&text),
            _ => self.out.push(Delta::Text(text)),
        }
    }

    /// The first bytes are text after all.
    fn fail(&mut self, bytes: usize) -> Step {
        self.pass(bytes);
        self.stage = Stage::Text;
        Step::Go
    }

    fn wait(&mut self, stage: Stage) -> Step {
        self.stage = stage;
        Step::Wait
    }

    fn open(&mut self, at: usize, failed: usize, in_list: bool, at_end: bool) -> Step {
        let rest = self.buffer[at..].trim_start();
        let at = self.buffer.len() - rest.len();
        let object = |at, named| {
            let scanner = ObjectScanner::new();
            Stage::Object(Object { at, failed, in_list, named, scanner, sent: None })
        };
        match rest.chars().next() {
            None if !at_end => return self.wait(Stage::Open { at, failed, in_list }),
            Some('[') if self.spec.list && !in_list => {
                self.stage = Stage::Open { at: at + 1, failed, in_list: true };
            }
            Some('{') => self.stage = object(at, None),
            Some(_) if self.spec.named && !in_list => match head(rest, &self.names) {
                Head::Wait if !at_end => return self.wait(Stage::Open { at, failed, in_list }),
                Head::Found { name, length } => self.stage = object(at + length, Some(name)),
                _ => return self.fail(failed),
            },
            _ => return self.fail(failed),
        }
        Step::Go
    }

    fn object(&mut self, mut object: Object, at_end: bool) -> Step {
        let is_done = object.scanner.read(&self.buffer[object.at..]);
        let Ok(is_done) = is_done else { return self.fail_object(&object) };
        if !is_done && at_end || !self.can_be_call(&object) {
            return self.fail_object(&object);
        }
        if self.incremental && (!is_done || object.sent.is_some()) {
            self.send_arguments(&mut object);
        }
        if !is_done {
            return self.wait(Stage::Object(object));
        }
        let length = object.at + object.scanner.read;
        if object.sent.is_none() {
            match self.call(&object) {
                Some((name, arguments)) => self.give(&name, arguments),
                None => return self.fail_object(&object),
            }
        }
        self.calls += 1;
        self.quiet = true;
        self.buffer.drain(..length);
        self.stage = if object.in_list { Stage::InList } else { Stage::Behind };
        Step::Go
    }

    fn fail_object(&mut self, object: &Object) -> Step {
        let Some(sent) = object.sent else { return self.fail(object.failed) };
        self.calls += 1;
        self.quiet = false;
        self.buffer.drain(..object.at + sent);
        self.stage = Stage::Text;
        Step::Go
    }

    /// Whether an object can become a call of a known tool, as far as it is read.
    fn can_be_call(&self, object: &Object) -> bool {
        if object.named.is_some() {
            return true;
        }
        let text = &self.buffer[object.at..];
        let is_known = |key: &str| key == NAME || ARGUMENTS.contains(&key) || OTHERS.contains(&key);
        let mut keys = object.scanner.keys();
        let has_own_keys =
            !self.spec.bare || keys.all(|key| string(&text[key]).is_some_and(|key| is_known(&key)));
        has_own_keys && name(&object.scanner, text).is_none_or(|name| self.names.contains(&name))
    }

    /// Name and arguments of a call that is read to its end.
    fn call(&self, object: &Object) -> Option<(String, String)> {
        let text = &self.buffer[object.at..object.at + object.scanner.read];
        let Some(name) = &object.named else { return call(&object.scanner, text, &self.names) };
        serde_json::from_str::<Map<String, Json>>(text).ok()?;
        Some((name.clone(), text.to_owned()))
    }

    fn give(&mut self, name: &str, arguments: String) {
        let index = self.calls;
        self.out.push(Delta::CallBegin { index, name: name.to_owned() });
        self.out.push(Delta::Arguments { index, json_fragment: arguments });
    }

    /// Gives the part of a call's arguments that is read and was not given yet.
    fn send_arguments(&mut self, object: &mut Object) {
        let text = &self.buffer[object.at..object.at + object.scanner.read];
        let is_arguments = |key: &str| string(key).is_some_and(|key| ARGUMENTS.contains(&key.as_str()));
        let (name, range) = match &object.named {
            Some(name) => (name.clone(), Some(0..text.len())),
            None => {
                let Some(name) = name(&object.scanner, text) else { return };
                let done = object.scanner.fields.iter().find(|(key, _)| is_arguments(&text[key.clone()]));
                let open = object.scanner.open_value().filter(|(key, _)| is_arguments(&text[key.clone()]));
                let range = done.map(|(_, value)| value.clone());
                (name, range.or_else(|| open.map(|(_, start)| start..text.len())))
            }
        };
        let Some(range) = range.filter(|range| text[range.clone()].starts_with('{')) else { return };
        let from = object.sent.unwrap_or(range.start);
        // White space at the end may stand behind the arguments.
        let fragment = text[from..range.end.max(from)].trim_end().to_owned();
        let index = self.calls;
        if object.sent.is_none() {
            self.out.push(Delta::CallBegin { index, name });
        }
        object.sent = Some(from + fragment.len());
        if !fragment.is_empty() {
            self.out.push(Delta::Arguments { index, json_fragment: fragment });
        }
    }

    fn in_list(&mut self, at_end: bool) -> Step {
        let rest = self.buffer.trim_start();
        let at = self.buffer.len() - rest.len() + 1;
        match rest.chars().next() {
            None if !at_end => return self.wait(Stage::InList),
            Some(']') => {
                self.buffer.drain(..at);
                self.stage = Stage::Behind;
            }
            Some(',') => self.stage = Stage::Open { at, failed: at, in_list: true },
            _ => self.stage = Stage::Text,
        }
        Step::Go
    }

    fn behind(&mut self, at_end: bool) -> Step {
        let rest = self.buffer.trim_start();
        let at = self.buffer.len() - rest.len();
        for (mark, is_end) in [(self.spec.end, true), (self.spec.separator, false)] {
            let Some(mark) = mark else { continue };
            if !rest.starts_with(mark) {
                if mark.starts_with(rest) && !at_end {
                    return self.wait(Stage::Behind);
                }
                continue;
            }
            let behind = at + mark.len();
            if is_end {
                self.buffer.drain(..behind);
                return Step::Go;
            }
            let next = self.buffer[behind..].trim_start();
            if next.is_empty() && !at_end {
                return self.wait(Stage::Behind);
            }
            if next.starts_with('{') {
                self.stage = Stage::Open { at: behind, failed: behind, in_list: false };
                return Step::Go;
            }
        }
        if self.spec.separator.is_some() && rest.starts_with('{') {
            self.stage = Stage::Open { at, failed: at + 1, in_list: false };
        }
        Step::Go
    }
}
