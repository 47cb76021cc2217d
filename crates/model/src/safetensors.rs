//! Weights of a Hugging Face folder: `model.safetensors`, or shards named by `model.safetensors.index.json`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::dtype::DType;
use crate::error::{ModelError, Result};
use crate::map::FileBytes;

/// Largest JSON file that is read, in bytes; indices of models with thousands of tensors take some 100 KiB.
const MAX_JSON: u64 = 64 << 20;
/// The one file of an unsharded model.
const SINGLE: &str = "model.safetensors";
/// The file that names the shard of each tensor.
const INDEX: &str = "model.safetensors.index.json";

/// The mapped safetensors files of one folder.
#[derive(Debug)]
pub(crate) struct SafetensorsFolder {
    folder: PathBuf,
    shards: Vec<FileBytes>,
    tensors: BTreeMap<String, StoredTensor>,
}

/// Where a tensor lies, and what it is.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    /// Outermost dimension first.
    pub(crate) shape: Vec<usize>,
    dtype: Dtype,
    shard: usize,
    /// Bytes of the shard; checked against its length and against shape and type.
    range: Range<usize>,
}

impl StoredTensor {
    /// The type's name in the file.
    pub(crate) fn dtype_name(&self) -> String {
        format!("{:?}", self.dtype)
    }
}

impl SafetensorsFolder {
    /// Maps all files and reads their headers.
    ///
    /// # Errors
    /// [`ModelError::NoModel`] if the folder has no safetensors; [`ModelError::Io`] and
    /// [`ModelError::Safetensors`] for what is wrong with them.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let mut model = Self { folder: folder.to_owned(), shards: Vec::new(), tensors: BTreeMap::new() };
        if folder.join(SINGLE).is_file() {
            model.add_shard(Path::new(SINGLE), |_| true)?;
        } else if folder.join(INDEX).is_file() {
            model.add_indexed(&read_json(&folder.join(INDEX))?)?;
        } else {
            return Err(ModelError::NoModel {
                path: folder.to_owned(),
                message: format!(
                    "the folder has neither {SINGLE} nor {INDEX}; give a .gguf file or such a folder"
                ),
            });
        }
        model.tensors = model.tensors.into_iter().map(|(name, tensor)| (text_name(name), tensor)).collect();
        Ok(model)
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    /// The files, in the order of their names.
    pub(crate) fn shards(&self) -> &[FileBytes] {
        &self.shards
    }

    /// Names of all tensors, in their order, and the index of the shard that each is taken from.
    pub(crate) fn places(&self) -> impl Iterator<Item = (&str, usize)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.shard))
    }

    /// Whether there is a tensor `name`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The data of a tensor of this folder.
    fn data(&self, tensor: &StoredTensor) -> &[u8] {
        &self.shards[tensor.shard][tensor.range.clone()]
    }

    /// The tensor `name`, its type and its data.
    ///
    /// # Errors
    /// [`ModelError::TensorMissing`]; [`ModelError::TensorType`] if its type cannot be read.
    pub(crate) fn tensor(&self, name: &str) -> Result<(&StoredTensor, DType, &[u8])> {
        let tensor = self.tensors.get(name).ok_or_else(|| ModelError::TensorMissing {
            path: self.folder.clone(),
            tensor: name.to_owned(),
        })?;
        let dtype = match tensor.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            _ => {
                return Err(ModelError::TensorType {
                    path: self.folder.clone(),
                    tensor: name.to_owned(),
                    found: tensor.dtype_name(),
                    supported: "F32, F16, BF16",
                });
            }
        };
        Ok((tensor, dtype, self.data(tensor)))
    }

    /// Gives the resident pages of all files back to the system (a hint).
    pub(crate) fn advise_done(&self) {
        self.shards.iter().for_each(FileBytes::advise_done);
    }

    fn add_indexed(&mut self, index: &Index) -> Result<()> {
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in &index.weight_map {
            shards.entry(file).or_default().push(tensor);
        }
        for (file, names) in shards {
            // The index is not trusted to name files outside the folder.
            let mut parts = Path::new(file).components();
            let plain =
                matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == file);
            if !plain || file.contains('\\') {
                return Err(
                    self.index_error(format!("the shard '{file}' is not the name of a file in this folder"))
                );
            }
            // A tensor of a shard that the index gives to another shard, or to none, is not part of the
            // model.
            self.add_shard(Path::new(file), |name| index.weight_map.get(name).is_some_and(|f| f == file))?;
            if let Some(name) = names.into_iter().find(|name| !self.tensors.contains_key(*name)) {
                return Err(self.index_error(format!("the shard '{file}' has no tensor '{name}'")));
            }
        }
        Ok(())
    }

    fn index_error(&self, message: String) -> ModelError {
        ModelError::Safetensors { path: self.folder.join(INDEX), message }
    }

    fn add_shard(&mut self, file: &Path, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let path = self.folder.join(file);
        let bytes = FileBytes::map(&path)?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| ModelError::Safetensors {
            path: path.clone(),
            message: format!("malformed or truncated safetensors ({e})"),
        })?;
        // After the header's length, 8 bytes, and the header; `read_metadata` checked that the file has all
        // of it.
        let data_start = 8 + header;
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name).filter(|_| wanted(&name)) else { continue };
            let (start, end) = info.data_offsets;
            let tensor = StoredTensor {
                shape: info.shape.clone(),
                dtype: info.dtype,
                shard: self.shards.len(),
                range: data_start + start..data_start + end,
            };
            self.tensors.insert(name, tensor);
        }
        self.shards.push(bytes);
        Ok(())
    }
}

/// `model.safetensors.index.json`.
#[derive(Debug, Deserialize)]
struct Index {
    /// Tensor → file.
    weight_map: BTreeMap<String, String>,
}

/// The name that a tensor has in a folder of a text model. In folders of models for pictures too the text part has a prefix, before
/// or after `model.`.
fn text_name(name: String) -> String {
    let within = name.strip_prefix("model.language_model.").map(|rest| format!("model.{rest}"));
    within.or_else(|| name.strip_prefix("language_model.").map(str::to_owned)).unwrap_or(name)
}

/// Reads a JSON file of bounded size.
///
/// # Errors
/// [`ModelError::Io`]; [`ModelError::Config`] if it is too large or not the JSON expected, with line and
/// column.
pub(crate) fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let wrong = |message: String| ModelError::Config { path: path.to_owned(), message };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MAX_JSON {
        return Err(wrong(format!("{size} bytes of JSON are more than the {MAX_JSON} that are read")));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    serde_json::from_slice(&bytes).map_err(|e| wrong(format!("not the JSON that is expected: {e}")))
}

#[cfg(test)]
#[path = "safetensors_tests.rs"]
mod tests;
