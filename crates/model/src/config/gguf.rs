//! The configuration in a GGUF file's metadata.
//!
//! Keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>

use super::checks::checked_layers;
use super::yarn::Yarn;
use super::{Config, ExpertSpec, Family, LayerSpec, RopeScaling, RopeSpec, longrope_attention_factor};
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;
use crate::quant::dequantize;

/// Tokens that end a turn in the supported families' chat templates. Their text alone decides: files give some of them the type of ordinary
/// text or of added tokens, and no word of these vocabularies is spelled so.
pub(crate) const END_TOKENS: [&str; 7] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
];
/// Layers of the one Gemma 3 whose attention is scaled by `hidden / heads` in place of the head dimension; files do not say it.
const GEMMA3_27B_LAYERS: usize = 62;
/// The token embedding, whose rows are the vocabulary.
const EMBEDDING: &str = "token_embd.weight";

impl Config {
    /// The configuration of a GGUF file.
    ///
    /// # Errors
    /// [`ModelError::Architecture`]; [`ModelError::KeyMissing`] and [`ModelError::KeyType`] naming the key;
    /// [`ModelError::Config`] for values that contradict each other.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let architecture = gguf.get_str("general.architecture")?;
        let family = Family::named(architecture).ok_or_else(|| ModelError::Architecture {
            path: gguf.path().to_owned(),
            architecture: architecture.to_owned(),
            supported: Family::IN_GGUF,
        })?;
        Resolver { gguf, architecture }.resolve(family)?.validated(gguf.path())
    }
}

