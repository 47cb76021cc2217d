//! How near a device comes to the CPU: logits of the same model in the same precision.

use std::path::PathBuf;

use anyhow::{Result, bail};
use refrain_engine::{Agreement, DeviceChoice, Engine, Settings};
use refrain_kernels::Precision;
use refrain_store::Store;
use serde_json::json;

use crate::precision::documents;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// GGUF file or Hugging Face folder
    model: PathBuf,
    /// Device that is compared with the CPU: cuda, cuda:N or auto
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: DeviceChoice,
    /// Precisions of the weights
    #[arg(long, value_name = "TYPES", value_delimiter = ',', default_value = "f32,bf16")]
    compute: Vec<Precision>,
    /// File or folder that the prompt is made of; may be given several times [default: a built-in text]
    #[arg(long, value_name = "PATH")]
    docs: Vec<PathBuf>,
    /// Most tokens of the answer whose logits are compared
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Fails where logits are further apart: the greatest difference over the greatest logit, in bf16; in f32 a hundredth of it
    #[arg(long, value_name = "SHARE", default_value_t = 0.05)]
    within: f64,
    /// Fails where the KL divergence of the next token is larger, in nats, in bf16; in f32 a hundredth of it
    #[arg(long, value_name = "NATS", default_value_t = 0.01)]
    kl: f64,
    /// Threads; 0 for one a core
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints a line a precision, and fails if any is out of bounds.
pub(crate) fn run(options: &Options) -> Result<()> {
    let documents = documents(&options.docs)?;
    let mut failed = Vec::new();
    for precision in &options.compute {
        let cpu = open(options, DeviceChoice::Cpu, *precision)?;
        let device = open(options, options.device, *precision)?;
        let prompt = cpu.prompt(&documents, "What are these documents about?", &Default::default())?;
        let found = device.agreement_with(&cpu, &prompt, options.tokens as usize)?;
        let precision = device.decoder().precision();
        let Agreement { kl, apart, top1, positions, .. } = found;
        let name = device.decoder().device().name();
        if options.json {
            let row = json!({ "device": name, "compute": precision.to_string(), "tokens": prompt.len(), "apart": apart, "kl": kl, "top1": top1, "positions": positions });
            println!("{row}");
        } else {
            let tokens = prompt.len();
            println!(
                "{name}, {precision}, {tokens} tokens: apart by {apart:.1e} of the greatest logit, KL {kl:.1e}, same top token at {:.1} % of {positions} positions",
                100.0 * top1
            );
        }
        if !is_near(&found, precision, options) {
            failed.push(format!("{precision}: apart by {apart:.1e}, KL {kl:.1e}"));
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("the device is not as near to the CPU as it should be: {}", failed.join("; "))
    }
}

/// Whether both bounds hold; what is no number is out of bounds.
fn is_near(found: &Agreement, precision: Precision, options: &Options) -> bool {
    let factor = if precision == Precision::F32 { 0.01 } else { 1.0 };
    found.apart <= factor * options.within && found.kl <= factor * options.kl
}

fn open(options: &Options, device: DeviceChoice, precision: Precision) -> Result<Engine> {
    let settings = Settings {
        device,
        precision: Some(precision),
        threads: options.threads,
        keep_packed: false,
        ..Settings::default()
    };
    Ok(Engine::open(&options.model, Store::in_memory(1 << 30), settings, |_, _| ())?)
}
