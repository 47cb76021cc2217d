//! `refrain calibrate`: finds the stable layers of a model, over which SamKV averages, from documents.

use anyhow::Result;
use refrain::engine::Instructions;
use refrain::fusion::{Calibration, SamKv};
use serde_json::json;

use crate::args;
use crate::documents::{Documents, read_documents};
use crate::output::{Fail, count, json_path, print, print_result, show};
use crate::settings::Context;
use refrain::folders::tilde;
use refrain::{CalibrationFile, calibration_path, fingerprint};

/// `refrain calibrate`
pub(crate) fn run(context: &Context, args: &args::Calibrate) -> Result<()> {
    let Documents { documents, failures, .. } = read_documents(context.console, &args.paths)?;
    let engine = context.open_engine(&Instructions::default())?;
    let path = match &args.output {
        Some(path) => path.clone(),
        None => calibration_path(context.data_folder.as_deref(), &fingerprint(&engine))?,
    };
    let bar = context.bar("reading the documents", "{pos}/{len} tokens, {rate}{left}");
    let method = SamKv::default();
    let found = engine
        .calibrate(&documents, &method, |progress| show(&bar, progress.done as u64, progress.total as u64))?;
    bar.finish_and_clear();
    let found = found.ok_or_else(|| {
        Fail::new("no document is long enough to tell layers apart").hint("give some of at least 350 tokens")
    })?;
    let layers = engine.decoder().config().num_layers();
    let stable = found.stable_layers.clone();
    let file = CalibrationFile {
        model: context.global.model.clone(),
        fingerprint: fingerprint(&engine),
        first_stable_layer: stable.start + 1,
        last_stable_layer: stable.end,
        layers,
        documents: found.documents,
        agreement: found.agreement.clone(),
    };
    // The layers are printed even if the file cannot be written.
    let kept = file.write(&path).map_err(anyhow::Error::from);
    if context.json {
        let result = json!({ "file": json_path(&path), "calibration": file, "failures": failures });
        return print_result(result, kept);
    }
    print(&text(&found))?;
    kept?;
    match args.output {
        Some(_) => context.say(&format!("kept in {}: give it as --calibration", tilde(&path))),
        None => context.say(&format!("kept in {}: sam_kv uses it from now on", tilde(&path))),
    }
    Ok(())
}

/// A bar a layer, longer where it agrees more with the next layer, then the stable layers.
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
