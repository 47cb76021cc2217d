use std::path::PathBuf;

use refrain_kernels::Activation;
use serde_json::{Value, json};

use super::*;
use crate::error::Result;
use crate::files::ModelFiles;
use crate::gguf::Gguf;
use crate::testing::{GgufBuilder, TestFolder, real_model, tiny_gguf};

fn gguf(builder: &GgufBuilder) -> Result<Config> {
    Config::from_gguf(&Gguf::from_bytes("test.gguf", builder.build()).unwrap())
}

/// A small Llama's `config.json` with `changes` laid over it; null removes a field, `"null"` writes null.
fn hf_with(changes: Value, tensors: &[(&str, &[usize])], generation: Option<Value>) -> Result<Config> {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    });
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            Value::String(s) if s == "null" => config[key] = Value::Null,
            value => config[key] = value.clone(),
        }
    }
    let folder = TestFolder::new();
    folder.write("config.json", config.to_string());
    if let Some(generation) = generation {
        folder.write("generation_config.json", generation.to_string());
    }
    folder.write_safetensors("model.safetensors", tensors);
    ModelFiles::open(folder.path()).map(|files| files.config().clone())
}

fn hf(changes: Value) -> Result<Config> {
    hf_with(changes, &[("model.norm.weight", &[2])], None)
}

fn hf_error(changes: Value) -> String {
    hf(changes).unwrap_err().to_string()
}

#[test]
fn a_plain_llama() {
    let config = hf(json!({})).unwrap();
    let rope = RopeSpec { theta: 10_000.0, rotary_dim: 16, scaling: RopeScaling::None };
    let layer = LayerSpec {
        window: None,
        rope: 0,
        norms: BranchNorms::Pre,
        activation: Activation::Silu,
        qk_norm: QkNorm::None,
        experts: None,
        attention_scale: 0.25,
    };
    let expected = Config {
        family: Family::Llama,
        hidden: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        intermediate: 96,
        vocab: 256,
        embedding_scale: 1.0,
        logit_softcap: None,
        rms_eps: 1e-5,
        layers: vec![layer; 3],
        ropes: vec![rope],
        context: 512,
        tied_embeddings: true,
        attention_bias: false,
        bos: Some(1),
        eos: vec![2],
    };
    assert_eq!(config, expected);
    assert_eq!(config.canonical_bytes(), expected.canonical_bytes());
}

#[test]
fn qwen3_norms_its_heads() {
    let config = hf(json!({"model_type": "qwen3"})).unwrap();
    let layer = LayerSpec { qk_norm: QkNorm::Head, ..LayerSpec::llama(128) };
    assert_eq!((config.head_dim, &config.layers), (128, &vec![layer; 3]), "heads of 128 if nothing is said");
    let config = hf(json!({"model_type": "qwen3", "head_dim": 16})).unwrap();
    assert_eq!(config.layers[0].attention_scale, 0.25);
    let config = gguf(&tiny_gguf("qwen3").u32("qwen3.attention.key_length", 16)).unwrap();
    assert_eq!((config.family, config.head_dim), (Family::Qwen3, 16));
    assert!(config.layers.iter().all(|layer| layer.qk_norm == QkNorm::Head));
}

