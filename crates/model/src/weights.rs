//! A model's weights by Hugging Face's parameter names, whichever files they come from.

use std::path::Path;

use refrain_kernels::Q4Block;

use crate::config::{BranchNorms, Config};
use crate::dtype::DType;
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;
use crate::map::FileBytes;
use crate::names::{ggml_expert, ggml_name};
use crate::quant::{self, dequantize};
use crate::safetensors::SafetensorsFolder;

/// The weights of one model, memory-mapped and read row by row. Shared freely between threads.
#[derive(Debug)]
pub struct Weights {
    source: Source,
}

#[derive(Debug)]
enum Source {
    Gguf {
        gguf: Gguf,
        norms: BranchNorms,
        interleaved: Option<HeadShape>,
    },
    /// What is added to the weights of norms is the family's.
    Safetensors {
        folder: SafetensorsFolder,
        norm_offset: f32,
    },
}

/// How the rows of Q and K are laid out in `llama` GGUF files, whose converter interleaves the two halves of
/// a head.
#[derive(Debug, Clone, Copy)]
struct HeadShape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
}

/// A view of a tensor's data with what is needed to read it.
#[derive(Debug)]
struct TensorView<'a> {
    name: String,
    shape: &'a [usize],
    dtype: DType,
    data: &'a [u8],
}

