//! Hugging Face's `config.json` and `generation_config.json`, both of transformers 4 (`rope_theta`,
//! `rope_scaling`) and of transformers 5 (`rope_parameters`). Absent fields take the defaults of
//! transformers' own classes.

use std::path::Path;

use refrain_kernels::Activation;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::checks::checked_layers;
use super::yarn::Yarn;
use super::{Config, ExpertSpec, Family, LayerSpec, RopeScaling, RopeSpec, longrope_attention_factor};
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
    /// Gemma's name of `hidden_act`.
    hidden_activation: Option<String>,
    rope_theta: Option<f64>,
    /// The base of Gemma's layers with a window.
    rope_local_base_freq: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    partial_rotary_factor: Option<f64>,
    /// 0 for each layer without rope.
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: Option<usize>,
    /// Absent and null differ: Mistral's default is 4096, and null switches it off.
    #[serde(default, deserialize_with = "present")]
    sliding_window: Option<Option<usize>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    sliding_window_pattern: Option<usize>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<bool>,
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
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
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    truncate: Option<bool>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    /// Parameters of the layers without a window, where they differ by layer.
    full_attention: Option<Box<RawRope>>,
    /// Parameters of the layers with a window, where they differ by layer.
    sliding_attention: Option<Box<RawRope>>,
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

/// Kinds of models for pictures and text whose text part is of a supported family.
const WITH_PICTURES: [&str; 2] = ["gemma3", "mistral3"];

fn model_type(fields: &Map<String, Value>) -> String {
    fields.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned()
}

impl Config {
    /// The configuration of the model in `folder`, whose weights are `weights`.
    ///
    /// # Errors
    /// [`ModelError::Io`] if there is no `config.json`; [`ModelError::Architecture`]; [`ModelError::Config`].
    pub(crate) fn from_hf(folder: &Path, weights: &SafetensorsFolder) -> Result<Self> {
        let path = folder.join("config.json");
        let mut fields: Map<String, Value> = read_json(&path)?;
        let mut kind = model_type(&fields);
        // A model for pictures too describes its text part apart; what both parts share stands beside it.
        if let (true, Some(Value::Object(text))) =
            (WITH_PICTURES.contains(&kind.as_str()), fields.remove("text_config"))
        {
            kind = model_type(&text);
            fields.extend(text);
        }
        // The file of an unknown architecture may lack other fields, and the error should name the architecture.
        let Some(family) = Family::named(&kind) else {
            return Err(ModelError::Architecture { path, architecture: kind, supported: Family::IN_CONFIG });
        };
        // transformers 5 writes the name that mixtures of other families have.
        if let Some(count) = fields.remove("num_local_experts") {
            fields.entry("num_experts").or_insert(count);
        }
        if let Value::Object(defaults) = family.defaults() {
            for (name, default) in defaults {
                fields.entry(name).or_insert(default);
            }
        }
        let raw = Raw::deserialize(Value::Object(fields)).map_err(|e| ModelError::Config {
            path: path.clone(),
            message: format!("not the JSON that is expected: {e}"),
        })?;
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
        if raw.attn_logit_softcapping.is_some() || raw.use_bidirectional_attention == Some(true) {
            let message =
                "attn_logit_softcapping and use_bidirectional_attention are not supported; they must be null";
            return Err(self.wrong(message.into()));
        }
        if raw.quantization_config.is_some() {
            let message = "quantised safetensors (quantization_config) are not supported; \
                           take the model in BF16, or a GGUF file";
            return Err(self.wrong(message.into()));
        }
        let head_dim = match raw.head_dim {
            Some(dim) => dim,
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
            embedding_scale: self.family.embedding_scale(raw.hidden_size),
            logit_softcap: raw.final_logit_softcapping.map(|cap| cap as f32),
            rms_eps: raw.rms_norm_eps.unwrap_or(1e-6),
            layers: self.layers(head_dim)?,
            ropes: self.ropes(head_dim)?,
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
            (None, Family::Llama | Family::Phi3 | Family::Olmo2) => Ok(self.raw.num_attention_heads),
            (None, _) => Err(self.wrong("num_key_value_heads is missing".into())),
        }
    }

    fn layers(&self, head_dim: usize) -> Result<Vec<LayerSpec>> {
        let raw = self.raw;
        let mut layer = self.family.layer(head_dim);
        if let Some(name) = raw.hidden_activation.as_deref().or(raw.hidden_act.as_deref()) {
            layer.activation = match name {
                "silu" | "swish" => Activation::Silu,
                "gelu_pytorch_tanh" => Activation::GeluTanh,
                _ => {
                    let supported = "silu, gelu_pytorch_tanh";
                    return Err(self
                        .wrong(format!("hidden_act '{name}' is not supported; supported are {supported}")));
                }
            };
        }
        if let Some(scalar) = raw.query_pre_attn_scalar {
            layer.attention_scale = scalar.sqrt().recip() as f32;
        }
        let windows = self.windows(checked_layers(self.path, raw.num_hidden_layers)?)?;
        let of = |(index, window): (usize, Option<usize>)| LayerSpec {
            window,
            rope: self.second_rope(index, window.is_some()).into(),
            experts: self.experts(index),
            ..layer.clone()
        };
        Ok(windows.into_iter().enumerate().map(of).collect())
    }

    /// Whether a layer has the second of [`Resolver::ropes`].
    fn second_rope(&self, index: usize, windowed: bool) -> bool {
        match (self.family, &self.raw.no_rope_layers) {
            (Family::Gemma3, _) => windowed,
            (Family::SmolLm3, Some(rotated)) => rotated.get(index) == Some(&0),
            (Family::SmolLm3, None) => {
                let every = self.raw.no_rope_layer_interval.or(self.family.pattern());
                every.is_some_and(|every| every > 0 && (index + 1).is_multiple_of(every))
            }
            _ => false,
        }
    }

