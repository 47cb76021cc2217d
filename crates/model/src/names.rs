//! Hugging Face's parameter names and ggml's.

/// ggml's name for Hugging Face's parameter `name`; `None` if it has none.
///
/// `model.layers.3.self_attn.q_proj.weight` becomes `blk.3.attn_q.weight`. Phi-3's `mlp.gate_up_proj` is
/// ggml's `ffn_up`, which then holds gate over up: which of the two a file has is told by the presence of
/// `ffn_gate`.
pub(crate) fn ggml_name(name: &str) -> Option<String> {
    let whole = match name {
        "model.embed_tokens.weight" => Some("token_embd.weight"),
        "model.norm.weight" => Some("output_norm.weight"),
        "lm_head.weight" => Some("output.weight"),
        _ => None,
    };
    if let Some(whole) = whole {
        return Some(whole.to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    let (module, kind) = rest.rsplit_once('.')?;
    if !matches!(kind, "weight" | "bias") {
        return None;
    }
    let own = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{own}.{kind}"))
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
            ("model.layers.3.mlp.gate_up_proj.weight", "blk.3.ffn_up.weight"),
            ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
        ] {
            assert_eq!(ggml_name(hf).as_deref(), Some(ggml));
        }
        for none in
            ["", "model.layers.x.mlp.up_proj.weight", "model.layers.1.mlp.weight", "model.layers.1", "blk.0"]
        {
            assert_eq!(ggml_name(none), None, "{none}");
        }
    }
}
