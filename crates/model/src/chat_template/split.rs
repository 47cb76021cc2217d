//! A prompt in pieces: `S ‖ documents ‖ Q`.

use std::borrow::Cow;

use serde_json::{Value as Json, json};

use super::message::{Message, ToolCall, tool_name};
use super::placeholder::{CLOSE, ESCAPE, OPEN, PAD, escaped, index_of, is_placeholder, unmarked};
use super::switches::heeded;
use super::thoughts::{THOUGHT_MARKS, Thinking, Thoughts, around_marks};
use super::values::{Slot, Texts, Turn, TurnText};
use super::{ChatTemplate, pieces::Pieces};
use crate::error::{ModelError, Result, template_error};
use crate::tokenizer::Piece;

/// A prompt without its documents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptParts {
    /// The pieces before the documents.
    pub system: Vec<Piece>,
    /// The pieces after the documents, with the beginning of the answer's turn.
    pub question: Vec<Piece>,
    /// Whether the answer begins with thoughts.
    pub thinking: Thinking,
}

/// The texts of a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// The system message; none leaves it to the template, which may have one of its own.
    pub system: Option<String>,
    /// The tools that the model may call, in OpenAI's notation: `{"type": "function", "function": {…}}`.
    pub tools: Vec<Json>,
    /// Earlier turns, before the user's turn with the documents.
    pub history: Vec<Message>,
    /// The user's turn before the documents.
    pub before_documents: String,
    /// The user's turn after the documents.
    pub question: String,
    /// Turns after the user's turn with the documents: answers, calls of tools, their results, further questions.
    pub after: Vec<Message>,
    /// Whether a model that can do both thinks before it answers: `enable_thinking` of its template.
    pub thinking: bool,
}

/// The special tokens around calls in an assistant's text, as Phi-4-mini writes them.
const CALLS: [&str; 2] = ["<|tool_call|>", "<|/tool_call|>"];

/// A part of a rendered template.
#[derive(Debug, PartialEq, Eq)]
enum Part<'a> {
    /// Text of the template, and marked characters of users.
    Text(&'a str),
    /// A text that was written as a JSON string `escapes` times, in one another.
    Slot { index: usize, escapes: usize, trims_start: bool, trims_end: bool },
}

impl Layout {
    /// Joins the system messages among the turns to the one before them, for a template that writes none there. None where no turn is one.
    #[must_use]
    pub fn with_system_joined(&self) -> Option<Layout> {
        let turns = || self.history.iter().chain(&self.after);
        if turns().all(|turn| turn.role != "system") {
            return None;
        }
        let later = turns().filter(|turn| turn.role == "system").map(|turn| turn.content.as_str());
        let said = self.system.as_deref().into_iter().chain(later).filter(|text| !text.is_empty());
        let others = |turns: &[Message]| turns.iter().filter(|turn| turn.role != "system").cloned().collect();
        Some(Layout {
            system: Some(said.collect::<Vec<_>>().join("\n\n")),
            history: others(&self.history),
            after: others(&self.after),
            ..self.clone()
        })
    }
}

impl ChatTemplate {
    /// Whether the template writes tools that it is given, their calls and their results. Where it does not,
    /// [`Layout::with_tools_as_text`] says them to the model.
    #[must_use]
    pub fn supports_tools(&self) -> bool {
        let parameters = json!({"type": "object", "properties": {"b": {"type": "string"}}});
        let function = json!({"name": "a", "description": "d", "parameters": parameters});
        let call =
            ToolCall { id: "000000000".to_owned(), name: "a".to_owned(), arguments: json!({"b": "c"}) };
        let result = Message {
            tool_call_id: Some(call.id.clone()),
            name: Some(call.name.clone()),
            ..Message::text("tool", "d")
        };
        self.split(&Layout {
            question: "q".to_owned(),
            tools: vec![json!({"type": "function", "function": function})],
            after: vec![Message { tool_calls: vec![call], ..Message::text("assistant", "") }, result],
            ..Layout::default()
        })
        .is_ok()
    }

