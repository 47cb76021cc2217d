//! A model on disk: one GGUF file, or a folder as Hugging Face lays it out.

use std::path::{Path, PathBuf};

use refrain_kernels::Precision;

use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;
use crate::safetensors::SafetensorsFolder;
use crate::weights::Weights;

/// An opened model: its configuration and its weights, memory-mapped.
///
/// The files must not be truncated or rewritten while they are open: a map then has no defined content, and
/// reading past a new end stops the program. Replacing a file by renaming another over it is fine.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    config: Config,
    weights: Weights,
}

impl ModelFiles {
    /// Opens the model at `path`: a `.gguf` file, or a folder with `config.json` and `model.safetensors` or
    /// `model.safetensors.index.json`.
    ///
    /// Reads headers only; no weight is touched.
    ///
    /// # Errors
    /// [`ModelError::NoModel`] if there is nothing of the kind; [`ModelError::Gguf`],
    /// [`ModelError::Safetensors`], [`ModelError::Config`], [`ModelError::Architecture`] and the like for
    /// what is wrong in the files.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let meta =
            std::fs::metadata(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
        if meta.is_dir() {
            let folder = SafetensorsFolder::open(&path)?;
            let config = Config::from_hf(&path, &folder)?;
            Ok(Self { weights: Weights::from_safetensors(folder), path, config })
        } else {
            Self::from_gguf(Gguf::open(&path)?)
        }
    }

    /// The model in an already parsed GGUF file.
    ///
    /// # Errors
    /// [`ModelError::Config`], [`ModelError::Architecture`] and the like for what is wrong in the metadata.
    pub fn from_gguf(gguf: Gguf) -> Result<Self> {
        let config = Config::from_gguf(&gguf)?;
        let path = gguf.path().to_owned();
        Ok(Self { path, weights: Weights::from_gguf(gguf, &config)?, config })
    }

    /// The file or folder that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The resolved configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The weights, by Hugging Face's parameter names.
    #[must_use]
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The GGUF file with its metadata (tokenizer, chat template), if the model is one.
    #[must_use]
    pub fn gguf(&self) -> Option<&Gguf> {
        self.weights.gguf()
    }

    /// The folder with `tokenizer.json` and the like, if the model is one.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.gguf().is_none().then_some(self.path.as_path())
    }

    /// The precision that keeps the weights about as the files do: [`Precision::Q8`] for quantised ones, else
    /// [`Precision::Bf16`].
    ///
    /// # Errors
    /// If the first layer is not there.
    pub fn native_precision(&self) -> Result<Precision> {
        let matrix = self.weights.matrix("model.layers.0.mlp.down_proj.weight")?;
        Ok(if matrix.dtype().block_len() > 1 { Precision::Q8 } else { Precision::Bf16 })
    }

    /// A fingerprint of the model, stable across runs and machines: what the chunk store keys its entries
    /// with.
    ///
    /// BLAKE3 over the configuration's canonical bytes and, for each tensor in the order of the names: its
    /// name, shape, type, length in bytes, and three samples of its data (the first, the middle and the last
    /// 4 KiB). Reading some 12 KiB a tensor instead of everything keeps this at milliseconds; two models that
    /// agree in all of it but differ elsewhere do not arise by training or quantising, only by an edit made
    /// on purpose.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("refrain model fingerprint v1");
        let config = self.config.canonical_bytes();
        hasher.update(&(config.len() as u64).to_le_bytes());
        hasher.update(&config);
        self.weights.hash_into(&mut hasher);
        *hasher.finalize().as_bytes()
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
