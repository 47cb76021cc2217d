//! Answers that follow a grammar: JSON, JSON of a schema, a regular expression, one of some texts, or a Lark grammar. Before a token
//! is chosen, the logits of all tokens that the grammar does not allow there are lowered to minus infinity, so that every
//! sampling option works on those that are left. The grammars themselves are those of `llguidance`.

use std::fmt;
use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use refrain_model::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Deserializer, Value, json};

use super::limits::{check_expression, check_lark, check_text};
use super::schema::prepare;
use crate::{Error, Result};

/// White space between the parts of a JSON text: a line break with its indentation, of spaces or of tabs, or some spaces. The bounds keep small
/// models from writing white space, above all tabs behind spaces, until the end of their answer.
const JSON_SPACE: &str = r"\n[ ]{0,64}|\n\t{0,16}|[ ]{1,4}";

/// Most characters of an error's reason, which may quote the grammar.
const MAX_REASON: usize = 300;

/// The name that `llguidance` gives to a mask without a token.
const NO_TOKEN: &str = "NoExtensionBias";

/// Reasons of `llguidance` that speak of options that nobody can set here.
const TOO_MANY_STEPS: [&str; 3] = ["lexer precomputation failed", "fuel exhausted", "relevance check fuel"];

/// Most texts of a choice.
const MAX_CHOICES: usize = 4096;

/// The form that an answer is held to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StructuredOutput {
    /// A JSON object.
    JsonObject,
    /// A JSON value of a JSON schema.
    JsonSchema(Value),
    /// A text that a regular expression matches as a whole (syntax of the crate `regex`).
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text that a grammar in llguidance's dialect of Lark describes.
    Lark(String),
    /// A text of one of these kinds, none of which is `Either` itself.
    Either(Vec<StructuredOutput>),
}

impl StructuredOutput {
    fn grammar(&self) -> std::result::Result<TopLevelGrammar, String> {
        let object = json!({"type": "object"});
        match self {
            StructuredOutput::JsonObject => json_grammar(&object),
            StructuredOutput::JsonSchema(schema) => json_grammar(schema),
            StructuredOutput::Regex(regex) => {
                check_expression(regex).map(|()| TopLevelGrammar::from_regex(regex))
            }
            StructuredOutput::Choice(choices) => choice(choices),
            StructuredOutput::Lark(grammar) => lark(grammar),
            StructuredOutput::Either(outputs) => either(outputs),
        }
    }
}

/// The grammars of several kinds, each under a name of its own, and before them one that refers to all of them.
fn either(outputs: &[StructuredOutput]) -> std::result::Result<TopLevelGrammar, String> {
    let mut grammars = Vec::new();
    for (index, output) in outputs.iter().enumerate() {
        if matches!(output, StructuredOutput::Either(_)) {
            return Err("alternatives of an answer have no alternatives of their own".to_owned());
        }
        let name = Some(format!("of_{index}"));
        grammars.extend(
            output.grammar()?.grammars.into_iter().map(|of| GrammarWithLexer { name: name.clone(), ..of }),
        );
    }
    let names: Vec<String> = (0..outputs.len()).map(|index| format!("@of_{index}")).collect();
    let start = GrammarWithLexer::from_lark(format!("start: {}", names.join(" | ")));
    grammars.insert(0, start);
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

fn json_grammar(schema: &Value) -> std::result::Result<TopLevelGrammar, String> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Object(_) => schema.clone(),
        _ => return Err("a JSON schema is an object".to_owned()),
    };
    check_text(&schema.to_string())?;
    prepare(&mut schema)?;
    // A schema's own options would lift the bound on white space, and could make the grammar one of another kind. Whether exactly one part of
    // `oneOf` holds cannot be told before the end of a value.
    schema["x-guidance"] = json!({ "whitespace_pattern": JSON_SPACE, "coerce_one_of": true });
    Ok(TopLevelGrammar::from_json_schema(schema))
}

