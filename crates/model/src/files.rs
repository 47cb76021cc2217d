//! A model on disk: one GGUF file, or a folder as Hugging Face lays it out.

use std::path::{Path, PathBuf};

use refrain_kernels::Precision;

use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::fingerprint;
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
            Ok(Self { weights: Weights::from_safetensors(folder, &config), path, config })
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

    /// The weights alone.
    pub(crate) fn into_weights(self) -> Weights {
        self.weights
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
        let matrix = self.weights.matrix("model.layers.0.self_attn.o_proj.weight")?;
        Ok(if matrix.dtype().block_len() > 1 { Precision::Q8 } else { Precision::Bf16 })
    }

    /// A fingerprint of the model, stable across runs and machines: what the chunk store keys its entries
    /// with.
    ///
    /// BLAKE3 over the configuration's canonical bytes and over every byte of the files, so that an edit of a single
    /// row gives other keys. A large file is hashed once, at some GB/s: its hash is remembered in
    /// `~/.cache/refrain/file-hashes.json` by its path, size, inode and times of modification and change. A memory that
    /// is missing, damaged or not writable costs time and is no error. An edit goes unnoticed only if it leaves all of
    /// these as they were: on systems without inodes one that keeps the size and sets the time of modification back.
    ///
    /// `progress(done, total)` is called while large files are hashed.
    pub fn fingerprint(&self, progress: impl FnMut(usize, usize)) -> [u8; 32] {
        self.fingerprint_remembered(fingerprint::default_memory().as_deref(), progress)
    }

    /// [`ModelFiles::fingerprint`] with hashes remembered in `memory`.
    fn fingerprint_remembered(&self, memory: Option<&Path>, progress: impl FnMut(usize, usize)) -> [u8; 32] {
        let (config, index) = (self.config.canonical_bytes(), self.weights.index());
        let hash = fingerprint::of(&[&config, index.as_bytes()], &self.weights.files(), memory, progress);
        self.weights.release_pages();
        hash
    }
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
