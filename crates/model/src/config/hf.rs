//! Hugging Face's `config.json` and `generation_config.json`, both of transformers 4 (`rope_theta`,
//! `rope_scaling`) and of transformers 5 (`rope_parameters`). Absent fields take the defaults of
//! transformers' own classes.

use std::path::Path;

use serde::Deserialize;

use super::checks::checked_layers;
use super::{Config, Family, LayerSpec, RopeScaling, RopeSpec, SUPPORTED, longrope_attention_factor};
use crate::error::{ModelError, Result};
use crate::safetensors::{SafetensorsFolder, read_json};

/// `config.json`, with Hugging Face's names.
#[derive(Debug, Deserialize)]
struct Raw {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    original_max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    /// Absent and null differ: Mistral's default is 4096, and null switches it off.
    #[serde(default, deserialize_with = "present")]
    sliding_window: Option<Option<usize>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    tie_word_embeddings: Option<bool>,
    quantization_config: Option<serde_json::Value>,
    bos_token_id: Option<Ids>,
    eos_token_id: Option<Ids>,
}

/// `rope_scaling` or `rope_parameters`.
#[derive(Debug, Default, Clone, Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    attention_factor: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    /// Only in files whose parameters differ by layer.
    full_attention: Option<serde::de::IgnoredAny>,
    /// Only in files whose parameters differ by layer.
    sliding_attention: Option<serde::de::IgnoredAny>,
}

/// `generation_config.json`.
#[derive(Debug, Default, Deserialize)]
struct RawGeneration {
    eos_token_id: Option<Ids>,
}

/// One token or several; some files write −1 for none.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Ids {
    One(i64),
    Many(Vec<i64>),
}

impl Ids {
    fn tokens(&self) -> impl Iterator<Item = u32> {
        let ids = match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        };
        ids.iter().filter_map(|&id| id.try_into().ok())
    }
}

/// Deserialises a field that is there: null becomes `Some(None)`.
fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl Config {
    /// The configuration of the model in `folder`, whose weights are `weights`.
    ///
    /// # Errors
    /// [`ModelError::Io`] if there is no `config.json`; [`ModelError::Architecture`]; [`ModelError::Config`].
    pub(crate) fn from_hf(folder: &Path, weights: &SafetensorsFolder) -> Result<Self> {
        let path = folder.join("config.json");
        // First only the architecture: the file of an unknown one may lack other fields, and the error should name the
        // architecture.
        #[derive(Deserialize)]
        struct Kind {
            model_type: Option<String>,
        }
        let kind = read_json::<Kind>(&path)?.model_type.unwrap_or_default();
        let Some(family) = Family::named(&kind) else {
            return Err(ModelError::Architecture { path, architecture: kind, supported: SUPPORTED });
        };
        let raw: Raw = read_json(&path)?;
        let generation = folder.join("generation_config.json");
        let generation = if generation.is_file() {
            read_json::<RawGeneration>(&generation)?
        } else {
            RawGeneration::default()
        };
        Resolver { raw: &raw, family, path: &path }.resolve(weights, &generation)?.validated(&path)
    }
}

/// A raw configuration on its way to a resolved one.
struct Resolver<'a> {
    raw: &'a Raw,
    family: Family,
    path: &'a Path,
}

