//! The file in which `refrain calibrate` keeps the stable layers of a model, over which SamKV averages.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use refrain_engine::Engine;
use refrain_store::hex;
use serde::{Deserialize, Serialize};

use crate::folders::{tilde, write_toml};
use crate::output;

/// A calibration of one model.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CalibrationFile {
    /// Name of the model, for people.
    pub(crate) model: String,
    /// Fingerprint of weights, configuration and precision.
    pub(crate) fingerprint: String,
    /// Layers of the model.
    pub(crate) layers: usize,
    /// First and last stable layer, counted from 1.
    pub(crate) first_stable_layer: usize,
    pub(crate) last_stable_layer: usize,
    /// Documents that it was found from.
    pub(crate) documents: usize,
    /// Agreement of each layer with the next.
    pub(crate) agreement: Vec<f64>,
}

impl CalibrationFile {
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        write_toml(path, self)
    }
}

/// Where the calibration of the engine's model lies, in the folder of the user's data.
pub(crate) fn default_path(data_folder: Option<&Path>, engine: &Engine) -> Result<PathBuf> {
    let folder = data_folder.context("the home folder is not known").context("give --output")?;
    Ok(folder.join("calibration").join(format!("{}.toml", fingerprint(engine))))
}

/// The first digits of the fingerprint of a model and its precision.
pub(crate) fn fingerprint(engine: &Engine) -> String {
    hex::encode(&engine.fingerprint()[..8])
}

/// The stable layers of the engine's model, from the file `given` or from the default path if there is a file. A default
/// file that cannot be used gives a warning, since no answer depends on it.
pub(crate) fn stable_layers(
    given: Option<&Path>,
    data_folder: Option<&Path>,
    engine: &Engine,
) -> Result<Option<Range<usize>>> {
    if let Some(path) = given {
        let message = || format!("cannot use the calibration {}", tilde(path));
        return read(path, engine).with_context(message).map(Some);
    }
    let Some(path) = default_path(data_folder, engine).ok().filter(|path| path.exists()) else {
        return Ok(None);
    };
    let known = read(&path, engine);
    if let Err(error) = &known {
        output::warn(&format!("{} is not used: {error:#}", tilde(&path)));
    }
    Ok(known.ok())
}

fn read(path: &Path, engine: &Engine) -> Result<Range<usize>> {
    let file: CalibrationFile = toml::from_str(&std::fs::read_to_string(path)?)?;
    if file.fingerprint != fingerprint(engine) {
        bail!("it is of {}, or of another precision", file.model);
    }
    let layers = engine.decoder().config().num_layers();
    let (first, last) = (file.first_stable_layer, file.last_stable_layer);
    if first == 0 || first > last || last > layers {
        bail!("its stable layers are {first} to {last}, but the model has {layers}");
    }
    Ok(first - 1..last)
}
