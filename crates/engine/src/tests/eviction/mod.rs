//! Eviction: oracles 9 to 12 on real models, random shapes against a direct evaluation, and kvpress's own choices.

mod after_prompt;
mod given;
mod kvpress;
mod oracles;
mod plain;
mod random;
mod reindex;

use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::Vanilla;
use refrain_kernels::Dtype;

use super::{random_prompt, shared, small, tiny_engine};
use crate::{GenerateRequest, Sampling};

/// A policy as a user asks for it.
fn policy(spec: &str) -> Eviction {
    POLICIES.parse(spec).unwrap()
}

/// Two layers of three have a window of 16 tokens: a bounded cache holds no more there, and each event counts the bytes of every layer.
#[test]
fn held_bytes_are_those_of_every_layer() {
    let engine = tiny_engine("gemma3", small());
    let prompt = random_prompt(&engine, 20, &[70], 30, 5);
    let layer = engine.decoder().shape().token_bytes(Dtype::F16) / 3;
    let last = |spec: &str| {
        let sampling = Sampling { max_tokens: 20, ..Sampling::default() };
        let request = GenerateRequest::new(shared(Vanilla), sampling);
        let request = GenerateRequest { eviction: policy(spec), ignore_eos: true, ..request };
        let mut last = (0, 0);
        let answer = engine.answer(&prompt, &request, |event| {
            last = (event.retained, event.kv_bytes_held / layer);
            true
        });
        let stats = answer.unwrap().stats;
        assert_eq!(last, (stats.retained_tokens, stats.kv_bytes_held / layer), "{spec}");
        last
    };
    let tokens = prompt.len() + 19;
    assert_eq!(last("full"), (tokens, 3 * tokens));
    let (retained, held) = last("h2o:capacity=40");
    assert!(retained == 41 && (41 + 2 * 16..=41 + 2 * 17).contains(&held), "{retained} and {held}");
}