/// Reads the keys of one architecture.
struct Resolver<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl Resolver<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn size(&self, name: &str) -> Result<usize> {
        Ok(self.gguf.get_u32(&self.key(name))? as usize)
    }

    fn opt_size(&self, name: &str) -> Result<Option<usize>> {
        Ok(self.gguf.opt_u32(&self.key(name))?.map(|v| v as usize))
    }

    fn opt_number(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.gguf.opt_f32(&self.key(name))?.map(shortest))
    }

    fn wrong(&self, message: String) -> ModelError {
        ModelError::Config { path: self.gguf.path().to_owned(), message }
    }

    fn resolve(&self, family: Family) -> Result<Config> {
        let gguf = self.gguf;
        let (hidden, heads) = (self.size("embedding_length")?, self.size("attention.head_count")?);
        let context = self.size("context_length")?;
        let head_dim = match self.opt_size("attention.key_length")? {
            Some(dim) => dim,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(
                    self.wrong(format!("embedding_length {hidden} is no multiple of head_count {heads}"))
                );
            }
        };
        if let Some(values) = self.opt_size("attention.value_length")?.filter(|v| *v != head_dim) {
            return Err(
                self.wrong(format!("keys of {head_dim} and values of {values} a head are not supported"))
            );
        }
        let (embedding, ..) = gguf.tensor(EMBEDDING)?;
        let &[vocab, _] = embedding.shape.as_slice() else {
            return Err(
                self.wrong(format!("{EMBEDDING} has shape {:?}, not two dimensions", embedding.shape))
            );
        };
        self.check_attention(family)?;
        let layers = checked_layers(gguf.path(), self.size("block_count")?)?;
        let theta = self.opt_number("rope.freq_base")?.unwrap_or(10_000.0);
        let rotary_dim = self.opt_size("rope.dimension_count")?.unwrap_or(head_dim);
        let rope = RopeSpec { theta, rotary_dim, scaling: self.scaling(context, theta, rotary_dim)? };
        let has = |name: &str| gguf.tensors().contains_key(name);
        Ok(Config {
            family,
            hidden,
            heads,
            kv_heads: self.opt_size("attention.head_count_kv")?.unwrap_or(heads),
            head_dim,
            // Mixtures of experts may have no dense layer.
            intermediate: match (self.opt_size("feed_forward_length")?, self.experts(family)?) {
                (None, Some(experts)) => experts.intermediate,
                _ => self.size("feed_forward_length")?,
            },
            vocab,
            embedding_scale: family.embedding_scale(hidden),
            logit_softcap: self.opt_number("final_logit_softcapping")?.map(|cap| cap as f32),
            rms_eps: gguf.get_f32(&self.key("attention.layer_norm_rms_epsilon"))?,
            layers: self.layers(family, layers, (hidden, heads, head_dim))?,
            ropes: self.ropes(family, rope)?,
            context,
            tied_embeddings: !has("output.weight"),
            attention_bias: has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias"),
            bos: gguf.opt_u32("tokenizer.ggml.bos_token_id")?,
            eos: self.eos()?,
        })
    }

    /// Refuses attention that the decoder does not compute.
    fn check_attention(&self, family: Family) -> Result<()> {
        if self.opt_number("attention.temperature_scale")?.is_some_and(|scale| scale != 0.0) {
            let key = self.key("attention.temperature_scale");
            let message =
                format!("'{key}' scales queries by their position (Ministral 3), which is not supported");
            return Err(self.wrong(format!("{message}; Mistral Small up to 3.2 has no such key")));
        }
        if family == Family::Olmo2 && self.opt_size("attention.sliding_window")?.is_some_and(|w| w > 0) {
            let key = self.key("attention.sliding_window");
            let message = format!(
                "'{key}' gives some layers a window and a rope of their own (OLMo 3), which is not supported"
            );
            return Err(self.wrong(format!("{message}; take an OLMo 2 model")));
        }
        Ok(())
    }

    fn layers(
        &self,
        family: Family,
        layers: usize,
        (hidden, heads, head_dim): (usize, usize, usize),
    ) -> Result<Vec<LayerSpec>> {
        let mut layer = LayerSpec {
            // Converters write 0 for none.
            window: self.opt_size("attention.sliding_window")?.filter(|w| *w > 0),
            experts: self.experts(family)?,
            ..family.layer(head_dim)
        };
        if let Some(scale) = self.opt_number("attention.scale")? {
            layer.attention_scale = scale as f32;
        } else if family == Family::Gemma3 && layers == GEMMA3_27B_LAYERS {
            layer.attention_scale = (hidden as f32 / heads as f32).sqrt().recip();
        }
        let Some(every) = family.pattern() else { return Ok(vec![layer; layers]) };
        let of = |index: usize| {
            let last = (index + 1).is_multiple_of(every);
            let window = layer.window.filter(|_| family != Family::Gemma3 || !last);
            let second = if family == Family::Gemma3 { !last } else { last };
            LayerSpec { window, rope: second.into(), ..layer.clone() }
        };
        Ok((0..layers).map(of).collect())
    }

    /// The rope of most layers, and that of the others where they differ.
    fn ropes(&self, family: Family, first: RopeSpec) -> Result<Vec<RopeSpec>> {
        let second = match family {
            Family::Gemma3 => RopeSpec {
                theta: self.opt_number("rope.freq_base_swa")?.unwrap_or(10_000.0),
                scaling: RopeScaling::None,
                ..first.clone()
            },
            Family::SmolLm3 => RopeSpec { scaling: RopeScaling::NoRope, ..first.clone() },
            _ => return Ok(vec![first]),
        };
        Ok(vec![first, second])
    }

    /// The experts of every layer, in mixtures.
    fn experts(&self, family: Family) -> Result<Option<ExpertSpec>> {
        let Some(count) = self.opt_size("expert_count")?.filter(|count| *count > 0) else { return Ok(None) };
        Ok(Some(ExpertSpec {
            count,
            top_k: self.size("expert_used_count")?,
            intermediate: match self.opt_size("expert_feed_forward_length")? {
                // Mixtral's experts are as wide as a dense layer would be.
                None if family == Family::Llama => self.size("feed_forward_length")?,
                _ => self.size("expert_feed_forward_length")?,
            },
            // No key says it; llama.cpp does so for these families.
            normalised: true,
        }))
    }

    fn scaling(&self, context: usize, theta: f64, rotary_dim: usize) -> Result<RopeScaling> {
        let kind = self.gguf.opt_str(&self.key("rope.scaling.type"))?.unwrap_or("none");
        let factor = match self.opt_number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            // The key of files before 2024.
            None => self.opt_number("rope.scale_linear")?,
        };
        let factors = self.factors("rope_freqs.weight")?;
        let long = self.factors("rope_factors_long.weight")?.zip(self.factors("rope_factors_short.weight")?);
        match (kind, factors, long) {
            ("none" | "longrope", None, Some((long, short))) => self.longrope(context, long, short),
            // Llama 3.1's converter computes the factors and says no more.
            ("none", Some(factors), None) => Ok(RopeScaling::Factors(factors)),
            ("none", None, None) => Ok(match factor.filter(|f| *f != 1.0 && *f != 0.0) {
                Some(factor) => RopeScaling::Linear { factor },
                None => RopeScaling::None,
            }),
            ("linear", None, None) => match factor {
                Some(factor) => Ok(RopeScaling::Linear { factor }),
                None => Err(self.wrong("the rope scaling 'linear' has no factor".into())),
            },
            ("yarn", None, None) => self.yarn(factor, theta, rotary_dim),
            (kind, factors, long) => {
                let has_tensors = factors.is_some() || long.is_some();
                let tensors = if has_tensors { " with the file's factor tensors" } else { "" };
                Err(self.wrong(format!(
                    "the rope scaling '{kind}'{tensors} is not supported; supported are none, linear, longrope, yarn: take a \
                     model with one of these"
                )))
            }
        }
    }

    fn yarn(&self, factor: Option<f64>, theta: f64, rotary_dim: usize) -> Result<RopeScaling> {
        let factor = factor.ok_or_else(|| self.wrong("the rope scaling 'yarn' has no factor".into()))?;
        let original_context = self.size("rope.scaling.original_context_length")?;
        // Converters to GGUF and llama.cpp do not agree on what these mean.
        for (name, plain) in [
            ("yarn_ext_factor", 1.0),
            ("yarn_attn_factor", 1.0),
            ("attn_factor", 1.0),
            ("yarn_log_multiplier", 0.0),
        ] {
            let key = format!("rope.scaling.{name}");
            if let Some(value) = self.opt_number(&key)?.filter(|value| *value != plain) {
                let key = self.key(&key);
                return Err(self.wrong(format!(
                    "'{key}' is {value}, and only {plain} is supported; take the model as a Hugging Face folder"
                )));
            }
        }
        let yarn = Yarn {
            theta,
            rotary_dim,
            factor,
            original_context,
            beta_fast: self.opt_number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.opt_number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            truncate: true,
            attention_factor: None,
            mscales: None,
        };
        yarn.scaling().map_err(|message| self.wrong(message))
    }

    fn longrope(&self, context: usize, long: Vec<f32>, short: Vec<f32>) -> Result<RopeScaling> {
        let original = self.size("rope.scaling.original_context_length")?;
        let attention_factor = match self.opt_number("rope.scaling.attn_factor")? {
            Some(factor) => factor,
            None => longrope_attention_factor(context as f64 / original.max(1) as f64, original),
        };
        let widen = |factors: Vec<f32>| factors.into_iter().map(shortest).collect();
        Ok(RopeScaling::LongRope {
            short: widen(short),
            long: widen(long),
            original_context: original,
            attention_factor,
        })
    }

    /// A vector of factors, if the file has it.
    fn factors(&self, name: &str) -> Result<Option<Vec<f32>>> {
        /// More than half of any head.
        const MAX: usize = 1 << 14;
        if !self.gguf.tensors().contains_key(name) {
            return Ok(None);
        }
        let (info, dtype, data) = self.gguf.tensor(name)?;
        let &[len @ 1..=MAX] = info.shape.as_slice() else {
            return Err(
                self.wrong(format!("{name} has shape {:?}, not one dimension up to {MAX}", info.shape))
            );
        };
        let mut out = vec![0.0; len];
        dequantize(dtype, data, &mut out)?;
        Ok(Some(out))
    }

    /// The tokens that end an answer: those the file names, and the known ones.
    fn eos(&self) -> Result<Vec<u32>> {
        let mut eos = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            eos.extend(self.gguf.opt_u32(&format!("tokenizer.ggml.{key}"))?);
        }
        let tokens = self.gguf.opt_strings("tokenizer.ggml.tokens")?.unwrap_or_default();
        let ends = (0..).zip(tokens).filter(|(_, token)| END_TOKENS.contains(&token.as_str()));
        eos.extend(ends.map(|(id, _)| id));
        Ok(eos)
    }
}

/// The f64 that is written as the f32 is: converters narrow what the original configuration writes in
/// decimal.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(value.into())
}