    /// The prompt around the documents, in pieces that know who wrote them.
    ///
    /// The system message goes into the user's first turn if the template refuses or ignores a system role. One among the turns
    /// stays there if the template writes it, and is joined to the first one otherwise. White space
    /// that the template trims from messages is trimmed. Ids of calls are given in nine letters and digits if the
    /// template refuses others; several calls in one turn become turns of their own if it refuses them. An assistant's
    /// text beside its calls is left out where the template leaves it out, and so are its thoughts up to `</think>` in
    /// turns before the user's last one. The marks around thoughts that stay are the template's text, if it knows them.
    /// Switches in the system message (`/no_think`) count where the template takes them out of it.
    ///
    /// # Errors
    /// [`ModelError::ToolsIgnored`] if the template leaves out a tool or a call, and [`ModelError::ChatTemplate`] if it
    /// refuses the conversation, leaves out or repeats a message, or writes a text otherwise than it is.
    pub fn split(&self, layout: &Layout) -> Result<PromptParts> {
        if !layout.tools.is_empty()
            && let Some(tool_use) = &self.tool_use
        {
            return tool_use.split(layout);
        }
        let messages = || layout.history.iter().chain(&layout.after);
        if let Some(turn) = messages().find(|turn| !is_role(&turn.role)) {
            return Err(template_error(format!("cannot write a message of the role {:?}", turn.role)));
        }
        if layout.tools.iter().any(|tool| tool_name(tool).is_none_or(str::is_empty)) {
            return Err(template_error("cannot write a tool without a name".to_owned()));
        }
        let layout = &*self.without_thoughts(layout);
        let mut first = None;
        let joined = layout.with_system_joined();
        for layout in std::iter::once(layout).chain(&joined) {
            for attempt in attempts(layout) {
                match self.try_split(&attempt, layout) {
                    Ok(parts) => return Ok(parts),
                    Err(error) => _ = first.get_or_insert(error),
                }
            }
        }
        Err(first.unwrap_or(ModelError::ToolsIgnored))
    }

    /// The conversation without the thoughts that the template leaves out.
    fn without_thoughts<'a>(&self, layout: &'a Layout) -> Cow<'a, Layout> {
        let earlier = layout.after.iter().rposition(|turn| turn.role == "user").unwrap_or(0);
        if !layout.history.iter().chain(&layout.after[..earlier]).any(Thoughts::are_in) {
            return Cow::Borrowed(layout);
        }
        let thoughts = self.thoughts();
        let mut layout = layout.clone();
        let answers = layout.history.iter_mut().chain(&mut layout.after[..earlier]);
        for turn in answers.filter(|turn| Thoughts::are_in(turn)) {
            turn.content = thoughts.written(&turn.content).to_owned();
        }
        Cow::Owned(layout)
    }

    fn try_split(&self, attempt: &Attempt<'_>, layout: &Layout) -> Result<PromptParts> {
        let system = layout.system.as_deref().unwrap_or_default();
        let switches = heeded(system, |turns| self.render(turns, &[], true));
        // A switch decides, whatever is asked for beside it.
        let may_think = layout.thinking || !switches.is_empty();
        let mut texts = Texts::marked(attempt.short_ids, switches);
        let rendered =
            self.write(&self.marking, &mut texts, (&attempt.turns, &layout.tools), layout.thinking, true)?;
        let parts = parts(&rendered, texts.slots.len()).ok_or_else(|| {
            template_error(
                "changes the text of messages, so that a prompt cannot be made of parts".to_owned(),
            )
        })?;
        let times = |slot: usize| {
            parts.iter().filter(|part| matches!(part, Part::Slot { index, .. } if *index == slot)).count()
        };
        let in_system = texts.system_tools.is_some_and(|slot| times(slot) > 0);
        let has_tools = in_system || texts.tool_names.iter().all(|slot| times(*slot) > 0);
        let has_calls = texts.call_names.iter().all(|slot| times(*slot) > 0);
        if !has_tools || !has_calls || attempt.calls_in_text && !in_system {
            return Err(ModelError::ToolsIgnored);
        }
        for (slot, what, min) in &texts.contents {
            let times = times(*slot);
            if !(*min..=1).contains(&times) {
                return Err(template_error(format!("writes {what} {times} times, not once")));
            }
        }
        let parts = assemble(&parts, &texts.slots, self.source.contains(THOUGHT_MARKS[1]))?;
        let end = parts.question.last().filter(|piece| piece.literal).map_or("", |piece| &piece.text);
        let thinking = Thinking::behind(end, may_think && self.source.contains("enable_thinking"));
        Ok(PromptParts { thinking, ..parts })
    }
}