impl Weights {
    /// The weights of a GGUF file, whose configuration is `config`.
    ///
    /// # Errors
    /// None at present; missing tensors are reported when they are asked for.
    pub(crate) fn from_gguf(gguf: Gguf, config: &Config) -> Result<Self> {
        // `llama` files (Mistral's too) and SmolLM3's hold Q and K for RoPE of neighbouring pairs; all others for
        // half-split pairs.
        let architecture = gguf.opt_str("general.architecture")?;
        let is_interleaved = matches!(architecture, Some("llama" | "mistral" | "mistral3" | "smollm3"));
        let interleaved = is_interleaved.then_some(HeadShape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            rotary_dim: config.ropes[0].rotary_dim,
        });
        Ok(Self { source: Source::Gguf { gguf, norms: config.layers[0].norms, interleaved } })
    }

    /// The weights of a Hugging Face folder, whose configuration is `config`.
    pub(crate) fn from_safetensors(folder: SafetensorsFolder, config: &Config) -> Self {
        Self { source: Source::Safetensors { folder, norm_offset: config.family.norm_offset() } }
    }

    /// Whether the files have the parameter `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        match &self.source {
            Source::Gguf { gguf, norms, .. } => stored_name(gguf, *norms, name).is_some(),
            Source::Safetensors { folder, .. } => folder.has(name),
        }
    }

    /// The parameter `name` as a matrix of the shape that the file gives it.
    ///
    /// Rows are in Hugging Face's order: of `llama` GGUF files Q and K are un-permuted while reading, so that
    /// RoPE always rotates the pairs (i, i + rotary_dim/2).
    ///
    /// # Errors
    /// [`ModelError::TensorMissing`]; [`ModelError::TensorType`] if its type cannot be read;
    /// [`ModelError::TensorShape`] if it has not two dimensions, or is a Q or K of other heads than the
    /// configuration's.
    pub fn matrix(&self, name: &str) -> Result<Matrix<'_>> {
        let view = self.view(name)?;
        let &[rows, cols] = view.shape else {
            return Err(self.shape_error(&view, "a matrix".into()));
        };
        self.checked_matrix(name, view, rows, cols)
    }

    /// The parameter `name` as a matrix of `rows` rows (outputs) and `cols` columns (inputs).
    ///
    /// # Errors
    /// Those of [`Weights::matrix`]; [`ModelError::TensorShape`] if it has another shape.
    pub fn matrix_of(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix<'_>> {
        let view = self.view(name)?;
        self.checked_matrix(name, view, rows, cols)
    }

    /// The parameter `name`, a vector of `len` values (a norm's weight, a bias).
    ///
    /// # Errors
    /// [`ModelError::TensorMissing`]; [`ModelError::TensorType`] if its type cannot be read;
    /// [`ModelError::TensorShape`] if it is no vector of that length.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let view = self.view(name)?;
        if view.shape != [len] {
            return Err(self.shape_error(&view, format!("[{len}]")));
        }
        let mut raw = vec![0.0; len];
        dequantize(view.dtype, view.data, &mut raw)?;
        if let Source::Safetensors { norm_offset, .. } = self.source
            && name.ends_with("norm.weight")
        {
            raw.iter_mut().for_each(|weight| *weight += norm_offset);
        }
        match self.interleaving(name, &view, len)? {
            None => Ok(raw),
            Some(order) => Ok((0..len).map(|i| raw[order.source(i)]).collect()),
        }
    }

    /// Drops the metadata of a GGUF file, which weights are read without.
    pub(crate) fn forget_metadata(&mut self) {
        if let Source::Gguf { gguf, .. } = &mut self.source {
            gguf.forget_metadata();
        }
    }

    /// Gives the resident pages of the files back to the system (a hint), once the weights are packed.
    /// Reading goes on working, from the disk.
    pub fn release_pages(&self) {
        match &self.source {
            Source::Gguf { gguf, .. } => gguf.advise_done(),
            Source::Safetensors { folder, .. } => folder.advise_done(),
        }
    }

    /// The GGUF file behind the weights, if it is one.
    #[must_use]
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.source {
            Source::Gguf { gguf, .. } => Some(gguf),
            Source::Safetensors { .. } => None,
        }
    }

    /// The files, in the order of their names.
    pub(crate) fn files(&self) -> Vec<&FileBytes> {
        match &self.source {
            Source::Gguf { gguf, .. } => gguf.files().iter().collect(),
            Source::Safetensors { folder, .. } => folder.shards().iter().collect(),
        }
    }

    /// Which of the files each tensor is taken from, where files besides those decide it; else nothing.
    pub(crate) fn index(&self) -> String {
        match &self.source {
            Source::Gguf { .. } => String::new(),
            Source::Safetensors { folder, .. } => {
                folder.places().map(|(name, shard)| format!("{shard} {name:?}\n")).collect()
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        match &self.source {
            Source::Gguf { gguf, .. } => gguf.path(),
            Source::Safetensors { folder, .. } => folder.path(),
        }
    }

    fn view(&self, name: &str) -> Result<TensorView<'_>> {
        match &self.source {
            Source::Gguf { gguf, .. } if let Some((own, expert)) = ggml_expert(name) => {
                let (info, dtype, data) = gguf.tensor(&own)?;
                let whole = TensorView { name: own, shape: &info.shape, dtype, data };
                let &[experts, ref shape @ ..] = info.shape.as_slice() else {
                    return Err(self.shape_error(&whole, "a matrix for each expert".into()));
                };
                if expert >= experts || shape.len() != 2 {
                    return Err(
                        self.shape_error(&whole, format!("a matrix for each of more than {expert} experts"))
                    );
                }
                let bytes = data.len() / experts;
                Ok(TensorView { shape, data: &data[expert * bytes..(expert + 1) * bytes], ..whole })
            }
            Source::Gguf { gguf, norms, .. } => {
                let own = stored_name(gguf, *norms, name).ok_or_else(|| ModelError::TensorMissing {
                    path: gguf.path().to_owned(),
                    tensor: ggml_name(*norms, name).unwrap_or_else(|| name.to_owned()),
                })?;
                let (info, dtype, data) = gguf.tensor(&own)?;
                Ok(TensorView { name: own, shape: &info.shape, dtype, data })
            }
            Source::Safetensors { folder, .. } => {
                let (info, dtype, data) = folder.tensor(name)?;
                Ok(TensorView { name: name.to_owned(), shape: &info.shape, dtype, data })
            }
        }
    }

    fn shape_error(&self, view: &TensorView<'_>, expected: String) -> ModelError {
        let (path, tensor) = (self.path().to_owned(), view.name.clone());
        ModelError::TensorShape { path, tensor, expected, found: view.shape.to_vec() }
    }

    fn checked_matrix<'a>(
        &self,
        name: &str,
        view: TensorView<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix<'a>> {
        if view.shape != [rows, cols] || rows == 0 || cols == 0 {
            return Err(self.shape_error(&view, format!("[{rows}, {cols}]")));
        }
        let order = self.interleaving(name, &view, rows)?;
        let row_bytes = view.data.len() / rows;
        Ok(Matrix { name: view.name, dtype: view.dtype, data: view.data, rows, cols, row_bytes, order })
    }

    /// The order of the rows of `name`, if the file interleaves them.
    fn interleaving(&self, name: &str, view: &TensorView<'_>, rows: usize) -> Result<Option<Interleaved>> {
        let Source::Gguf { interleaved: Some(shape), .. } = &self.source else { return Ok(None) };
        let Some((_, parameter)) = name.split_once(".self_attn.") else { return Ok(None) };
        let HeadShape { heads, kv_heads, head_dim, rotary_dim } = *shape;
        let (expected, permuted) = match parameter.split('.').next() {
            Some("q_proj") => (heads * head_dim, heads * head_dim),
            Some("k_proj") => (kv_heads * head_dim, kv_heads * head_dim),
            // Q, K and V one under the other: V is not rotated.
            Some("qkv_proj") => ((heads + 2 * kv_heads) * head_dim, (heads + kv_heads) * head_dim),
            _ => return Ok(None),
        };
        if rows != expected {
            return Err(self.shape_error(view, format!("{expected} rows")));
        }
        Ok(Some(Interleaved { permuted, head_dim, rotary_dim }))
    }
}