    /// The experts of a layer, where its MLP is a mixture.
    fn experts(&self, index: usize) -> Option<ExpertSpec> {
        let raw = self.raw;
        let count = raw.num_experts.filter(|count| self.family == Family::Qwen3Moe && *count > 0)?;
        let dense = raw.mlp_only_layers.as_ref().is_some_and(|dense| dense.contains(&index));
        let every = raw.decoder_sparse_step.unwrap_or(1);
        if dense || every == 0 || !(index + 1).is_multiple_of(every) {
            return None;
        }
        Some(ExpertSpec {
            count,
            top_k: raw.num_experts_per_tok.unwrap_or_default(),
            intermediate: raw.moe_intermediate_size.unwrap_or_default(),
            normalised: raw.norm_topk_prob.unwrap_or(false),
        })
    }

    /// The sliding window of each of `layers` layers.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>> {
        let raw = self.raw;
        // In some families only some layers have the window; Qwen's and SmolLM3's have a flag that turns it on.
        let flagged =
            matches!(self.family, Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe | Family::SmolLm3);
        let size = match (self.family, raw.sliding_window) {
            (Family::Llama | Family::Olmo2, _) => None,
            (Family::Mistral, None) => Some(4096),
            _ if flagged && raw.use_sliding_window != Some(true) => None,
            (_, None) if flagged => Some(4096),
            (_, window) => window.flatten(),
        };
        if size.is_none() || !(flagged || self.family == Family::Gemma3) {
            return Ok(vec![size; layers]);
        }
        let Some(types) = &raw.layer_types else {
            let every = raw.sliding_window_pattern.or(self.family.pattern()).filter(|every| *every > 0);
            let first = raw.max_window_layers.unwrap_or(28);
            let windowed = |layer: usize| match (self.family, every) {
                (Family::Gemma3, Some(every)) => !(layer + 1).is_multiple_of(every),
                (Family::SmolLm3, _) => self.second_rope(layer, false),
                (Family::Qwen3Moe, _) => true,
                _ => layer >= first,
            };
            return Ok((0..layers).map(|layer| size.filter(|_| windowed(layer))).collect());
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

    /// The rope of most layers, and that of the others where they differ.
    fn ropes(&self, head_dim: usize) -> Result<Vec<RopeSpec>> {
        let raw = self.raw;
        let mut rope =
            raw.rope_scaling.as_ref().or(raw.rope_parameters.as_ref()).cloned().unwrap_or_default();
        let (whole, windowed) = (rope.full_attention.take(), rope.sliding_attention.take());
        if (whole.is_some() || windowed.is_some()) && self.family != Family::Gemma3 {
            return Err(self.wrong("rope parameters that differ by layer are not supported".into()));
        }
        if let Some(whole) = whole {
            rope = *whole;
        }
        let first = self.rope(head_dim, rope)?;
        let second = match (self.family, windowed) {
            (Family::Gemma3, Some(windowed)) => self.rope(head_dim, *windowed)?,
            (Family::Gemma3, None) => RopeSpec {
                theta: raw.rope_local_base_freq.unwrap_or(10_000.0),
                scaling: RopeScaling::None,
                ..first.clone()
            },
            (Family::SmolLm3, _) => RopeSpec { scaling: RopeScaling::NoRope, ..first.clone() },
            _ => return Ok(vec![first]),
        };
        Ok(vec![first, second])
    }

    fn rope(&self, head_dim: usize, rope: RawRope) -> Result<RopeSpec> {
        let raw = self.raw;
        let partial = rope.partial_rotary_factor.or(raw.partial_rotary_factor).unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(self.wrong(format!("partial_rotary_factor is {partial}, not above 0 and at most 1")));
        }
        let theta = rope.rope_theta.or(raw.rope_theta).unwrap_or(10_000.0);
        let rotary_dim = (head_dim as f64 * partial) as usize;
        Ok(RopeSpec { theta, rotary_dim, scaling: self.scaling(rope, theta, rotary_dim)? })
    }

    fn scaling(&self, rope: RawRope, theta: f64, rotary_dim: usize) -> Result<RopeScaling> {
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
            ("yarn", _) => self.yarn(&rope, theta, rotary_dim),
            _ => Err(self.wrong(format!(
                "the rope scaling '{kind}' is not supported; supported are default, linear, llama3, longrope, yarn: take a model \
                 with one of these"
            ))),
        }
    }

    fn yarn(&self, rope: &RawRope, theta: f64, rotary_dim: usize) -> Result<RopeScaling> {
        let raw = self.raw;
        let original = rope.original_max_position_embeddings.or(raw.original_max_position_embeddings);
        let original = original.unwrap_or(raw.max_position_embeddings);
        // Zero is none, as in transformers.
        let given = |value: Option<f64>| value.filter(|value| *value != 0.0);
        let yarn = Yarn {
            theta,
            rotary_dim,
            factor: rope.factor.unwrap_or(raw.max_position_embeddings as f64 / original.max(1) as f64),
            original_context: original,
            beta_fast: given(rope.beta_fast).unwrap_or(32.0),
            beta_slow: given(rope.beta_slow).unwrap_or(1.0),
            truncate: rope.truncate.unwrap_or(true),
            attention_factor: rope.attention_factor,
            mscales: given(rope.mscale).zip(given(rope.mscale_all_dim)),
        };
        yarn.scaling().map_err(|message| self.wrong(message))
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
