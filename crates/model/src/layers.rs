//! The layers of a decoder: their packed weights, and how they are packed.

use std::sync::OnceLock;

use refrain_kernels::{
    Activation, Device, GatedMlp, PackedLinear, Precision, Q4Block, RowUnavailable, WeightMatrix, WeightRows,
};

use crate::config::{BranchNorms, Config, ExpertSpec, QkNorm};
use crate::dtype::DType;
use crate::error::Result;
use crate::files::ModelFiles;
use crate::packed::{PackedMatrix, PackedReader, PackedWriter};
use crate::weights::{Matrix, Weights};

/// Name of the table of embeddings.
pub(crate) const EMBEDDINGS: &str = "model.embed_tokens.weight";

/// A layer's packed weights.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Norm of attention's input, where it is normed.
    pub(crate) attention_norm: Option<Vec<f32>>,
    /// Norms of queries and of keys, where they are normed: of a head, `d`, or of all heads.
    pub(crate) qk_norms: Option<[Vec<f32>; 2]>,
    /// `(H + 2·Hkv)·d × D`: queries, keys, values.
    pub(crate) qkv: PackedLinear,
    pub(crate) o: PackedLinear,
    /// Norms of what attention and MLP add, where it is normed.
    pub(crate) post_norms: Option<[Vec<f32>; 2]>,
    /// Norm of the MLP's input, where it is normed.
    pub(crate) mlp_norm: Option<Vec<f32>>,
    pub(crate) activation: Activation,
    /// The MLP, or the experts of a mixture: gate and up, both `F × D`, and down, `D × F`.
    pub(crate) mlps: Vec<GatedMlp>,
    pub(crate) mixture: Option<Mixture>,
}

impl Layer {
    /// Bytes of packed weights.
    pub(crate) fn bytes(&self) -> usize {
        let mlps = self.mlps.iter().flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
        let router = self.mixture.iter().map(|mixture| &mixture.router);
        mlps.chain(router).chain([&self.qkv, &self.o]).map(PackedLinear::bytes).sum()
    }
}

/// The choice of experts.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// `experts × D`.
    pub(crate) router: PackedLinear,
    pub(crate) spec: ExpertSpec,
}

/// A model's packed weights.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) layers: Vec<Layer>,
    /// The output projection.
    pub(crate) head: PackedLinear,
    pub(crate) embeddings: Embeddings,
}

/// The place where embeddings are looked up.
#[derive(Debug)]
pub(crate) enum Embeddings {
    /// The model's file.
    File,
    /// The output projection, whose rows they are.
    Head,
    /// A table on the device.
    Table(PackedLinear),
}

impl Packed {
    /// Bytes of the weights of products.
    pub(crate) fn bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum::<usize>() + self.head.bytes()
    }

    /// Bytes of a table of embeddings beside them.
    pub(crate) fn table_bytes(&self) -> usize {
        match &self.embeddings {
            Embeddings::Table(table) => table.bytes(),
            Embeddings::File | Embeddings::Head => 0,
        }
    }

    /// Embeddings that the device may look up.
    pub(crate) fn table(&self) -> Option<&PackedLinear> {
        match &self.embeddings {
            Embeddings::File => None,
            Embeddings::Head => Some(&self.head),
            Embeddings::Table(table) => Some(table),
        }
    }
}

/// The packing of a model's weights.
#[derive(Clone, Copy)]
pub(crate) struct Pack<'a> {
    pub(crate) config: &'a Config,
    pub(crate) weights: &'a Weights,
    pub(crate) device: &'a dyn Device,
    pub(crate) precision: Precision,
    /// Gives the panels of an earlier packing, which replace the rows of the model's files.
    pub(crate) reader: Option<&'a PackedReader>,
    /// Receives every matrix once it is packed.
    pub(crate) writer: Option<&'a PackedWriter>,
    /// Whether nothing is packed, and only the bytes that packing would take are counted.
    pub(crate) counts: bool,
}

