//! One decoder for all families, which differ by data, not by code.
//!
//! The decoder computes; which rows it computes and which keys they see is decided by its caller, layer by layer:
//! [`Decoder::project`], attention over the caller's KV cache, [`Decoder::finish`].

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use refrain_kernels::{
    Activation, Device, Dtype, Experts, Floats, GatedMlp, KvBuffer, LayerTail, Mlp, Norm, PackedLinear,
    Precision, Q4Block, QkNorms, RowUnavailable, WeightMatrix, WeightRows,
};
use refrain_kv::{RopeTables, Ropes, Shape};

use crate::config::{BranchNorms, Config, ExpertSpec, QkNorm};
use crate::error::Result;
use crate::files::ModelFiles;
use crate::packed::{PackedMatrix, PackedReader, PackedWeights, PackedWriter};
use crate::rope;
use crate::weights::{Matrix, Weights};

/// Name of the table of embeddings.
const EMBEDDINGS: &str = "model.embed_tokens.weight";

/// A loaded model on a device.
#[derive(Debug)]
pub struct Decoder {
    device: Arc<dyn Device>,
    /// The device, computing each row as if it were alone.
    each: Arc<dyn Device>,
    files: ModelFiles,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: PackedLinear,
    precision: Precision,
    /// The rotary tables that were asked for last, with their frequencies.
    tables: Mutex<Option<(Ropes, Arc<RopeTables>)>>,
}

#[derive(Debug)]
struct Layer {
    /// Norm of attention's input, where it is normed.
    attention_norm: Option<Vec<f32>>,
    /// Norms of queries and of keys, where they are normed: of a head, `d`, or of all heads.
    qk_norms: Option<[Vec<f32>; 2]>,
    /// `(H + 2·Hkv)·d × D`: queries, keys, values.
    qkv: PackedLinear,
    o: PackedLinear,
    /// Norms of what attention and MLP add, where it is normed.
    post_norms: Option<[Vec<f32>; 2]>,
    /// Norm of the MLP's input, where it is normed.
    mlp_norm: Option<Vec<f32>>,
    activation: Activation,
    /// The MLP, or the experts of a mixture: gate and up, both `F × D`, and down, `D × F`.
    mlps: Vec<GatedMlp>,
    mixture: Option<Mixture>,
}

/// The choice of experts.
#[derive(Debug)]
struct Mixture {
    /// `experts × D`.
    router: PackedLinear,
    spec: ExpertSpec,
}

/// Buffers reused from layer to layer and step to step.
#[derive(Debug)]
pub struct Workspace {
    /// Queries of the last projection, `m × H × d`.
    pub q: Floats,
    /// Its keys before RoPE, `m × Hkv × d`, rounded to the cache's type. Longer than that if `m` has shrunk.
    pub k: KvBuffer,
    /// Its values, `m × Hkv × d`, rounded to the cache's type. Longer than that if `m` has shrunk.
    pub v: KvBuffer,
    /// Room for the attention's output, `m × H × d`.
    pub attended: Floats,
    /// The last logits, `m × vocab`, in the host's memory.
    pub logits: Vec<f32>,
    /// Whether rows are of different requests, and each is computed as if it were alone.
    pub each: bool,
}

impl Workspace {
    /// An empty workspace for keys and values of this type.
    pub fn new(device: &dyn Device, dtype: Dtype) -> Workspace {
        Workspace {
            q: device.floats(0),
            k: device.kv(dtype, 0),
            v: device.kv(dtype, 0),
            attended: device.floats(0),
            logits: Vec::new(),
            each: false,
        }
    }
}

