//! `refrain bench probe`: the engine as one among others under `tools/bench_peers.py`. One JSON command a line on
//! standard input, one JSON line for each on standard output.

use std::io::{self, BufRead};
use std::num::NonZeroUsize;

use anyhow::{Context as _, Result};
use refrain_engine::Engine;
use refrain_model::Specials;
use refrain_store::Store;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::output::print;
use crate::settings::Context;

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Command {
    /// What runs here.
    Info,
    /// Ids of a text.
    Tokenize { text: String },
    /// Seconds of a prefill of these ids.
    Prefill { ids: Vec<u32> },
    /// Seconds of greedy steps after a context.
    Decode { context: Vec<u32>, tokens: NonZeroUsize },
}

/// Answers commands to the end of the input. One that fails is answered with its error.
pub(crate) fn run(context: &Context) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("refrain-probe-").tempdir();
    let folder = folder.context("cannot make a folder for the chunks of this probe")?;
    let engine = context.engine_on(Store::open(folder.path(), context.global.memory)?)?;
    for line in io::stdin().lock().lines() {
        let line = line.context("cannot read a command from standard input")?;
        if !line.trim().is_empty() {
            let reply = answer(context, &engine, &line)
                .unwrap_or_else(|error| json!({ "error": format!("{error:#}") }));
            print(&format!("{reply}\n"))?;
        }
    }
    Ok(())
}

fn answer(context: &Context, engine: &Engine, line: &str) -> Result<Value> {
    Ok(match serde_json::from_str(line).context("this is no command of the probe")? {
        Command::Info => info(context, engine),
        Command::Tokenize { text } => json!({ "ids": engine.tokenizer().encode(&text, Specials::Plain)? }),
        Command::Prefill { ids } => json!({ "seconds": engine.time_prefill(&ids)? }),
        Command::Decode { context, tokens } => json!(engine.time_decode(&context, tokens.get())?),
    })
}

fn info(context: &Context, engine: &Engine) -> Value {
    let decoder = engine.decoder();
    json!({
        "engine": "refrain",
        "version": format!("refrain {}", env!("CARGO_PKG_VERSION")),
        "isa": decoder.backend().isa().to_string(),
        "threads": decoder.backend().threads(),
        "compute": decoder.precision().to_string(),
        "kv": context.global.kv.to_string(),
        "context": decoder.config().context,
        "weight_bytes": decoder.weight_bytes(),
        "kv_bytes_per_token": decoder.shape().token_bytes(context.global.kv),
    })
}
