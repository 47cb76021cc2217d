//! JSON read byte by byte, as it is generated.

use std::ops::Range;

/// A text that is no JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotJson;

/// Arrays and objects in one another that are read: fewer than serde_json reads.
const MAX_DEPTH: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a value; `or_end` in an empty array.
    Value {
        or_end: bool,
    },
    /// Before a key; `or_end` in an empty object.
    Key {
        or_end: bool,
    },
    Colon,
    AfterValue,
    String {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    Unicode {
        is_key: bool,
        left: u8,
    },
    /// In a number.
    Number(Number),
    /// The rest of `true`, `false` or `null`.
    Word(&'static [u8]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

/// Reads one JSON object and fails at the first byte that cannot belong to it.
#[derive(Debug, Clone)]
struct Json {
    state: State,
    /// Whether each open bracket is an object's.
    open: Vec<bool>,
}

impl Json {
    /// Takes one byte; true behind the last.
    fn push(&mut self, byte: u8) -> Result<bool, NotJson> {
        if let State::Number(number) = self.state {
            match after_digit(number, byte) {
                Some(next) => {
                    self.state = State::Number(next);
                    return Ok(false);
                }
                None if matches!(
                    number,
                    Number::Zero | Number::Digits | Number::Fraction | Number::ExponentDigits
                ) =>
                {
                    self.state = State::AfterValue;
                }
                None => return Err(NotJson),
            }
        }
        let is_space = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.state = match (self.state, byte) {
            (State::String { is_key: true }, b'"') => State::Colon,
            (State::String { is_key: false }, b'"') => State::AfterValue,
            (State::String { is_key }, b'\\') => State::Escape { is_key },
            (State::String { .. }, 0..0x20) => return Err(NotJson),
            (state @ State::String { .. }, _) => state,
            (State::Escape { is_key }, b'u') => State::Unicode { is_key, left: 4 },
            (State::Escape { is_key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                State::String { is_key }
            }
            (State::Unicode { is_key, left }, _) if byte.is_ascii_hexdigit() => match left {
                1 => State::String { is_key },
                _ => State::Unicode { is_key, left: left - 1 },
            },
            (State::Word([first, rest @ ..]), _) if *first == byte => match rest {
                [] => State::AfterValue,
                rest => State::Word(rest),
            },
            (State::Value { .. } | State::Key { .. } | State::Colon | State::AfterValue, _) if is_space => {
                self.state
            }
            (State::Key { .. }, b'"') => State::String { is_key: true },
            (State::Colon, b':') => State::Value { or_end: false },
            (State::AfterValue, b',') if self.in_object() => State::Key { or_end: false },
            (State::AfterValue, b',') => State::Value { or_end: false },
            (State::AfterValue | State::Key { or_end: true }, b'}') if self.in_object() => {
                return Ok(self.close());
            }
            (State::AfterValue | State::Value { or_end: true }, b']') if !self.in_object() => {
                return Ok(self.close());
            }
            (State::Value { .. }, _) => self.value(byte)?,
            _ => return Err(NotJson),
        };
        Ok(false)
    }

    fn in_object(&self) -> bool {
        self.open.last() == Some(&true)
    }

    fn close(&mut self) -> bool {
        self.open.pop();
        self.state = State::AfterValue;
        self.open.is_empty()
    }

    /// The state behind the first byte of a value.
    fn value(&mut self, byte: u8) -> Result<State, NotJson> {
        if matches!(byte, b'{' | b'[') {
            if self.open.len() == MAX_DEPTH {
                return Err(NotJson);
            }
            self.open.push(byte == b'{');
        }
        Ok(match byte {
            b'{' => State::Key { or_end: true },
            b'[' => State::Value { or_end: true },
            b'"' => State::String { is_key: false },
            b'-' => State::Number(Number::Minus),
            b'0' => State::Number(Number::Zero),
            b'1'..=b'9' => State::Number(Number::Digits),
            b't' => State::Word(b"rue"),
            b'f' => State::Word(b"alse"),
            b'n' => State::Word(b"ull"),
            _ => return Err(NotJson),
        })
    }
}

/// The state of a number behind one more byte of it; none if the byte is not the number's.
fn after_digit(number: Number, byte: u8) -> Option<Number> {
    Some(match (number, byte) {
        (Number::Minus, b'0') => Number::Zero,
        (Number::Minus | Number::Digits, b'0'..=b'9') => Number::Digits,
        (Number::Zero | Number::Digits, b'.') => Number::Point,
        (Number::Point | Number::Fraction, b'0'..=b'9') => Number::Fraction,
        (Number::Zero | Number::Digits | Number::Fraction, b'e' | b'E') => Number::Exponent,
        (Number::Exponent, b'+' | b'-') => Number::ExponentSign,
        (Number::Exponent | Number::ExponentSign | Number::ExponentDigits, b'0'..=b'9') => {
            Number::ExponentDigits
        }
        _ => return None,
    })
}

/// Reads one JSON object and keeps where its own fields are.
#[derive(Debug, Clone)]
pub(super) struct ObjectScanner {
    json: Json,
    /// How many bytes of the object were read.
    pub(super) read: usize,
    key: Range<usize>,
    /// Where the value of the last key begins.
    value: Option<usize>,
    /// Keys as they are written, with their quotes, and values, in bytes from the object's beginning.
    pub(super) fields: Vec<(Range<usize>, Range<usize>)>,
}

impl ObjectScanner {
    pub(super) fn new() -> ObjectScanner {
        let json = Json { state: State::Value { or_end: false }, open: Vec::new() };
        ObjectScanner { json, read: 0, key: 0..0, value: None, fields: Vec::new() }
    }

    /// Reads on in the object's text, which may have grown; true at its end, where `read` is its length.
    pub(super) fn read(&mut self, object: &str) -> Result<bool, NotJson> {
        for (at, byte) in object.bytes().enumerate().skip(self.read) {
            let is_own = self.json.open.len() == 1;
            let before = self.json.state;
            let was_done = self.json.push(byte)?;
            self.read = at + 1;
            if !is_own {
                if at == 0 && byte != b'{' {
                    return Err(NotJson);
                }
                continue;
            }
            match (before, self.json.state) {
                (State::Key { .. }, State::String { is_key: true }) => self.key = at..at,
                (State::String { is_key: true }, State::Colon) => self.key.end = at + 1,
                (State::Value { .. }, State::Value { or_end: false }) => {}
                (State::Value { .. }, _) => self.value = Some(at),
                _ => {}
            }
            let ends = was_done || byte == b',' && matches!(self.json.state, State::Key { .. });
            if let Some(start) = self.value.take_if(|_| ends) {
                let value = object[start..at].trim_end();
                self.fields.push((self.key.clone(), start..start + value.len()));
            }
            if was_done {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The keys that are read, as they are written.
    pub(super) fn keys(&self) -> impl Iterator<Item = Range<usize>> {
        let last = (!self.key.is_empty()).then(|| self.key.clone());
        self.fields.iter().map(|(key, _)| key.clone()).chain(last)
    }

    /// The place at which the key that is being read begins.
    pub(super) fn open_key(&self) -> Option<usize> {
        (self.key.is_empty() && self.key.start > 0).then_some(self.key.start)
    }

    /// The key whose value is being read, and where that value begins.
    pub(super) fn open_value(&self) -> Option<(Range<usize>, usize)> {
        self.value.map(|start| (self.key.clone(), start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Result<Option<Vec<(&str, &str)>>, NotJson> {
        let mut scanner = ObjectScanner::new();
        if !scanner.read(text)? {
            return Ok(None);
        }
        Ok(Some(
            scanner.fields.iter().map(|(key, value)| (&text[key.clone()], &text[value.clone()])).collect(),
        ))
    }

    #[test]
    fn fields_are_found() {
        let text = r#"{ "a" : -1.5e+3 , "b\"":{"c":[1,{"d":"},"}]},"e":[] ,"f": null, "g":"x\u00e9,"}rest"#;
        let wanted = [
            ("\"a\"", "-1.5e+3"),
            ("\"b\\\"\"", r#"{"c":[1,{"d":"},"}]}"#),
            ("\"e\"", "[]"),
            ("\"f\"", "null"),
        ];
        let found = fields(text).unwrap().unwrap();
        assert_eq!(found[..4], wanted);
        assert_eq!(found[4], ("\"g\"", r#""x\u00e9,""#));
        assert_eq!(fields("{}").unwrap().unwrap(), []);
        assert_eq!(fields(r#"{"a": 1"#), Ok(None));
    }

    #[test]
    fn the_same_texts_are_json_as_for_serde() {
        let texts = [
            "{",
            "{a",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":01}",
            "{\"a\":1.}",
            "{\"a\":.5}",
            "{\"a\":-}",
            "{\"a\":1e}",
            "{\"a\":1e5}",
            "{\"a\":0}",
            "{\"a\":-0.0E-1}",
            "{\"a\":tru}",
            "{\"a\":true}",
            "{\"a\":nul}",
            "{\"a\":[1,]}",
            "{\"a\":[,1]}",
            "{\"a\":[[],{}]}",
            "{\"a\":[}",
            "{\"a\":{]}",
            "{\"a\":\"\n\"}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\u12g4\"}",
            "{\"a\":\"\\u1234\"}",
            "[1]",
            "1",
            "{\"a\":1 2}",
            "{,}",
            "{\"a\" 1}",
        ];
        for text in texts {
            let valid = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).is_ok();
            assert_eq!(fields(text).is_ok_and(|fields| fields.is_some()), valid, "{text}");
        }
        let deep = format!("{}1", "{\"a\":".repeat(101));
        assert_eq!(fields(&deep), Err(NotJson));
    }
}
