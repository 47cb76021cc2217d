//! `refrain calibrate`: the layers of a model over which SamKV averages, found from documents and kept in a small file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use refrain_engine::Engine;
use refrain_fusion::{Calibration, SamKv};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::args;
use crate::output::{self, Fail, count, print, print_json};
use crate::settings::{Context, read_documents, show, tilde};

/// What the file holds.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    /// The model as it was asked for, for people.
    model: String,
    /// What it computed with: weights, configuration and precision.
    fingerprint: String,
    layers: usize,
    stable_layers: usize,
    documents: usize,
    /// Of each layer with the next.
    agreement: Vec<f64>,
}

/// `refrain calibrate`
pub(crate) fn run(context: &Context, args: &args::Calibrate) -> Result<()> {
    let documents = read_documents(&args.paths)?;
    let engine = context.open_engine()?;
    let bar = context.bar("reading the documents", "{pos}/{len} tokens, {rate}, {eta} left");
    let method = SamKv::default();
    let found = engine
        .calibrate(&documents, &method, |progress| show(&bar, progress.done as u64, progress.total as u64))?;
    bar.finish_and_clear();
    let found = found.ok_or_else(|| {
        Fail::new("no document is long enough to tell layers apart").hint("give some of at least 350 tokens")
    })?;
    let layers = engine.decoder().config().layers;
    let file = args.output.clone().map_or_else(|| file(context, &engine), Ok)?;
    if let Some(stable_layers) = found.stable_layers {
        let (agreement, documents) = (found.agreement.clone(), found.documents);
        let (model, fingerprint) = (context.global.model.clone(), fingerprint(&engine));
        write(&file, &Kept { model, fingerprint, layers, stable_layers, documents, agreement })?;
    }
    if context.json {
        return print_json(&json!({
            "file": found.stable_layers.map(|_| &file),
            "layers": layers,
            "stable_layers": found.stable_layers,
            "documents": found.documents,
            "agreement": found.agreement,
        }));
    }
    print(&text(&found, layers))?;
    match found.stable_layers {
        Some(_) if args.output.is_some() => {
            context.say(&format!("kept in {}: give it as --calibration", tilde(&file)));
        }
        Some(_) => context.say(&format!("kept in {}: sam_kv uses it from now on", tilde(&file))),
        None => context.say("nothing is kept, and what was kept before stays"),
    }
    Ok(())
}

/// A line a layer, longer where it agrees more with the next, then what was found.
fn text(found: &Calibration, layers: usize) -> String {
    const WIDTH: f64 = 40.0;
    let stable = layers - found.stable_layers.unwrap_or(0);
    let mut text = format!("agreement of layers with the next, {}\n", count(found.documents, "document"));
    for (layer, agreement) in found.agreement.iter().enumerate() {
        let bar = "▇".repeat((agreement.max(0.0) * WIDTH).round() as usize);
        let mark = if layer >= stable { " *" } else { "" };
        text.push_str(&format!("{:>4}–{:<4}{agreement:>6.2} {bar}{mark}\n", layer + 1, layer + 2));
    }
    match found.stable_layers {
        Some(_) => text + &format!("stable (*): layers {} to {layers}\n", stable + 1),
        None => text + "the last two layers agree less than layers do on average: none is stable\n",
    }
}

/// Where a model's file is kept.
fn file(context: &Context, engine: &Engine) -> Result<PathBuf> {
    let folder =
        context.data_folder.clone().context("the home folder is not known").context("give --output")?;
    Ok(folder.join("calibration").join(format!("{}.toml", fingerprint(engine))))
}

/// The first digits of what identifies a model and its precision.
fn fingerprint(engine: &Engine) -> String {
    engine.fingerprint()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn write(file: &PathBuf, kept: &Kept) -> Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let text = toml::to_string(kept)?;
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// The stable layers that were found for the engine's model, if a file says so. One that was not asked for and cannot be
/// used is told and passed over: nothing depends on it.
pub(crate) fn known(context: &Context, engine: &Engine) -> Result<Option<usize>> {
    if let Some(file) = &context.global.calibration {
        let message = || format!("cannot use the calibration {}", tilde(file));
        return read(file, engine).with_context(message).map(Some);
    }
    let Some(file) = file(context, engine).ok().filter(|file| file.exists()) else { return Ok(None) };
    let known = read(&file, engine);
    if let Err(error) = &known {
        output::warn(&format!("{} is not used: {error:#}", tilde(&file)));
    }
    Ok(known.ok())
}

fn read(file: &Path, engine: &Engine) -> Result<usize> {
    let kept: Kept = toml::from_str(&std::fs::read_to_string(file)?)?;
    if kept.fingerprint != fingerprint(engine) {
        bail!("it is of {}, or of another precision", kept.model);
    }
    let layers = engine.decoder().config().layers;
    if !(1..=layers).contains(&kept.stable_layers) {
        bail!("it has {} stable layers, but the model has {layers}", kept.stable_layers);
    }
    Ok(kept.stable_layers)
}
