//! Names of parameters: Hugging Face's, which the crate uses, and ggml's, which GGUF files use.
//!
//! ggml: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>; the tables follow llama.cpp's `tensor_mapping.py`.

use crate::config::BranchNorms;

/// Parameters outside of the layers.
const MODEL: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Modules of a layer that are named alike in every family. Phi-3's `mlp.gate_up_proj` is ggml's `ffn_up`, which then
/// holds gate over up: the presence of `ffn_gate` tells which of the two a file has.
const LAYER: [(&str, &str); 13] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
];

/// Matrices of an expert; ggml stores those of all experts of a layer as one tensor of three dimensions.
const EXPERT: [(&str, &str); 3] =
    [("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")];

/// Norms around the branches of a layer with norms before them: Hugging Face calls the MLP's norm after its place, behind
/// attention.
const PRE_NORMS: [(&str, &str); 1] = [("post_attention_layernorm", "ffn_norm")];

/// Norms around the branches of a layer with norms after them (Gemma 2 and 3, which have norms before them too; OLMo 2). The name that is the MLP's norm
/// elsewhere is the norm of attention's result here.
const POST_NORMS: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// ggml's name for Hugging Face's parameter `name` of a model whose layers have `norms`; `None` if it has none.
///
/// `model.layers.3.self_attn.q_proj.weight` becomes `blk.3.attn_q.weight`.
pub(crate) fn ggml_name(norms: BranchNorms, name: &str) -> Option<String> {
    let of = |table: &[(&str, &'static str)], name: &str| {
        table.iter().find(|(hf, _)| *hf == name).map(|(_, ggml)| *ggml)
    };
    if let Some(whole) = of(&MODEL, name) {
        return Some(whole.to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let (module, kind) = rest.rsplit_once('.')?;
    if !matches!(kind, "weight" | "bias") {
        return None;
    }
    let norms: &[(&str, &'static str)] = match norms {
        BranchNorms::Pre => &PRE_NORMS,
        BranchNorms::PrePost | BranchNorms::Post => &POST_NORMS,
    };
    let own = of(&LAYER, module).or_else(|| of(norms, module))?;
    Some(format!("blk.{layer}.{own}.{kind}"))
}

/// ggml's name for the tensor that holds Hugging Face's parameter `name` of an expert, and the expert's index in it.
///
/// `model.layers.3.mlp.experts.5.up_proj.weight` is part 5 of `blk.3.ffn_up_exps.weight`.
pub(crate) fn ggml_expert(name: &str) -> Option<(String, usize)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once(".mlp.experts.")?;
    let (expert, rest) = rest.split_once('.')?;
    let part = rest.strip_suffix(".weight")?;
    let (_, own) = EXPERT.iter().find(|(hf, _)| *hf == part)?;
    let layer: u32 = layer.parse().ok()?;
    Some((format!("blk.{layer}.{own}.weight"), expert.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_worlds() {
        for (hf, ggml) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
            ("model.layers.31.self_attn.q_proj.bias", "blk.31.attn_q.bias"),
            ("model.layers.3.self_attn.qkv_proj.weight", "blk.3.attn_qkv.weight"),
            ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
            ("model.layers.3.mlp.gate_up_proj.weight", "blk.3.ffn_up.weight"),
        ] {
            for norms in [BranchNorms::Pre, BranchNorms::PrePost] {
                assert_eq!(ggml_name(norms, hf).as_deref(), Some(ggml));
            }
        }
        for none in
            ["", "model.layers.x.mlp.up_proj.weight", "model.layers.1.mlp.weight", "model.layers.1", "blk.0"]
        {
            assert_eq!(ggml_name(BranchNorms::Pre, none), None, "{none}");
        }
    }

    #[test]
    fn an_expert_is_a_part_of_a_tensor() {
        let name = "model.layers.3.mlp.experts.5.up_proj.weight";
        assert_eq!(ggml_expert(name), Some(("blk.3.ffn_up_exps.weight".to_owned(), 5)));
        for none in
            ["model.layers.3.mlp.experts.x.up_proj.weight", "model.layers.3.mlp.experts.5.up_proj.bias", ""]
        {
            assert_eq!(ggml_expert(none), None, "{none}");
        }
    }

    #[test]
    fn a_norm_is_named_after_what_it_norms() {
        let name = |norms, norm: &str| ggml_name(norms, &format!("model.layers.3.{norm}_layernorm.weight"));
        let pre = |norm| name(BranchNorms::Pre, norm);
        assert_eq!(pre("post_attention").as_deref(), Some("blk.3.ffn_norm.weight"));
        assert_eq!((pre("pre_feedforward"), pre("post_feedforward")), (None, None));
        let both = |norm| name(BranchNorms::PrePost, norm);
        assert_eq!(both("post_attention").as_deref(), Some("blk.3.post_attention_norm.weight"));
        assert_eq!(both("pre_feedforward").as_deref(), Some("blk.3.ffn_norm.weight"));
        assert_eq!(both("post_feedforward").as_deref(), Some("blk.3.post_ffw_norm.weight"));
    }
}
