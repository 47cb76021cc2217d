//! The file in which `refrain calibrate` keeps the stable layers of a model, over which SamKV averages.

use std::ops::Range;
use std::path::{Path, PathBuf};

use refrain_engine::Engine;
use refrain_store::hex;
use serde::{Deserialize, Serialize};

use crate::folders::{tilde, write_toml};
use crate::{Error, Result};

/// A calibration of one model.
#[derive(Debug, Serialize, Deserialize)]
pub struct CalibrationFile {
    /// Name of the model, for people.
    pub model: String,
    /// Fingerprint of weights, configuration and precision.
    pub fingerprint: String,
    /// Layers of the model.
    pub layers: usize,
    /// First stable layer, counted from 1.
    pub first_stable_layer: usize,
    /// Last stable layer, counted from 1.
    pub last_stable_layer: usize,
    /// Documents that it was found from.
    pub documents: usize,
    /// Agreement of each layer with the next.
    pub agreement: Vec<f64>,
}

impl CalibrationFile {
    /// Writes the file, and the folder that it lies in.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_toml(path, self)
    }
}

/// The file of the calibration of the model of a [`fingerprint`], in the folder of the user's data.
///
/// # Errors
/// If the folder is not known.
pub fn calibration_path(data_folder: Option<&Path>, fingerprint: &str) -> Result<PathBuf> {
    let folder = data_folder.ok_or(Error::Home { what: "the file of the calibration" })?;
    Ok(folder.join("calibration").join(format!("{fingerprint}.toml")))
}

/// The first digits of the fingerprint of a model and its precision, which names the files that are kept for it.
pub fn fingerprint(engine: &Engine) -> String {
    hex::encode(&engine.fingerprint()[..8])
}

/// The stable layers of the model of a [`fingerprint`] with so many layers, from the file `given` or from the default path if there is a
/// file. `warn` is told of a default file that cannot be used, since no answer depends on it.
///
/// # Errors
/// If the given file cannot be used.
pub fn stable_layers(
    given: Option<&Path>,
    data_folder: Option<&Path>,
    (fingerprint, layers): (&str, usize),
    warn: &mut dyn FnMut(&str),
) -> Result<Option<Range<usize>>> {
    let read = |path: &Path| read(path, fingerprint, layers);
    if let Some(path) = given {
        let fail = |reason| Error::Kept { action: "use the calibration", file: tilde(path), reason };
        return read(path).map_err(fail).map(Some);
    }
    let Some(path) = calibration_path(data_folder, fingerprint).ok().filter(|path| path.exists()) else {
        return Ok(None);
    };
    let known = read(&path);
    if let Err(reason) = &known {
        warn(&format!("{} is not used: {reason}", tilde(&path)));
    }
    Ok(known.ok())
}

fn read(path: &Path, fingerprint: &str, layers: usize) -> Result<Range<usize>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let file: CalibrationFile = toml::from_str(&text).map_err(|error| error.to_string())?;
    if file.fingerprint != fingerprint {
        return Err(format!("it is of {}, or of another precision", file.model));
    }
    let (first, last) = (file.first_stable_layer, file.last_stable_layer);
    if first == 0 || first > last || last > layers {
        return Err(format!("its stable layers are {first} to {last}, but the model has {layers}"));
    }
    Ok(first - 1..last)
}
