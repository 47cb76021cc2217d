//! A model's configuration, resolved once from what its files say.
//!
//! The raw forms, GGUF metadata and Hugging Face's `config.json`, are read in the modules below; everything
//! else in the program sees only [`Config`], whose values are checked against each other.

mod checks;
mod family;
mod gguf;
mod hf;
mod layer;
mod yarn;

use serde::Serialize;

pub(crate) use checks::MAX_VOCABULARY;
pub use family::Family;
pub(crate) use gguf::END_TOKENS;
pub use layer::{BranchNorms, ExpertSpec, LayerSpec, QkNorm};

/// A model's resolved configuration. All counts are checked: none is zero, `heads` is a multiple of
/// `kv_heads`, every layer's rope exists, every `rotary_dim` is even and at most `head_dim`, factors are finite and
/// positive and as many as they must be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// The family.
    pub family: Family,
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
    /// Factor of the embeddings; 1 but for Gemma, whose is the root of `hidden`.
    pub embedding_scale: f32,
    /// The bound c of the logits x, which become c · tanh(x / c), if there is one (`final_logit_softcapping`).
    pub logit_softcap: Option<f32>,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// One entry for each transformer layer, `num_hidden_layers` of them.
    pub layers: Vec<LayerSpec>,
    /// The distinct rotary embeddings, to which [`LayerSpec::rope`] points. All rotate equally many values of a head.
    pub ropes: Vec<RopeSpec>,
    /// Longest sequence the model was made for, in tokens. YaRN stretches it beyond what the files say, if they say the original one.
    pub context: usize,
    /// Whether the output projection is the embedding matrix (no `lm_head.weight` is to be read).
    pub tied_embeddings: bool,
    /// Whether the first layer's query projection, fused or not, has a bias in the file.
    pub attention_bias: bool,
    /// The token that begins a sequence, if the files name one. The tokenizer decides whether prompts get it.
    pub bos: Option<u32>,
    /// Tokens that end an answer, ascending, without duplicates; may be empty.
    pub eos: Vec<u32>,
}

/// Rotary position embedding: pairs (i, i + rotary_dim/2) of a head are rotated by position × frequency,
/// frequency being theta^(−2i/rotary_dim), scaled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RopeSpec {
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
    /// No rotation at all: cosine 1 and sine 0 at every position (SmolLM3's layers without rope).
    NoRope,
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
    /// YaRN: frequency i is divided by `divisors[i]` and cosine and sine are multiplied by `attention_factor`, at every length.
    Yarn {
        /// `rotary_dim / 2` divisors.
        divisors: Vec<f64>,
        /// Multiplies cosine and sine.
        attention_factor: f64,
        /// Tokens of the stretched context, which [`Config::context`] is at least: the fingerprint has it from there.
        #[serde(skip)]
        context: usize,
    },
    /// GGUF's `rope_freqs.weight`: frequency i is divided by value i of `rotary_dim / 2`.
    Factors(Vec<f32>),
}

impl Config {
    /// Number of transformer layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The configuration as canonical bytes: JSON with the fields in their declared order. Equal
    /// configurations give equal bytes, and whatever changes a model's results changes them; they go into the
    /// model's fingerprint.
    #[must_use]
    pub fn canonical_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers, strings and lists always serialise")
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