impl Resolver<'_> {
    fn wrong(&self, message: String) -> ModelError {
        ModelError::Config { path: self.path.to_owned(), message }
    }

    fn resolve(&self, weights: &SafetensorsFolder, generation: &RawGeneration) -> Result<Config> {
        let raw = self.raw;
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
            return Err(self.wrong(format!("hidden_act '{act}' is not supported; supported is silu")));
        }
        if raw.quantization_config.is_some() {
            let message = "quantised safetensors (quantization_config) are not supported; \
                           take the model in BF16, or a GGUF file";
            return Err(self.wrong(message.into()));
        }
        let head_dim = match raw.head_dim {
            Some(dim) => dim,
            // Qwen3's class has 128, whichever the hidden size.
            None if self.family == Family::Qwen3 => 128,
            None if raw.num_attention_heads > 0
                && raw.hidden_size.is_multiple_of(raw.num_attention_heads) =>
            {
                raw.hidden_size / raw.num_attention_heads
            }
            None => {
                let Raw { hidden_size, num_attention_heads, .. } = raw;
                let message = format!(
                    "hidden_size {hidden_size} is no multiple of num_attention_heads {num_attention_heads}"
                );
                return Err(self.wrong(message));
            }
        };
        let eos = [&raw.eos_token_id, &generation.eos_token_id];
        let first = "model.layers.0.self_attn";
        Ok(Config {
            family: self.family,
            hidden: raw.hidden_size,
            heads: raw.num_attention_heads,
            kv_heads: self.kv_heads()?,
            head_dim,
            intermediate: raw.intermediate_size,
            vocab: raw.vocab_size,
            rms_eps: raw.rms_norm_eps.unwrap_or(if self.family == Family::Phi3 { 1e-5 } else { 1e-6 }),
            layers: self.layers(head_dim)?,
            ropes: vec![self.rope(head_dim)?],
            context: raw.max_position_embeddings,
            tied_embeddings: raw.tie_word_embeddings.unwrap_or(!weights.has("lm_head.weight")),
            attention_bias: ["q_proj", "qkv_proj"].iter().any(|p| weights.has(&format!("{first}.{p}.bias"))),
            bos: raw.bos_token_id.as_ref().and_then(|ids| ids.tokens().next()),
            eos: eos.into_iter().flatten().flat_map(Ids::tokens).collect(),
        })
    }

    fn kv_heads(&self) -> Result<usize> {
        match (self.raw.num_key_value_heads, self.family) {
            (Some(n), _) => Ok(n),
            (None, Family::Llama | Family::Phi3) => Ok(self.raw.num_attention_heads),
            (None, _) => Err(self.wrong("num_key_value_heads is missing".into())),
        }
    }

    fn layers(&self, head_dim: usize) -> Result<Vec<LayerSpec>> {
        let layer = LayerSpec { qk_norm: self.family.has_qk_norm(), ..LayerSpec::llama(head_dim) };
        let windows = self.windows(checked_layers(self.path, self.raw.num_hidden_layers)?)?;
        Ok(windows.into_iter().map(|window| LayerSpec { window, ..layer.clone() }).collect())
    }

    /// The sliding window of each of `layers` layers.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>> {
        let raw = self.raw;
        // In Qwen's models only some layers have the window, and a flag turns it on.
        let qwen = matches!(self.family, Family::Qwen2 | Family::Qwen3);
        let size = match (self.family, raw.sliding_window) {
            (Family::Llama, _) => None,
            (Family::Mistral, None) => Some(4096),
            _ if qwen && raw.use_sliding_window != Some(true) => None,
            (_, None) if qwen => Some(4096),
            (_, window) => window.flatten(),
        };
        if size.is_none() || !qwen {
            return Ok(vec![size; layers]);
        }
        let Some(types) = &raw.layer_types else {
            let first = raw.max_window_layers.unwrap_or(28);
            return Ok((0..layers).map(|layer| size.filter(|_| layer >= first)).collect());
        };
        if types.len() != layers {
            let message = format!("layer_types has {} entries for {layers} layers", types.len());
            return Err(self.wrong(message));
        }
        let window = |kind: &String| match kind.as_str() {
            "full_attention" => Ok(None),
            "sliding_attention" => Ok(size),
            other => Err(self.wrong(format!(
                "layer_types: '{other}' is not supported; supported are full_attention and sliding_attention"
            ))),
        };
        types.iter().map(window).collect()
    }

    fn rope(&self, head_dim: usize) -> Result<RopeSpec> {
        let raw = self.raw;
        let rope = raw.rope_scaling.as_ref().or(raw.rope_parameters.as_ref()).cloned().unwrap_or_default();
        if rope.full_attention.is_some() || rope.sliding_attention.is_some() {
            return Err(self.wrong("rope parameters that differ by layer are not supported".into()));
        }
        let partial = rope.partial_rotary_factor.or(raw.partial_rotary_factor).unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(self.wrong(format!("partial_rotary_factor is {partial}, not above 0 and at most 1")));
        }
        Ok(RopeSpec {
            theta: rope.rope_theta.or(raw.rope_theta).unwrap_or(10_000.0),
            rotary_dim: (head_dim as f64 * partial) as usize,
            scaling: self.scaling(rope)?,
        })
    }

    fn scaling(&self, rope: RawRope) -> Result<RopeScaling> {
        let kind = rope.rope_type.as_deref().or(rope.r#type.as_deref()).unwrap_or("default");
        let need = |name: &str, value: Option<f64>| {
            value.ok_or_else(|| self.wrong(format!("the rope scaling '{kind}' has no {name}")))
        };
        match (kind, self.family) {
            ("default", _) => Ok(RopeScaling::None),
            ("linear", _) => Ok(RopeScaling::Linear { factor: need("factor", rope.factor)? }),
            ("llama3", _) => Ok(RopeScaling::Llama3 {
                factor: need("factor", rope.factor)?,
                low_freq_factor: need("low_freq_factor", rope.low_freq_factor)?,
                high_freq_factor: need("high_freq_factor", rope.high_freq_factor)?,
                original_context: rope
                    .original_max_position_embeddings
                    .unwrap_or(self.raw.max_position_embeddings),
            }),
            // Early Phi-3 files write "su" or "yarn" for what is LongRoPE.
            ("longrope" | "su", _) | ("yarn", Family::Phi3) => self.longrope(kind, &rope),
            _ => Err(self.wrong(format!(
                "the rope scaling '{kind}' is not supported; supported are default, linear, llama3, longrope"
            ))),
        }
    }

    fn longrope(&self, kind: &str, rope: &RawRope) -> Result<RopeScaling> {
        let raw = self.raw;
        let factors = |name: &str, values: &Option<Vec<f64>>| {
            values.clone().ok_or_else(|| self.wrong(format!("the rope scaling '{kind}' has no {name}")))
        };
        // Phi-3 keeps the original context beside the rope parameters, and that one counts; 4096 is its
        // class's default.
        let default = if self.family == Family::Phi3 { 4096 } else { raw.max_position_embeddings };
        let original =
            raw.original_max_position_embeddings.or(rope.original_max_position_embeddings).unwrap_or(default);
        let scale = rope.factor.unwrap_or(raw.max_position_embeddings as f64 / original.max(1) as f64);
        Ok(RopeScaling::LongRope {
            short: factors("short_factor", &rope.short_factor)?,
            long: factors("long_factor", &rope.long_factor)?,
            original_context: original,
            attention_factor: rope
                .attention_factor
                .unwrap_or_else(|| longrope_attention_factor(scale, original)),
        })
    }
}
