//! Logits against Hugging Face transformers in f32 (files made by `tools/golden.py`).

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use refrain_kernels::{Dtype, Precision};
use refrain_kv::{LayerCache, RopeTables};
use refrain_model::{Decoder, ModelFiles};
use serde::Deserialize;

use super::{SMOLLM2, device, max_difference, real, real_with_any_isa, tiny};
use crate::argmax;
use crate::cache::{FullCache, SequenceCache};
use crate::decode::{DecodeWorkspace, extend};
use crate::forward::{ActiveTokens, Flow, LayerAttention, attend_rows, forward};

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    positions: Vec<usize>,
    logits: Vec<Vec<f32>>,
    argmax: Vec<u32>,
    greedy: Vec<u32>,
    #[serde(default = "one")]
    vocab_stride: usize,
}

fn one() -> usize {
    1
}

#[derive(Deserialize)]
struct Tiny {
    cases: Vec<Case>,
}

fn read<T: serde::de::DeserializeOwned>(path: &std::path::Path) -> T {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn check(name: &str, decoder: &Arc<Decoder>, case: &Case) {
    let total = case.ids.len() + case.greedy.len();
    let tables = decoder.rope_tables(total, total);
    let mut cache = FullCache::empty(&**decoder.device(), decoder.shape(), Dtype::F32, total, tables.clone());
    let vocab = decoder.config().vocab;
    let logits = whole(decoder, &mut cache, &case.ids, &tables);
    for ((position, expected), best) in case.positions.iter().zip(&case.logits).zip(&case.argmax) {
        let row = &logits[position * vocab..(position + 1) * vocab];
        let strided: Vec<f32> = row.iter().step_by(case.vocab_stride).copied().collect();
        let error = max_difference(&strided, expected);
        assert!(error <= 1e-3, "{name}: position {position}: max-abs error {error}");
        assert_eq!(argmax(row), *best, "{name}: position {position}");
    }
    let mut cache = SequenceCache::new(decoder, Box::new(cache), case.ids.len(), Arc::default());
    let mut workspace = DecodeWorkspace::default();
    let mut token = argmax(&logits[logits.len() - vocab..]);
    for (step, expected) in case.greedy.iter().enumerate() {
        assert_eq!(token, *expected, "{name}: greedy token {step}");
        token = argmax(extend(&mut [&mut cache], &[token], &mut workspace).unwrap());
    }
}

/// Causal attention of a whole prompt, whose keys and values go into a cache.
struct Causal<'a>(&'a mut FullCache);

impl LayerAttention for Causal<'_> {
    fn prepare(&mut self, layer: usize, tokens: &mut ActiveTokens) -> crate::Result<Flow> {
        let (capacity, shape) = (self.0.kv.capacity(), tokens.decoder.shape());
        let mut cache = LayerCache::new(tokens.device(), shape, Dtype::F32, capacity);
        let rows = 0..tokens.positions.len();
        tokens.rope_and_write_kv(layer, &mut cache, rows);
        tokens.set_causal_mask(layer);
        self.0.kv.install(layer, cache);
        Ok(Flow::Attend)
    }

    fn attend(&mut self, layer: usize, tokens: &mut ActiveTokens, rows: Range<usize>) {
        attend_rows(layer, tokens, (self.0.kv.layer(layer), self.0.kv.capacity()), rows, None);
    }
}

/// Logits of every token of a prompt.
fn whole(decoder: &Arc<Decoder>, cache: &mut FullCache, ids: &[u32], tables: &RopeTables) -> Vec<f32> {
    let mut tokens = ActiveTokens::new(decoder, Dtype::F32);
    tokens.embed(ids, (0..ids.len() as u32).collect(), tables).unwrap();
    for layer in 0..decoder.config().num_layers() {
        forward(layer, &mut tokens, &mut Causal(cache)).unwrap();
    }
    tokens.logits().to_vec()
}

fn decoder(path: &std::path::Path) -> Arc<Decoder> {
    let files = ModelFiles::open(path).unwrap();
    Arc::new(Decoder::load(files, &device(), Precision::F32, None, |_, _| ()).unwrap())
}

#[test]
fn every_family_agrees_with_transformers() {
    let mut seen = 0;
    for entry in std::fs::read_dir(tiny("")).unwrap() {
        let folder = entry.unwrap().path();
        let golden: Tiny = read(&folder.join("golden.json"));
        let decoder = decoder(&folder);
        for (i, case) in golden.cases.iter().enumerate() {
            check(&format!("{} case {i}", folder.file_name().unwrap().display()), &decoder, case);
        }
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} tiny models");
}

fn real_model(file: &str, path: Option<PathBuf>) {
    let Some(path) = path else { return };
    let golden = tiny("../real").join(file).with_extension("json");
    check(file, &decoder(&path), &read::<Case>(&golden));
}

#[test]
fn smollm2_agrees_with_transformers() {
    real_model(SMOLLM2, real_with_any_isa(SMOLLM2));
}

#[test]
fn qwen2_5_coder_agrees_with_transformers() {
    let file = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf";
    real_model(file, real(file));
}

/// Windows on five of six layers, two ropes, norms on both sides of a branch, and weights of 4, 5, 6 and 8 bits.
#[test]
fn gemma_3_agrees_with_transformers() {
    let file = "gemma-3-270m-q4_k_m.gguf";
    real_model(file, real(file));
}
