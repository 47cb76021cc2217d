//! Opens a model with its store, and with the method and prefix that are safe for it.

use std::fmt;
use std::path::{Path, PathBuf};

use refrain_engine::{DeviceChoice, Engine, Instructions, Prefix, Settings};
use refrain_fusion::METHODS;
#[cfg(feature = "remote")]
use refrain_store::RemoteOptions;
use refrain_store::{Limits, Store};

use crate::calibration::{fingerprint, stable_layers};
use crate::choice::{AUTO, choice};
use crate::folders::{data_folder, models_folder, named};
use crate::models::resolve;
use crate::{Error, Result};

/// Memory for chunks unless told: 1 GiB.
const MEMORY: u64 = 1 << 30;

/// The way in which an [`Engine`] is opened: its model, its store and its defaults.
///
/// ```
/// use refrain::EngineOptions;
///
/// # let folder = tempfile::tempdir()?;
/// # let (model, chunks) = ("../../tests/golden/tiny/llama", folder.path());
/// let engine = EngineOptions::new(model).store(chunks).open()?;
/// println!("{} tokens of context", engine.decoder().config().context);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct EngineOptions<'a> {
    model: String,
    models: Option<PathBuf>,
    store: Option<PathBuf>,
    #[cfg(feature = "remote")]
    remote: Option<RemoteOptions>,
    limits: Limits,
    settings: Settings,
    instructions: Instructions,
    prefix: Option<Prefix>,
    method: String,
    calibration: Option<PathBuf>,
    data_folder: Option<PathBuf>,
    progress: Box<dyn FnMut(usize, usize) + 'a>,
    warning: Box<dyn FnMut(&str) + 'a>,
}

impl fmt::Debug for EngineOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineOptions")
            .field("model", &self.model)
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

