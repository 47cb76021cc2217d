//! A bounded, checked reader of GGUF files, versions 2 and 3, little-endian.
//!
//! The file's bytes are not trusted: every length is checked against the bytes that remain before anything is
//! allocated, arithmetic is checked, nesting is bounded, and nothing panics. Tensor data stays in the map; a
//! tensor of a type that cannot be read is an error only when it is used.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

mod reader;
mod value;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use self::reader::TensorInfo;
pub use self::value::{Array, Value};
use crate::dtype::{DType, SUPPORTED, ggml_type_name};
use crate::error::{ModelError, Result};
use crate::map::FileBytes;

/// A parsed GGUF file, or several that are the parts of one model: metadata of the first, tensor directory and the mapped bytes.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    files: Vec<FileBytes>,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Gguf {
    /// Maps the file at `path` and reads its header, metadata and tensor directory. The first part of a model that llama.cpp's
    /// `gguf-split` has cut brings the other parts along, which lie beside it.
    ///
    /// # Errors
    /// [`ModelError::Io`] if a file cannot be mapped, and those of [`Gguf::from_bytes`]; [`ModelError::GgufPart`] if `path` is a part that is not
    /// the first, or another part is not of the model.
    pub fn open(path: &Path) -> Result<Self> {
        let mut gguf = Self::parse(path.to_owned(), FileBytes::map(path)?)?;
        let Some(count) = gguf.opt_u32("split.count")?.filter(|count| *count > 1) else { return Ok(gguf) };
        let own = gguf.opt_u32("split.no")?.unwrap_or(0);
        if own != 0 {
            let first = part_name(path, own, 0, count).unwrap_or_else(|| first_name(count));
            return Err(gguf.part_error(format!(
                "the file is part {} of {count}; open the first, {first}",
                own.saturating_add(1)
            )));
        }
        for part in 1..count {
            let Some(name) = part_name(path, 0, part, count) else {
                let expected = first_name(count);
                return Err(gguf.part_error(format!(
                    "the file is part 1 of {count}, whose other parts cannot be found: its name does not end in {expected}; give all \
                     parts the names that they were published with"
                )));
            };
            let other = path.with_file_name(name);
            gguf.add(Self::parse(other.clone(), FileBytes::map(&other)?)?, part, count)?;
        }
        Ok(gguf)
    }

    /// Takes the tensors of the file that should be `part` of `count`.
    fn add(&mut self, other: Gguf, part: u32, count: u32) -> Result<()> {
        let found = (other.opt_u32("split.no")?, other.opt_u32("split.count")?);
        if found != (Some(part), Some(count)) {
            let found = match found {
                (Some(part), Some(count)) => {
                    format!("says that it is part {} of {count}", part.saturating_add(1))
                }
                _ => "does not say that it is a part".into(),
            };
            return Err(other.part_error(format!(
                "the file should be part {} of {count}, but {found}; put that part in its place",
                part + 1
            )));
        }
        let Gguf { path, files, tensors, .. } = other;
        for (name, info) in tensors {
            let info = TensorInfo { file: self.files.len(), ..info };
            if self.tensors.contains_key(&name) {
                let message =
                    format!("the tensor '{name}' is in two parts of the model; fetch all parts again");
                return Err(ModelError::GgufPart { path, message });
            }
            self.tensors.insert(name, info);
        }
        self.files.extend(files);
        Ok(())
    }

    fn part_error(&self, message: String) -> ModelError {
        ModelError::GgufPart { path: self.path.clone(), message }
    }

    /// Reads a file that is already in memory; `path` is only named in errors.
    ///
    /// # Errors
    /// [`ModelError::NoModel`] if the bytes are no GGUF file, [`ModelError::GgufForm`] if they are one of another version or byte
    /// order, [`ModelError::Gguf`] if they are malformed or truncated.
    pub fn from_bytes(path: impl Into<PathBuf>, bytes: Vec<u8>) -> Result<Self> {
        Self::parse(path.into(), FileBytes::Owned(bytes))
    }

    fn parse(path: PathBuf, bytes: FileBytes) -> Result<Self> {
        check_form(&path, &bytes)?;
        match reader::read(&bytes) {
            Ok((metadata, tensors)) => Ok(Self { path, files: vec![bytes], metadata, tensors }),
            Err(reader::Malformed { offset, message }) => Err(ModelError::Gguf { path, offset, message }),
        }
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file, or all parts in their order.
    pub(crate) fn files(&self) -> &[FileBytes] {
        &self.files
    }

    /// All metadata by key, in the order of the keys.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// All tensors by name, in the order of the names.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The data of the tensor `name` with its directory entry and type.
    ///
    /// # Errors
    /// [`ModelError::TensorMissing`]; [`ModelError::TensorType`] if the type cannot be read.
    pub fn tensor(&self, name: &str) -> Result<(&TensorInfo, DType, &[u8])> {
        let info = self
            .tensors
            .get(name)
            .ok_or_else(|| ModelError::TensorMissing { path: self.path.clone(), tensor: name.to_owned() })?;
        let dtype = info.dtype.ok_or_else(|| ModelError::TensorType {
            path: self.path.clone(),
            tensor: name.to_owned(),
            found: ggml_type_name(info.ggml_type),
            supported: SUPPORTED,
        })?;
        Ok((info, dtype, &self.files[info.file][info.range.clone()]))
    }

    /// Drops all metadata, of which a vocabulary is tens of megabytes in small pieces.
    pub(crate) fn forget_metadata(&mut self) {
        self.metadata.clear();
    }

    /// Gives the resident pages of the file back to the system (a hint): reading goes on working, from the
    /// disk.
    pub fn advise_done(&self) {
        self.files.iter().for_each(FileBytes::advise_done);
    }

    /// The value of `key`, if the file has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// The non-negative integer `key`, of any integer type; `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no integer or does not fit.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "an unsigned 32-bit integer", Value::as_u32)
    }

    /// The non-negative integer `key`, of any integer type.
    ///
    /// # Errors
    /// [`ModelError::KeyMissing`]; [`ModelError::KeyType`] if it is no integer or does not fit.
    pub fn get_u32(&self, key: &str) -> Result<u32> {
        self.required(key, self.opt_u32(key)?)
    }

    /// The floating-point number `key`; `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no floating-point number.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a floating-point number", Value::as_f32)
    }

    /// The floating-point number `key`.
    ///
    /// # Errors
    /// [`ModelError::KeyMissing`]; [`ModelError::KeyType`] if it is no floating-point number.
    pub fn get_f32(&self, key: &str) -> Result<f32> {
        self.required(key, self.opt_f32(key)?)
    }

    /// The truth value `key`; `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no truth value.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a truth value", Value::as_bool)
    }

    /// The string `key`; `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no string.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", Value::as_str)
    }

    /// The string `key`.
    ///
    /// # Errors
    /// [`ModelError::KeyMissing`]; [`ModelError::KeyType`] if it is no string.
    pub fn get_str(&self, key: &str) -> Result<&str> {
        self.required(key, self.opt_str(key)?)
    }

    /// The array of strings `key`; `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no array of strings.
    pub fn opt_strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Array(Array::String(strings)) => Some(strings.as_slice()),
            _ => None,
        })
    }

    /// The array of strings `key`.
    ///
    /// # Errors
    /// [`ModelError::KeyMissing`]; [`ModelError::KeyType`] if it is no array of strings.
    pub fn get_strings(&self, key: &str) -> Result<&[String]> {
        self.required(key, self.opt_strings(key)?)
    }

    /// The array of 32-bit integers `key` (token types); `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no array of signed 32-bit integers.
    pub fn opt_i32s(&self, key: &str) -> Result<Option<&[i32]>> {
        self.typed(key, "an array of signed 32-bit integers", |v| match v {
            Value::Array(Array::I32(values)) => Some(values.as_slice()),
            _ => None,
        })
    }

    /// The array of floating-point numbers `key` (token scores); `None` if absent.
    ///
    /// # Errors
    /// [`ModelError::KeyType`] if it is no array of 32-bit floating-point numbers.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        self.typed(key, "an array of 32-bit floating-point numbers", |v| match v {
            Value::Array(Array::F32(values)) => Some(values.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| ModelError::KeyType {
            path: self.path.clone(),
            key: key.to_owned(),
            expected,
            found: value.describe(),
        })
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| ModelError::KeyMissing { path: self.path.clone(), key: key.to_owned() })
    }
}

