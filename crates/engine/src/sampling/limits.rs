//! Limits of grammars, asserted before a grammar is parsed. An escape of a Unicode class takes kilobytes, and optional parts in a row
//! take memory and time that grow with the square of their number.

/// Most bytes of a grammar's text, schemas included.
const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Most bytes of a Lark grammar beside its JSON schemas.
const MAX_LARK_BYTES: usize = 32 << 10;
/// Most bytes of a regular expression.
const MAX_EXPRESSION_BYTES: usize = 8 << 10;
/// Most escapes of Unicode classes, such as `\w` and `\pL`, in a grammar.
const MAX_CLASSES: usize = 1024;

/// # Errors
/// If a grammar's text is too long, or has too many Unicode classes; the error is its message.
pub(super) fn check_text(text: &str) -> Result<(), String> {
    at_most(text.len(), MAX_GRAMMAR_BYTES, "the grammar has", "bytes")?;
    let is_class = |bytes: &&[u8]| matches!(bytes, [b'\\', b'w' | b'W' | b'p' | b'P']);
    let classes = text.as_bytes().windows(2).filter(is_class).count();
    at_most(classes, MAX_CLASSES, "the grammar has", r"Unicode classes (\w, \p)")
}

/// # Errors
/// If a regular expression is too long; the error is its message.
pub(super) fn check_expression(expression: &str) -> Result<(), String> {
    at_most(expression.len(), MAX_EXPRESSION_BYTES, "the regular expression has", "bytes")?;
    check_text(expression)
}

/// # Errors
/// If a Lark grammar has too many bytes beside its JSON schemas; the error is its message.
pub(super) fn check_lark(bytes: usize) -> Result<(), String> {
    at_most(bytes, MAX_LARK_BYTES, "the Lark grammar beside its JSON schemas has", "bytes")
}

fn at_most(count: usize, most: usize, has: &str, unit: &str) -> Result<(), String> {
    if count > most { Err(format!("{has} {count} {unit}: at most {most} are allowed")) } else { Ok(()) }
}