impl<'a> Pack<'a> {
    /// The packing of a model's own rows.
    pub(crate) fn new(files: &'a ModelFiles, device: &'a dyn Device, precision: Precision) -> Pack<'a> {
        let (config, weights) = (files.config(), files.weights());
        Pack { config, weights, device, precision, reader: None, writer: None, counts: false }
    }

    /// All that is packed.
    pub(crate) fn all(&self, progress: &mut impl FnMut(usize, usize)) -> Result<Packed> {
        let Pack { config, weights, .. } = *self;
        let mut layers = Vec::with_capacity(config.num_layers());
        for index in 0..config.num_layers() {
            layers.push(self.layer(index)?);
            // A file and what is taken from it are never in memory together.
            weights.release_pages();
            progress(index + 1, config.num_layers());
        }
        let head_name = if config.tied_embeddings { EMBEDDINGS } else { "lm_head.weight" };
        let head = self.linear(&[(head_name.to_owned(), config.vocab)], config.hidden)?;
        let embeddings = self.embeddings(head_name)?;
        weights.release_pages();
        Ok(Packed { layers, head, embeddings })
    }

    /// The place where embeddings are looked up. A device with memory of its own looks up those of `bf16`, which its layout keeps to the bit.
    fn embeddings(&self, head_name: &str) -> Result<Embeddings> {
        let table = self.weights.matrix_of(EMBEDDINGS, self.config.vocab, self.config.hidden)?;
        if self.device.memory().is_none() || table.dtype() != DType::BF16 {
            return Ok(Embeddings::File);
        }
        if head_name == EMBEDDINGS && self.precision == Precision::Bf16 {
            return Ok(Embeddings::Head);
        }
        let own = Pack { precision: Precision::Bf16, reader: None, writer: None, ..*self };
        Ok(Embeddings::Table(own.linear(&[(EMBEDDINGS.to_owned(), table.rows())], table.cols())?))
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        let Config { hidden, heads, kv_heads, head_dim, intermediate, .. } = *self.config;
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let spec = &self.config.layers[index];
        let vector = |part: &str, len| self.weights.vector(&name(part), len);
        let norm = |part: &str| vector(&format!("{part}_layernorm.weight"), hidden);
        let post_norms = || -> Result<_> { Ok([norm("post_attention")?, norm("post_feedforward")?]) };
        // Hugging Face's norm after attention is the MLP's where branches have no norms after them.
        let (attention_norm, mlp_norm, post_norms) = match spec.norms {
            BranchNorms::Pre => (Some(norm("input")?), Some(norm("post_attention")?), None),
            BranchNorms::PrePost => {
                (Some(norm("input")?), Some(norm("pre_feedforward")?), Some(post_norms()?))
            }
            BranchNorms::Post => (None, None, Some(post_norms()?)),
        };
        let qk_norms = |q, k| -> Result<_> {
            let [q_norm, k_norm] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
            Ok(Some([vector(q_norm, q)?, vector(k_norm, k)?]))
        };
        let qk_norms = match spec.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => qk_norms(head_dim, head_dim)?,
            QkNorm::AllHeads => qk_norms(q, kv)?,
        };
        let attention = [
            ("self_attn.q_proj.weight", q),
            ("self_attn.k_proj.weight", kv),
            ("self_attn.v_proj.weight", kv),
        ];
        let named = |parts: &[(&str, usize)]| parts.iter().map(|(part, rows)| (name(part), *rows)).collect();
        // Some models store them as one matrix.
        let parts = |fused: &str, parts: &[(&str, usize)]| -> Vec<(String, usize)> {
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            if self.weights.has(&name(fused)) { vec![(name(fused), rows)] } else { named(parts) }
        };
        let mlp = |whole: &str, width: usize| -> Result<GatedMlp> {
            let [gate, up, down, fused] = ["gate_proj", "up_proj", "down_proj", "gate_up_proj"]
                .map(|part| format!("{whole}.{part}.weight"));
            Ok(GatedMlp {
                gate_up: self.gated(&parts(&fused, &[(&gate, width), (&up, width)]), hidden)?,
                down: self.linear(&[(name(&down), hidden)], width)?,
            })
        };
        let (mlps, mixture) = match spec.experts {
            None => (vec![mlp("mlp", intermediate)?], None),
            Some(spec) => {
                let experts =
                    (0..spec.count).map(|expert| mlp(&format!("mlp.experts.{expert}"), spec.intermediate));
                // Rounded weights would give some tokens to other experts.
                let exact = Pack { precision: Precision::F32, ..*self };
                let router = exact.linear(&[(name("mlp.gate.weight"), spec.count)], hidden)?;
                (experts.collect::<Result<_>>()?, Some(Mixture { router, spec }))
            }
        };
        Ok(Layer {
            attention_norm,
            qk_norms,
            qkv: self.linear(&parts("self_attn.qkv_proj.weight", &attention), hidden)?,
            o: self.linear(&[(name("self_attn.o_proj.weight"), hidden)], q)?,
            post_norms,
            mlp_norm,
            activation: spec.activation,
            mlps,
            mixture,
        })
    }

    /// Packs matrices `(name, rows)` of `inputs` columns below one another, with their biases where there are any.
    fn linear(&self, parts: &[(String, usize)], inputs: usize) -> Result<PackedLinear> {
        self.packed(parts, inputs, false)
    }

    /// Packs the matrices of a gated MLP: gates and, below them, what they open.
    fn gated(&self, parts: &[(String, usize)], inputs: usize) -> Result<PackedLinear> {
        self.packed(parts, inputs, true)
    }

    fn packed(&self, parts: &[(String, usize)], inputs: usize, is_gated: bool) -> Result<PackedLinear> {
        let (stacked, name) = (Stacked::new(self.weights, parts, inputs)?, &parts[0].0);
        let kept = self.reader.map(|reader| reader.matrix(name)).transpose()?;
        let packed = stacked.pack(self.precision, inputs, kept, |matrix| match is_gated {
            _ if self.counts => Ok(PackedLinear::new((), self.device.packed_bytes(&matrix))),
            false => self.device.pack(matrix),
            true => self.device.pack_gate_up(matrix),
        })?;
        if let Some(writer) = self.writer
            && let Some(panels) = self.device.packed_panels(&packed)
        {
            writer.add(name, &panels);
        }
        Ok(packed)
    }
}

