//! Families of models, and what all models of one have in common.

use refrain_kernels::Activation;
use serde::Serialize;
use serde_json::{Value, json};

use super::layer::{BranchNorms, LayerSpec, QkNorm};

/// A family of models; they differ by data, not by code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Family {
    /// Llama 1 to 3.3 and all models of that architecture (SmolLM2, TinyLlama; Mistral and Mixtral as GGUF).
    Llama,
    /// Mistral v0.1 to v0.3, Mistral Small 3.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Qwen3, mixtures of experts.
    Qwen3Moe,
    /// Phi-3 and Phi-4.
    Phi3,
    /// Gemma 3, its text part.
    Gemma3,
    /// SmolLM3.
    SmolLm3,
    /// OLMo 2.
    Olmo2,
}

impl Family {
    /// Names of the supported families in `config.json`, for error messages.
    pub(super) const IN_CONFIG: &str =
        "llama, mistral, mistral3, qwen2, qwen3, qwen3_moe, phi3, gemma3, gemma3_text, smollm3, olmo2";

    /// Names of the supported families in GGUF files, for error messages.
    pub(super) const IN_GGUF: &str =
        "llama, mistral, mistral3, qwen2, qwen3, qwen3moe, phi3, gemma3, smollm3, olmo2";

    /// The family that `config.json`'s `model_type` or GGUF's `general.architecture` names.
    pub(super) fn named(name: &str) -> Option<Family> {
        Some(match name {
            // Mistral's own converter to GGUF writes `llama`.
            "llama" => Family::Llama,
            "mistral" | "mistral3" => Family::Mistral,
            "qwen2" => Family::Qwen2,
            "qwen3" => Family::Qwen3,
            "qwen3_moe" | "qwen3moe" => Family::Qwen3Moe,
            "phi3" => Family::Phi3,
            "gemma3_text" | "gemma3" => Family::Gemma3,
            "smollm3" => Family::SmolLm3,
            "olmo2" => Family::Olmo2,
            _ => return None,
        })
    }

    /// A layer without a window, with the first rope, as the family has it.
    pub(super) fn layer(self, head_dim: usize) -> LayerSpec {
        let llama = LayerSpec::llama(head_dim);
        match self {
            Family::Llama | Family::Mistral | Family::Qwen2 | Family::Phi3 | Family::SmolLm3 => llama,
            Family::Qwen3 | Family::Qwen3Moe => LayerSpec { qk_norm: QkNorm::Head, ..llama },
            Family::Gemma3 => LayerSpec {
                norms: BranchNorms::PrePost,
                activation: Activation::GeluTanh,
                qk_norm: QkNorm::Head,
                ..llama
            },
            Family::Olmo2 => LayerSpec { norms: BranchNorms::Post, qk_norm: QkNorm::AllHeads, ..llama },
        }
    }

    /// What is added to the weights of RMS norms in safetensors: Gemma's norms multiply by 1 + weight. GGUF files hold the sum.
    pub(crate) fn norm_offset(self) -> f32 {
        if self == Family::Gemma3 { 1.0 } else { 0.0 }
    }

    /// Factor of the embeddings of `hidden` values.
    pub(super) fn embedding_scale(self, hidden: usize) -> f32 {
        if self == Family::Gemma3 { (hidden as f32).sqrt() } else { 1.0 }
    }

    /// Every how many layers one is of another kind, where the files do not say it: SmolLM3's has no rope, Gemma's no window.
    pub(super) fn pattern(self) -> Option<usize> {
        match self {
            Family::SmolLm3 => Some(4),
            Family::Gemma3 => Some(6),
            _ => None,
        }
    }

    /// Defaults of transformers' class for fields of `config.json` that published files leave out.
    pub(super) fn defaults(self) -> Value {
        match self {
            Family::Gemma3 => json!({
                "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                "query_pre_attn_scalar": 256.0, "sliding_window": 4096, "tie_word_embeddings": true,
            }),
            Family::SmolLm3 => json!({"rope_theta": 2e6, "tie_word_embeddings": true}),
            Family::Qwen3 => json!({"head_dim": 128}),
            Family::Qwen3Moe => {
                json!({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
            }
            Family::Phi3 | Family::Olmo2 => json!({"rms_norm_eps": 1e-5}),
            _ => json!({}),
        }
    }
}
