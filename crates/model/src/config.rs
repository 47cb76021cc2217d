//! A model's configuration, resolved once from what its files say.
//!
//! The raw forms, GGUF metadata and Hugging Face's `config.json`, are read in the modules below; everything
//! else in the program sees only [`Config`], whose values are checked against each other.

mod gguf;
mod hf;

use std::path::Path;

use serde::Serialize;

use crate::error::{ModelError, Result};

/// A family of models; they differ by data, not by code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Family {
    /// Llama 1 to 3.3 and everything of the same architecture (SmolLM2, TinyLlama; Mistral as GGUF).
    Llama,
    /// Mistral v0.1 to v0.3.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Phi-3 and Phi-4.
    Phi3,
}

/// A model's resolved configuration. All counts are checked: none is zero, `heads` is a multiple of
/// `kv_heads`, `rope.rotary_dim` is even and at most `head_dim`, factors are finite and positive and as many
/// as they must be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// The family.
    pub family: Family,
    /// Transformer layers (`num_hidden_layers`).
    pub layers: usize,
    /// Width of the hidden state (`hidden_size`).
    pub hidden: usize,
    /// Query heads (`num_attention_heads`).
    pub heads: usize,
    /// Key and value heads (`num_key_value_heads`).
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the feed-forward layer (`intermediate_size`).
    pub intermediate: usize,
    /// Rows of the embedding (`vocab_size`).
    pub vocab: usize,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// A query at position p sees the keys at positions in (p − window, p], itself included; `None`: all up
    /// to p. Windows of at least `context` are resolved to `None`. See [`Config::window`].
    pub sliding_window: Option<usize>,
    /// The first layer that has the sliding window; layers before it see everything. 0 but for some Qwen2.
    pub sliding_from_layer: usize,
    /// Longest sequence the model was made for, in tokens.
    pub context: usize,
    /// Whether the output projection is the embedding matrix (no `lm_head.weight` is to be read).
    pub tied_embeddings: bool,
    /// Whether the first layer's query projection, fused or not, has a bias in the file.
    pub attention_bias: bool,
    /// The token that begins a sequence, if the files name one. Whether prompts get it is the tokenizer's
    /// rule.
    pub bos: Option<u32>,
    /// Tokens that end an answer, ascending, without duplicates; may be empty.
    pub eos: Vec<u32>,
}

/// Rotary position embedding: pairs (i, i + rotary_dim/2) of a head are rotated by position × frequency,
/// frequency being theta^(−2i/rotary_dim), scaled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading values of a head that are rotated; the others pass.
    pub rotary_dim: usize,
    /// How frequencies are scaled.
    pub scaling: RopeScaling,
}

/// Scaling of the rotary frequencies.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RopeScaling {
    /// As they are.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// At least 1 in practice.
        factor: f64,
    },
    /// Llama 3.1: by wavelength, long ones divided by `factor`, short ones kept, interpolated between.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled whole.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context of the pretraining, in tokens.
        original_context: usize,
    },
    /// Phi-3: frequency i is divided by `short[i]`, or by `long[i]` once the sequence is longer than
    /// `original_context`; cosine and sine are multiplied by `attention_factor`.
    LongRope {
        /// `rotary_dim / 2` divisors up to `original_context`.
        short: Vec<f64>,
        /// `rotary_dim / 2` divisors beyond `original_context`.
        long: Vec<f64>,
        /// Context of the pretraining, in tokens.
        original_context: usize,
        /// Multiplies cosine and sine, for both lengths.
        attention_factor: f64,
    },
    /// GGUF's `rope_freqs.weight`: frequency i is divided by value i of `rotary_dim / 2`.
    Factors(Vec<f32>),
}

impl Config {
    /// The sliding window of `layer`, in positions, the query's own included; `None` if it sees all before
    /// it.
    #[must_use]
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| layer >= self.sliding_from_layer)
    }

    /// The configuration as canonical bytes: JSON with the fields in their declared order. Equal
    /// configurations give equal bytes, and whatever changes a model's results changes them; they go into the
    /// model's fingerprint.
    #[must_use]
    pub fn canonical_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers, strings and lists always serialise")
    }

    /// Checks everything that the type's documentation promises; `path` is the file to name.
    pub(crate) fn validated(mut self, path: &Path) -> Result<Self> {
        self.sliding_window = self.sliding_window.filter(|w| *w < self.context);
        self.eos.retain(|&id| (id as usize) < self.vocab);
        self.eos.sort_unstable();
        self.eos.dedup();
        let check = Check(path);
        check.sizes(&self)?;
        check.heads(&self)?;
        check.rope(&self)?;
        if !(self.rms_eps.is_finite() && self.rms_eps > 0.0 && self.rms_eps < 0.1) {
            return Err(
                check.wrong(format!("the RMS norm's epsilon is {}, not between 0 and 0.1", self.rms_eps))
            );
        }
        if let Some(0) = self.sliding_window {
            return Err(check.wrong("sliding_window is 0".into()));
        }
        if let Some(bos) = self.bos.filter(|&id| id as usize >= self.vocab) {
            return Err(
                check.wrong(format!("the BOS token {bos} lies outside the vocabulary of {}", self.vocab))
            );
        }
        Ok(self)
    }
}