/// Refuses what does not begin as GGUF files of versions 2 and 3 do. Fewer bytes than that are left to the reader.
fn check_form(path: &Path, bytes: &[u8]) -> Result<()> {
    let Some((magic, rest)) = bytes.split_first_chunk::<4>() else { return Ok(()) };
    if magic != b"GGUF" {
        let message = "the file does not begin with 'GGUF'; a model is a GGUF file, or the folder that holds config.json \
                       and safetensors; fetch a damaged GGUF file again";
        return Err(ModelError::NoModel { path: path.to_owned(), message: message.to_owned() });
    }
    let Some(version) = rest.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)) else { return Ok(()) };
    let message = match (version, version.swap_bytes()) {
        (2..=3, _) => return Ok(()),
        (_, 2..=3) => {
            "big-endian GGUF files are not supported; convert the file with llama.cpp's gguf_convert_endian.py".into()
        }
        _ => format!(
            "GGUF version {version} is not supported; supported are 2 and 3: convert the model with a current converter"
        ),
    };
    Err(ModelError::GgufForm { path: path.to_owned(), message })
}

/// The end of the name of the first of `count` parts.
fn first_name(count: u32) -> String {
    format!("-00001-of-{count:05}.gguf")
}

/// The name of `part` of `count`, beside the file of part `own`; parts count from 0.
fn part_name(path: &Path, own: u32, part: u32, count: u32) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-{:05}-of-{count:05}.gguf", own.checked_add(1)?))?;
    Some(format!("{stem}-{:05}-of-{count:05}.gguf", part + 1))
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
