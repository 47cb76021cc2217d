//! `refrain calibrate`: the layers of a model over which SamKV averages, found from documents and kept in a small file.

use std::ops::Range;
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
    /// Of the model.
    layers: usize,
    /// From 1, both included.
    first_stable_layer: usize,
    last_stable_layer: usize,
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
    let layers = engine.decoder().config().num_layers();
    let file = args.output.clone().map_or_else(|| file(context, &engine), Ok)?;
    let stable = found.stable_layers.clone();
    let kept = Kept {
        model: context.global.model.clone(),
        fingerprint: fingerprint(&engine),
        first_stable_layer: stable.start + 1,
        last_stable_layer: stable.end,
        layers,
        documents: found.documents,
        agreement: found.agreement.clone(),
    };
    write(&file, &kept)?;
    if context.json {
        return print_json(&json!({ "file": file, "calibration": kept }));
    }
    print(&text(&found))?;
    match args.output {
        Some(_) => context.say(&format!("kept in {}: give it as --calibration", tilde(&file))),
        None => context.say(&format!("kept in {}: sam_kv uses it from now on", tilde(&file))),
    }
    Ok(())
}

/// A line a layer, longer where it agrees more with the next, then what was found.
fn text(found: &Calibration) -> String {
    const WIDTH: f64 = 40.0;
    let stable = found.stable_layers.clone();
    let mut text = format!("agreement of layers with the next, {}\n", count(found.documents, "document"));
    for (layer, agreement) in found.agreement.iter().enumerate() {
        let bar = "▇".repeat((agreement.max(0.0) * WIDTH).round() as usize);
        let mark = if stable.contains(&layer) && stable.contains(&(layer + 1)) { " *" } else { "" };
        text.push_str(&format!("{:>4}–{:<4}{agreement:>6.2} {bar}{mark}\n", layer + 1, layer + 2));
    }
    text + &format!("stable (*): layers {} to {}\n", stable.start + 1, stable.end)
}

/// Where a model's file is kept.
fn file(context: &Context, engine: &Engine) -> Result<PathBuf> {
    let folder =
        context.data_folder.clone().context("the home folder is not known").context("give --output")?;
    Ok(folder.join("calibration").join(format!("{}.toml", fingerprint(engine))))
}

/// The first digits of what identifies a model and its precision.
fn fingerprint(engine: &Engine) -> String {
    refrain_store::hex::encode(&engine.fingerprint()[..8])
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
pub(crate) fn known(context: &Context, engine: &Engine) -> Result<Option<Range<usize>>> {
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

fn read(file: &Path, engine: &Engine) -> Result<Range<usize>> {
    let kept: Kept = toml::from_str(&std::fs::read_to_string(file)?)?;
    if kept.fingerprint != fingerprint(engine) {
        bail!("it is of {}, or of another precision", kept.model);
    }
    let layers = engine.decoder().config().num_layers();
    let (first, last) = (kept.first_stable_layer, kept.last_stable_layer);
    if first == 0 || first > last || last > layers {
        bail!("its stable layers are {first} to {last}, but the model has {layers}");
    }
    Ok(first - 1..last)
}
