//! The engine as one of those that `tools/bench_peers.py` measures: each line of standard input is a JSON command, and
//! each line of standard output the JSON reply to it.

use std::io::{self, BufRead, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use refrain_engine::{DeviceChoice, Engine, Settings};
use refrain_kernels::{Dtype, Precision, processors};
use refrain_model::Specials;
use refrain_store::Store;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GGUF file or Hugging Face folder
    model: PathBuf,
    /// Device that computes: cpu, cuda, cuda:N or auto
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Threads; 0 for one a core
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Precision of the weights [default: the nearest to the model's files]
    #[arg(long, value_name = "TYPE")]
    compute: Option<Precision>,
    /// Type of cached keys and values
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    kv: Dtype,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Command {
    /// Describes the engine.
    Info,
    /// Tokenizes a text.
    Tokenize { text: String },
    /// Times a prefill of these ids from an empty cache.
    Prefill { ids: Vec<u32> },
    /// Times greedy steps after a context.
    Decode { context: Vec<u32>, tokens: NonZeroUsize },
}

/// Replies to commands up to the end of the input. The reply to a command that fails is its error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let settings = Settings {
        device: options.device,
        threads: options.threads,
        precision: options.compute,
        kv: options.kv,
        ..Settings::default()
    };
    let engine = Engine::open(&options.model, Store::in_memory(1 << 30), settings, |_, _| ())?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        if !line.trim().is_empty() {
            let reply =
                reply(&engine, &line).unwrap_or_else(|error| json!({ "error": format!("{error:#}") }));
            writeln!(io::stdout(), "{reply}")?;
            io::stdout().flush()?;
        }
    }
    Ok(())
}

fn reply(engine: &Engine, line: &str) -> Result<Value> {
    Ok(match serde_json::from_str(line).context("the line is no command")? {
        Command::Info => info(engine),
        Command::Tokenize { text } => json!({ "ids": engine.tokenizer().encode(&text, Specials::Plain)? }),
        Command::Prefill { ids } => json!({ "seconds": engine.time_prefill(&ids)? }),
        Command::Decode { context, tokens } => json!(engine.time_decode(&context, tokens.get())?),
    })
}

fn info(engine: &Engine) -> Value {
    let (decoder, kv) = (engine.decoder(), engine.settings().kv);
    let (isa, device) = processors(&**decoder.device());
    json!({
        "engine": "refrain",
        "version": format!("refrain {}", env!("CARGO_PKG_VERSION")),
        "isa": isa,
        "device": device,
        "threads": decoder.device().threads(),
        "compute": decoder.precision().to_string(),
        "kv": kv.to_string(),
        "context": decoder.config().context,
        "weight_bytes": decoder.weight_bytes(),
        "kv_bytes_per_token": decoder.shape().token_bytes(kv),
    })
}
