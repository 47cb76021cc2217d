//! One decoder for all families, which differ by data, not by code.
//!
//! The decoder computes; which rows it computes and which keys they see is decided by its caller, layer by layer:
//! [`Decoder::project`], attention over the caller's KV cache, [`Decoder::finish`].

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use refrain_kernels::{
    Device, Dtype, Experts, Floats, KvBuffer, LayerTail, Mlp, Norm, Precision, QkNorms, release_free_memory,
};
use refrain_kv::{RopeTables, Ropes, Shape};

use crate::config::{Config, ExpertSpec};
use crate::error::Result;
use crate::files::ModelFiles;
use crate::layers::{EMBEDDINGS, Mixture, Pack, Packed};
use crate::packed::{PackedWeights, PackedWriter};
use crate::rope;
use crate::weights::Weights;

/// Embeddings that are read before their pages of the mapped file are given back, where weights and prompts share the host's memory.
const RELEASED_ROWS: usize = 256;

/// A loaded model on a device.
#[derive(Debug)]
pub struct Decoder {
    device: Arc<dyn Device>,
    /// The device, computing each row as if it were alone.
    each: Arc<dyn Device>,
    config: Config,
    weights: Weights,
    packed: Packed,
    norm: Vec<f32>,
    precision: Precision,
    /// Whether the device has a memory of its own. The host's is then free enough for pages of the mapped file, and giving them back would hold up
    /// the threads that read them.
    is_apart: bool,
    /// The rotary tables that were asked for last, with their frequencies.
    tables: Mutex<Option<(Ropes, Arc<RopeTables>)>>,
}

/// Buffers reused from layer to layer and step to step.
#[derive(Debug)]
pub struct Workspace {
    /// Queries of the last projection, `m × H × d` for `m` rows.
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
        let pack = Pack::new(&files, &**device, precision);
        let read = kept.and_then(PackedWeights::open).and_then(|reader| {
            // A damaged file is made again.
            Pack { reader: Some(&reader), ..pack }.all(&mut progress).ok()
        });
        let packed = match read {
            Some(packed) => packed,
            None => {
                let writer = kept.and_then(PackedWeights::create);
                let packed = Pack { writer: writer.as_ref(), ..pack }.all(&mut progress)?;
                writer.into_iter().for_each(PackedWriter::finish);
                packed
            }
        };
        let config = config.clone();
        let mut weights = files.into_weights();
        // Tokenizer and chat template have been made of it by now.
        weights.forget_metadata();
        release_free_memory();
        Ok(Decoder {
            device: device.clone(),
            each: device.batch_invariant(),
            config,
            weights,
            packed,
            norm,
            precision,
            is_apart: device.memory().is_some(),
            tables: Mutex::default(),
        })
    }

    /// Bytes of a device's own memory that [`Decoder::load`] takes for weights.
    ///
    /// # Errors
    /// Those of [`Decoder::load`].
    pub fn bytes_of(files: &ModelFiles, device: &dyn Device, precision: Precision) -> Result<usize> {
        let count = Pack { counts: true, ..Pack::new(files, device, precision) };
        let packed = count.all(&mut |_, _| ())?;
        Ok(packed.bytes() + packed.table_bytes())
    }

    /// The resolved configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The file or folder that it was loaded from.
    pub fn path(&self) -> &Path {
        self.weights.path()
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

    /// Bytes of packed weights, without [`Decoder::table_bytes`].
    pub fn weight_bytes(&self) -> usize {
        self.packed.bytes()
    }

    /// Bytes of a table of embeddings that a device with memory of its own holds beside the weights, of which a token reads a row.
    pub fn table_bytes(&self) -> usize {
        self.packed.table_bytes()
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

    /// Embeddings of `rows` tokens, whose ids `id` tells, into `x`, `rows × D`.
    ///
    /// # Errors
    /// If an id has no row.
    pub fn embed(&self, rows: usize, id: impl Fn(usize) -> u32 + Sync, x: &mut Floats) -> Result<()> {
        let table = self.weights.matrix(EMBEDDINGS)?;
        let (scale, failed) = (self.config().embedding_scale, Mutex::new(None));
        if let Some(packed) = self.packed.table() {
            let ids: Vec<u32> = (0..rows).map(&id).collect();
            if ids.iter().all(|id| (*id as usize) < table.rows()) && self.device.embed(packed, &ids, scale, x)
            {
                return Ok(());
            }
        }
        let row = |i: usize, x: &mut [f32]| {
            // A prompt's rows lie in thousands of pages, which would stay with the program; reading one again costs a microsecond.
            if !self.is_apart && (i + 1).is_multiple_of(RELEASED_ROWS) {
                self.weights.release_pages();
            }
            match table.row(id(i) as usize, x) {
                Ok(()) if scale == 1.0 => {}
                Ok(()) => x.iter_mut().for_each(|x| *x *= scale),
                Err(error) => _ = failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error),
            }
        };
        self.device.upload_rows(rows, self.config().hidden, &row, x);
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Queries, keys and values of some rows of `x` (`m × D`) at `layer` into `work.q`, `work.k`, `work.v`: queries and keys normed
    /// where the layer norms them, nothing rotated.
    pub fn project(&self, layer: usize, x: &Floats, rows: Range<usize>, work: &mut Workspace) {
        let kv_width = self.shape().width();
        let layer = &self.packed.layers[layer];
        let norm = layer.attention_norm.as_ref().map(|norm| self.norm(norm));
        let qk_norms = layer.qk_norms.as_ref().map(|[q, k]| QkNorms { q: self.norm(q), k: self.norm(k) });
        let device = self.device_of(work.each);
        let Workspace { q, k, v, .. } = work;
        device.expect_product(&layer.o);
        device.project_qkv(x, rows, norm, &layer.qkv, qk_norms, kv_width, q, k, v);
    }

    /// The rest of a layer after attention, in place, for some rows: `x += o(attended)`, `x += mlp(norm(x))`, with norms of what is added
    /// where the layer has them.
    ///
    /// `x` is `m × D`; `attended` is the row of `work.attended`, the attention's output, that belongs to the first of `rows`.
    pub fn finish(
        &self,
        layer: usize,
        x: &mut Floats,
        rows: Range<usize>,
        (work, attended): (&Workspace, usize),
    ) {
        let next = self.packed.layers.get(layer + 1).map_or(&self.packed.head, |next| &next.qkv);
        let layer = &self.packed.layers[layer];
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
            next,
        };
        self.device_of(work.each).attn_output_and_mlp((&work.attended, attended), &tail, rows, x);
    }

    /// Logits of `x` (`m × D`, after the last layer) into `work.logits`, `m × vocab`.
    pub fn logits(&self, x: &Floats, work: &mut Workspace) {
        let device = self.device_of(work.each);
        device.expect_product(&self.packed.layers[0].qkv);
        device.logits(x, self.norm(&self.norm), &self.packed.head, &mut work.logits);
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