/// The order in which converters to `llama` GGUF files put the rows of Q and K: row 2i + j of a head is
/// Hugging Face's row i + j · rotary_dim/2 (`permute` in llama.cpp's `convert_hf_to_gguf.py`).
#[derive(Debug, Clone, Copy)]
struct Interleaved {
    /// Leading rows that are permuted.
    permuted: usize,
    head_dim: usize,
    rotary_dim: usize,
}

impl Interleaved {
    /// The file's row that holds Hugging Face's row `row`.
    fn source(&self, row: usize) -> usize {
        let within = row % self.head_dim;
        if row >= self.permuted || within >= self.rotary_dim {
            return row;
        }
        let half = self.rotary_dim / 2;
        row - within + 2 * (within % half) + within / half
    }
}

/// A weight matrix in the mapped file, `[rows, cols]`: output features by input features.
#[derive(Debug, Clone)]
pub struct Matrix<'a> {
    name: String,
    dtype: DType,
    data: &'a [u8],
    rows: usize,
    cols: usize,
    row_bytes: usize,
    order: Option<Interleaved>,
}

impl<'a> Matrix<'a> {
    /// Rows: output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The type that the file stores.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The name that the file gives it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The stored bytes of row `r`: whole blocks of [`Matrix::dtype`], `cols` values.
    ///
    /// # Errors
    /// [`ModelError::Row`] if there is no such row.
    pub fn row_bytes(&self, r: usize) -> Result<&'a [u8]> {
        if r >= self.rows {
            return Err(self.row_error(r, self.cols));
        }
        let start = self.order.map_or(r, |o| o.source(r)) * self.row_bytes;
        Ok(&self.data[start..start + self.row_bytes])
    }

    /// Writes the `cols` values of row `r` to `out`.
    ///
    /// # Errors
    /// [`ModelError::Row`] if there is no such row, or `out` has another length.
    pub fn row(&self, r: usize, out: &mut [f32]) -> Result<()> {
        if out.len() != self.cols {
            return Err(self.row_error(r, out.len()));
        }
        dequantize(self.dtype, self.row_bytes(r)?, out)
    }

    /// Whether [`Matrix::nibbles`] can be asked.
    pub(crate) fn has_nibbles(&self) -> bool {
        quant::has_nibbles(self.dtype)
    }

    /// Writes the `cols / 32` blocks of row `r` to `out`.
    ///
    /// # Errors
    /// If there is no such row, the type has no nibbles, or `out` has another length.
    pub(crate) fn nibbles(&self, r: usize, out: &mut [Q4Block]) -> Result<()> {
        quant::nibbles(self.dtype, self.row_bytes(r)?, out)
    }

    fn row_error(&self, row: usize, len: usize) -> ModelError {
        ModelError::Row { tensor: self.name.clone(), row, len, rows: self.rows, cols: self.cols }
    }
}

/// The name under which `gguf` holds Hugging Face's parameter `name`, if it does.
///
/// `ffn_up` is an `up_proj` beside an `ffn_gate`, and alone a fused `gate_up_proj`.
fn stored_name(gguf: &Gguf, norms: BranchNorms, name: &str) -> Option<String> {
    let own = ggml_name(norms, name).filter(|own| gguf.tensors().contains_key(own))?;
    let gated = || gguf.tensors().contains_key(&own.replace(".ffn_up.", ".ffn_gate."));
    let right = match (name.contains(".mlp.up_proj."), name.contains(".mlp.gate_up_proj.")) {
        (true, _) => gated(),
        (_, true) => !gated(),
        _ => true,
    };
    right.then_some(own)
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