/// The checks of [`Config::validated`], with the file that their errors name.
struct Check<'a>(&'a Path);

impl Check<'_> {
    fn wrong(&self, message: String) -> ModelError {
        ModelError::Config { path: self.0.to_owned(), message }
    }

    /// Bounds far above every model there is; products of two of these fit in 64 bits with ease.
    fn sizes(&self, c: &Config) -> Result<()> {
        for (name, value, max) in [
            ("the number of layers", c.layers, 1 << 12),
            ("the hidden size", c.hidden, 1 << 20),
            ("the number of attention heads", c.heads, 1 << 14),
            ("the number of key-value heads", c.kv_heads, 1 << 14),
            ("the head dimension", c.head_dim, 1 << 14),
            ("the intermediate size", c.intermediate, 1 << 22),
            ("the vocabulary size", c.vocab, 1 << 24),
            ("the context length", c.context, 1 << 30),
        ] {
            if value == 0 || value > max {
                return Err(self.wrong(format!("{name} is {value}, not between 1 and {max}")));
            }
        }
        Ok(())
    }

    fn heads(&self, c: &Config) -> Result<()> {
        if !c.heads.is_multiple_of(c.kv_heads) {
            let Config { heads, kv_heads, .. } = c;
            return Err(
                self.wrong(format!("{heads} attention heads are no multiple of {kv_heads} key-value heads"))
            );
        }
        let (dim, head) = (c.rope.rotary_dim, c.head_dim);
        if dim == 0 || dim > head || !dim.is_multiple_of(2) {
            return Err(
                self.wrong(format!("the rotary dimension is {dim}, not even and between 2 and {head}"))
            );
        }
        Ok(())
    }

    fn rope(&self, c: &Config) -> Result<()> {
        self.positive("rope_theta", &[c.rope.theta])?;
        let half = c.rope.rotary_dim / 2;
        match &c.rope.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => self.positive("the rope factor", &[*factor]),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                self.positive("a rope factor", &[*factor, *low_freq_factor, *high_freq_factor])?;
                self.original(*original_context)?;
                if low_freq_factor >= high_freq_factor {
                    let message =
                        format!("low_freq_factor {low_freq_factor} is not below {high_freq_factor}");
                    return Err(self.wrong(message));
                }
                Ok(())
            }
            RopeScaling::LongRope { short, long, original_context, attention_factor } => {
                self.positive("the rope attention factor", &[*attention_factor])?;
                self.original(*original_context)?;
                self.count("short rope factors", short.len(), half)?;
                self.count("long rope factors", long.len(), half)?;
                self.positive("a short rope factor", short)?;
                self.positive("a long rope factor", long)
            }
            RopeScaling::Factors(factors) => {
                self.count("rope factors", factors.len(), half)?;
                self.positive("a rope factor", &factors.iter().map(|&f| f.into()).collect::<Vec<_>>())
            }
        }
    }

    fn original(&self, context: usize) -> Result<()> {
        if context == 0 || context > 1 << 30 {
            return Err(self.wrong(format!("the rope scaling's original context is {context}")));
        }
        Ok(())
    }

    fn count(&self, what: &str, found: usize, expected: usize) -> Result<()> {
        if found != expected {
            return Err(self.wrong(format!("there are {found} {what}, expected {expected}")));
        }
        Ok(())
    }

    fn positive(&self, what: &str, values: &[f64]) -> Result<()> {
        match values.iter().find(|v| !(v.is_finite() && **v > 0.0)) {
            Some(v) => Err(self.wrong(format!("{what} is {v}, not a positive number"))),
            None => Ok(()),
        }
    }
}

/// LongRoPE's factor on cosine and sine for a context stretched from `original` to `context` tokens.
///
/// √(1 + ln(scale) / ln(original)), <https://arxiv.org/abs/2402.13753>; 1 where nothing is stretched.
fn longrope_attention_factor(scale: f64, original: usize) -> f64 {
    if scale <= 1.0 || original < 2 { 1.0 } else { (1.0 + scale.ln() / (original as f64).ln()).sqrt() }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
