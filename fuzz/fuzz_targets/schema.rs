//! A form that an answer is held to, as a stranger may ask for it: a JSON schema, a regular expression, a grammar, texts to choose
//! from, or two of them. Compiling it and following it for some tokens may be refused, and must not panic, hang, or take
//! memory without bound.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use refrain_engine::{Engine, Settings, StructuredOutput};
use refrain_store::Store;

/// Tokens that a grammar is followed for.
const TOKENS: usize = 8;

fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny/llama");
        let settings = Settings { threads: 1, ..Settings::default() };
        Engine::open(&path, Store::in_memory(1 << 20), settings, |_, _| ()).expect("the tiny model is there")
    })
}

fn output(kind: u8, text: &str) -> Option<StructuredOutput> {
    Some(match kind {
        b's' => StructuredOutput::JsonSchema(serde_json::from_str(text).ok()?),
        b'r' => StructuredOutput::Regex(text.to_owned()),
        b'l' => StructuredOutput::Lark(text.to_owned()),
        b'c' => StructuredOutput::Choice(text.split('\n').map(str::to_owned).collect()),
        b'e' => {
            let (one, other) = text.split_once('\0')?;
            let of = |text: &str| output(*text.as_bytes().first()?, text.get(1..)?);
            StructuredOutput::Either(vec![of(one)?, of(other)?])
        }
        _ => return None,
    })
}

// The first byte is the kind, the second chooses tokens.
fuzz_target!(|bytes: &[u8]| {
    let [kind, choice, rest @ ..] = bytes else { return };
    let Ok(text) = std::str::from_utf8(rest) else { return };
    let Some(output) = output(*kind, text) else { return };
    let Ok(mut grammar) = engine().grammar(&output) else { return };
    let mut logits = vec![0.0; engine().tokenizer().vocab_size()];
    for step in 0..TOKENS {
        logits.fill(0.0);
        if grammar.mask(&mut logits).is_err() || grammar.is_complete() {
            return;
        }
        let allowed: Vec<u32> =
            (0..).zip(&logits).filter(|(_, logit)| logit.is_finite()).map(|(id, _)| id).collect();
        assert!(!allowed.is_empty(), "a grammar always allows a token");
        let token = allowed[(usize::from(*choice) * 31 + step * 7) % allowed.len()];
        if grammar.push(token).is_err() {
            return;
        }
    }
});