/// A way to give a conversation to a template.
#[derive(Debug, Clone)]
struct Attempt<'a> {
    turns: Vec<Turn<'a>>,
    /// Whether ids of calls are brought to nine letters and digits.
    short_ids: bool,
    /// Whether calls are the assistant's text, for a template that has the tools in the system message.
    calls_in_text: bool,
}

/// The ways to give a conversation to a template, the plainest first.
fn attempts(layout: &Layout) -> Vec<Attempt<'_>> {
    let apart = |system: &str| {
        let mut turns = turns(layout, None);
        turns.insert(0, Turn::text("system", TurnText::Said(system.to_owned())));
        turns
    };
    let ways = match &layout.system {
        Some(system) => vec![apart(system), turns(layout, Some(system))],
        None if layout.tools.is_empty() => vec![turns(layout, None)],
        // A template may write tools beside a system message only.
        None => vec![turns(layout, None), apart("")],
    };
    let mut attempts: Vec<Attempt<'_>> = Vec::new();
    for turns in ways {
        let plain = Attempt { turns, short_ids: false, calls_in_text: false };
        let has_calls = plain.turns.iter().any(|turn| !turn.calls.is_empty() || turn.call_id.is_some());
        attempts.push(plain.clone());
        if plain.turns.iter().any(|turn| turn.calls.len() > 1) {
            attempts.push(Attempt { turns: one_call_a_turn(&plain.turns), ..plain.clone() });
        }
        if has_calls {
            let turns = plain.turns.iter().map(Turn::with_calls_in_text).collect();
            attempts.push(Attempt { short_ids: true, ..plain });
            attempts.push(Attempt { turns, short_ids: false, calls_in_text: true });
        }
    }
    attempts
}

/// Whether a role can stand in a template's own text: a word, and no special token.
fn is_role(role: &str) -> bool {
    (1..=32).contains(&role.len())
        && role.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))
}

/// The turns with their texts. `system` is said at the beginning of the user's first turn.
fn turns<'a>(layout: &'a Layout, system: Option<&str>) -> Vec<Turn<'a>> {
    let mut system = system.filter(|system| !system.trim().is_empty());
    let mut with_system = |role: &str, text: &str| match system.take_if(|_| role == "user") {
        Some(said) => format!("{said}\n\n{text}"),
        None => text.to_owned(),
    };
    let mut turns: Vec<Turn<'a>> = Vec::new();
    for turn in &layout.history {
        turns.push(Turn::new(turn, TurnText::Said(with_system(&turn.role, &turn.content))));
    }
    let before = with_system("user", &layout.before_documents);
    turns.push(Turn::text("user", TurnText::Documents { before, question: layout.question.clone() }));
    turns.extend(layout.after.iter().map(|turn| Turn::new(turn, TurnText::Said(turn.content.clone()))));
    turns
}

/// The turns with each call in a turn of its own, and its result behind it.
fn one_call_a_turn<'a>(turns: &[Turn<'a>]) -> Vec<Turn<'a>> {
    let mut out = Vec::new();
    let mut rest = turns;
    while let [turn, behind @ ..] = rest {
        let count = behind.iter().take_while(|turn| turn.role == "tool").count();
        if turn.calls.len() < 2 {
            out.push(turn.clone());
            rest = behind;
            continue;
        }
        let mut results: Vec<&Turn<'a>> = behind[..count].iter().collect();
        for (index, call) in turn.calls.iter().enumerate() {
            let text = if index == 0 { turn.text.clone() } else { TurnText::Said(String::new()) };
            out.push(Turn { text, calls: std::slice::from_ref(call), ..turn.clone() });
            let is_its = |result: &&Turn<'a>| result.call_id == Some(call.id.as_str());
            let has_no_id = |result: &&Turn<'a>| result.call_id.is_none();
            let at = results.iter().position(is_its).or_else(|| results.iter().position(has_no_id));
            out.extend(at.map(|at| results.remove(at).clone()));
        }
        out.extend(results.into_iter().cloned());
        rest = &behind[count..];
    }
    out
}