/// Matrices below one another.
struct Stacked<'a> {
    /// The first row of each.
    matrices: Vec<(usize, Matrix<'a>)>,
    outputs: usize,
    bias: Option<Vec<f32>>,
}

impl<'a> Stacked<'a> {
    fn new(weights: &'a Weights, parts: &[(String, usize)], inputs: usize) -> Result<Stacked<'a>> {
        let (mut matrices, mut bias, mut biased, mut outputs) = (Vec::new(), Vec::new(), false, 0);
        for (name, rows) in parts {
            matrices.push((outputs, weights.matrix_of(name, *rows, inputs)?));
            outputs += rows;
            let name = name.replace(".weight", ".bias");
            if weights.has(&name) {
                biased = true;
                bias.extend(weights.vector(&name, *rows)?);
            }
            bias.resize(outputs, 0.0);
        }
        Ok(Stacked { matrices, outputs, bias: biased.then_some(bias) })
    }

    /// Gives the rows to `pack`: packed ones where they are `kept`, else blocks of four bits where the precision keeps them and all matrices
    /// have them.
    fn pack(
        &self,
        precision: Precision,
        inputs: usize,
        kept: Option<PackedMatrix<'_>>,
        pack: impl FnOnce(WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable>,
    ) -> Result<PackedLinear> {
        let failed = OnceLock::new();
        let find = |row: usize| {
            let (start, matrix) =
                &self.matrices[self.matrices.partition_point(|(start, _)| *start <= row) - 1];
            (matrix, row - start)
        };
        let or_stop = |written: Result<()>| {
            written.map_err(|error| {
                let _ = failed.set(error);
                RowUnavailable
            })
        };
        let nibbles = |row: usize, out: &mut [Q4Block]| {
            let (matrix, row) = find(row);
            or_stop(matrix.nibbles(row, out))
        };
        let floats = |row: usize, out: &mut [f32]| {
            let (matrix, row) = find(row);
            or_stop(matrix.row(row, out))
        };
        let panels =
            |p: usize, out: &mut [u32]| or_stop(kept.as_ref().map_or(Ok(()), |kept| kept.panel(p, out)));
        let four_bits = kept.as_ref().map(|kept| kept.four_bits(precision)).transpose()?;
        let rows = match precision {
            _ if let Some(four_bits) = four_bits => WeightRows::Panels { write: &panels, four_bits },
            Precision::Q8 if self.matrices.iter().all(|(_, matrix)| matrix.has_nibbles()) => {
                WeightRows::Q4(&nibbles)
            }
            _ => WeightRows::F32(&floats),
        };
        let (outputs, bias) = (self.outputs, self.bias.clone());
        let packed = pack(WeightMatrix { precision, outputs, inputs, bias, rows });
        packed.map_err(|RowUnavailable| {
            failed.into_inner().unwrap_or_else(|| unreachable!("a row that cannot be had says why"))
        })
    }
}

#[cfg(test)]
#[path = "layers_tests.rs"]
mod tests;
