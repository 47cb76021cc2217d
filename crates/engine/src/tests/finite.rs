//! Models whose weights are damaged: no answer is made of NaNs, and no chunk of them is stored.

use std::path::Path;

use refrain_fusion::{Pie, Vanilla};
use refrain_kernels::Precision;
use refrain_store::{Scope, Store};

use super::{device, prefill, random_prompt, shared, small, tiny};
use crate::{Engine, Error, GenerateRequest, Prompt, Sampling, Settings};

/// A copy of the tiny Llama in `folder` that has NaNs in the last `rows` rows of a tensor, all of them of 64 values.
fn damage(folder: &Path, tensor: &str, rows: usize) {
    for file in std::fs::read_dir(tiny("llama")).unwrap() {
        let file = file.unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        if file.path().extension().is_some_and(|extension| extension == "safetensors") {
            let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
            if let Some(end) = header[tensor]["data_offsets"][1].as_u64() {
                let end = data + end as usize;
                bytes[end - rows * 64 * 2..end].fill(0xff);
            }
        }
        std::fs::write(folder.join(file.file_name()), bytes).unwrap();
    }
}

fn open(folder: &Path) -> Engine {
    open_with(folder, small())
}

fn open_with(folder: &Path, settings: Settings) -> Engine {
    Engine::open_on(&device(), folder, Store::in_memory(1 << 24), settings, |_, _| ()).unwrap()
}

fn answer(engine: &Engine, prompt: &Prompt, sampling: Sampling) -> Result<Vec<u32>, Error> {
    let request = GenerateRequest::new(shared(Vanilla), Sampling { max_tokens: 4, ..sampling });
    engine.answer(prompt, &request, |_| true).map(|answer| answer.tokens)
}

#[test]
fn logits_that_are_no_numbers_end_an_answer() {
    // The whole output projection, and the row of one token.
    for rows in [320, 1] {
        let folder = tempfile::tempdir().unwrap();
        damage(folder.path(), "lm_head.weight", rows);
        let engine = open(folder.path());
        let prompt = random_prompt(&engine, 5, &[30], 9, 1);
        let samplings = [
            Sampling::default(),
            Sampling { temperature: 1.0, ..Sampling::default() },
            Sampling { logprobs: Some(2), min_tokens: 2, ..Sampling::default() },
        ];
        for sampling in samplings {
            let error = answer(&engine, &prompt, sampling).unwrap_err();
            assert!(matches!(error, Error::NotFinite { what: "logits", .. }), "{error}");
            let (error, path) = (error.to_string(), folder.path().display().to_string());
            assert!(error.contains(&path) && error.contains("fetch the model anew"), "{error}");
        }
    }
}

#[test]
fn chunks_that_are_no_numbers_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    damage(folder.path(), "model.layers.1.mlp.down_proj.weight", 64);
    let engine = open(folder.path());
    let prompt = random_prompt(&engine, 5, &[30, 20], 9, 1);
    let error = engine.ingest_prompt(&prompt, &[shared(Pie)]).unwrap_err();
    assert!(matches!(error, Error::NotFinite { what: "keys and values", .. }), "{error}");
    assert!(engine.store().list(Scope::All).unwrap().chunks.is_empty());
    // Values of the last layer reach no later layer.
    let folder = tempfile::tempdir().unwrap();
    damage(folder.path(), "model.layers.2.self_attn.v_proj.weight", 1);
    let engine = open(folder.path());
    assert!(engine.ingest_prompt(&prompt, &[shared(Pie)]).is_err());
    assert!(engine.store().list(Scope::All).unwrap().chunks.is_empty());
}

#[test]
fn a_comparison_with_logits_that_are_no_numbers_fails() {
    let sound =
        Engine::open_on(&device(), &tiny("llama"), Store::in_memory(1 << 24), small(), |_, _| ()).unwrap();
    let prompt = random_prompt(&sound, 5, &[30], 9, 1);
    let sampling = Sampling { max_tokens: 4, ..Sampling::default() };
    let reference = |engine: &Engine| engine.reference(&prompt, &sampling, 4, false);
    let exact = reference(&sound).unwrap();
    let folder = tempfile::tempdir().unwrap();
    damage(folder.path(), "lm_head.weight", 1);
    let engine = open(folder.path());
    assert!(prefill(&engine, &prompt, &Vanilla, prompt.len()).logits.iter().any(|logit| logit.is_nan()));
    assert!(matches!(reference(&engine), Err(Error::NotFinite { .. })));
    let requests = [(&engine, GenerateRequest::new(shared(Vanilla), sampling.clone()))];
    let answers = Engine::answers_beside(&prompt, &requests, &exact).unwrap();
    assert!(matches!(answers[0], Err(Error::NotFinite { .. })));
}

/// Blocks of eight bits have a scale for the numbers of a block, which a NaN must not leave out.
#[test]
fn weights_of_eight_bits_keep_what_is_no_number() {
    let q8 = Settings { precision: Some(Precision::Q8), ..small() };
    for (tensor, rows) in
        [("lm_head.weight", 1), ("model.layers.2.mlp.down_proj.weight", 1), ("model.norm.weight", 1)]
    {
        let folder = tempfile::tempdir().unwrap();
        damage(folder.path(), tensor, rows);
        let engine = open_with(folder.path(), q8.clone());
        let prompt = random_prompt(&engine, 5, &[30], 9, 1);
        let error = answer(&engine, &prompt, Sampling::default()).unwrap_err();
        assert!(matches!(error, Error::NotFinite { .. }), "{tensor}: {error}");
    }
}