impl<'a> EngineOptions<'a> {
    /// A model: a GGUF file, a folder of Hugging Face, a name of [`KNOWN`](crate::KNOWN), or an address `hf:ORG/NAME[:FILE]`. The last
    /// two must have been fetched (`refrain pull`).
    pub fn new(model: impl Into<String>) -> EngineOptions<'a> {
        EngineOptions {
            model: model.into(),
            models: None,
            store: None,
            #[cfg(feature = "remote")]
            remote: None,
            limits: Limits::memory(MEMORY),
            settings: Settings::default(),
            instructions: Instructions::default(),
            prefix: None,
            method: AUTO.to_owned(),
            calibration: None,
            data_folder: data_folder(),
            progress: Box::new(|_, _| ()),
            warning: Box::new(|_| ()),
        }
    }

    /// The folder of models that are known by name; else `REFRAIN_MODELS`, or `~/.cache/refrain/models`.
    pub fn models(self, folder: impl Into<PathBuf>) -> Self {
        EngineOptions { models: Some(folder.into()), ..self }
    }

    /// The folder of stored chunks; else `REFRAIN_STORE`, or the program's own, `~/.local/share/refrain/chunks`.
    pub fn store(self, folder: impl Into<PathBuf>) -> Self {
        EngineOptions { store: Some(folder.into()), ..self }
    }

    /// An object store by which machines share chunks and documents; else there is none.
    #[cfg(feature = "remote")]
    pub fn remote(self, remote: RemoteOptions) -> Self {
        EngineOptions { remote: Some(remote), ..self }
    }

    /// Bounds of the store on memory, disk and time; else 1 GiB of memory.
    pub fn limits(self, limits: Limits) -> Self {
        EngineOptions { limits, ..self }
    }

    /// Device, threads, precision, types and sizes.
    pub fn settings(self, settings: Settings) -> Self {
        EngineOptions { settings, ..self }
    }

    /// The device that computes; else the CPU, or the device of the settings.
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.settings.device = device;
        self
    }

    /// The texts around the documents of the prompts to come, of which a prefix `system` or `averaged` takes the system part.
    pub fn instructions(self, instructions: Instructions) -> Self {
        EngineOptions { instructions, ..self }
    }

    /// The prefix of chunks; else the one that is safe for the model.
    pub fn prefix(self, prefix: Prefix) -> Self {
        EngineOptions { prefix: Some(prefix), ..self }
    }

    /// The method of questions that name none; else the one that is safe for the model (`auto`).
    pub fn method(self, method: impl Into<String>) -> Self {
        EngineOptions { method: method.into(), ..self }
    }

    /// The file of stable layers that `refrain calibrate` wrote; else the model's own, if there is one.
    pub fn calibration(self, file: impl Into<PathBuf>) -> Self {
        EngineOptions { calibration: Some(file.into()), ..self }
    }

    /// The folder with what `refrain tune` and `refrain calibrate` found; else the program's own.
    pub fn data_folder(self, folder: Option<PathBuf>) -> Self {
        EngineOptions { data_folder: folder, ..self }
    }

    /// Is called with what is done and all that there is to do as a large file is hashed for the first time, and then as weights are packed.
    pub fn on_progress(self, progress: impl FnMut(usize, usize) + 'a) -> Self {
        EngineOptions { progress: Box::new(progress), ..self }
    }

    /// Is told of a kept choice or calibration that cannot be used. No answer is wrong without it.
    pub fn on_warning(self, warning: impl FnMut(&str) + 'a) -> Self {
        EngineOptions { warning: Box::new(warning), ..self }
    }

    /// Opens model and store.
    ///
    /// # Errors
    /// If the device is not there, the model is not known, missing, broken or unsupported, the store cannot be opened, or a method, prefix or calibration that was
    /// given cannot be used.
    pub fn open(self) -> Result<Engine> {
        let own = || self.data_folder.as_ref().map(|folder| folder.join("chunks"));
        let folder = self.store.clone().or_else(|| named("REFRAIN_STORE")).or_else(own);
        let folder = folder.ok_or(Error::Home { what: "the folder of chunks" })?;
        let store = self.open_store(folder)?;
        self.open_on(store)
    }

    fn open_store(&self, folder: PathBuf) -> Result<Store> {
        #[cfg(feature = "remote")]
        if let Some(remote) = &self.remote {
            return Ok(Store::open_shared(folder, self.limits.clone(), remote)?);
        }
        Ok(Store::open(folder, self.limits.clone())?)
    }

    /// [`EngineOptions::open`] on a store that is open.
    ///
    /// # Errors
    /// As for [`EngineOptions::open`].
    pub fn open_on(mut self, store: Store) -> Result<Engine> {
        let models = self.models.take().map_or_else(models_folder, Ok)?;
        let path = resolve(&self.model, &models)?;
        let mut engine = Engine::open(&path, store, self.settings.clone(), &mut self.progress)?;
        let (data, calibration) = (self.data_folder.as_deref(), self.calibration.as_deref());
        let (own, layers) = (fingerprint(&engine), engine.decoder().config().num_layers());
        let layers = stable_layers(calibration, data, (&own, layers), &mut self.warning)?;
        engine.use_stable_layers(layers);
        let chosen = if self.prefix.is_none() || self.method == AUTO {
            Some(choice(&self.model, &own, data, &mut self.warning)?)
        } else {
            None
        };
        let chosen_method =
            chosen.as_ref().filter(|_| self.method == AUTO).map(|choice| choice.method.clone());
        let method = METHODS.parse(&chosen_method.unwrap_or(self.method))?;
        let prefix = self.prefix.or(chosen.map(|choice| choice.prefix)).unwrap_or_default();
        let engine = engine.with_prefix(&prefix, || engine.system_part(&self.instructions))?;
        Ok(engine.with_default_method(method))
    }
}

/// Opens a model on the program's own store: [`EngineOptions`] says more.
///
/// # Errors
/// As for [`EngineOptions::open`].
pub fn open(model: impl AsRef<Path>) -> Result<Engine> {
    EngineOptions::new(model.as_ref().to_string_lossy()).open()
}
