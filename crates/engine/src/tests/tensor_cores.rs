//! Models whose heads are as wide as tensor cores want them, on emulated GPU threads: the other tests' models have narrower ones, which other
//! kernels compute.

use std::path::Path;
use std::sync::Arc;

use refrain_cuda::{CudaDevice, Emulated};
use refrain_eviction::POLICIES;
use refrain_fusion::{CacheBlend, FusionMethod, Pie, Vanilla};
use refrain_kernels::conformance::random;
use refrain_kernels::{Cpu, Device, Dtype, Precision};
use refrain_store::Store;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{prefill_with, random_prompt, small, tiny};
use crate::{Engine, Settings};

const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 192;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const VOCAB: usize = 320;

/// Writes a Llama of random weights with heads of this width, and the tokenizer of the tiny Llama.
fn write_llama(head_dim: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(tiny("llama").join(file), folder.path().join(file)).unwrap();
    }
    let text = std::fs::read_to_string(tiny("llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["head_dim"] = json!(head_dim);
    config["hidden_size"] = json!(HIDDEN);
    config["intermediate_size"] = json!(INTERMEDIATE);
    config["num_hidden_layers"] = json!(LAYERS);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let (q, kv) = (HEADS * head_dim, KV_HEADS * head_dim);
        for (part, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![q, HIDDEN]),
            ("self_attn.k_proj", vec![kv, HIDDEN]),
            ("self_attn.v_proj", vec![kv, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, q]),
            ("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]),
        ] {
            shapes.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    write_weights(&folder.path().join("model.safetensors"), &shapes);
    folder
}

/// Writes random matrices, and vectors around 1, in `f32`.
fn write_weights(path: &Path, shapes: &[(String, Vec<usize>)]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (seed, (name, shape)) in (1..).zip(shapes) {
        let from = data.len();
        let scale = (3.0 / *shape.last().unwrap() as f32).sqrt();
        for x in random(shape.iter().product(), seed) {
            let x = if shape.len() == 1 { 1.0 + 0.1 * x } else { scale * x };
            data.extend(x.to_le_bytes());
        }
        header.insert(
            name.clone(),
            json!({"dtype": "F32", "shape": shape, "data_offsets": [from, data.len()]}),
        );
    }
    let header = Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(path, bytes).unwrap();
}

/// Logits after a prompt and after each of three further tokens.
fn logits(engine: &Engine, method: &(impl FusionMethod + Clone + 'static), eviction: &str) -> Vec<Vec<f32>> {
    let prompt = random_prompt(engine, 8, &[70, 60], 20, 5);
    let eviction = POLICIES.parse(eviction).unwrap();
    let mut prefilled = prefill_with(engine, &prompt, method, &eviction, prompt.len() + 4).unwrap();
    let first = prefilled.logits.clone();
    [vec![first], [7, 30, 11].map(|token| prefilled.extend(token)).to_vec()].concat()
}

#[test]
fn wide_heads_give_the_logits_of_the_cpu() {
    for (head_dim, kv, precision) in [
        (64, Dtype::F16, Precision::Bf16),
        (64, Dtype::Bf16, Precision::Q8),
        (80, Dtype::F16, Precision::Bf16),
        (128, Dtype::Bf16, Precision::Bf16),
    ] {
        let folder = write_llama(head_dim);
        let open = |device: Arc<dyn Device>| {
            let settings = Settings { precision: Some(precision), kv, keep_packed: false, ..small() };
            let store = Store::in_memory(1 << 30);
            Engine::open_on(&device, folder.path(), store, settings, |_, _| ()).unwrap()
        };
        let cpu = open(Arc::new(Cpu::new(0).unwrap()));
        let gpu = open(Arc::new(CudaDevice::new(Emulated::new(2), 0).unwrap()));
        let all = CacheBlend { ratio: 1.0, charge: 0.0, ..CacheBlend::default() };
        let both = |what: &str, logits: &dyn Fn(&Engine) -> Vec<Vec<f32>>| {
            for (step, (gpu, cpu)) in logits(&gpu).iter().zip(&logits(&cpu)).enumerate() {
                let most = cpu.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let apart = gpu.iter().zip(cpu).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
                // Both round activations, queries and probabilities to `bf16`, in other places.
                assert!(apart <= 0.03 * most, "{head_dim}, {kv}, {what}, step {step}: {apart} of {most}");
            }
        };
        both("vanilla", &|engine| logits(engine, &Vanilla, "full"));
        both("pie", &|engine| logits(engine, &Pie, "full"));
        both("cache_blend", &|engine| logits(engine, &all, "full"));
        both("h2o", &|engine| logits(engine, &Vanilla, "h2o:capacity=200"));
    }
}

/// A GPU whose blocks have too little shared memory for a model's heads says so when the model is opened, and not at the first prompt.
#[test]
fn heads_that_no_block_has_room_for_are_refused_when_the_model_is_opened() {
    let device: Arc<dyn Device> = Arc::new(CudaDevice::new(Emulated::new(1), 1).unwrap());
    let open = |head_dim| {
        let model = write_llama(head_dim);
        Engine::open_on(&device, model.path(), Store::in_memory(1 << 20), small(), |_, _| ()).map(drop)
    };
    assert!(open(256).is_ok());
    let error = open(258).unwrap_err().to_string();
    assert!(error.ends_with("the model's heads have 258 elements, and it attends with up to 257"), "{error}");
}