#[test]
fn layers_of_differing_kinds_are_checked_and_told_apart() {
    let config = hf(json!({})).unwrap();
    let far = RopeSpec { theta: 1e6, ..config.ropes[0].clone() };
    let check = |config: Config| config.validated(std::path::Path::new("config.json"));
    let two_ropes = Config { ropes: vec![config.ropes[0].clone(), far], ..config.clone() };
    type Change = fn(&mut LayerSpec);
    let changes: [Change; 6] = [
        |layer| layer.window = Some(16),
        |layer| layer.rope = 1,
        |layer| layer.norms = BranchNorms::PrePost,
        |layer| layer.activation = Activation::GeluTanh,
        |layer| layer.qk_norm = QkNorm::Head,
        |layer| layer.attention_scale = 0.5,
    ];
    for change in changes {
        let mut changed = two_ropes.clone();
        change(&mut changed.layers[1]);
        let checked = check(changed.clone()).unwrap();
        assert_eq!(checked, changed);
        assert_ne!(checked.canonical_bytes(), two_ropes.canonical_bytes());
    }
    let fails = |change: Change, part: &str| {
        let mut changed = two_ropes.clone();
        change(&mut changed.layers[2]);
        let message = check(changed).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    fails(|layer| layer.rope = 2, "rope 2 of 2");
    fails(|layer| layer.window = Some(0), "sliding_window is 0");
    fails(|layer| layer.attention_scale = f32::INFINITY, "the attention scale is inf");
    let mut mixed = two_ropes.clone();
    mixed.ropes[1].rotary_dim = 8;
    assert!(check(mixed).unwrap_err().to_string().contains("differ by layer"));
}

#[test]
fn what_the_tensors_tell() {
    let head: (&str, &[usize]) = ("lm_head.weight", &[2]);
    let bias: (&str, &[usize]) = ("model.layers.0.self_attn.q_proj.bias", &[2]);
    let config = hf_with(json!({}), &[head, bias], None).unwrap();
    assert!(!config.tied_embeddings && config.attention_bias);
    let config = hf_with(json!({"tie_word_embeddings": true}), &[head], None).unwrap();
    assert!(config.tied_embeddings && !config.attention_bias);
}

#[test]
fn end_tokens_come_from_both_files() {
    let eos = |ids: Value, generation: Value| {
        let tensors: [(&str, &[usize]); 1] = [("x", &[1])];
        hf_with(json!({"eos_token_id": ids}), &tensors, Some(generation)).unwrap().eos
    };
    assert_eq!(eos(json!(9), json!({"eos_token_id": [9, 3, 5]})), [3, 5, 9]);
    assert_eq!(eos(json!([4]), json!({})), [4]);
    assert_eq!(eos(json!("null"), json!({"eos_token_id": -1})), [0u32; 0]);
    assert_eq!(eos(json!([255, 256]), json!({"eos_token_id": 7})), [7, 255]);
}

#[test]
fn rope_of_both_styles() {
    let rope = |changes: Value| hf(changes).unwrap().ropes.remove(0);
    assert_eq!(rope(json!({"rope_theta": 5e5})).theta, 5e5);
    assert_eq!(rope(json!({"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}})).theta, 7e5);
    let linear = RopeScaling::Linear { factor: 2.5 };
    assert_eq!(rope(json!({"rope_scaling": {"type": "linear", "factor": 2.5}})).scaling, linear);
    let llama3 = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_type": "llama3", "rope_theta": 5e5});
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 32,
    };
    assert_eq!(rope(json!({"rope_scaling": llama3})).scaling, expected);
    assert_eq!(
        rope(json!({"rope_parameters": llama3})),
        RopeSpec { theta: 5e5, rotary_dim: 16, scaling: expected }
    );
}

#[test]
fn longrope_of_both_styles() {
    let factors = json!({"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]});
    let old = json!({"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": factors,
        "original_max_position_embeddings": 128, "num_key_value_heads": "null", "rms_norm_eps": null});
    let config = hf(old.clone()).unwrap();
    assert_eq!((config.ropes[0].rotary_dim, config.kv_heads, config.rms_eps), (12, 4, 1e-5));
    let RopeScaling::LongRope { short, long, original_context, attention_factor } = &config.ropes[0].scaling
    else {
        panic!("{:?}", config.ropes);
    };
    assert_eq!((short[1], long[5], *original_context), (1.1, 2.5, 128));
    assert!((attention_factor - (1.0 + 4f64.ln() / 128f64.ln()).sqrt()).abs() < 1e-12);

    let mut new = factors.clone();
    new["rope_type"] = "longrope".into();
    new["partial_rotary_factor"] = 0.75.into();
    new["original_max_position_embeddings"] = 128.into();
    let mut changes = json!({"model_type": "phi3", "rope_parameters": new, "rms_norm_eps": null,
        "original_max_position_embeddings": 128, "num_key_value_heads": null});
    assert_eq!(hf(changes.clone()).unwrap(), config);
    changes["rope_parameters"]["attention_factor"] = 1.5.into();
    let RopeScaling::LongRope { attention_factor, .. } = hf(changes).unwrap().ropes.remove(0).scaling else {
        panic!()
    };
    assert_eq!(attention_factor, 1.5);

    for kind in ["su", "yarn"] {
        let mut early = old.clone();
        early["rope_scaling"]["type"] = kind.into();
        assert_eq!(hf(early).unwrap(), config);
    }
    let mut short = old;
    short["rope_scaling"]["short_factor"] = json!([1.0]);
    assert!(hf_error(short).contains("1 short rope factors, expected 6"));
    assert_eq!(longrope_attention_factor(0.125, 4096), 1.0);
}

/// The numbers are those of transformers' formula, computed apart.
#[test]
fn yarn_of_both_kinds_of_files() {
    let check = |config: Config, expected: &[f64], factor: f64| {
        let RopeScaling::Yarn { divisors, attention_factor, .. } = &config.ropes[0].scaling else {
            panic!("{:?}", config.ropes)
        };
        assert_eq!(divisors.len(), expected.len());
        assert!(divisors.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{divisors:?}");
        assert!((attention_factor - factor).abs() < 1e-12, "{attention_factor}");
    };
    let plain = [1.0, 1.0, 1.0, 1.230_769_230_769_230_8, 1.6, 2.285_714_285_714_285_6, 4.0, 4.0];
    let rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096});
    let with = |changes: Value| {
        let mut rope = rope.clone();
        rope.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        hf(json!({"model_type": "qwen2", "max_position_embeddings": 16384, "rope_scaling": rope})).unwrap()
    };
    let attention = 1.138_629_436_111_989;
    check(with(json!({})), &plain, attention);
    check(with(json!({"factor": null, "beta_fast": 32, "beta_slow": 1})), &plain, attention);
    check(with(json!({"attention_factor": 1.25})), &plain, 1.25);
    let exact = [1.0, 1.0, 1.0, 1.0, 1.478_935_695_937_456_4, 3.832_579_023_316_618, 4.0, 4.0];
    let changes =
        json!({"beta_fast": 16, "beta_slow": 2, "truncate": false, "mscale": 0.7, "mscale_all_dim": 1.2});
    check(with(changes), &exact, 0.940_571_525_101_084_1);
    check(with(json!({"mscale": 0.7, "mscale_all_dim": 0})), &plain, attention);

    let file =
        tiny_gguf("qwen2").str("qwen2.rope.scaling.type", "yarn").f32("qwen2.rope.scaling.factor", 4.0);
    let file = file.u32("qwen2.rope.scaling.original_context_length", 128);
    check(gguf(&file).unwrap(), &[1.0, 1.6, 4.0, 4.0], attention);
    let file =
        file.f32("qwen2.rope.scaling.yarn_beta_fast", 2.0).f32("qwen2.rope.scaling.yarn_ext_factor", 1.0);
    check(gguf(&file).unwrap(), &[1.0, 1.0, 4.0, 4.0], attention);
}

/// Published copies with YaRN keep the original number; others have the stretched one already.
#[test]
fn yarn_stretches_the_context() {
    let rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let with = |context: usize, window: Value| {
        hf(json!({"model_type": "qwen2", "max_position_embeddings": context, "rope_scaling": rope, "max_window_layers": 0,
            "sliding_window": window, "use_sliding_window": !window.is_null()}))
        .unwrap()
    };
    for context in [32_768, 131_072] {
        assert_eq!(with(context, Value::Null).context, 131_072);
    }
    assert_eq!(with(32_768, json!(65_536)).layers[0].window, Some(65_536));
    let file =
        tiny_gguf("qwen2").str("qwen2.rope.scaling.type", "yarn").f32("qwen2.rope.scaling.factor", 2.5);
    let file = |original| file.clone().u32("qwen2.rope.scaling.original_context_length", original);
    assert_eq!(gguf(&file(128)).unwrap().context, 320);
    assert_eq!(gguf(&file(16)).unwrap().context, 128, "the file's own context is longer");
    let error = gguf(&file(u32::MAX)).unwrap_err().to_string();
    assert!(error.contains("the context length is 10737418238"), "{error}");
}

#[test]
fn sliding_windows() {
    let window = |changes: Value| {
        let config = hf(changes).unwrap();
        config.layers.iter().map(|layer| layer.window).collect::<Vec<_>>()
    };
    let mistral = json!({"model_type": "mistral", "sliding_window": 16});
    assert_eq!(window(mistral), [Some(16); 3]);
    assert_eq!(window(json!({"model_type": "mistral", "sliding_window": "null"})), [None; 3]);
    assert_eq!(window(json!({"model_type": "mistral", "max_position_embeddings": 8192})), [Some(4096); 3]);
    assert_eq!(window(json!({"model_type": "mistral"})), [None; 3], "the window holds the whole context");
    assert_eq!(window(json!({"model_type": "phi3", "sliding_window": 20})), [Some(20); 3]);
    assert_eq!(window(json!({"sliding_window": 20})), [None; 3], "Llama has none");
    let qwen = |changes: Value| {
        let mut all = json!({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": true});
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        all
    };
    assert_eq!(window(qwen(json!({"use_sliding_window": false}))), [None; 3]);
    assert_eq!(window(qwen(json!({"max_window_layers": 28}))), [None; 3]);
    assert_eq!(window(qwen(json!({"max_window_layers": 0}))), [Some(16); 3]);
    assert_eq!(window(qwen(json!({"max_window_layers": 2}))), [None, None, Some(16)]);
    let (full, sliding) = ("full_attention", "sliding_attention");
    assert_eq!(window(qwen(json!({"layer_types": [full, sliding, sliding]}))), [None, Some(16), Some(16)]);
    assert_eq!(window(qwen(json!({"layer_types": [full, full, full]}))), [None; 3]);
    assert_eq!(window(qwen(json!({"layer_types": [sliding, full, sliding]}))), [Some(16), None, Some(16)]);
    let qwen3 = |types: Value| qwen(json!({"model_type": "qwen3", "layer_types": types}));
    assert_eq!(window(qwen3(json!([full, sliding, full]))), [None, Some(16), None]);
    assert!(hf_error(qwen(json!({"layer_types": [sliding, full]}))).contains("2 entries for 3 layers"));
    assert!(hf_error(qwen3(json!([sliding, full, "chunked_attention"]))).contains("'chunked_attention'"));
    assert!(hf_error(json!({"model_type": "phi3", "sliding_window": 0})).contains("sliding_window is 0"));
}

#[test]
fn bad_hugging_face_configurations_are_errors() {
    let unknown = hf_error(json!({"model_type": "mamba", "hidden_size": null}));
    assert!(
        unknown.contains("'mamba'")
            && unknown.contains(
                "llama, mistral, mistral3, qwen2, qwen3, qwen3_moe, phi3, gemma3, gemma3_text, smollm3, olmo2"
            ),
        "{unknown}"
    );
    for (changes, part) in [
        (json!({"hidden_size": null}), "missing field `hidden_size`"),
        (json!({"hidden_size": 0}), "the hidden size is 0"),
        (json!({"num_attention_heads": 0}), "no multiple of num_attention_heads 0"),
        (json!({"num_attention_heads": 0, "head_dim": 16}), "the number of attention heads is 0"),
        (json!({"num_attention_heads": 5}), "no multiple of num_attention_heads 5"),
        (json!({"num_key_value_heads": 3}), "4 attention heads are no multiple of 3"),
        (json!({"num_key_value_heads": 0}), "key-value heads is 0"),
        (json!({"num_hidden_layers": 1_000_000}), "layers is 1000000"),
        (json!({"num_hidden_layers": -1}), "not the JSON that is expected"),
        (json!({"head_dim": 15}), "the rotary dimension is 15"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5"),
        (json!({"partial_rotary_factor": 0.01}), "the rotary dimension is 0"),
        (json!({"rms_norm_eps": 0}), "epsilon is 0"),
        (json!({"rope_theta": -1.0}), "rope_theta is -1"),
        (json!({"bos_token_id": 256}), "BOS token 256"),
        (json!({"hidden_act": "gelu"}), "hidden_act 'gelu'"),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "'dynamic' is not supported"),
        (json!({"rope_scaling": {"type": "yarn", "factor": 0.0}}), "the rope factor is 0"),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}),
            "original context is 0",
        ),
        (
            json!({"head_dim": 1u64 << 62, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "the rotary dimension is 4611686018427387904, above 16384",
        ),
        (json!({"rope_scaling": {"type": "linear"}}), "'linear' has no factor"),
        (json!({"rope_scaling": {"type": "linear", "factor": 0.0}}), "the rope factor is 0"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}), "differ by layer"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "quantization_config"),
        (json!({"model_type": "mistral", "num_key_value_heads": null}), "num_key_value_heads is missing"),
    ] {
        let message = hf_error(changes.clone());
        assert!(message.contains(part) && message.contains("config.json"), "{changes}: {message}");
    }
}

#[test]
fn a_plain_gguf() {
    let config = gguf(&tiny_gguf("llama")).unwrap();
    assert_eq!(config.family, Family::Llama);
    assert_eq!(
        (config.num_layers(), config.hidden, config.heads, config.kv_heads, config.head_dim),
        (2, 32, 4, 2, 8)
    );
    assert_eq!((config.intermediate, config.vocab, config.context, config.rms_eps), (64, 6, 128, 1e-5));
    assert_eq!(config.ropes, [RopeSpec { theta: 10_000.0, rotary_dim: 8, scaling: RopeScaling::None }]);
    assert!(config.tied_embeddings && !config.attention_bias && config.layers[1].window.is_none());
    // 5 is named; 2, <|im_end|>, is a control token; 4, <|end|>, ends answers though the file has it as ordinary text.
    assert_eq!((config.bos, config.eos.as_slice()), (Some(0), &[2, 4, 5][..]));

    assert_eq!(gguf(&tiny_gguf("mistral3")).unwrap().family, Family::Mistral);
    let more = tiny_gguf("qwen2").counting("output.weight", &[6, 32]).counting("blk.0.attn_q.bias", &[32]);
    let config = gguf(&more.u32("qwen2.attention.sliding_window", 16)).unwrap();
    assert!(config.family == Family::Qwen2 && !config.tied_embeddings && config.attention_bias);
    assert!(config.layers.iter().all(|layer| layer.window == Some(16) && layer.qk_norm == QkNorm::None));
}

#[test]
fn rope_scaling_of_gguf_files() {
    let rope = |builder: &GgufBuilder| gguf(builder).unwrap().ropes.remove(0);
    let linear =
        tiny_gguf("llama").str("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(rope(&linear).scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(
        rope(&tiny_gguf("llama").f32("llama.rope.scale_linear", 2.0)).scaling,
        RopeScaling::Linear { factor: 2.0 }
    );
    let ones: Vec<u8> = [1f32, 2.0, 4.0, 8.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let factors = tiny_gguf("llama").tensor("rope_freqs.weight", &[4], 0, &ones);
    assert_eq!(rope(&factors).scaling, RopeScaling::Factors(vec![1.0, 2.0, 4.0, 8.0]));
    assert!(!gguf(&factors).unwrap().canonical_bytes().is_empty());
    let tenths: Vec<u8> = [1.1f32, 1.2].iter().flat_map(|v| v.to_le_bytes()).collect();
    let long = tiny_gguf("phi3")
        .u32("phi3.rope.dimension_count", 4)
        .u32("phi3.rope.scaling.original_context_length", 32)
        .tensor("rope_factors_long.weight", &[2], 0, &tenths)
        .tensor("rope_factors_short.weight", &[2], 0, &tenths);
    let expected = |attention_factor| RopeScaling::LongRope {
        short: vec![1.1, 1.2],
        long: vec![1.1, 1.2],
        original_context: 32,
        attention_factor,
    };
    assert_eq!(rope(&long).scaling, expected((1.0 + 4f64.ln() / 32f64.ln()).sqrt()));
    assert_eq!(rope(&long.clone().f32("phi3.rope.scaling.attn_factor", 1.19)).scaling, expected(1.19));
    assert_eq!(rope(&long).rotary_dim, 4);
}

#[test]
fn bad_gguf_configurations_are_errors() {
    let unknown = gguf(&GgufBuilder::new().str("general.architecture", "rwkv")).unwrap_err().to_string();
    let families = "llama, mistral, mistral3, qwen2, qwen3, qwen3moe, phi3, gemma3, smollm3, olmo2";
    assert!(unknown.contains("'rwkv'") && unknown.ends_with(families), "{unknown}");
    let missing = gguf(&GgufBuilder::new().str("general.architecture", "llama")).unwrap_err().to_string();
    assert!(missing.contains("'llama.embedding_length' is missing"), "{missing}");
    let tiny = || tiny_gguf("llama");
    let yarn = || {
        let of_kind = tiny().str("llama.rope.scaling.type", "yarn").f32("llama.rope.scaling.factor", 4.0);
        of_kind.u32("llama.rope.scaling.original_context_length", 128)
    };
    for (builder, part) in [
        (tiny().u32("llama.attention.key_length", 0), "the head dimension is 0"),
        (tiny().u32("llama.attention.value_length", 4), "keys of 8 and values of 4"),
        (tiny().u32("llama.rope.dimension_count", 7), "the rotary dimension is 7"),
        (tiny().u32("llama.rope.dimension_count", 10), "the rotary dimension is 10"),
        (tiny().str("llama.rope.scaling.type", "dynamic"), "'dynamic' is not supported; supported are none"),
        (tiny().str("llama.rope.scaling.type", "yarn"), "'yarn' has no factor"),
        (yarn().u32("llama.rope.dimension_count", u32::MAX - 1), "the rotary dimension is 4294967294"),
        (yarn().counting("rope_freqs.weight", &[4]), "'yarn' with the file's factor tensors"),
        (yarn().f32("llama.rope.scaling.yarn_attn_factor", 1.2), "yarn_attn_factor' is 1.2, and only 1 is"),
        (yarn().f32("llama.rope.scaling.yarn_log_multiplier", 0.1), "yarn_log_multiplier' is 0.1"),
        (
            tiny_gguf("mistral3").f32("mistral3.attention.temperature_scale", 0.1),
            "'mistral3.attention.temperature_scale' scales queries",
        ),
        (tiny_gguf("olmo2").u32("olmo2.attention.sliding_window", 16), "(OLMo 3), which is not supported"),
        (
            tiny_gguf("qwen3moe").u32("qwen3moe.expert_count", 2).u32("qwen3moe.expert_used_count", 1),
            "expert_feed_forward_length' is missing",
        ),
        (tiny().counting("rope_freqs.weight", &[3]), "3 rope factors, expected 4"),
        (tiny().counting("rope_freqs.weight", &[4]), "a rope factor is 0"),
        (tiny().counting("rope_freqs.weight", &[2, 2]), "not one dimension"),
        (tiny().str("llama.attention.sliding_window", "x"), "'llama.attention.sliding_window' should hold"),
        (tiny().i32s("tokenizer.ggml.eot_token_id", &[1]), "'tokenizer.ggml.eot_token_id' should hold"),
    ] {
        let message = gguf(&builder).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("test.gguf"), "{part}: {message}");
    }
}

#[test]
fn canonical_bytes_tell_configurations_apart() {
    let config = hf(json!({})).unwrap();
    let mut other = config.clone();
    other.ropes[0].theta += 1.0;
    assert_ne!(config.canonical_bytes(), other.canonical_bytes());
    for scaling in [
        RopeScaling::None,
        RopeScaling::Linear { factor: 2.0 },
        RopeScaling::Llama3 { factor: 2.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8 },
        RopeScaling::LongRope {
            short: vec![1.0],
            long: vec![2.0],
            original_context: 8,
            attention_factor: 1.0,
        },
        RopeScaling::Yarn { divisors: vec![1.0, 2.0], attention_factor: 1.0, context: 8 },
        RopeScaling::Factors(vec![1.0, 2.0]),
    ] {
        other.ropes[0].scaling = scaling;
        assert_ne!(config.canonical_bytes(), other.canonical_bytes());
    }
    let text = String::from_utf8(config.canonical_bytes()).unwrap();
    assert!(text.starts_with(r#"{"family":"llama","hidden":64,"#), "{text}");
}

#[test]
fn tiny_models_of_every_family_are_read() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny");
    let mut seen = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("config.json").is_file() {
            continue;
        }
        let files = ModelFiles::open(&path).unwrap();
        let (config, weights) = (files.config(), files.weights());
        eprintln!("{}: {}", path.display(), String::from_utf8(config.canonical_bytes()).unwrap());
        weights.matrix_of("model.embed_tokens.weight", config.vocab, config.hidden).unwrap();
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        for layer in 0..config.num_layers() {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            if weights.has(&name("self_attn.qkv_proj.weight")) {
                weights.matrix_of(&name("self_attn.qkv_proj.weight"), q + 2 * kv, config.hidden).unwrap();
            } else {
                weights.matrix_of(&name("self_attn.q_proj.weight"), q, config.hidden).unwrap();
                weights.matrix_of(&name("self_attn.k_proj.weight"), kv, config.hidden).unwrap();
            }
            let down = |part: &str, width| weights.matrix_of(&name(part), config.hidden, width).map(drop);
            match config.layers[layer].experts {
                None => down("mlp.down_proj.weight", config.intermediate).unwrap(),
                Some(spec) => {
                    for expert in 0..spec.count {
                        down(&format!("mlp.experts.{expert}.down_proj.weight"), spec.intermediate).unwrap();
                    }
                }
            }
        }
        assert_eq!(config.tied_embeddings, !weights.has("lm_head.weight"));
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} tiny models");
}

#[test]
fn real_gguf_files_resolve() {
    if let Some(path) = real_model("SmolLM2-135M-Instruct.Q4_1.gguf") {
        let config = ModelFiles::open(path).unwrap().config().clone();
        assert_eq!((config.num_layers(), config.hidden, config.heads, config.kv_heads), (30, 576, 9, 3));
        assert_eq!(
            (config.head_dim, config.vocab, config.context, config.ropes[0].theta),
            (64, 49152, 8192, 1e5)
        );
        assert!(config.tied_embeddings && !config.attention_bias);
        assert!(config.eos.contains(&2), "{:?}", config.eos);
    }
    if let Some(path) = real_model("gemma-3-270m-q4_k_m.gguf") {
        let config = ModelFiles::open(path).unwrap().config().clone();
        assert_eq!((config.num_layers(), config.hidden, config.heads, config.kv_heads), (18, 640, 4, 1));
        assert_eq!(
            (config.head_dim, config.context, config.layers[0].attention_scale),
            (256, 32768, 1.0 / 16.0)
        );
        let whole = |layer: &LayerSpec| layer.window.is_none() && config.ropes[layer.rope].theta == 1e6;
        let local = |layer: &LayerSpec| layer.window == Some(512) && config.ropes[layer.rope].theta == 1e4;
        for (index, layer) in config.layers.iter().enumerate() {
            assert!(if index % 6 == 5 { whole(layer) } else { local(layer) }, "{index}: {layer:?}");
        }
        assert_eq!(config.embedding_scale, 640f32.sqrt());
    }
    if let Some(path) = real_model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") {
        let config = ModelFiles::open(path).unwrap().config().clone();
        assert_eq!((config.num_layers(), config.hidden, config.heads, config.kv_heads), (24, 896, 14, 2));
        assert_eq!((config.head_dim, config.context, config.ropes[0].theta), (64, 32768, 1e6));
        assert!(!config.tied_embeddings && config.attention_bias);
        assert!([151_643, 151_645].iter().all(|id| config.eos.contains(id)), "{:?}", config.eos);
    }
}