impl Decoder {
    /// Packs a model's weights, or reads them from where they are `kept`: packed ones are put there. `progress(done, total)` is called after
    /// every layer, in layers.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape than the configuration says, or an unsupported type.
    pub fn load(
        files: ModelFiles,
        device: &Arc<dyn Device>,
        precision: Precision,
        kept: Option<&PackedWeights>,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Decoder> {
        let (config, weights) = (files.config(), files.weights());
        let norm = weights.vector("model.norm.weight", config.hidden)?;
        let pack = Pack { config, weights, device: &**device, precision, reader: None, writer: None };
        let read = kept.and_then(PackedWeights::open).and_then(|reader| {
            // A damaged file is made again.
            Pack { reader: Some(&reader), ..pack }.all(&mut progress).ok()
        });
        let (layers, head) = match read {
            Some(packed) => packed,
            None => {
                let writer = kept.and_then(PackedWeights::create);
                let packed = Pack { writer: writer.as_ref(), ..pack }.all(&mut progress)?;
                writer.into_iter().for_each(PackedWriter::finish);
                packed
            }
        };
        Ok(Decoder {
            device: device.clone(),
            each: device.batch_invariant(),
            files,
            layers,
            norm,
            head,
            precision,
            tables: Mutex::default(),
        })
    }

    /// The resolved configuration.
    pub fn config(&self) -> &Config {
        self.files.config()
    }

    /// The device that it computes on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// How weights are kept and multiplied.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Sizes of keys and values.
    pub fn shape(&self) -> Shape {
        let config = self.config();
        Shape { layers: config.num_layers(), kv_heads: config.kv_heads, head_dim: config.head_dim }
    }

    /// Bytes of packed weights.
    pub fn weight_bytes(&self) -> usize {
        let of_layer = |layer: &Layer| {
            let mlps = layer.mlps.iter().flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
            let router = layer.mixture.iter().map(|mixture| &mixture.router);
            mlps.chain(router).chain([&layer.qkv, &layer.o]).map(PackedLinear::bytes).sum::<usize>()
        };
        self.layers.iter().map(of_layer).sum::<usize>() + self.head.bytes()
    }

    /// Rotary frequencies of each layer for a request of `total` tokens, prompt and answer.
    pub fn ropes(&self, total: usize) -> Ropes {
        let Config { ropes, layers, .. } = self.config();
        let distinct = ropes.iter().map(|spec| rope::rope(spec, total)).collect();
        Ropes::new(distinct, layers.iter().map(|layer| layer.rope).collect())
    }

    /// Cosines and sines of at least the first `slots` positions, by layer, for a request of `total` tokens.
    pub fn rope_tables(&self, total: usize, slots: usize) -> Arc<RopeTables> {
        let ropes = self.ropes(total);
        let mut kept = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some((of, tables)) if *of == ropes && tables.len() >= slots => tables.clone(),
            _ => {
                let tables = Arc::new(ropes.tables(0..slots as u32));
                *kept = Some((ropes, tables.clone()));
                tables
            }
        }
    }

    /// Embeddings of `ids` into `x`, `m × D`.
    ///
    /// # Errors
    /// If an id has no row.
    pub fn embed(&self, ids: impl ExactSizeIterator<Item = u32>, x: &mut Floats) -> Result<()> {
        let table = self.files.weights().matrix(EMBEDDINGS)?;
        let (rows, mut ids, mut found) = (ids.len(), ids, Ok(()));
        let scale = self.config().embedding_scale;
        let mut row = |_, x: &mut [f32]| {
            if let (Some(id), Ok(())) = (ids.next(), &found) {
                found = table.row(id as usize, x);
                if scale != 1.0 {
                    x.iter_mut().for_each(|x| *x *= scale);
                }
            }
        };
        self.device.upload_rows(rows, self.config().hidden, &mut row, x);
        found
    }

    /// Queries, keys and values of `x` (`m × D`) at `layer` into `work.q`, `work.k`, `work.v`: queries and keys normed
    /// where the layer norms them, nothing rotated.
    pub fn project(&self, layer: usize, x: &Floats, work: &mut Workspace) {
        let kv_width = self.shape().width();
        let layer = &self.layers[layer];
        let norm = layer.attention_norm.as_ref().map(|norm| self.norm(norm));
        let qk_norms = layer.qk_norms.as_ref().map(|[q, k]| QkNorms { q: self.norm(q), k: self.norm(k) });
        let device = self.device_of(work.each);
        device.project_qkv(x, norm, &layer.qkv, qk_norms, kv_width, &mut work.q, &mut work.k, &mut work.v);
    }