fn choice(choices: &[String]) -> std::result::Result<TopLevelGrammar, String> {
    if choices.is_empty() || choices.len() > MAX_CHOICES || choices.iter().any(String::is_empty) {
        return Err(format!("a choice has 1 to {MAX_CHOICES} texts, none of them empty"));
    }
    // Lark writes texts as JSON does.
    let texts: Vec<String> = choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
    Ok(TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | "))))
}

/// A Lark grammar, whose JSON schemas may be longer than the rest of it.
fn lark(text: &str) -> std::result::Result<TopLevelGrammar, String> {
    check_text(text)?;
    let (mut rest, mut bytes) = (text, text.len());
    while let Some((_, after)) = rest.split_once("%json") {
        rest = after;
        let mut values = Deserializer::from_str(after).into_iter();
        if let Some(Ok(mut schema @ Value::Object(_))) = values.next() {
            prepare(&mut schema)?;
            rest = &after[values.byte_offset()..];
            bytes -= values.byte_offset();
        }
    }
    check_lark(bytes)?;
    Ok(TopLevelGrammar::from_lark(text.to_owned()))
}

/// A compiled grammar at the beginning of an answer. A clone shares nothing that changes.
pub struct Grammar(Matcher);

impl Clone for Grammar {
    fn clone(&self) -> Grammar {
        Grammar(self.0.deep_clone())
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Lowers the logits of all tokens that may not come next to minus infinity. At the end of the grammar the end tokens alone are
    /// left.
    ///
    /// # Errors
    /// If the grammar takes more steps or memory than its bounds allow, or no token may come next.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let allowed = self.0.compute_mask_or_eos();
        let allowed =
            allowed.map_err(|error| refused(error, "no text that goes on from here satisfies it"))?;
        let mut words = allowed.as_slice().iter();
        for logits in logits.chunks_mut(u32::BITS as usize) {
            let word = words.next().copied().unwrap_or(0);
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    /// Takes note of a token that [`Grammar::mask`] allowed.
    ///
    /// # Errors
    /// If the grammar takes more steps or memory than its bounds allow.
    pub fn push(&mut self, token: u32) -> Result<()> {
        if self.0.is_stopped() && !self.0.is_error() {
            return Ok(());
        }
        self.0.consume_token(token).map_err(|error| wrong(&error))
    }

    /// Whether nothing but an end token may come next.
    pub fn is_complete(&self) -> bool {
        self.0.is_stopped() && !self.0.is_error()
    }
}

/// The error of a grammar, whose reason is cut at [`MAX_REASON`].
fn wrong(reason: &dyn fmt::Display) -> Error {
    let reason = reason.to_string();
    // The mark of an error that leaves out the parser's state.
    let reason = reason.trim_end().trim_end_matches("<non-verbose/>").trim_end();
    let reason = match TOO_MANY_STEPS.iter().any(|steps| reason.contains(steps)) {
        true => {
            "it takes more steps than are allowed; optional and repeated parts in a row take most of them"
        }
        false => reason,
    };
    let reason = match reason.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}…", &reason[..end]),
        None => reason.to_owned(),
    };
    Error::Grammar { reason }
}

/// The error of a mask, which is `no_token` where no token may come next.
fn refused(error: impl fmt::Display, no_token: &str) -> Error {
    match error.to_string() {
        reason if reason.starts_with(NO_TOKEN) => wrong(&no_token),
        reason => wrong(&reason),
    }
}

/// Compiles grammars for a tokenizer.
pub(crate) struct GrammarCompiler(ParserFactory);

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for the tokens of `tokenizer`, of which `ends` end an answer.
    pub(crate) fn new(tokenizer: &Tokenizer, ends: &[u32]) -> Result<GrammarCompiler> {
        // A token that ends answers is no text of a grammar.
        let word = |id: u32| {
            let bytes = tokenizer.bytes_of(id);
            let is_control = tokenizer.is_special(id) || ends.contains(&id);
            if is_control && !bytes.is_empty() {
                [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
            } else {
                bytes
            }
        };
        let vocab = tokenizer.vocab_size() as u32;
        let ends: Vec<u32> = ends.iter().copied().filter(|end| *end < vocab).collect();
        let Some(end) = ends.first() else {
            return Err(wrong(&"the model has no token that ends an answer"));
        };
        let words: Vec<Vec<u8>> = (0..vocab).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab, *end), &words).with_eos_tokens(&ends);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| wrong(&error))?;
        factory.quiet().limits_mut().verbose_errors = false;
        Ok(GrammarCompiler(factory))
    }

    /// # Errors
    /// If the grammar is wrong, takes more steps or memory than its bounds allow, or no text satisfies it.
    pub(crate) fn compile(&self, output: &StructuredOutput) -> Result<Grammar> {
        let grammar = output.grammar().map_err(|reason| wrong(&reason))?;
        let mut matcher = Matcher::new(self.0.create_parser(grammar));
        // The matcher keeps this mask for the first token of an answer.
        let first = matcher.compute_mask_or_eos();
        first.map_err(|error| refused(error, "no text satisfies this schema or grammar"))?;
        Ok(Grammar(matcher))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grammar_of_too_many_steps_is_refused_without_options_of_the_library() {
        let error =
            wrong(&"lexer precomputation failed; either increase limits.initial_lexer_fuel").to_string();
        assert!(error.contains("optional and repeated parts") && !error.contains("fuel"), "{error}");
    }

    #[test]
    fn grammars_beyond_the_limits_are_refused_before_they_are_parsed() {
        let lark = |text: String| StructuredOutput::Lark(format!("start: {text}"));
        let schema = json!({ "properties": { "code": { "pattern": "a?".repeat(4097) } } });
        for (output, reason) in [
            (StructuredOutput::Regex(r"\w".repeat(1025)), "1024 are"),
            (StructuredOutput::Regex("a?".repeat(4097)), "8192 are"),
            (lark(format!("/{}/", r"\pL".repeat(1025))), "1024 are"),
            (lark("\"a\"? ".repeat(8000)), "32768 are"),
            (lark(format!("\"{}\"", "a".repeat(300_000))), "262144 are"),
            (lark(format!("\"x\" %json {schema}")), "\"code\""),
            (StructuredOutput::JsonSchema(schema), "\"code\""),
            (StructuredOutput::JsonSchema(json!({ "title": "a".repeat(300_000) })), "262144 are"),
        ] {
            let error = output.grammar().map(|_| ()).unwrap_err();
            assert!(error.contains(reason), "{}", &error[..error.len().min(300)]);
        }
        let description = "Is it a %json {} schema? ".repeat(4000);
        let schema = json!({ "description": description, "pattern": r"^\w+$" });
        for output in [
            StructuredOutput::Regex("a?".repeat(4096)),
            lark(format!("%json {schema} \"\\n\" %json {{}}")),
            StructuredOutput::JsonSchema(schema),
        ] {
            assert!(output.grammar().is_ok());
        }
    }
}