/// Cuts a rendered text at its placeholders; `None` if one is mutilated or stands for none of the `count` texts.
fn parts(rendered: &str, count: usize) -> Option<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    let mut rest = rendered;
    while let Some((before, behind)) = rest.split_once(OPEN) {
        let (number, after) = behind.split_once(CLOSE)?;
        let digits = number.trim_start_matches(ESCAPE);
        let (left, right) = (before.strip_suffix(PAD), after.strip_prefix(PAD));
        parts.push(Part::Text(left.unwrap_or(before)));
        parts.push(Part::Slot {
            index: index_of(digits).filter(|index| *index < count)?,
            escapes: (number.len() - digits.len()) / ESCAPE.len_utf8(),
            trims_start: left.is_none(),
            trims_end: right.is_none(),
        });
        rest = right.unwrap_or(after);
    }
    parts.push(Part::Text(rest));
    let is_clean = |c: char| !is_placeholder(c) || unmarked(c).is_some();
    let all_clean = |part: &Part<'_>| !matches!(part, Part::Text(text) if !text.chars().all(is_clean));
    parts.iter().all(all_clean).then_some(parts)
}

/// Puts the texts in the place of their placeholders. Of a model that `thinks`, the marks around thoughts are the template's text.
fn assemble(parts: &[Part<'_>], slots: &[Slot], thinks: bool) -> Result<PromptParts> {
    let mut pieces = Pieces::default();
    let mut before_documents = None;
    for part in parts {
        match *part {
            Part::Text(text) => pieces.push_marked(text),
            Part::Slot { index, escapes, trims_start, trims_end } => match &slots[index] {
                Slot { text: TurnText::Said(text), of_assistant: true, of_tool }
                    if thinks && escapes == 0 =>
                {
                    let [before, begin, thoughts, end, said] =
                        around_marks(trim(text, trims_start, trims_end));
                    pieces.push_user(before, *of_tool);
                    pieces.push_marked(begin);
                    pieces.push_user(thoughts, *of_tool);
                    pieces.push_marked(end);
                    pieces.push_user(said, *of_tool);
                }
                Slot { text: TurnText::Said(text), of_tool, .. } => {
                    let text = escape(trim(text, trims_start, trims_end), escapes);
                    pieces.push_user(&text, *of_tool);
                }
                Slot { text: TurnText::Calls { text, calls }, .. } => {
                    pieces.push_user(&escape(trim(text, trims_start, false), escapes), true);
                    pieces.push_marked(CALLS[0]);
                    pieces.push_user(&escape(calls, escapes), true);
                    pieces.push_marked(CALLS[1]);
                }
                Slot { text: TurnText::Documents { before, question }, .. } if escapes == 0 => {
                    pieces.push_user(trim(before, trims_start, false), false);
                    before_documents = Some(std::mem::take(&mut pieces));
                    pieces.push_user(trim(question, false, trims_end), false);
                }
                Slot { .. } => {
                    let message = "writes the user's text as JSON, so that documents have no place in it";
                    return Err(template_error(message.to_owned()));
                }
            },
        }
    }
    let (mut system, mut question) = (before_documents.unwrap_or_default().join(), pieces.join());
    // Documents begin without it: each chunk of them is tokenised alone.
    if let (Some(last), Some(first)) = (system.last_mut(), question.first())
        && last.ends_in_space_of(first)
    {
        last.text.pop();
        question.insert(0, Piece { text: " ".to_owned(), literal: true });
    }
    system.retain(|piece| !piece.text.is_empty());
    Ok(PromptParts { system, question, thinking: Thinking::None })
}

fn trim(text: &str, start: bool, end: bool) -> &str {
    let text = if start { text.trim_start() } else { text };
    if end { text.trim_end() } else { text }
}

/// A text as it stands in JSON strings in one another.
fn escape(text: &str, times: usize) -> String {
    (0..times).fold(text.to_owned(), |text, _| escaped(&text))
}