    /// The rest of a layer after attention, in place, for some rows: `x += o(attended)`, `x += mlp(norm(x))`, with norms of what is added
    /// where the layer has them.
    ///
    /// `x` is `m × D`; `work.attended` holds the attention's output, `m × H × d`.
    pub fn finish(&self, layer: usize, x: &mut Floats, work: &mut Workspace, rows: Range<usize>) {
        let layer = &self.layers[layer];
        let post_norm = |index: usize| layer.post_norms.as_ref().map(|norms| self.norm(&norms[index]));
        let mlp = match &layer.mixture {
            None => Mlp::Dense(&layer.mlps[0]),
            Some(Mixture { router, spec: ExpertSpec { top_k, normalised, .. } }) => {
                Mlp::Experts(Experts { router, experts: &layer.mlps, top_k: *top_k, normalised: *normalised })
            }
        };
        let tail = LayerTail {
            output: &layer.o,
            attention_post_norm: post_norm(0),
            mlp_norm: layer.mlp_norm.as_ref().map(|norm| self.norm(norm)),
            mlp,
            activation: layer.activation,
            mlp_post_norm: post_norm(1),
        };
        self.device_of(work.each).attn_output_and_mlp(&work.attended, &tail, rows, x);
    }

    /// Logits of `x` (`m × D`, after the last layer) into `work.logits`, `m × vocab`.
    pub fn logits(&self, x: &Floats, work: &mut Workspace) {
        self.device_of(work.each).logits(x, self.norm(&self.norm), &self.head, &mut work.logits);
        if let Some(cap) = self.config().logit_softcap {
            work.logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
        }
    }

    fn device_of(&self, each: bool) -> &dyn Device {
        if each { &*self.each } else { &*self.device }
    }

    fn norm<'a>(&self, weight: &'a [f32]) -> Norm<'a> {
        Norm { weight, eps: self.config().rms_eps }
    }
}

#[derive(Clone, Copy)]
struct Pack<'a> {
    config: &'a Config,
    weights: &'a Weights,
    device: &'a dyn Device,
    precision: Precision,
    /// Where packed weights are taken from.
    reader: Option<&'a PackedReader>,
    /// Where packed weights are put.
    writer: Option<&'a PackedWriter>,
}

impl Pack<'_> {
    /// All layers, and the output projection.
    fn all(&self, progress: &mut impl FnMut(usize, usize)) -> Result<(Vec<Layer>, PackedLinear)> {
        let Pack { config, weights, .. } = *self;
        // A file and what is taken from it are never in memory together.
        let release_pages = || {
            weights.release_pages();
            self.reader.into_iter().for_each(PackedReader::release_pages);
        };
        let mut layers = Vec::with_capacity(config.num_layers());
        for index in 0..config.num_layers() {
            layers.push(self.layer(index)?);
            release_pages();
            progress(index + 1, config.num_layers());
        }
        let head_name = if !config.tied_embeddings && weights.has("lm_head.weight") {
            "lm_head.weight"
        } else {
            EMBEDDINGS
        };
        let head = self.linear(&[(head_name.to_owned(), config.vocab)], config.hidden)?;
        release_pages();
        Ok((layers, head))
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        let Config { hidden, heads, kv_heads, head_dim, intermediate, .. } = *self.config;
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let spec = &self.config.layers[index];
        let vector = |part: &str, len| self.weights.vector(&name(part), len);
        let norm = |part: &str| vector(&format!("{part}_layernorm.weight"), hidden);
        let post_norms = || -> Result<_> { Ok([norm("post_attention")?, norm("post_feedforward")?]) };
        // What Hugging Face calls the norm after attention is the MLP's where branches have no norms after them.
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
        self.packed(parts, inputs, |matrix| self.device.pack(matrix))
    }

    /// Packs the matrices of a gated MLP: gates and, below them, what they open.
    fn gated(&self, parts: &[(String, usize)], inputs: usize) -> Result<PackedLinear> {
        self.packed(parts, inputs, |matrix| self.device.pack_gate_up(matrix))
    }

    fn packed(
        &self,
        parts: &[(String, usize)],
        inputs: usize,
        pack: impl FnOnce(WeightMatrix<'_>) -> Result<PackedLinear, RowUnavailable>,
    ) -> Result<PackedLinear> {
        let (stacked, name) = (Stacked::new(self.weights, parts, inputs)?, &parts[0].0);
        let kept = self.reader.map(|reader| reader.matrix(name)).transpose()?;
        let packed = stacked.pack(self.precision, inputs, kept, pack)?;
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
        let rows = match precision {
            _ if let Some(kept) = &kept => WeightRows::Panels { write: &panels, four_bits: kept.four_bits() },
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
