//! StreamingLLM with `positions=reindex`: keys are rotated by their places in the cache.

use refrain_fusion::Vanilla;
use refrain_kernels::Dtype;

use super::oracles::{forced, forced_token};
use super::policy;
use crate::Prompt;
use crate::tests::{exact, max_difference, prefill, random_prompt, tiny_engine_with};

/// Keys and values of a single layer depend on their tokens alone, so that places are all that tells the held tokens from a prompt.
#[test]
fn a_step_sees_the_held_tokens_as_if_they_were_all() {
    let layers = ("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 1");
    let engine = tiny_engine_with("llama", layers, exact(Dtype::F32));
    let vocab = engine.decoder().config().vocab;
    let prompt = random_prompt(&engine, 5, &[], 60, 3);
    let mut ids = prompt.ids();
    ids.extend((0..12).map(|step| forced_token(step, vocab)));
    let mut held = Vec::new();
    let logits = forced(&engine, &prompt, &Vanilla, &policy("streaming_llm:capacity=20"), 12, |prefilled| {
        let mut positions = prefilled.evicting().unwrap().positions(0, 0).to_vec();
        positions.sort_unstable();
        held.push(positions);
    });
    // The prompt's own logits see all of it.
    for (step, (logits, held)) in logits.chunks_exact(vocab).zip(&held).enumerate().skip(1) {
        let question: Vec<u32> = held.iter().map(|position| ids[*position as usize]).collect();
        assert_eq!(question.len(), 21);
        let alone = Prompt { question, ..Prompt::default() };
        let fresh = prefill(&engine, &alone, &Vanilla, alone.len()).logits;
        let difference = max_difference(logits, &fresh);
        assert!(difference <= 1e-4, "step {step}: {difference}");
    }
}

#[test]
fn sinks_turn_by_the_frequencies_of_their_layer() {
    // A window beyond the slots leaves the choice to the policy.
    let window = ("\"sliding_window\": 16", "\"sliding_window\": 200");
    let engine = tiny_engine_with("gemma3", window, exact(Dtype::F32));
    let config = engine.decoder().config();
    let prompt = random_prompt(&engine, 5, &[], 60, 3);
    let ropes = engine.decoder().ropes(prompt.len());
    assert_ne!(ropes.layer(0), ropes.layer(2));
    let mut sinks: Vec<Vec<Vec<f32>>> = Vec::new();
    forced(&engine, &prompt, &Vanilla, &policy("streaming_llm:capacity=20"), 3, |prefilled| {
        let bounded = prefilled.evicting().unwrap();
        assert_eq!(bounded.positions(0, 0)[..4], [0, 1, 2, 3]);
        let keys = |layer| bounded.keys(layer, 0)[..4 * config.head_dim].to_vec();
        sinks.push((0..config.num_layers()).map(keys).collect());
    });
    // The last token, at 67, has place 20.
    for (layer, (before, after)) in sinks[0].iter().zip(&sinks[3]).enumerate() {
        let mut turned = before.clone();
        ropes.layer(layer).rotate(&mut turned, config.head_dim, 67 - 20);
        assert!(max_difference(&turned, after) <= 1e-4, "layer {layer}");
    }
}
